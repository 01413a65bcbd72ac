"""The steps around the dense kernel as launches of `kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

import torch
import triton

from ...calls import PagedTensor, Segment
from ...format import Codec
from ...maps import LayerMaps, LinearMap
from ..triton import launch
from ..triton.kernels.views import MapView, RowsView
from ..triton.launch import Launch, Target
from .kernels import CopiesView, HeldView, PlacesView, fold_kernel, gather_kernel, patch_kernel
from .plan import KeySlice, Round
from .steps import Partial, TorchSteps, gain, reachable

# What differs between calls that one launch serves.
GATHER_PLACES = (
    "k_pages.words", "k_pages.meta", "v_pages.words", "v_pages.meta", "k_map.matrix", "k_map.key_mean", "v_map.matrix",
    "places.table", "places.blocks", "keys", "values",
)  # fmt: skip
PATCH_BLOCK = 16  # keys of a program that puts copies in their places
REPEAT = 8  # blocks of a program that maps rows of more than 128 dimensions back: the matrix is read once for all of them
GATHER_NUMBERS = ("k_factor", "v_factor", "k_back", "v_back")
PATCH_PLACES = (
    "k_pages.ptr", "v_pages.ptr", "k_map.matrix", "v_map.matrix", "held.table", "held.key_start", "held.key_range", "keys", "values",
)  # fmt: skip
PATCH_NUMBERS = ("k_factor", "v_factor")
FOLD_PLACES = ("a.ptr", "b.ptr", "a_lse.ptr", "b_lse.ptr", "out_lse.ptr", "out.ptr", "map.matrix", "sinks")
FOLD_NUMBERS = ("factor",)


class TritonSteps(TorchSteps):
    """As `TorchSteps`; the arithmetic is float32, products of mapped rows as exact as the GPU path's elsewhere.

    A launch that is kept serves calls whose tensors have the same shapes, strides and dtypes, and whose codecs and maps are compiled for
    alike: `_traits`, and what `gather` and `_fold` name beside it. All else (addresses, scales, factors) is handed over anew."""

    @cached_property
    def gains(self) -> tuple[float, ...]:
        """Gains of K's map and V's."""
        return tuple(gain(m) for m in self.row_maps)

    @cached_property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.sides[0].codes.device

    @cached_property
    def traits(self) -> Hashable:
        """What `gather_kernel` is compiled for, of both sides."""
        return self.back, *(_traits(*side) for side in zip(self.sides, self.codecs, self.row_maps))

    def _launch(self, key: Hashable, tensors: Sequence, numbers: Sequence[float], make: Callable[[], Launch]) -> None:
        """As `launch.launch_kept`, of this call's launches."""
        launch.launch_kept(self.launches, key, self.device, tensors, make, numbers)

    def map_query(self, q: torch.Tensor, front: int, back: int) -> torch.Tensor:
        """Queries in the space of mapped keys, between `front` and `back` rows of zeros."""
        if self.maps[0] is None:
            return super().map_query(q, front, back)
        operands = self.maps[0].operands
        out = rows = q.new_empty(front + q.shape[0] + back, *q.shape[1:])
        if front or back:
            stop = front + q.shape[0]
            rows = out[front:stop]
            out[:front].zero_()
            out[stop:].zero_()
        self._fold(Partial(q), None, Partial(rows), operands.query, operands.inverse_factor * self.gains[0])
        return out

    def map_rows(self, side: int, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Rows as given, into target, mapped where those of pages are."""
        if self.maps[side] is None:
            super().map_rows(side, rows, target)
        else:
            operands = self.maps[side].operands
            rows = rows if rows.stride(2) == 1 else rows.contiguous()
            self._fold(Partial(rows), None, Partial(target), operands.forward, operands.forward_factor / self.gains[side])

    @staticmethod
    def blocks(round: Round, sizes: tuple[int, int]) -> list[int]:
        """For each block of `gather_kernel`: sequence, first key, keys, first row, rows."""
        found, block = [], _block(sizes)
        for read in round.reads:
            for done in range(0, read.room, block):
                found += [read.sequence, read.first + done, read.count - done, read.at + done, min(block, read.room - done)]
        return found + [0] * (-len(found) % (5 * REPEAT))  # blocks of no rows: every program has as many

    def gather(self, table: torch.Tensor, round: Round, scratch: list[torch.Tensor], blocks: torch.Tensor | None = None) -> None:
        """Write the keys and values of a round into the scratch, as 16-bit rows."""
        sizes, read = [t.shape[2] for t in scratch], round.reads[0]
        alone = len(round.reads) == 1 and (read.at, read.room) == (0, round.room)
        table = table if table.stride(1) == 1 else table.contiguous()  # kernels take neighbouring pages of a sequence
        if alone:
            blocks, table = None, table[read.sequence]
        elif blocks is None:
            blocks = torch.tensor(self.blocks(round, sizes), dtype=torch.int32, device=table.device)
        (k, v), (k_map, v_map) = self.sides, (self._row_map(i) for i in range(2))
        tensors = (k.codes, k.meta, v.codes, v.meta, *k_map, v_map[0], table, blocks, *scratch)
        numbers = [side.scale / gain for side, gain in zip(self.sides, self.gains)]
        for map_, gain_ in zip(self.row_maps, self.gains):
            numbers.append(1.0 if map_ is None else map_.operands.inverse_factor * gain_ if self.back else 1.0 / gain_)
        key = (round, self.traits, scratch[0].dtype, *(t.stride() for t in (*scratch, table)), table.dtype)
        self._launch(key, tensors, numbers, lambda: self._gather_launch(tensors, numbers, round))

    def _gather_launch(self, tensors: Sequence, numbers: Sequence[float], round: Round) -> Launch:
        _, _, _, _, k_matrix, k_key_mean, v_matrix, table, blocks, *scratch = tensors
        heads, room, _ = scratch[0].shape
        sizes, target, read = [t.shape[2] for t in scratch], Target.of(self.device), round.reads[0]
        count = triton.cdiv(room, _block(sizes)) if blocks is None else len(blocks) // 5
        repeat = REPEAT if self.back and max(sizes) > 128 else 1
        views = [launch.pages(*side) for side in zip(self.sides, self.codecs, sizes)]
        plans = [
            launch.row_plan(codec, size, map_, side.scale, view, target, exact=scratch[0].dtype == torch.float32)
            for codec, size, map_, side, view in zip(self.codecs, sizes, self.row_maps, self.sides, views)
        ]
        arguments = {
            "k_pages": views[0],
            "v_pages": views[1],
            "k_map": launch.map_view(k_matrix, k_key_mean),
            "v_map": launch.map_view(v_matrix),
            "places": PlacesView(table, 0 if blocks is None else table.stride(0), blocks),
            "keys": scratch[0],
            "values": scratch[1],
            "first": read.first,
            "count": read.count,
            "room": room,
            **dict(zip(GATHER_NUMBERS, numbers)),
            "PAGE": self.sides[0].codes.shape[1],
            "BLOCK_N": _block(sizes),
            "K": plans[0],
            "V": plans[1],
            "BACK": repeat * self.back,
            "TOKEN_MAJOR": heads > 1 and scratch[0].stride(0) == sizes[0],
        }
        grid, options = (triton.cdiv(count, repeat), heads, 2), {"num_warps": 4 if max(sizes) <= 128 else 8}
        return Launch(gather_kernel, grid, arguments, options, GATHER_PLACES, GATHER_NUMBERS)

    def _row_map(self, side: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `gather_kernel` does to a side's rows after it decoded them: matrix, and key_mean."""
        map_ = self.row_maps[side]
        if map_ is None:
            return None, None
        if not self.back:
            return None, map_.operands.mapped_key_mean
        return map_.operands.output, launch.dense_rows(map_.key_mean)

    def patch(self, segment: Segment, read: KeySlice, keys: int, scratch: list[torch.Tensor]) -> None:
        """As there: by one launch, where the segment's rows are as they were given."""
        sides, codecs = (segment.k, segment.v), (segment.fmt.k, segment.fmt.v)
        if any(codec.row.code_bits < 16 for codec in codecs) or segment.maps != LayerMaps():
            return super().patch(segment, read, keys, scratch)
        low, high = reachable(segment, read, keys)
        if low >= high:
            return
        table, key_start = segment.block_table, segment.key_start
        table = table if table.stride(1) == 1 else table.contiguous()
        held = table, launch.dense(key_start), launch.dense(segment.key_range)
        operands = [None if map_ is None else map_.operands for map_ in self.maps]
        matrices = [None if given is None else given.forward for given in operands]
        tensors = (*(side.codes for side in sides), *matrices, *held, *scratch)
        factors = [1.0 if given is None else given.forward_factor / gain_ for given, gain_ in zip(operands, self.gains)]
        numbers = [side.scale * factor for side, factor in zip(sides, factors)]
        key = ("patch", read, low, high, *(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors))
        self._launch(key, tensors, numbers, lambda: self._patch_launch(tensors, numbers, read, low, high))

    def _patch_launch(self, tensors: Sequence, numbers: Sequence[float], read: KeySlice, low: int, high: int) -> Launch:
        k, v, k_matrix, v_matrix, table, key_start, key_range, *scratch = tensors
        (heads, room, _), sizes = scratch[0].shape, tuple(t.shape[2] for t in scratch)
        arguments = {
            "k_pages": CopiesView(k, *k.stride()[:3]),
            "v_pages": CopiesView(v, *v.stride()[:3]),
            "k_map": launch.map_view(k_matrix),
            "v_map": launch.map_view(v_matrix),
            "held": HeldView(table, table.stride(0), table.shape[1], key_start, key_range),
            "keys": scratch[0],
            "values": scratch[1],
            "sequence": read.sequence,
            "low": low,
            "high": high,
            "row": read.at + low - read.first,
            "room": room,
            **dict(zip(PATCH_NUMBERS, numbers)),
            "PAGE": k.shape[1],
            "SIZE": sizes[0],
            "SIZE_V": sizes[1],
            "WIDTH": max(16, triton.next_power_of_2(max(sizes))),
            "TOKEN_MAJOR": heads > 1 and scratch[0].stride(0) == sizes[0],
            "BLOCK_N": PATCH_BLOCK,
        }
        grid = (triton.cdiv(high - low, PATCH_BLOCK), heads, 2)
        return Launch(patch_kernel, grid, arguments, {"num_warps": 4}, PATCH_PLACES, PATCH_NUMBERS)

    def combine(self, a: Partial, b: Partial) -> Partial:
        """Attention over the keys of both, float32: the rows in a's memory where they are float32 already. Not its sums: threads that read
        one and one that writes it do not wait for each other."""
        again = a.out.dtype == torch.float32 != b.out.dtype
        combined = Partial(a.out if again else torch.empty_like(a.out, dtype=torch.float32), torch.empty_like(a.lse))
        self._fold(a, b, combined)
        return combined

    def finish(
        self, total: Partial | None, last: Partial, out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None = None
    ) -> None:
        """Combine what is left, add the sinks, map the output back and write it."""
        map_, a, b = self.maps[1], *((last, None) if total is None else (total, last))
        if map_ is not None:
            self._fold(a, b, Partial(out, lse), map_.operands.output, map_.operands.inverse_factor * self.gains[1], sinks)
        elif b is not None or sinks is not None:
            self._fold(a, b, Partial(out, lse), sinks=sinks)
        else:
            super().finish(None, last, out, lse)

    def _fold(
        self,
        a: Partial,
        b: Partial | None,
        out: Partial,
        matrix: torch.Tensor | None = None,
        factor: float = 1.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        needed = b is not None or sinks is not None or out.lse is not None
        sums = (a.lse if needed else None, None if b is None else b.lse, out.lse)
        sinks = launch.dense(sinks)
        rows = (a.out, None if b is None else b.out, *sums, out.out)
        tensors = (*rows, matrix, sinks)
        described = [None if t is None else (t.dtype, t.stride()) for t in tensors]
        key = (a.out.shape, self.heads, None if matrix is None else matrix.shape[0], *described)
        self._launch(key, tensors, (factor,), lambda: self._fold_launch(tensors, factor))

    def _fold_launch(self, tensors: Sequence, factor: float) -> Launch:
        (a, b, *_), (matrix, sinks) = tensors[:6], tensors[6:]
        tokens, num_heads, head_size = a.shape
        group, width = num_heads // self.heads, max(16, triton.next_power_of_2(head_size))
        block = 64 if width <= 128 else 16
        arguments = {
            **{name: _rows(t) for name, t in zip(("a", "b", "a_lse", "b_lse", "out_lse", "out"), tensors)},
            "map": MapView() if matrix is None else launch.map_view(matrix),
            "sinks": sinks,
            "num_rows": tokens * group,
            "factor": factor,
            "GROUP": group,
            "D": head_size,
            "WIDTH": width,
            "BLOCK": block,
            "COMBINED": b is not None,
            "MAPPED": matrix is not None,
            "SINKS": sinks is not None,
            "PRECISION": Target.of(self.device).precision,
        }
        options = {"num_warps": 4 if width <= 128 else 8}
        return Launch(fold_kernel, (triton.cdiv(tokens * group, block), self.heads), arguments, options, FOLD_PLACES, FOLD_NUMBERS)


def _traits(side: PagedTensor, codec: Codec, map_: LinearMap | None) -> Hashable:
    """What `gather_kernel` is compiled for, of a side: everything but addresses, scales and factors."""
    codes, meta = side.codes, side.meta
    lie = (codes.dtype, codes.shape, codes.stride(), codes.data_ptr() % 16, None if meta is None else (meta.dtype, meta.stride()))
    mapped = None if map_ is None else (map_.traits, map_.operands.output.dtype)
    return codec.triton, codec.signed, codec.round_mapped, lie, mapped


def _block(sizes: list[int] | tuple[int, int]) -> int:
    """Rows that `gather_kernel` writes at a time."""
    return 64 if max(sizes) <= 256 else 32


def _rows(t: torch.Tensor | None) -> RowsView:
    """Rows `[T, heads, D]` whose elements lie one after the other, or numbers `[T, heads]`; none."""
    if t is not None and t.ndim == 3 and t.stride(2) != 1:
        raise ValueError(f"rows of strides {t.stride()}: the elements of a row must lie one after the other")
    return RowsView(None, 0, 0) if t is None else launch.rows_view(t)
