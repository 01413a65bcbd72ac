"""Which backend serves which mode. A backend's module is imported when its mode is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .modes import KVQuantMode

if TYPE_CHECKING:
    from .base import QuantKVBackend

MODULES = {mode: "quantkv.vllm_api.per_token_head" for mode in KVQuantMode if mode.is_per_token_head}
_REGISTRY: dict[KVQuantMode, QuantKVBackend] = {}


def register(backend: QuantKVBackend) -> None:
    """Let `backend` serve `backend.mode`, in place of what served it."""
    _REGISTRY[backend.mode] = backend


def get_backend(mode: KVQuantMode) -> QuantKVBackend:
    """The backend of `mode`, imported on first use.

    ValueError for NONE, which needs none, and for a mode without a module; RuntimeError where its module registers nothing.
    """
    if mode == KVQuantMode.NONE:
        raise ValueError("KVQuantMode.NONE is the unquantized path and has no backend")
    if mode not in _REGISTRY:
        name, module = KVQuantMode(mode).name, MODULES.get(mode)
        if module is None:
            allowed = ", ".join(m.name for m in KVQuantMode if has_backend(m))
            raise ValueError(f"No QuantKVBackend module configured for {name}: allowed: {allowed}, or what `register` was given")
        importlib.import_module(module)
        if mode not in _REGISTRY:
            raise RuntimeError(f"Module {module} did not register a backend for {name}: it must call `register` on import")
    return _REGISTRY[mode]


def has_backend(mode: KVQuantMode) -> bool:
    """Whether `get_backend` has, or can import, a backend of `mode`."""
    return mode in _REGISTRY or mode in MODULES
