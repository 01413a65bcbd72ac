"""What calls would compile on a GPU that need not be there: nothing is compiled, and nothing runs."""

import inspect

import torch
import triton.language as tl

from quantkv import copies, implementations
from quantkv.implementations import batches, own
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper import prefill
from quantkv.implementations.hopper import write as hopper_write
from quantkv.implementations.hopper.decode import warps, wgmma
from quantkv.implementations.hopper.host import launch as hopper_launch
from quantkv.implementations.hopper.write.round import RoundConfig
from quantkv.implementations.prefill import attend as prefill_attend
from quantkv.implementations.prefill import backends, flash3
from quantkv.implementations.prefill import eight_bit as eight_bit_rows
from quantkv.implementations.prefill.triton_steps import TritonSteps
from quantkv.implementations.triton import copies as triton_copies
from quantkv.implementations.triton import launch
from quantkv.under_way import wanted

TARGETS = {"H100": launch.Target(90, "tf32x3", 132, 228 << 10), "A100": launch.Target(80, "tf32x3", 108, 164 << 10)}


def specialized(value):
    """What Triton compiles for, of an argument that is no constant: of a tensor its dtype and whether its address is a multiple of 16,
    of an integer whether it is 1, or a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(specialized, value))
    if isinstance(value, int):
        return 1 if value == 1 else (value % 16 == 0, value >= 1 << 31)
    return value if value is None else type(value)


class Gpu:
    """Stands in for a GPU while a test runs, for all calls. found: what they compiled, (kernel, what it is compiled for). ahead: what was
    compiled, or collected to be, before a call of it."""

    def __init__(self, monkeypatch, name):
        self.found, self.ahead, self.hopper, target = set(), set(), name == "H100", TARGETS[name]
        patches = [
            (implementations, "resolve", self._resolve),
            (batches, "cut", lambda call: [batches.Run(call)] if call.batch.lengths is None else batches.runs_of(call)),
            (launch.Target, "of", classmethod(lambda cls, device: target)),
            (launch.Launch, "__call__", lambda made: self._launched(made)),
            (launch.Launch, "again", lambda made, *given: False),
            (own, "has_launches", lambda device: True),
            (prefill_attend, "_steps", lambda triton: TritonSteps),
            (backends, "fitting", lambda *rows, **needs: ["hopper" if self.hopper else "flash"]),
            (backends, "attend", self._attended),
            (copies, "kernels_of", lambda device, columns: triton_copies),
            (hopper_launch, "elsewhere", lambda device: None),
            (hopper_launch, "multiprocessors", lambda index: target.processors),
            (hopper_launch, "device_index", lambda device: 0),
        ]
        patches += [(module, "run", lambda call, m=module: self._now.update(m.compiled_for(call))) for module in (hopper, hopper_write)]
        configs = warps.DecodeConfig, wgmma.WgmmaConfig, hopper_write.WriteConfig, RoundConfig
        patches += [(c, "cubin", lambda config: self.ahead.add(config)) for c in configs]
        for owner, what, value in patches:
            monkeypatch.setattr(owner, what, value)

    @property
    def _now(self):
        return self.found if wanted() is None else self.ahead

    def _resolve(self, call, implementation="auto"):
        names = implementations.NAMES[not self.hopper : 3]
        return next(name for name in names if implementations.refusal(name, call) is None), {}

    def _launched(self, made):
        kernel, parameters = made.kernel, inspect.signature(made.kernel.fn).parameters
        key = [tuple(made.options.items())]
        for name, value in made.arguments.items():
            plain = type if name in (kernel.kwargs.get("do_not_specialize") or ()) else specialized
            key.append(value if parameters[name].annotation is tl.constexpr else plain(value))
        self._now.add((kernel.fn.__name__, tuple(key)))

    def _attended(self, backend, q, k, v, scale, round, ends, softcap, out, sinks, kept, eight_bit):
        group, left = q.shape[1] // k.shape[0], round.mask[0]
        of = (q.shape[2], v.shape[2], group, q.dtype == torch.bfloat16, left >= 0, 0 <= left < prefill.NARROW, softcap > 0, eight_bit)
        self._now.add(("prompt", of))
        if eight_bit:
            block = prefill.config_of(q, k, v, round.mask, softcap, True).keys
            eight_bit_rows.rounded(q, k, round, flash3.bounds(round, q.device) if ends is None else ends, block, kept)
        rows = out if out is not None else q.new_empty(*q.shape[:2], v.shape[2])
        return rows, q.new_empty(q.shape[:2], dtype=torch.float32)
