"""From calls of attend and write to the Hopper kernels: what each can take, by one rule, and the call itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...calls import AttentionOptions, Segment, Side
from ...format import Codec, Format
from ...formats.turboquant import book_table, centroids
from ...maps import LayerMaps, LinearMap

# The project's codecs, by name, as the kernel calls them.
KEYS = {"int8": "int8", "fp8_token": "fp8", "tq8": "e4m3", "int4": "int4", "int2": "int2", "tq4": "codebook4", "tq3": "codebook3"}
VALUES = {"int8": "int8", "fp8_token": "fp8", "int4": "int4", "int2": "int2", "u4": "affine4", "u3": "affine3"}
WRITTEN = KEYS | VALUES | {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "bf16": "bf16", "fp16": "fp16"}
T = TypeVar("T")
UNSUPPORTED_OPTIONS = ("alibi_slopes", "qq_bias", "prefix_ranges", "output_scale", "key_start", "key_range")


@cache
def _missing() -> str | None:
    """Why no kernel can be compiled here."""
    absent = [
        name
        for name in ("cuda.core", "cuda.bindings")
        if importlib.util.find_spec(name.split(".")[0]) is None or importlib.util.find_spec(name) is None
    ]
    return f"the package {absent[0]} is missing: pip install 'quantkv[hopper]'" if absent else None


def _elsewhere(device: torch.device) -> str | None:
    """Why nothing can run on this device; None on a Hopper GPU."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"tensors are on {device}: a Hopper GPU is needed"
    return _missing()


