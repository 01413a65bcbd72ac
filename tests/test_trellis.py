"""The 2-bit trellis: its search, its bytes, what it gains."""

import itertools

import pytest
import torch

from quantkv import get_format
from quantkv.formats.trellis import pairs
from quantkv.formats.trellis.search import search
from quantkv.rounding import Rounding
from quantkv.testing import SampleBatch, check
from test_rounding import calibrated, cost, hessian_of

CODEC, LEVELS = get_format("trellis2").k, get_format("levels2").k


def spelled(row: torch.Tensor) -> list[float]:
    """The numbers of a row of bytes, in units of its scale, spelled out from the bytes' definition."""
    codes = [byte >> shift & 15 for byte in row.tolist() for shift in (0, 4)]
    out = []
    for i, code in enumerate(codes):
        before = 0 if i % 32 == 0 else codes[i - 1]
        out += pairs()[before, code].tolist()
    return out


@pytest.mark.parametrize("size", [16, 64, 96, 256])
def test_bytes_mean_what_the_docs_say(size):
    codes = torch.randint(256, (3, 2, size // 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    scale = torch.full((3, 2, 1), 2.0).half()
    rows = CODEC.dequantize(codes, scale)
    assert rows.shape == (3, 2, size) and rows[2, 1].tolist() == [2 * x for x in spelled(codes[2, 1])]


@pytest.mark.parametrize("hessian", [False, True], ids=["plain", "Hessian"])
def test_the_search_finds_what_costs_least(hessian):
    """Every sequence of three codes tried. In a Hessian only ways that end in different codes stay open: the least is not always found."""
    rows = torch.randn(40, 1, 6, generator=torch.Generator().manual_seed(1)) * 1.3
    m = hessian_of(1, 6, 2) if hessian else torch.eye(6)[None]
    rounding = Rounding.of(m) if hessian else None
    _, rounded = search(rows, pairs(), rounding)
    every = torch.tensor(list(itertools.product(range(16), repeat=3)))
    before = torch.nn.functional.pad(every[:, :-1], (1, 0))
    values = pairs()[before, every].flatten(1)[:, None]
    m = rounding.hessian if hessian else m
    least = torch.stack([cost(row - values, m).min() for row in rows])
    found = cost(rows - rounded, m)[:, 0]
    assert (found >= least - 1e-5).all()
    if hessian:
        assert (found <= least * 1.001 + 1e-6).float().mean() > 0.6 and found.mean() < 1.5 * least.mean()
    else:
        torch.testing.assert_close(found, least)


def test_codes_are_those_of_the_rounded_row():
    rows = torch.randn(20, 3, 128, generator=torch.Generator().manual_seed(3))
    for rounding in (None, Rounding.of(hessian_of(3, 128))):
        codes, rounded = search(rows, pairs(), rounding)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        assert torch.equal(CODEC.dequantize(packed, torch.ones(20, 3, 1).half()), rounded)


def test_rows_are_searched_in_units_of_their_root_mean_square():
    """In a Hessian of 1.1 times that: what other numbers feed back comes on top."""
    rows, rounding = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(6)), Rounding.of(hessian_of(2, 64))
    size = rows.square().mean(-1, keepdim=True).sqrt()
    for (packed, _), wide, given in ((CODEC.encode(rows), 1.0, None), (CODEC.encode_in(rows, rounding), 1.1, rounding)):
        codes, _ = search(rows / (size * wide), pairs(), given)
        assert torch.equal(packed, (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8))


def test_it_beats_levels_at_the_same_bytes():
    rows, rounding = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(4)), Rounding.of(hessian_of(2, 64))
    plain = [(codec.dequantize(*codec.encode(rows)) - rows).square().mean() for codec in (CODEC, LEVELS)]
    hessian = [cost(codec.dequantize(*codec.encode_in(rows, rounding)) - rows, rounding.hessian).mean() for codec in (CODEC, LEVELS)]
    assert plain[0] < 0.70 * plain[1] and hessian[0] < 0.75 * hessian[1]


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_are_searched_one_by_one(heads):
    rows, rounding = torch.randn(21, heads, 128, generator=torch.Generator().manual_seed(5)), Rounding.of(hessian_of(heads, 128))
    codes, scale = CODEC.encode_in(rows, rounding)
    for part in (slice(0, 1), slice(1, 21)):
        some = CODEC.encode_in(rows[part], rounding)
        assert torch.equal(some[0], codes[part]) and torch.equal(some[1], scale[part])


@pytest.mark.parametrize("maps", [None, calibrated()], ids=["plain", "calibrated"])
def test_attention_is_that_over_the_dequantized_cache(maps):
    b = SampleBatch.make("trellis2", (1, 7), (150, 70), maps=maps)
    check(b, b.attend())
