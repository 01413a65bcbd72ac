"""How one KV source of a call is read: how it is cut, and the arguments of its kernels."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ....calls import AttendCall, Segment
from ....reads import window_size
from ..host import launch
from ..host.operands import NO_MAP, key_means_of, kind, map_of
from .unsplit import NEVER, Unsplit
from .warps import DecodeConfig


@dataclass(frozen=True)
class Part:
    """How a segment is cut: the configuration, the grid of its decode kernel, the workers that work at once, the partials that a sequence
    and kv head has room for where the cut is invariant, its place in the scratch, who reads each (sequence, kv head) where they are
    unsplit."""

    config: DecodeConfig
    decode_grid: tuple[int, int, int]
    resident: int
    partial_slots: int
    scratch_begin: int
    scratch_bytes: int
    unsplit: Unsplit | None = None


def scale_of(call: AttendCall) -> float:
    """Scale of scores, as the kernels take it: base 2, over half of softcap where there is one."""
    return call.scale * launch.LOG2E * (2 / call.options.softcap if call.options.softcap else 1.0)


def layer_of(s: Segment) -> Hashable:
    """What may differ between layers, and is compiled for."""
    key, value = s.fmt.k, s.fmt.v  # which a configuration keeps alive
    return kind(s.maps.k), kind(s.values[2]), s.maps.by_position, id(key), id(value)


class Read:
    """The arguments of the kernels of one segment."""

    def __init__(self, call: AttendCall, segment: Segment, part: Part, packed_rows: int):
        options = call.options
        self.key_half, self.begin, self.layer = part.config.key_half, part.scratch_begin, layer_of(segment)
        self.scale = scale_of(call)
        self.arguments = launch.arguments("AttendArguments")(
            **self._queries(call),
            page_stride=segment.k.base.stride(0),
            table_width=segment.block_table.shape[1],
            table_stride=segment.block_table.stride(0),
            sequences=call.batch.num_seqs,
            window=max(window_size(options)),
            chunk_lookback=options.chunk_lookback,
            resident=part.resident,
            partial_slots=part.partial_slots,
            unsplit_blocks=part.unsplit.blocks if part.unsplit else 0,
            unsplit_warps=part.unsplit.warps if part.unsplit else 0,
            unsplit_spare=(part.unsplit.spare or 0) if part.unsplit else NEVER,
            all_packed_rows=packed_rows,
            softcap=options.softcap * launch.LOG2E,
        )
        self.take_maps(segment)

    @staticmethod
    def _queries(call: AttendCall) -> dict[str, int]:
        """Where the queries of a token and head are."""
        first, rotated = call.parts or (call.q, call.q)
        strides = dict(q_token=first.stride(0), q_head=first.stride(1))
        return strides | dict(q_rotated_token=rotated.stride(0), q_rotated_head=rotated.stride(1))

    def fill(self, call: AttendCall, segment: Segment, q: int, scratch: int) -> None:
        """The addresses of a call, and its maps and scales where they are others. q: of the queries, or of their first part."""
        if segment.maps.k is not self.maps.k or segment.maps.v is not self.maps.v or self.scales != (segment.k.scale, segment.v.scale):
            self.take_maps(segment)
        a, batch, start, range_ = self.arguments, call.batch, segment.key_start, segment.key_range
        a.q, a.pages, a.block_table = q, segment.k.base.data_ptr(), segment.block_table.data_ptr()
        a.seq_lens, a.cu_queries = batch.seq_lens.data_ptr(), batch.cu_seqlens_q.data_ptr()
        a.key_start, a.key_range = None if start is None else start.data_ptr(), None if range_ is None else range_.data_ptr()
        a.partials = scratch + self.begin
        if segment.fmt.latent:
            a.q_rotated = q + 2 * segment.head_size_v if call.parts is None else call.parts[1].data_ptr()
            a.mean = None if call.mean is None else call.mean.data_ptr()

    def take_maps(self, segment: Segment) -> None:
        """Point the arguments at a segment's maps, times its per-tensor scales. ValueError where they are of another kind than those
        prepared for."""
        if layer_of(segment) != self.layer:
            raise ValueError("segments: maps of another kind, or another format, than in the call that was prepared")
        maps, a, (values, _, output_map) = segment.maps, self.arguments, segment.values
        key_map, value_map = map_of(maps.k, self.key_half) or NO_MAP, map_of(output_map, None) or NO_MAP
        means = key_means_of(maps.k, self.key_half)
        self.scales = k_scale, v_scale = segment.k.scale, segment.v.scale
        a.key_map, a.key_map_stride, a.scale = key_map.address, key_map.head_stride, self.scale * key_map.gain * k_scale
        a.value_map, a.value_map_stride, a.value_gain = value_map.address, value_map.head_stride, value_map.gain * values.scale
        if means is not None:
            a.key_mean, a.key_mean_stride = means.data.data_ptr(), means.head_stride
            a.key_mean_groups, a.key_mean_gain = means.groups, means.gain / k_scale  # what a key mean is not divided by
        if segment.fmt.latent:  # rotated dimensions are under no map
            a.key_mean_gain = v_scale / (key_map.gain * k_scale)
        self.maps, self.operands = maps, (key_map, value_map, means)  # alive while their addresses are here
