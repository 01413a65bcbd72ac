"""Run text through a model with every cache format and compare its predictions with the exact cache's."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .metrics import Comparison


@dataclass
class FormatResult:
    """What one format costs and saves. Bytes and compression are the whole model's; `seconds` is its forward passes'."""

    format: str
    bits_per_element: float = 0.0
    bytes_per_token: float = 0.0
    compression: float = 0.0
    cache_bytes: int = 0
    seconds: float = 0.0
    comparison: Comparison = field(default_factory=Comparison)

    def to_dict(self) -> dict[str, Any]:
        c = self.comparison
        return {
            "format": self.format,
            "bits_per_element": self.bits_per_element,
            "bytes_per_token": self.bytes_per_token,
            "compression": self.compression,
            "cache_bytes": self.cache_bytes,
            "perplexity": c.perplexity,
            "perplexity_change": c.perplexity_change,
            "kl": c.kl,
            "same_top1": c.top1,
            "seconds": self.seconds,
        }


@dataclass
class Result:
    """A run of `evaluate`: the exact cache's figures and every format's, largest first.

    complete: False where the run was interrupted; `tokens` and `formats` are then what was finished.
    """

    context: int
    tokens: int
    chunk: int | None
    dtype: str
    perplexity: float
    seconds: float
    formats: list[FormatResult]
    complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "context": self.context,
            "tokens": self.tokens,
            "chunk": self.chunk,
            "reference": {"dtype": self.dtype, "perplexity": self.perplexity, "seconds": self.seconds},
            "formats": [f.to_dict() for f in self.formats],
        }


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


def quantized_cache(model: Any, recipe: Any) -> Any:
    """An empty quantized cache for the model, in a format or by a policy; "none" stands for the model's dtype."""
    from quantkv.integrations.transformers import QuantizedCache

    return QuantizedCache(model.config, recipe, dtype=model.dtype)


def unusable(model: Any, formats: Sequence[str]) -> dict[str, str]:
    """The formats that cannot take the model's head size, each with the reason."""
    from quantkv import get_format

    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    reasons = {}
    for name in formats:
        try:
            get_format(name).cache_spec(getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_size)
        except ValueError as error:
            reasons[name] = str(error)
    return reasons


def measure(cache: Any, result: FormatResult) -> None:
    """Take sizes from a filled cache, over all its layers."""
    result.bytes_per_token = sum(spec.bytes_per_token for spec in cache.specs)
    result.bits_per_element = 8 * result.bytes_per_token / sum(spec.elements_per_token for spec in cache.specs)
    result.compression = 16 / result.bits_per_element
    result.cache_bytes = max(result.cache_bytes, cache.nbytes)


@torch.inference_mode()
def evaluate(
    model: Any,
    contexts: torch.Tensor,
    formats: Sequence[str],
    *,
    chunk: int | None = None,
    make_cache: Callable[[Any, str], Any] = quantized_cache,
    attention: Callable[[Any], AbstractContextManager[None]] = quantized_attention,
    on_step: Callable[[str, int], None] = lambda name, step: None,
) -> Result:
    """Teacher-forced comparison of each format with the model's own unquantized attention.

    contexts: tokens `[N, context]` int64; each context starts with an empty cache.
    formats: names that `make_cache(model, name)` understands.
    chunk: tokens of a forward pass over a quantized cache, the whole context if None.
    on_step: called with a format's name (or "exact") and the number of passes done, before each pass over a context.

    Contexts are the outer loop, so only one context's exact logits are held: `[context, vocabulary]`.
    After Ctrl-C it returns what was finished, with all figures over the same tokens: the contexts that every format is
    through, or the formats that are through the first. KeyboardInterrupt where there is nothing yet.
    """
    finished = None
    try:
        for state in _finished(model, contexts.to(model.device), formats, chunk, make_cache, attention, on_step):
            finished = state
    except KeyboardInterrupt:
        if finished is None:
            raise
    done, exact_seconds, results = finished
    results.sort(key=lambda r: (-r.bytes_per_token, r.comparison.kl))
    return Result(
        contexts.shape[1],
        done * contexts.shape[1],
        chunk,
        str(model.dtype).removeprefix("torch."),
        results[0].comparison.reference_perplexity,
        exact_seconds,
        results,
        complete=done == len(contexts) and len(results) == len(formats),
    )


def _finished(
    model: Any,
    contexts: torch.Tensor,
    formats: Sequence[str],
    chunk: int | None,
    make_cache: Callable[[Any, str], Any],
    attention: Callable[[Any], AbstractContextManager[None]],
    on_step: Callable[[str, int], None],
) -> Iterator[tuple[int, float, list[FormatResult]]]:
    """Contexts done, the exact cache's seconds, and the formats' results, each time that all of these are over the same tokens."""
    exact_seconds, step, results = 0.0, 0, [FormatResult(name) for name in formats]
    for index, ids in enumerate(contexts):
        on_step("exact", step)
        exact, seconds = _logits(model, ids, None, None)
        exact_seconds, step, before, results = exact_seconds + seconds, step + 1, results, []
        with attention(model):
            for result in copy.deepcopy(before):
                on_step(result.format, step)
                cache = make_cache(model, result.format)
                logits, seconds = _logits(model, ids, cache, chunk)
                result.seconds += seconds
                result.comparison.add(exact, logits, ids)
                measure(cache, result)
                results.append(result)
                step += 1
                if index == 0 or len(results) == len(formats):
                    yield index + 1, exact_seconds, list(results)
        del exact
    on_step("", step)


def _logits(model: Any, ids: torch.Tensor, cache: Any, chunk: int | None) -> tuple[torch.Tensor, float]:
    """Logits `[T, vocabulary]` for tokens `[T]`, and the seconds that they took."""
    start = time.perf_counter()
    if cache is None:
        parts = [model(ids[None], use_cache=False).logits[0]]
    else:
        parts = [model(part[None], past_key_values=cache, use_cache=True).logits[0] for part in ids.split(chunk or len(ids))]
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return torch.cat(parts) if len(parts) > 1 else parts[0], time.perf_counter() - start
