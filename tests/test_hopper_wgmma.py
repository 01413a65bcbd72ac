"""The Hopper kernel for many packed query rows of one kv head: on a Hopper GPU; and, anywhere, its source run on a CPU over a model of
wgmma's fragments, descriptors and asynchrony (cuda_on_cpu/wgmma.cuh), and what it is compiled to."""

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch

from hopper_on_cpu import AVAILABLE, Device
from quantkv import available_formats, get_format
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode import wgmma
from quantkv.implementations.hopper.decode.warps import CallShape
from quantkv.implementations.hopper.decode.wgmma import WgmmaConfig
from quantkv.implementations.hopper.host import launch
from quantkv.implementations.hopper.host.records import page_bytes
from quantkv.implementations.hopper.host.sass import step
from quantkv.testing import SampleBatch, check
from segments import Part, Several, calibrated, evened, exact, run, signed

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
emulated = pytest.mark.skipif(not AVAILABLE, reason="needs g++")
CODECS = {codec.name: codec for fmt in map(get_format, available_formats()) for codec in (fmt.k, fmt.v)}
VERIFY = (5, 8, 1, 3)
SEVERAL = dict(queries=VERIFY, window=200, softcap=25.0)


@pytest.fixture(autouse=True)
def warpgroups_of_few_packed_rows(monkeypatch):
    """Tested from fewer packed query rows on than they are chosen from."""
    monkeypatch.setattr(wgmma, "MANY_PACKED_ROWS", 9)


# ---- the source, run on a CPU


def on_a_cpu(
    monkeypatch,
    folder,
    name,
    queries=(1, 1, 1, 1),
    lens=(90, 33, 1, 260),
    multiprocessors=1,
    max_tiles=1024,
    change=None,
    chunks=False,
    **arguments,
):
    options = {name: arguments.pop(name) for name in ("window", "softcap") if name in arguments}
    b = SampleBatch.make(name, queries, lens, **{"head_size": 128, "num_kv_heads": 2, "group": 16, "dtype": torch.bfloat16, **arguments})
    if change is not None:
        change(b)
    call = b.call(max_query_len=max(queries), **options)
    call = replace(call, batch=replace(call.batch, chunks=chunks))
    configs = hopper.configurations(call)
    assert all(isinstance(config, WgmmaConfig) and (not chunks or config.packed_rows == 64) for config in configs)
    Device(monkeypatch, folder, multiprocessors, max_tiles).serve(call)
    check(b, (call.out, call.lse), **options)


@emulated
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("int4", dict(group=3, max_tiles=4, **SEVERAL)),  # 24 packed query rows, stretches
        ("int4", dict(head_size=64, group=8, queries=VERIFY)),  # warps that share chunks of values; 64 packed query rows
        ("int8/int2", dict(multiprocessors=2)),
        ("tq3", dict(group=4, queries=VERIFY, max_tiles=8)),  # values with a bias, across 16-bit boundaries
        ("trellis2", {}),
        ("bf16", dict(group=71, num_kv_heads=1, block_size=64)),  # two groups of packed query rows
        ("levels5/levels3", dict(head_size=256, num_kv_heads=1)),
        ("int4", dict(head_size=192, head_size_v=128, block_size=8, window=70)),  # pages of 8, some of which are given away
        ("int8/int4", dict(head_size=96)),  # three chunks for four warps
        ("levels3/levels5", dict(head_size=80, head_size_v=208, num_kv_heads=1, queries=VERIFY, group=3)),  # runs across words
        ("none", dict(head_size=48, head_size_v=112, num_kv_heads=1)),
    ],
    ids=str,
)
def test_on_a_cpu(name, arguments, monkeypatch, tmp_path):
    on_a_cpu(monkeypatch, tmp_path, name, **arguments)


