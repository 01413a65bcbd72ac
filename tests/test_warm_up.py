"""Warming up compiles and names who serves what, and leaves the cache as it was."""

import torch

from quantkv import PagedCache, get_format, warm_up

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_warm_up():
    cache = PagedCache(get_format("int4").cache_spec(2, 64), 4, DEVICE)
    cache.buffer.random_(0, 255)
    before, seen = cache.buffer.clone(), []
    served = warm_up(cache, 4, query_lens=(1, 5), batch_sizes=(1, 3), write_sizes=(2,), max_seq_len=64, progress=lambda *x: seen.append(x))
    assert torch.equal(cache.buffer, before)
    assert list(served) == ["write of 2 tokens", *(f"attend of {s} x {n} queries" for n in (1, 5) for s in (1, 3))]
    assert DEVICE != "cpu" or set(served.values()) <= {"cpu", "reference"}
    assert seen[-1][:2] == (5, 5) and seen[0][2].startswith("write of 2 tokens: ")
