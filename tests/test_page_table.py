"""`PageTable`: what it refuses, that a refusal changes nothing, and, against a model that keeps every token by itself, what it does."""

import copy
import pickle
import random

import pytest
import torch

from quantkv import PagedCache, get_format
from quantkv.geometry import Kind
from quantkv.page_table import PageTable


def state(table):
    return copy.deepcopy(vars(table))


def table_of():
    """Sequences of 20, 0 and 64 tokens in pages of 16; the first two pages of the last were given back, another was freed."""
    table = PageTable(16, 4)
    table.append([20, 0, 64, 5])
    table.select([0, 1, 2])
    table.release([0, 0, 47])
    return table


@pytest.mark.parametrize(
    "method, arguments, match",
    [
        ("append", ([1, 2],), r"counts=\[1, 2\]: one for each of the 3 sequences"),
        ("append", ([1, 2, 3, 4],), r"counts=\[1, 2, 3, 4\]: one for each"),
        ("append", ([1, 2, -1],), "counts=-1: 0 or more"),
        ("append", ([1, 2.0, 1],), r"counts=2\.0: an integer"),
        ("append", (3,), "counts=3: a sequence of integers"),
        ("select", ([2, 0, 3],), r"indices=3: values lie in 0\.\.2"),
        ("select", ([0, -1],), r"indices=-1: values lie in 0\.\.2"),
        ("select", ([0, 1.5],), r"indices=1\.5: an integer"),
        ("truncate", ([20, 0],), r"lengths=\[20, 0\]: one for each"),
        ("truncate", ([19, 0, 65],), r"lengths=65: values lie in 0\.\.64"),
        ("truncate", ([19, 1, 64],), r"lengths=1: values lie in 0\.\.0"),
        ("truncate", ([19, 0, -1],), r"lengths=-1: values lie in 0\.\.64"),
        ("truncate", ([19, 0, 31],), r"lengths=\[19, 0, 31\]: the page of token 30 was given back"),
        ("release", ([20, 0],), r"positions=\[20, 0\]: one for each"),
        ("release", ([16, 0, 65],), r"positions=65: values lie in 0\.\.64"),
        ("release", ([16, 0, -1],), r"positions=-1: values lie in 0\.\.64"),
        ("release", ([16, 0, None],), "positions=None: an integer"),
        ("holds", (3, 0), r"i=3: values lie in 0\.\.2"),
        ("holds", (-1, 0), r"i=-1: values lie in 0\.\.2"),
        ("holds", (0, 21), r"position=21: values lie in 0\.\.20"),
        ("holds", (0, -1), r"position=-1: values lie in 0\.\.20"),
    ],
)
def test_a_refusal_changes_nothing(method, arguments, match):
    table = table_of()
    before = state(table)
    with pytest.raises(ValueError, match=match):
        getattr(table, method)(*arguments)
    assert vars(table) == before


def test_constructor_refuses():
    for arguments, match in (
        ((0,), "block_size=0: 1 or more"),
        ((16.0,), r"block_size=16\.0"),
        ((16, -1), "num_sequences=-1"),
        ((16, 1, -1), "num_pages=-1: 0 or more"),
        ((16, 1, 64.0), r"num_pages=64\.0: an integer"),
    ):
        with pytest.raises(ValueError, match=match):
            PageTable(*arguments)


def test_holds_is_exact_to_the_position():
    """A page is needed if one of its positions is; so after `release(p)` everything from p's page on is held, and nothing before."""
    for position in range(65):
        table = PageTable(16, 1)
        table.append([64])
        table.release([position])
        first = position // 16 * 16
        assert [table.holds(0, p) for p in range(65)] == [p >= first for p in range(65)], position
        assert table.used_pages == 4 - position // 16


def test_lengths_are_settled_within_the_pages_that_are_held():
    table = table_of()
    before = state(table)
    for lengths, match in (([33, 0, 64], r"lengths=33: values lie in 0\.\.32"), ([20, 0, 31], "the page of token 31 was given back")):
        with pytest.raises(ValueError, match=match):
            table.settle(lengths)
        assert vars(table) == before
    table.settle([32, 0, 32])
    assert table.lengths == [32, 0, 32]


def test_pages_are_made_once_and_shared_until_a_sequence_grows():
    table = PageTable(16, 2)
    table.append([20, 5])
    assert (table.num_pages, table.used_pages) == (3, 3)
    table.select([1])
    table.append([32])  # into those of the sequence that is gone
    assert (table.num_pages, table.used_pages) == (3, 3)
    table.select([0, 0])
    assert table.reserve([37, 37]) == [] and table.num_pages == 3
    shared = table.rows[0][2]
    assert table.reserve([38, 37]) == [(shared, 3)] and table.num_pages == 4
    assert (table.rows[0][2], table.rows[1][2]) == (3, shared)


def test_a_part_of_a_page_that_was_given_back_is_not_written_to():
    table = table_of()
    table.truncate([20, 0, 32])  # a whole number of pages: the next token takes a new one
    table.append([0, 0, 1])
    assert table.rows[2][:2] == [table.RELEASED] * 2 and table.rows[2][2] >= 0 and table.holds(2, 32)


