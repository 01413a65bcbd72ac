"""Rounds of a call with own rows: these need no pages, and are read where they lie or copied into the scratch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...calls import OwnRows, PagedTensor
from ...format import get_format
from ...maps import LayerMaps
from .plan import Group, KeySlice, Round
from .steps import TorchSteps

CHUNK_BYTES = 16  # addresses and strides of rows that a kernel reads where they lie are multiples of it


class Sources(NamedTuple):
    """Where the rows of a round come from.

    stored: keys of its sequences that are read from pages. own: rows of the call; `Read.first` counts these. None: there are none."""

    stored: Round | None
    own: Round | None


def contexts(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """Keys of each sequence that are read from pages."""
    return [keys - queries if queries > 1 else keys for queries, keys in lengths]


def is_fresh(lengths: Sequence[tuple[int, int]]) -> bool:
    """Whether no sequence that has queries reads a page."""
    return not any(context for context, (queries, _) in zip(contexts(lengths), lengths) if queries)


def split(groups: Sequence[Group], lengths: Sequence[tuple[int, int]]) -> dict[Round, Sources]:
    """The sources of each round. A round of one sequence has room for all of its rows in both."""
    starts, stored = [0, *accumulate(queries for queries, _ in lengths)], contexts(lengths)
    found = {}
    for round in (round for group in groups for round in group.rounds):
        before, own, alone = [], [], len(round.reads) == 1
        for read in round.reads:
            count = min(max(stored[read.sequence] - read.first, 0), read.count)
            left = read.count - count
            if count or not left:
                before.append(read._replace(count=count, room=read.room if alone or not left else count))
            if left:
                token = starts[read.sequence] + read.first + count - stored[read.sequence]
                own.append(KeySlice(0, read.queries, token, left, read.at + count, read.room - count))
        found[round] = Sources(*(Round(tuple(reads), round.mask, round.room) if reads else None for reads in (before, own)))
    return found


def in_place(steps: TorchSteps, rows: OwnRows, sources: Sources, dtype: torch.dtype) -> list[torch.Tensor] | None:
    """`[HK, N, D]` and `[HK, N, D_V]` of a round that reads one sequence's own rows alone, as they lie; None where a kernel wants them
    elsewhere."""
    if sources.stored is not None or steps.maps != (None, None) or len(sources.own.reads) > 1:
        return None
    (read,) = sources.own.reads
    if read.count != sources.own.room:
        return None
    found = [t[read.first : read.first + read.count].transpose(0, 1) for t in rows]
    for t in found:
        places = (t.data_ptr(), *(n * t.element_size() for n in t.stride()[:2]))
        if t.dtype != dtype or t.stride(2) != 1 or any(n % CHUNK_BYTES for n in places):
            return None
    return found


def lay(steps: TorchSteps, rows: OwnRows, sources: Sources, scratch: list[torch.Tensor], blocks: torch.Tensor | None) -> None:
    """Copy a round's own rows to their places in the scratch, mapped where those of pages are. Behind the rows of a sequence there are
    zeros then. blocks: as of `TorchSteps.gather`."""
    reads = sources.own.reads
    if len(reads) == 1 or steps.maps != (None, None):
        for _, _, first, count, at, room in reads:
            for side, (t, target) in enumerate(zip(rows, scratch)):
                steps.map_rows(side, t[first : first + count], target[:, at : at + count].transpose(0, 1))
                if room > count:
                    target[:, at + count : at + room].zero_()
        return
    sides = tuple(PagedTensor(t.contiguous()[:, None]) for t in rows)  # kernels are compiled for strides
    table = torch.arange(len(rows.key), dtype=torch.int32, device=rows.key.device).as_strided((1, len(rows.key)), (0, 1))
    plain = type(steps)(sides, get_format("none", rows.key.dtype), LayerMaps(), steps.heads, launches=steps.launches)
    plain.gather(table, sources.own, scratch, blocks)
