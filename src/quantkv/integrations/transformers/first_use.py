"""The first use of a cache that takes statistics of its model.

A cache is made from a configuration, and what it has to measure is a model. So it waits for the first forward pass of a model with that
configuration (a hook of torch's on every module, gone after that pass began), which measures the model before its own first layer runs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from .cache import QuantizedCache

_waiting: weakref.WeakSet[QuantizedCache] = weakref.WeakSet()
_hook: Any = None


def wait_for(cache: QuantizedCache) -> None:
    """Let the first forward pass of the cache's model measure it."""
    global _hook
    _waiting.add(cache)
    if _hook is None:
        _hook = register_module_forward_pre_hook(_see)


def _see(module: torch.nn.Module, args: Any) -> None:
    global _hook
    if isinstance(module, PreTrainedModel):
        for cache in [cache for cache in _waiting if cache.is_of(module.config)]:
            _waiting.discard(cache)  # first: the pass that measures is one of the model too
            cache.take_statistics(module)
    if not _waiting and _hook is not None:
        _hook.remove()
        _hook = None
