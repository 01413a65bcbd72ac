"""From vLLM's arguments to what the ops take: caches as strided sides, small tensors as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import checks, ops
from ..calls import PagedTensor, WriteCall
from ..format import Codec, Format
from ..maps import LayerMaps

FP8_DTYPES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}


class ContractError(AssertionError, ValueError):
    """What vLLM asserts: can be caught as either, and is raised under `python -O` too."""


class ReadOnce:
    """`read(tensor, *args)`, remembered until the tensor is written to.

    Reading a tensor on an accelerator makes the host wait and cannot be captured in a graph; engines pass the same scale and
    table tensors at every step. Inference tensors count no writes, so they are read each time.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read, self._known = read, WeakTensorKeyDictionary()

    def __call__(self, t: torch.Tensor, *args: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.is_inference():
            return self._read(t, *args)
        known = self._known.setdefault(t, {})
        if args not in known or known[args][0] != t._version:
            known[args] = t._version, self._read(t, *args)
        return known[args][1]


_bounds = ReadOnce(lambda t: tuple(float(x) for x in t.aminmax()))


def scale_value(argument: str, scale: float | torch.Tensor) -> float:
    """A per-tensor scale as a number: a positive number, or a tensor of any shape that holds one and no other."""
    found = scale_values(argument, scale)
    if isinstance(found, torch.Tensor):
        low, high = _bounds(found)
        checks.refuse(argument, f"{low}..{high}", "one scale for the whole tensor is needed")
    return found


def scale_values(argument: str, scale: float | torch.Tensor, shape: tuple[int, ...] | None = None) -> float | torch.Tensor:
    """`scale_value`, or the tensor itself where it holds several positive numbers. shape: its only shape then; None: any."""
    low = scale
    if isinstance(scale, torch.Tensor):
        if scale.dtype == torch.bool or scale.dtype.is_complex or not scale.numel():
            checks.refuse(argument, f"{tuple(scale.shape)} of {scale.dtype}", "a positive number, or a tensor of one, is needed")
        base = scale._base  # an expanded view is a new object at every call, what it is a view of is not
        low, high = _bounds(scale if base is None or base.numel() != 1 else base)
        if low != high:
            if not 0 < low < high < math.inf:
                checks.refuse(argument, f"{low}..{high}", "positive numbers are needed")
            if shape is not None and tuple(scale.shape) != shape:
                checks.refuse(
                    f"{argument}.shape", tuple(scale.shape), f"one number, or {shape}, one for each sequence and kv head, is needed"
                )
            return scale
    if not isinstance(low, Real) or not 0 < low < math.inf:
        checks.refuse(argument, low, "a positive number, or a tensor of one, is needed")
    return float(low)


def need_tensors(**arguments: object) -> None:
    """ValueError naming the first argument that is no tensor: lists are not taken for them."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            checks.refuse(name, type(value).__name__, "a tensor is needed")


def need_tensors_or_none(**arguments: object) -> None:
    """`need_tensors` of those that are not None."""
    need_tensors(**{name: value for name, value in arguments.items() if value is not None})


def cache_side(
    argument: str, cache: torch.Tensor, codec: Codec, head_size: int, scale_cache: torch.Tensor | None = None, scale: float = 1.0
) -> PagedTensor:
    """The side that `cache [num_blocks, block_size, HK, D / P]` is, any strides; one-byte codes may also come as uint8.

    scale_cache: float32 `[num_blocks, block_size, HK]` for a codec with metadata, None for one without. The rows of such a cache
    may be longer by one float32: vLLM keeps the scale there and passes rows with it.
    """
    need_tensors(**{argument: cache})
    need_tensors_or_none(**{f"scale cache of {argument}": scale_cache})
    codec.check_head_size(head_size)
    width = codec.row.code_bytes(head_size) // codec.code_dtype.itemsize
    dtypes = (codec.code_dtype, torch.uint8) if codec.code_dtype.itemsize == 1 else (codec.code_dtype,)
    if codec.row.meta and cache.ndim == 4 and cache.shape[3] == width + torch.float32.itemsize // cache.element_size():
        cache = cache[..., :width]
    checks.tensor(argument, cache, (None, None, None, width), dtypes, cache.device)
    if not codec.row.meta:
        if scale_cache is not None:
            checks.refuse(f"scale cache of {argument}", tuple(scale_cache.shape), f"{codec.name} has none: None is needed")
        return PagedTensor(cache.view(codec.code_dtype), None, scale)
    if scale_cache is None:
        raise ContractError(f"{argument} in {codec.name} requires k_scale_cache / v_scale_cache")
    checks.tensor(f"scale cache of {argument}", scale_cache, tuple(cache.shape[:3]), (torch.float32,), cache.device)
    return PagedTensor(cache.view(codec.code_dtype), scale_cache.unsqueeze(-1), scale)


def row_bytes(codec: Codec, head_size: int) -> int:
    """Bytes of a row's codes with its metadata."""
    return codec.row.code_bytes(head_size) + codec.row.meta_bytes


def slot_sides(
    slots: torch.Tensor, fmt: Format, head_sizes: tuple[int, int], value_offset: int, scales: tuple[float, float] = (1.0, 1.0)
) -> tuple[PagedTensor, PagedTensor]:
    """The sides that combined slots are: `slots [num_blocks, block_size, HK, bytes]` uint8, any strides between slots.

    A slot is a key's codes and their metadata from byte 0, a value's from byte `value_offset`. head_sizes: of keys, of values.
    """
    checks.tensor("kv_cache", slots, (None, None, None, None), (torch.uint8,), slots.device)
    codecs, starts = (fmt.k, fmt.v), (0, value_offset)
    for codec, size in zip(codecs, head_sizes):
        codec.check_head_size(size)
    needed = value_offset + row_bytes(fmt.v, head_sizes[1])
    if slots.shape[3] < needed:
        checks.refuse("kv_cache.shape[3]", slots.shape[3], f"a slot needs {needed} bytes")
    dtypes = [(codec.code_dtype, getattr(torch, codec.row.meta[0]) if codec.row.meta else torch.uint8) for codec in codecs]
    unit = max(dtype.itemsize for pair in dtypes for dtype in pair)
    fields = [start + codec.row.code_bytes(size) for codec, start, size in zip(codecs, starts, head_sizes)]
    if slots.stride(3) != 1 or any(n % unit for n in (*slots.stride()[:3], slots.storage_offset())):
        checks.refuse("kv_cache.stride()", slots.stride(), f"slots of consecutive bytes at multiples of {unit} bytes are needed")
    for codec, start, field, (_, dtype) in zip(codecs, starts, fields, dtypes):
        if start % unit or field % dtype.itemsize:
            checks.refuse(
                "head_size", head_sizes, f"metadata of {codec.name} would lie at byte {field} of a slot, not at a multiple of {unit}"
            )

    def side(codec: Codec, start: int, field: int, scale: float, dtype: torch.dtype) -> PagedTensor:
        meta = slots[..., field : field + codec.row.meta_bytes].view(dtype) if codec.row.meta else None
        return PagedTensor(slots[..., start:field].view(codec.code_dtype), meta, scale)

    return tuple(side(c, *at, scale, pair[1]) for c, at, scale, pair in zip(codecs, zip(starts, fields), scales, dtypes))


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    k: PagedTensor,
    v: PagedTensor,
    fmt: Format,
    slot_mapping: torch.Tensor,
    maps: LayerMaps | None = None,
) -> None:
    """Write `key [N, HK, D]` and `value [N, HK, D_V]` to `slot_mapping [T]`; rows beyond T are an engine's padding."""
    need_tensors(slot_mapping=slot_mapping)
    device, heads, tokens = k.codes.device, k.codes.shape[2], slot_mapping.shape[0]
    checks.tensor("key", key, (None, heads, None), checks.ROW_DTYPES, device)
    checks.tensor("value", value, (None, heads, None), (key.dtype,), device)
    checks.tensor("slot_mapping", slot_mapping, (None,), checks.INDEX_DTYPES, device)
    if min(key.shape[0], value.shape[0]) < tokens:
        checks.refuse("slot_mapping.shape", (tokens,), f"key and value have {key.shape[0]} and {value.shape[0]} rows")
    if k.codes.shape[:3] != v.codes.shape[:3]:
        checks.refuse("value_cache.shape", tuple(v.codes.shape), f"pages and heads as in key_cache, {tuple(k.codes.shape[:3])}")
    sizes = (fmt.k.head_size(k.codes), fmt.v.head_size(v.codes))
    maps = LayerMaps.of(fmt, *sizes, device) if maps is None else maps
    ops.write(WriteCall(key[:tokens], value[:tokens], k, v, fmt, slot_mapping, maps))
