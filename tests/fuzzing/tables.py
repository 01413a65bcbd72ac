"""`PageTable` by any operations in any order, against tokens that are kept by themselves: what a sequence holds is never another's."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from hypothesis import strategies as st

from quantkv.page_table import PageTable

SHARE = 4

METHODS = ("append", "reserve", "settle", "select", "truncate", "release")


@dataclass(frozen=True)
class Case:
    """steps: a method and integers, of which each sequence takes the next; so every operation is one for each of them, legal or not.
    num_pages: the bound of the table."""

    block_size: int
    sequences: int
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    num_pages: int | None = None


@st.composite
def cases(draw) -> Case:
    numbers = st.lists(st.integers(-1, 12), min_size=1, max_size=5).map(tuple)
    steps = st.lists(st.tuples(st.sampled_from(METHODS), numbers), min_size=1, max_size=12).map(tuple)
    return Case(draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(steps), draw(st.none() | st.integers(0, 12)))


class Model:
    """Each sequence's tokens, and what lies in each slot of each page, in dictionaries."""

    def __init__(self, case: Case) -> None:
        self.size, self.table = case.block_size, PageTable(case.block_size, case.sequences, case.num_pages)
        self.tokens: list[list[int]] = [[] for _ in range(case.sequences)]
        self.released = [0] * case.sequences  # positions before it may be gone
        self.slots: dict[tuple[int, int], int] = {}
        self.next, self.num_pages = 0, case.num_pages

    def arguments(self, method: str, numbers: tuple[int, ...]) -> list[int]:
        if method == "select":
            return list(numbers)
        each = [numbers[i % len(numbers)] for i in range(len(self.tokens))]
        if method in ("reserve", "truncate", "release", "settle"):  # about the length, so that many are legal
            return [len(t) + n - (0 if method == "reserve" else 6) for t, n in zip(self.tokens, each)]
        return each

    def legal(self, method: str, given: list[int]) -> bool:
        if method == "select":
            return all(0 <= i < len(self.tokens) for i in given)
        room = [len(row) * self.size for row in self.table.rows]
        most = {"truncate": map(len, self.tokens), "release": map(len, self.tokens), "settle": room}.get(method, [1 << 60] * len(given))
        if not all(0 <= n <= m for n, m in zip(given, most)):
            return False
        if method in ("append", "reserve"):
            return self.num_pages is None or self.pages(method, given) <= self.num_pages
        gone = [r // self.size * self.size for r in self.released]
        if method == "settle":  # what follows would go to a page that was given back
            return all(n >= r for n, r in zip(given, gone))
        cut_inside = method == "truncate" and any(n % self.size and n < r for n, r in zip(given, gone))
        return not cut_inside

    def pages(self, method: str, given: list[int]) -> int:
        """Pages that are held after an append or a reserve: by a table without a bound that does the same."""
        table = copy.deepcopy(self.table)
        table._bound = None
        getattr(table, method)(given)
        return len({page for row in table.rows for page in row if page != PageTable.RELEASED})

    def write(self, i: int) -> None:
        """The next token of a sequence, where the table says."""
        at, row = len(self.tokens[i]), self.table.rows[i]
        page = row[at // self.size]
        assert page != PageTable.RELEASED
        self.slots[page, at % self.size] = self.next
        self.tokens[i].append(self.next)
        self.next += 1

    def copied(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for slot in range(self.size):
                self.slots[target, slot] = self.slots.get((source, slot), -1)

    def step(self, method: str, given: list[int]) -> None:
        before = copy.deepcopy(vars(self.table))
        if not self.legal(method, given):
            try:
                getattr(self.table, method)(given)
            except ValueError as error:
                assert any(name in str(error) for name in ("counts", "lengths", "indices", "positions")), str(error)
                assert vars(self.table) == before, "a refused call changed something"
                return
            raise AssertionError(f"{method}({given}) is not legal, and was served")
        result = getattr(self.table, method)(given)
        if method in ("append", "reserve"):
            self.copied(result)
        if method == "append":
            for i, count in enumerate(given):
                for _ in range(count):
                    self.write(i)
        elif method == "settle":  # tokens that an engine wrote itself, or takes back
            self.released = [min(r, n) for r, n in zip(self.released, given)]
            for i, length in enumerate(given):
                del self.tokens[i][length:]
                while len(self.tokens[i]) < length:
                    self.tokens[i].append(None)
        elif method == "select":
            self.tokens, self.released = [list(self.tokens[i]) for i in given], [self.released[i] for i in given]
        elif method == "truncate":
            self.tokens = [t[:n] for t, n in zip(self.tokens, given)]
            self.released = [min(r, n) for r, n in zip(self.released, given)]
        elif method == "release":
            self.released = [max(r, n) for r, n in zip(self.released, given)]

    def check(self) -> None:
        table, held = self.table, []
        for i, (tokens, row) in enumerate(zip(self.tokens, table.rows)):
            assert table.lengths[i] == len(tokens) and len(row) * self.size >= len(tokens)
            first = self.released[i] // self.size * self.size
            for at in range(first, len(tokens)):
                page = row[at // self.size]
                assert 0 <= page < table.num_pages, "a page that is needed was given back"
                if tokens[at] is not None:
                    assert self.slots.get((page, at % self.size)) == tokens[at], f"sequence {i}, token {at} is another's"
            assert table.holds(i, min(first, len(tokens)))
            held += [page for page in row[: -(-len(tokens) // self.size)] if page != PageTable.RELEASED]
        assert table.used_pages == len(set(held))


def check(case: Case) -> None:
    """The target."""
    model = Model(case)
    for method, numbers in case.steps:
        model.step(method, model.arguments(method, numbers))
        model.check()
