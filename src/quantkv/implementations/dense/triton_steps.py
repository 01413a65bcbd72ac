"""The steps around the dense kernel as launches of `kernels.py`."""

from __future__ import annotations

import torch
import triton

from ...calls import Side
from ...format import Format
from ...maps import LayerMaps
from ..triton.kernels.views import MapView, RowsView
from ..triton.launch import Target, on_device, pages, row_plan
from .kernels import PlacesView, fold_kernel, gather_kernel
from .plan import Round
from .steps import Part, TorchSteps, gain


class TritonSteps(TorchSteps):
    """As `TorchSteps`; the arithmetic is float32, products of mapped rows as exact as the GPU path's elsewhere."""

    def __init__(self, sides: tuple[Side, Side], fmt: Format, maps: LayerMaps, heads: int, back: bool = False) -> None:
        super().__init__(sides, fmt, maps, heads, back)
        self.gains = tuple(gain(m) for m in self.row_maps)
        self.target = Target.of(sides[0].codes.device)

    def map_query(self, q: torch.Tensor, front: int, back: int) -> torch.Tensor:
        """Queries in the space of mapped keys, between `front` and `back` rows of zeros."""
        if self.maps[0] is None:
            return super().map_query(q, front, back)
        operands, out = self.maps[0].operands, q.new_empty(front + q.shape[0] + back, *q.shape[1:])
        stop = front + q.shape[0]
        self._fold(Part(q), None, Part(out[front:stop]), operands.query, operands.inverse_factor * self.gains[0])
        out[:front].zero_()
        out[stop:].zero_()
        return out

    @staticmethod
    def blocks(round: Round, sizes: tuple[int, int]) -> list[int]:
        """For each program of `gather_kernel`: sequence, first key, keys, first row, rows."""
        found, block = [], _block(sizes)
        for read in round.reads:
            for done in range(0, read.room, block):
                found += [read.sequence, read.first + done, read.count - done, read.at + done, min(block, read.room - done)]
        return found

    def gather(self, table: torch.Tensor, round: Round, scratch: list[torch.Tensor], blocks: torch.Tensor | None = None) -> None:
        """Write the keys and values of a round into the scratch, as 16-bit rows."""
        table = table if table.stride(1) == 1 else table.contiguous()  # kernels take neighbouring pages of a sequence
        heads, room, _ = scratch[0].shape
        sizes = [t.shape[2] for t in scratch]
        views = [pages(*side) for side in zip(self.sides, self.codecs, sizes)]
        plans = [
            row_plan(codec, size, map_, side.scale, view, self.target, exact=scratch[0].dtype == torch.float32)
            for codec, size, map_, side, view in zip(self.codecs, sizes, self.row_maps, self.sides, views)
        ]
        block, read = _block(sizes), round.reads[0]
        if len(round.reads) == 1:
            places, programs = PlacesView(table[read.sequence], 0), triton.cdiv(room, block)
        else:
            blocks = torch.tensor(self.blocks(round, sizes), dtype=torch.int32, device=table.device) if blocks is None else blocks
            places, programs = PlacesView(table, table.stride(0), blocks), len(blocks) // 5
        with on_device(table.device):
            gather_kernel[(programs, heads, 2)](
                *views,
                *(self._row_map(i) for i in range(2)),
                places,
                *scratch,
                read.first,
                read.count,
                room,
                *(side.scale / gain for side, gain in zip(self.sides, self.gains)),
                *(1.0 if m is None else m.operands.inverse_factor * gain for m, gain in zip(self.row_maps, self.gains)),
                PAGE=self.sides[0].codes.shape[1],
                BLOCK_N=block,
                K=plans[0],
                V=plans[1],
                BACK=self.back,
                TOKEN_MAJOR=heads > 1 and scratch[0].stride(0) == sizes[0],
            )

    def _row_map(self, side: int) -> MapView:
        """What `gather_kernel` does to a side's rows after it decoded them."""
        map_ = self.row_maps[side]
        if map_ is None:
            return MapView()
        inverse, offset = map_.operands.output, map_.offset
        if not self.back:
            inverse, offset = None, None if offset is None else map_.operands.mapped_offset / self.gains[side]
        head = 0 if inverse is None or inverse.shape[0] == 1 else inverse.stride(0)
        if offset is None:
            return MapView(inverse, head)
        offset = offset if offset.stride(2) == 1 else offset.contiguous()
        return MapView(inverse, head, offset, offset.stride(0), offset.stride(1) if offset.shape[1] > 1 else 0, offset.shape[0])

    def merge(self, a: Part, b: Part) -> Part:
        """Attention over the keys of both, float32: the rows in a's memory where they are float32 already. Not its sums: threads that read
        one and one that writes it do not wait for each other."""
        again = a.out.dtype == torch.float32 != b.out.dtype
        merged = Part(a.out if again else torch.empty_like(a.out, dtype=torch.float32), torch.empty_like(a.lse))
        self._fold(a, b, merged)
        return merged

    def finish(self, total: Part | None, last: Part, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        """Merge what is left, add the sinks, map the output back and write it."""
        map_, a, b = self.maps[1], *((last, None) if total is None else (total, last))
        if b is None and sinks is None:
            lse.copy_(last.lse)
        if map_ is not None:
            self._fold(a, b, Part(out, lse), map_.operands.output, map_.operands.inverse_factor * self.gains[1], sinks)
        elif b is not None or sinks is not None:
            self._fold(a, b, Part(out, lse), sinks=sinks)
        elif last.out.data_ptr() != out.data_ptr():
            out.copy_(last.out)

    def _fold(
        self, a: Part, b: Part | None, out: Part, matrix: torch.Tensor | None = None, factor: float = 1.0, sinks: torch.Tensor | None = None
    ) -> None:
        tokens, num_heads, head_size = a.out.shape
        group, width = num_heads // self.heads, max(16, triton.next_power_of_2(head_size))
        block = 64 if width <= 128 else 16
        map_ = MapView() if matrix is None else MapView(matrix, 0 if matrix.shape[0] == 1 else matrix.stride(0))
        sums = [None if p is None or (b is None and sinks is None) else _rows(p.lse) for p in (a, b, out)]
        with on_device(a.out.device):
            fold_kernel[(triton.cdiv(tokens * group, block), self.heads)](
                _rows(a.out),
                None if b is None else _rows(b.out),
                *sums,
                _rows(out.out),
                map_,
                None if sinks is None else sinks.contiguous(),
                tokens * group,
                factor,
                GROUP=group,
                D=head_size,
                WIDTH=width,
                BLOCK=block,
                MERGED=b is not None,
                MAPPED=matrix is not None,
                SINKS=sinks is not None,
                PRECISION=self.target.precision,
                num_warps=4 if width <= 128 else 8,
            )


def _block(sizes: list[int] | tuple[int, int]) -> int:
    """Rows that a program of `gather_kernel` writes."""
    return 64 if max(sizes) <= 128 else 32


def _rows(t: torch.Tensor) -> RowsView:
    """Rows `[T, heads, D]` whose elements lie one after the other, or numbers `[T, heads]`."""
    if t.ndim == 3 and t.stride(2) != 1:
        raise ValueError(f"rows of strides {t.stride()}: the elements of a row must lie one after the other")
    return RowsView(t, *t.stride()[:2])
