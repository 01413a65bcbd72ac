"""Greedy text from a quantized cache, and where it leaves the text of the exact one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from .decoding import Step, greedy
from .readers import quantized_attention, quantized_cache
from .text import plain

if TYPE_CHECKING:
    from ..policy import Policy

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # where an answer stands in a template's text


def encode(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """Tokens of the prompt, as a user's turn where the tokenizer has a chat template, unless `raw`."""
    if not raw and tokenizer.chat_template:
        ids = plain(tokenizer, rendered(tokenizer, [{"role": "user", "content": readable(prompt)}]))
    else:
        ids = list(tokenizer(readable(prompt))["input_ids"])
    if not ids:
        raise ValueError(f"PROMPT {prompt!r}: no tokens in it")
    return ids


def rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """Messages as the chat template writes them, up to where the answer begins. ValueError for a broken one, or one that refuses."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the model's chat template fails ({error}); allowed: --raw, which uses none") from error


def readable(text: str) -> str:
    """The text itself. ValueError where a terminal gave bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"PROMPT {text!a}: not UTF-8 at character {error.start}; UTF-8 text is needed") from None
    return text


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a text, after the model's generation config and its tokenizer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}


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


class Writer:
    """A model that writes into one cache, one text after the other: each goes on where the last one ended, so only new tokens are read.

    kv: a format's name or a policy; None: the model's own cache, which is exact. write: takes the text as it comes.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        kv: str | Policy | None,
        write: Callable[[str], None],
        make_cache: Callable[[Any, Any], Any] = quantized_cache,
        attention: Callable[[Any], AbstractContextManager[None]] = quantized_attention,
    ) -> None:
        self.model, self.tokenizer, self.write = model, tokenizer, write
        if kv is None:
            from transformers import DynamicCache

            self.cache, self.attention = DynamicCache(config=model.config), lambda model: nullcontext()
        else:
            self.cache, self.attention = make_cache(model, kv), attention
        self.ends = end_tokens(model, tokenizer)
        self.unread: list[int] = []  # the last token of an answer, which is in no cache yet

    @property
    def held(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    def answer(
        self, ids: Sequence[int], max_new_tokens: int, steps: list[Step] | None = None, begins: Callable[[], None] = lambda: None
    ) -> list[Step]:
        """Read tokens and write what follows them. steps: takes the tokens as they come, those before a Ctrl-C too. begins: called before
        the first is written."""
        steps, streamer = [] if steps is None else steps, Streamer(self.tokenizer, self.write)
        ids, self.unread = [*self.unread, *ids], []
        with self.attention(self.model):
            for step in greedy(self.model, torch.tensor(ids, device="cpu"), self.cache, max_new_tokens, self.ends):
                if not steps:
                    begins()
                steps.append(step)
                streamer.put(step.token)
        streamer.end()
        if steps[-1].token not in self.ends:
            self.unread = [steps[-1].token]  # an end token is part of what the next turn begins with
        return steps


class Conversation:
    """The turns of a conversation as tokens to read: of each only what is new, behind what the model wrote."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = []

    def asked(self, prompt: str) -> list[int]:
        """Tokens of a user's turn; before it, the end of the answer that came before."""
        first, self.messages = not self.messages, [*self.messages, {"role": "user", "content": readable(prompt)}]
        if first:
            return encode(self.tokenizer, prompt)
        if not self.tokenizer.chat_template:
            return plain(self.tokenizer, f"\n{prompt}")
        *before, answer, question = self.messages
        text = rendered(self.tokenizer, [*before, {**answer, "content": MARK}, question])
        _, mark, new = text.rpartition(MARK)
        if not mark:
            raise ValueError("--chat: the model's chat template does not show earlier answers")
        return plain(self.tokenizer, new)

    def answered(self, steps: Sequence[Step]) -> None:
        """Take over what the model wrote."""
        text = self.tokenizer.decode([step.token for step in steps], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
