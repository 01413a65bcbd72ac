"""Pages that leave a GPU for host memory and come back, while it goes on decoding; from there to a disk, for other processes too."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, pairwise
from typing import Any, BinaryIO

import torch

from . import checks
from .cache import PagedCache
from .page_file import checksums as checksums_of
from .page_file import read_layer, reading, refuse_page, write_layer, writing

CHUNK_BYTES = 1 << 26  # of scratch memory, two each way: pages lie apart in a cache, and one large copy is faster than many small ones
WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)  # what bytes are copied as within a GPU: fewer and larger numbers


class Transfer:
    """Copies that were begun by `PageStore`; on a CPU they have ended when they are returned."""

    def __init__(self, lanes: Any, event: Any) -> None:
        self._lanes, self._event = lanes, event

    @property
    def done(self) -> bool:
        """Whether they have ended; nothing waits."""
        return self._lanes.done(self._event)

    def wait(self) -> None:
        """Let the device's current stream go on when they have ended. The host does not wait."""
        self._lanes.wait(self._event)

    def synchronize(self) -> None:
        """Let the host wait until they have ended."""
        self._lanes.synchronize(self._event)


class StoredPages(Transfer):
    """Pages in a `PageStore`, and the copy that brings them there. pages: where they lie in the store's `host` caches."""

    def __init__(self, store: PageStore, event: Any, pages: list[int]) -> None:
        super().__init__(store._lanes, event)
        self.pages, self._store = pages, store
        self._loads: list[Any] = []
        self._checksums: Callable[[], list[list[int]]] | None = None


