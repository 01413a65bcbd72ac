"""The rows that a step brings, read as they were given: one more KV source beside the pages."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from . import checks

FEW_QUERIES = 8  # of a sequence: decode, or verification, for which sink and recent copies are one KV source


class OwnRows(NamedTuple):
    """Keys `[T, HK, D]` and values `[T, HK, D_V]` of the tokens of q as given: bf16, fp16 or fp32, any strides.

    A sequence with several queries reads these at the positions of its queries, and of a call's segments only what stands before them. A
    sequence with one query reads its segments alone.
    """

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def given(cls, rows: tuple[torch.Tensor, torch.Tensor] | None) -> OwnRows | None:
        """A pair (key, value) by its name. ValueError for anything else."""
        if rows is None or isinstance(rows, OwnRows):
            return rows
        if not isinstance(rows, tuple) or len(rows) != 2:
            checks.refuse("own", type(rows).__name__, "a tuple (key, value) is needed")
        return cls(*rows)

    def check(self, tokens: int, heads: int, sizes: tuple[int, int], device: torch.device) -> None:
        """ValueError where these are not the rows of `tokens` queries. sizes: of a key and a value."""
        checks.tensor("own.key", self.key, (tokens, heads, sizes[0]), checks.ROW_DTYPES, device)
        checks.tensor("own.value", self.value, (tokens, heads, sizes[1]), (self.key.dtype,), device)
        for name, t in self._asdict().items():
            checks.no_gradient(f"own.{name}", t)

    def of(self, tokens: slice) -> OwnRows:
        """The rows of some tokens."""
        return OwnRows(self.key[tokens], self.value[tokens])

    @property
    def traits(self) -> tuple[Hashable, ...]:
        """Everything but numbers and addresses."""
        return tuple((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in self)


def few_queries(max_query_len: int | None, own: OwnRows | None) -> bool:
    """Whether sink and recent copies are one KV source of sequences: each has few queries or, beside own rows, one. max_query_len: the
    most of one of them; None: it is not known, and few."""
    if max_query_len is None:
        return own is None
    return max_query_len <= (FEW_QUERIES if own is None else 1)  # what own rows replace goes by position


def stored_before(cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, key_range: torch.Tensor | None = None) -> torch.Tensor:
    """int32 `[S, 2]`, from and to before: the positions of a segment that are read beside own rows. key_range: of the segment."""
    counts = cu_seqlens_q.diff()
    until = torch.where(counts > 1, seq_lens - counts, seq_lens).int()
    low, high = (torch.zeros_like(until), until) if key_range is None else key_range.int().unbind(1)
    return torch.stack([low, torch.minimum(high, until)], 1)
