"""Trellis-coded rows as the Hopper kernel writes them, run on a CPU, and on a Hopper GPU."""

from dataclasses import replace

import pytest
import torch

from hopper_on_cpu import Device
from quantkv import get_format
from quantkv.formats.trellis.hopper import TrellisConfig, hessian_bytes
from quantkv.implementations.hopper import write
from quantkv.maps import LayerMaps, LinearMap
from quantkv.rounding import Rounding
from quantkv.testing import POISON
from rounded import Compared, Rows, call_of, check_contained, compare, layer, on_host
from test_rounded_writes import on_a_cpu, on_cpu, on_hopper
from test_rounding import hessian_of


def check(results: list[Compared], mean: float, sides: int = 2) -> None:
    """Errors are fed back in fp16: few rows get other codes, for better or worse, so that only their mean says anything."""
    assert len(results) == sides
    for each in results:
        assert abs(each.mean - 1) < mean and each.other < 0.12 and each.scale <= 2**-9, each


@on_cpu
@pytest.mark.parametrize(
    "head_size, dtype, key_mean, shared, even",
    [
        (64, torch.float16, False, False, False),
        (64, torch.float16, True, False, True),
        (128, torch.bfloat16, True, False, False),
        (128, torch.bfloat16, True, False, True),
        (256, torch.bfloat16, False, True, False),
    ],
    ids=str,
)
def test_it_costs_what_the_reference_does(head_size, dtype, key_mean, shared, even, monkeypatch, tmp_path):
    maps = layer("trellis2", head_size, key_mean=key_mean, shared=shared, even=even)
    given = Rows.make(45 if head_size < 256 else 20, maps, 2, head_size, dtype)
    check(compare(*on_a_cpu("trellis2", maps, given, monkeypatch, tmp_path), given), 0.03)


@on_cpu
@pytest.mark.parametrize(
    "name, hessians, sides",
    [
        ("trellis2", (True, False), 1),
        ("trellis2", (False, True), 1),
        ("trellis2/int4", (True, True), 1),
        ("levels4/trellis2", (True, False), 1),
    ],
    ids=str,
)
def test_each_side_is_written_in_its_own_way(name, hessians, sides, monkeypatch, tmp_path):
    maps = layer(name, 64, hessians=hessians)
    given = Rows.make(20, maps, head_size=64)
    results = compare(*on_a_cpu(name, maps, given, monkeypatch, tmp_path), given)
    assert len(results) == sides and all(abs(each.mean - 1) < 0.1 for each in results)


@on_cpu
@pytest.mark.parametrize("hessian", [False, True])
def test_a_row_that_is_not_finite_changes_no_other(hessian, monkeypatch, tmp_path):
    check_contained("trellis2", layer("trellis2", hessians=(hessian, hessian)), 24, lambda: Device(monkeypatch, tmp_path))


@on_cpu
def test_one_hessian_for_all_heads_is_that_of_each(monkeypatch, tmp_path):
    shared = layer("trellis2", 64, shared=True)
    each = LayerMaps(*(LinearMap(m.forward, m.inverse, None, m.hessian.expand(2, -1, -1).contiguous()) for m in (shared.k, shared.v)))
    given = Rows.make(20, shared, head_size=64)
    caches = [given.caches("trellis2", maps, 1)[0] for maps in (shared, each)]
    for cache in caches:
        Device(monkeypatch, tmp_path).serve(call_of(cache, given))
    assert torch.equal(caches[0].buffer, caches[1].buffer)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_bytes_of_a_hessian(head_size):
    """As many as the kernel counts with; one set for each head of the Hessian."""
    laid_out = TrellisConfig.feedback_of(Rounding.of(hessian_of(3, head_size)))
    assert laid_out.shape == (3, hessian_bytes(head_size)) and laid_out.stride(0) % 16 == 0


# ---- compiled

# Instructions of the whole kernel, both sides alike: a step of the search is an eighth of half of them.
BUDGET = {(64, False): 2100, (128, False): 2250, (256, False): 3700, (64, True): 2250, (128, True): 2550, (256, True): 3000}


@pytest.mark.parametrize("head_size, hessian", BUDGET)
def test_it_compiles_within_its_budget_and_its_registers(head_size, hessian, tmp_path, cubins):
    pytest.importorskip("cuda.core")
    from quantkv.implementations.hopper.host.sass import opcodes

    codec = get_format("trellis2").k
    rows = write.WriteConfig(codec, codec, head_size, head_size, 16, True, True, head_size**-0.5, head_size**-0.5)
    config = TrellisConfig.of(rows, hessian)
    (tmp_path / "trellis.cubin").write_bytes(config.cubin())
    names = opcodes(tmp_path / "trellis.cubin")
    assert not {"LDL", "STL"} & set(names), "registers are spilled"
    assert 1000 < len(names) <= BUDGET[head_size, hessian]
    assert 2 * (config.shared_bytes + 1024) <= 228 * 1024  # two blocks an SM
    shifted = replace(rows, key_shifted=True, key_scaled=True, sides=write.KEYS)
    TrellisConfig.of(shifted, hessian).cubin()


# ---- on a Hopper GPU


@on_hopper
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("hessians", [(True, True), (False, False)], ids=["hessian", "plain"])
@pytest.mark.parametrize("even", [False, True])
def test_many_rows_on_a_gpu(even, hessians, head_size):
    maps = layer("trellis2", head_size, 8, key_mean=True, hessians=hessians, even=even)
    given = Rows.make(1000, maps, 8, head_size)
    (expected,), (cache,) = given.caches("trellis2", maps, 1), given.caches("trellis2", maps, 1, "cuda")
    expected.write(*given.given, implementation="reference")
    cache.write(*(t.cuda() for t in given.given), implementation="hopper")
    check(compare(on_host(cache), expected, given), 0.005, sum(hessians))


@on_hopper
@pytest.mark.parametrize("hessians", [(True, True), (False, False)], ids=["hessian", "plain"])
def test_a_graph_writes_what_an_eager_call_does(hessians):
    maps = layer("trellis2", hessians=hessians)
    given = Rows.make(64, maps)
    eager, captured = given.caches("trellis2", maps, 2, "cuda")
    tensors = [t.cuda() for t in given.given]
    eager.write(*tensors, implementation="hopper")
    captured.write(*tensors)  # `auto` chooses the kernel
    captured.buffer.fill_(POISON)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.write(*tensors)
    graph.replay()
    assert torch.equal(eager.buffer, captured.buffer)