@emulated
@pytest.mark.parametrize("queries", [(2, 2, 1, 2), (3, 9, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "name, arguments", [("int4", dict(group=4)), ("levels4", dict(group=4, multiprocessors=2, max_tiles=4)), ("bf16", {})]
)
def test_chunks_of_a_few_queries_by_the_kernel_of_16_on_a_cpu(name, arguments, queries, monkeypatch, tmp_path):
    """Most of its packed query rows have no query."""
    on_a_cpu(monkeypatch, tmp_path, name, queries, chunks=True, **{"group": 8, **arguments})


@emulated
@pytest.mark.parametrize("queries", [(2, 2), (2, 5)])
def test_chunks_over_several_sources_on_a_cpu(queries, monkeypatch, tmp_path):
    several = Several.make(exact("levels4", (90, 200), 30, 16), queries, (90, 200), group=4)
    call = replace(several.call, batch=replace(several.call.batch, chunks=True))
    assert [config.packed_rows for config in hopper.configurations(call)] == [64] * len(call.segments) and len(call.segments) == 3
    Device(monkeypatch, tmp_path, 2, 1024).serve(call)
    several.check()


def rise(b):
    """Keys that grow, so that maxima rise from KV tile to KV tile, and values far from zero, so that biases count."""
    growing = b.key * torch.linspace(0.2, 2, len(b.key))[:, None, None]
    b.q.mul_(4)
    b.cache.write(growing.to(b.key.dtype), b.value + 2, b.slots, b.positions, implementation="reference")


def rise_in_odd_packed_rows(b):
    """The others see every key alike."""
    rise(b)
    b.q[:, ::2] = 0


def fall(b):
    """Scores far below zero, of keys far from it, whose zero points and queries' sums are large."""
    b.q.add_(4)
    b.cache.write(b.key - 8, b.value, b.slots, b.positions, implementation="reference")


def grow(b):
    """Values whose scales grow beyond what fp16 has."""
    growing = b.value * torch.logspace(-2, 7, len(b.value))[:, None, None]
    b.cache.write(b.key, growing.to(b.value.dtype), b.slots, b.positions, implementation="reference")


@emulated
@pytest.mark.parametrize("name, change", [("tq4", rise), ("int4", rise_in_odd_packed_rows), ("int4", fall), ("int4", grow)])
def test_maxima_that_rise_on_a_cpu(name, change, monkeypatch, tmp_path):
    on_a_cpu(monkeypatch, tmp_path, name, (1,), (300,), group=10, num_kv_heads=1, change=change)


def all_alike(b):
    """Scores far below zero that differ by little."""
    b.q.mul_(0.1).add_(4)
    b.cache.write(b.key * 0.05 - 8, b.value, b.slots, b.positions, implementation="reference")


@emulated
def test_packed_rows_that_meet_keys_late_on_a_cpu(monkeypatch, tmp_path):
    """The first KV tile is in the window of two queries of five: for the others the maximum of nothing is not 0."""
    on_a_cpu(monkeypatch, tmp_path, "bf16/int4", (5,), (600,), group=4, num_kv_heads=1, window=470, change=all_alike)


@emulated
def test_more_kv_tiles_than_ids_are_held_on_a_cpu(monkeypatch, tmp_path):
    """Runs of three consumer warpgroups, as of more work: each loads page ids anew within a sequence, and the next sequence's."""
    chosen = []
    choose = wgmma.choose
    monkeypatch.setattr(wgmma, "choose", lambda shape, capacity: chosen.append(choose(shape)) or chosen[-1])
    on_a_cpu(monkeypatch, tmp_path, "int4", (1, 1), (6600, 500), num_kv_heads=1, head_size=64)
    assert {config.workers for config in chosen} == {3}


@emulated
def test_matrices_and_offsets_on_a_cpu(monkeypatch, tmp_path):
    on_a_cpu(monkeypatch, tmp_path, "tq4", VERIFY, group=5, maps=calibrated(), window=300, softcap=30.0)


@emulated
def test_segments_on_a_cpu(on_cpu):
    """Ranges, three segments with kernels of their own, and one that the combine kernel attends to."""
    lens = (150, 33, 1, 250)
    several = Several.make([Part("int4", None, [(5, 140), (0, 0), (0, 1), (77, 90)])], VERIFY, lens, group=6, window=200)
    assert isinstance(hopper.configurations(several.call)[0], WgmmaConfig)
    on_cpu(several, 1)


@emulated
def test_full_precision_tokens_on_a_cpu(on_cpu):
    on_cpu(Several.make(exact("int4", (90, 33, 1, 200), 30, 16), (1, 1, 1, 1), (90, 33, 1, 200), group=16, num_kv_heads=1), 2)


# ---- what it is compiled to, and when it is chosen


def config(key, value, head_size=128, packed_rows=16, *maps, head_size_v=None, block_size=16):
    key, value, sizes = CODECS[key], CODECS[value], (head_size, head_size_v or head_size)
    size = page_bytes(key, value, *sizes, block_size)
    return wgmma.choose(CallShape(key, value, *sizes, 4, 8, block_size, size, True, packed_rows, False, *maps))


@pytest.mark.parametrize(
    "key, value, packed_rows, most",
    [("int4", "int4", 16, 302), ("int4", "int4", 24, 325), ("int4", "int4", 32, 348), ("int4", "int4", 64, 428), ("tq4", "u4", 32, 436)],
)
def test_step_fits_its_budget(key, value, packed_rows, most, tmp_path, cubins):
    """Instructions of a warp for a KV tile, of 16 tokens to unpack: nothing in local memory, and products that run on. Where operands were
    unpacked while some run, the compiler would wait for each of them."""
    pytest.importorskip("cuda.core")
    cubin = tmp_path / "wgmma.cubin"
    cubin.write_bytes(config(key, value, packed_rows=packed_rows).cubin())
    names = step(cubin)
    assert 250 < len(names) <= most
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
    assert sum(name.startswith("HGMMA") for name in names) == 16 + (key == "int4")
    assert sum(name.startswith("WARPGROUP.DEPBAR") for name in names) == 2


@pytest.mark.parametrize("name", ["WORKER_BYTES", "TABLES_BYTES", "PARTIAL_BYTES", "BARRIER_BYTES", "ARGUMENT_BYTES", "WORKER_WARPS"])
def test_a_number_that_differs_between_host_and_device_does_not_compile(name, tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    from quantkv.implementations.hopper.host.nvrtc import compile_cubin

    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "cache"))
    chosen = config("int4", "int4")
    macros = chosen.macros()
    with pytest.raises(Exception, match=r"static assertion failed|static_assert"):
        compile_cubin(chosen.source, macros | {name: 2 * macros[name] + 2}, [CODECS["int4"].hopper().source])


def test_every_configuration_has_a_ring():
    """A KV tile on its way beside the one that is read, in the shared memory that there is; and a packed query row of its own for every
    query."""
    halves = {name: codec.hopper() for name, codec in CODECS.items() if codec.hopper is not None}
    keys, values = ([name for name, half in halves.items() if getattr(half, use)] for use in ("keys", "values"))
    maps = [("NO_MAP", "NO_MAP", False), ("MATRIX", "MATRIX", True)]
    for key, value, head_size, packed_rows, kinds in itertools.product(keys, values, (64, 128, 256), (9, 16, 24, 33, 64, 71, 128), maps):
        if head_size > 64 or not any(16 % CODECS[side].row.code_bits for side in (key, value)):
            chosen = config(key, value, head_size, packed_rows, *kinds)
            assert isinstance(chosen, WgmmaConfig) == (head_size > 64 or not halves[value].values_by_table)
            if isinstance(chosen, WgmmaConfig):
                assert chosen.stages >= 2 and chosen.workers >= 1, chosen
                assert chosen.shared_bytes <= 227 * 1024, chosen
                blocks = -(-packed_rows // (8 * chosen.packed_row_tiles))
                assert blocks == -(-packed_rows // (64 if head_size < 256 else 32)), chosen


CHOSEN = [("int4", 128, 8, 1, 1), ("int4", 128, 16, 1, 2), ("int4", 128, 17, 4, 3), ("int4", 192, 12, 1, 2), ("int4", 256, 16, 1, 2)]
# a warp's room is too small for two tiles of packed query rows
CHOSEN += [("int4", 256, 17, 4, 3), ("int8", 256, 12, 1, 1), ("int8", 256, 13, 4, 2)]


@pytest.mark.parametrize("codec, head_size, packed_rows, warpgroup, packed_row_tiles", CHOSEN)
def test_what_is_chosen(codec, head_size, packed_rows, warpgroup, packed_row_tiles, monkeypatch):
    """What was faster on an H200 (docs/performance.md)."""
    monkeypatch.setattr(wgmma, "MANY_PACKED_ROWS", 17)
    chosen = config(codec, codec, head_size, packed_rows)
    assert (chosen.worker_warps, chosen.packed_row_tiles) == (warpgroup, packed_row_tiles)


def test_segments_are_cut_in_one_way():
    """Where one of them has no kernel for many packed query rows, none has."""
    for name, warpgroup in (("int4", 4), ("int8/trellis2", 1)):
        parts = [Part("int4", None, [(0, 20)]), Part(name, None, [(20, 33)])]
        call = Several.make(parts, (1,), (33,), head_size=64, group=16, num_kv_heads=1).call
        assert [c.worker_warps for c in hopper.configurations(call)] == [warpgroup, warpgroup]


def test_what_the_rule_refuses():
    b = SampleBatch.make("int4", (1, 1), (20, 30), head_size=128, num_kv_heads=1, group=128, dtype=torch.bfloat16)
    assert hopper._unsupported(b.call(max_query_len=1)) is None
    assert "256 share it, at most 128" in hopper._unsupported(b.call(max_query_len=2))
    b = SampleBatch.make("int4", (16,), (20,), head_size=128, num_kv_heads=1, group=8, dtype=torch.bfloat16)
    assert hopper._unsupported(b.call(max_query_len=16)) is None
    assert "max_query_len=17" in hopper._unsupported(b.call(max_query_len=17))


# ---- on a Hopper GPU

LENS = (700, 33, 1, 1300)
FORMATS = [
    "int8",
    "fp8_token",
    "int4",
    "int2",
    "k8v4",
    "tq_k8v4",
    "tq4",
    "tq3",
    "levels2",
    "levels3",
    "levels4",
    "levels5",
    "levels6",
    "levels8",
]
FORMATS += ["trellis2", "int8/trellis2", "none"]
EACH = {
    (1, 1, 1, 1): 16,
    (5, 3, 1, 5): 4,
    (8, 8, 1, 8): 4,
    (16, 9, 1, 16): 4,
    (16, 16, 1, 2): 8,
}  # query heads of a kv head: 16 to 128 packed query rows


def batch(name, queries=(1, 1, 1, 1), lens=LENS, **arguments):
    return SampleBatch.make(
        name, queries, lens, **{"head_size": 128, "num_kv_heads": 2, "group": 16, "dtype": torch.bfloat16, "device": "cuda", **arguments}
    )


def attend(b, **options):
    most = int(b.cu_seqlens_q.diff().max())
    assert all(isinstance(c, WgmmaConfig) for c in hopper.configurations(b.call(max_query_len=most, **options)))
    result, again = (b.attend(implementation="hopper", max_query_len=most, **options) for _ in range(2))
    check(b, result, **options)
    assert all(torch.equal(x, y) for x, y in zip(result, again)), "two runs of one input differ"


@hopper_only
@pytest.mark.parametrize("packed_rows", [9, 16, 20, 32, 40, 64, 128])
def test_packed_rows(packed_rows):
    attend(batch("int4", num_kv_heads=1, group=packed_rows))


@hopper_only
@pytest.mark.parametrize("queries", EACH, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, queries):
    attend(batch(name, queries, group=EACH[queries]), window=500)


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "tq4"])
@pytest.mark.parametrize(
    "options", [{"window": 100}, {"softcap": 20.0}, {"sinks": True}, {"window": 700, "softcap": 30.0, "sinks": True}], ids=str
)
def test_options(name, options):
    options = {**options, **({"sinks": torch.linspace(-2, 2, 32, device="cuda")} if "sinks" in options else {})}
    attend(batch(name), **options)


@hopper_only
@pytest.mark.parametrize(
    "shape",
    [
        dict(head_size=64),
        dict(head_size=256),
        dict(head_size=256, group=128, num_kv_heads=1),
        dict(group=71, num_kv_heads=1),
        dict(block_size=64),
        dict(block_size=128),
        dict(dtype=torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["int4", "int2", "levels8"])
def test_shapes(name, shape):
    attend(batch(name, **shape))


@hopper_only
@pytest.mark.parametrize("maps", [calibrated(), signed(), evened(buckets=5)], ids=["matrix", "hadamard", "evened"])
@pytest.mark.parametrize("name", ["int4", "tq4", "levels4"])
def test_maps_and_offsets(name, maps):
    attend(batch(name, maps=maps))
    attend(batch(name, (4, 2, 1, 3), maps=maps), window=300, softcap=30.0)


@hopper_only
@pytest.mark.parametrize("queries", [(1, 1, 1, 1), VERIFY], ids=str)
def test_segments(queries):
    run(Several.make(exact("int4", LENS, 30, 16), queries, LENS, group=16, num_kv_heads=2, device="cuda"))


@hopper_only
def test_long_runs_within_a_sequence(monkeypatch):
    """More than 1,024 tiles for each consumer warpgroup: its accumulator begins anew, with what it held kept beside it."""
    monkeypatch.setattr(launch, "multiprocessors", lambda index: 1)
    b = batch("int4", (1, 2), (500_000, 100), num_kv_heads=1)
    call = b.call(max_query_len=2)
    hopper.run(call)
    check(b, (call.out, call.lse))


@hopper_only
@pytest.mark.parametrize("lens", [(1, 15, 16, 17), (63, 64, 65), (9000,), tuple(range(1, 600, 9))], ids=["tiny", "kv_tile", "one", "many"])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_lengths(lens, kv_heads):
    attend(batch("int4", (1,) * len(lens), lens, num_kv_heads=kv_heads))


@hopper_only
def test_a_captured_graph_follows_the_lengths_and_prepared_calls_their_layers():
    b = batch("int4")
    serve, call = hopper.prepare(b.call(max_query_len=1)), b.call(max_query_len=1)
    serve(call)
    check(b, (call.out, call.lse))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = b.attend(implementation="hopper", max_query_len=1)
    for lens in ((5, 33, 1, 900), (700, 1, 1, 1300)):
        b.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        check(b, result)


@hopper_only
@pytest.mark.parametrize("name", ["tq4", "int4", "none"])
def test_maxima_that_rise(name):
    b = batch(name, (1,), (3000,), device="cpu")
    rise(b)
    tensors = {f.name: getattr(b, f.name) for f in dataclasses.fields(b)}
    on_device = batch(name, (1,), (3000,))
    on_device.cache.buffer.copy_(tensors["cache"].buffer)
    on_device.q.copy_(b.q)
    attend(on_device)


@hopper_only
def test_queries_of_any_strides():
    b = batch("int4", VERIFY)
    wider = torch.cat([b.q, torch.full_like(b.q, float("nan"))], 2)
    attend(dataclasses.replace(b, q=wider[:, :, : b.q.shape[2]]))
