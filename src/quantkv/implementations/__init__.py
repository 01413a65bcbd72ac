"""What can serve a call, by the names that users type: hopper, prefill, triton, cpu, reference. The one place that chooses.

Each is a folder with a module for reads, `attend`, and one for writes, `write` (prefill only reads), which have

    SUPPORTED                   the names of the options that it supports (reads only); any other that is given is refused here
    refusal(call) -> str | None why it cannot serve the call, in words; it reads no tensor of an accelerator
    run(call)                   serves it, into the call's tensors
    prepare(call) -> launch     works out once what calls of the same shape share; `launch(call)` serves each of them
    LATENTS                     of reads: whether it reads latents (`Format.latent`); any other refuses them here
    withheld(call) -> str | None  why "auto" passes over it though it serves the call; without it, never
    OWN_ROWS                    of reads: "read" where it takes a call's own rows. Else they are one more segment: "copied" into pages,
                                "dense" (one after the other) or, without it, read where they lie
    at_once(call) -> bool       of writes: whether it serves a call's mean and copies too. Without it, they are calls of their own
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

from .. import deprecated
from ..assumed import assumed
from ..calls import AttendCall, WriteCall
from ..format import Format
from .own import Lowered

NAMES = ("hopper", "prefill", "triton", "cpu", "reference")  # the order in which "auto" tries them
ON_CPU = ("cpu", "reference")
READS_ONLY = ("prefill",)
Call = AttendCall | WriteCall


def kind(call: Call) -> str:
    """ "attend" or "write": the module that serves it."""
    return "attend" if isinstance(call, AttendCall) else "write"


def module(name: str, kind: str) -> ModuleType:
    """The module of an implementation that serves calls of this kind."""
    return importlib.import_module(f"{__name__}.{name}.{kind}")


def refusal(name: str, call: Call) -> str | None:
    """Why an implementation cannot serve `call`, in words; None where it can."""
    if isinstance(call, WriteCall) and name in READS_ONLY:
        return f"writes are by {', '.join(n for n in NAMES if n not in READS_ONLY)}"
    try:
        serving = module(name, kind(call))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("quantkv"):
            raise
        return f"the package {error.name} is missing: pip install 'quantkv[{name}]'"
    if isinstance(call, AttendCall):
        if call.segments[0].fmt.latent and not reads_latents(name):
            return f"latents ({call.segments[0].fmt.name}): not supported here; supported by {', '.join(filter(reads_latents, NAMES))}"
        missing = sorted(set(call.options.given()) - serving.SUPPORTED)
        if missing:
            willing = [n for n in NAMES if n != name and _supports(n, missing)]
            return f"{', '.join(missing)}: not supported here; supported by {', '.join(willing) or 'no other'}"
    return serving.refusal(plain(name, call))


def _lowered(name: str, call: Call) -> Lowered | None:
    """The call over segments alone, for an implementation that knows nothing else; None where it takes the call as it is."""
    if isinstance(call, WriteCall) or call.own is None:
        return None
    how = getattr(module(name, "attend"), "OWN_ROWS", None)
    return None if how == "read" else Lowered(call, how == "copied", how == "dense")


def plain(name: str, call: Call) -> Call:
    """The call as an implementation is asked about it, of which the numbers of own rows are not worked out."""
    lowered = _lowered(name, call)
    return call if lowered is None else call.over(lowered.segments(call))


def prepare(name: str, call: Call) -> Callable[[Call], None]:
    """What serves every call of the shape of `call`, by an implementation that does not refuse it."""
    serving, lowered = module(name, kind(call)), _lowered(name, call)
    if lowered is None:
        return serving.prepare(call)
    lowered.store(call.own, lambda write: prepare(resolve(write)[0], write))
    launch = serving.prepare(call.over(lowered.segments(call)))
    return lambda call: launch(lowered.of(call))


def run(name: str, call: Call) -> None:
    """Serve `call` by an implementation that does not refuse it."""
    lowered = _lowered(name, call)
    if lowered is not None:
        lowered.store(call.own, lambda write: partial(run, resolve(write)[0]))
        call = lowered.of(call)
    module(name, kind(call)).run(call)


def writes_at_once(name: str, call: WriteCall) -> bool:
    """Whether an implementation that does not refuse `call` serves its mean and its copies together with it."""
    return getattr(module(name, "write"), "at_once", lambda call: False)(call)


def _supports(name: str, options: list[str]) -> bool:
    try:
        return module(name, "attend").SUPPORTED.issuperset(options)
    except ModuleNotFoundError:
        return False


def reads_latents(name: str) -> bool:
    """Whether an implementation has code that attends over latents."""
    try:
        return getattr(module(name, "attend"), "LATENTS", False)
    except ModuleNotFoundError:
        return False


def resolve(call: Call, implementation: str = "auto") -> tuple[str, dict[str, str]]:
    """The implementation that serves `call`, and why each one that was tried before it does not.

    "auto" tries all of them on a GPU, and elsewhere those that run on a CPU. ValueError where an explicit choice cannot serve the call:
    it never becomes another one.
    """
    implementation = deprecated.implementation(implementation)
    if implementation not in ("auto", *NAMES):
        raise ValueError(f"implementation={implementation!r}: one of auto, {', '.join(NAMES)}")
    device = call.q.device if isinstance(call, AttendCall) else call.key.device
    refusals = {}
    for name in (implementation,) if implementation != "auto" else NAMES if device.type == "cuda" or assumed() else ON_CPU:
        reason = refusal(name, call)
        if reason is None and implementation == "auto":
            reason = getattr(module(name, kind(call)), "withheld", lambda call: None)(call)
        if reason is None:
            return name, refusals
        refusals[name] = reason
    raise ValueError(f"implementation={implementation!r}: {'; '.join(refusals.values())}")


def scratch_bytes(num_tokens: int, num_heads: int, sizes: tuple[int, int], itemsize: int, eight_bit: bool = False) -> int:
    """Most bytes that attention of `num_tokens` queries takes on a GPU beside its tensors. sizes: of a key and a value. eight_bit: whether
    prompts have 8-bit scores."""
    return module("prefill", "attend").most_scratch_bytes(num_tokens, num_heads, sizes, itemsize, eight_bit)


def can_serve(name: str, fmt: Format, kind: str) -> bool | None:
    """Whether an implementation has code that reads ("attend") or writes ("write") a format, on the right device and at head sizes that it
    takes. None where that cannot be told without a package that is missing."""
    if fmt.latent and kind == "attend" and not reads_latents(name):
        return False
    if name == "prefill":
        return kind == "attend"
    if name == "hopper":
        uses = ("written", "written") if kind == "write" else ("latents", "rotated") if fmt.latent else ("keys", "values")
        return all(codec.hopper is not None and getattr(codec.hopper(), use) for codec, use in zip((fmt.k, fmt.v), uses))
    if name == "triton":
        try:
            backends = [codec.triton and codec.triton() for codec in (fmt.k, fmt.v)]
        except ModuleNotFoundError:
            return None
        return all(backend is not None and (kind == "attend" or backend.encode is not None) for backend in backends)
    if name == "cpu":
        maps, backends = {fmt.k.map, fmt.v.map}, [codec.cpu and codec.cpu() for codec in (fmt.k, fmt.v)]
        if kind == "attend" or None in backends:
            return None not in backends
        return maps <= {"none", "hadamard", "rht"} and (maps != {"none"} or any(backend.encode for backend in backends))
    return True
