"""Attention of prompts on Hopper agrees with float64, whatever queries see: on a Hopper GPU, and on a CPU by way of hopper_on_cpu.py."""

import pytest
import torch

import hopper_on_cpu
from quantkv.implementations.hopper import prefill
from quantkv.implementations.hopper.host import launch
from quantkv.implementations.prefill import backends
from quantkv.implementations.prefill.flash3 import bounds
from quantkv.implementations.prefill.plan import ALL, APART, CAUSAL, KeySlice, Mask, Round

GPU = torch.cuda.is_available() and launch.elsewhere(torch.device("cuda")) is None
pytestmark = pytest.mark.skipif(not GPU and not hopper_on_cpu.AVAILABLE, reason="neither a Hopper GPU nor g++")
DEVICE = torch.device("cuda" if GPU else "cpu")
SHORT = [(50, 50), (1, 130), (3, 3)]


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    if not GPU:
        hopper_on_cpu.Device(monkeypatch, tmp_path, multiprocessors=2)


def round_of(lengths, mask):
    reads, at = [], 0
    for sequence, (queries, keys) in enumerate(lengths):
        reads.append(KeySlice(sequence, queries, 0, keys, at, keys + APART))
        at += keys + APART
    return Round(tuple(reads), mask, at)


def check(lengths, mask=CAUSAL, sizes=(64, 64), heads=(4, 2), dtype=torch.bfloat16, softcap=0.0, gain=1.0, sinks=None, make=None, out=True):
    """Every output within what rounding of weights, and then of itself, may do at most; every log-sum-exp within float32."""
    torch.manual_seed(0)
    round, (hq, hk) = round_of(lengths, mask), heads
    normal = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)
    q, k, v = normal(sum(m for m, _ in lengths), hq, sizes[0]), normal(hk, round.room, sizes[0]), normal(hk, round.room, sizes[1])
    q = (q * gain) if make is None else make(q)
    for read in round.reads:
        k[:, read.at + read.count : read.at + read.room] = 0
        v[:, read.at + read.count : read.at + read.room] = 0
    target = torch.full((*q.shape[:2], sizes[1]), torch.nan, device=DEVICE, dtype=dtype) if out else None
    scale = sizes[0] ** -0.5
    rows, lse = prefill.attend(q, k, v, scale, round.longest[0], mask, bounds(round, DEVICE), softcap, target, sinks)
    assert target is None or rows.data_ptr() == target.data_ptr()
    start, unit = 0, torch.finfo(dtype).eps / 2
    for read in round.reads:
        own, keys = slice(start, start + read.queries), slice(read.at, read.at + read.count)
        exact = [(q[own], k[:, keys], x[:, keys], scale, mask, softcap, torch.float64) for x in (v, v.abs())]
        (want, sums), (sizes_of, _) = (backends.math_attention(*arguments) for arguments in exact)
        if sinks is not None:
            kept = torch.sigmoid(sums - sinks.double())
            want, sizes_of, sums = want * kept[..., None], sizes_of * kept[..., None], torch.logaddexp(sums, sinks.double())
        assert ((rows[own].double() - want).abs() <= unit * 1.01 * (sizes_of + want.abs()) + 1e-6).all()
        assert ((lse[own].double() - sums).abs() <= 2e-5 * max(gain, 1.0) ** 2).all()
        start += read.queries
    return rows, lse


@pytest.mark.parametrize("mask", [CAUSAL, ALL, Mask(20, 0), Mask(600, 0), Mask(-1, 7), Mask(40, 30)])
def test_what_queries_see(mask):
    """Windows of either width, queries that see keys behind their own, sequences of any lengths: also of one query, and of few keys."""
    check([(50, 50), (30, 200), (1, 130), (3, 3)], mask)


@pytest.mark.parametrize("lengths, mask", [((64, 900), Mask(300, 0)), ((96, 1100), Mask(600, 0)), ((200, 200), CAUSAL)])
def test_tiles_of_which_some_is_seen(lengths, mask):
    """The first that a window reaches, of which later queries see less; and the last, of which earlier ones see nothing."""
    check([lengths], mask)


