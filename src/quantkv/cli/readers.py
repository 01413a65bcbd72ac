"""How a model reads a context through a policy's cache: its predictions, and what its layers keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from ..policy import Policy
from ..spec import CacheSpec

OnPass = Callable[[], None]


class Reader(Protocol):
    """How a policy's predictions come about. name: for tables.

    Called with model, tokens `[S, T]` of sequences side by side, policy, how many of the first tokens are a prompt, how many of the last
    logits are needed (0: all), and what is called before each forward pass: logits `[S, .., vocabulary]`, and the geometry of the
    quantized layers by number.
    """

    name: str

    def __call__(
        self, model: Any, ids: torch.Tensor, policy: Policy, prompt: int = 0, keep: int = 0, on_pass: OnPass = lambda: None
    ) -> tuple[torch.Tensor, dict[int, CacheSpec]]: ...

    def passes(self, tokens: int, prompt: int) -> list[int]:
        """Tokens of each forward pass over a sequence of `tokens`."""
        ...


class TeacherForced:
    """One pass in which each query behind the prompt sees what a decoding step at its position would read. The prompt reads its own rows
    as given."""

    name = "teacher-forced"

    def __call__(
        self, model: Any, ids: torch.Tensor, policy: Policy, prompt: int = 0, keep: int = 0, on_pass: OnPass = lambda: None
    ) -> tuple[torch.Tensor, dict[int, CacheSpec]]:
        from ..model_analysis.teacher_forced import teacher_forced

        on_pass()
        with teacher_forced(model, policy, prompt) as fake:
            return last_logits(model, ids, keep, use_cache=False), fake.specs

    def passes(self, tokens: int, prompt: int) -> list[int]:
        """All at once."""
        return [tokens]


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
    """A `QuantizedCache` as a user fills it: the prompt in one pass, or in passes of `chunk` tokens, then one token at a time. A pass of
    the prompt reads its own rows as the policy says: as given, and pages only before them, unless that is changed."""

    def __init__(
        self,
        chunk: int | None = None,
        make_cache: Callable[[Any, str | Policy], Any] = quantized_cache,
        attention: Callable[[Any], AbstractContextManager[None]] = quantized_attention,
    ) -> None:
        self.chunk, self.attention, self.make_cache = chunk, attention, make_cache
        self.name = "through the cache" if chunk is None else f"through the cache, {chunk} tokens of a prompt a pass"

    def __call__(
        self, model: Any, ids: torch.Tensor, policy: Policy, prompt: int = 0, keep: int = 0, on_pass: OnPass = lambda: None
    ) -> tuple[torch.Tensor, dict[int, CacheSpec]]:
        cache, (count, tokens) = self.make_cache(model, policy), ids.shape
        logits, first = None, tokens - (keep or tokens)  # the first position whose logits are needed
        with self.attention(model):
            done = 0
            for part in ids.split(self.passes(tokens, prompt), 1):
                on_pass()
                done += part.shape[1]
                given = last_logits(model, part, min(max(done - first, 1), part.shape[1]), cache)
                if done > first:
                    logits = given.new_empty(count, tokens - first, given.shape[-1]) if logits is None else logits
                    logits[:, done - first - given.shape[1] : done - first] = given
        return logits, dict(zip(cache.quantized_layers, cache.specs))

    def passes(self, tokens: int, prompt: int) -> list[int]:
        """The prompt's, and one for each token after it."""
        chunk = self.chunk or max(prompt, 1)
        return [min(chunk, prompt - at) for at in range(0, prompt, chunk)] + [1] * (tokens - prompt)


def last_logits(model: Any, ids: torch.Tensor, keep: int, cache: Any = None, **options: Any) -> torch.Tensor:
    """The last `keep` logits (0: all) `[S, .., vocabulary]` of a pass over tokens `[S, T]`, which a cache takes."""
    from ..integrations.transformers_model import CACHE

    if cache is not None:
        options |= {CACHE: cache, "use_cache": True}
    if keep and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = keep
    return model(ids, **options).logits[:, -keep:]
