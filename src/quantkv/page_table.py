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
    num_pages: pages that the caches have, and more are refused; None: the caches grow, to `num_pages` pages so far, used or free.
    Errors: ValueError naming the argument, its value and what is allowed, before anything changes.
    """

    RELEASED = -1

    def __init__(self, block_size: int, num_sequences: int = 0, num_pages: int | None = None) -> None:
        self.block_size, num_sequences = _integer("block_size", block_size, 1), _integer("num_sequences", num_sequences)
        self._bound = None if num_pages is None else _integer("num_pages", num_pages)
        self.rows: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self._taken = 0  # pages that were ever taken: 0.._taken - 1
        self._references: Counter[int] = Counter()
        self._free: list[int] = []

    @property
    def num_pages(self) -> int:
        """Pages that a cache must have: the bound, or without one as many as were ever taken."""
        return self._taken if self._bound is None else self._bound

    @property
    def free_pages(self) -> int | None:
        """Pages that are still to be had; None without a bound."""
        return None if self._bound is None else self._bound - self._taken + len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages that hold tokens of at least one sequence."""
        return len({p for row, n in zip(self.rows, self.lengths) for p in row[: -(-n // self.block_size)] if p != self.RELEASED})

    def append(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Lengthen sequence i by `counts[i]` tokens -> pages `(source, target)` to copy before anything is written."""
        counts = self._each("counts", counts)
        lengths = [length + count for length, count in zip(self.lengths, counts)]
        copies = self._grow("counts", counts, lengths)
        self.lengths = lengths
        return copies

    def reserve(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Pages of its own for sequence i to grow to `lengths[i]` tokens; it keeps its length -> pages `(source, target)` to copy before
        anything is written."""
        lengths = self._each("lengths", lengths)
        return self._grow("lengths", lengths, lengths)

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

    def _grow(self, argument: str, given: list[int], lengths: list[int]) -> list[tuple[int, int]]:
        """`reserve`, called with `argument=given`."""
        needed = self._needed(lengths)
        if self._bound is not None and needed > self.free_pages:
            _refuse(argument, given, f"{needed} more pages are needed, {self.free_pages} of num_pages={self._bound} are free")
        copies = []
        for row, held, length in zip(self.rows, self.lengths, lengths):
            column = self._shared(row, held, length)
            if column is not None:
                source, row[column] = row[column], self._take()
                self._drop((source,))
                copies.append((source, row[column]))
            row += [self._take() for _ in range(-(-length // self.block_size) - len(row))]
        return copies

    def _needed(self, lengths: list[int]) -> int:
        """Pages that `_grow` takes: those behind the rows, and copies; the last of the sequences that share a page keeps it."""
        grows = list(zip(self.rows, self.lengths, lengths))
        written = Counter(row[column] for row, *now in grows if (column := self._shared(row, *now)) is not None)
        copies = sum(min(count, self._references[page] - 1) for page, count in written.items())
        return copies + sum(max(-(-length // self.block_size) - len(row), 0) for row, _, length in grows)

    def _shared(self, row: list[int], held: int, length: int) -> int | None:
        """Where in its row a sequence that grows has begun a page that others hold, too; None: nowhere."""
        column, within = divmod(held, self.block_size)
        return column if length > held and within and self._references[row[column]] > 1 else None

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, self._taken = self._taken, self._taken + 1
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
