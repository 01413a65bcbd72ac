"""What a policy is tried on: one context each, whose predictions are scored beside the exact cache's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .metrics import Comparison, Share
from .readers import last_logits
from .text import plain

TESTS = ("kl", "copy", "codes", "greedy")
UNSEEN = 15  # tokens of a copied passage that tell which one it is; they are not asked
MARGIN = 64  # where the first passage begins, behind the first tokens
SYLLABLES = ("ba", "dro", "fen", "gol", "jor", "kel", "lo", "mun", "pra", "qui", "ri", "sha", "sti", "ta", "ux", "vi", "wem", "zu")
DIGITS = 4
MOST_CODES = 40  # of a context


@dataclass
class Scores:
    """What one policy, or the exact cache, made of the trials so far.

    comparison: of what is read as decoding steps do. prompt: of prompts. copied: by tokens of the context and depth of the passage.
    codes: (tokens between telling and asking, digits right, digits asked).
    agreed: tokens of each greedy continuation, of `continued`, until it leaves the exact cache's.
    """

    comparison: Comparison = field(default_factory=Comparison)
    prompt: Comparison = field(default_factory=Comparison)
    copied: dict[tuple[int, float], Share] = field(default_factory=dict)
    codes: list[tuple[int, int, int]] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    continued: int = 0


@dataclass(frozen=True)
class Trial:
    """A context, or several of one length, read side by side. keep: how many of the last tokens' logits are scored; 0: all."""

    ids: torch.Tensor  # [T] or [S, T] int64
    keep: int = 0

    @property
    def prompt(self) -> int:
        """How many of the first tokens are a prompt: where the last ones alone are scored, all up to the first of these."""
        return self.ids.shape[-1] - self.keep + 1 if self.keep else 0

    @property
    def sequences(self) -> int:
        """Contexts side by side."""
        return self.ids.numel() // self.ids.shape[-1]

    def tokens(self, model: Any) -> torch.Tensor:
        """Tokens `[S, T]` of the pass, on the model's device."""
        return self.ids.view(self.sequences, -1).to(model.device)

    def score(self, scores: Scores, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add what `logits [keep or T, vocabulary]` of one context say, beside those of the exact cache. ids: its row of `tokens`."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextTrial(Trial):
    """Text: KL, the same likeliest token, perplexity, of the last `keep` tokens. decoded: how many of these are read one at a time, and
    the others are a prompt's; None: all."""

    decoded: int | None = None

    @property
    def prompt(self) -> int:
        """All tokens but those that are decoded."""
        return super().prompt if self.decoded is None else self.ids.shape[-1] - self.decoded

    def score(self, scores: Scores, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the predictions of the kept tokens, those of the prompt and those that are decoded: KL, perplexity, same top-1."""
        ids = ids[-self.keep :]
        prompt = 0 if self.decoded is None else len(ids) - self.decoded
        if prompt:
            scores.prompt.add(exact[:prompt], logits[:prompt], ids[:prompt])
        scores.comparison.add(exact[prompt:], logits[prompt:], ids[prompt:])


@dataclass(frozen=True)
class Copy(Trial):
    """A context that ends with passages from earlier in it, one from each depth. passages: (depth, first position of the copy)."""

    passages: tuple[tuple[float, int], ...] = ()
    length: int = 0  # of a passage

    def score(self, scores: Scores, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add how many tokens of each copied passage are predicted, after the first ones, which nothing tells."""
        right, skipped = predicted(logits, ids, self.keep), len(ids) - self.keep
        for depth, start in self.passages:
            part = right[start + UNSEEN - 1 - skipped : start + self.length - 1 - skipped]  # position i predicts token i + 1
            scores.copied.setdefault((len(ids), depth), Share()).add(int(part.sum()), len(part))


@dataclass(frozen=True)
class Codes(Trial):
    """Names and codes, told between text and asked again in another order. marks: (position of the first digit, digits, distance)."""

    marks: tuple[tuple[int, int, int], ...] = ()

    def score(self, scores: Scores, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add how many digits of each code are predicted, with the distance to where it was told."""
        right, skipped = predicted(logits, ids, self.keep), len(ids) - self.keep
        for start, count, distance in self.marks:
            part = right[start - 1 - skipped : start + count - 1 - skipped]
            scores.codes.append((distance, int(part.sum()), len(part)))


@dataclass(frozen=True)
class Greedy(Trial):
    """Prompts that the exact cache continues greedily, by `keep` - 1 tokens. Over those a cache's own greedy continuation is known up to
    the first token that it would have chosen otherwise: no second generation is needed."""

    @property
    def prompt(self) -> int:
        """All that is given."""
        return self.ids.shape[-1]

    def tokens(self, model: Any) -> torch.Tensor:
        """Prompts and the exact cache's greedy continuations, int `[S, tokens]`."""
        from transformers import DynamicCache

        ids, cache = super().tokens(model), DynamicCache(config=model.config)
        following = ids
        for _ in range(self.keep - 1):
            following = last_logits(model, following, 1, cache).argmax(-1)
            ids = torch.cat([ids, following], 1)
        return ids

    def score(self, scores: Scores, exact: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the tokens until a greedy continuation leaves the exact one."""
        same = predicted(logits, ids, self.keep)
        scores.continued = len(same)
        scores.agreed.append(len(same) if bool(same.all()) else int(same.int().argmin()))


def predicted(logits: torch.Tensor, ids: torch.Tensor, keep: int) -> torch.Tensor:
    """Which of the last `keep` positions but one have the token after them as the likeliest: bool `[keep - 1]`."""
    return logits[:-1].argmax(-1) == ids[len(ids) - keep + 1 :].to(logits.device)


def copies(contexts: torch.Tensor, length: int, depths: Sequence[float]) -> list[Copy]:
    """Each of `contexts [N, T]` with its end replaced by passages of `length` of its own tokens, one from each depth: 0 stands behind the
    first tokens, 1 just before the end. ValueError where they do not fit."""
    size, tail = contexts.shape[1], length * len(depths)
    last = size - tail - length  # where a passage can begin at the latest
    if length <= UNSEEN or last < MARGIN:
        raise ValueError(
            f"--passage {length}: {len(depths)} passages of more than {UNSEEN} tokens have to fit into a context of {size} twice; "
            f"allowed: {UNSEEN + 1} to {max((size - MARGIN) // (len(depths) + 1), 0)}"
        )
    trials = []
    for ids in contexts:
        ids, passages = ids.clone(), []
        for index, depth in enumerate(depths):
            source, start = MARGIN + round(depth * (last - MARGIN)), size - tail + index * length
            ids[start : start + length] = ids[source : source + length]
            passages.append((depth, start))
        trials.append(Copy(ids, tail + 1, tuple(passages), length))
    return trials


def codes(filler: Sequence[int], tokenizer: Any, begin: Sequence[int], context: int, seed: int) -> Codes:
    """A context of `context` tokens: text of `filler` between sentences that give names their codes, which it then asks again.

    begin: tokens that a text begins with. ValueError where the context is too short for three names.
    """
    source, told, stop = random.Random(seed), {}, plain(tokenizer, ".")
    room = context // 4  # for what is told, and as much for asking it: half of the context stays text
    while len(told) < MOST_CODES:
        name = "".join(source.choices(SYLLABLES, k=3)).capitalize()
        digits = plain(tokenizer, " " + "".join(source.choices("0123456789", k=DIGITS)))
        skip = sum(1 for token in digits if not any(c.isdigit() for c in tokenizer.decode([token])))
        sentence = plain(tokenizer, f" The code of {name} is")
        room -= len(sentence) + len(digits) + len(stop)
        if room < 0:
            break
        told[name] = sentence, digits, skip
    names = list(told)
    asked = source.sample(names, len(names))
    tail, places = [], []
    for name in asked:
        sentence, digits, skip = told[name]
        places.append((name, len(tail) + len(sentence) + skip, len(digits) - skip))
        tail += [*sentence, *digits, *stop]
    if len(names) < 3:
        raise ValueError(f"--lengths {context}: too short for three names and their codes")
    gap = (context - len(begin) - 2 * len(tail)) // len(names)
    body, told_at, used = list(begin), {}, 0
    for name in names:
        body += filler[used : used + gap]
        used += gap
        sentence, digits, skip = told[name]
        told_at[name] = len(body) + len(sentence) + skip
        body += [*sentence, *digits, *stop]
    body += filler[used : used + context - len(body) - len(tail)]
    if len(body) + len(tail) != context:
        raise ValueError(f"--lengths {context}: the text is too short to stand between names and codes")
    first = len(body)
    marks = tuple((first + at, digits, first + at - told_at[name]) for name, at, digits in places)
    return Codes(torch.tensor(body + tail, device="cpu"), len(tail) + 1, marks)
