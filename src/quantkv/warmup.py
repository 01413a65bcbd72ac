"""Everything that a serving configuration will use, compiled before the first request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from . import checks, deprecated, forked, implementations, under_way
from .cache import PagedCache
from .calls import AttendCall, AttentionOptions, Batch, OwnRows, WriteCall
from .copies import CacheWithCopies, FullPrecisionStep, with_room_for_one
from .full_precision import FullPrecisionTokens
from .implementations import Call, batches
from .options import PRECISIONS
from .prepared import PreparedAttend

QUERIES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 64, 65, 127, 128, 512)  # of a sequence of `mixed_batches`
FEW = range(1, 9)  # queries of a sequence that a batch of several kinds keeps together
OF_EACH_CALL = frozenset({"block_table", "seq_lens", "cu_seqlens_q", "max_query_len", "lengths"})  # arguments that no option can be
FEW_CORES = 4  # of a machine on which NVRTC compiles in threads: a process costs 0.3 s
ROWS = 16 * 160  # queries times heads from which on kernels are cut as for many: more than of any GPU's multiprocessors


@deprecated.keywords(exact="full_precision")
def warm_up(
    cache: PagedCache,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_lens: Iterable[int] = (1,),
    batch_sizes: Iterable[int] = (1, 64),
    write_sizes: Iterable[int] = (1, 64, 8192),
    max_seq_len: int = 8192,
    mixed: Iterable[Sequence[tuple[int, int]]] = (),
    table_width: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    full_precision: FullPrecisionTokens | None = None,
    own: bool = False,
    chunks: bool = False,
    **options: object,
) -> dict[str, str]:
    """Serve one call of each kind over `cache`, which is left as it was: {what it is: the implementation that serves it}.

    num_heads: query heads. dtype: of queries, keys and values. query_lens: queries of a sequence: 1 for decode, as many as are verified,
    hundreds for a prompt. batch_sizes: sequences of a call. write_sizes: tokens of a write. max_seq_len: positions that a block table has
    room for. mixed: batches whose lengths the host knows, (queries, keys) of each sequence, see `mixed_batches`. table_width: pages of a
    row of the block tables; None: those of max_seq_len. progress: called with (done, all, what) after each. full_precision: tokens that are
    read from 16-bit copies, which are then written as well. own: whether sequences with several queries read their own rows as given, see
    `PagedCache.attend`. chunks: of batches whose lengths are known, see `calls.Batch`; then only query_lens are verified. options: of
    `PagedCache.attend`, as requests will have them.
    What is compiled is compiled before anything runs, on all cores; inside `together` both wait for its end.
    ValueError, before that, naming the argument, its value and what is allowed.
    """
    checks.instance("progress", progress, (Callable, type(None)), "a function of (done, all, what) or None")
    sizes = _Sizes.of(query_lens, batch_sizes, write_sizes, mixed)
    given = _Given(cache, num_heads, dtype, max_seq_len, table_width, full_precision, own, chunks, options)
    one = _WarmUp.of(given, sizes, progress)
    later = _LATER.get()
    if later is None:
        _run([one])
    else:
        later.append(one)
    return one.served


@contextmanager
def together() -> Iterator[None]:
    """Inside the block `warm_up` only says who serves; at its end all that was asked is compiled at once, and then runs. Where caches have
    several geometries, their slowest kernels are compiled beside each other. Where the block raises, nothing is compiled."""
    asked: list[_WarmUp] = []
    token = _LATER.set(asked)
    try:
        yield
    finally:
        _LATER.reset(token)
    for device in dict.fromkeys(each.given.cache.device for each in asked):
        _run([each for each in asked if each.given.cache.device == device])


def compile_ahead(
    cache: PagedCache,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_lens: Iterable[int] = (1,),
    batch_sizes: Iterable[int] = (1, 64),
    write_sizes: Iterable[int] = (1, 64, 8192),
    max_seq_len: int = 8192,
    mixed: Iterable[Sequence[tuple[int, int]]] = (),
    table_width: int | None = None,
    full_precision: FullPrecisionTokens | None = None,
    own: bool = False,
    chunks: bool = False,
    executor: forked.ForkedExecutor | None = None,
    **options: object,
) -> dict[str, int]:
    """Compile what `warm_up` would, and run nothing: {compiler: kernels}. On a machine without a GPU inside `assumed.assuming`.

    executor: of processes in which it is done; None: threads, as `warm_up` does."""
    sizes = _Sizes.of(query_lens, batch_sizes, write_sizes, mixed)
    given = _Given(cache, num_heads, dtype, max_seq_len, table_width, full_precision, own, chunks, options)
    with _Ahead(cache.device, executor) as ahead:
        _WarmUp.of(given, sizes).compile(ahead)
    return {"nvrtc": len(ahead.begun), "triton": ahead.by_triton}


@dataclass(frozen=True)
class _WarmUp:
    """What one `warm_up` was asked. served: by whom each call is."""

    given: _Given
    sizes: _Sizes
    calls: dict[str, Call]
    served: dict[str, str]
    progress: Callable[[int, int, str], None] | None

    @classmethod
    def of(cls, given: _Given, sizes: _Sizes, progress: Callable[[int, int, str], None] | None = None) -> _WarmUp:
        calls = dict(given.calls(sizes))
        return cls(given, sizes, calls, {name: implementations.resolve(call)[0] for name, call in calls.items()}, progress)

    def compile(self, ahead: _Ahead) -> None:
        """Begin to compile what calls need, and where batches are mixed what others need."""
        for name, call in self.calls.items():
            if self.served[name] not in implementations.ON_CPU:
                ahead.of(partial(implementations.run, self.served[name], call))
        ahead.of(self.given.copied)
        for call in self.given.others(self.sizes.batch_sizes) if self.sizes.mixed else ():
            name = implementations.resolve(call)[0]
            serving = implementations.module(name, implementations.kind(call))
            if hasattr(serving, "compiled_for"):
                ahead.compile(serving.compiled_for(implementations.plain(name, call)))

    def run(self) -> None:
        for done, (name, call) in enumerate(self.calls.items(), 1):
            implementations.run(self.served[name], call)
            if self.progress is not None:
                self.progress(done, len(self.calls), f"{name}: {self.served[name]}")
        self.given.copied()


_LATER: ContextVar[list[_WarmUp] | None] = ContextVar("later", default=None)  # of `together`


def _run(asked: Sequence[_WarmUp]) -> None:
    """Compile on all cores what these need, of one device, then run them."""
    device = asked[0].given.cache.device
    with _Ahead(device) as ahead:
        for each in asked:
            each.compile(ahead)
    for each in asked:
        each.run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def who_serves(
    cache: PagedCache,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_lens: Iterable[int] = (1,),
    batch_sizes: Iterable[int] = (1, 64),
    write_sizes: Iterable[int] = (1, 64, 8192),
    max_seq_len: int = 8192,
    mixed: Iterable[Sequence[tuple[int, int]]] = (),
    table_width: int | None = None,
    own: bool = False,
    chunks: bool = False,
    **options: object,
) -> dict[str, tuple[str, dict[str, str]]]:
    """What `warm_up` would run, without running or compiling it: {what it is: the implementation that serves it, and why each one that goes
    before it does not}."""
    sizes = _Sizes.of(query_lens, batch_sizes, write_sizes, mixed)
    given = _Given(cache, num_heads, dtype, max_seq_len, table_width, None, own, chunks, options)
    return {name: implementations.resolve(call) for name, call in given.calls(sizes)}


def mixed_batches(num_heads: int, max_seqs: int, max_tokens: int, max_seq_len: int, own: bool = False) -> list[list[tuple[int, int]]]:
    """Batches of `warm_up` that between them need all that is compiled for batches of several kinds of sequences.

    num_heads: query heads. max_seqs, max_tokens: sequences and queries of a batch, at most. What is compiled depends on powers of two of
    the queries of the longest sequence; on whether there are several sequences; on the queries in all; and on whether keys are few. own:
    as of `warm_up`: where a prompt reads no page, chunks with a few keys before them are other calls."""
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for queries in QUERIES:
        room = min(max_seqs, max_tokens // queries)
        longest = [max_seq_len >> i for i in range(8 if queries == QUERIES[-1] else 1)]  # long prompts: of one, two, or more parts
        for count in sorted({min(n, room) for n in (1, 2, -(-ROWS // (queries * num_heads)))} - {0}):
            lengths = (queries, *[queries + 1] * own, *longest)
            found |= dict.fromkeys(((queries, keys),) * count for keys in lengths if queries <= keys <= max_seq_len)
    return [list(batch) for batch in found]


class _Ahead:
    """Compiles on all cores what calls would compile one after the other. What fails here is compiled, and says so, when it runs.

    An engine's process has a GPU and other threads, so it does not fork. NVRTC's kernels are compiled by new processes, where there are
    cores enough that threads would wait for each other, and Triton's by threads.
    """

    def __init__(self, device: torch.device, executor: forked.ForkedExecutor | None = None) -> None:
        self.device, self.keeps_open = device, executor is not None
        self.pool = ThreadPoolExecutor(forked.cores()) if executor is None else executor
        self.begun: set[Hashable] = set()
        self.launches: list[Any] = []
        self.by_triton = 0

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if self.launches and failed is None:
            from .implementations.triton import launch

            self.by_triton = launch.compile_ahead(self.launches, self.pool, self.device)
        if self.keeps_open and failed is None:
            self.pool.drain()
        else:
            self.pool.shutdown(cancel_futures=failed is not None)

    def of(self, run: Callable[[], object]) -> None:
        """Begin to compile what `run` would."""
        with under_way.collecting() as wanted:
            run()
        self.compile(each for each in wanted if hasattr(each, "cubin"))
        self.launches += [each for each in wanted if not hasattr(each, "cubin")]

    def compile(self, configurations: Iterable[Any]) -> None:
        """Begin to compile kernels by NVRTC."""
        for each in configurations:
            if each not in self.begun:
                self.begun.add(each)
                if isinstance(self.pool, forked.ForkedExecutor):
                    self.pool.submit(each.cubin, cost=getattr(each, "packed_rows", 0))
                elif forked.cores() < FEW_CORES:
                    self.pool.submit(each.cubin)
                else:
                    self.pool.submit(under_way.compile_apart, each.cubin)


class _Sizes(NamedTuple):
    """How large the calls are, as `warm_up` is told."""

    query_lens: list[int]
    batch_sizes: list[int]
    write_sizes: list[int]
    mixed: list[tuple[tuple[int, int], ...]]

    @classmethod
    def of(cls, query_lens: object, batch_sizes: object, write_sizes: object, mixed: object) -> _Sizes:
        """Sizes that were given. ValueError for what is none."""
        named = {"query_lens": query_lens, "batch_sizes": batch_sizes, "write_sizes": write_sizes}
        checks.instance("mixed", mixed, Iterable, "a sequence of batches, of a pair (queries, keys) for each sequence")
        found = [checks.pairs(f"mixed[{i}]", batch) for i, batch in enumerate(mixed)]
        for i, batch in enumerate(found):
            if not batch or not all(0 <= queries <= keys for queries, keys in batch):
                checks.refuse(f"mixed[{i}]", list(batch), "at least one pair, of 0 <= queries <= keys, is needed")
        return cls(*(checks.counts(name, values) for name, values in named.items()), found)


@dataclass(frozen=True)
class _Given:
    """What the calls of a cache have in common. held: tensors that they share, by what they are."""

    cache: PagedCache
    num_heads: int
    dtype: torch.dtype
    max_seq_len: int
    table_width: int | None
    full_precision: FullPrecisionTokens | None
    own: bool
    chunks: bool
    options: dict[str, object]
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.instance("cache", self.cache, PagedCache, "a PagedCache")
        checks.integer("num_heads", self.num_heads, 1, "a number of query heads")
        if self.dtype not in checks.ROW_DTYPES:
            checks.refuse("dtype", self.dtype, f"one of {', '.join(map(str, checks.ROW_DTYPES))} is needed")
        checks.integer("max_seq_len", self.max_seq_len, 1, "a number of tokens")
        checks.instance("table_width", self.table_width, (int, type(None)), "a number of pages or None")
        checks.integer("table_width", self.table_width or 0, 0, "a number of pages or None")
        checks.instance("full_precision", self.full_precision, (FullPrecisionTokens, type(None)), "FullPrecisionTokens or None")
        checks.instance("own", self.own, bool, "True or False")
        checks.instance("chunks", self.chunks, bool, "True or False")
        if taken := sorted(self.options.keys() & OF_EACH_CALL):
            checks.refuse("options", taken, "those are made for each call")

    def calls(self, sizes: _Sizes) -> Iterable[tuple[str, Call]]:
        for count in sizes.write_sizes:
            yield from self.writes(count)
        for queries in sizes.query_lens:
            for sequences in sizes.batch_sizes:
                batch = Batch(*self.starts([(queries, queries)] * sequences), queries, self.max_seq_len)
                yield f"attend of {sequences} x {queries} queries", self.attend(batch)
        for lengths in sizes.mixed:
            call = self.attend(Batch(*self.starts(lengths), lengths=lengths, chunks=self.chunks))
            for run in batches.cut(call):
                yield f"attend of {_described(run.call)}", run.call

    def others(self, batch_sizes: Iterable[int]) -> Iterable[Call]:
        """Steps of a few queries a sequence, of other numbers of sequences and other lengths, which may be served by other kernels.

        How several KV sources are read changes where a call has four times as much to read; who combines what one source comes to goes by
        each length, and by whether the host knows it. Chunks of any few queries are read alike."""
        most = max(batch_sizes, default=0)
        lengths = [n for n in (self.max_seq_len >> i for i in range(16)) if n >= 64]
        for queries in [n for n in ((1, 2, FEW[-1]) if self.chunks else FEW) if n <= self.max_seq_len]:
            alone = self.full_precision is None and not (self.own and queries > 1)
            chunks = self.chunks and queries > 1
            for sequences in [most >> i for i in range(most.bit_length())]:
                for longest in lengths if alone else sorted({*lengths[::2], *lengths[-1:]}):
                    tensors = self.starts([(queries, longest)] * sequences)
                    yield self.attend(Batch(*tensors, queries, longest, chunks=chunks))
                    if alone:
                        yield self.attend(Batch(*tensors, lengths=((queries, longest),) * sequences, chunks=chunks))

    def writes(self, count: int) -> Iterable[tuple[str, WriteCall]]:
        cache, spec, device = self.cache, self.cache.spec, self.cache.device
        key = torch.zeros(count, spec.num_kv_heads, spec.head_size, dtype=self.dtype, device=device)
        value = torch.zeros(count, spec.num_kv_heads, spec.head_size_v, dtype=self.dtype, device=device)
        nowhere = torch.full((count,), -1, dtype=torch.int64, device=device)
        positions = torch.zeros_like(nowhere) if cache.maps.by_position else None  # as those who write give them
        yield f"write of {count} tokens", WriteCall(key, value, cache.k, cache.v, cache.format, nowhere, cache.maps, positions)
        if self.full_precision is not None:
            slots, copies = nowhere.int(), self.read.copies
            yield f"copies of {count} tokens", WriteCall(key, value, copies.k, copies.v, copies.format, slots, copies.maps)

    @cached_property
    def read(self) -> PagedCache | CacheWithCopies:
        """The cache, with a copy of a page where some tokens are exact."""
        return self.cache if self.full_precision is None else with_room_for_one(self.cache, self.full_precision, self.dtype)

    def copied(self) -> None:
        """Say what steps read exactly, as an engine does."""
        if self.full_precision is None:
            return
        size, device = self.cache.spec.block_size, self.cache.device
        pool = self.read.full_precision
        pool.watch(self.cache)
        table = torch.zeros(1, self.table_width or self.cache.spec.num_blocks(self.max_seq_len), dtype=torch.int32, device=device)
        starts, lengths = self.starts([(1, 1)])
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=device)
        step = FullPrecisionStep(self.full_precision, size, 1, 1, device)
        pool.advance(table, lengths, starts, nowhere, step)
        pool.note(nowhere, step)

    def starts(self, lengths: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each sequence's queries start, and its keys, on the device."""
        starts = torch.tensor([0, *accumulate(queries for queries, _ in lengths)], dtype=torch.int32, device=self.cache.device)
        return starts, torch.tensor([keys for _, keys in lengths], dtype=torch.int32, device=self.cache.device)

    def attend(self, batch: Batch) -> AttendCall:
        spec, device, sequences = self.cache.spec, self.cache.device, batch.num_seqs
        tokens = sum(n for n, _ in batch.lengths) if batch.lengths else sequences * batch.max_query_len
        q, out = (self.zeros(name, tokens, self.num_heads, n, dtype=self.dtype) for name, n in zip(("q", "out"), spec.query_sizes))
        table = self.zeros("table", sequences, self.table_width or spec.num_blocks(self.max_seq_len), dtype=torch.int32)
        step = None
        if self.full_precision is not None:
            step = FullPrecisionStep(self.full_precision, spec.block_size, sequences, 0, device)
        options = dict(self.options)
        scale, key_start, key_range = (options.pop(name, None) for name in ("scale", "key_start", "key_range"))
        prepared = PreparedAttend(batch, table, scale, AttentionOptions.of(options), key_start, key_range, full_precision=step)
        rows = None
        if self.own and batch.max_query_len > 1:
            sizes = (("key", spec.head_size), ("value", spec.head_size_v))
            rows = OwnRows(*(self.zeros(name, tokens, spec.num_kv_heads, size, dtype=self.dtype) for name, size in sizes))
        return prepared.call(self.read, q, out, None, rows, prepared.options)

    def zeros(self, name: str, rows: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The first rows of a tensor that all calls share."""
        if name not in self.held or len(self.held[name]) < rows:
            self.held[name] = torch.zeros(rows, *shape, dtype=dtype, device=self.cache.device)
        return self.held[name][:rows]


def _described(call: AttendCall) -> str:
    """A call of sequences of one length."""
    (queries, keys), precision = call.batch.lengths[0], call.options.prompt_precision
    scores = f" with {precision} scores" if precision != PRECISIONS[0] else ""
    return f"{call.batch.num_seqs} x {queries} queries of {keys} keys{scores}"