SIZES = [(80, 80), (96, 96), (112, 112), (128, 128), (160, 160), (192, 192), (192, 128), (256, 256), (64, 128), (128, 64)]


@pytest.mark.parametrize("sizes, mask", [(sizes, CAUSAL) for sizes in SIZES] + [(sizes, Mask(20, 0)) for sizes in SIZES[3::3]], ids=str)
def test_head_sizes(sizes, mask):
    check([(70, 190)], mask, sizes, heads=(1, 1))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (7, 1), (16, 2), (130, 1)])
def test_groups(heads):
    check(SHORT if heads[0] < 100 else [(3, 3), (2, 70)], heads=heads)


def test_softcap_of_one_score():
    """A query of one key has its capped score for log-sum-exp."""
    scores = torch.linspace(-400, 400, 10, dtype=torch.float64, device=DEVICE)
    round = round_of([(1, 1)] * len(scores), CAUSAL)
    q = (scores / 8).half()[:, None, None].repeat(1, 2, 64)
    k = q.new_ones(2, round.room, 64)
    _, lse = prefill.attend(q, k, k, 1 / 8, 1, CAUSAL, bounds(round, DEVICE), 50.0, None)
    want = 50 * torch.tanh(q[:, 0, 0].double() * 8 / 50)
    assert ((lse.double() - want[:, None]).abs() <= 2e-5 + 3e-6 * want.abs()[:, None]).all()


@pytest.mark.parametrize("dtype, mask", [(torch.bfloat16, CAUSAL), (torch.float16, Mask(25, 0))])
def test_softcap_and_sinks(dtype, mask):
    sinks = torch.linspace(-3, 9, 8, device=DEVICE)[::2].to(dtype)
    check(SHORT, mask, dtype=dtype, softcap=3.0, gain=4.0, sinks=sinks)
    check(SHORT, mask, dtype=dtype, softcap=50.0, sinks=sinks)
    check(SHORT, mask, dtype=dtype, sinks=sinks.float())


def test_maxima_that_grow_late():
    """Keys are read from the last to the first: weights grow up to a bound before all is rescaled, and beyond it, many times."""
    growing = lambda q: q * torch.linspace(0.1, 30, q.shape[0], device=DEVICE)[:, None, None].to(q.dtype)
    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16):
        check([(40, 700)], ALL, dtype=dtype, make=growing, gain=30.0)


@pytest.mark.parametrize("size", [64, 128])
def test_more_work_than_blocks(size):
    """Blocks take what comes next, and give memory back to be filled again: two tiles of queries, or one."""
    check([(90, 90 + 40 * i) for i in range(3)], sizes=(size, size), heads=(8, 2))


def test_strides():
    """Rows of queries and results that are parts of others, or begin where no 16 bytes do; rows of keys token by token."""
    part = lambda q: torch.cat([q, q, q], 1)[:, q.shape[1] : 2 * q.shape[1]]
    odd = lambda q: torch.nn.functional.pad(q, (0, 1))[..., :-1]
    for make in (part, odd):
        check(SHORT, make=make)
        check(SHORT, make=make, out=False)


def test_rows_of_a_token_that_lie_together():
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, device=DEVICE).bfloat16() for n, h in ((33, 4), (77, 2), (77, 2)))
    ends = bounds(Round((KeySlice(0, 33, 0, 77, 0, 77),), CAUSAL, 77), DEVICE)
    given = [prefill.attend(q, *(t.transpose(0, 1) for t in (k, v)), 0.125, 33, CAUSAL, ends, 0.0, None)]
    given.append(prefill.attend(q, *(t.transpose(0, 1).contiguous() for t in (k, v)), 0.125, 33, CAUSAL, ends, 0.0, None))
    assert all(torch.equal(a, b) for a, b in zip(*given))


def test_results_do_not_depend_on_who_works(monkeypatch):
    """Every row is worked out in one order, whichever block takes it."""
    check_once = lambda: check([(130, 200), (64, 64)], heads=(4, 1))
    rows, lse = check_once()
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 5)
    again, sums = check_once()
    assert torch.equal(rows, again) and torch.equal(lse, sums)
