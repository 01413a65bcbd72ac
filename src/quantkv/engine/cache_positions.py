"""How far the layers of a cache are in the forward passes, and what the masks of those said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..checks import refuse
from .decode_metadata import mask_summary
from .forward_metadata import is_capturing
from .padded_metadata import RightPadding

if TYPE_CHECKING:
    from .sequences import Sequences


class CachePositions:
    """How far the layers of a cache are: each goes through every forward pass once, and what its mask says is read once.

    A call that is refused changes nothing. A pass that fails once a layer has stored rows, or that leaves layers out, is an error in
    every later call until `reset`, as the layers then hold different tokens.

    kinds: the layers by what they see. num_layers: how many go through a pass.
    seen: tokens that all of them hold, padding included: what transformers calls the sequence length.
    padding: how many of these are padding, for each sequence; None before the first pass.
    holes: whether padding stands elsewhere than on the left.
    count: tokens a sequence of the last pass. turn: passes so far.
    capturable: whether passes of one token may run without the host, where pages are there for them. outgrown: a sequence outgrew them.
    shared: whether layers read the rows that others store.
    statistics: what its layers wait for, as `Policy.statistics` says it, before they store their first row; "off": nothing.
    stale: the device alone knows how many of the latest tokens were padding; the lengths here are the most that they can be.
    behind: it alone knows how many passes of one token there were: they ran compiled, or in a graph.
    counter: `seen` on the device, for such passes.
    """

    def __init__(self) -> None:
        self.kinds: list[Sequences] = []
        self.num_layers, self.turn, self.traced = 0, 0, 0
        self.capturable, self.shared, self.statistics = True, False, "off"
        self.counter: torch.Tensor | None = None
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        failed = self.failed or self._left > 0  # a pass under way is not taken along
        return {**vars(self), "failed": failed, "_masks": [], "counter": None}

    def reset(self) -> None:
        """Back to an empty cache, in place."""
        self.seen, self.holes, self.failed, self.outgrown = 0, False, False, False
        self.stale = self.behind = False
        self.padding: list[int] | None = None
        self.count, self._left, self.traced = 0, 0, 0  # _left: layers that are not through the pass under way
        self._room = 0  # passes of one token that surely fit
        self._masks: list[torch.Tensor | None] = []  # those that its layers came with, all equal
        for sequences in self.kinds:
            sequences.reset()

    @property
    def static(self) -> bool:
        """Whether passes of one token may run without the host: no sequence outgrew its pages."""
        return self.capturable and not self.outgrown

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first forward pass."""
        return -1 if self.padding is None else len(self.padding)

    def settle(self) -> None:
        """Learn from the device what it alone knows. RuntimeError where what it computed since then was not a number."""
        if not self.stale or self.failed or self._left:
            return
        decodings = [next(iter(sequences.decodings.values())) for sequences in self.kinds]
        read = [torch.cat([d.lengths_now, d.valid.int()]).tolist() for d in decodings]
        if self.behind:
            self.seen = int(self.counter)
        size = self.batch_size
        if not all(all(numbers[size:]) for numbers in read):
            self.failed = True
            raise RuntimeError(
                "cache: in an earlier pass of one token a sequence outgrew num_tokens, or the attention_mask changed what it said of "
                "earlier tokens; the cache must be reset"
            )
        for sequences, numbers in zip(self.kinds, read):
            sequences.table.settle(numbers[:size])
        padding = [self.seen - n for n in read[0][:size]]
        self.holes = self.holes or any(new > old and new < self.seen for old, new in zip(self.padding, padding))
        self.padding, self.stale, self.behind = padding, False, False

    def catch_up(self) -> None:
        """Before a layer joins a pass: how many passes there were without the host."""
        if self.behind and not self._left:
            self.settle()

    @property
    def padded(self) -> bool:
        """Whether a sequence of the batch has padding on its left."""
        return self.padding is not None and any(self.padding)

    @property
    def remote(self) -> bool:
        """Whether a pass that begins now has to take the number of tokens from the device."""
        return self.static and self.counter is not None and (is_capturing() or self.behind)

    @property
    def ready(self) -> bool:
        """Whether a pass of one token may run now without the host."""
        return self.static and not self.failed and all(sequences.static and sequences.loaded for sequences in self.kinds)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where what such passes write to lies."""
        return tuple(a for sequences in self.kinds for a in sequences.addresses)

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
        elif not any(mask is known for known in self._masks) and (count > 1 or mask is None or mask.device.type == "cpu"):
            if not torch.equal(*(_whole(m, batch_size, self.seen + count) for m in (mask, self._masks[0]))):
                refuse("attention_mask", "changed", "all layers of a forward pass have the same padding")
            self._masks.append(mask)

    def leave(self) -> None:
        """A layer is through."""
        self._left -= 1
        if not self._left:
            self.seen, self.turn = self.seen + self.count, self.turn + 1
            self._load()

    def follow(self, index: int) -> None:
        """Layer `index` joins a pass of one token that is being compiled or captured: the host will not be there when it runs."""
        if index != self.traced:
            raise RuntimeError(f"cache: layer {index} where {self.traced} was due: all layers go through a pass, in their order, once")
        self.traced = (index + 1) % self.num_layers
        if not index:
            self.counter.add_(1)
            self.stale = self.behind = True

    def _load(self) -> None:
        """After a pass: bring to the devices what the next one needs, if that may run without the host."""
        if not self.static or not any(sequences.static for sequences in self.kinds):
            return
        self.outgrown = self._is_outgrown()
        if self.static and not all(sequences.loaded or not sequences.static for sequences in self.kinds):
            for sequences in self.kinds:
                sequences.load()
                sequences.warm_up()
            if self.counter is None:
                with torch.inference_mode(False):
                    self.counter = torch.zeros((), dtype=torch.int64, device=next(iter(self.kinds[0].decodings)))
                torch._dynamo.mark_static_address(self.counter, guard=False)
        if self.counter is not None:
            self.counter.fill_(self.seen)
        self._room = min((s.num_tokens - max(s.table.lengths, default=0) for s in self.kinds if s.fixed), default=0)

    def watch(self) -> None:
        """Called at least once before each pass of one token that may run without the host: whether there is still room for it."""
        if self.behind and not self.failed:
            self._room -= 1
            if self._room <= 0:
                self.settle()
                self._load()

    def _is_outgrown(self) -> bool:
        """Whether a sequence has no room for one token more among its first pages."""
        return any(max(s.table.lengths, default=0) >= s.num_tokens for s in self.kinds if s.num_tokens)

    def check_whole(self) -> None:
        """RuntimeError unless all layers hold the same tokens."""
        if self.failed or self._left:
            raise RuntimeError("cache: a forward pass failed or skipped layers, which hold different tokens now; the cache must be reset")

    def select(self, indices: list[int]) -> None:
        """Make the batch that of the sequences `indices`."""
        self.check_whole()
        self.settle()
        if self.padding is not None:
            for sequences in self.kinds:  # they hold as many sequences each: the first refuses for all
                sequences.select(indices)
            self.padding = [self.padding[i] for i in indices]
            self._load()

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every sequence."""
        self.check_whole()
        self.settle()
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
        self._load()

    def _begin(self, batch_size: int, count: int, mask: torch.Tensor | None) -> None:
        if self.padding is not None and len(self.padding) != batch_size:
            refuse("batch size", batch_size, f"the cache holds {len(self.padding)} sequences; reset it or take another")
        if count == 1 and self.seen:
            return self._begin_decoding(mask)
        self.settle()
        padding = [0] * batch_size if self.padding is None else self.padding
        if mask is not None:
            counts, rows, holes, right_padding = self._read(mask[:, 0, 0, 1:] if mask.ndim == 4 else mask, padding, count)
        elif any(padding):
            self._refuse_no_mask()
        else:
            counts, rows, holes, right_padding = [count] * batch_size, None, False, None
        self.failed = True  # should memory end half-way
        for sequences in self.kinds:
            sequences.begin(counts, rows, right_padding)
        self.padding, self.holes = [p + count - n for p, n in zip(padding, counts)], holes
        self.count, self._left, self._masks, self.failed = count, self.num_layers, [mask], False

    def _begin_decoding(self, mask: torch.Tensor | None) -> None:
        """A pass of one token a sequence: on an accelerator the host reads nothing of its mask, if it can go on without."""
        windows = any(sequences.kind.window for sequences in self.kinds)
        empty = any(not length for sequences in self.kinds for length in sequences.table.lengths)
        told = mask is None or mask.device.type == "cpu" or (windows and empty)
        if told:
            self.settle()
        counts, holes = [1] * self.batch_size, self.holes
        if mask is None and any(self.padding):
            self._refuse_no_mask()
        elif mask is not None:
            shape = (self.batch_size, self.seen + 1) if mask.ndim == 2 else (self.batch_size, 1, 1, 2)
            if mask.shape != shape:
                refuse("attention_mask.shape", tuple(mask.shape), f"{shape} is needed")
            if told:
                counts, holes = self._read_last(mask, windows)
        self.failed = True
        if self.static and self._is_outgrown():
            self.outgrown = True
        for sequences in self.kinds:
            sequences.decode(counts)
        self.padding, self.holes = [p + 1 - n for p, n in zip(self.padding, counts)], holes
        self.count, self._left, self._masks, self.failed, self.stale = 1, self.num_layers, [mask], False, self.stale or not told

    def _read_last(self, mask: torch.Tensor, windows: bool) -> tuple[list[int], bool]:
        """Which of the new tokens are real, and whether there are holes then."""
        total, new = (mask_summary(mask) if mask.ndim == 2 else mask)[:, 0, 0].T.tolist()
        if [self.seen - n + m for n, m in zip(total, new)] != self.padding:
            refuse("attention_mask", "changed", "tokens stored earlier are masked now, or padding became tokens")
        holes = self.holes or any(not m and p < self.seen for p, m in zip(self.padding, new))
        if holes and windows:
            refuse("attention_mask", "padding after tokens", "layers with a window need padding on the left")
        return new, holes

    def _refuse_no_mask(self) -> NoReturn:
        refuse("attention_mask", None, "this cache holds padded sequences: the mask must say where, in every call")

    def _read(self, mask: torch.Tensor, padding: list[int], count: int) -> tuple[list[int], torch.Tensor | None, bool, RightPadding | None]:
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
            self._right_padding(real) if holes else None,
        )

    def _right_padding(self, real: torch.Tensor) -> RightPadding | None:
        before = real.cumsum(1)[:, self.seen :].flatten()
        rows = (~real[:, self.seen :].flatten() & (before > 0)).nonzero().squeeze(1)
        return RightPadding(rows, rows // (real.shape[1] - self.seen), before[rows]) if len(rows) else None


def _whole(mask: torch.Tensor | None, batch_size: int, count: int) -> torch.Tensor:
    """The mask on the host, bool; all True for None."""
    return torch.ones(batch_size, count, dtype=torch.bool, device="cpu") if mask is None else mask.cpu().bool()
