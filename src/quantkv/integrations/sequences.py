"""Bookkeeping of a batch that advances layer by layer: pages, padding, and the index tensors of one forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache import PagedCache, prepare_attend, prepare_write
from ..checks import refuse
from ..page_table import PageTable
from ..prepared import PreparedAttend, PreparedWrite


class Kind(NamedTuple):
    """Which past keys the layers of one kind see: all, a sliding window of `window` tokens, or their own chunk of that many."""

    window: int = 0
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Oldest position that a query at `position` or later sees."""
        if self.chunked:
            return position // self.window * self.window
        return max(position - self.window + 1, 0) if self.window else 0

    @property
    def options(self) -> dict[str, int]:
        return {"window": self.window, "chunk_lookback": 0 if self.chunked else -1}


class Step(NamedTuple):
    """One forward pass, the same for all layers of a kind. T tokens that are no padding, of S sequences, N padded tokens each.

    rows: `[T]`, where they stand in `[S * N]`; None: everywhere.
    slots: `[T]`. block_table: `[S, pages]`. seq_lens: `[S]`. cu_seqlens_q: `[S + 1]`.
    copies: pages `[2, n]`, source and target, to be copied first; None: none.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    copies: torch.Tensor | None
    prepared: dict[Any, PreparedAttend | PreparedWrite]

    def to(self, device: torch.device) -> Step:
        return Step(*(t if t is None else t.to(device) for t in self[:-1]), {})

    def write(self, cache: PagedCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new rows of a layer, `[T, HK, D]` and `[T, HK, D_V]`."""
        if "write" not in self.prepared:
            self.prepared["write"] = prepare_write(self.slots)
        self.prepared["write"](cache, key, value)

    def attend(self, cache: PagedCache, q: torch.Tensor, sinks: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        """Attention of a layer's `q [T, HQ, D]`. options: of `prepare_attend`; layers with the same ones share what is prepared."""
        key = tuple(options.items())
        if key not in self.prepared:
            batch = {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}
            self.prepared[key] = prepare_attend(**batch, **options)
        return self.prepared[key](cache, q, sinks=sinks)


class Sequences:
    """The batch as the layers of one kind see it: pages, padding, and the forward pass under way. They all advance together."""

    def __init__(self, kind: Kind, block_size: int) -> None:
        self.kind, self.block_size, self.record_past = kind, block_size, False
        self.reset()

    def reset(self) -> None:
        self.table: PageTable | None = None
        self.seen = 0  # tokens so far, padding included: what transformers calls the sequence length
        self.padding: list[int] = []  # how many of them are padding, for each sequence
        self.holes = False  # whether padding stands elsewhere than on the left
        self._steps: dict[torch.device, Step] = {}
        self._block_table = torch.empty(0, 0, dtype=torch.int32)

    def begin(self, batch_size: int, count: int, mask: torch.Tensor | None) -> None:
        """Make room for `count` new tokens a sequence; `mask [S, seen + count]` is False for padding."""
        if self.table is None:
            self.table, self.padding = PageTable(self.block_size, batch_size), [0] * batch_size
        table = self.table
        if len(table.rows) != batch_size:
            refuse("batch size", batch_size, f"the cache holds {len(table.rows)} sequences; reset it or take another")
        counts, rows = self._read(mask, batch_size, count)
        if not self.record_past:
            self._release()
        pages_before = sum(map(len, table.rows))
        copies = table.append(counts)
        self.seen += count
        self.padding = [self.seen - n for n in table.lengths]
        if copies or len(self._block_table) != batch_size or sum(map(len, table.rows)) != pages_before:
            self._block_table = _block_table(table)
        ends, total = [0], 0
        for n in counts:
            ends.append(total := total + n)
        ends, lengths = torch.tensor(ends, dtype=torch.int32), torch.tensor(table.lengths, dtype=torch.int32)
        sequence = torch.arange(batch_size).repeat_interleave(ends.diff())
        position = torch.arange(total) + (lengths - ends[1:])[sequence]
        slots = self._block_table[sequence, position // self.block_size] * self.block_size + position % self.block_size
        step = Step(rows, slots, self._block_table, lengths, ends, torch.tensor(copies).T if copies else None, {})
        self._steps = {torch.device("cpu"): step}

    def _read(self, mask: torch.Tensor | None, batch_size: int, count: int) -> tuple[list[int], torch.Tensor | None]:
        """How many of the new tokens of each sequence are real, and where they stand (None: all are)."""
        if mask is None:
            if any(self.padding):
                refuse("attention_mask", None, "this cache holds padded sequences: the mask must say where, in every call")
            return [count] * batch_size, None
        mask = mask.cpu()
        if mask.shape != (batch_size, self.seen + count):
            refuse("attention_mask.shape", tuple(mask.shape), f"{(batch_size, self.seen + count)} is needed")
        if mask[:, : self.seen].sum(1).tolist() != self.table.lengths:
            refuse("attention_mask", "changed", "tokens stored earlier are masked now, or padding became tokens")
        new = mask[:, self.seen :]
        self.holes = self.holes or bool((mask[:, 1:] < mask[:, :-1]).any())
        if self.holes and self.kind.window:
            refuse("attention_mask", "padding after tokens", "layers with a window need padding on the left")
        return new.sum(1).tolist(), None if bool(new.all()) else new.flatten().nonzero().squeeze(1)

    def step(self, device: torch.device) -> Step:
        """The forward pass under way, with tensors on `device`."""
        if device not in self._steps:
            self._steps[device] = self._steps[torch.device("cpu")].to(device)
        return self._steps[device]

    def select(self, indices: list[int]) -> None:
        if self.table is not None:
            self.table.select(indices)
            self.padding = [self.padding[i] for i in indices]
            self._block_table = _block_table(self.table)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every sequence."""
        if self.table is None:
            return
        if self.holes and count:
            raise ValueError("crop: padding stands after tokens: which tokens to remove is not known; pad on the left")
        seen = max(self.seen - count, 0)
        padding = [min(p, seen) for p in self.padding]
        lengths = [seen - p for p in padding]
        if not all(self.table.holds(i, self.kind.first_seen(n)) for i, n in enumerate(lengths)):
            raise RuntimeError(
                f"crop: {count} tokens back, the sliding window needs pages that were given back; "
                "call cache.activate_past_recording() before the forward passes"
            )
        self.table.truncate(lengths)
        self.seen, self.padding = seen, padding
        self._release()
        self._block_table = _block_table(self.table)

    def _release(self) -> None:
        if self.kind.window:
            self.table.release([self.kind.first_seen(n) for n in self.table.lengths])


def _block_table(table: PageTable) -> torch.Tensor:
    """int32 `[S, pages]`; a page that is not held reads 0."""
    width = max(map(len, table.rows), default=0)
    return torch.tensor([row + [0] * (width - len(row)) for row in table.rows], dtype=torch.int32).clamp_min_(0)
