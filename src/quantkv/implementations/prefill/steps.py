"""What happens around the dense kernel: queries mapped, pages dequantized, results over slices of keys combined."""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...calls import PagedTensor, Segment
from ...format import Format
from ...maps import LayerMaps, LinearMap
from ..reference.attend import combine
from ..reference.write import apply_map, dequantize, stored_key_mean
from .plan import KeySlice, Round


class Partial(NamedTuple):
    """Rows `[M, HQ, D]`, and their log-sum-exp `[M, HQ]` over the keys that they stand for."""

    out: torch.Tensor
    lse: torch.Tensor | None = None


@lru_cache(maxsize=256)  # by identity: reading the norm waits for the device
def gain(map_: LinearMap | None) -> float:
    """The power of two nearest to the factor by which a map stretches rows. The scratch holds rows divided by it: an
    unnormalised Hadamard matrix would carry fp16 rows out of range."""
    stretch = 1.0 if map_ is None else float(map_.forward.square().sum(-1).mean().sqrt())
    return 2.0 ** round(math.log2(stretch)) if 0 < stretch < math.inf else 1.0


def reachable(segment: Segment, read: KeySlice, keys: int) -> tuple[int, int]:
    """The keys of a slice of a sequence of `keys` tokens, from one to before another, that a segment may hold, by what the host knows: with
    key_start the last ones, as many as its table has room for; else the first."""
    room = segment.block_table.shape[1] * segment.k.codes.shape[1]
    low, high = (0, min(room, keys)) if segment.key_start is None else (max(keys - room, 0), keys)
    return max(low, read.first), min(high, read.first + read.count)


class TorchSteps:
    """What happens around the dense kernel, in PyTorch. maps, sides: of K and V; scratch: `[HK, N, D]` of each.

    back: rows are mapped back as they are gathered, in place of queries and outputs being mapped. launches: of the calls of one plan, kept
    for its next call; None: nothing is kept."""

    def __init__(
        self,
        sides: tuple[PagedTensor, PagedTensor],
        fmt: Format,
        maps: LayerMaps,
        heads: int,
        back: bool = False,
        launches: dict[Hashable, Any] | None = None,
    ) -> None:
        self.sides, self.codecs, self.row_maps = sides, (fmt.k, fmt.v), (maps.k, maps.v)
        self.heads, self.back, self.launches = heads, back, launches
        self.maps = (None, None) if back else self.row_maps  # of queries and outputs

    def map_query(self, q: torch.Tensor, front: int, back: int) -> torch.Tensor:
        """`gain A^-T q`, in q's dtype, between `front` and `back` rows of zeros."""
        rows = q if self.maps[0] is None else self._map(self.maps[0].inverse.mT * gain(self.maps[0]), q).to(q.dtype)
        return torch.nn.functional.pad(rows, (0, 0, 0, 0, front, back)) if front or back else rows

    def map_rows(self, side: int, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Rows `[T, HK, D]` as given, of K (0) or V (1), into target of the same shape, as `gather` writes those of pages."""
        map_ = self.maps[side]
        target.copy_(rows if map_ is None else apply_map(map_.forward, rows.float()) / gain(map_))

    @staticmethod
    def blocks(round: Round, sizes: tuple[int, int]) -> list[int]:
        """What `gather` wants to have on the device of a round of several sequences, int32. sizes: of a key and a value."""
        return []

    def gather(self, table: torch.Tensor, round: Round, scratch: list[torch.Tensor], blocks: torch.Tensor | None = None) -> None:
        """Keys and values of a round, mapped back or as they are and divided by the gain, into scratch; what is left of it gets finite
        numbers. table: the block table. blocks: what `blocks` said, on the device; not needed for a single sequence."""
        for read in round.reads:
            pages, rows = table[read.sequence], slice(read.at, read.at + read.room)
            self._gather(pages, read.first, read.count, [t[:, rows] for t in scratch])

    def _gather(self, pages: torch.Tensor, first: int, count: int, scratch: list[torch.Tensor]) -> None:
        for side, codec, row_map, map_, target in zip(self.sides, self.codecs, self.row_maps, self.maps, scratch):
            size = side.codes.shape[1]
            position = torch.arange(first, first + count, device=pages.device)
            slots = pages[position // size].long() * size + position % size
            rows = dequantize(side, codec, row_map if self.back else None, slots, position)
            if map_ is not None and map_.key_mean is not None:
                rows = rows + apply_map(map_.forward, stored_key_mean(side, codec, map_, slots, position).expand_as(rows))
            target[:, :count] = rows.transpose(0, 1) / gain(map_)
            target[:, count:] = 0

    def patch(self, segment: Segment, read: KeySlice, keys: int, scratch: list[torch.Tensor]) -> None:
        """Put the keys and values that another segment holds of a sequence of `keys` tokens in their places of what `gather` filled.

        Which of the `reachable` ones these are is on the device."""
        low, high = reachable(segment, read, keys)
        if low >= high:
            return
        sequence, first = read.sequence, read.first
        size, table = segment.k.codes.shape[1], segment.block_table[sequence]
        room = len(table) * size
        position = torch.arange(low, high, device=table.device)
        slot = position if segment.key_start is None else position - segment.key_start[sequence]
        here = (slot >= 0) & (slot < room)
        if segment.key_range is not None:
            here &= (position >= segment.key_range[sequence, 0]) & (position < segment.key_range[sequence, 1])
        slots = torch.where(here, table[(slot.clamp(0, room - 1) // size).long()] * size + slot % size, 0).long()
        sides = zip((segment.k, segment.v), (segment.fmt.k, segment.fmt.v), (segment.maps.k, segment.maps.v), self.maps, scratch)
        for side, codec, row_map, map_, target in sides:
            rows = dequantize(side, codec, row_map, slots, position)
            if map_ is not None:
                rows = apply_map(map_.forward, rows)
            held = target[:, read.at + low - first : read.at + high - first]
            held.copy_(torch.where(here[:, None], rows.transpose(0, 1) / gain(map_), held.float()))

    def combine(self, a: Partial, b: Partial) -> Partial:
        """Attention over the union of two key sets, float32."""
        return Partial(*combine(torch.stack([a.out.float(), b.out.float()]), torch.stack([a.lse, b.lse])))

    def finish(
        self, total: Partial | None, last: Partial, out: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None = None
    ) -> None:
        """Combine with the last part (total: None where it is the only one), add the sinks `[HQ]`, map back, store. lse: None where it is
        not asked for."""
        rows, sums = last if total is None else self.combine(total, last)
        if sinks is not None:
            rows = rows.float() * torch.sigmoid(sums - sinks.float())[..., None]
            sums = torch.logaddexp(sums, sinks.float())
        map_ = self.maps[1]
        if map_ is not None or rows.data_ptr() != out.data_ptr():
            out.copy_(rows if map_ is None else self._map(map_.inverse * gain(map_), rows))
        if lse is not None:
            lse.copy_(sums)

    def _map(self, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`matrix[h] @ rows[t, g]` for the query heads g of kv head h, in float32."""
        if matrix.shape[0] > 1:
            matrix = matrix.repeat_interleave(rows.shape[1] // self.heads, 0)
        return apply_map(matrix, rows.float())
