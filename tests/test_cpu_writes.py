"""Rows that the CPU's compiled kernels round by a Hessian: what they cost beside the reference's, and what they share with it."""

from dataclasses import replace

import pytest
import torch

from quantkv import get_format
from quantkv.formats.levels import CUBICS
from quantkv.implementations.cpu import rounding, write
from quantkv.maps import LayerMaps, LinearMap
from quantkv.rounding import Rounding
from rounded import Compared, Rows, call_of, check_contained, compare, layer
from test_rounding import hessian_of

pytest.importorskip("numba")

# Shares of rows with other codes: sums in another order change the last bits of what is rounded, and one code the codes after it.
OTHER = {"levels2": 0.02, "levels3": 0.03, "levels4": 0.04, "levels5": 0.05, "levels6": 0.1, "levels8": 0.3, "trellis2": 0.02}
SIZES = [(64, 4), (128, 2), (256, 1), (96, 2), (80, 2)]  # of heads, and how many


class Kernels:
    """What serves a write; AssertionError where it is refused."""

    def serve(self, call):
        assert write.refusal(call) is None
        write.run(call)


def written(name, maps, given: Rows):
    """Caches written by the kernels and by the reference."""
    cache, expected = given.caches(name, maps)
    expected.write(*given.given, implementation="reference")
    Kernels().serve(call_of(cache, given))
    return cache, expected


def check(results: list[Compared], name: str, sides: int = 2) -> None:
    assert len(results) == sides
    for each in results:
        assert abs(each.mean - 1) < (2e-3 if name != "levels8" else 8e-3) and each.other <= OTHER[name] and each.scale <= 2**-10, each


@pytest.mark.parametrize("key_mean, shared, even", [(False, False, False), (True, False, True), (True, True, False)], ids=str)
@pytest.mark.parametrize("head_size, heads", SIZES)
@pytest.mark.parametrize("name", OTHER)
def test_it_costs_what_the_reference_does(name, head_size, heads, key_mean, shared, even):
    maps = layer(name, head_size, heads, key_mean=key_mean, shared=shared, even=even)
    given = Rows.make(77, maps, heads, head_size)
    check(compare(*written(name, maps, given), given), name)


def test_every_codec_that_rounds_by_a_hessian_is_tried():
    assert {f"levels{bits}" for bits in CUBICS} | {"trellis2"} == set(OTHER)


@pytest.mark.parametrize("name", ["levels4", "trellis2"])
def test_dense_maps_of_each_head(name):
    """No Hadamard matrix: a rotation of each head, with key means."""
    turns = torch.linalg.qr(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(5)))[0].contiguous()
    plain = layer(name, 64, key_mean=True)
    maps = LayerMaps(*(LinearMap(turns, turns.mT.contiguous(), m.key_mean, m.hessian) for m in (plain.k, plain.v)))
    given = Rows.make(77, maps, 2, 64)
    check(compare(*written(name, maps, given), given), name)


@pytest.mark.parametrize(
    "name, hessians, sides",
    [("levels4", (True, False), 1), ("trellis2", (False, True), 1), ("trellis2/int4", (True, True), 1), ("int4/levels3", (True, True), 1)],
    ids=str,
)
@pytest.mark.parametrize("key_mean", [False, True])
def test_each_side_is_written_in_its_own_way(name, hessians, sides, key_mean):
    """What no Hessian rounds has the reference's bytes, or nearly: the trellis is searched in sums of another order."""
    maps = layer(name, 64, hessians=hessians, key_mean=key_mean)
    given = Rows.make(45, maps, head_size=64)
    results = compare(*written(name, maps, given), given)
    assert len(results) == sides and all(abs(each.mean - 1) < 2e-3 for each in results)


@pytest.mark.parametrize("hessian", [False, True])
@pytest.mark.parametrize("name", ["levels4", "trellis2"])
def test_a_row_that_is_not_finite_changes_no_other(name, hessian):
    check_contained(name, layer(name, hessians=(hessian, hessian)), 45, Kernels)
    check_contained(name, layer(name, 256, 1, hessians=(hessian, hessian), key_mean=True), 45, Kernels, 1, 256)


