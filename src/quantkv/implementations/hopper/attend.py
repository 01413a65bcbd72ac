"""Reads on Hopper: paged decode and verification, of one call or of all that share its shape.

A call with several segments is a decode kernel for each, which overlap, and one that combines their partials. Where one of two segments
holds a few 16-bit rows, the combine kernel attends to it by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, cached_property

import torch

from ...calls import AttendCall, Segment
from ...under_way import wanted
from . import geometry
from .decode import combine, latents, unsplit, warps, wgmma
from .decode.read import Part, Read, layer_of, scale_of
from .decode.unsplit import longest_of_shape, rounded_tiles
from .decode.warps import COMBINE_PACKED_ROWS, COMBINE_WARPS, EXACT_TILES, TILE, CallShape, DecodeConfig
from .host import launch
from .host.launch import Kernel, Launch
from .host.operands import kind

SUPPORTED = frozenset(("window", "softcap", "sinks", "chunk_lookback", "batch_invariant"))
QUERIES = range(9)  # of a sequence, that a batch of several kinds keeps together
OWN_ROWS = "copied"  # into pages: only those are read
LATENTS = True
SEGMENTS = 4  # of a call, at most: one, and as many others as AttendArguments has room for
EXACT_HEAD_SIZES = (64, 128, 256)  # of 16-bit rows that the combine kernel attends to


def refusal(call: AttendCall) -> str | None:
    """Why the kernel cannot serve this call; None where it can. Looks at shapes and types only, never at what tensors hold."""
    return launch.elsewhere(call.q.device) or _unsupported(call)


def _unsupported(call: AttendCall) -> str | None:
    """Why no Hopper GPU can serve it."""
    q, batch, first = call.q, call.batch, call.segments[0]
    if len(call.segments) > SEGMENTS:
        return f"{len(call.segments)} segments: at most {SEGMENTS}"
    D, HQ, HK, invariant = q.shape[2], q.shape[1], first.k.codes.shape[2], call.options.batch_invariant
    if first.fmt.latent and invariant:
        return "batch_invariant: not of latents"
    most = QUERIES[-1] if invariant else wgmma.MOST_QUERIES  # what a batch keeps together is served alike
    if not batch.max_query_len or batch.max_query_len > most:
        needed = f"an upper bound of 1 to {most} queries a sequence is needed{' with batch_invariant' if invariant else ''}"
        return f"max_query_len={batch.max_query_len}: {needed}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q.dtype {q.dtype}: bfloat16 or float16"
    most = latents.MOST_PACKED_ROWS if first.fmt.latent else wgmma.MOST_PACKED_ROWS
    if reason := wgmma.unserved(HQ // HK, 1 if invariant else batch.max_query_len, most):
        return reason
    for segment in call.segments:
        if reason := geometry.unreadable_segment(segment, D, q.dtype):
            return reason
    for rows in call.parts or (q,):
        if not launch.in_chunks(rows):
            return f"q strides {rows.stride()}: rows of neighbouring elements that begin at multiples of 16 bytes"
    if call.out.dtype != q.dtype or not call.out.is_contiguous():
        return f"out of {call.out.dtype}, strides {call.out.stride()}: contiguous, of q's dtype"
    if call.lse is not None and not call.lse.is_contiguous():
        return f"lse strides {call.lse.stride()}: contiguous"
    for name, t in (("seq_lens", batch.seq_lens), ("cu_seqlens_q", batch.cu_seqlens_q)):
        if t.dtype != torch.int32 or not t.is_contiguous():
            return f"{name} of {t.dtype}, strides {t.stride()}: int32, contiguous"
    return None


def run(call: AttendCall) -> None:
    """Serve `call`. The first call of a shape compiles its kernel."""
    collected = wanted()
    if collected is None:
        _PREPARED.serve(call)
    else:
        collected += compiled_for(call)


def prepare(call: AttendCall) -> Prepared:
    """What launches calls of this shape. The first of a shape compiles its kernel."""
    prepared = Prepared(call)
    prepared.first = call  # whoever prepares it keeps it anyway
    return prepared


def scratch_bytes(call: AttendCall) -> int:
    """Bytes of device memory that `call` needs while it runs, beside its tensors. All calls on one stream share them."""
    return max(plan.scratch_bytes for plan in _plans(call))


def compiled_for(call: AttendCall) -> set[DecodeConfig]:
    """What is compiled for `call`: `cubin` of each does so, and may run in several threads at once."""
    found = {part.config for plan in _plans(call) for part in plan.parts.values()}
    return found | {more for config in found if config.either and (more := config.with_more_warps)}  # for other numbers of sequences


def _plans(call: AttendCall) -> list[Plan]:
    """What `call` may be cut like: a device that does not hold enough clusters is given blocks that work alone."""
    multiprocessors, configs = launch.multiprocessors(launch.device_index(call.q.device)), configurations(call)
    return [Plan(call, multiprocessors, largest, configs=configs) for largest in (warps.LARGEST_CLUSTER, 1)]


def _capacity(call: AttendCall, segment: Segment) -> int:
    """Tiles that may be read, at most."""
    return call.batch.num_seqs * segment.k.codes.shape[2] * rounded_tiles(call, segment)


def _is_exact(segment: Segment, dtype: torch.dtype) -> bool:
    """Whether it holds a few rows of the queries' type as given, in pages that begin at some position."""
    block_size = segment.k.codes.shape[1]
    few = segment.block_table.shape[1] * block_size <= EXACT_TILES * TILE and block_size >= TILE
    as_given = segment.fmt.k.code_dtype == segment.fmt.v.code_dtype == dtype and segment.maps.k is None and segment.maps.v is None
    return few and as_given and segment.key_start is not None


