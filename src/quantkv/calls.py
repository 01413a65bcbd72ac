"""What write and attend are given: one frozen description of a call, checked once, where it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from . import checks, deprecated
from .format import Codec, Format
from .maps import LayerMaps, LinearMap
from .options import PROMPT_QUERIES, AttentionOptions
from .own import OwnRows, stored_before
from .reads import key_intervals

T = TypeVar("T")
__getattr__ = deprecated.module(__name__, "quantkv.calls", {"Side": "PagedTensor"})


class PagedTensor(NamedTuple):
    """K or V of a paged cache, as strided views.

    codes: `[num_blocks, block_size, HK, code_bytes]` of the codec's code dtype.
    meta: `[num_blocks, block_size, HK, fields]` float32 or float16, None for a codec without metadata.
    scale: per-tensor scale, a float: rows are divided by it before they are encoded.
    base, layout: `in_storage_of` fills them in, for what needs the one buffer that a side is a view of: the Hopper kernels, and
        torch.compile, which cannot follow writes to views of one storage that differ in dtype.
    """

    codes: torch.Tensor
    meta: torch.Tensor | None = None
    scale: float = 1.0
    base: torch.Tensor | None = None
    layout: tuple[int, ...] = ()

    def in_storage_of(self, base: torch.Tensor) -> PagedTensor:
        """The same side, known as views of the storage that uint8 tensor `base` begins: shape, strides and offset of each."""
        views = [t for t in (self.codes, self.meta) if t is not None]
        return self._replace(base=base, layout=tuple(n for t in views for n in (*t.shape, *t.stride(), t.storage_offset())))


class Segment(NamedTuple):
    """Some of the keys of every sequence, in one cache.

    k, v: K and V; of a format of latents, the latents and their rotated dimensions: together the keys, the latents alone the values.
    block_table: int `[S, pages]`; entries of pages that no query sees may hold anything.
    maps: the layer's linear maps, of `k` and of `v`.
    key_start: int `[S]`: position of the key in the first slot; 0 if None.
    key_range: int `[S, 2]`: only positions from start to before end are read; all below the sequence's length if None.
    complete: said by the caller: the table holds every position from 0, and those outside of key_range are in the call's other segments.
    """

    k: PagedTensor
    v: PagedTensor
    fmt: Format
    block_table: torch.Tensor
    maps: LayerMaps
    key_start: torch.Tensor | None = None
    key_range: torch.Tensor | None = None
    complete: bool = False

    @property
    def stored_sizes(self) -> tuple[int, int]:
        """Numbers of a row of `k` and of `v`."""
        return self.fmt.k.head_size(self.k.codes), self.fmt.v.head_size(self.v.codes)

    @property
    def head_size(self) -> int:
        """D: numbers of a key."""
        return sum(self.stored_sizes) if self.fmt.latent else self.stored_sizes[0]

    @property
    def head_size_v(self) -> int:
        """D_V: numbers of a value."""
        return self.stored_sizes[0 if self.fmt.latent else 1]

    @property
    def values(self) -> tuple[PagedTensor, Codec, LinearMap | None]:
        """What values are read from, their codec and their map."""
        return (self.k, self.fmt.k, self.maps.k) if self.fmt.latent else (self.v, self.fmt.v, self.maps.v)


@dataclass(frozen=True, eq=False)
class Batch:
    """Which queries belong to which sequence, and how many keys each has.

    cu_seqlens_q: int `[S + 1]`, where each sequence's queries start. seq_lens: int `[S]`, keys, the new ones included.
    max_query_len, max_seq_len: no sequence has more queries, more keys; upper bounds that make kernels faster and scratch smaller,
        not checked on a GPU. None: no bound is known.
    lengths: `(queries, keys)` of each sequence where the host knows them: nothing waits for the device then, and a mixed batch is cut
        into runs that are served each by what suits it. They are those on the device, to the token. None: they are not known.
    chunks: whether several queries of a sequence are always part of a prompt, never drafts that are verified: then one kernel serves any
        few of them, a little slower than one for each number, and fewer are compiled.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int | None = None
    max_seq_len: int | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    chunks: bool = False

    def __post_init__(self) -> None:
        for name, column in (("max_query_len", 0), ("max_seq_len", 1)):
            bound = getattr(self, name)
            checks.bound(name, bound)
            if self.lengths:
                longest = max(pair[column] for pair in self.lengths)
                if bound is not None and bound < longest:
                    checks.refuse(name, bound, f"lengths name a sequence of {longest}")
                object.__setattr__(self, name, longest)

    @classmethod
    def of(
        cls,
        q: torch.Tensor | None,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        lengths: Sequence[tuple[int, int]] | None = None,
    ) -> Batch:
        """A batch; without cu_seqlens_q one query a sequence. q: the queries, where they are known."""
        checks.tensor("seq_lens", seq_lens, (None,), checks.INDEX_DTYPES)
        if cu_seqlens_q is None:
            num_seqs = seq_lens.shape[0]
            if isinstance(q, torch.Tensor) and q.ndim and q.shape[0] != num_seqs:
                checks.refuse("cu_seqlens_q", None, f"{q.shape[0]} queries for {num_seqs} sequences: say where each starts")
            checks.bound("max_query_len", max_query_len)
            cu_seqlens_q, max_query_len = torch.arange(num_seqs + 1, device=seq_lens.device, dtype=torch.int32), 1
        return cls(cu_seqlens_q, seq_lens, max_query_len, max_seq_len, None if lengths is None else checks.pairs("lengths", lengths))

    @property
    def num_seqs(self) -> int:
        """S: sequences of the batch."""
        return self.seq_lens.shape[0]

    def host_lengths(self) -> tuple[tuple[int, int], ...]:
        """`(queries, keys)` of each sequence; read from the device, which the host waits for, unless they are known."""
        if self.lengths is not None:
            return self.lengths
        read = torch.cat([self.cu_seqlens_q.diff(), self.seq_lens]).tolist()
        return tuple(zip(read, read[self.num_seqs :]))

    def check(self, tokens: int, device: torch.device) -> None:
        """ValueError where types, shapes or lengths do not fit each other or the rows of q. No values are read."""
        checks.tensor("seq_lens", self.seq_lens, (None,), checks.INDEX_DTYPES, device)
        checks.tensor("cu_seqlens_q", self.cu_seqlens_q, (self.num_seqs + 1,), checks.INDEX_DTYPES, device)
        if self.lengths is not None and len(self.lengths) != self.num_seqs:
            checks.refuse("lengths", f"{len(self.lengths)} pairs", f"one for each of {self.num_seqs} sequences is needed")
        if self.lengths is not None and sum(queries for queries, _ in self.lengths) != tokens:
            checks.refuse("lengths", list(self.lengths), f"their queries are the {tokens} of q")


