"""Reads on Hopper: paged decode and verification, of one call or of all that share its shape.

A call with several segments is a decode kernel for each, which overlap, and one that merges their pieces. Where one of two segments holds
a few 16-bit rows, the kernel that merges attends to it by itself."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache

import torch

from ...calls import AttendCall, Segment
from . import launch
from .decode import COMBINE_COLUMNS, COMBINE_WARPS, EXACT_TILES, TILE, DecodeConfig, choose
from .launch import Kernel, Launch
from .operands import NO_MAP, kind, map_of, offsets_of
from .records import pages_of, unsuitable

HONOURED = frozenset({"window", "softcap", "sinks"})
QUERIES = range(9)  # of a sequence
SEGMENTS = 4  # of a call, at most: one, and as many others as AttendArguments has room for
SMALL_FIRST = True  # the order of several segments' kernels: the one with the least to read first, or last
BY_COMBINE = True  # the kernel that merges attends to a few 16-bit rows; where not, they have a decode kernel
LOG2E = math.log2(math.e)
SINK_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in arguments.cuh


def refusal(call: AttendCall) -> str | None:
    """Why the kernel cannot serve this call; None where it can. Looks at shapes and types only, never at what tensors hold."""
    return launch.elsewhere(call.q.device) or _unsupported(call)


def _unsupported(call: AttendCall) -> str | None:
    """Why no Hopper GPU can serve it."""
    q, batch, first = call.q, call.batch, call.segments[0]
    if len(call.segments) > SEGMENTS:
        return f"{len(call.segments)} segments: at most {SEGMENTS}"
    if not batch.max_query_len or batch.max_query_len not in QUERIES:
        return f"max_query_len={batch.max_query_len}: 1 to {QUERIES[-1]} queries a sequence must be promised"
    D, HQ, HK = q.shape[2], q.shape[1], first.k.codes.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q.dtype {q.dtype}: bfloat16 or float16"
    if HQ // HK > 16:
        return f"{HQ} query heads over {HK} kv heads: at most 16 share one"
    for segment in call.segments:
        if reason := _unsupported_segment(segment, D, q.dtype):
            return reason
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        return f"q strides {q.stride()}: rows of neighbouring elements that begin at multiples of 16 bytes"
    if call.out.dtype != q.dtype or not call.out.is_contiguous():
        return f"out of {call.out.dtype}, strides {call.out.stride()}: contiguous, of q's dtype"
    if call.lse is not None and not call.lse.is_contiguous():
        return f"lse strides {call.lse.stride()}: contiguous"
    for name, t in (("seq_lens", batch.seq_lens), ("cu_seqlens_q", batch.cu_seqlens_q)):
        if t.dtype != torch.int32 or not t.is_contiguous():
            return f"{name} of {t.dtype}, strides {t.stride()}: int32, contiguous"
    return None


def _unsupported_segment(segment: Segment, D: int, dtype: torch.dtype) -> str | None:
    """Why no Hopper GPU can read this segment with queries of head size D and this dtype."""
    fmt, k, v, block_size = segment.fmt, segment.k, segment.v, segment.k.codes.shape[1]
    for name, codec, use in (("keys", fmt.k, "keys"), ("values", fmt.v, "values")):
        if codec.hopper is None or not getattr(codec.hopper(), use):
            return f"format {fmt.name}: {name} of {codec.name} have no code for Hopper"
        if codec.code_dtype == torch.bfloat16 != dtype:
            return f"format {fmt.name}: {name} of {codec.name} need queries of it, and q.dtype is {dtype}"
    if k.scale != 1.0 or v.scale != 1.0:
        return f"per-tensor scales {k.scale}, {v.scale}: 1 is needed"
    odd = [codec.row.code_bits for codec in (fmt.k, fmt.v) if 16 % codec.row.code_bits]
    if segment.head_size_v != D or D not in (64, 128, 256) or (D == 64 and odd):
        return f"head sizes {D}, {segment.head_size_v}: both 64 (with 2, 4, 8 or 16 bits), 128 or 256"
    if block_size not in (16, 32, 64, 128):
        return f"block_size {block_size}: 16, 32, 64 or 128"
    pages = pages_of(k, v)
    if pages is None:
        return "the cache is no buffer of page records [num_blocks, HK, page_bytes]"
    if pages.stride(0) >= 1 << 32:
        return f"pages strides {pages.stride()}: a page under 4 GiB"
    if reason := unsuitable(pages, fmt.k, fmt.v, D, block_size):
        return reason
    if segment.block_table.dtype != torch.int32 or segment.block_table.stride(-1) != 1:
        return f"block_table of {segment.block_table.dtype}, strides {segment.block_table.stride()}: int32, last dimension contiguous"
    for name, t in (("key_start", segment.key_start), ("key_range", segment.key_range)):
        if t is not None and (t.dtype != torch.int32 or not t.is_contiguous()):
            return f"{name} of {t.dtype}, strides {t.stride()}: int32, contiguous"
    if segment.key_start is not None and segment.maps.by_position:
        return "key_start with an offset of the keys' map: all positions from 0 have a slot where keys have offsets"
    return None


def run(call: AttendCall) -> None:
    """Serve `call`. The first call of a shape compiles its kernel."""
    _PREPARED.serve(call)


def prepare(call: AttendCall) -> Prepared:
    """What launches calls of this shape. The first of a shape compiles its kernel."""
    return Prepared(call)


def scratch_bytes(call: AttendCall) -> int:
    """Bytes of device memory that `call` needs while it runs, beside its tensors. All calls on one stream share them."""
    plan = Plan(call, launch.multiprocessors(launch.device_index(call.q.device)))
    return plan.scratch_bytes


def compile_for(call: AttendCall) -> None:
    """Compile what `call` needs, and launch nothing. May run in several threads at once."""
    for config in configurations(call):
        config.cubin()


def _capacity(call: AttendCall, segment: Segment) -> int:
    """Tiles that may be read, at most; to a power of two, so that few configurations differ."""
    promised = call.batch.max_seq_len
    longest = segment.block_table.shape[1] * segment.k.codes.shape[1]
    if promised is not None:
        longest = min(longest, promised)
    return call.batch.num_seqs * segment.k.codes.shape[2] << max(-(-longest // TILE) - 1, 0).bit_length()


def _is_exact(segment: Segment, dtype: torch.dtype) -> bool:
    """Whether it holds a few rows of the queries' type as given, in pages that begin at some position."""
    few = segment.block_table.shape[1] * segment.k.codes.shape[1] <= EXACT_TILES * TILE
    as_given = segment.fmt.k.code_dtype == segment.fmt.v.code_dtype == dtype and segment.maps.k is None and segment.maps.v is None
    return few and as_given and segment.key_start is not None