def _exact(call: AttendCall) -> int | None:
    """Which of two segments the combine kernel attends to. Of an invariant cut none: it would depend on the width of a table."""
    others = [_is_exact(s, call.q.dtype) for s in call.segments]
    D, D_V = call.q.shape[2], call.segments[0].head_size_v
    if call.options.batch_invariant or len(others) != 2 or not any(others) or D_V != D or D not in EXACT_HEAD_SIZES:
        return None
    exact = others.index(True)
    matrix = kind(call.segments[1 - exact].maps.v) == "MATRIX"
    return None if matrix and D > 128 else exact  # as shared memory allows


def _orders(call: AttendCall) -> tuple[list[int], list[int]]:
    """Orders of the segments with kernels of their own: in which these are launched, and in which their partials are combined. The
    kernels of the first to be combined have the values' map, if there is one, and combine the others, of which those without a map come
    last."""
    sizes, exact = [_capacity(call, s) for s in call.segments], _exact(call)
    own = [i for i in range(len(sizes)) if i != exact]
    if call.options.batch_invariant:
        sizes = [0] * len(sizes)  # as they were given, whatever the batch
    return _launch_order(own, sizes), sorted(own, key=lambda i: (call.segments[i].values[2] is None, -sizes[i]))


def _launch_order(segments: list[int], sizes: list[int]) -> list[int]:
    """The one with the least to read first: its kernel is done before the others fill the GPU."""
    return sorted(segments, key=sizes.__getitem__)


def configurations(call: AttendCall) -> list[DecodeConfig]:
    """What a kernel that serves `call` is compiled for, for each of its segments that has one."""
    (_, combined), exact = _orders(call), _exact(call)
    mapped = sum(s.values[2] is not None for s in call.segments) or len(combined)
    ranges = any(s.key_start is not None or s.key_range is not None for s in call.segments)
    chosen = {i: _configuration(call, call.segments[i], wgmma.choose) for i in sorted(combined)}
    if len({config.worker_warps for config in chosen.values()}) > 1:  # the combine kernel knows one way to cut a line
        chosen = {i: _configuration(call, call.segments[i], warps.choose) for i in chosen}
    options = call.options
    given = dict(ranges=ranges, chunked=options.chunk_lookback >= 0, invariant=options.batch_invariant, scaled=_is_scaled(call))
    configs = {i: replace(config, **given, several_decodes=len(combined) > 1) for i, config in chosen.items()}
    combines = dict(segments=len(combined), mapped_segments=mapped, exact=0 if exact is None else call.segments[exact].k.codes.shape[1])
    configs[combined[0]] = replace(configs[combined[0]], **combines)
    return list(configs.values())


