"""Forward metadata of batches that come padded, every sequence with as many tokens as the longest."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache import PagedCache
from ..calls import Batch
from ..copies import CacheWithCopies
from ..options import AttentionOptions
from .forward_metadata import ForwardMetadata, to_device


class PaddedMetadata(ForwardMetadata):
    """A pass of which the host knows the lengths. Queries, keys and values come as `[S * N, ...]`, N tokens a sequence, padding included.

    rows: `[T]`, where the T tokens that are no padding stand in `[S * N]`; None: everywhere.
    right_padding: padding that stands after tokens of its sequence. It sees those before it, as in transformers, where a prompt padded
        on the right is continued from the output of its last padding token. Each is a sequence of its own that stores nothing.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        slots: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        lengths: tuple[tuple[int, int], ...],
        right_padding: PaddedMetadata | None = None,
        num_pages: int = 0,
    ) -> None:
        longest = max((queries for queries, _ in lengths), default=0)
        super().__init__(Batch(cu_seqlens_q, seq_lens, longest, None, lengths), block_table, slots, positions, num_pages=num_pages)
        self.rows, self.right_padding = rows, right_padding

    def to(self, device: torch.device) -> PaddedMetadata:
        """The same pass with its tensors on a device."""
        tensors = (self.rows, self.slots, self.block_table, self.batch.seq_lens, self.batch.cu_seqlens_q, self.positions)
        there = (None if t is None else to_device(t, device) for t in tensors)
        right_padding = None if self.right_padding is None else self.right_padding.to(device)
        return PaddedMetadata(*there, lengths=self.batch.lengths, right_padding=right_padding, num_pages=self.num_pages)

    def write(self, cache: PagedCache | CacheWithCopies, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor | None = None) -> None:
        """Store the rows of `[S * N, ...]` that are no padding."""
        super().write(cache, self._tokens(key), self._tokens(value), slots)

    def attend(
        self,
        cache: PagedCache | CacheWithCopies,
        q: torch.Tensor,
        scale: float | None = None,
        options: AttentionOptions = AttentionOptions(),
        *,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        **per_layer: Any,
    ) -> torch.Tensor:
        """Attention of `q [S * N, HQ, D]` -> `[S * N, HQ, D_V]`; 0 for padding on the left."""
        own = {} if key is None else {"key": self._tokens(key), "value": self._tokens(value)}
        out = super().attend(cache, self._tokens(q), scale, options, **own, **per_layer)
        if self.rows is not None:
            out = out.new_zeros(len(q), *out.shape[1:]).index_copy_(0, self.rows, out)
        padding = self.right_padding
        if padding is not None:
            whole = own and all(queries == keys for queries, keys in self.batch.lengths)  # padding reads what the last token reads
            source = self.as_given(cache, key, value) if whole else cache
            after = ForwardMetadata.attend(padding, source, padding._tokens(q), scale, options, **per_layer)
            out = out.index_copy_(0, padding.rows, after)
        return out

    def _tokens(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.rows is None else rows[self.rows]


class RightPadding(NamedTuple):
    """Padding after tokens in one forward pass: its places (see `PaddedMetadata.rows`), its sequences, how many tokens precede it."""

    rows: torch.Tensor
    sequences: torch.Tensor
    lengths: torch.Tensor

    def metadata(self, block_table: torch.Tensor) -> PaddedMetadata:
        """The rows as a pass of its own, one query a sequence."""
        ends = torch.arange(len(self.rows) + 1, dtype=torch.int32, device=self.rows.device)
        pairs = tuple((1, n) for n in self.lengths.tolist())
        return PaddedMetadata(self.rows, self.rows[:0], block_table[self.sequences], self.lengths.int(), ends, lengths=pairs)
