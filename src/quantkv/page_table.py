"""`PageTable`: which pages each sequence of a batch holds. Plain Python, no bytes: caches do what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PageTable:
    """Pages and lengths of a batch of sequences. Sequences may share pages; one that is about to be written to is copied first.

    rows: for each sequence, its pages in order; `RELEASED` where one was given back (behind a sliding window).
    lengths: tokens of each sequence.
    num_pages: pages that a cache must have so far, used or free.
    """

    RELEASED = -1

    def __init__(self, block_size: int, num_sequences: int = 0) -> None:
        self.block_size = block_size
        self.rows: list[list[int]] = [[] for _ in range(num_sequences)]
        self.lengths = [0] * num_sequences
        self.num_pages = 0
        self._references: Counter[int] = Counter()
        self._free: list[int] = []

    @property
    def used_pages(self) -> int:
        """Pages that at least one sequence holds."""
        return self.num_pages - len(self._free)

    def append(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Lengthen sequence i by `counts[i]` tokens -> pages `(source, target)` to copy before anything is written."""
        copies = []
        for i, count in enumerate(counts):
            row = self.rows[i]
            if count and self.lengths[i] % self.block_size and self._references[row[-1]] > 1:
                source, row[-1] = row[-1], self._take()
                self._drop((source,))
                copies.append((source, row[-1]))
            self.lengths[i] += count
            while len(row) * self.block_size < self.lengths[i]:
                row.append(self._take())
        return copies

    def select(self, indices: Sequence[int]) -> None:
        """Make the batch that of the sequences `indices`; one that occurs twice shares its pages. Nothing is copied yet."""
        rows = [list(self.rows[i]) for i in indices]
        lengths = [self.lengths[i] for i in indices]
        for row in rows:
            self._references.update(p for p in row if p != self.RELEASED)
        for row in self.rows:
            self._drop(row)
        self.rows, self.lengths = rows, lengths

    def truncate(self, lengths: Sequence[int]) -> None:
        """Shorten sequence i to `lengths[i]` tokens."""
        for i, length in enumerate(lengths):
            keep = -(-length // self.block_size)
            self._drop(self.rows[i][keep:])
            del self.rows[i][keep:]
            self.lengths[i] = length

    def release(self, positions: Sequence[int]) -> None:
        """Give back the pages of sequence i that lie wholly before `positions[i]`."""
        for row, position in zip(self.rows, positions):
            for column in range(min(position // self.block_size, len(row)) - 1, -1, -1):
                if row[column] == self.RELEASED:
                    break  # what lies further back went earlier
                self._drop((row[column],))
                row[column] = self.RELEASED

    def holds(self, i: int, position: int) -> bool:
        """Whether sequence i still has everything from `position` on."""
        return self.RELEASED not in self.rows[i][position // self.block_size :]

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
