"""Which backend serves which mode. A backend's module is imported when its mode is first asked for."""

from __future__ import annotations

import importlib
from enum import Enum
from typing import TYPE_CHECKING

from .modes import KVQuantMode, mode_name

if TYPE_CHECKING:
    from .base import QuantKVBackend

MODULES = {mode: "quantkv.vllm_api.per_token_head" for mode in KVQuantMode if mode.is_per_token_head}
_REGISTRY: dict[str, QuantKVBackend] = {}  # by the mode's name: the numbers of two enums may clash


def register(backend: QuantKVBackend) -> None:
    """Let `backend` serve `backend.mode`, in place of what served it. The mode may be a member of an engine's own enum."""
    _REGISTRY[mode_name(backend.mode)] = backend


def _module(name: str) -> str | None:
    return MODULES.get(KVQuantMode.__members__.get(name))


def get_backend(mode: Enum | int) -> QuantKVBackend:
    """The backend of `mode`, a member of this package's `KVQuantMode` or of an engine's, which is read by its name; imported on first use.

    ValueError for NONE, which needs none, and for a mode without a module; RuntimeError where its module registers nothing.
    """
    name = mode_name(mode)
    if name == KVQuantMode.NONE.name:
        raise ValueError("KVQuantMode.NONE is the unquantized path and has no backend")
    if name not in _REGISTRY:
        module = _module(name)
        if module is None:
            allowed = ", ".join(m.name for m in KVQuantMode if has_backend(m))
            own = "; TurboQuant has entry points of its own, triton_turboquant_*" if name.startswith("TURBOQUANT") else ""
            raise ValueError(f"No QuantKVBackend module configured for {name}: allowed: {allowed}, or what `register` was given{own}")
        importlib.import_module(module)
        if name not in _REGISTRY:
            raise RuntimeError(f"Module {module} did not register a backend for {name}: it must call `register` on import")
    return _REGISTRY[name]


def has_backend(mode: Enum | int) -> bool:
    """Whether `get_backend` has, or can import, a backend of `mode`."""
    name = mode_name(mode)
    return name in _REGISTRY or _module(name) is not None
