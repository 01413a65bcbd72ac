"""How a batch becomes calls of a dense kernel, on the host: which queries of which sequences go together, over which slices of their keys.

A *block* is some queries of one sequence. It reads its keys in one or more slices, of which the last ends with its own keys. Blocks whose
slices want the same masks form a *group*: each of its *rounds* is one call of the kernel, over one slice of each block. What is written out
at one time is bounded by bytes, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

# Rows of zeros between the sequences of a round: a kernel's last tile of keys reads on into what follows, and multiplies it by a
# probability of zero, which is NaN where a row of the next sequence is not finite. FlashAttention-3's longest tile has 192 keys.
APART = 192


class Mask(NamedTuple):
    """Query i of M sees key j of N where `i + N - M - left <= j <= i + N - M + right`; -1: no bound."""

    left: int = -1
    right: int = -1


ALL, CAUSAL = Mask(), Mask(right=0)


class KeySlice(NamedTuple):
    """Keys first to first + count of a sequence, for some of its queries: rows `at` to at + room of the scratch, zeros after the first
    count."""

    sequence: int
    queries: int
    first: int
    count: int
    at: int
    room: int


@dataclass(frozen=True, eq=False)
class Round:
    """One call of the kernel. room: rows of the scratch."""

    reads: tuple[KeySlice, ...]
    mask: Mask
    room: int

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries, and the most keys, of a sequence."""
        return max(read.queries for read in self.reads), max(read.count for read in self.reads)

    def ends(self) -> list[list[int]]:
        """Where the queries of each sequence begin, and the last ones end; the same of the rows of keys; how many of these are keys."""
        queries = [0]
        for read in self.reads:
            queries.append(queries[-1] + read.queries)
        return [queries, [read.at for read in self.reads] + [self.room], [read.count for read in self.reads]]


@dataclass(frozen=True)
class Group:
    """Queries `tokens` of the batch, neighbours, and the rounds whose results over their keys are combined.

    front, back: rows that are computed before and behind them, for a planned shape's sake, and dropped."""

    tokens: slice
    rounds: tuple[Round, ...]
    front: int = 0
    back: int = 0


@dataclass(frozen=True)
class Limits:
    """most: rows of keys of a round. single, several: queries of a group whose result is one round's, or is combined of several.

    planned: keys and queries of a round are multiples of it; 1: any number. bottom_right: the kernel's masks let the last query see the
    last key, however many keys there are; else a causal round has as many queries as keys. together: sequences of a round: "ragged", of any
    lengths; "equal", of one length without padding; "alone"."""

    most: int
    single: int
    several: int
    planned: int = 1
    bottom_right: bool = True
    together: str = "ragged"


