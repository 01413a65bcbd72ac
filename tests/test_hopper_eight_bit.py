"""Prompts with 8-bit scores on Hopper: rounding by Triton, and the kernel beside the specification in float64, as test_hopper_prompt.py."""

import pytest
import torch

import hopper_on_cpu
from quantkv.implementations.hopper import prefill
from quantkv.implementations.prefill import attend, backends
from quantkv.implementations.prefill import eight_bit as rounding
from quantkv.implementations.prefill.flash3 import bounds
from quantkv.implementations.prefill.plan import ALL, CAUSAL, Mask
from quantkv.implementations.reference import eight_bit
from quantkv.testing import SampleBatch, relative_error
from test_hopper_prompt import DEVICE, GPU, SHORT, round_of

pytestmark = pytest.mark.skipif(not GPU and not hopper_on_cpu.AVAILABLE, reason="neither a Hopper GPU nor g++")


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    if not GPU:
        hopper_on_cpu.Device(monkeypatch, tmp_path, multiprocessors=2)


def rows(round, sizes, heads, dtype, gain=1.0, shift=1.0):
    torch.manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.float32)
    tokens, (hq, hk) = sum(read.queries for read in round.reads), heads
    q, k, v = normal(tokens, hq, sizes[0]) * gain, normal(hk, round.room, sizes[0]), normal(hk, round.room, sizes[1])
    k += shift * normal(hk, 1, sizes[0])
    for read in round.reads:  # kernels may read on, and must not count it
        k[:, read.at + read.count : read.at + read.room] = 1e4
        v[:, read.at + read.count : read.at + read.room] = 0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def attention(given, v, read, start, scale, mask, softcap, block):
    """One sequence in float64 by the integers that the kernel gets: rows, the same of their magnitudes, log-sum-exps."""
    own, keys, group = slice(start, start + read.queries), slice(read.at, read.at + read.count), given.queries.shape[1] // len(v)
    q, scales, added = (t[own].double().transpose(0, 1) for t in (given.queries, given.query_scales, given.query_means))
    k, v = (t[:, keys].double().repeat_interleave(group, 0) for t in (given.keys, v))
    steps = given.key_scales[:, keys][:, ::block].double().repeat_interleave(block, 1)[:, : read.count].repeat_interleave(group, 0)
    score = scale * ((q @ k.mT) * scales[..., None] * steps[:, None] + added[..., None])
    score = softcap * torch.tanh(score / softcap) if softcap else score
    ahead = torch.arange(read.count, device=DEVICE) - torch.arange(read.count - read.queries, read.count, device=DEVICE)[:, None]
    for bound, beyond in ((mask.left, -ahead), (mask.right, ahead)):
        score = score.masked_fill(beyond > bound, -torch.inf) if bound >= 0 else score
    weight = score.softmax(-1)
    return *((weight @ x).transpose(0, 1) for x in (v, v.abs())), score.logsumexp(-1).T


def check(lengths, mask=CAUSAL, sizes=(64, 64), heads=(4, 2), dtype=torch.bfloat16, softcap=0.0, gain=1.0, sinks=None):
    """Every output within what rounding of weights, and then of itself, may do at most; every log-sum-exp within float32, where a sum lies
    at 1.5 * 2^23 integers."""
    round = round_of(lengths, mask)
    q, k, v = rows(round, sizes, heads, dtype, gain)
    ends, block = bounds(round, DEVICE), prefill.config_of(q, k, v, mask, softcap, True).keys
    given = rounding.rounded(q, k, round, ends, block)
    scale, unit, start = sizes[0] ** -0.5, torch.finfo(dtype).eps / 2, 0
    out, lse = prefill.attend(q, k, v, scale, round.longest[0], mask, ends, softcap, None, sinks, given)
    # A score is an integer times a scale, added to a number of 1.5 * 2^23 times that scale, of which float32 has 24 bits.
    fine = 2.0**-24 * 1.5 * 2**23 * float((given.query_scales.max() * given.key_scales[:, 0].max() * scale).cpu()) + 2e-5
    for read in round.reads:
        own = slice(start, start + read.queries)
        want, sizes_of, sums = attention(given, v, read, start, scale, mask, softcap, block)
        if sinks is not None:
            kept = torch.sigmoid(sums - sinks.double())
            want, sizes_of, sums = want * kept[..., None], sizes_of * kept[..., None], torch.logaddexp(sums, sinks.double())
        assert ((out[own].double() - want).abs() <= (unit * 1.01 + 2 * fine) * (sizes_of + want.abs()) + 1e-6).all()
        assert ((lse[own].double() - sums).abs() <= 2 * fine).all()
        start += read.queries


@pytest.mark.parametrize("mask", [CAUSAL, ALL, Mask(20, 0), Mask(600, 0), Mask(40, 30)])
def test_what_queries_see(mask):
    """Windows too, whose tiles begin where keys were rounded together."""
    check([(50, 50), (30, 200), (1, 130), (3, 3), (40, 900)], mask)


@pytest.mark.parametrize("sizes", [(80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128)], ids=str)
def test_head_sizes(sizes):
    check([(70, 290)], CAUSAL, sizes, heads=(1, 1))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (16, 2)])
def test_groups(heads):
    check(SHORT, heads=heads)


