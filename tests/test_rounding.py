"""Rounding by a Hessian, and the levels of a Gaussian."""

import math

import pytest
import torch

from quantkv import PagedCache, get_format
from quantkv.formats.levels import CUBICS, levels
from quantkv.maps import LayerMaps, LinearMap, default_map
from quantkv.rounding import Rounding, round_to_levels
from quantkv.testing import SampleBatch, check

BITS = sorted(CUBICS)
LLOYD_MAX = {2: 0.117482, 3: 0.034548, 4: 0.009501, 5: 0.002505, 6: 0.000644}  # mean squared error of N(0, 1), e.g. Max 1960


def hessian_of(heads: int, size: int, seed: int = 0) -> torch.Tensor:
    """Moments of rows of which few directions are large."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(heads, size, size, generator=generator))[0]
    factor = torch.randn(heads, 2 * size, size, generator=generator) * torch.logspace(0, -1.5, size) @ directions
    return factor.mT @ factor / (2 * size)


def cost(error: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    return torch.einsum("thd,hde,the->th", error, hessian.expand(error.shape[1], -1, -1), error)


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_nearly_those_of_least_error(bits):
    table, x = levels(bits).double(), torch.special.ndtri((torch.arange(1 << 18, dtype=torch.float64) + 0.5) / (1 << 18))
    assert torch.equal(table, -table.flip(0)) and (table.diff() > 0).all()
    nearest = table[torch.bucketize(x, (table[1:] + table[:-1]) / 2)]
    error = (x - nearest).square().mean().item()
    if bits in LLOYD_MAX:
        assert LLOYD_MAX[bits] * 0.999 < error < LLOYD_MAX[bits] * {2: 1.001, 3: 1.003, 4: 1.021, 5: 1.06, 6: 1.12}[bits]
    else:
        assert error < 6e-5


@pytest.mark.parametrize("bits", BITS)
def test_the_product_of_a_row_with_its_rounded_self_is_not_biased(bits):
    rows = torch.randn(64, 3, 64, generator=torch.Generator().manual_seed(2)) * 5
    codec, rounding = get_format(f"levels{bits}").k, Rounding.of(hessian_of(3, 64))
    for encoded, hessian in ((codec.encode(rows), torch.eye(64)[None]), (codec.encode_in(rows, rounding), rounding.hessian)):
        rounded = codec.dequantize(*encoded)
        with_itself = cost(rows, hessian)
        product = torch.einsum("thd,hde,the->th", rows, hessian.expand(3, -1, -1), rounded)
        torch.testing.assert_close(product, with_itself, rtol=2e-3, atol=0)  # the scale's 11 bits


def test_feedback_and_gain_are_the_metric():
    rounding = Rounding.of(hessian_of(2, 32))
    unit = rounding.feedback.double() + torch.eye(32, dtype=torch.float64)
    assert (rounding.feedback.triu() == 0).all()
    made = unit.mT @ (rounding.gain.double()[..., None] * unit)
    torch.testing.assert_close(made, rounding.hessian.double(), rtol=1e-5, atol=1e-6)


def greedy(row: list[float], hessian: torch.Tensor, table: list[float]) -> list[int]:
    """What LDLQ means, spelled out: each code is the best one given those before, if those after it could be any real numbers."""
    size, inverse_free, chosen = len(row), hessian.double(), []
    error = torch.zeros(size, dtype=torch.float64)
    for i in range(size):
        best = None
        for code, level in enumerate(table):
            error[i] = row[i] - level
            fixed, free = error[: i + 1], slice(i + 1, size)
            total = fixed @ inverse_free[: i + 1, : i + 1] @ fixed
            if i + 1 < size:
                cross = inverse_free[free, : i + 1] @ fixed
                total = total - cross @ torch.linalg.solve(inverse_free[free, free], cross)
            if best is None or total < best[0]:
                best = total, code
        chosen.append(best[1])
        error[i] = row[i] - table[best[1]]
    return chosen


def test_rounding_is_that_of_the_definition():
    hessian, table = hessian_of(1, 8, seed=3), levels(2)
    rounding = Rounding.of(hessian)
    rows, taken = torch.randn(10, 1, 8, generator=torch.Generator().manual_seed(26)), set()

    def cosine(codes):
        z = table[torch.tensor(codes)]
        return (row @ rounding.hessian[0] @ z).square() / (z @ rounding.hessian[0] @ z)

    for row, (codes,), scale in zip(rows[:, 0], *round_to_levels(rows, rounding, table)):
        size = row.square().mean().sqrt().item()
        tries = [greedy((row / (size * g)).tolist(), rounding.hessian[0], table.tolist()) for g in (0.85, 1.0, 1.15, 1.3)]
        best = max(tries, key=cosine)
        assert codes.tolist() == best
        taken |= {tries.index(best)} if tries.count(best) == 1 else set()
        z = table[codes]
        expected = (row @ rounding.hessian[0] @ row) / (row @ rounding.hessian[0] @ z)
        assert math.isclose(scale.item(), expected.item(), rel_tol=1e-4)
    assert taken == {0, 1, 2, 3}  # each of the scales that are tried is some row's best


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rounding_in_a_metric_costs_less_there(bits):
    rounding, codec = Rounding.of(hessian_of(2, 64)), get_format(f"levels{bits}").k
    rows = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(5))
    encoded = codec.encode(rows), codec.encode_in(rows, rounding)
    plain, hessian = (cost(codec.dequantize(*e) - rows, rounding.hessian).mean() for e in encoded)
    assert hessian < 0.55 * plain


def test_rows_are_rounded_one_by_one():
    """How many rows come at once changes no byte."""
    rounding, codec = Rounding.of(hessian_of(3, 64)), get_format("levels3").k
    rows = torch.randn(37, 3, 64, generator=torch.Generator().manual_seed(6))
    codes, scale = codec.encode_in(rows, rounding)
    for part in (slice(0, 1), slice(1, 9), slice(9, 37)):
        some, some_scale = codec.encode_in(rows[part], rounding)
        assert torch.equal(some, codes[part]) and torch.equal(some_scale, scale[part])


def test_a_metric_that_is_none_is_refused():
    with pytest.raises(ValueError, match="hessian"):
        LinearMap(torch.eye(16)[None], torch.eye(16)[None], None, -torch.eye(16)[None])


def calibrated(mean_scale: float = 3.0) -> LayerMaps:
    plain = default_map(get_format("levels2").k, 64)
    k_hessian, v_hessian = hessian_of(2, 64, 8), hessian_of(2, 64, 9)
    key_mean = mean_scale * torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(7))
    k = LinearMap(plain.forward, plain.inverse, key_mean, k_hessian)
    return LayerMaps(k, LinearMap(plain.forward, plain.inverse, None, v_hessian))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("maps", [None, calibrated()], ids=["plain", "calibrated"])
def test_attention_is_that_over_the_dequantized_cache(bits, maps):
    b = SampleBatch.make(f"levels{bits}", (1, 7), (150, 70), maps=maps)
    check(b, b.attend())


def test_a_key_is_stored_without_the_offset_where_that_is_shorter():
    maps = calibrated()
    cache = PagedCache(get_format("levels4").cache_spec(2, 64), 16, maps=maps)
    positions = torch.arange(200)
    key = maps.k.key_mean_rows(positions) + torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(10))
    key[[5, 70, 130]] *= 0.05  # of low norm: far from the key mean
    cache.write(key, torch.randn_like(key), positions, positions)
    stored = cache.k.meta[positions // 16, positions % 16, :, 0]
    assert ((stored < 0).all(1).nonzero()[:, 0]).tolist() == [5, 70, 130] and (stored != 0).all()
    read = cache.dequantize(positions, positions)[0]
    kept = torch.where(stored[..., None] < 0, key, key - maps.k.key_mean_rows(positions))
    error, size = (cost(t @ maps.k.forward[0].mT, maps.k.rounding.hessian) for t in (read - key, kept))
    assert (error / size).sqrt().max() < 0.15
    q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(11))
    table, lens = torch.arange(13, dtype=torch.int32)[None], torch.tensor([200], dtype=torch.int32)
    out = cache.attend(q, block_table=table, seq_lens=lens)
    k, v = (t.double().repeat_interleave(2, 1) for t in cache.dequantize(positions, positions))
    weight = torch.softmax(torch.einsum("qhd,khd->hk", q.double(), k) / 8, -1)
    torch.testing.assert_close(out[0].double(), torch.einsum("hk,khd->hd", weight, v), rtol=1e-4, atol=1e-5)


def test_zeros_stay_near_zero():
    cache = PagedCache(get_format("levels2").cache_spec(2, 64), 1, maps=calibrated())
    zeros = torch.zeros(4, 2, 64)
    cache.write(zeros, zeros, torch.arange(4), torch.arange(4))
    for t in cache.dequantize(torch.arange(4), torch.arange(4)):
        assert t.abs().max() < 1e-6
