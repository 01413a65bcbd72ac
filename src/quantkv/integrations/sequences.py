"""Bookkeeping of a batch that advances layer by layer: pages, padding, and the index tensors of one forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cache import PagedCache
from ..checks import refuse
from ..page_table import PageTable
from ..prepared import PreparedAttend, PreparedWrite, prepare_attend, prepare_write


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
    late: padding that stands after tokens of its sequence: it sees those before it, as in transformers, where a prompt padded on the
        right is continued from the output of its last padding token. Each is a sequence of its own that stores nothing. None: none.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    copies: torch.Tensor | None
    late: Step | None
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


class Late(NamedTuple):
    """Padding after tokens, in one forward pass: where it stands (see `Step.rows`), in which sequences, and how many tokens precede it."""

    rows: torch.Tensor
    sequences: torch.Tensor
    lengths: torch.Tensor

    def step(self, block_table: torch.Tensor) -> Step:
        ends = torch.arange(len(self.rows) + 1, dtype=torch.int32)
        return Step(self.rows, self.rows[:0], block_table[self.sequences], self.lengths.int(), ends, None, None, {})


class Sequences:
    """The batch as the layers of one kind see it: which pages they hold, and the index tensors of the forward pass under way.

    progress: what these layers share with those of other kinds; one of its own if None.
    windows: those that the model asked masks for, None for a mask without one.
    """

    def __init__(self, kind: Kind, block_size: int, progress: Progress | None = None) -> None:
        self.kind, self.block_size, self.record_past = kind, block_size, False
        self.windows: set[int | None] = set()
        self.progress = Progress() if progress is None else progress
        self.progress.kinds.append(self)
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_steps": {}}  # prepared calls are made anew

    def reset(self) -> None:
        self.table: PageTable | None = None
        self._steps: dict[torch.device, Step] = {}
        self._block_table = torch.empty(0, 0, dtype=torch.int32)

    def begin(self, counts: list[int], rows: torch.Tensor | None, late: Late | None = None) -> None:
        """Make room for `counts[i]` new tokens of sequence i; rows: see `Step`."""
        if self.table is None:
            self.table = PageTable(self.block_size, len(counts))
        table = self.table
        if not self.record_past:
            self._release()
        pages_before = sum(map(len, table.rows))
        copies = table.append(counts)
        if copies or len(self._block_table) != len(counts) or sum(map(len, table.rows)) != pages_before:
            self._block_table = _block_table(table)
        ends, total = [0], 0
        for n in counts:
            ends.append(total := total + n)
        ends, lengths = torch.tensor(ends, dtype=torch.int32), torch.tensor(table.lengths, dtype=torch.int32)
        sequence = torch.arange(len(counts)).repeat_interleave(ends.diff())
        position = torch.arange(total) + (lengths - ends[1:])[sequence]
        slots = self._block_table[sequence, position // self.block_size] * self.block_size + position % self.block_size
        after = None if late is None else late.step(self._block_table)
        step = Step(rows, slots, self._block_table, lengths, ends, torch.tensor(copies).T if copies else None, after, {})
        self._steps = {torch.device("cpu"): step}

    def step(self, device: torch.device) -> Step:
        """The forward pass under way, with tensors on `device`."""
        if device not in self._steps:
            self._steps[device] = self._steps[torch.device("cpu")].to(device)
        return self._steps[device]

    def select(self, indices: list[int]) -> None:
        self.table.select(indices)
        self._block_table = _block_table(self.table)

    def can_crop(self, lengths: list[int]) -> bool:
        """Whether the pages that later queries see of sequences of these lengths are all held."""
        return all(self.table.holds(i, self.kind.first_seen(length)) for i, length in enumerate(lengths))

    def crop(self, lengths: list[int]) -> None:
        self.table.truncate(lengths)
        self._release()
        self._block_table = _block_table(self.table)

    def _release(self) -> None:
        if self.kind.window:
            self.table.release([self.kind.first_seen(n) for n in self.table.lengths])


class Progress:
    """How far the layers of a cache are: each goes through every forward pass once, and what its mask says is read once.

    A call that is refused changes nothing. A pass that fails once a layer has stored rows, or that leaves layers out, is an error in
    every later call until `reset`, as the layers then hold different tokens.

    kinds: the layers by what they see. num_layers: how many go through a pass.
    seen: tokens that all of them hold, padding included: what transformers calls the sequence length.
    padding: how many of these are padding, for each sequence; None before the first pass.
    count: tokens a sequence of the last pass.
    holes: whether padding stands elsewhere than on the left.
    """

    def __init__(self) -> None:
        self.kinds: list[Sequences] = []
        self.num_layers = 0
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "failed": self.failed or self._left > 0, "_masks": []}  # a pass under way is not taken along

    def reset(self) -> None:
        self.seen, self.holes, self.failed = 0, False, False
        self.padding: list[int] | None = None
        self.count, self._left = 0, 0  # _left: layers that are not through the pass under way
        self._masks: list[torch.Tensor | None] = []  # those that its layers came with, all equal
        for sequences in self.kinds:
            sequences.reset()

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first forward pass."""
        return -1 if self.padding is None else len(self.padding)

    def enter(self, seen: int, batch_size: int, count: int, mask: torch.Tensor | None) -> None:
        """A layer that holds `seen` tokens joins the forward pass under way, or begins the next: `count` new tokens a sequence, of
        which `mask [S, seen + count]` is False for padding."""
        if self.failed or seen != self.seen:
            raise RuntimeError(
                f"cache: this layer holds {seen} tokens, all layers {self.seen}; a forward pass that skipped layers or failed leaves a "
                "cache that must be reset"
            )
        if not self._left:
            self._begin(batch_size, count, mask)
        elif (batch_size, count) != (self.batch_size, self.count):
            refuse("tokens", f"{batch_size} x {count}", f"this forward pass began with {self.batch_size} x {self.count}")
        elif not any(mask is known for known in self._masks):
            if not torch.equal(*(_whole(m, batch_size, self.seen + count) for m in (mask, self._masks[0]))):
                refuse("attention_mask", "changed", "all layers of a forward pass have the same padding")
            self._masks.append(mask)

    def leave(self) -> int:
        """A layer is through. Returns the tokens that it holds now."""
        seen, self._left = self.seen + self.count, self._left - 1
        if not self._left:
            self.seen = seen
        return seen

    def check_whole(self) -> None:
        """RuntimeError unless all layers hold the same tokens."""
        if self.failed or self._left:
            raise RuntimeError("cache: a forward pass failed or skipped layers, which hold different tokens now; the cache must be reset")

    def select(self, indices: list[int]) -> None:
        """Make the batch that of the sequences `indices`."""
        self.check_whole()
        if self.padding is not None:
            for sequences in self.kinds:  # they hold as many sequences each: the first refuses for all
                sequences.select(indices)
            self.padding = [self.padding[i] for i in indices]

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every sequence."""
        self.check_whole()
        if self.padding is None:
            return
        if self.holes and count:
            raise ValueError("crop: padding stands after tokens: which tokens to remove is not known; pad on the left")
        seen = max(self.seen - count, 0)
        padding = [min(p, seen) for p in self.padding]
        lengths = [seen - p for p in padding]
        if not all(sequences.can_crop(lengths) for sequences in self.kinds):
            raise RuntimeError(
                f"crop: {count} tokens back, the sliding window needs pages that were given back; "
                "call cache.activate_past_recording() before the forward passes"
            )
        for sequences in self.kinds:
            sequences.crop(lengths)
        self.seen, self.padding = seen, padding

    def _begin(self, batch_size: int, count: int, mask: torch.Tensor | None) -> None:
        padding = [0] * batch_size if self.padding is None else self.padding
        if len(padding) != batch_size:
            refuse("batch size", batch_size, f"the cache holds {len(padding)} sequences; reset it or take another")
        if mask is not None:
            counts, rows, holes, late = self._read(mask, padding, count)
        elif any(padding):
            refuse("attention_mask", None, "this cache holds padded sequences: the mask must say where, in every call")
        else:
            counts, rows, holes, late = [count] * batch_size, None, False, None
        self.failed = True  # should memory end half-way
        for sequences in self.kinds:
            sequences.begin(counts, rows, late)
        self.padding, self.holes = [p + count - n for p, n in zip(padding, counts)], holes
        self.count, self._left, self._masks, self.failed = count, self.num_layers, [mask], False

    def _read(self, mask: torch.Tensor, padding: list[int], count: int) -> tuple[list[int], torch.Tensor | None, bool, Late | None]:
        """How many of the new tokens of each sequence are real, where they stand (None: all are), whether there are holes, and which
        of the new tokens are in holes."""
        shape = (len(padding), self.seen + count)
        if mask.shape != shape:
            refuse("attention_mask.shape", tuple(mask.shape), f"{shape} is needed")
        real = _whole(mask, *shape)
        if (self.seen - real[:, : self.seen].sum(1)).tolist() != padding:
            refuse("attention_mask", "changed", "tokens stored earlier are masked now, or padding became tokens")
        holes = self.holes or bool((real[:, 1:] < real[:, :-1]).any())
        if holes and any(sequences.kind.window for sequences in self.kinds):
            refuse("attention_mask", "padding after tokens", "layers with a window need padding on the left")
        new = real[:, self.seen :]
        return (
            new.sum(1).tolist(),
            None if bool(new.all()) else new.flatten().nonzero().squeeze(1),
            holes,
            self._late(real) if holes else None,
        )

    def _late(self, real: torch.Tensor) -> Late | None:
        before = real.cumsum(1)[:, self.seen :].flatten()
        rows = (~real[:, self.seen :].flatten() & (before > 0)).nonzero().squeeze(1)
        return Late(rows, rows // (real.shape[1] - self.seen), before[rows]) if len(rows) else None


def _whole(mask: torch.Tensor | None, batch_size: int, count: int) -> torch.Tensor:
    """The mask on the host, bool; all True for None."""
    return torch.ones(batch_size, count, dtype=torch.bool) if mask is None else mask.cpu().bool()


def _block_table(table: PageTable) -> torch.Tensor:
    """int32 `[S, pages]`; a page that is not held reads 0."""
    width = max(map(len, table.rows), default=0)
    return torch.tensor([row + [0] * (width - len(row)) for row in table.rows], dtype=torch.int32).clamp_min_(0)