def _exact(call: AttendCall) -> int | None:
    """Which of two segments the kernel that merges attends to."""
    others = [_is_exact(s, call.q.dtype) for s in call.segments]
    if not BY_COMBINE or len(others) != 2 or not any(others):
        return None
    exact = others.index(True)
    matrix = kind(call.segments[1 - exact].maps.v) == "MATRIX"
    return None if matrix and call.q.shape[2] > 128 else exact  # as shared memory allows


def _orders(call: AttendCall) -> tuple[list[int], list[int]]:
    """Of the segments with kernels of their own: in which order these are launched, and in which order their pieces are merged. The
    kernels of the first to be merged have the values' map, if there is one, and merge the others, of which those without a map come
    last."""
    sizes, exact = [_capacity(call, s) for s in call.segments], _exact(call)
    own = [i for i in range(len(sizes)) if i != exact]
    launched = sorted(own, key=sizes.__getitem__, reverse=not SMALL_FIRST)
    return launched, sorted(own, key=lambda i: (call.segments[i].maps.v is None, -sizes[i]))


def configurations(call: AttendCall) -> list[DecodeConfig]:
    """What a kernel that serves `call` is compiled for, for each of its segments that has one."""
    launched, merged = _orders(call)
    exact = _exact(call)
    mapped = sum(s.maps.v is not None for s in call.segments) or len(merged)
    ranges = any(s.key_start is not None or s.key_range is not None for s in call.segments)
    configs = {i: replace(_configuration(call, call.segments[i]), ranges=ranges, follows=i != launched[0]) for i in sorted(merged)}
    merges = dict(segments=len(merged), mapped_segments=mapped, exact=0 if exact is None else call.segments[exact].k.codes.shape[1])
    configs[merged[0]] = replace(configs[merged[0]], **merges)
    return list(configs.values())