def test_softcap_and_sinks():
    """Which read scores with the mean's part in them."""
    sinks = torch.linspace(-3, 9, 4, device=DEVICE)
    for dtype, mask in ((torch.bfloat16, CAUSAL), (torch.float16, Mask(25, 0))):
        check(SHORT, mask, dtype=dtype, sinks=sinks)
        check(SHORT, mask, dtype=dtype, sinks=sinks, softcap=3.0, gain=4.0)


def test_scores_far_from_zero():
    """Maxima that grow by more than a weight may, and single ones that are all of a row's weight."""
    check([(40, 700)], ALL, gain=30.0)


def test_the_error_beside_16_bits():
    round = round_of([(64, 1000)], CAUSAL)
    q, k, v = rows(round, (128, 128), (2, 1), torch.bfloat16, shift=4.0)
    out, lse = backends.attend("hopper", q, k, v, 128**-0.5, round, eight_bit=True)
    want, sums = backends.math_attention(q, k[:, :1000], v[:, :1000], 128**-0.5, CAUSAL, dtype=torch.float64)
    assert 0.003 < relative_error(out, want) < 0.02
    assert (lse.double() - sums).abs().max() < 0.05


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("scratch_rows", [1 << 16, 150])
def test_calls_over_pages(scratch_rows, own):
    """A whole prompt and a chunk on a cache, whose results over slices of keys are combined; and once more by launches that were kept.
    own: its own rows are read as given."""
    b = SampleBatch.make("int8", (130, 128), (130, 300), num_kv_heads=2, group=2, dtype=torch.bfloat16, device=DEVICE)
    key, value = (torch.randn(b.key.shape, generator=torch.Generator().manual_seed(n)).bfloat16().to(DEVICE) for n in (1, 2))
    b.cache.write(key, value, b.slots, b.positions, implementation="reference")
    rows = {"own": tuple(torch.cat([t[:130], t[302:]]) + 0.5 for t in (key, value))} if own else {}
    call = b.call(prompt_precision="8bit", lengths=((130, 130), (128, 300)), **rows)
    plan = attend.plan(call, backend="hopper", scratch_bytes=scratch_rows * 2 * 2 * 64 * 2)
    assert (max(len(group.rounds) for group in plan.groups) > 1) == (scratch_rows < 300)
    want, sums = b.oracle(**rows)
    for _ in range(2):
        call.out.fill_(torch.nan)
        attend.follow(call, plan, triton=GPU)
        assert 0.003 < relative_error(call.out, want) < 0.02
        assert (call.lse.double().cpu() - sums).abs().max() < 0.1


@pytest.mark.parametrize("size, block", [(64, 96), (80, 160), (128, 80)])
def test_rounding_is_what_is_specified(size, block):
    """Rows of several sequences, also parts of others."""
    lengths = [(70, 1300), (3, 3), (40, 200)]
    round = round_of(lengths, CAUSAL)
    q, k, _ = rows(round, (size, size), (4, 2), torch.bfloat16)
    q[5], k[:, 2] = 0, 0
    wide = torch.cat([q, q], 1)[:, 4:]
    found = rounding.rounded(wide, k.transpose(0, 1).contiguous().transpose(0, 1), round, bounds(round, DEVICE), block)
    start = 0
    for read in round.reads:
        own, keys = slice(start, start + read.queries), slice(read.at, read.at + read.count)
        mean = eight_bit.sample_mean(k[:, keys].float())
        want_k = eight_bit.quantize(k[:, keys].float() - mean[:, None], block)
        want_q = eight_bit.quantize(q[own].float())
        assert torch.equal(found.queries[own].float(), want_q.codes)
        # On a GPU torch divides by a number through its inverse.
        torch.testing.assert_close(found.query_scales[own], want_q.scales, rtol=1e-6, atol=0)
        # A mean is added up in another order: what lies between two integers may fall to either side.
        off = (found.keys[:, keys].float() - want_k.codes).abs()
        assert off.max() <= 1 and (off > 0).sum() <= 2 + 1e-4 * off.numel()
        torch.testing.assert_close(found.key_scales[:, keys][:, ::block], want_k.scales[:, ::block], rtol=1e-5, atol=0)
        added = torch.einsum("thd,hd->th", q[own].float(), mean.repeat_interleave(2, 0))
        torch.testing.assert_close(found.query_means[own], added, rtol=1e-4, atol=1e-4)
        start += read.queries


def test_rows_that_are_not_finite():
    """A query stays with itself; a key makes its kv head NaN, and no other sequence."""
    round = round_of([(20, 200), (9, 90)], CAUSAL)
    for bad in (torch.nan, torch.inf):
        q, k, v = rows(round, (64, 64), (4, 2), torch.bfloat16)
        clean, _ = backends.attend("hopper", q, k, v, 0.125, round, eight_bit=True)
        q[3, 1, 5] = bad
        out, _ = backends.attend("hopper", q, k, v, 0.125, round, eight_bit=True)
        broken = ~out.isfinite().all(-1)
        assert broken[3, 1] and broken.sum() == 1 and torch.equal(out[~broken], clean[~broken])
        k[1, 7, 0] = bad
        out, _ = backends.attend("hopper", q, k, v, 0.125, round, eight_bit=True)
        assert out[:20, 2:].isnan().all() and torch.equal(out[20:], clean[20:])
