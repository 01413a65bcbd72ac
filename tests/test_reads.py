"""Which pages a call needs: exactly those that hold a key that some query sees, so that an engine may give the others back."""

import pytest
import torch

from quantkv import AttentionOptions, PagedCache, get_format
from quantkv.reads import key_intervals
from quantkv.testing import SampleBatch, check


def seen(options, queries, length, key_range):
    """Key positions that some query sees, by the definition of every mask."""
    found = set()
    for i in range(length - queries, length):
        for j in range(length):
            size = options.window // (options.chunk_lookback + 1) if options.chunk_lookback >= 0 else 0
            back = i // size - j // size <= options.chunk_lookback if size else not options.window or i - j < options.window
            ahead = not options.window or size or j - i < options.window
            plain = back and (j <= i if options.causal else ahead)
            ranges = () if options.prefix_ranges is None else options.prefix_ranges[0].tolist()
            both = any(a < b and a <= i <= b and a <= j <= b for a, b in ranges)
            if (plain or (both and (i - j < options.window or not options.clamp_prefix_to_window or not options.window))) and key_range[
                0
            ] <= j < key_range[1]:
                found.add(j)
    return found


@pytest.mark.parametrize("seed", range(300))
def test_intervals_hold_what_is_seen_and_their_ends_are_seen(seed):
    draw = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=generator))
    generator = torch.Generator().manual_seed(seed)
    length = draw(1, 60)
    queries, window, kind = draw(1, length), draw(1, 30), draw(0, 3)
    ranges = torch.tensor([[[draw(0, 59), draw(0, 59)] for _ in range(2)]]) if draw(0, 1) else None
    options = AttentionOptions(
        causal=kind != 1,
        window=0 if kind == 0 else window,
        chunk_lookback=draw(0, 1) if kind == 3 and window > 1 else -1,
        prefix_ranges=ranges,
        clamp_prefix_to_window=bool(draw(0, 1)),
    )
    cut = (draw(0, 20), draw(20, 70)) if draw(0, 1) else (0, length)
    (intervals,) = key_intervals(options, [queries], [length], torch.tensor([cut]))
    needed, given = seen(options, queries, length, cut), {j for low, high in intervals for j in range(low, high)}
    assert needed <= given
    if ranges is None:
        assert given == needed


def test_a_window_that_ends_at_a_page_given_back():
    """One query at position 47 with a window of 16 sees keys 32 to 47: the pages before are not looked at."""
    b = SampleBatch.make("int8", (1,), (48,))
    expected = b.attend(window=16)[0]
    b.block_table[0, :2] = -1
    assert torch.equal(b.attend(window=16)[0], expected)
    with pytest.raises(ValueError, match=r"block_table=-1\.\."):
        b.attend(window=17)


def test_a_segment_without_keys_of_its_only_sequence():
    b = SampleBatch.make("int8", (2,), (20,))
    out, lse = b.attend(key_start=torch.tensor([20]))
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_a_segment_with_a_table_for_its_range_alone():
    b = SampleBatch.make("int8", (1,), (40,))
    ranges = torch.tensor([[0, 16]])
    expected = b.attend(key_range=ranges)
    narrow = {"seq_lens": b.seq_lens, "cu_seqlens_q": b.cu_seqlens_q, "key_range": ranges, "return_lse": True}
    out, lse = b.cache.attend(b.q, block_table=b.block_table[:, :1], **narrow)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    check(b, (out, lse), key_range=ranges)


def test_maps_of_another_size_are_refused_where_the_cache_is_made():
    from quantkv import LayerMaps, LinearMap

    eye = torch.eye(32)[None]
    with pytest.raises(ValueError, match=r"maps\.k\.forward\.shape=\(1, 32, 32\): the cache has 2 kv heads of 64"):
        PagedCache(get_format("int8").cache_spec(2, 64), 2, maps=LayerMaps(LinearMap(eye, eye)))


@pytest.mark.parametrize("name,value", [("softcap", float("nan")), ("scale", float("inf")), ("window", 2.5), ("max_query_len", 0)])
def test_numbers_that_are_none(name, value):
    b = SampleBatch.make("int8", (1,), (20,))
    with pytest.raises(ValueError, match=f"{name}="):
        b.cache.attend(b.q, block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, **{name: value})