@pytest.mark.parametrize("name", ["levels2", "levels8", "trellis2"])
def test_rows_of_any_size_have_the_bytes_of_the_reference(name):
    """Zero, not finite, as large as float32 goes and too small for fp16's scales: of these rows nothing hangs on a sum's last bit."""
    rows = torch.zeros(9, 2, 64)
    rows[1], rows[2, 1], rows[3, :, 5], rows[4, 0, 7] = torch.nan, torch.inf, -torch.inf, torch.nan
    rows[5], rows[6, 1, 9], rows[7, 0, 3], rows[8] = 3e38, 2e19, 1e-39, 1e-42
    codec, given = get_format(name).k, Rounding.of(hessian_of(2, 64))
    expected = codec.encode_in(rows, given)
    for found, there in zip(codec.cpu().encode_in()(rows, given), expected):
        torch.testing.assert_close(found, there, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["levels4", "trellis2"])
def test_one_hessian_for_all_heads_is_that_of_each(name):
    shared = layer(name, 64, shared=True)
    each = LayerMaps(*(LinearMap(m.forward, m.inverse, None, m.hessian.expand(2, -1, -1).contiguous()) for m in (shared.k, shared.v)))
    given = Rows.make(20, shared, head_size=64)
    caches = [given.caches(name, maps, 1)[0] for maps in (shared, each)]
    for cache in caches:
        Kernels().serve(call_of(cache, given))
    assert torch.equal(caches[0].buffer, caches[1].buffer)


@pytest.mark.parametrize("name", ["levels4", "trellis2"])
def test_rows_have_the_same_bytes_alone_and_by_any_number_of_threads(name, monkeypatch):
    rows, given = torch.randn(21, 2, 128, generator=torch.Generator().manual_seed(5)), Rounding.of(hessian_of(2, 128))
    encode, parts = get_format(name).k.cpu().encode_in(), []
    codes, scale = encode(rows, given)
    for part in (slice(0, 1), slice(1, 21)):
        some = encode(rows[part], given)
        assert torch.equal(some[0], codes[part]) and torch.equal(some[1], scale[part])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(rounding, "SMALLEST_PART", 1)
    in_parts = rounding.in_parts
    monkeypatch.setattr(rounding, "in_parts", lambda work, smallest, run: in_parts(work, smallest, lambda *a: (parts.append(a), run(*a))))
    some = encode(rows, given)
    assert sorted(parts) == [(0, 14), (14, 28), (28, 42)] and torch.equal(some[0], codes) and torch.equal(some[1], scale)


@pytest.mark.parametrize("head_size", [64, 96, 256])
def test_a_trellis_without_hessian_costs_what_the_reference_s_does(head_size):
    rows, codec = torch.randn(45, 2, head_size, generator=torch.Generator().manual_seed(6)), get_format("trellis2").k
    errors = [(codec.dequantize(*encode(rows)) - rows).square().mean() for encode in (codec.cpu().encode(), codec.encode)]
    assert abs(errors[0] / errors[1] - 1) < 1e-3


def test_a_prepared_write_takes_the_positions_of_each_call():
    maps = layer("levels4", key_mean=True)
    given = Rows.make(45, maps)
    cache, expected = given.caches("levels4", maps)
    prepared = write.prepare(call_of(cache, given))
    prepared(call_of(cache, replace(given, positions=given.positions.flip(0))))
    assert not torch.equal(cache.buffer, expected.buffer)
    for c, launch in ((cache, prepared), (expected, write.run)):
        launch(call_of(c, given))
    assert torch.equal(cache.buffer, expected.buffer)


def test_kernels_serve_what_presets_write(monkeypatch):
    """No row goes to the reference's loops, and each kernel is compiled once."""
    from quantkv.formats.levels import cpu as levels
    from quantkv.formats.trellis import cpu as trellis

    for name in ("levels4", "trellis2"):
        maps = layer(name, 64, key_mean=True)
        given = Rows.make(20, maps, head_size=64)
        (cache,) = given.caches(name, maps, 1)
        with monkeypatch.context() as patch:
            patch.setattr(levels.reference, "round_to_levels", None)
            patch.setattr(trellis, "_search", None)
            cache.write(*given.given)
    assert len(levels.round_rows.signatures) == len(trellis.search_rows.signatures) == 1
