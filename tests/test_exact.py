"""Exact tokens in front of the pages: what is read exactly, to the token, whatever happens to pages; and nothing wrong is ever read."""

import pytest
import torch

from exact_engine import SIZE, Engine


def rule(length, first, latest):
    """The positions that are exact where every page had room for its shadow."""
    return {j for j in range(length) if j < -(-first // SIZE) * SIZE or j >= max(length - latest, 0) // SIZE * SIZE}


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("first", "latest"), [(16, 24), (0, 24), (32, 1), (4, 0), (20, 100)])
def test_every_length(first, latest, few):
    """From nothing, token by token."""
    engine = Engine(first=first, latest=latest, few=few, seqs=1)
    for length in range(1, 150):
        assert engine.step([1]) == [rule(length, first, latest)], length


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed, few):
    """Prompts in chunks beside sequences that decode; sequences end, begin with pages of others, or anew; the pool is small or not."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    first, latest = (16, 0, 32, 5)[seed % 4], (24, 40, 3)[seed % 3]
    engine = Engine(first=first, latest=latest, few=few, seqs=3, seed=seed, layers=2)
    for _ in range(40):
        i = integer(0, 3)
        if integer(0, 6) == 0 or len(engine.seqs[i]) > 180:
            engine.drop(i)
            source = integer(0, 3)
            if source != i and integer(0, 2):
                engine.share(source, i, integer(0, len(engine.seqs[source]) // SIZE + 1))
        counts = [integer(2, 70) if integer(0, 4) == 0 else integer(0, 2) for _ in range(3)]
        if any(counts):
            engine.step(counts)
