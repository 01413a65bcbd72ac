"""vLLM's names, signatures, warnings and errors over the project's ops, for engines that call vLLM's quantized attention by those names.

Backends register themselves when `get_backend` first asks for their mode; importing this package imports none of them.
"""

import importlib
from typing import Any

from .attention import unified_attention, unified_attention_diffkv
from .base import QuantKVBackend
from .modes import KVQuantMode
from .registry import get_backend, has_backend, register
from .reshape import (
    triton_reshape_and_cache_flash,
    triton_reshape_and_cache_flash_diffkv,
    triton_reshape_and_cache_flash_per_token_head_quant,
)
from .transforms import fast_hadamard_transform, pack_int4_nibbles, single_rht, unpack_int4_nibbles
from .views import ContractError

_LAZY = {
    **dict.fromkeys(
        (
            "Fp8PerTokenHeadBackend",
            "Int2PerTokenHeadBackend",
            "Int4PerTokenHeadBackend",
            "Int8PerTokenHeadBackend",
            "reshape_and_cache_int4",
            "unified_attention_int4",
        ),
        "per_token_head",
    ),
    "page_views": "pages",
    **dict.fromkeys(("TurboQuantConfig", "get_centroids", "triton_turboquant_decode_attention", "triton_turboquant_store"), "turboquant"),
}
__all__ = [
    "ContractError",
    "KVQuantMode",
    "QuantKVBackend",
    "fast_hadamard_transform",
    "get_backend",
    "has_backend",
    "pack_int4_nibbles",
    "register",
    "single_rht",
    "triton_reshape_and_cache_flash",
    "triton_reshape_and_cache_flash_diffkv",
    "triton_reshape_and_cache_flash_per_token_head_quant",
    "unified_attention",
    "unified_attention_diffkv",
    "unpack_int4_nibbles",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
