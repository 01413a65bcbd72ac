"""From the reference system's arguments to what the ops take: caches as strided sides, small tensors as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import checks, ops
from ..calls import Side, WriteCall
from ..format import Codec, Format
from ..maps import LayerMaps

FP8_DTYPES = {torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}


class ContractError(AssertionError, ValueError):
    """What the reference system asserts: can be caught as either, and is raised under `python -O` too."""


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


_item = ReadOnce(lambda t: float(t.reshape(-1)[0]))


def scale_value(argument: str, scale: float | torch.Tensor) -> float:
    """A per-tensor scale as a number: a float, a tensor of one element, or one such expanded to any shape."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 and (any(scale.stride()) or not scale.numel()):
            checks.refuse(f"{argument}.shape", tuple(scale.shape), "one scale for the whole tensor is needed")
        base = scale._base  # an expanded view is a new object at every call
        scale = _item(scale if base is None or base.numel() != 1 else base)
    if not isinstance(scale, (int, float)) or not scale > 0:
        checks.refuse(argument, scale, "a positive number, or a tensor of one, is needed")
    return float(scale)


def cache_side(
    argument: str, cache: torch.Tensor, codec: Codec, head_size: int, scale_cache: torch.Tensor | None = None, scale: float = 1.0
) -> Side:
    """The side that `cache [num_blocks, block_size, HK, D / P]` is, any strides; one-byte codes may also come as uint8.

    scale_cache: float32 `[num_blocks, block_size, HK]` for a codec with metadata, None for one without.
    """
    codec.check_head_size(head_size)
    width = codec.row.code_bytes(head_size) // codec.code_dtype.itemsize
    dtypes = (codec.code_dtype, torch.uint8) if codec.code_dtype.itemsize == 1 else (codec.code_dtype,)
    checks.tensor(argument, cache, (None, None, None, width), dtypes, cache.device)
    if not codec.row.meta:
        if scale_cache is not None:
            checks.refuse(f"scale cache of {argument}", tuple(scale_cache.shape), f"{codec.name} has none: None is needed")
        return Side(cache.view(codec.code_dtype), None, scale)
    if scale_cache is None:
        raise ContractError(f"{argument} in {codec.name} requires k_scale_cache / v_scale_cache")
    checks.tensor(f"scale cache of {argument}", scale_cache, tuple(cache.shape[:3]), (torch.float32,), cache.device)
    return Side(cache.view(codec.code_dtype), scale_cache.unsqueeze(-1), scale)


def store(
    key: torch.Tensor, value: torch.Tensor, k: Side, v: Side, fmt: Format, slot_mapping: torch.Tensor, maps: LayerMaps | None = None
) -> None:
    """Write `key [N, HK, D]` and `value [N, HK, D_V]` to `slot_mapping [T]`; rows beyond T are an engine's padding."""
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
