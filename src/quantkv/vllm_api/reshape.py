"""vLLM's write entry points."""

from __future__ import annotations

import warnings
from enum import Enum

import torch

from .. import checks
from ..format import Format
from ..formats import get_format
from .attention import Scale
from .modes import KVQuantMode
from .registry import get_backend
from .views import ContractError, cache_side, need_tensors, scale_value, store

_AS_GIVEN = ("auto", "bfloat16", "float16", "half", "float32", "float")
FP8 = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2"}


def dtype_format(kv_cache_dtype: str, cache: torch.Tensor) -> Format:
    """The format of rows as they are, in `cache`'s dtype, or of 8-bit floats with a scale for the tensor. ContractError for other names."""
    if kv_cache_dtype in FP8:
        return get_format(FP8[kv_cache_dtype])
    if kv_cache_dtype not in _AS_GIVEN:
        raise ContractError(f"unsupported kv_cache_dtype (str), got {kv_cache_dtype}: one of {', '.join((*_AS_GIVEN, *FP8))}")
    if kv_cache_dtype != "auto" and cache.dtype != getattr(torch, kv_cache_dtype):
        checks.refuse("key_cache.dtype", cache.dtype, f"kv_cache_dtype={kv_cache_dtype!r}")
    return get_format("none", cache.dtype)


def triton_reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
    interleaved_v_pack_factor: int = 0,
) -> None:
    """Write `key [T, HK, D]` and `value [T, HK, D_V]` as they are, or as 8-bit floats of `x / scale`, into the paged cache.

    key_cache, value_cache: `[num_blocks, block_size, HK, D or D_V]`, any strides; 8-bit floats may come as uint8.
    slot_mapping: int `[T]`; a negative slot skips its token. Rows of key and value beyond T are padding.
    kv_cache_dtype: "auto" (the cache's dtype), "bfloat16", "float16" or "half", "float32" or "float", "fp8" or "fp8_e4m3", "fp8_e5m2".
    k_scale, v_scale: a number or a tensor of one. Read for 8-bit floats only; rows as given have no scale.
    interleaved_v_pack_factor: 0: vLLM's layouts of five dimensions, for AMD's kernels, are refused.
    """
    if interleaved_v_pack_factor != 0:
        checks.refuse("interleaved_v_pack_factor", interleaved_v_pack_factor, "0: values are not interleaved here")
    need_tensors(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    fmt = dtype_format(kv_cache_dtype, key_cache)
    scales = [scale_value(name, s) if kv_cache_dtype in FP8 else 1.0 for name, s in (("k_scale", k_scale), ("v_scale", v_scale))]
    k = cache_side("key_cache", key_cache, fmt.k, key.shape[-1], scale=scales[0])
    v = cache_side("value_cache", value_cache, fmt.v, value.shape[-1], scale=scales[1])
    store(key, value, k, v, fmt, slot_mapping)


def triton_reshape_and_cache_flash_diffkv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """`triton_reshape_and_cache_flash` into one combined cache `[num_blocks, block_size, HK, D + D_V]`, keys first."""
    need_tensors(key=key, value=value, kv_cache=kv_cache)
    head_size, head_size_v = key.shape[-1], value.shape[-1]
    checks.tensor("kv_cache", kv_cache, (None, None, None, head_size + head_size_v), (kv_cache.dtype,), kv_cache.device)
    triton_reshape_and_cache_flash(
        key, value, kv_cache[..., :head_size], kv_cache[..., head_size:], slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def triton_reshape_and_cache_flash_per_token_head_quant(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale_cache: torch.Tensor,
    v_scale_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_quant_mode: Enum | int | None = None,
) -> None:
    """Write through the backend of `kv_quant_mode`, a member of this package's KVQuantMode or of an engine's, with a scale for each
    (token, head).

    Without a mode, which is deprecated, a float8_e4m3fn cache means FP8 and any other INT8: INT4 and INT2 cannot be told apart.
    """
    need_tensors(key_cache=key_cache)
    if kv_quant_mode is None:
        warnings.warn(
            "triton_reshape_and_cache_flash_per_token_head_quant: calling without `kv_quant_mode` is deprecated and "
            "will be removed in a future release. Pass the KVQuantMode explicitly.",
            DeprecationWarning,
            stacklevel=2,
        )
        is_fp8 = key_cache.dtype == torch.float8_e4m3fn
        kv_quant_mode = KVQuantMode.FP8_PER_TOKEN_HEAD if is_fp8 else KVQuantMode.INT8_PER_TOKEN_HEAD
    get_backend(kv_quant_mode).reshape_and_cache(
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
    )