class Reach(NamedTuple):
    """How far back queries see: window: keys, the own included, 0: all. chunk: as far as the chunk of so many tokens that the query stands
    in, and lookback chunks before it; 0: no chunks."""

    window: int = 0
    chunk: int = 0
    lookback: int = 0

    def low(self, position: int) -> int:
        """The first key that the query at a position sees."""
        if self.chunk:
            return max(position // self.chunk - self.lookback, 0) * self.chunk
        return max(position - self.window + 1, 0) if self.window else 0


class _Block(NamedTuple):
    sequence: int
    tokens: slice
    slices: list[tuple[int, int, int]]  # first key, end, rows of the scratch
    masks: tuple[Mask, ...]
    front: int = 0
    back: int = 0


def groups(lengths: Sequence[tuple[int, int]], limits: Limits, reach: Reach = Reach()) -> list[Group]:
    """Cut a batch of sequences of (queries, keys) `lengths`. Every query sees each key that it may see in exactly one round of its group,
    and sees one in each of these."""
    found: list[_Members] = []
    for block in _blocks(lengths, limits, reach):
        if not found or not found[-1].takes(block, limits):
            found.append(_Members(0 if limits.together == "equal" else APART))
        found[-1].add(block)
    return [members.group() for members in found]


def _blocks(lengths: Sequence[tuple[int, int]], limits: Limits, reach: Reach) -> Iterator[_Block]:
    end = 0
    cut = _bottom_right if limits.bottom_right else _top_left
    for sequence, (queries, keys) in enumerate(lengths):
        start, end = end, end + queries
        while start < end:
            position = keys - (end - start)
            left = end - start if not reach.chunk else min(end - start, reach.chunk - position % reach.chunk)
            block = cut(sequence, start, position, left, limits, reach)
            start = block.tokens.stop
            yield block


def _bottom_right(sequence: int, start: int, position: int, left: int, limits: Limits, reach: Reach) -> _Block:
    """In one slice where that takes as many queries as merging would, or half a slice; else in several, of which, under a window, none has
    fewer keys than there are queries: so the last query sees a key of each."""
    low, window, most = reach.low(position), reach.window, limits.most
    several = min(left, limits.several, max(most // 2, 1) if window else most)
    alone = min(left, limits.single, most - (position - low))
    count = alone if alone >= min(several, max(most // 2, 1)) else several
    stop = position + count
    if stop - low <= most:
        cuts = [low, stop]
    elif window:
        parts = -(-(stop - low) // most)
        cuts = [low + (stop - low) * i // parts for i in range(parts + 1)]
    else:
        cuts = sorted({*range(low, stop - most, most), stop - most, stop})
    masks = tuple(Mask(window - 1 - (stop - b) if window else -1, 0 if b == stop else -1) for _, b in pairwise(cuts))
    return _Block(sequence, slice(start, start + count), [(a, b, b - a) for a, b in pairwise(cuts)], masks)


def _top_left(sequence: int, start: int, position: int, left: int, limits: Limits, reach: Reach) -> _Block:
    """The context in slices of a planned length, the queries' own keys in one of as many rows as there are queries."""
    low, planned, most = reach.low(position), limits.planned, limits.most
    if reach.window:
        raise ValueError(f"window {reach.window}: a kernel whose mask is aligned to the top left has none")
    front = (position - low) % planned  # what the context has over joins the queries' own keys, behind queries that are dropped
    most_queries = limits.several if position - low > front else limits.single
    room = max(min(most, most_queries) // planned, 1) * planned  # of queries, in planned shapes
    count = min(left, room - front)
    back = -(front + count) % planned
    own = position - front
    cuts = sorted({*range(low, own, most), own})
    slices = [(a, b, b - a) for a, b in pairwise(cuts)] + [(own, position + count, front + count + back)]
    return _Block(sequence, slice(start, start + count), slices, (ALL,) * (len(slices) - 1) + (CAUSAL,), front, back)


class _Members:
    """The blocks of a group that is still open."""

    def __init__(self, apart: int) -> None:
        self.blocks: list[_Block] = []
        self.reads: list[list[KeySlice]] = []  # of each round
        self.apart = apart

    def takes(self, block: _Block, limits: Limits) -> bool:
        """Whether the block's rounds may be those of the group."""
        first = self.blocks[0]
        if limits.together == "alone" or first.masks != block.masks:
            return False
        if limits.together == "equal" and (_shape(first) != _shape(block) or any((first.front, first.back, block.front, block.back))):
            return False
        if block.tokens.stop - first.tokens.start > (limits.single if len(block.masks) == 1 else limits.several):
            return False
        taken = [reads[-1].at + reads[-1].room + self.apart for reads in self.reads]
        return all(rows + room <= limits.most for rows, (*_, room) in zip(taken, block.slices))

    def add(self, block: _Block) -> None:
        self.reads = self.reads or [[] for _ in block.slices]
        for reads, (first, end, room) in zip(self.reads, block.slices):
            if reads:
                reads[-1] = reads[-1]._replace(room=reads[-1].room + self.apart)
            at = reads[-1].at + reads[-1].room if reads else 0
            reads.append(KeySlice(block.sequence, block.tokens.stop - block.tokens.start, first, end - first, at, room))
        self.blocks.append(block)

    def group(self) -> Group:
        """All of them."""
        first, last = self.blocks[0], self.blocks[-1]
        rounds = [Round(tuple(reads), mask, reads[-1].at + reads[-1].room) for reads, mask in zip(self.reads, first.masks)]
        return Group(slice(first.tokens.start, last.tokens.stop), tuple(rounds), first.front, last.back)


def _shape(block: _Block) -> tuple[int, list[int]]:
    """Queries, and rows of each slice."""
    return block.tokens.stop - block.tokens.start, [room for *_, room in block.slices]
