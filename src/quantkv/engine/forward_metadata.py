"""The index tensors of forward passes, and the prepared calls over them: passes of any size, and decoding with one token a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache import PagedCache
from ..prepared import PreparedAttend, PreparedWrite, prepare_attend, prepare_write
from ..shadow import ExactStep, ShadowedCache


class ForwardMetadata:
    """A forward pass, the same for all layers of a kind. T tokens that are no padding, of S sequences.

    slots: `[T]`. block_table: `[S, pages]`. seq_lens: `[S]`. cu_seqlens_q: `[S + 1]`. All int32.
    lengths: (queries, keys) of each sequence; None: the device alone knows them.
    positions: int32 `[T]`, where the tokens stand in their sequences, padding not counted; None for a pass that stores nothing.
    exact: what it reads exactly; None: nothing is.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        lengths: list[tuple[int, int]] | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.slots, self.block_table, self.seq_lens, self.cu_seqlens_q = slots, block_table, seq_lens, cu_seqlens_q
        self.lengths, self.positions = lengths, positions
        self.exact: ExactStep | None = None
        self.prepared: dict[Any, PreparedAttend | PreparedWrite] = {}

    def write(self, cache: PagedCache | ShadowedCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new rows of a layer, `[T, HK, D]` and `[T, HK, D_V]`."""
        kind = "write", cache.maps.by_position
        if kind not in self.prepared:
            self.prepared[kind] = prepare_write(self.slots, self.positions if cache.maps.by_position else None, exact=self.exact)
        self.prepared[kind](cache, key, value)

    def attend(self, cache: PagedCache | ShadowedCache, q: torch.Tensor, sinks: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Attention of a layer's `q [T, HQ, D]`. options: of `prepare_attend`; layers with the same ones share what is prepared."""
        key = tuple(options.items())
        if key not in self.prepared:
            batch = {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}
            self.prepared[key] = prepare_attend(**batch, lengths=self.lengths, exact=self.exact, **options)
        return self.prepared[key](cache, q, sinks=sinks)


class PaddedMetadata(ForwardMetadata):
    """A pass of which the host knows the lengths, N padded tokens a sequence.

    rows: `[T]`, where the tokens stand in `[S * N]`; None: everywhere.
    right_padding: padding that stands after tokens of its sequence. It sees those before it, as in transformers, where a prompt padded
        on the right is continued from the output of its last padding token. Each is a sequence of its own that stores nothing.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        *tensors: torch.Tensor,
        lengths: list[tuple[int, int]],
        positions: torch.Tensor | None = None,
        right_padding: PaddedMetadata | None = None,
    ) -> None:
        super().__init__(*tensors, lengths, positions)
        self.rows, self.right_padding = rows, right_padding

    def to(self, device: torch.device) -> PaddedMetadata:
        """The same step with its tensors on a device."""
        tensors = (self.rows, self.slots, self.block_table, self.seq_lens, self.cu_seqlens_q, self.positions)
        *there, positions = (None if t is None else to_device(t, device) for t in tensors)
        right_padding = None if self.right_padding is None else self.right_padding.to(device)
        return PaddedMetadata(*there, lengths=self.lengths, positions=positions, right_padding=right_padding)


class RightPadding(NamedTuple):
    """Padding after tokens in one forward pass: its places (see `PaddedMetadata.rows`), its sequences, how many tokens precede it."""

    rows: torch.Tensor
    sequences: torch.Tensor
    lengths: torch.Tensor

    def step(self, block_table: torch.Tensor) -> PaddedMetadata:
        """The rows as a step of its own, one query a sequence."""
        ends = torch.arange(len(self.rows) + 1, dtype=torch.int32, device=self.rows.device)
        pairs = [(1, n) for n in self.lengths.tolist()]
        return PaddedMetadata(self.rows, self.rows[:0], block_table[self.sequences], self.lengths.int(), ends, lengths=pairs)


def is_capturing() -> bool:
    """Whether what is called now will run again without the host: it is being compiled, or captured."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`; the host does not wait."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
