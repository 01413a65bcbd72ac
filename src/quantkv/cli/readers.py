"""How a model reads a context through a policy's cache: its predictions, and what its layers keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from ..policy import Policy
from ..spec import CacheSpec


class Reader(Protocol):
    """How a policy's predictions come about. name: for tables.

    Called with model, tokens `[T]`, policy and how many of the last logits are needed (0: all): logits `[.., vocabulary]` and the geometry
    of the quantized layers by number.
    """

    name: str

    def __call__(self, model: Any, ids: torch.Tensor, policy: Policy, keep: int) -> tuple[torch.Tensor, dict[int, CacheSpec]]: ...


class TeacherForced:
    """One pass in which each query sees what a decoding step at its position would read. Where the last tokens alone count, those before
    them are a prompt, which reads its own rows as given."""

    name = "teacher-forced"

    def __call__(self, model: Any, ids: torch.Tensor, policy: Policy, keep: int) -> tuple[torch.Tensor, dict[int, CacheSpec]]:
        from ..integrations.transformers.teacher_forced import teacher_forced

        with teacher_forced(model, policy, len(ids) - keep + 1 if keep else 0) as fake:
            return last_logits(model, ids, keep, use_cache=False), fake.specs


@contextmanager
def quantized_attention(model: Any) -> Iterator[None]:
    """The model's attention reads quantized pages inside the block, and is its own again after it."""
    from quantkv.integrations.transformers import use_quantkv_attention

    own = model.config._attn_implementation
    use_quantkv_attention(model)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def quantized_cache(model: Any, policy: str | Policy, prompt: str | None = None) -> Any:
    """An empty quantized cache for the model, in a format or by a policy; "none" stands for the model's dtype. prompt: as of
    `QuantizedCache`."""
    from quantkv.integrations.transformers import QuantizedCache

    return QuantizedCache(model.config, policy, dtype=model.dtype, prompt=prompt)


class ThroughCache:
    """A `QuantizedCache`, filled by passes of `chunk` tokens, which read their own rows as given and pages before them. None: one pass,
    which reads what it stored: with rows as given nothing of the cache would be seen."""

    def __init__(
        self,
        chunk: int | None = None,
        make_cache: Callable[[Any, str | Policy], Any] | None = None,
        attention: Callable[[Any], AbstractContextManager[None]] = quantized_attention,
    ) -> None:
        self.chunk, self.attention = chunk, attention
        self.make_cache = make_cache or partial(quantized_cache, prompt="stored" if chunk is None else None)
        self.name = "through the cache" if chunk is None else f"through the cache, {chunk} tokens a pass"

    def __call__(self, model: Any, ids: torch.Tensor, policy: Policy, keep: int) -> tuple[torch.Tensor, dict[int, CacheSpec]]:
        cache, chunk = self.make_cache(model, policy), self.chunk or len(ids)
        with self.attention(model):
            if chunk >= len(ids):
                logits = last_logits(model, ids, keep, past_key_values=cache, use_cache=True)
            else:
                parts = [model(part[None], past_key_values=cache, use_cache=True).logits[0] for part in ids.split(chunk)]
                logits = torch.cat(parts)[-keep:]
        return logits, dict(zip(cache.quantized_layers, cache.specs))


def last_logits(model: Any, ids: torch.Tensor, keep: int, **options: Any) -> torch.Tensor:
    """The last `keep` logits (0: all) `[.., vocabulary]` of a pass over tokens `[T]`."""
    if keep and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = keep
    return model(ids[None], **options).logits[0][-keep:]