def _like(call: T, **changed: Any) -> T:
    made = object.__new__(type(call))
    made.__dict__.update(call.__dict__, **changed)
    return made


@dataclass(frozen=True, eq=False)
class AttendCall:
    """One call of attention: `softmax(scale * q . k^) . v^` over the pages of each sequence.

    q: `[T, HQ, D]` bf16, fp16 or fp32, the queries of all sequences one after the other; any strides.
    segments: the keys of a sequence lie in one cache or, disjoint, in several: exact first and latest tokens, say, the others
        quantized. All have the same kv heads and head sizes, all or none are of latents; those whose values have a map share it and its
        per-tensor scale, as do those without.
    batch, options: see there; None: plain causal attention. scale: of the scores; `D ** -0.5` if None, but latents need the model's.
    out: `[T, HQ, D_V]` of q's dtype, float8_e4m3fn with an output scale, its last axis dense; made if None.
    lse: `[T, HQ]` float32, filled with the natural log-sum-exp, sinks included, -inf where a query has no key; None: it is not asked for.
    own: rows that are read as they were given; None: all are read from the segments. It is None where no sequence has several queries.
    few: what runs of `few_queries` read in place of the segments, where the call is cut into runs; None: the segments.
    parts: q once more, as its first numbers, for latents, and its last ones, for their rotated dimensions; None: only q is there.
    mean: `[D_V]` of q's dtype, added to every output; None: nothing is. Who serves the call may leave both to `PreparedAttend`.
    ValueError, before anything runs, naming the argument, its value and what is allowed.
    """

    q: torch.Tensor
    segments: tuple[Segment, ...]
    batch: Batch
    scale: float | None = None
    options: AttentionOptions | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    own: OwnRows | None = None
    few: tuple[Segment, ...] | None = None
    parts: tuple[torch.Tensor, torch.Tensor] | None = None
    mean: torch.Tensor | None = None

    def __post_init__(self) -> None:
        checks.tensor("q", self.q, (None, None, None), checks.ROW_DTYPES)
        checks.no_gradient("q", self.q)
        if self.options is None:  # no default of the field: torch.compile follows none that is an object
            object.__setattr__(self, "options", AttentionOptions())
        if not isinstance(self.segments, tuple) or not self.segments:
            checks.refuse("segments", self.segments, "a tuple of at least one is needed")
        tokens, num_heads, head_size = self.q.shape
        first, device, num_seqs = self.segments[0], self.q.device, self.batch.num_seqs
        heads, head_size_v = first.k.codes.shape[2], first.head_size_v
        if num_heads % heads:
            checks.refuse("q.shape[1]", num_heads, f"a multiple of the {heads} kv heads is needed")
        self.batch.check(tokens, device)
        self.options.check({"S": num_seqs, "HQ": num_heads}, device)
        if self.options.prompt_precision != "16bit":
            self._settle_precision(first.fmt)
        for segment in self.segments:
            _check_segment(segment, heads, (head_size, head_size_v), first.fmt.latent, num_seqs, device)
        _check_shared(self.segments)
        if self.own is not None:
            self.own.check(tokens, heads, first.stored_sizes, device)
            if self.batch.max_query_len in (0, 1):
                object.__setattr__(self, "own", None)
        if self.scale is None:
            if first.fmt.latent:
                checks.refuse("scale", None, "queries of latents are absorbed: the model's is needed, (qk_nope_head_dim + rope) ** -0.5")
            object.__setattr__(self, "scale", head_size**-0.5)
        checks.number("scale", self.scale)
        shape, scaled = (tokens, num_heads, head_size_v), self.options.output_scale is not None
        if self.out is None:
            object.__setattr__(self, "out", self.q.new_empty(shape, dtype=torch.float8_e4m3fn if scaled else self.q.dtype))
        dtypes = (torch.float8_e4m3fn,) if scaled else checks.ROW_DTYPES
        checks.tensor("out", self.out, shape, dtypes, device)
        if self.out.stride(2) != 1 and head_size_v > 1:
            checks.refuse("out.stride()", self.out.stride(), "a dense last axis is needed")
        if self.mean is not None:
            checks.tensor("mean", self.mean, (head_size_v,), (self.q.dtype,), device)
        if self.lse is not None:
            checks.tensor("lse", self.lse, (tokens, num_heads), (torch.float32,), device)
        if device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_values()
        elif self.options.qq_bias is not None and self.batch.max_query_len is not None:
            self._check_bias(self.batch.max_query_len)

    def with_tensors(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        segments: tuple[Segment, ...],
        options: AttentionOptions | None = None,
        own: OwnRows | None = None,
        few: tuple[Segment, ...] | None = None,
        parts: tuple[torch.Tensor, torch.Tensor] | None = None,
        mean: torch.Tensor | None = None,
    ) -> AttendCall:
        """The same call over other tensors of the same shapes: of another layer. Nothing is checked again."""
        options, own = options or self.options, None if self.own is None else own or self.own
        return _like(self, q=q, out=out, lse=lse, segments=segments, options=options, own=own, few=few, parts=parts, mean=mean)

    def over(self, segments: tuple[Segment, ...]) -> AttendCall:
        """The same call over segments that hold all that is read."""
        return _like(self, segments=segments, own=None, few=None, parts=None, mean=None)

    def numbers(self) -> list[torch.Tensor]:
        """The tensors whose numbers say which keys are read: see `Kept`."""
        own = [t for s in self.segments for t in (s.block_table, s.key_start, s.key_range) if t is not None]
        return [self.batch.cu_seqlens_q, self.batch.seq_lens, *self.options.per_sequence().values(), *own]

    def check_values(self) -> None:
        """What reads tensors, on a CPU: lengths fit their bounds, and every page that is read exists."""
        starts = self.batch.cu_seqlens_q.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        tokens, lengths = self.q.shape[0], self.batch.seq_lens.tolist()
        if starts[0] != 0 or starts[-1] != tokens or min(counts, default=0) < 0:
            checks.refuse("cu_seqlens_q", starts, f"it rises from 0 to the {tokens} queries")
        if any(length < count for length, count in zip(lengths, counts)):
            checks.refuse("seq_lens", lengths, f"a sequence holds at least its queries, {counts}")
        for name, values in (("max_query_len", counts), ("max_seq_len", lengths)):
            if (bound := getattr(self.batch, name)) is not None and max(values, default=0) > bound:
                checks.refuse(name, bound, f"a sequence has {max(values)}")
        if self.batch.lengths is not None and list(self.batch.lengths) != list(zip(counts, lengths)):
            checks.refuse("lengths", list(self.batch.lengths), f"cu_seqlens_q and seq_lens say {list(zip(counts, lengths))}")
        if self.options.qq_bias is not None:
            self._check_bias(max(counts, default=0))
        self.options.check_values()
        batch = self.batch.cu_seqlens_q, self.batch.seq_lens
        for segment in self.segments:
            size, num_pages, table = segment.k.codes.shape[1], segment.k.codes.shape[0], segment.block_table
            ranges = segment.key_range if self.own is None else stored_before(*batch, segment.key_range)
            needed = key_intervals(self.options, counts, lengths, ranges)
            begins = [0] * len(lengths) if segment.key_start is None else segment.key_start.tolist()
            for row, intervals, begin in zip(table, needed, begins):
                for low, high in intervals:
                    first, last = max(low - begin, 0) // size, -(-max(high - begin, 0) // size)
                    if last > table.shape[1]:
                        checks.refuse("block_table.shape[1]", table.shape[1], f"the keys up to position {high} need {last} pages")
                    checks.in_range("block_table", row[first:last], 0, num_pages, f" (the cache has {num_pages} pages)")

    def _settle_precision(self, fmt: Format) -> None:
        """Refuse what has none but 16 bits; a batch that is known to hold no prompt is served by whoever serves it at 16 bits."""
        if fmt.latent:
            checks.refuse("prompt_precision", self.options.prompt_precision, f"scores of latents ({fmt.name}) are at 16bit")
        most = self.batch.max_query_len
        if self.q.shape[0] < PROMPT_QUERIES or (most is not None and most < PROMPT_QUERIES):
            object.__setattr__(self, "options", replace(self.options, prompt_precision="16bit"))

    def _check_bias(self, queries: int) -> None:
        if self.options.qq_bias.shape[0] < queries:
            checks.refuse("qq_bias.shape[0]", self.options.qq_bias.shape[0], f"a row for each of {queries} queries is needed")