class PageStore:
    """Host memory for pages of a model's caches, to which sequences that wait go and from which they return.

    `store` and `load` return at once: on a GPU the copies run on streams of their own, after what the current stream was given so far.
    What is given to it afterwards must not write to pages that are stored, nor touch pages that are loaded, before `wait` or `done` of
    what was returned. Stores and loads keep out of each other's way by themselves: a page may be loaded into while it is still stored.

    caches: one for each layer, of any formats, on one device, with one numbering of pages.
    num_pages: what the store has room for, in each layer. Beside it the store takes four scratches of the device's memory: as large as
        the pages of one layer that it has room for, 64 MiB at most.
    checksums: keep the CRC-32 of every stored page, taken when it has arrived, and compare before a page goes back. A `load` then makes
        the host wait for the store and for the comparison.
    host: the caches on the host, in pinned memory where the device is a GPU; attend to them there.
    Errors: ValueError naming the argument, its value and what is allowed; nothing is copied then.
    """

    @torch.inference_mode(False)  # memory born in inference mode could not be written to outside of it
    def __init__(self, caches: Sequence[PagedCache], num_pages: int, *, checksums: bool = False) -> None:
        checks.integer("num_pages", num_pages, 1, "room for at least one page")
        checks.instance("caches", caches, Sequence, "a sequence of caches")
        for cache in caches:
            checks.instance("caches", cache, PagedCache, "a PagedCache for each layer")
        kinds = {(cache.device, cache.num_blocks) for cache in caches}
        if len(kinds) != 1:
            checks.refuse("caches", sorted(map(str, kinds)), "at least one, all on one device and of one number of pages, are needed")
        checks.instance("checksums", checksums, bool, "True or False")
        self.caches, self.checksums = tuple(caches), checksums
        ((self.device, self.num_blocks),) = kinds
        self._lanes = _lanes_of(self.device)
        self.host = tuple(self._host(cache, num_pages) for cache in self.caches)
        largest = max(cache.spec.block_bytes for cache in self.caches)
        scratch_bytes = max(min(CHUNK_BYTES, num_pages * largest), largest)
        self._lanes.make_scratch(scratch_bytes)
        self._pages = [wide(cache.buffer) for cache in self.caches]
        self._free = list(range(num_pages))  # in order, so that what is stored together lies together
        self._under_way: dict[str, list[tuple[set[int], Any]]] = {"store": [], "load": []}  # pages of the device, until when
        self._leaving: list[Any] = []  # loads from pages of the host that were released since the last store

    @property
    def room(self) -> int:
        """Pages that `store` has room for."""
        return len(self._free)

    def store(self, pages: Iterable[int]) -> StoredPages:
        """Begin to copy pages of every cache to the host. They are kept until `release`."""
        numbers = checks.page_numbers(pages, self.num_blocks)
        if len(numbers) > self.room:
            checks.refuse("pages", len(numbers), f"the store has room for {self.room}")
        places, left = self._free[: len(numbers)], self._free[len(numbers) :]
        after = [self._lanes.mark(), *self._users("load", numbers), *self._leaving]
        event = self._lanes.run("store", after, self._copy_out(numbers, places))
        self._free, self._leaving = left, []
        self._under_way["store"].append((set(numbers), event))
        stored = StoredPages(self, event, places)
        if self.checksums:
            stored._checksums = self._lanes.later(partial(self._checksums_of, stored))
        return stored

    def load(self, stored: StoredPages, pages: Iterable[int]) -> Transfer:
        """Begin to copy what was stored into pages of every cache, in order. It stays stored."""
        self._check_stored(stored)
        numbers = checks.page_numbers(pages, self.num_blocks)
        if len(numbers) != len(stored.pages):
            checks.refuse("pages", len(numbers), f"{len(stored.pages)} are stored")
        if stored._checksums is not None:
            expected = stored._checksums()
            for layer, (found, kept) in enumerate(zip(self._checksums_of(stored), expected)):
                for index, (a, b) in enumerate(zip(found, kept)):
                    if a != b:
                        checks.refuse(
                            "stored", f"layer {layer}, page {index}", f"damaged: checksum {a:#010x}, {b:#010x} when it was stored"
                        )
        after = [self._lanes.mark(), stored._event, *self._users("store", numbers)]
        event = self._lanes.run("load", after, self._copy_in(stored.pages, numbers))
        stored._loads.append(event)
        self._under_way["load"].append((set(numbers), event))
        return Transfer(self._lanes, event)

    def save(self, stored: StoredPages, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Write what was stored to a file, for another process too: a page file of each layer, one after another.

        file: a path, at which the file appears whole or not at all; or a binary file that is open for writing. The host waits for the
        store. OSError where the file cannot be written; ValueError where a page is not what was stored, which `checksums` finds. What was
        at the path is there still then.
        """
        self._check_stored(stored)
        self._lanes.synchronize(stored._event)
        sums = [None] * len(self.host) if stored._checksums is None else stored._checksums()
        with writing(file) as opened:
            for host, expected in zip(self.host, sums):
                write_layer(opened, host, torch.tensor(stored.pages, dtype=torch.int64, device="cpu"), expected)

    def read(self, file: str | os.PathLike[str] | BinaryIO, *, up_to_damage: bool = False) -> StoredPages:
        """Read what `save` wrote, here or in another process: from now on it is stored, as by `store`.

        up_to_damage: where a page of some layer is damaged, keep the pages before it, in every layer; what comes after is to be computed
        again. Else it is refused. The file as a whole is refused, with nothing stored, where it was cut, or its bytes would mean something
        else here: ValueError with the layer, and the digests of both sides (`page_meaning`). OSError where it cannot be read.
        """
        checks.instance("up_to_damage", up_to_damage, bool, "True or False")
        for event in self._leaving:  # copies out of places that are free now
            self._lanes.synchronize(event)
        places, sums, whole = None, [], 0
        with reading(file) as (opened, name, size):
            for layer, host in enumerate(self.host):
                where = f"{name}: layer {layer}"
                count = partial(self._room_for, where, None if places is None else len(places))
                places, pages, expected = read_layer(host, opened, where, count)
                whole = len(places) if layer == 0 else whole
                for index, (found, written) in enumerate(zip(checksums_of(pages), expected)):
                    if found != written:
                        if not up_to_damage:
                            refuse_page(where, index, found, written)
                        whole = min(whole, index)
                        break
                host.buffer[places] = pages
                sums.append(expected)
            if size is not None and (more := size - opened.tell()):
                checks.refuse(f"{name}: size", size, f"cut or changed: {more} bytes follow the pages of {len(self.host)} layers")
        kept = places[:whole]
        self._free, self._leaving = self._free[whole:], []
        stored = StoredPages(self, self._lanes.mark(), kept)
        if self.checksums:
            stored._checksums = lambda: [layer[:whole] for layer in sums]
        return stored

    def _room_for(self, name: str, needed: int | None, count: int) -> list[int]:
        """Free places for the pages of a layer's file; as many as of the layers before it."""
        if count > self.room:
            checks.refuse(f"{name}: pages", count, f"the store has room for {self.room}")
        if needed is not None and count != needed:
            checks.refuse(f"{name}: pages", count, f"the layers before it have {needed}")
        return self._free[:count]

    def release(self, stored: StoredPages) -> None:
        """Give back the room of stored pages. Loads of them that are under way end as if it had not been."""
        self._check_stored(stored)
        self._leaving = [event for event in (*self._leaving, *stored._loads) if not self._lanes.done(event)]
        self._free = sorted([*self._free, *stored.pages])
        stored.pages, stored._loads, stored._store = [], [], None

    def _check_stored(self, stored: StoredPages) -> None:
        if not isinstance(stored, StoredPages) or stored._store is not self:
            checks.refuse("stored", stored, "what `store` of this store returned, and was not released, is needed")

    def _users(self, lane: str, pages: list[int]) -> list[Any]:
        """Copies of `lane` under way from or to any of these pages of the device."""
        self._under_way[lane] = [(used, event) for used, event in self._under_way[lane] if not self._lanes.done(event)]
        return [event for used, event in self._under_way[lane] if not used.isdisjoint(pages)]

    @staticmethod
    def _host(cache: PagedCache, num_pages: int) -> PagedCache:
        shape = (num_pages, *cache.buffer.shape[1:])
        buffer = torch.zeros(shape, dtype=torch.uint8, device="cpu", pin_memory=cache.device.type == "cuda")
        return PagedCache.wrap(buffer, cache.spec, maps=cache.maps, k_scale=cache.k.scale, v_scale=cache.v.scale)

    def _checksums_of(self, stored: StoredPages) -> list[list[int]]:
        places = list(stored.pages)
        self._lanes.synchronize(stored._event)
        return [checksums_of(host.buffer[places]) for host in self.host]

    def _copy_out(self, numbers: list[int], places: list[int]) -> Iterator[tuple[_Step, _Step]]:
        """Two steps for each chunk: pages are gathered into a scratch, and go from there to the host."""
        index = self._lanes.index("store", 0, numbers)

        def gather(layer: int, begin: int, end: int, place: int, scratch: torch.Tensor) -> None:
            pages = self._pages[layer]
            torch.index_select(pages, 0, index[begin:end], out=_like(pages, scratch, end - begin))

        def send(layer: int, begin: int, end: int, place: int, scratch: torch.Tensor) -> None:
            rows = self.host[layer].buffer[place : place + end - begin]
            rows.copy_(_like(rows, scratch, end - begin), non_blocking=True)

        return ((partial(gather, *chunk), partial(send, *chunk)) for chunk in self._chunks(places))

    def _copy_in(self, places: list[int], numbers: list[int]) -> Iterator[tuple[_Step, _Step]]:
        """Two steps for each chunk: pages come from the host into a scratch, and are put in their places."""
        index = self._lanes.index("load", 1, numbers)

        def fetch(layer: int, begin: int, end: int, place: int, scratch: torch.Tensor) -> None:
            rows = self.host[layer].buffer[place : place + end - begin]
            _like(rows, scratch, end - begin).copy_(rows, non_blocking=True)

        def scatter(layer: int, begin: int, end: int, place: int, scratch: torch.Tensor) -> None:
            pages = self._pages[layer]
            pages.index_copy_(0, index[begin:end], _like(pages, scratch, end - begin))

        return ((partial(fetch, *chunk), partial(scatter, *chunk)) for chunk in self._chunks(places))

    def _chunks(self, places: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """The `runs` of places in each layer, cut into what a scratch holds: layer, first and last + 1, first place."""
        stretches = runs(places)
        for layer, cache in enumerate(self.caches):
            most = self._lanes.scratch_bytes // cache.spec.block_bytes
            for first, last in stretches:
                for begin in range(first, last, most):
                    yield layer, begin, min(begin + most, last), places[begin]


_Step = Callable[[torch.Tensor], None]  # of a scratch


def wide(buffer: torch.Tensor) -> torch.Tensor:
    """A buffer of bytes as fewer, larger numbers, as far as its sizes, strides and address allow."""
    sizes = (buffer.shape[-1], *buffer.stride()[:-1], buffer.storage_offset(), buffer.data_ptr())
    fitting = (dtype for dtype in WIDE if not any(n % dtype.itemsize for n in sizes))
    return buffer if buffer.stride(-1) != 1 else buffer.view(next(fitting, buffer.dtype))


def _like(rows: torch.Tensor, scratch: torch.Tensor, count: int) -> torch.Tensor:
    """So many rows in a scratch."""
    shape = (count, *rows.shape[1:])
    return scratch[: math.prod(shape) * rows.itemsize].view(rows.dtype).view(shape)


def runs(places: list[int]) -> list[tuple[int, int]]:
    """Neighbours among places that follow each other: index of the first and of the last + 1."""
    ends = [index for index, (place, after) in enumerate(pairwise(places), 1) if after != place + 1]
    return list(zip([0, *ends], [*ends, len(places)])) if places else []


class _Lanes:
    """Copies on a CPU, which end before they return; base of those on a GPU. A lane is a way, "store" or "load", of two streams: one for
    the kernels, which wait for a place among the model's, and one for the bus, which carries the chunk before meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_scratch(self, size: int) -> None:
        """Memory of so many bytes for two chunks of each lane; beside it, until when the last chunk is in it."""
        self.scratch_bytes = size
        self._scratch = {lane: cycle([[self.scratch(lane), None] for _ in range(2)]) for lane in ("store", "load")}

    def run(self, lane: str, after: Iterable[Any], chunks: Iterable[tuple[_Step, _Step]]) -> Any:
        """Begin the two steps of each chunk, on the lane's two streams, when the events of `after` have come -> the event that all have
        ended."""
        event = self.give(lane, 0, after, lambda: None)
        for (first, second), held in zip(chunks, self._scratch[lane]):
            event = self.give(lane, 0, [held[1]], partial(first, held[0]))
            held[1] = event = self.give(lane, 1, [event], partial(second, held[0]))
        return event

    def give(self, lane: str, stream: int, after: Iterable[Any], work: Callable[[], None]) -> Any:
        """Give work to a stream, to begin when the events of `after`, of which None has come, have come -> the event that it has ended."""
        work()

    def mark(self) -> Any:
        """What the current stream was given so far, as an event."""

    def wait(self, event: Any) -> None:
        """Let the current stream wait."""

    def synchronize(self, event: Any) -> None:
        """Let the host wait."""

    def done(self, event: Any) -> bool:
        return True

    def later(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Begin work of the host that waits for events -> what waits for its result."""
        result = work()
        return lambda: result

    def scratch(self, lane: str) -> torch.Tensor:
        return torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self.device)

    def index(self, lane: str, stream: int, numbers: list[int]) -> torch.Tensor:
        """Numbers on the device, for work of a stream."""
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


class _CudaLanes(_Lanes):
    """Copies on streams of a GPU, whose bus carries both ways at once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = {lane: [torch.cuda.Stream(device) for _ in range(2)] for lane in ("store", "load")}
        self._worker = ThreadPoolExecutor(1, "quantkv-checksums")

    def give(self, lane: str, stream: int, after: Iterable[torch.cuda.Event], work: Callable[[], None]) -> torch.cuda.Event:
        there = self._streams[lane][stream]
        for event in after:
            if event is not None:
                there.wait_event(event)
        with torch.cuda.stream(there):
            work()
        return there.record_event()

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def later(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return self._worker.submit(work).result

    def scratch(self, lane: str) -> torch.Tensor:
        first, second = self._streams[lane]
        with torch.cuda.stream(first):
            made = super().scratch(lane)
        made.record_stream(second)  # given back, it is used again after the last copy
        return made

    def index(self, lane: str, stream: int, numbers: list[int]) -> torch.Tensor:
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._streams[lane][stream]):
            return host.to(self.device, non_blocking=True)


def _lanes_of(device: torch.device) -> _Lanes:
    return (_CudaLanes if device.type == "cuda" else _Lanes)(device)