def _configuration(call: AttendCall, segment: Segment) -> DecodeConfig:
    """What suits a segment if it were alone."""
    (_, HQ, D), HK = call.q.shape, segment.k.codes.shape[2]
    return choose(
        segment.fmt.k,
        segment.fmt.v,
        D,
        HQ // HK,
        HK,
        segment.k.codes.shape[1],
        segment.k.base.stride(1),
        call.q.dtype == torch.bfloat16,
        call.batch.max_query_len * (HQ // HK),
        call.options.softcap > 0,
        kind(segment.maps.k),
        kind(segment.maps.v),
        segment.maps.by_position,
        _capacity(call, segment),
    )


def _scale(call: AttendCall) -> float:
    """Of scores, as the kernels take it: base 2, over half of softcap where there is one."""
    return call.scale * LOG2E * (2 / call.options.softcap if call.options.softcap else 1.0)


@dataclass(frozen=True)
class Part:
    """How a segment is cut: the configuration, the grid of its decode kernel, the warps that work at once, its place in the scratch."""

    config: DecodeConfig
    decode_grid: tuple[int, int, int]
    resident: int
    scratch_begin: int
    scratch_bytes: int


class Plan:
    """How a call is cut: its segments, the grid of the kernel that merges them, the scratch.

    exact: index of the segment that the kernel that merges attends to, see `_exact`. parts: of the others, by their indices. launched,
    merged: these indices, see `_orders`."""

    def __init__(self, call: AttendCall, multiprocessors: int):
        configs = configurations(call)
        self.exact, (self.launched, self.merged) = _exact(call), _orders(call)
        group, kv_heads = configs[0].group, configs[0].kv_heads
        sequences, pairs = call.batch.num_seqs, call.batch.num_seqs * kv_heads
        self.columns = columns = call.batch.max_query_len * group
        self.parts: dict[int, Part] = {}
        self.scratch_bytes = 0
        for i, config in zip(sorted(self.merged), configs):
            column_blocks = -(-columns // (8 * config.column_tiles))
            blocks = max(1, multiprocessors * config.blocks_per_sm // column_blocks)
            blocks = max(1, min(blocks, -(-_capacity(call, call.segments[i]) // config.warps)))
            resident = blocks * config.warps
            size = (resident + pairs) * columns * config.piece_bytes
            self.parts[i] = Part(config, (blocks, column_blocks, 1), resident, self.scratch_bytes, size)
            self.scratch_bytes += size
        self.main = self.parts[self.merged[0]]
        self.few = multiprocessors >= 8 * pairs  # sequences: with more than eight pieces each
        across = (sequences, columns) if self.few else (-(-sequences // self.main.config.combined), -(-columns // COMBINE_COLUMNS))
        self.combine_grid = (across[0], kv_heads, across[1])


@cache
def _kernels(config: DecodeConfig, index: int) -> tuple[Kernel, Kernel, Kernel]:
    """The decode kernel and the two combine kernels, for one configuration and device."""
    module = launch.load(config.cubin(), index)
    return (
        Kernel(module, "decode_kernel", 32 * config.warps, config.shared_bytes, index),
        Kernel(module, "combine_kernel", 32 * COMBINE_COLUMNS * config.combined, 0, index),
        Kernel(module, "combine_one_kernel", 32 * COMBINE_WARPS, 0, index),
    )


def _layer(s: Segment) -> Hashable:
    """What may differ between layers, and is compiled for."""
    return kind(s.maps.k), kind(s.maps.v), s.maps.by_position, id(s.fmt.k), id(s.fmt.v)  # codecs that a configuration keeps alive


def _segment_shape(call: AttendCall, s: Segment) -> Hashable:
    pages = s.k.base.stride(), s.k.codes.shape[1:3], s.block_table.shape, s.block_table.stride(0), _capacity(call, s)
    return pages, s.key_start is None, s.key_range is None, _layer(s)


def _shape(call: AttendCall) -> Hashable:
    """Equal for calls that one `Prepared` serves."""
    q, batch, options = call.q, call.batch, call.options
    return (
        (q.shape[1:], q.stride(), q.dtype, q.device, batch.num_seqs, batch.max_query_len),
        (call.scale, options.window, options.softcap, options.sinks is None, SMALL_FIRST, BY_COMBINE),
        *[_segment_shape(call, s) for s in call.segments],
    )


class Prepared:
    """Launches calls of one shape. What differs from layer to layer is filled in: addresses, and the factors of maps."""

    def __init__(self, call: AttendCall):
        self.index = launch.device_index(call.q.device)
        self.plan = plan = Plan(call, launch.multiprocessors(self.index))
        self.reads = {i: Read(call, call.segments[i], part, plan.columns) for i, part in plan.parts.items()}
        kernels = {i: _kernels(part.config, self.index) for i, part in plan.parts.items()}
        self.main, self.others, self.exact = self.reads[plan.merged[0]], plan.merged[1:], plan.exact
        if self.exact is not None:
            exact, main = call.segments[self.exact], self.main.arguments
            main.exact_page_stride, main.exact_head_stride = exact.k.base.stride(0), exact.k.base.stride(1)
            main.exact_table_stride, main.exact_scale = exact.block_table.stride(0), _scale(call)
        for place, i in enumerate(self.others):
            self.main.arguments.other_resident[place] = plan.parts[i].resident
            self.main.arguments.other_warps[place] = plan.parts[i].config.warps
        self.launches = [Launch(kernels[i][0], plan.parts[i].decode_grid, self.reads[i].arguments) for i in plan.launched]
        self.launches.append(Launch(kernels[plan.merged[0]][1 + plan.few], plan.combine_grid, self.main.arguments))

    def __call__(self, call: AttendCall) -> None:
        if call.q.shape[0] == 0:
            return
        if launch.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self._launch(call)
        self._launch(call)

    def _launch(self, call: AttendCall) -> None:
        sinks, lse, q, main = call.options.sinks, call.lse, call.q.data_ptr(), self.main.arguments
        if q % 16:
            raise ValueError(f"q at address {q}: rows begin at multiples of 16 bytes, as those of the call that was prepared")
        stream = launch.current_stream(self.index)
        with launch.LOCK:
            scratch = launch.scratch(self.plan.scratch_bytes, self.index, stream)
            for i, read in self.reads.items():
                read.fill(call, call.segments[i], q, scratch.data_ptr())
            if self.exact is not None:
                self._fill_exact(call.segments[self.exact])
            main.out, main.lse = call.out.data_ptr(), None if lse is None else lse.data_ptr()
            if sinks is not None:
                main.sinks, main.sinks_stride, main.sinks_type = sinks.data_ptr(), sinks.stride(0), SINK_TYPES[sinks.dtype]
            for place, i in enumerate(self.others):
                other = self.reads[i].arguments
                main.other_pieces[place] = other.pieces
                main.other_starts[place], main.other_ranges[place] = other.key_start, other.key_range
            for each in self.launches:
                each(stream)

    def _fill_exact(self, segment: Segment) -> None:
        a, range_ = self.main.arguments, segment.key_range
        if segment.maps.k is not None or segment.maps.v is not None:
            raise ValueError("segments: maps where the call that was prepared had none")
        a.exact_pages, a.exact_table = segment.k.base.data_ptr(), segment.block_table.data_ptr()
        a.exact_start, a.exact_range = segment.key_start.data_ptr(), None if range_ is None else range_.data_ptr()


class Read:
    """The arguments of the kernels of one segment."""

    def __init__(self, call: AttendCall, segment: Segment, part: Part, columns: int):
        options = call.options
        self.key_half, self.begin, self.layer = part.config.key_half, part.scratch_begin, _layer(segment)
        self.scale = _scale(call)
        self.arguments = launch.arguments("AttendArguments")(
            q_token=call.q.stride(0),
            q_head=call.q.stride(1),
            page_stride=segment.k.base.stride(0),
            table_width=segment.block_table.shape[1],
            table_stride=segment.block_table.stride(0),
            sequences=call.batch.num_seqs,
            window=options.window,
            resident=part.resident,
            all_columns=columns,
            softcap=options.softcap * LOG2E,
        )
        self.take_maps(segment)

    def fill(self, call: AttendCall, segment: Segment, q: int, scratch: int) -> None:
        """The addresses of a call, and its maps where they are others."""
        if segment.maps.k is not self.maps.k or segment.maps.v is not self.maps.v:
            self.take_maps(segment)
        a, batch, start, range_ = self.arguments, call.batch, segment.key_start, segment.key_range
        a.q, a.pages, a.block_table = q, segment.k.base.data_ptr(), segment.block_table.data_ptr()
        a.seq_lens, a.cu_queries = batch.seq_lens.data_ptr(), batch.cu_seqlens_q.data_ptr()
        a.key_start, a.key_range = None if start is None else start.data_ptr(), None if range_ is None else range_.data_ptr()
        a.pieces = scratch + self.begin

    def take_maps(self, segment: Segment) -> None:
        """Point the arguments at a segment's maps. ValueError where they are of another kind than those prepared for."""
        if _layer(segment) != self.layer:
            raise ValueError("segments: maps of another kind, or another format, than in the call that was prepared")
        maps, a = segment.maps, self.arguments
        key_map, value_map = map_of(maps.k, self.key_half) or NO_MAP, map_of(maps.v, None) or NO_MAP
        offsets = offsets_of(maps.k, self.key_half)
        a.key_map, a.key_map_stride, a.scale = key_map.address, key_map.head_stride, self.scale * key_map.gain
        a.value_map, a.value_map_stride, a.value_gain = value_map.address, value_map.head_stride, value_map.gain
        if offsets is not None:
            a.key_offset, a.offset_stride = offsets.data.data_ptr(), offsets.head_stride
            a.offset_groups, a.offset_gain = offsets.groups, offsets.gain
        self.maps, self.operands = maps, (key_map, value_map, offsets)  # alive while their addresses are here


_PREPARED = launch.ByShape(_shape, Prepared)
