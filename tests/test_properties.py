"""Properties over random shapes, strides, dtypes and formats."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkv import PagedCache, available_formats, get_format

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = st.tuples(st.sampled_from(available_formats()), st.sampled_from(available_formats())).map("/".join)


@st.composite
def batches(draw):
    """A cache of any format and geometry with some sequences in it, and queries for the end of each."""
    fmt = get_format(draw(PAIRS))
    sizes = [64, 128] if fmt.k.power_of_two else [48, 64, 80, 96]
    sizes_v = [64, 128] if fmt.v.power_of_two else [48, 64, 80, 96]
    spec = fmt.cache_spec(
        draw(st.integers(1, 3)), draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes_v)), draw(st.sampled_from([8, 16, 32]))
    )
    lens = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    queries = [draw(st.integers(0, min(n, 4))) for n in lens]
    return (spec, lens, queries, draw(st.integers(1, 4)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**16)), draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(batches())
def test_attend_is_softmax_over_the_dequantized_rows(batch):
    spec, lens, queries, group, dtype, seed, strided = batch
    g = torch.Generator().manual_seed(seed)
    pages = [spec.num_blocks(n) for n in lens]
    cache = PagedCache(spec, sum(pages) + 1)
    cache.buffer.fill_(0xFF)
    order = torch.randperm(cache.num_blocks, generator=g)
    table = torch.stack([torch.nn.functional.pad(p, (0, max(pages) - len(p))) for p in order[: sum(pages)].split(pages)])
    slots = torch.cat(
        [table[s, torch.arange(n) // spec.block_size] * spec.block_size + torch.arange(n) % spec.block_size for s, n in enumerate(lens)]
    )

    def tensor(n, heads, d):
        if strided:
            return torch.randn(heads, n, d + 5, generator=g).to(dtype).transpose(0, 1)[..., 2 : 2 + d]
        return torch.randn(n, heads, d, generator=g).to(dtype)

    key, value = tensor(len(slots), spec.num_kv_heads, spec.head_size), tensor(len(slots), spec.num_kv_heads, spec.head_size_v)
    cache.write(key, value, slots)
    q = tensor(sum(queries), spec.num_kv_heads * group, spec.head_size)
    cu = torch.tensor([0, *queries]).cumsum(0)
    out = cache.attend(q, block_table=table, seq_lens=torch.tensor(lens), cu_seqlens_q=cu)
    assert out.dtype == dtype and out.isfinite().all()

    k, v = cache.dequantize(slots, dtype=torch.float64)
    start = 0
    for s, n in enumerate(lens):
        mask = torch.arange(n) <= torch.arange(n - queries[s], n)[:, None]
        mine = slice(int(cu[s]), int(cu[s + 1]))
        want = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1).double() for t in (q[mine], k[start : start + n], v[start : start + n])), attn_mask=mask, enable_gqa=True
        )
        rounding = torch.finfo(dtype).eps / 2 + 1e-5  # of the output to q's dtype, and of float32 inside
        assert (out[mine].double() - want.transpose(0, 1)).norm() <= rounding * want.norm() + 1e-30
        start += n


@settings(max_examples=30, deadline=None)
@given(PAIRS, st.integers(0, 2**16))
def test_a_single_token_returns_its_decoded_value(pair, seed):
    fmt = get_format(pair)
    cache = PagedCache(fmt.cache_spec(1, 64), 1)
    g = torch.Generator().manual_seed(seed)
    cache.write(torch.randn(1, 1, 64, generator=g), torch.randn(1, 1, 64, generator=g), torch.tensor([0]))
    out = cache.attend(torch.randn(1, 4, 64, generator=g), block_table=torch.tensor([[0]]), seq_lens=torch.tensor([1]))
    _, value = cache.dequantize(torch.tensor([0]))
    assert torch.allclose(out, value.expand(1, 4, 64), atol=1e-5 * float(value.abs().max()))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(available_formats()), st.integers(-3, 40))
@example("int4", 23)  # the last slot
@example("int4", 24)  # one beyond it
def test_a_slot_is_stored_skipped_or_refused(name, slot):
    cache = PagedCache(get_format(name).cache_spec(1, 64, block_size=8), 3)
    row = torch.ones(1, 1, 64)
    if slot >= 24:
        with pytest.raises(ValueError, match=f"slot_mapping={slot}: slots end at 23"):
            cache.write(row, row, torch.tensor([slot]))
    else:
        cache.write(row, row, torch.tensor([slot]))
    changed = [t.view(torch.uint8).any(-1).flatten().nonzero().flatten().tolist() for t in (cache.k.codes, cache.v.codes)]
    assert all(slots in ([slot], []) if 0 <= slot < 24 else slots == [] for slots in changed)
    assert cache.buffer.any() == (0 <= slot < 24)
