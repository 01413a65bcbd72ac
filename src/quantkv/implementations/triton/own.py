"""Where a call's own rows stand, worked out by one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from . import launch
from .kernels.own import own_rows_kernel

SEGMENTS = 3  # beside own rows, at most
BLOCK = 64  # pages of a program
GIVEN = ("first_given", "second_given", "third_given")
PLACES = ("query_start", "seq_lens", *GIVEN)


class Places:
    """What `own_rows_kernel` fills, and its launch: table, start, ranges and slots as there. size, last: tokens of a page; the last one."""

    def __init__(self, table: torch.Tensor, start: torch.Tensor, ranges: torch.Tensor, slots: torch.Tensor, size: int, last: int) -> None:
        self.filled, self.size, self.last = (table, start, ranges, slots), size, last
        self.made: launch.Launch | None = None

    def fill(self, query_start: torch.Tensor, seq_lens: torch.Tensor, ranges: Sequence[torch.Tensor | None]) -> None:
        """Fill them by the numbers of a batch, and the ranges `[S, 2]` of a call's segments."""
        given = [launch.dense(t) for t in (query_start, seq_lens, *ranges)]
        given += [None] * (len(PLACES) - len(given))
        table, start, filled, slots = self.filled
        if not len(table):
            return
        with launch.on_device(table.device):
            if self.made is not None and self.made.again(given, table.device.index):
                return
            arguments = {
                **dict(zip(PLACES, given)),
                "table": table,
                "start": start,
                "ranges": filled,
                "slots": slots,
                "room": filled.stride(0) // 2,
                "width": table.shape[1],
                "last": self.last,
                "SIZE": self.size,
                "SEGMENTS": len(filled) - 1,
                "BLOCK": BLOCK,
            }
            grid = len(table), triton.cdiv(table.shape[1], BLOCK)
            self.made = launch.Launch(own_rows_kernel, grid, arguments, {"num_warps": 4}, PLACES)
            self.made()
