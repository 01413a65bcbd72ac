"""`PageTable`: which pages each sequence of a batch holds. Plain Python, no bytes: caches do what it says."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn


class PageTable:
    """Pages and lengths of a batch of sequences. Sequences may share pages; one that is about to be written to is copied first.

    rows: for each sequence, its pages in order; `RELEASED` where one was given back (behind a sliding window).
    lengths: tokens of each sequence, which may hold pages for more.
    num_pages: pages that a cache must have so far, used or free.
    Errors: ValueError naming the argument, its value and what is allowed, before anything changes.
    """

    RELEASED = -1

    def __init__(self, block_size: int, num_sequences: int = 0) -> None:
        self.block_size, num_sequences = _integer("block_size", block_size, 1), _integer("num_sequences", num_sequences)
        self.rows: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self.num_pages = 0
        self._references: Counter[int] = Counter()
        self._free: list[int] = []

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of at least one sequence."""
        return len({p for row, n in zip(self.rows, self.lengths) for p in row[: -(-n // self.block_size)] if p != self.RELEASED})

    def append(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Lengthen sequence i by `counts[i]` tokens -> pages `(source, target)` to copy before anything is written."""
        counts = self._each("counts", counts)
        lengths = [length + count for length, count in zip(self.lengths, counts)]
        copies = self.reserve(lengths)
        self.lengths = lengths
        return copies

    def reserve(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Pages of its own for sequence i to grow to `lengths[i]` tokens; it keeps its length -> pages `(source, target)` to copy before
        anything is written."""
        copies = []
        for row, held, length in zip(self.rows, self.lengths, self._each("lengths", lengths)):
            column, within = divmod(held, self.block_size)
            if length > held and within and self._references[row[column]] > 1:
                source, row[column] = row[column], self._take()
                self._drop((source,))
                copies.append((source, row[column]))
            while len(row) * self.block_size < length:
                row.append(self._take())
        return copies

    def settle(self, lengths: Sequence[int]) -> None:
        """Sequence i holds `lengths[i]` tokens, in the pages that it has. The page of its next token must not have been given back."""
        lengths = self._each("lengths", lengths, [len(row) * self.block_size for row in self.rows])
        for row, length in zip(self.rows, lengths):
            if row[length // self.block_size :][:1] == [self.RELEASED]:
                _refuse("lengths", lengths, f"the page of token {length} was given back")
        self.lengths = lengths

    def select(self, indices: Sequence[int]) -> None:
        """Make the batch that of the sequences `indices`; one that occurs twice shares its pages. Nothing is copied yet."""
        indices = [_integer("indices", i, 0, len(self.rows) - 1) for i in _items("indices", indices)]
        lengths = [self.lengths[i] for i in indices]
        rows = [self.rows[i][: -(-n // self.block_size)] for i, n in zip(indices, lengths)]  # what was reserved is given back
        for row in rows:
            self._references.update(p for p in row if p != self.RELEASED)
        for row in self.rows:
            self._drop(row)
        self.rows, self.lengths = rows, lengths

    def truncate(self, lengths: Sequence[int]) -> None:
        """Shorten sequence i to `lengths[i]` tokens. Where they end inside a page, that page must still be held."""
        lengths = self._each("lengths", lengths, self.lengths)
        for row, length in zip(self.rows, lengths):
            if length % self.block_size and row[length // self.block_size] == self.RELEASED:
                _refuse("lengths", lengths, f"the page of token {length - 1} was given back")
        for i, length in enumerate(lengths):
            keep = -(-length // self.block_size)
            self._drop(self.rows[i][keep:])
            del self.rows[i][keep:]
            self.lengths[i] = length

    def release(self, positions: Sequence[int]) -> None:
        """Give back the pages of sequence i that lie wholly before `positions[i]`."""
        for row, position in zip(self.rows, self._each("positions", positions, self.lengths)):
            for column in range(min(position // self.block_size, len(row)) - 1, -1, -1):
                if row[column] == self.RELEASED:
                    break  # what lies further back went earlier
                self._drop((row[column],))
                row[column] = self.RELEASED

    def holds(self, i: int, position: int) -> bool:
        """Whether sequence i still has everything from `position` on."""
        i = _integer("i", i, 0, len(self.rows) - 1)
        position = _integer("position", position, 0, self.lengths[i])
        return self.RELEASED not in self.rows[i][position // self.block_size :]

    def _each(self, argument: str, values: Sequence[int], most: Sequence[int] | None = None) -> list[int]:
        """One integer for each sequence, from 0 to most[i] (None: to any)."""
        values = _items(argument, values)
        if len(values) != len(self.rows):
            _refuse(argument, values, f"one for each of the {len(self.rows)} sequences is needed")
        return [_integer(argument, value, 0, high) for value, high in zip(values, most or [None] * len(values))]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, self.num_pages = self.num_pages, self.num_pages + 1
        self._references[page] = 1
        return page

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page == self.RELEASED:
                continue
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                self._free.append(page)


def _items(argument: str, values: Iterable[int]) -> list[int]:
    try:
        return list(values)
    except TypeError:
        _refuse(argument, repr(values), "a sequence of integers is needed")


def _integer(argument: str, value: int, least: int = 0, most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or getattr(value, "ndim", 0):  # a tensor or an array of one number is a list of it
        _refuse(argument, repr(value), "an integer is needed")
    if number < least or (most is not None and number > most):
        _refuse(argument, number, f"{least} or more is needed" if most is None else f"values lie in {least}..{most}")
    return number


def _refuse(argument: str, value: object, allowed: str) -> NoReturn:
    raise ValueError(f"{argument}={value}: {allowed}")