def refusal(
    q: torch.Tensor,
    segments: Sequence[Segment],
    out: torch.Tensor,
    *,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    options: AttentionOptions,
    max_query_len: int | None,
    batch_invariant: bool,
) -> str | None:
    """Why the kernel cannot serve this call; None where it can. Looks at shapes and types only, never at what tensors hold."""
    if reason := _elsewhere(q.device):
        return reason
    if len(segments) != 1:
        return f"{len(segments)} segments: one is needed"
    segment = segments[0]
    fmt, k, v = segment.fmt, segment.k, segment.v
    if fmt.k.name not in KEYS or fmt.v.name not in VALUES:
        return f"format {fmt.name}: keys are one of {', '.join(KEYS)}, values one of {', '.join(VALUES)}"
    if k.scale != 1.0 or v.scale != 1.0:
        return f"per-tensor scales {k.scale}, {v.scale}: 1 is needed"
    given = [name for name in UNSUPPORTED_OPTIONS if getattr(options, name) is not None]
    if given or options.causal is not True or options.chunk_lookback >= 0:
        return f"options {given or 'causal, chunk_lookback'}: causal with window, softcap and sinks only"
    if batch_invariant:
        return "batch_invariant: the keys are cut by the whole batch"
    if max_query_len is None:
        return "max_query_len=None: 1 to 8 queries a sequence must be promised"
    pages = _pages(k, v)
    if pages is None:
        return "the cache is no buffer of page records [num_blocks, HK, page_bytes]"
    if out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        return f"out {tuple(out.shape)} of {out.dtype}: contiguous, of q's shape and dtype"
    for name, t in (("block_table", segment.block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        if t.dtype != torch.int32 or not t.is_contiguous():
            return f"{name} of {t.dtype}, strides {t.stride()}: contiguous int32"
    from . import decode

    return decode.unsupported(q, pages, KEYS[fmt.k.name], VALUES[fmt.v.name], k.codes.shape[1], max_query_len)


def _pages(k: Side, v: Side) -> torch.Tensor | None:
    """The buffer of page records that both sides are views of, or None."""
    base = k.base
    if base is None or base is not v.base or base.ndim != 3 or base.dtype != torch.uint8:
        return None
    offset = base.data_ptr()
    for t in (k.codes, v.codes, k.meta, v.meta):
        if t is None:
            continue
        size, width = t.shape[1], t.shape[3]
        row = width * t.element_size()
        wanted = (base.stride(0), row, base.stride(1), t.element_size())
        steps = [(have * t.element_size(), want) for n, have, want in zip(t.shape, t.stride(), wanted) if n > 1]
        if t.data_ptr() != offset or any(have != want for have, want in steps):  # an axis of one has any stride
            return None
        offset += size * row
    return base


# A map's inverse, offset or signs -> what kernels read: for keys of a codec, for values (None), for a write (the factor).
_MAPS = WeakTensorKeyDictionary()


def _kept(tensor: torch.Tensor, use: str | float | None, make: Callable[[], T]) -> T:
    """What `make` returned the first time, as long as the tensor lives."""
    known = _MAPS.setdefault(tensor, {})
    if use not in known:
        known[use] = make()
    return known[use]


def _map(side: LinearMap | None, key: str | None):
    from .decode import Map

    if side is None:
        return None
    signs, factor = side.operands.signs, side.operands.inverse_factor
    if signs is not None:
        return _kept(side.inverse, key, lambda: Map.hadamard(signs, factor))
    return _kept(side.inverse, key, lambda: Map.matrix(side.inverse if key is None else side.inverse.mT, key))


def _offsets(side: LinearMap | None, key: str):
    from .decode import Offsets

    if side is None or side.offset is None:
        return None
    table = side.operands.mapped_offset
    return _kept(table, key, lambda: Offsets.of(table, key))


@cache
def _codebook(name: str, head_size: int, device: torch.device) -> torch.Tensor | None:
    return centroids(int(name[-1]), head_size).to(device) if name in ("tq3", "tq4") else None


def attend(
    q: torch.Tensor,
    segment: Segment,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    options: AttentionOptions,
    max_query_len: int,
) -> None:
    """`ops.attend` for what `refusal` lets through, into out and lse. The first call of a shape compiles its kernel."""
    from . import decode

    name, key = segment.fmt.k.name, KEYS[segment.fmt.k.name]
    sinks = None if options.sinks is None else options.sinks.float()
    decode.decode(
        q,
        segment.k.base,
        segment.block_table,
        seq_lens,
        key=key,
        value=VALUES[segment.fmt.v.name],
        block_size=segment.k.codes.shape[1],
        scale=scale,
        cu_queries=cu_seqlens_q,
        queries=max_query_len,
        window=options.window,
        softcap=options.softcap,
        sinks=sinks,
        key_map=_map(segment.maps.k, key),
        value_map=_map(segment.maps.v, None),
        key_offset=_offsets(segment.maps.k, key),
        codebook=_codebook(name, q.shape[2], q.device),
        out=out,
        lse=lse,
    )


# ---- write


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    k: Side,
    v: Side,
    fmt: Format,
    slot_mapping: torch.Tensor,
    maps: LayerMaps,
    positions: torch.Tensor | None = None,
) -> str | None:
    """`ops.write` where the kernel can serve it; else why not, in words, and nothing is done. The first call of a shape compiles."""
    if reason := _elsewhere(key.device):
        return reason
    if fmt.k.name not in WRITTEN or fmt.v.name not in WRITTEN:
        return f"format {fmt.name}: codecs are {', '.join(WRITTEN)}"
    pages = _pages(k, v)
    if pages is None:
        return "the cache is no buffer of page records [num_blocks, HK, page_bytes]"
    from . import write

    codecs, block_size = (WRITTEN[fmt.k.name], WRITTEN[fmt.v.name]), k.codes.shape[1]
    if reason := write.unsupported(key, value, pages, slot_mapping, *codecs, block_size, positions):
        return reason
    key_map, value_map = (None if m is None else _hadamard(m) for m in (maps.k, maps.v))
    if (key_map is None, value_map is None) != (maps.k is None, maps.v is None):
        return "maps: a Hadamard matrix of the head size, or none"
    write.write(
        key,
        value,
        pages,
        slot_mapping,
        *codecs,
        block_size,
        key_map=key_map,
        value_map=value_map,
        key_scale=k.scale,
        value_scale=v.scale,
        key_offset=None if maps.k is None else maps.k.operands.mapped_offset,
        positions=positions,
        midpoints=_midpoints(fmt.k, key.shape[2]),
    )
    return None


def _hadamard(side: LinearMap):
    """The map as the write kernel takes it; None where it is no Hadamard matrix."""
    signs, factor = side.operands.signs, side.operands.forward_factor
    if signs is None or side.operands.forward.dtype != torch.bfloat16:
        return None
    from .write import Hadamard

    return _kept(signs, factor, lambda: Hadamard.of(factor, signs))


@cache
def _midpoints(codec: Codec, head_size: int) -> tuple[float, ...]:
    """Between the levels above zero of a codebook."""
    if codec.name not in ("tq3", "tq4"):
        return ()
    levels = 1 << codec.row.code_bits
    return tuple(book_table(codec.row.code_bits, head_size)[levels + levels // 2 :].tolist())
