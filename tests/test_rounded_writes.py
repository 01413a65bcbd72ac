"""Rows rounded by a Hessian by kernels: the Hopper kernel run on a CPU, Triton's interpreted; on a GPU both as they are."""

from dataclasses import replace

import pytest
import torch

from hopper_on_cpu import AVAILABLE, Device
from quantkv import get_format
from quantkv.formats.levels import CUBICS
from quantkv.implementations.hopper import write as hopper
from quantkv.implementations.hopper.write import round as rounds
from quantkv.maps import LayerMaps, LinearMap
from quantkv.prepared import prepare_write
from rounded import Rows, call_of, check_contained, compare, layer, on_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
on_cpu = pytest.mark.skipif(not AVAILABLE, reason="needs g++")
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
BITS = sorted(CUBICS)
# Feedback in fp16, and other orders of sums, change the last bits of what is rounded; one code that is another one changes those after it,
# for better or worse. So of rows with other codes only the mean cost says anything. Shares of rows of at most 256 numbers with other
# codes, by bits:
OTHER = {2: 0.15, 3: 0.2, 4: 0.35, 5: 0.45, 6: 0.8, 8: 0.9}


def on_a_cpu(name, maps, given: Rows, monkeypatch, folder):
    """Caches written by the Hopper kernel and by the reference."""
    cache, expected = given.caches(name, maps)
    expected.write(*given.given, implementation="reference")
    Device(monkeypatch, folder).serve(call_of(cache, given))
    return cache, expected


def check(results, bits, mean, head_size=256):
    other = 1 - (1 - OTHER[bits]) ** max(head_size / 256, 1)  # a longer row has more codes that may be others
    for each in results:
        assert abs(each.mean - 1) < mean and each.other < other and each.scale <= 2**-9, each
    return results


