"""Which tokens of a sequence are read exactly, from 16-bit copies beside the quantized pages."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import integer, refuse


@dataclass(frozen=True)
class ExactTokens:
    """Tokens with 16-bit copies. first: the first so many. latest: at least the latest so many. By whole pages.

    ValueError unless both are numbers of tokens, not both 0.
    """

    first: int = 0
    latest: int = 0

    def __post_init__(self) -> None:
        for name in ("first", "latest"):
            integer(f"exact.{name}", getattr(self, name), 0, "a number of tokens")
        if not self.first and not self.latest:
            refuse("exact", self, "first or latest is at least 1")
