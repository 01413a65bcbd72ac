"""Calls with own rows as calls over segments alone, for every implementation but those that read the rows themselves."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ..assumed import assumed
from ..calls import AttendCall, OwnRows, PagedTensor, Segment, WriteCall, stored_before
from ..format import Format, get_format
from ..maps import LayerMaps

PAGE = 16  # tokens of a page of copies


class Lowered:
    """Memory for calls of one shape, and these calls over segments alone.

    Each sequence's own rows are one more segment, which begins where its queries do; the others end there. The rows are read where they
    lie, as pages of one token; or, copied, from pages of `PAGE` tokens: then `store` makes what serves the write, before the first call.
    dense: rows are read by kernels that are compiled for their strides: they get one row after the other.
    """

    def __init__(self, call: AttendCall, copied: bool = False, dense: bool = False) -> None:
        tokens, batch, rows = call.q.shape[0], call.batch, call.own
        self.size, self.dense, count = PAGE if copied else 1, dense, batch.num_seqs
        longest = tokens if batch.max_query_len is None else min(batch.max_query_len, tokens)
        width = max(-(-longest // self.size), 1)
        width = -(-width // 16) * 16 if dense else width  # for which nothing is compiled then
        room = count + count % 2  # sequences: each segment's ranges begin at a multiple of 16 bytes, for which kernels are compiled
        shapes = (count, width), (count,), (1 + len(call.segments), room, 2), (tokens if copied else 0,)
        with torch.inference_mode(False):
            self.table, self.start, ranges, self.slots = (torch.zeros(s, dtype=torch.int32, device=call.q.device) for s in shapes)
        self.ranges = ranges[:, :count]
        plain = get_format("none", rows.key.dtype)
        self.fmt = plain.latents(rows.key.dtype) if call.segments[0].fmt.latent else plain
        # Where no sequence has a context, nothing else is read.
        self.fresh = batch.lengths is not None and all(queries == keys and queries != 1 for queries, keys in batch.lengths)
        self.pages: tuple[PagedTensor, PagedTensor] | None = None
        if copied:
            scales = {s.v.scale for s in call.segments if s.maps.v is None}  # segments without a map share it
            self.pages = _pages(rows, tokens // PAGE + count, self.fmt, min(scales, default=1.0))
        self.triton = has_launches(call.q.device) and len(call.segments) < 4
        self.places: Any = None  # what a launch fills
        self.numbers: list[torch.Tensor] | None = None  # by which it was filled
        self.write: tuple[WriteCall, Callable[[WriteCall], None]] | None = None

    def store(self, rows: OwnRows, prepare: Callable[[WriteCall], Callable[[WriteCall], None]]) -> None:
        """Prepare the write of copies, if there are any."""
        if self.pages is not None:
            call = WriteCall(*rows, *self.pages, self.fmt, self.slots, LayerMaps())
            self.write = call, prepare(call)

    def segments(self, call: AttendCall) -> tuple[Segment, ...]:
        """What a call of the shape reads, by the numbers that `fill` worked out."""
        sides = self.pages or tuple(_in_place(t, self.dense) for t in call.own)
        own = Segment(*sides, self.fmt, self.table, LayerMaps(), self.start, self.ranges[-1])
        others = () if self.fresh else (s._replace(key_range=r) for s, r in zip(call.segments, self.ranges))
        return (*others, own)

    def of(self, call: AttendCall) -> AttendCall:
        """A call of the shape over segments alone, by what its tensors hold now."""
        self.fill(call)
        if self.write is not None:
            first, launch = self.write
            launch(first.with_tensors(*call.own, *self.pages, first.maps))
        return call.over(self.segments(call))

    def fill(self, call: AttendCall, triton: bool | None = None) -> None:
        """Work out where sequences begin and what is read of each segment. triton: whether by a launch; None: on a GPU that has Triton."""
        ranges = [s.key_range for s in call.segments]
        last = (call.own.key.shape[0] if self.pages is None else self.pages[0].codes.shape[0]) - 1
        if self.triton if triton is None else triton:
            if self.places is None:
                self.places = importlib.import_module(f"{__package__}.triton.own").Places(
                    self.table, self.start, self.ranges, self.slots, self.size, last
                )
            self.places.fill(call.batch.cu_seqlens_q, call.batch.seq_lens, ranges)
        elif self.table.device.type != "cpu":
            self._fill(call, ranges, last)
        else:  # where it is cheap to see that nothing changed
            numbers = [t for t in (call.batch.cu_seqlens_q, call.batch.seq_lens, *ranges) if t is not None]
            if self.numbers is None or not all(map(torch.equal, self.numbers, numbers)):
                self.numbers = [t.clone() for t in numbers]
                self._fill(call, ranges, last)

    def _fill(self, call: AttendCall, ranges: Sequence[torch.Tensor | None], last: int) -> None:
        batch, place = call.batch, self.table.device
        starts, counts = batch.cu_seqlens_q[:-1].long(), batch.cu_seqlens_q.diff()
        context, several = batch.seq_lens - counts, counts > 1
        first = starts if self.pages is None else starts // self.size + torch.arange(len(starts), device=place)
        self.table.copy_((first[:, None] + torch.arange(self.table.shape[1], device=place)).clamp_max(last))
        self.start.copy_(context)
        for target, given in zip(self.ranges, ranges):
            target.copy_(stored_before(batch.cu_seqlens_q, batch.seq_lens, given))
        self.ranges[-1].copy_(torch.stack([torch.where(several, context, 0), torch.where(several, batch.seq_lens, 0)], 1))
        if len(self.slots):
            token = torch.arange(len(self.slots), device=place)
            sequence = torch.searchsorted(batch.cu_seqlens_q[1:].contiguous(), token.to(batch.cu_seqlens_q.dtype), right=True)
            self.slots.copy_(first[sequence] * self.size + token - starts[sequence])


def has_launches(device: torch.device) -> bool:
    """Whether Triton's launches run on a device."""
    return (device.type == "cuda" or assumed() is not None) and find_spec("triton") is not None


def _in_place(rows: torch.Tensor, dense: bool) -> PagedTensor:
    """Rows `[T, heads, D]` as pages of one token: a view, unless the numbers of a row, or all, do not lie one after the other."""
    return PagedTensor((rows.contiguous() if dense or (rows.stride(2) != 1 and rows.shape[2] > 1) else rows)[:, None])


def _pages(rows: OwnRows, count: int, fmt: Format, v_scale: float) -> tuple[PagedTensor, PagedTensor]:
    """K and V of `count` pages for copies of rows."""
    heads, head_size = rows.key.shape[1:]
    spec = fmt.cache_spec(heads, head_size, rows.value.shape[2], PAGE)
    with torch.inference_mode(False):
        buffer = torch.zeros(count, heads, spec.page_bytes, dtype=torch.uint8, device=rows.key.device)
    found = []
    for codec, (offset, size), scale in zip((fmt.k, fmt.v), spec.sections, (1.0, v_scale)):
        codes = buffer[:, :, offset : offset + size].view(codec.code_dtype).unflatten(2, (PAGE, -1)).transpose(1, 2)
        found.append(PagedTensor(codes, None, scale).in_storage_of(buffer))
    return tuple(found)
