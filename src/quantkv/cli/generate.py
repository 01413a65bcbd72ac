"""Greedy text from a quantized cache, and where it leaves the text of the exact one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .eval import quantized_attention, quantized_cache


@dataclass(frozen=True)
class Step:
    """One generated token and the probabilities `[vocabulary]` that it was the likeliest of."""

    token: int
    probabilities: torch.Tensor


def encode(tokenizer: Any, prompt: str, raw: bool) -> torch.Tensor:
    """Tokens `[T]` of the prompt, as a user's turn where the tokenizer has a chat template, unless `raw`."""
    if not raw and tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise ValueError(f"PROMPT {prompt!r}: no tokens in it")
    return torch.tensor(ids)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a text, after the model's generation config and its tokenizer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


@torch.inference_mode()
def greedy(model: Any, ids: torch.Tensor, cache: Any, max_new_tokens: int, ends: set[int]) -> Iterator[Step]:
    """The likeliest token, over and over, up to and with an end token or up to `max_new_tokens`."""
    ids = ids[None].to(model.device)
    for _ in range(max_new_tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        token = int(logits.argmax())
        yield Step(token, logits.float().softmax(-1).cpu())
        if token in ends:
            return
        ids = ids.new_tensor([[token]])


def leaves_at(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, None if one begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


class Streamer:
    """Turns tokens into text as they come: what is not yet a whole character waits for the next token."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []
        self.shown = 0

    def put(self, token: int) -> None:
        """Show what this token adds, as far as it is whole characters."""
        self.tokens.append(token)
        self._show(self._text(), final=False)

    def end(self) -> None:
        """Show what was held back."""
        self._show(self._text(), final=True)

    def _text(self) -> str:
        return self.tokenizer.decode(self.tokens, skip_special_tokens=True)

    def _show(self, text: str, final: bool) -> None:
        stop = len(text) if final or not text.endswith("\N{REPLACEMENT CHARACTER}") else self.shown
        if stop > self.shown:
            self.write(text[self.shown : stop])
            self.shown = stop


def run(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    kv: Any,
    max_new_tokens: int,
    write: Callable[[str], None],
    make_cache: Callable[[Any, Any], Any] = quantized_cache,
    attention: Callable[[Any], AbstractContextManager[None]] = quantized_attention,
) -> tuple[list[Step], Any]:
    """Generate with the format or policy `kv`, or the model's own cache if None, streaming text to `write`. Returns the cache too."""
    ends = end_tokens(model, tokenizer)
    streamer, steps = Streamer(tokenizer, write), []

    def collect(cache: Any) -> Any:
        for step in greedy(model, ids, cache, max_new_tokens, ends):
            steps.append(step)
            streamer.put(step.token)
        streamer.end()
        return cache

    if kv is None:
        from transformers import DynamicCache

        return steps, collect(DynamicCache(config=model.config))
    with attention(model):
        return steps, collect(make_cache(model, kv))