def _check_segment(s: Segment, heads: int, sizes: tuple[int, int], latent: bool, num_seqs: int, device: torch.device) -> None:
    if s.fmt.latent != latent:
        checks.refuse("segments", s.fmt.name, "all are of latents, or none is")
    s.maps.check_use(latent)
    for name, of, size, held in zip(("q.shape[2]", "head_size_v"), ("keys", "values"), sizes, (s.head_size, s.head_size_v)):
        if held != size:
            checks.refuse(name, size, f"the cache holds {of} of {held}")
    for name, side, codec, map_, size in zip("kv", (s.k, s.v), (s.fmt.k, s.fmt.v), (s.maps.k, s.maps.v), s.stored_sizes):
        codec.check_head_size(size)
        checks.tensor(f"{name}.codes", side.codes, (None, s.k.codes.shape[1], heads, None), (codec.code_dtype,), device)
        if codec.row.meta:
            dtypes = (getattr(torch, codec.row.meta[0]),)
            checks.tensor(f"{name}.meta", side.meta, (*side.codes.shape[:3], len(codec.row.meta)), dtypes, device)
        if map_ is not None:
            map_.check(size, heads, name)
    checks.tensor("block_table", s.block_table, (num_seqs, None), checks.INDEX_DTYPES, device)
    for name, t, shape in (("key_start", s.key_start, (num_seqs,)), ("key_range", s.key_range, (num_seqs, 2))):
        if t is not None:
            checks.tensor(name, t, shape, checks.INDEX_DTYPES, device)


