"""Backends of the modes with a scale for each (token, head), and INT4's stand-alone entry points."""

from __future__ import annotations

import torch

from ..formats import get_format
from .base import QuantKVBackend
from .modes import KVQuantMode
from .registry import register
from .views import ContractError, cache_side, need_tensors, store


class PerTokenHeadBackend(QuantKVBackend):
    """A backend whose mode is one of the project's formats; a subclass names both."""

    needs_scale_caches = True

    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale_cache: torch.Tensor | None = None,
        v_scale_cache: torch.Tensor | None = None,
    ) -> None:
        """Write `key [T, HK, D]` and `value [T, HK, D_V]` to slots `slot_mapping [T]`; a negative slot skips its token.

        key_cache, value_cache: `[num_blocks, block_size, HK, packed head size]`; k_scale_cache, v_scale_cache: float32
        `[num_blocks, block_size, HK]`, required. Any strides.
        """
        if k_scale_cache is None or v_scale_cache is None:
            raise ContractError(f"{self.mode.name} requires k_scale_cache / v_scale_cache")
        need_tensors(key=key, value=value)
        k = cache_side("key_cache", key_cache, self.format.k, key.shape[-1], k_scale_cache)
        v = cache_side("value_cache", value_cache, self.format.v, value.shape[-1], v_scale_cache)
        store(key, value, k, v, self.format, slot_mapping)


class Int8PerTokenHeadBackend(PerTokenHeadBackend):
    """8-bit integers."""

    mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    format = get_format("int8")


class Fp8PerTokenHeadBackend(PerTokenHeadBackend):
    """8-bit floats, e4m3."""

    mode = KVQuantMode.FP8_PER_TOKEN_HEAD
    format = get_format("fp8_token")


class Int4PerTokenHeadBackend(PerTokenHeadBackend):
    """4 bits, asymmetric, after a randomized Hadamard transform; the scale carries the zero point."""

    mode = KVQuantMode.INT4_PER_TOKEN_HEAD
    packing_factor = 2
    format = get_format("int4")


class Int2PerTokenHeadBackend(PerTokenHeadBackend):
    """2-bit Lloyd-Max codes after a Hadamard transform."""

    mode = KVQuantMode.INT2_PER_TOKEN_HEAD
    packing_factor = 4
    format = get_format("int2")


INT4 = Int4PerTokenHeadBackend()
for _backend in (Int8PerTokenHeadBackend(), Fp8PerTokenHeadBackend(), INT4, Int2PerTokenHeadBackend()):
    register(_backend)

reshape_and_cache_int4 = INT4.reshape_and_cache
unified_attention_int4 = INT4.unified_attention