def _configuration(call: AttendCall, segment: Segment, choose: Callable[..., DecodeConfig]) -> DecodeConfig:
    """What suits a segment if it were alone."""
    HQ, HK, invariant = call.q.shape[1], segment.k.codes.shape[2], call.options.batch_invariant
    group, queries = HQ // HK, call.batch.max_query_len
    if call.batch.chunks and queries > 1 and not segment.fmt.latent and not invariant:
        queries = max(queries, min(wgmma.MOST_QUERIES, wgmma.MOST_PACKED_ROWS // group))
    packed_rows = queries * group
    shape = CallShape(
        segment.fmt.k,
        segment.values[1],
        segment.stored_sizes[0],
        segment.head_size_v,
        group,
        kv_heads=HK,
        block_size=segment.k.codes.shape[1],
        record_bytes=segment.k.base.stride(1),
        bf16=call.q.dtype == torch.bfloat16,
        packed_rows=max(group, 8) if invariant else packed_rows,
        softcap=call.options.softcap > 0,
        key_map=kind(segment.maps.k),
        value_map=kind(segment.values[2]),
        key_mean=segment.maps.by_position,
    )
    if segment.fmt.latent:
        return latents.choose(shape, segment.fmt.v, segment.stored_sizes[1], _capacity(call, segment))
    if not invariant:
        return choose(shape, _capacity(call, segment))
    # What suits one query of each of many sequences, or two; half as many packed query rows, or twice as many, where these come to the same
    # bits.
    config = usual = choose(shape)
    alone = usual.packed_rows == 8 and usual.worker_warps == 1
    if alone and packed_rows <= 4:
        config = replace(usual, packed_rows=4)
    elif alone and packed_rows > 8:
        twice = warps.choose(replace(shape, packed_rows=16))
        if twice.packed_rows == 16 and twice.tiles_per_step == usual.tiles_per_step:
            config = twice
    return replace(config, partials_first=6 if usual.workers % 3 == 0 else 8)


def _is_scaled(call: AttendCall) -> bool:
    """Whether values without a map have a per-tensor scale; those with a map have it in the map's gain."""
    return any(map_ is None and side.scale != 1.0 for side, _, map_ in (s.values for s in call.segments))


class Plan:
    """How a call is cut: its segments, the grid of the combine kernel, the scratch.

    exact: index of the segment that the combine kernel attends to, see `_exact`. parts: of the others, by their indices. launched,
    combined: these indices, see `_orders`. largest_cluster: blocks of one, at most. after_write: see `Prepared.after_write`. configs:
    `configurations(call)`, where they are known. held: blocks of such clusters that the device holds at once, where that is known."""

    def __init__(
        self,
        call: AttendCall,
        multiprocessors: int,
        largest_cluster: int = warps.LARGEST_CLUSTER,
        after_write: bool = False,
        configs: list[DecodeConfig] | None = None,
        held: int | None = None,
    ):
        configs = [replace(config, pdl_after_write=after_write) for config in configs or configurations(call)]
        self.exact, (self.launched, self.combined) = _exact(call), _orders(call)
        group, kv_heads = configs[0].group, configs[0].kv_heads
        sequences, seq_heads = call.batch.num_seqs, call.batch.num_seqs * kv_heads
        self.packed_rows = packed_rows = call.batch.max_query_len * group
        self.parts: dict[int, Part] = {}
        self.scratch_bytes = 0
        for i, config in zip(sorted(self.combined), configs):
            packed_row_blocks = -(-packed_rows // config.packed_rows)
            blocks = max(1, multiprocessors * config.blocks_per_sm // packed_row_blocks)
            blocks = max(1, min(blocks, -(-_capacity(call, call.segments[i]) // config.warps)))
            config, whole = unsplit.choose(call, config, blocks, largest_cluster)
            if whole is not None:
                all_ = blocks // whole.blocks * whole.blocks if config.either else 0  # as the call may turn out to be split
                blocks = max(whole.grid(seq_heads), all_ if held is None else min(all_, held))
            resident = blocks * config.workers
            if whole is None and len(configs) == 1:  # a source behind another finds multiprocessors busy, and ends unevenly anyway
                resident = config.runs(resident, seq_heads)
                blocks = -(-resident // config.workers)
            partial_slots = config.partials(longest_of_shape(call, call.segments[i])) if config.invariant else 0
            if whole is not None:
                partial_slots = whole.partials  # in shared memory
            slots = seq_heads * partial_slots if partial_slots and whole is None else resident + seq_heads
            size = slots * packed_rows * config.partial_bytes
            self.parts[i] = Part(config, (blocks, packed_row_blocks, 1), resident, partial_slots, self.scratch_bytes, size, whole)
            self.scratch_bytes += size
        self.main = self.parts[self.combined[0]]
        partials = sum(part.partial_slots for part in self.parts.values())
        self.combine = combine.launched(self.main.config, sequences, packed_rows, partials, multiprocessors)


@cache
def _kernels(config: DecodeConfig, index: int) -> tuple[Kernel, Kernel, Kernel]:
    """The decode kernel and the two combine kernels, for one configuration and device."""
    module = launch.load(config.cubin(), index)
    return (
        Kernel(module, config.source.stem + "_kernel", 32 * config.warps, config.shared_bytes, index),
        Kernel(module, "combine_kernel", 32 * COMBINE_PACKED_ROWS * config.combine_sequences, 0, index),
        Kernel(module, "combine_one_kernel", 32 * COMBINE_WARPS, 0, index),
    )


def _segment_shape(call: AttendCall, s: Segment) -> Hashable:
    pages = s.k.base.stride(), s.k.codes.shape[1:3], s.block_table.shape, s.block_table.stride(0), _capacity(call, s)
    return pages, s.head_size_v, s.key_start is None, s.key_range is None, layer_of(s)


def _shape(call: AttendCall) -> Hashable:
    """Equal for calls that one `Prepared` serves."""
    q, batch, options = call.q, call.batch, call.options
    return (
        (q.shape[1:], q.stride(), q.dtype, q.device, batch.num_seqs, batch.max_query_len),
        (call.scale, options.window, options.chunk_lookback, options.softcap, options.sinks is None, options.batch_invariant),
        (_is_scaled(call), unsplit.is_even(batch), batch.chunks),
        None if call.parts is None else tuple(t.stride() for t in call.parts),
        *[_segment_shape(call, s) for s in call.segments],
    )


class Prepared:
    """Launches calls of one shape. What differs from layer to layer is filled in: addresses, and the factors of maps."""

    def __init__(self, call: AttendCall, after_write: bool = False):
        self.index, self.first = launch.device_index(call.q.device), None
        self.takes_parts_and_mean = call.segments[0].fmt.latent
        multiprocessors = launch.multiprocessors(self.index)
        plan = Plan(call, multiprocessors, after_write=after_write)
        while (clusters := plan.main.unsplit) is not None:
            config, (blocks, groups, _) = plan.main.config, plan.main.decode_grid
            held = clusters.held(_kernels(config, self.index)[0], groups)
            if held is None or held >= blocks:
                break
            enough = held >= clusters.grid(call.batch.num_seqs * config.kv_heads)  # else smaller clusters
            plan = Plan(call, multiprocessors, clusters.blocks - (not enough), after_write, held=held if enough else None)
        self.plan = plan
        self.reads = {i: Read(call, call.segments[i], part, plan.packed_rows) for i, part in plan.parts.items()}
        kernels = {i: _kernels(part.config, self.index) for i, part in plan.parts.items()}
        for i, read in self.reads.items():
            read.arguments.after_decode = int(i != plan.launched[0])
        self.main, self.others, self.exact = self.reads[plan.combined[0]], plan.combined[1:], plan.exact
        if self.exact is not None:
            exact, main = call.segments[self.exact], self.main.arguments
            main.exact_page_stride, main.exact_head_stride = exact.k.base.stride(0), exact.k.base.stride(1)
            main.exact_table_stride = exact.block_table.stride(0)
        for place, i in enumerate(self.others):
            self.main.arguments.other_resident[place] = plan.parts[i].resident
            self.main.arguments.other_workers[place] = plan.parts[i].config.workers
            self.main.arguments.other_partial_slots[place] = plan.parts[i].partial_slots
        cluster = 1 if clusters is None else clusters.blocks
        self.launches = [Launch(kernels[i][0], plan.parts[i].decode_grid, self.reads[i].arguments, cluster) for i in plan.launched]
        if clusters is None or plan.main.config.either:
            kernel = kernels[plan.combined[0]][1 + plan.combine.by_blocks]
            self.launches.append(Launch(kernel, plan.combine.grid, self.main.arguments, threads=plan.combine.threads))

    @cached_property
    def after_write(self) -> Prepared | None:
        """The same for calls right behind a write, with nothing launched between them, of which `write.Prepared.starts_next` is true and
        which stores the rows of the queries' own tokens, at most: only who reads those waits for it. None where all wait."""
        configs = [part.config for part in self.plan.parts.values()]
        follows = len(configs) == 1 and self.exact is None and configs[0].worker_warps == 1 and not configs[0].invariant
        return Prepared(self.first, after_write=True) if follows and self.first is not None else None

    def __call__(self, call: AttendCall) -> None:
        if call.q.shape[0] == 0:
            return
        if launch.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self._launch(call)
        self._launch(call)

    def _launch(self, call: AttendCall) -> None:
        sinks, lse, main = call.options.sinks, call.lse, self.main.arguments
        rows = call.parts or (call.q,)
        q = rows[0].data_ptr()
        if any(t.data_ptr() % 16 for t in rows) or (call.mean is not None and call.mean.data_ptr() % 16):
            raise ValueError(f"q at address {q}: rows begin at multiples of 16 bytes, as those of the call that was prepared")
        stream = launch.current_stream(self.index)
        with launch.LOCK:
            scratch = launch.scratch(self.plan.scratch_bytes, self.index, stream)
            for i, read in self.reads.items():
                read.fill(call, call.segments[i], q, scratch.data_ptr())
            if self.exact is not None:
                self._fill_exact(call, call.segments[self.exact])
            main.plain_gain = next((side.scale for side, _, map_ in (s.values for s in call.segments) if map_ is None), 1.0)
            main.out, main.lse = call.out.data_ptr(), None if lse is None else lse.data_ptr()
            if sinks is not None:
                main.sinks, main.sinks_stride, main.sinks_type = sinks.data_ptr(), sinks.stride(0), launch.SINK_TYPES[sinks.dtype]
            for place, i in enumerate(self.others):
                other = self.reads[i].arguments
                main.other_partials[place] = other.partials
                main.other_starts[place], main.other_ranges[place] = other.key_start, other.key_range
            for each in self.launches:
                each(stream)

    def _fill_exact(self, call: AttendCall, segment: Segment) -> None:
        a, range_ = self.main.arguments, segment.key_range
        if segment.maps.k is not None or segment.maps.v is not None:
            raise ValueError("segments: maps where the call that was prepared had none")
        a.exact_pages, a.exact_table = segment.k.base.data_ptr(), segment.block_table.data_ptr()
        a.exact_scale = scale_of(call) * segment.k.scale
        a.exact_start, a.exact_range = segment.key_start.data_ptr(), None if range_ is None else range_.data_ptr()


_PREPARED = launch.ByShape(_shape, Prepared)