def _check_shared(segments: tuple[Segment, ...]) -> None:
    values = [s.values for s in segments]
    mapped = {(id(map_), side.scale) for side, _, map_ in values if map_ is not None}
    if len(mapped) > 1 or len({side.scale for side, _, map_ in values if map_ is None}) > 1:
        raise ValueError("segments: those with a V map must share it and its scale, those without a V map the scale")


@dataclass(frozen=True, eq=False)
class WriteCall:
    """One write: `key [T, HK, D]` and `value [T, HK, D_V]` (bf16, fp16 or fp32, any strides) into slots `slot_mapping [T]` of a cache; of
    latents, these and their rotated dimensions.

    Slot s is token `s % block_size` of page `s // block_size`; tokens with a negative slot are skipped.
    maps: the layer's linear maps. positions: int `[T]`, needed where the keys' map has key means.
    mean: `[D]` of the rows' dtype, taken off every key row first, in that dtype; None: nothing is.
    copies: the same rows, and the same mean, into other slots of a second cache; None: there is none.
    ValueError, before anything is written, naming the argument, its value and what is allowed.
    """

    key: torch.Tensor
    value: torch.Tensor
    k: PagedTensor
    v: PagedTensor
    fmt: Format
    slot_mapping: torch.Tensor
    maps: LayerMaps
    positions: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    copies: WriteCall | None = None

    def __post_init__(self) -> None:
        device, heads = self.k.codes.device, self.k.codes.shape[2]
        tokens = len(self.key) if isinstance(self.key, torch.Tensor) and self.key.ndim else None
        sizes = self.fmt.k.head_size(self.k.codes), self.fmt.v.head_size(self.v.codes)
        checks.tensor("key", self.key, (None, heads, sizes[0]), checks.ROW_DTYPES, device)
        checks.tensor("value", self.value, (tokens, heads, sizes[1]), (self.key.dtype,), device)
        for name in ("key", "value"):
            checks.no_gradient(name, getattr(self, name))
        checks.tensor("slot_mapping", self.slot_mapping, (tokens,), checks.INDEX_DTYPES, device)
        for name, map_, head_size in (("k", self.maps.k, sizes[0]), ("v", self.maps.v, sizes[1])):
            if map_ is not None:
                map_.check(head_size, heads, name)
        if self.positions is not None:
            checks.tensor("positions", self.positions, (tokens,), checks.INDEX_DTYPES, device)
        elif self.maps.by_position:
            checks.refuse("positions", None, "the keys' map has a key mean for each bucket of positions")
        if self.mean is not None:
            checks.tensor("mean", self.mean, (sizes[0],), (self.key.dtype,), device)
        if device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_values()

    def numbers(self) -> list[torch.Tensor]:
        """The tensors whose numbers say where rows go: see `Kept`."""
        return [t for t in (self.slot_mapping, self.positions) if t is not None]

    def check_values(self) -> None:
        """What reads tensors, on a CPU: the slots exist."""
        if not len(self.slot_mapping):
            return
        num_pages, size = self.k.codes.shape[:2]
        if (largest := int(self.slot_mapping.max())) >= num_pages * size:
            checks.refuse("slot_mapping", largest, f"slots end at {num_pages * size - 1}")
        if self.positions is not None:
            checks.not_negative("positions", self.positions)

    def with_tensors(self, key: torch.Tensor, value: torch.Tensor, k: PagedTensor, v: PagedTensor, maps: LayerMaps, **more) -> WriteCall:
        """The same call over other tensors of the same shapes: of another layer. Nothing is checked again. more: mean and copies."""
        return _like(self, key=key, value=value, k=k, v=v, maps=maps, **more)

    def one_by_one(self) -> tuple[WriteCall, ...]:
        """The same as calls without mean or copies."""
        key = self.key if self.mean is None else self.key - self.mean
        return tuple(_like(call, key=key, mean=None, copies=None) for call in (self, self.copies) if call is not None)
