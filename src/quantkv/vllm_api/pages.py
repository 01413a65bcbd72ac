"""vLLM's own KV cache tensors as pages, to copy from and to, and to attend to where they are."""

from __future__ import annotations

import torch

from .. import checks
from ..format import Format
from ..maps import LayerMaps
from ..page_views import PageViews
from .modes import KVQuantMode
from .registry import get_backend
from .reshape import FP8, dtype_format
from .turboquant import PRESETS, TurboQuantConfig
from .views import row_bytes, scale_value, slot_sides


def page_views(
    kv_cache: torch.Tensor,
    kv_cache_dtype: str,
    head_size: int,
    head_size_v: int | None = None,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    maps: LayerMaps | None = None,
) -> PageViews:
    """The pages of one layer of vLLM's, of one of the cache types that this project has the bytes of. Nothing is copied.

    kv_cache: the layer's tensor as vLLM shapes it, `[num_blocks, HK, block_size, content]`, of any dtype and in any of its layouts: only
        the content is one run. It is `K codes | K metadata | V codes | V metadata` of one token and head.
    kv_cache_dtype: "auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head",
        "int4_per_token_head" or a TurboQuant preset.
    head_size_v: that of keys if None. k_scale, v_scale: the layer's, for the three fp8 types with one scale for a tensor.
    maps: of the layer, those that the format asks for if None.
    ValueError naming the argument for anything else, and where a slot has not the bytes that the type needs.
    """
    checks.tensor("kv_cache", kv_cache, (None, None, None, None), (kv_cache.dtype,) if isinstance(kv_cache, torch.Tensor) else ())
    head_sizes = (head_size, head_size if head_size_v is None else head_size_v)
    if kv_cache_dtype in PRESETS:
        if head_sizes[0] != head_sizes[1]:
            checks.refuse("head_size_v", head_size_v, f"a slot of {kv_cache_dtype} holds a key and a value of one head size, {head_size}")
        config = TurboQuantConfig.from_cache_dtype(kv_cache_dtype, head_size)
        fmt, content = config.format, config.slot_size_aligned
    else:
        fmt = _format(kv_cache_dtype, kv_cache)
        content = row_bytes(fmt.k, head_sizes[0]) + row_bytes(fmt.v, head_sizes[1])
    if kv_cache.stride(3) != 1:
        checks.refuse("kv_cache.stride()", kv_cache.stride(), "the content of a token and head is one run")
    slots = kv_cache.view(torch.uint8).transpose(1, 2)
    if slots.shape[3] != content:
        checks.refuse("kv_cache.shape[3]", kv_cache.shape[3], f"{kv_cache_dtype} of head sizes {head_sizes} has {content} bytes")
    scales = tuple(
        scale_value(name, scale) if kv_cache_dtype in FP8 else 1.0 for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    )
    sides = slot_sides(slots, fmt, head_sizes, row_bytes(fmt.k, head_sizes[0]), scales)
    return PageViews(*sides, fmt, LayerMaps.of(fmt, *head_sizes, kv_cache.device) if maps is None else maps)


def _format(kv_cache_dtype: str, kv_cache: torch.Tensor) -> Format:
    mode = KVQuantMode.__members__.get(kv_cache_dtype.upper())
    if mode is not None and mode.is_per_token_head:
        return get_backend(mode).format
    return dtype_format(kv_cache_dtype, kv_cache)
