"""write and attend on any device: calls go to the implementations, and are `torch.library` operators under torch.compile.

Nothing on the GPU path waits for the device, so both can be captured in a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import implementations
from .autocast import given_dtypes
from .calls import AttendCall, Batch, OwnRows, WriteCall
from .flat import flatten_cache, flatten_options, flatten_segments, unflatten_cache, unflatten_options, unflatten_segments
from .format import get_format
from .implementations import batches
from .implementations.gather import gather as gather
from .maps import LayerMaps

Launch = Callable[[AttendCall], None] | Callable[[WriteCall], None]


def write(call: WriteCall, implementation: str = "auto") -> None:
    """Serve `call`. implementation: "auto", "hopper", "triton", "cpu" or "reference"; ValueError where an explicit choice cannot run.

    On a GPU "auto" is the Hopper kernel where that serves the call, else Triton's; on a CPU the compiled kernels, else the reference.
    """
    if torch.compiler.is_compiling():
        tensors, factors = call.maps.flatten()
        cache, scales = flatten_cache(call.k, call.v), [call.k.scale, call.v.scale]
        rows = (call.key, call.value, call.slot_mapping, call.positions)
        _write_op(*cache, *rows, tensors, factors, call.fmt.name, scales, implementation)
    else:
        _serve(call, implementation)


def attend(call: AttendCall, implementation: str = "auto") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Serve `call`: its out, and its lse, filled.

    implementation: "auto", "hopper", "prefill", "triton", "cpu" or "reference"; ValueError where an explicit choice cannot run.
    On a GPU "auto" tries the Hopper kernel, dense attention over a dequantized scratch, and Triton, which serves every call; on a CPU the
    compiled kernels, and the reference. Where the host knows the lengths, a batch of several kinds is cut into runs, and each is served
    by what suits it.
    """
    if torch.compiler.is_compiling():
        batch = call.batch
        bounds = [-1 if n is None else n for n in (batch.max_query_len, batch.max_seq_len)]
        tensors = (call.out, call.lse, call.q, batch.cu_seqlens_q, batch.seq_lens)
        arguments = (*flatten_segments(call.segments), *flatten_options(call.options))
        _attend_op(*tensors, *arguments, float(call.scale), bounds, list(call.own or ()), implementation)
    else:
        _serve(call, implementation)
    return call.out, call.lse


def prepare(call: AttendCall | WriteCall, implementation: str = "auto") -> Launch:
    """What serves every call of the shape of `call`: the implementation is chosen, and its grid, its scratch memory and its arguments are
    worked out, once. Calls of the same shape differ in nothing but what their tensors hold and where q, out, lse, key, value, the
    cache, its maps and the options' tensors lie; of batch and slot_mapping they have the same tensors."""
    if isinstance(call, WriteCall):
        return _prepare_write(call, implementation)
    runs = batches.cut(call) if implementation == "auto" else [batches.Run(call)]
    launches = []
    for run in runs:
        name, _ = implementations.resolve(run.call, implementation)
        launches.append((run, implementations.prepare(name, run.call)))
    if launches and launches[0][0].tokens is None:
        return launches[0][1]

    def launch(call: AttendCall) -> None:
        for run, part in launches:
            part(run.of(call))

    return launch


def _prepare_write(call: WriteCall, implementation: str) -> Launch:
    """`prepare` of a write; where its mean and its copies are not served together with it, one after the other."""
    name, _ = implementations.resolve(call, implementation)
    if (call.mean is None and call.copies is None) or implementations.writes_at_once(name, call):
        return implementations.prepare(name, call)
    launches = [implementations.prepare(implementations.resolve(part, implementation)[0], part) for part in call.one_by_one()]

    def launch(call: WriteCall) -> None:
        for part, own in zip(launches, call.one_by_one()):
            part(own)

    return launch


def _serve(call: AttendCall | WriteCall, implementation: str) -> None:
    parts = [run.call for run in batches.cut(call)] if isinstance(call, AttendCall) and implementation == "auto" else [call]
    for part in parts:
        name, _ = implementations.resolve(part, implementation)
        given_dtypes(part.q if isinstance(part, AttendCall) else part.key, implementations.run, name, part)


@torch.library.custom_op(
    "quantkv::write",
    mutates_args=("cache",),
    schema="(Tensor(a!)[] cache, int[] layout, Tensor key, Tensor value, Tensor slot_mapping, Tensor? positions, "
    "Tensor?[] maps, float[] factors, str fmt, float[] scales, str implementation) -> ()",
)
def _write_op(cache, layout, key, value, slot_mapping, positions, maps, factors, fmt, scales, implementation):
    fmt = get_format(fmt)
    sides = unflatten_cache(cache, layout, fmt, scales)
    _serve(WriteCall(key, value, *sides, fmt, slot_mapping, LayerMaps.unflatten(maps, factors), positions), implementation)


@_write_op.register_fake
def _(*args):
    return None


@torch.library.custom_op(
    "quantkv::attend",
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor cu_seqlens_q, Tensor seq_lens, Tensor[] caches, int[] layouts, "
    "Tensor?[] tables, Tensor?[] maps, float[] factors, str formats, Tensor?[] option_tensors, str options, float scale, "
    "int[] bounds, Tensor?[] own, str implementation) -> ()",
)
def _attend_op(
    out,
    lse,
    q,
    cu_seqlens_q,
    seq_lens,
    caches,
    layouts,
    tables,
    maps,
    factors,
    formats,
    option_tensors,
    options,
    scale,
    bounds,
    own,
    implementation,
):
    segments = unflatten_segments(caches, layouts, tables, maps, factors, formats)
    batch = Batch(cu_seqlens_q, seq_lens, *(None if n < 0 else n for n in bounds))
    rows = OwnRows(*own) if own else None
    _serve(AttendCall(q, segments, batch, scale, unflatten_options(option_tensors, options), out, lse, rows), implementation)


@_attend_op.register_fake
def _(*args):
    return None