@on_cpu
@pytest.mark.parametrize(
    "head_size, dtype, key_mean, even",
    [
        (64, torch.float16, False, False),
        (64, torch.float16, True, True),
        (128, torch.bfloat16, True, False),
        (128, torch.bfloat16, True, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", BITS)
def test_hopper_costs_what_the_reference_does(bits, head_size, dtype, key_mean, even, monkeypatch, tmp_path):
    name = f"levels{bits}"
    maps = layer(name, head_size, 4, key_mean=key_mean, even=even)
    given = Rows.make(77, maps, 4, head_size, dtype)
    assert len(check(compare(*on_a_cpu(name, maps, given, monkeypatch, tmp_path), given), bits, 0.05 if bits < 6 else 0.12)) == 2


@on_cpu
@pytest.mark.parametrize("name, head_size", [("levels4", 96), ("int4", 64), ("trellis2", 64)])
def test_hopper_evens_out_rows_that_no_hessian_rounds(name, head_size, monkeypatch, tmp_path):
    """Keys of each head behind its own powers of two: nearly all bytes are the reference's, and none are without them."""
    maps = layer(name, head_size, 4, hessians=(False, False), even=True)
    given = Rows.make(77, maps, 4, head_size, torch.float16)
    call = call_of(given.caches(name, maps)[0], given)
    config = hopper.configuration(call)
    assert config.key_evened and not config.value_evened
    for changed, differ in ((maps, (0.0, 0.02)), (replace(maps, k=layer(name, head_size, 4, hessians=(False, False)).k), (0.3, 1.0))):
        cache, expected = on_a_cpu(name, changed, given, monkeypatch, tmp_path)[0], given.caches(name, maps)[0]
        expected.write(*given.given, implementation="reference")
        share = (cache.k.codes != expected.k.codes).float().mean()
        assert differ[0] <= share <= differ[1]


@on_cpu
def test_hopper_rounds_rows_of_256(monkeypatch, tmp_path):
    maps = layer("levels3", 256, shared=True)
    given = Rows.make(45, maps, head_size=256)
    check(compare(*on_a_cpu("levels3", maps, given, monkeypatch, tmp_path), given), 3, 0.03)


@on_cpu
@pytest.mark.parametrize("name", ["levels2/levels4", "levels4"])
def test_many_warps_of_a_block_write_what_one_does(name, monkeypatch, tmp_path):
    maps = layer(name, key_mean=True)
    given = Rows.make(77, maps)
    few, many = given.caches(name, maps)
    Device(monkeypatch, tmp_path / "few").serve(call_of(few, given))
    monkeypatch.setattr(rounds, "FEW", 0)
    Device(monkeypatch, tmp_path / "many").serve(call_of(many, given))
    assert torch.equal(few.buffer, many.buffer)


@on_cpu
@pytest.mark.parametrize(
    "name, hessians", [("levels4", (True, False)), ("levels4", (False, True)), ("levels3/int4", (True, True))], ids=str
)
def test_a_side_without_metric_has_its_plain_bytes(name, hessians, monkeypatch, tmp_path):
    maps = layer(name, hessians=hessians)
    given = Rows.make(45, maps)
    assert len(compare(*on_a_cpu(name, maps, given, monkeypatch, tmp_path), given)) == 1


@on_cpu
def test_a_row_that_is_not_finite_changes_no_other(monkeypatch, tmp_path):
    check_contained("levels4", layer("levels4"), 45, lambda: Device(monkeypatch, tmp_path))


@on_cpu
def test_a_prepared_write_takes_the_metrics_of_each_layer(monkeypatch, tmp_path):
    Device(monkeypatch, tmp_path)
    layers = [layer("levels3", key_mean=True, shared=True, seed=seed) for seed in (0, 20)]
    given = Rows.make(45, layers[0])
    prepared = None
    for maps in layers:
        cache, fresh = given.caches("levels3", maps)
        prepared = prepared or hopper.prepare(call_of(cache, given))
        prepared(call_of(cache, given))
        hopper.prepare(call_of(fresh, given))(call_of(fresh, given))
        assert torch.equal(cache.buffer, fresh.buffer) and not torch.equal(cache.buffer, given.caches("levels3", maps)[0].buffer)
    with pytest.raises(ValueError, match="of another kind"):
        prepared(replace(call_of(cache, given), maps=layer("levels3", key_mean=True, hessians=(True, False))))


@on_cpu
def test_one_hessian_for_all_heads_is_that_of_each(monkeypatch, tmp_path):
    shared = layer("levels4", shared=True)
    each = LayerMaps(*(LinearMap(m.forward, m.inverse, None, m.hessian.expand(2, -1, -1).contiguous()) for m in (shared.k, shared.v)))
    given = Rows.make(45, shared)
    caches = [given.caches("levels4", maps, 1)[0] for maps in (shared, each)]
    for cache in caches:
        Device(monkeypatch, tmp_path).serve(call_of(cache, given))
    assert torch.equal(caches[0].buffer, caches[1].buffer)


# ---- Triton


@pytest.mark.parametrize("bits, head_size", [(2, 64), (4, 64), (8, 48), (4, 288), (4, 512)])
def test_triton_costs_what_the_reference_does(bits, head_size):
    name, tokens = f"levels{bits}", 2000 if DEVICE == "cuda" else 20
    maps = layer(name, head_size, key_mean=True)
    given = Rows.make(tokens, maps, head_size=head_size)
    (expected,), (cache,) = given.caches(name, maps, 1), given.caches(name, maps, 1, DEVICE)
    expected.write(*given.given, implementation="reference")
    cache.write(*(t.to(DEVICE) for t in given.given), implementation="triton")
    check(compare(on_host(cache), expected, given), bits, 0.01 if DEVICE == "cuda" else 0.15, head_size)


def test_triton_writes_a_side_without_metric_plainly():
    maps = layer("levels4/int4", 64)
    given = Rows.make(20, maps, head_size=64)
    (expected,), (cache,) = given.caches("levels4/int4", maps, 1), given.caches("levels4/int4", maps, 1, DEVICE)
    expected.write(*given.given, implementation="reference")
    cache.write(*(t.to(DEVICE) for t in given.given), implementation="triton")
    assert len(compare(on_host(cache), expected, given)) == 1


# ---- who serves


def test_what_no_kernel_rounds_is_the_reference_s():
    from quantkv.implementations.triton import write as triton_write

    maps = layer("trellis2", 64)
    given = Rows.make(20, maps, head_size=64)
    call = call_of(given.caches("trellis2", maps, 1)[0], given)
    assert "trellis2" in triton_write.refusal(call)
    call = call_of(given.caches("levels4", layer("levels4", 64), 1)[0], given)
    assert hopper._unsupported(call) is None and hopper.ways(call) == ((None, True),) * 2
    odd = replace(get_format("levels4").k, cubic=None)
    assert "levels4" in hopper._unsupported(replace(call, fmt=replace(call.fmt, k=odd)))


# ---- on a Hopper GPU


@on_hopper
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("even", [False, True])
def test_many_rows_on_a_gpu(even, bits, head_size):
    name = f"levels{bits}"
    maps = layer(name, head_size, 8, key_mean=True, even=even)
    given = Rows.make(1000, maps, 8, head_size)
    (expected,), (cache,) = given.caches(name, maps, 1), given.caches(name, maps, 1, "cuda")
    expected.write(*given.given, implementation="reference")
    cache.write(*(t.cuda() for t in given.given), implementation="hopper")
    check(compare(on_host(cache), expected, given), bits, 0.005 if bits < 8 else 0.01)


@on_hopper
def test_prepared_and_captured_on_a_gpu():
    """`auto` chooses the kernel; a graph writes what an eager call does."""
    maps = layer("levels4", key_mean=True)
    given = Rows.make(64, maps)
    eager, prepared, captured = given.caches("levels4", maps, 3, "cuda")
    key, value, slots, positions = (t.cuda() for t in given.given)
    eager.write(key, value, slots, positions, implementation="hopper")
    write = prepare_write(slots, positions)
    write(prepared, key, value)
    captured.write(key, value, slots, positions)
    captured.buffer.fill_(0xFF)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.write(key, value, slots, positions)
    graph.replay()
    assert torch.equal(eager.buffer, prepared.buffer) and torch.equal(eager.buffer, captured.buffer)


# ---- compiled without a GPU


@pytest.mark.parametrize("bits, head_size, rows_of_k", [(4, 128, 1 << 16), (4, 128, 64), (8, 256, 1 << 16)])
def test_the_kernel_keeps_what_it_rounds_in_registers(bits, head_size, rows_of_k, tmp_path, cubins):
    pytest.importorskip("cuda.core")
    from quantkv.implementations.hopper.host.sass import opcodes

    codec = get_format(f"levels{bits}").k
    rows = hopper.WriteConfig(codec, codec, head_size, head_size, 16, True, True, 1.0, 1.0, key_shifted=True)
    config = rounds.RoundConfig.of(rows, True, rows_of_k)
    cubin = tmp_path / "round.cubin"
    cubin.write_bytes(config.cubin())
    names = opcodes(cubin)
    assert not {"LDL", "STL"} & set(names) and len(names) < 3300
    assert config.resident * (config.shared_bytes + 1024) <= 228 * 1024
