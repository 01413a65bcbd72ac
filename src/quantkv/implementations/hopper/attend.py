"""Reads on Hopper: paged decode and verification, of one call or of all that share its shape."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import cache

import torch

from ...calls import AttendCall
from . import launch
from .decode import COMBINE_COLUMNS, COMBINE_WARPS, TILE, DecodeConfig, choose
from .launch import Kernel, Launch
from .operands import NO_MAP, kind, map_of, offsets_of
from .records import pages_of, unsuitable

HONOURED = frozenset({"window", "softcap", "sinks"})
QUERIES = range(9)  # of a sequence
LOG2E = math.log2(math.e)
SINK_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in arguments.cuh


def refusal(call: AttendCall) -> str | None:
    """Why the kernel cannot serve this call; None where it can. Looks at shapes and types only, never at what tensors hold."""
    return launch.elsewhere(call.q.device) or _unsupported(call)


def _unsupported(call: AttendCall) -> str | None:
    """Why no Hopper GPU can serve it."""
    q, batch, segment = call.q, call.batch, call.segments[0]
    if len(call.segments) != 1:
        return f"{len(call.segments)} segments: one is needed"
    if segment.key_start is not None or segment.key_range is not None:
        return "key_start, key_range: all keys of a sequence, from position 0, are needed"
    fmt, k, v = segment.fmt, segment.k, segment.v
    for name, codec, use in (("keys", fmt.k, "keys"), ("values", fmt.v, "values")):
        if codec.hopper is None or not getattr(codec.hopper(), use):
            return f"format {fmt.name}: {name} of {codec.name} have no code for Hopper"
    if k.scale != 1.0 or v.scale != 1.0:
        return f"per-tensor scales {k.scale}, {v.scale}: 1 is needed"
    if not batch.max_query_len or batch.max_query_len not in QUERIES:
        return f"max_query_len={batch.max_query_len}: 1 to {QUERIES[-1]} queries a sequence must be promised"
    D, HQ, HK, block_size = q.shape[2], q.shape[1], k.codes.shape[2], k.codes.shape[1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q.dtype {q.dtype}: bfloat16 or float16"
    odd = [codec.row.code_bits for codec in (fmt.k, fmt.v) if 16 % codec.row.code_bits]
    if segment.head_size_v != D or D not in (64, 128, 256) or (D == 64 and odd):
        return f"head sizes {D}, {segment.head_size_v}: both 64 (with 2, 4 or 8 bits), 128 or 256"
    if HQ // HK > 16:
        return f"{HQ} query heads over {HK} kv heads: at most 16 share one"
    if block_size not in (16, 32, 64, 128):
        return f"block_size {block_size}: 16, 32, 64 or 128"
    pages = pages_of(k, v)
    if pages is None:
        return "the cache is no buffer of page records [num_blocks, HK, page_bytes]"
    if pages.stride(0) >= 1 << 32:
        return f"pages strides {pages.stride()}: a page under 4 GiB"
    if reason := unsuitable(pages, fmt.k, fmt.v, D, block_size):
        return reason
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or q.data_ptr() % 16:
        return f"q strides {q.stride()}: rows of neighbouring elements that begin at multiples of 16 bytes"
    if call.out.dtype != q.dtype or not call.out.is_contiguous():
        return f"out of {call.out.dtype}, strides {call.out.stride()}: contiguous, of q's dtype"
    if call.lse is not None and not call.lse.is_contiguous():
        return f"lse strides {call.lse.stride()}: contiguous"
    for name, t in (("block_table", segment.block_table), ("seq_lens", batch.seq_lens), ("cu_seqlens_q", batch.cu_seqlens_q)):
        if t.dtype != torch.int32 or t.stride(-1) != 1:
            return f"{name} of {t.dtype}, strides {t.stride()}: int32, last dimension contiguous"
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
    configuration(call).cubin()


def _capacity(call: AttendCall) -> int:
    """Tiles that may be read, at most; to a power of two, so that few configurations differ."""
    segment, promised = call.segments[0], call.batch.max_seq_len
    longest = segment.block_table.shape[1] * segment.k.codes.shape[1]
    if promised is not None:
        longest = min(longest, promised)
    return call.batch.num_seqs * segment.k.codes.shape[2] << max(-(-longest // TILE) - 1, 0).bit_length()


def configuration(call: AttendCall) -> DecodeConfig:
    """What a kernel that serves `call` is compiled for."""
    segment, (_, HQ, D), HK = call.segments[0], call.q.shape, call.segments[0].k.codes.shape[2]
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
        segment.maps.k is not None and segment.maps.k.offset is not None,
        _capacity(call),
    )


class Plan:
    """How a call is cut: the configuration, the grids of both kernels, the warps that work at once, the scratch."""

    def __init__(self, call: AttendCall, multiprocessors: int):
        self.config = config = configuration(call)
        sequences, pairs = call.batch.num_seqs, call.batch.num_seqs * config.kv_heads
        self.columns = columns = call.batch.max_query_len * config.group
        column_blocks = -(-columns // (8 * config.column_tiles))
        blocks = max(1, multiprocessors * config.blocks_per_sm // column_blocks)
        blocks = max(1, min(blocks, -(-_capacity(call) // config.warps)))
        self.resident = blocks * config.warps
        self.decode_grid = (blocks, column_blocks, 1)
        self.few = multiprocessors >= 8 * pairs  # sequences: with more than eight pieces each
        across = (sequences, columns) if self.few else (-(-sequences // config.combined), -(-columns // COMBINE_COLUMNS))
        self.combine_grid = (across[0], config.kv_heads, across[1])
        self.scratch_bytes = (self.resident + pairs) * columns * config.piece_bytes


@cache
def _kernels(config: DecodeConfig, index: int) -> tuple[Kernel, Kernel, Kernel]:
    """The decode kernel and the two combine kernels, for one configuration and device."""
    module = launch.load(config.cubin(), index)
    return (
        Kernel(module, "decode_kernel", 32 * config.warps, config.shared_bytes, index),
        Kernel(module, "combine_kernel", 32 * COMBINE_COLUMNS * config.combined, 0, index),
        Kernel(module, "combine_one_kernel", 32 * COMBINE_WARPS, 0, index),
    )


def _layer(call: AttendCall) -> Hashable:
    """What may differ between layers, and is compiled for."""
    maps, fmt = call.segments[0].maps, call.segments[0].fmt
    offset = maps.k is not None and maps.k.offset is not None
    return kind(maps.k), kind(maps.v), offset, id(fmt.k), id(fmt.v)  # codecs that a configuration keeps alive


def _shape(call: AttendCall) -> Hashable:
    """Equal for calls that one `Prepared` serves."""
    q, segment, batch, options = call.q, call.segments[0], call.batch, call.options
    return (
        (q.shape[1:], q.stride(), q.dtype, q.device, segment.k.base.stride(), segment.k.codes.shape[1:3]),
        (segment.block_table.shape, segment.block_table.stride(0), batch.num_seqs, batch.max_query_len, _capacity(call)),
        (call.scale, options.window, options.softcap, options.sinks is None, _layer(call)),
    )


class Prepared:
    """Launches calls of one shape. What differs from layer to layer is filled in: addresses, and the factors of maps."""

    def __init__(self, call: AttendCall):
        self.index = launch.device_index(call.q.device)
        self.plan = plan = Plan(call, launch.multiprocessors(self.index))
        self.key_half, self.layer = plan.config.key_half, _layer(call)
        segment, options = call.segments[0], call.options
        self.scale = call.scale * LOG2E * (2 / options.softcap if options.softcap else 1.0)
        self.arguments = launch.arguments("AttendArguments")(
            q_token=call.q.stride(0),
            q_head=call.q.stride(1),
            page_stride=segment.k.base.stride(0),
            table_width=segment.block_table.shape[1],
            table_stride=segment.block_table.stride(0),
            sequences=call.batch.num_seqs,
            window=options.window,
            resident=plan.resident,
            all_columns=plan.columns,
            softcap=options.softcap * LOG2E,
        )
        self._take_maps(call)
        decode, *combine = _kernels(plan.config, self.index)
        self.decode = Launch(decode, plan.decode_grid, self.arguments)
        self.combine = Launch(combine[plan.few], plan.combine_grid, self.arguments)

    def __call__(self, call: AttendCall) -> None:
        if call.q.shape[0] == 0:
            return
        if launch.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self._launch(call)
        self._launch(call)

    def _launch(self, call: AttendCall) -> None:
        segment, batch, a = call.segments[0], call.batch, self.arguments
        maps, sinks, lse, q = segment.maps, call.options.sinks, call.lse, call.q.data_ptr()
        if q % 16:
            raise ValueError(f"q at address {q}: rows begin at multiples of 16 bytes, as those of the call that was prepared")
        stream = launch.current_stream(self.index)
        with launch.LOCK:
            if maps.k is not self.maps.k or maps.v is not self.maps.v:
                self._take_maps(call)
            a.q, a.out, a.lse = q, call.out.data_ptr(), None if lse is None else lse.data_ptr()
            a.pages, a.block_table = segment.k.base.data_ptr(), segment.block_table.data_ptr()
            a.seq_lens, a.cu_queries = batch.seq_lens.data_ptr(), batch.cu_seqlens_q.data_ptr()
            if sinks is not None:
                a.sinks, a.sinks_stride, a.sinks_type = sinks.data_ptr(), sinks.stride(0), SINK_TYPES[sinks.dtype]
            scratch = launch.scratch(self.plan.scratch_bytes, self.index, stream)
            a.pieces = scratch.data_ptr()
            self.decode(stream)
            self.combine(stream)

    def _take_maps(self, call: AttendCall) -> None:
        if _layer(call) != self.layer:
            raise ValueError("segments: maps of another kind, or another format, than in the call that was prepared")
        maps, a = call.segments[0].maps, self.arguments
        key_map, value_map = map_of(maps.k, self.key_half) or NO_MAP, map_of(maps.v, None) or NO_MAP
        offsets = offsets_of(maps.k, self.key_half)
        a.key_map, a.key_map_stride, a.scale = key_map.address, key_map.head_stride, self.scale * key_map.gain
        a.value_map, a.value_map_stride, a.value_gain = value_map.address, value_map.head_stride, value_map.gain
        if offsets is not None:
            a.key_offset, a.offset_stride = offsets.data.data_ptr(), offsets.head_stride
            a.offset_groups, a.offset_gain = offsets.groups, offsets.gain
        self.maps, self.operands = maps, (key_map, value_map, offsets)  # alive while their addresses are here


_PREPARED = launch.ByShape(_shape, Prepared)
