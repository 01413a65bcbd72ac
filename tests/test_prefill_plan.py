"""How the prefill path cuts a batch: pure host arithmetic."""

import random

import pytest

from quantkv.implementations.prefill.plan import APART, Limits, Reach, groups


def visible(reach, position):
    return range(reach.low(position), position + 1)


def drawn(seed):
    """A batch, limits and a reach, by chance."""
    r = random.Random(seed)
    planned = r.choice([1, 1, 8])
    bottom_right = planned == 1
    together = r.choice(["ragged", "alone"]) if bottom_right else r.choice(["equal", "alone"])
    reach = r.choice([Reach(), Reach(), Reach(0, r.randint(5, 60), r.randint(0, 2))] + [Reach(r.randint(1, 90))] * 2 * bottom_right)
    lengths = []
    for _ in range(r.randint(1, 6)):
        queries = r.choice([0, 1, 8, 16, r.randint(1, 70)])
        lengths += [(queries, queries + r.choice([0, 0, 8, 16, r.randint(0, 120)]))] * r.choice([1, 1, 2, 4])
    most = r.randint(1, 30) * 8
    single = max(r.randint(1, 200), planned)
    return lengths, Limits(most, single, max(r.randint(1, single), planned), planned, bottom_right, together), reach


@pytest.mark.parametrize("seed", range(120))
def test_groups(seed):
    """Each query sees every key that it may see once, and sees one in each round; nothing is longer than the limits."""
    lengths, limits, reach = drawn(seed)
    starts = [sum(n for n, _ in lengths[:s]) for s in range(len(lengths))]
    found, token = groups(lengths, limits, reach), 0
    for group in found:
        assert group.tokens.start == token
        token, queries = group.tokens.stop, group.tokens.stop - group.tokens.start
        assert queries <= (limits.single if len(group.rounds) == 1 else limits.several)
        seen = {}
        for round in group.rounds:
            assert round.room <= max(limits.most, limits.planned)
            assert [read.at for read in round.reads[1:]] == [read.at + read.room for read in round.reads[:-1]]
            ends, rows, used = round.ends()
            assert ends[-1] == queries and rows[-1] == round.room and all(n <= b - a for n, a, b in zip(used, rows, rows[1:]))
            if limits.together == "ragged" and len(round.reads) > 1:
                assert all(read.room == read.count + APART for read in round.reads[:-1])
            if limits.together == "equal":
                assert len({read.room for read in round.reads}) == len({read.queries for read in round.reads}) == 1
                assert (queries + group.front + group.back) % limits.planned == round.reads[0].room % limits.planned == 0
                assert len(round.reads) == 1 or group.front == group.back == 0
            at = group.tokens.start
            for read in round.reads:
                rows = queries + group.front + group.back if limits.planned > 1 and len(round.reads) == 1 else read.queries
                keys = read.room if round.mask.right == 0 and limits.planned > 1 else read.count
                for i in range(read.queries):
                    aligned = i + group.front + keys - rows
                    low = 0 if round.mask.left < 0 else max(aligned - round.mask.left, 0)
                    high = read.count if round.mask.right < 0 else min(aligned + round.mask.right + 1, read.count)
                    assert low < high, "a query without a key"
                    position = lengths[read.sequence][1] - lengths[read.sequence][0] + at + i - starts[read.sequence]
                    seen.setdefault((at + i, position), []).extend(range(read.first + low, read.first + high))
                at += read.queries
        for (_, position), keys in seen.items():
            assert sorted(keys) == list(visible(reach, position))
    assert token == sum(n for n, _ in lengths)


@pytest.mark.parametrize("context,queries", [(0, [320]), (64, [128, 128, 64])])
def test_groups_whose_results_are_combined_are_smaller(context, queries):
    found = groups([(64, 64 + context)] * 5, Limits(1000, 1000, 128, 8, False, "equal"))
    assert [group.tokens.stop - group.tokens.start for group in found] == queries
