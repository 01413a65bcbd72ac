"""Full-precision tokens: which tokens of a sequence are read from 16-bit copies beside the quantized pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import deprecated
from .refusals import integer, refuse

if TYPE_CHECKING:
    import torch


MOST_FULL_PRECISION = 1 << 20  # tokens of a sequence: their copies are allocated whole, for every sequence
BLOCK_SIZE = 16  # tokens of a page, where no cache says another number


@deprecated.keywords(first="sink", latest="recent")
@dataclass(frozen=True)
class FullPrecisionTokens:
    """Full-precision tokens, by whole pages. sink: the first so many tokens of a sequence, at least. recent: the latest so many, at least.

    ValueError unless both are numbers of tokens, of at most 2^20, not both 0.
    """

    sink: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            integer(f"full_precision.{name}", getattr(self, name), 0, "a number of tokens")
            if getattr(self, name) > MOST_FULL_PRECISION:
                refuse(f"full_precision.{name}", getattr(self, name), f"at most {MOST_FULL_PRECISION:,} tokens can have 16-bit copies")
        if not self.sink and not self.recent:
            refuse("full_precision", self, "sink or recent is at least 1")

    def without_sink(self) -> FullPrecisionTokens | None:
        """The recent tokens alone, for layers with a window, which moves past the sink; None where there are none."""
        return FullPrecisionTokens(0, self.recent) if self.recent else None

    def sink_tokens(self, block_size: int) -> int:
        """How many of a sequence's first tokens are at full precision: whole pages of `block_size` tokens."""
        return -(-self.sink // block_size) * block_size

    def share(self, context: int, block_size: int) -> float:
        """Full-precision tokens, of those of a context, on average over where the latest page ends."""
        recent = self.recent + (block_size - 1) / 2 if self.recent else 0
        return min(self.sink_tokens(block_size) + recent, context) / context

    def copied_pages(self, block_size: int) -> tuple[int, int]:
        """Most pages of `block_size` tokens that a sequence's sink and recent tokens lie in."""
        return self.sink_tokens(block_size) // block_size, max(self.recent + block_size - 2, 0) // block_size + 1

    def copies_needed(self, block_size: int, num_seqs: int) -> int:
        """Pages of a pool with room for so many sequences: one more for each, for the page that comes while the oldest is still read."""
        return num_seqs * (sum(self.copied_pages(block_size)) + 1)

    def first_recent_page(self, length: torch.Tensor, block_size: int) -> torch.Tensor:
        """The page in which the recent ones of `length` tokens begin; the one after the last page where none are kept."""
        return ((length - self.recent).clamp_min(0) if self.recent else length + block_size - 1) // block_size