@pytest.mark.parametrize(
    "method, given, match",
    [
        ("append", [100000, 0, 0], r"counts=\[100000, 0, 0\]: 6250 more pages are needed, 59 of num_pages=64 are free"),
        ("append", [13, 0, 59 * 16], r"60 more pages are needed, 59 of num_pages=64 are free"),
        ("reserve", [100000, 0, 0], r"lengths=\[100000, 0, 0\]: 6248 more pages"),
        ("reserve", [0, 60 * 16, 0], r"60 more pages"),
    ],
)
def test_more_pages_than_the_caches_have_are_refused(method, given, match):
    """Before anything changes. Sequences of 20, 0 and 40 tokens hold 2 and 3 of 64 pages."""
    table = PageTable(16, 3, num_pages=64)
    table.append([20, 0, 40])
    assert (table.num_pages, table.free_pages) == (64, 59)
    before = state(table)
    with pytest.raises(ValueError, match=match):
        getattr(table, method)(given)
    assert vars(table) == before
    table.append([12, 59 * 16, 8])  # all of them
    assert (table.num_pages, table.free_pages, table.used_pages) == (64, 0, 64)


@pytest.mark.parametrize("counts, copies", [([1, 0, 0], 1), ([1, 1, 0], 2), ([1, 1, 1], 2)])
def test_copies_count_as_pages(counts, copies):
    """Three sequences share the page that they write to next; the last of them that writes keeps it."""
    for bound in (1 + copies, copies):
        table = PageTable(16, 1, num_pages=bound)
        table.append([5])
        table.select([0, 0, 0])
        if bound == copies:
            with pytest.raises(ValueError, match=rf"{copies} more pages are needed, {copies - 1} of num_pages={bound} are free"):
                table.append(counts)
        else:
            assert len(table.append(counts)) == copies and table.free_pages == 0


@pytest.mark.parametrize("method, given, free", [("truncate", [0, 16], 3), ("select", [1, 1], 3), ("release", [32, 0], 2)])
def test_pages_that_are_given_back_can_be_had_again(method, given, free):
    table = PageTable(16, 2, num_pages=4)
    table.append([40, 16])
    getattr(table, method)(given)
    assert table.free_pages == free
    table.append([16, 16])
    assert max(page for row in table.rows for page in row) < table.num_pages == 4
    assert PageTable(16).free_pages is None


class Model:
    """The same, each token by itself: tokens are numbers, a page table's pages hold what was written there."""

    def __init__(self):
        self.sequences = [[] for _ in range(3)]
        self.given_back = [0] * 3


def test_every_sequence_keeps_its_tokens():
    """Random calls. Tokens are written into a list of pages as the table says; each sequence reads back what it was given."""
    choose = random.Random(0)
    for _ in range(60):
        table, model, pages, token = PageTable(8, 3), Model(), {}, 0
        for _ in range(40):
            count, name = len(table.rows), choose.choice(["append"] * 3 + ["select", "truncate", "release"])
            if name == "append":
                counts = [choose.choice([0, 1, 3, 9]) for _ in range(count)]
                for source, target in table.append(counts):
                    pages[target] = list(pages[source])
                for i, number in enumerate(counts):
                    for _ in range(number):
                        at = len(model.sequences[i])
                        pages.setdefault(table.rows[i][at // 8], [None] * 8)[at % 8] = token
                        model.sequences[i].append(token)
                        token += 1
            elif name == "select":
                indices = [choose.randrange(count) for _ in range(choose.randint(1, 4))]
                table.select(indices)
                model.sequences = [list(model.sequences[i]) for i in indices]
                model.given_back = [model.given_back[i] for i in indices]
            elif name == "truncate":
                lengths = [choose.randint(-(-back // 8) * 8, len(s)) for s, back in zip(model.sequences, model.given_back)]
                table.truncate(lengths)
                model.sequences = [s[:length] for s, length in zip(model.sequences, lengths)]
            else:
                positions = [choose.randint(0, len(s)) for s in model.sequences]
                table.release(positions)
                model.given_back = [max(back, p // 8 * 8) for back, p in zip(model.given_back, positions)]
            assert table.lengths == [len(s) for s in model.sequences]
            held = {page for row in table.rows for page in row if page != table.RELEASED}
            assert table.used_pages == len(held) and max(held, default=-1) < table.num_pages
            for row, sequence, back in zip(table.rows, model.sequences, model.given_back):
                assert [pages[row[at // 8]][at % 8] for at in range(back, len(sequence))] == sequence[back:]


def test_a_table_begins_without_sequences():
    assert PageTable(8).rows == [] and PageTable(8).lengths == []


def test_a_table_is_pickled_with_its_pages():
    table = table_of()
    again = pickle.loads(pickle.dumps(table))
    assert vars(again) == vars(table)
    again.append([1, 1, 1])
    assert vars(again) != vars(table)


# ---- attention needs a page if, and only if, some query sees a position in it


@pytest.mark.parametrize("kind", [Kind(), Kind(1), Kind(16), Kind(20), Kind(16, chunked=True), Kind(20, chunked=True)])
def test_the_oldest_key_that_is_needed_is_the_oldest_that_any_query_sees(kind):
    def sees(query, key):
        if kind.chunked:
            return query // kind.window == key // kind.window
        return not kind.window or query - key < kind.window

    for position in range(70):
        seen = [key for query in range(position, position + 40) for key in range(query + 1) if sees(query, key)]
        assert kind.first_seen(position) == min(seen), position


@pytest.mark.parametrize("ranges", [[[10, 63]], [[60, 60], [3, 63]]])
def test_a_page_that_only_a_prefix_range_sees_is_checked(ranges):
    """Behind the window, but the last query stands in a range with a key of page 0: a page given back there is no page."""
    cache = PagedCache(get_format("int4").cache_spec(2, 64), 8)
    rows = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(0))
    cache.write(rows, rows, torch.arange(64))
    batch = dict(seq_lens=torch.tensor([64]), window=20, prefix_ranges=torch.tensor([ranges]))
    for page in (PageTable.RELEASED, 999):
        with pytest.raises(ValueError, match="block_table"):
            cache.attend(rows[:1].repeat(1, 2, 1), block_table=torch.tensor([[page, 1, 2, 3]]), **batch)
