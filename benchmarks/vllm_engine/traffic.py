"""A serving mix: requests that arrive at random, and latencies of their tokens. Engines share it, and none is imported."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Arrival(NamedTuple):
    """A request: seconds after the start, tokens of its prompt and of its answer."""

    at: float
    prompt: int
    answer: int


def mix(requests: int, rate: float, prompt: tuple[int, int], answer: tuple[int, int], seed: int = 3) -> list[Arrival]:
    """Requests in order: a Poisson process (`rate` a second), and log-uniform lengths from the least to the most."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    lengths = (np.exp(rng.uniform(*np.log(bounds), requests)).round().astype(int).tolist() for bounds in (prompt, answer))
    return [Arrival(*of) for of in zip(at, *lengths)]


class Latencies:
    """Of tokens, as they come. Seconds of one clock."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._between: list[float] = []
        self.tokens = 0

    def arrived(self, name: str, now: float) -> None:
        """Note a request."""
        self._last[name] = now

    def answered(self, name: str, tokens: int, now: float) -> None:
        """Note new tokens of a request. Tokens that come together have waited alike."""
        gap, self._last[name] = now - self._last[name], now
        if name in self._first:
            self._between += [gap / tokens] * tokens
        else:
            self._first[name] = gap
        self.tokens += tokens

    def found(self, seconds: float) -> dict:
        """Tokens a second, and percentiles: to the first token, and between tokens of a request."""
        first, between = list(self._first.values()), [1e3 * gap for gap in self._between]
        return {
            "seconds": round(seconds, 2),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "first_token_s": {p: round(float(np.percentile(first, p)), 3) for p in (50, 95, 99)},
            "between_tokens_ms": {p: round(float(np.percentile(between, p)), 2) for p in (50, 90, 95, 99)},
        }
