"""Under torch.autocast everything here computes as without it: to the bit, since it is the same operations."""

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, get_format, implementations, prepare_attend, prepare_write
from quantkv.testing import SampleBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16)


def batch(name, queries=(1, 2), keys=(20, 9), **arguments):
    return SampleBatch.make(name, queries, keys, head_size=64, dtype=torch.float32, device=DEVICE, **arguments)


def test_attend_of_every_format(format_name):
    b = batch(format_name)
    expected, expected_lse = b.attend()
    with autocast():
        out, lse = b.attend()
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("implementation", implementations.NAMES)
def test_attend_by_every_implementation(implementation):
    queries = 128 if implementation == "prefill" else 2
    b = SampleBatch.make("int4", (queries,), (140,), dtype=torch.float32 if DEVICE == "cpu" else torch.float16, device=DEVICE)
    if reason := implementations.refusal(implementation, b.call(max_query_len=queries)):
        pytest.skip(reason)
    how = {"implementation": implementation, "max_query_len": queries}
    expected, expected_lse = b.attend(**how)
    with autocast():
        out, lse = b.attend(**how)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def with_offsets():
    generator = torch.Generator().manual_seed(0)
    forward = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator))[0].contiguous()
    return LayerMaps(*(LinearMap(forward, forward.mT.contiguous(), o) for o in (torch.randn(1, 2, 64, generator=generator), None)))


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_prepared_calls_and_rows_that_are_read_back(implementation):
    """The first call, which prepares, and the next, which does not; a map of each head and a key mean."""
    b = batch("int4", (1, 1), maps=with_offsets())
    places = b.slots, b.positions

    def step():
        cache = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE, maps=b.cache.maps)
        write = prepare_write(*places, implementation=implementation)
        attend = prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens, max_query_len=1, implementation=implementation)
        write(cache, b.key, b.value)
        outs = [attend(cache, b.q), attend(cache, b.q)]
        return cache.buffer, *outs, *cache.dequantize(*places), *cache.dequantize(*places, torch.float64)

    expected = step()
    with autocast():
        found = step()
    for t, like in zip(found, expected):
        assert t.dtype == like.dtype and torch.equal(t, like)


def test_compiled_calls():
    b = batch("int4")
    expected, expected_lse = b.attend()
    torch._dynamo.reset()
    attend = torch.compile(b.attend, fullgraph=True, backend="eager")
    with autocast():
        out, lse = attend()
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_what_is_computed_around_a_call_is_still_cast():
    spec = get_format("int4").cache_spec(2, 64)
    cache = PagedCache(spec, 2, DEVICE)
    q = torch.ones(1, 2, 64, device=DEVICE)
    table, lens = (torch.full(shape, value, dtype=torch.int32, device=DEVICE) for shape, value in (((1, 1), 0), ((1,), 1)))
    with autocast():
        cache.attend(q, block_table=table, seq_lens=lens)
        assert (q[0] @ q[0].mT).dtype == torch.bfloat16
