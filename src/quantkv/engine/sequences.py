"""The pages of a batch that advances layer by layer, and the tensors of the passes over it."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from ..copies import CopiedPages
from ..full_precision import FullPrecisionTokens
from ..geometry import Kind
from ..page_table import PageTable
from .cache_positions import CachePositions
from .decode_metadata import DecodeMetadata, pooled
from .forward_metadata import to_device
from .layer_config import full_precision_tokens
from .padded_metadata import PaddedMetadata, RightPadding

SPARE = 1.25  # a table that is full grows by this factor


class Layer(Protocol):
    """What keeps rows: pages of one size, that it makes when it sees the first rows."""

    home: torch.device | None  # where its pages are; None before there are any
    geometry: Any  # equal for layers whose prepared calls are the same
    written: list[torch.Tensor]  # what a pass of one token writes to

    def make_room(self, num_pages: int, copies: list[tuple[int, int]]) -> None:
        """Hold `num_pages` pages, and copy these pages (from, to) to part sequences that shared them."""

    def loaded(self, decoding: DecodeMetadata) -> None:
        """The step on the device changed: let what was prepared for it read the new one."""

    def warm_up(self) -> None:
        """Run what a first pass would compile."""


class Sequences:
    """The batch as the layers of one kind see it: which pages they hold, and the tensors of the forward pass under way.

    cache_positions: what these layers share with those of other kinds; one of its own if None.
    full_precision: which tokens are read exactly; None: none. With a window no first ones are, as no query sees them for long.
    pools: which pages have a 16-bit copy, on each device.
    layers: those of this kind, which join by themselves.
    num_tokens: tokens a sequence whose pages are there from the first pass on, so that a pass of one token can be captured; 0: pages
        are added as they are needed.
    windows: those that the model asked masks for, None for a mask without one.
    """

    def __init__(
        self, kind: Kind, block_size: int, cache_positions: CachePositions | None = None, full_precision: FullPrecisionTokens | None = None
    ) -> None:
        self.kind, self.block_size, self.record_past, self.num_tokens = kind, block_size, False, 0
        self.fixed = False  # num_tokens > 0: torch.compile must not look at the number
        self.windows: set[int | None] = set()
        self.full_precision, self.pools = full_precision_tokens(full_precision, kind.window > 0), {}
        self.cache_positions = CachePositions() if cache_positions is None else cache_positions
        self.cache_positions.kinds.append(self)
        self._layers: list[weakref.ref[Layer]] = []
        self._owned: dict[Any, DecodeMetadata] = {}
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        self.cache_positions.settle()
        return {**vars(self), "_layers": [], "_steps": {}, "_owned": {}, "decodings": {}, "loaded": False}  # prepared calls are made anew

    @property
    def layers(self) -> list[Layer]:
        """The layers of this kind that are still alive."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    def join(self, layer: Layer) -> None:
        """A layer of this kind, which is not kept alive: its pages go when the cache does."""
        self._layers.append(weakref.ref(layer))

    def reset(self) -> None:
        """No sequences, and no pages in use."""
        self.table: PageTable | None = None
        self._steps: dict[torch.device, PaddedMetadata] = {}
        self._block_table = torch.empty(0, 0, dtype=torch.int32, device="cpu")
        for pool in self.pools.values():
            pool.clear()
        self.unload()

    def unload(self) -> None:
        """The tensors on devices say no longer what the host does."""
        self.decodings: dict[torch.device, DecodeMetadata] = {}
        self.loaded = False

    @property
    def static(self) -> bool:
        """Whether a pass of one token needs nothing of the host."""
        return self.cache_positions.static and self.fixed

    def begin(self, counts: list[int], rows: torch.Tensor | None, right_padding: RightPadding | None = None) -> None:
        """Make room for `counts[i]` new tokens of sequence i; rows: see `PaddedMetadata`."""
        if self.table is None:
            self.table = PageTable(self.block_size, len(counts))
        self.unload()
        table = self.table
        if not self.record_past:
            self._release()
        self._make_room(table.append(counts))
        self._block_table = _block_table(table)
        ends, total = [0], 0
        for n in counts:
            ends.append(total := total + n)
        ends, lengths = (torch.tensor(numbers, dtype=torch.int32, device="cpu") for numbers in (ends, table.lengths))
        sequence = torch.arange(len(counts), device="cpu").repeat_interleave(ends.diff())
        position = torch.arange(total, device="cpu") + (lengths - ends[1:])[sequence]
        slots = self._block_table[sequence, position // self.block_size] * self.block_size + position % self.block_size
        pairs, after = tuple(zip(counts, table.lengths)), None if right_padding is None else right_padding.metadata(self._block_table)
        tensors = rows, slots.int(), self._block_table, lengths, ends, position.int()
        first = PaddedMetadata(*tensors, lengths=pairs, right_padding=after, num_pages=table.num_pages)
        self._steps = {torch.device("cpu"): first}

    def step(self, device: torch.device) -> PaddedMetadata:
        """The forward pass under way, with tensors on `device`."""
        if device not in self._steps:
            self._steps[device] = self._steps[torch.device("cpu")].to(device)
        step = self._steps[device]
        if self.full_precision is not None and step.full_precision is None:
            step.advance_full_precision(self.pool(device))
        return step

    def pool(self, device: torch.device) -> CopiedPages | None:
        """Which pages have a 16-bit copy; None where no token is at full precision."""
        if self.full_precision is not None and device not in self.pools:
            self.pools[device] = CopiedPages(self.full_precision, self.block_size, len(self.table.rows), self.table.num_pages, device)
        return self.pools.get(device)

    def decode(self, counts: list[int]) -> None:
        """Make room for one new token of sequence i, or none where `counts[i]` is 0, in a pass of one token a sequence."""
        table, before = self.table, self.table.lengths
        if not self.record_past and not self.static:
            self._release()
        pages = sum(map(len, table.rows))
        copies = table.append(counts)
        self._make_room(copies)
        if not self.loaded:
            self.load(before)
        elif copies or sum(map(len, table.rows)) != pages:
            self._write_table()

    def load(self, lengths: list[int] | None = None) -> None:
        """Bring tables and lengths (None: those of the table) to the devices of the layers, for passes of one token."""
        table = self.table
        if self.static:
            self._make_room(table.reserve([max(n, self.num_tokens) for n in table.lengths]))
        lengths = table.lengths if lengths is None else lengths
        for device in dict.fromkeys(layer.home for layer in self.layers if layer.home is not None):
            self.decodings[device] = self._decoding(device)
            self.decodings[device].load(table.rows, lengths)
        self.loaded = True

    def _write_table(self) -> None:
        """Other pages, the lengths as they are on the devices."""
        for device, old in self.decodings.items():
            new = old if old.fits(len(self.table.rows), max(map(len, self.table.rows))) else self._decoding(device)
            if new is not old:
                for name in ("lengths_now", "seq_lens", "valid"):
                    getattr(new, name).copy_(getattr(old, name))
                self.decodings[device] = new
            new.load(self.table.rows, None)

    def _decoding(self, device: torch.device) -> DecodeMetadata:
        batch_size, width = len(self.table.rows), max(max(map(len, self.table.rows), default=0), 1)
        if not self.static:
            if device not in self._owned or not self._owned[device].fits(batch_size, width):
                self._owned[device] = DecodeMetadata(
                    self.kind, self.block_size, batch_size, int(width * SPARE) + 4, device, self.full_precision
                )
            return self._owned[device]
        layers = [layer for layer in self.layers if layer.home == device]
        geometry = tuple(layer.geometry for layer in layers)
        key = (device, batch_size, width, geometry)
        if key not in self._owned:
            self._owned[key] = pooled(layers[0], geometry, self.kind, self.block_size, batch_size, width, device, self.full_precision)
        return self._owned[key]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses that a captured graph reads and writes: while they are the same, it may be replayed."""
        written = [t for layer in self.layers for t in layer.written]
        return tuple(t.data_ptr() for t in (*(d.place for d in self.decodings.values()), *written))

    def warm_up(self) -> None:
        """Everything that a pass of one token compiles or allocates for good, before one is captured."""
        for layer in self.layers:
            decoding = self.decodings.get(layer.home)
            if decoding is not None:
                layer.loaded(decoding)
                if layer.home.type == "cuda" and not decoding.warm:
                    decoding.slots.fill_(-1)
                    if decoding.full_precision is not None:
                        decoding.full_precision.slots.fill_(-1)
                    layer.warm_up()
        for decoding in self.decodings.values():
            decoding.warm = True

    def select(self, indices: list[int]) -> None:
        """Keep these sequences, in this order; one named twice shares its pages until one of the two writes."""
        self.table.select(indices)
        self.unload()

    def can_crop(self, lengths: list[int]) -> bool:
        """Whether the pages that later queries see of sequences of these lengths are all held."""
        return all(self.table.holds(i, self.kind.first_seen(length)) for i, length in enumerate(lengths))

    def crop(self, lengths: list[int]) -> None:
        """Cut each sequence to a length in tokens."""
        self.table.truncate(lengths)
        self._release()
        self.unload()

    def _make_room(self, copies: list[tuple[int, int]]) -> None:
        for device, pool in self.pools.items():
            pool.make_room(len(self.table.rows), self.table.num_pages)
            if copies:
                pool.forget(to_device(torch.tensor([target for _, target in copies], device="cpu"), device))
        for layer in self.layers:
            layer.make_room(self.table.num_pages, copies)

    def _release(self) -> None:
        if self.kind.window:
            self.table.release([self.kind.first_seen(n) for n in self.table.lengths])


def _block_table(table: PageTable) -> torch.Tensor:
    """int32 `[S, pages]`; a page that is not held reads 0."""
    width = max(map(len, table.rows), default=0)
    return torch.tensor([row + [0] * (width - len(row)) for row in table.rows], dtype=torch.int32, device="cpu").clamp_min_(0)
