"""Which tokens of a sequence are read exactly, from 16-bit copies beside the quantized pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .refusals import integer, refuse

if TYPE_CHECKING:
    import torch


MOST_EXACT = 1 << 20  # tokens of a sequence: their copies are allocated whole, for every sequence
BLOCK_SIZE = 16  # tokens of a page, where no cache says another number


@dataclass(frozen=True)
class ExactTokens:
    """Tokens with 16-bit copies. first: the first so many, at least. latest: the latest so many, at least. By whole pages.

    ValueError unless both are numbers of tokens, of at most 2^20, not both 0.
    """

    first: int = 0
    latest: int = 0

    def __post_init__(self) -> None:
        for name in ("first", "latest"):
            integer(f"exact.{name}", getattr(self, name), 0, "a number of tokens")
            if getattr(self, name) > MOST_EXACT:
                refuse(f"exact.{name}", getattr(self, name), f"at most {MOST_EXACT:,} tokens can have 16-bit copies")
        if not self.first and not self.latest:
            refuse("exact", self, "first or latest is at least 1")

    def without_first(self) -> ExactTokens | None:
        """What is left in layers that keep no first tokens, as a window moves on or keys stand where they stand; None: nothing."""
        return ExactTokens(0, self.latest) if self.latest else None

    def first_tokens(self, block_size: int) -> int:
        """How many of a sequence's first tokens are exact: whole pages of `block_size` tokens."""
        return -(-self.first // block_size) * block_size

    def share(self, context: int, block_size: int) -> float:
        """Exact tokens, of those of a context, on average over where the latest page ends."""
        latest = self.latest + (block_size - 1) / 2 if self.latest else 0
        return min(self.first_tokens(block_size) + latest, context) / context

    def shadows(self, block_size: int) -> tuple[int, int]:
        """Most pages of `block_size` tokens that a sequence's first and latest tokens lie in."""
        return self.first_tokens(block_size) // block_size, max(self.latest + block_size - 2, 0) // block_size + 1

    def shadows_needed(self, block_size: int, num_seqs: int) -> int:
        """Pages of a pool with room for so many sequences: one more for each, for the page that comes while the oldest is still read."""
        return num_seqs * (sum(self.shadows(block_size)) + 1)

    def latest_page(self, length: torch.Tensor, block_size: int) -> torch.Tensor:
        """The page in which the latest of `length` tokens begin; the one after the last page where none are kept."""
        return ((length - self.latest).clamp_min(0) if self.latest else length + block_size - 1) // block_size
