"""The Hopper kernels, their sources run on a CPU: what they compute, before a GPU sees them."""

import pytest
import torch

from hopper_on_cpu import AVAILABLE, Device, available
from quantkv import LayerMaps, LinearMap, PagedCache, get_format
from quantkv.calls import WriteCall
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.decode import warps, wgmma
from quantkv.maps import default_map
from quantkv.testing import OUTPUT_BUDGET, POISON, SampleBatch, check, relative_error, rows
from segments import evened

pytestmark = [pytest.mark.skipif(not AVAILABLE, reason="needs g++"), pytest.mark.usefixtures("five")]
LENS = (300, 33, 1, 500)
DECODE, VERIFY, WIDE = (1, 1, 1, 1), (2, 4, 1, 3), (8, 8, 1, 8)


def attend(monkeypatch, folder, name, queries=DECODE, lens=LENS, multiprocessors=2, max_tiles=1024, options=None, **shape):
    device = Device(monkeypatch, folder, multiprocessors, max_tiles)
    b = SampleBatch.make(name, queries, lens, **{"head_size": 128, "num_kv_heads": 2, "group": 4, "dtype": torch.bfloat16, **shape})
    call = b.call(max_query_len=max(queries), **(options or {}))
    device.serve(call)
    check(b, (call.out, call.lse), **(options or {}))


LEVELS = ["levels2", "levels3", "levels4", "levels5", "levels6", "levels8", "levels3/int4", "int2/levels2", "levels5/levels2"]
READ = ["int8/int2", "int4", "int2/tq4", "tq_k8v4", "tq4", "tq3", "fp8_token", "five_bits", "five_bits/int8", *LEVELS]
READ += ["trellis2", "int8/trellis2", "tq3/trellis2", "trellis2/int4"]


@pytest.mark.parametrize("ci, expected", [(None, False), ("false", False), ("true", True)])
def test_without_a_compiler_none_is_skipped_in_continuous_integration(ci, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    assert available() is expected
    if expected:
        with pytest.raises(FileNotFoundError, match=r"g\+\+"):
            attend(monkeypatch, tmp_path, "int4", group=5, num_kv_heads=1, head_size=48)  # compiled by no other test


@pytest.mark.parametrize("name", READ)
def test_decode(name, monkeypatch, tmp_path):
    attend(monkeypatch, tmp_path, name)


@pytest.mark.parametrize(
    "queries, options", [(DECODE, {}), (VERIFY, {"window": 200}), (WIDE, {"softcap": 25.0})], ids=["one", "few", "wide"]
)
@pytest.mark.parametrize("name", ["int4", "five_bits/tq3"])
def test_stretches(name, queries, options, monkeypatch, tmp_path):
    """A run of more tiles than an accumulator may take, many times over."""
    attend(monkeypatch, tmp_path, name, queries, multiprocessors=1, max_tiles=3, options=options)


@pytest.mark.parametrize("name", ["int4", "tq4/int8", "tq3"])
def test_spare_lanes_have_nothing_of_their_own_to_copy(name, monkeypatch, tmp_path):
    """As a checker of races sees the kernels (benchmarks/small_run.py): what they are spared is copied by other lanes."""
    macros = warps.DecodeConfig.macros
    monkeypatch.setattr(warps.DecodeConfig, "macros", lambda config: {**macros(config), "SPARE_LANES_COPY": 0})
    attend(monkeypatch, tmp_path, name)


def test_sequences_that_warps_pass_over(monkeypatch, tmp_path):
    attend(monkeypatch, tmp_path, "int4", (1,) * 40, tuple(range(1, 400, 10)), multiprocessors=1, max_tiles=2, num_kv_heads=3)


@pytest.mark.parametrize(
    "shape", [dict(head_size=64), dict(head_size=256), dict(group=16), dict(num_kv_heads=3, group=6), dict(block_size=64)]
)
def test_shapes(shape, monkeypatch, tmp_path):
    attend(monkeypatch, tmp_path, "int4", multiprocessors=1, max_tiles=6, **shape)


FOUR = [  # packed query rows or fewer, which integers serve: queries of a sequence times query heads of a kv head
    ("int4", (4, 2, 1, 3), 1, {"window": 200}),
    ("int8", (2, 2, 1, 2), 2, {"softcap": 25.0}),
    ("int2", DECODE, 3, {"window": 90, "sinks": torch.linspace(-2, 2, 6)}),
    ("levels2/int8", (1, 2, 1, 2), 2, {}),
]


@pytest.mark.parametrize("name, queries, group, options", FOUR, ids=lambda x: x if isinstance(x, str) else "")
def test_integers(name, queries, group, options, monkeypatch, tmp_path):
    attend(monkeypatch, tmp_path, name, queries, options=options, group=group)


HALVED = [  # a last tile of four packed query rows, after none, one or two of eight, under parts of a Hadamard matrix, a matrix, key means
    ("levels4", (3, 2, 1, 3), {}, dict(window=200)),
    ("tq4", (5, 2, 1, 4), dict(head_size=64), dict(softcap=25.0)),
    ("fp8_token", (1, 3, 1, 2), dict(head_size=96), {}),
    ("int4", (3, 3, 1, 2), dict(head_size=192, block_size=8), dict(window=90)),
    ("int8", (3, 3, 1, 2), dict(maps="matrix"), {}),
    ("levels2", DECODE, dict(maps="matrix"), {}),
]


@pytest.mark.parametrize("name, queries, shape, options", HALVED, ids=str)
def test_half_tiles_of_packed_rows(name, queries, shape, options, monkeypatch, tmp_path):
    monkeypatch.setattr(wgmma, "choose", warps.choose)
    matrix = torch.linalg.qr(torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(1)))[0].contiguous()
    b = SampleBatch.make(name, queries, LENS, **{"head_size": 128, "num_kv_heads": 2, "group": 4, "dtype": torch.bfloat16})
    assert hopper.Plan(b.call(max_query_len=max(queries)), 2).main.config.packed_rows == 4 * max(queries)
    if "maps" in shape:
        shape = dict(maps=signed_maps(128, matrix))
    attend(monkeypatch, tmp_path, name, queries, max_tiles=6, options=options, **shape)


def by_integers(monkeypatch, folder, name, change, **shape):
    """The outputs and the right ones, of four packed query rows, after `change(q, rows)`: q [sequences, heads, D]."""
    device = Device(monkeypatch, folder, 1)
    b = SampleBatch.make(name, (1, 1), (70, 33), **{"head_size": 128, "num_kv_heads": 1, "group": 4, "dtype": torch.bfloat16, **shape})
    change(b.q)
    call = b.call(max_query_len=1)
    assert hopper.Plan(call, 1).main.config.by_integers
    device.serve(call)
    return call.out, b.oracle()[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_the_unit_of_a_packed_row_is_its_own(value, monkeypatch, tmp_path):
    """Heads of other sizes by a thousand, and beside them one that is not finite in fp16."""

    def change(q):
        q *= torch.tensor([1.0, 1e-3, 8.0, 1.0])[:, None]
        q[1, 3, 5] = value

    out, right = by_integers(monkeypatch, tmp_path, "int4", change)
    for s, head in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]:
        assert relative_error(out[s, head], right[s, head]) <= OUTPUT_BUDGET[torch.bfloat16], (s, head)


def test_the_largest_sums_of_integers(monkeypatch, tmp_path):
    """32,512 * 127 * 512 is below 2^31, and every score is then the same: each output is the mean of the values."""
    device = Device(monkeypatch, tmp_path, 1)
    b = SampleBatch.make("int8", (1,), (33,), head_size=512, num_kv_heads=1, group=4, dtype=torch.bfloat16)
    b.cache.k.codes.fill_(127), b.q.fill_(0.25)
    call = b.call(max_query_len=1)
    assert hopper.Plan(call, 1).main.config.by_integers
    device.serve(call)
    assert relative_error(call.out, b.oracle()[0]) <= OUTPUT_BUDGET[torch.bfloat16]


GEOMETRIES = [  # shares of keys and runs of values that begin in the middle of words and of chunks; parts of wide rows; small pages
    ("int8", (1, 1), dict(head_size=512, num_kv_heads=1)),
    ("int4", VERIFY, dict(head_size=192, head_size_v=128, block_size=8)),
    ("tq3", DECODE, dict(head_size=64, block_size=8)),
    ("levels5", VERIFY, dict(head_size=48, head_size_v=112)),
    ("levels2/levels3", DECODE, dict(head_size=48, head_size_v=80)),
    ("int2", DECODE, dict(head_size=64, head_size_v=128, block_size=8)),
    ("trellis2", DECODE, dict(head_size=192)),
    # Hadamard matrices smaller than a row: queries that a warp has, or a consumer warpgroup, in 8, 16 and more packed query rows; outputs
    # of any number of lanes.
    ("int4", DECODE, dict(head_size=48, head_size_v=208)),
    ("int4", DECODE, dict(head_size=192, group=12, num_kv_heads=1)),
    ("int4", VERIFY, dict(head_size=96, group=8, num_kv_heads=1)),
    ("int4", VERIFY, dict(head_size=240, head_size_v=160, group=5, num_kv_heads=1)),
    ("int4", (1, 1), dict(head_size=112, head_size_v=144)),
]


@pytest.mark.parametrize("name, queries, shape", GEOMETRIES, ids=str)
def test_geometries(name, queries, shape, monkeypatch, tmp_path):
    lens = (140, 33, 5, 210) if len(queries) == 4 else (40, 130)
    attend(monkeypatch, tmp_path, name, queries, lens, multiprocessors=1, max_tiles=6, options={"window": 90}, **shape)


@pytest.mark.parametrize("block_size", [8, 16])
def test_what_is_nobodys_is_not_seen(block_size, monkeypatch, tmp_path):
    """Rows outside of a range, some in 16 bytes with the first that is inside, are NaN; pages without a row inside are at no address."""
    device, lens = Device(monkeypatch, tmp_path, 1), (200, 33, 1, 310)
    ranges = torch.tensor([[41, 190], [9, 33], [0, 1], [250, 310]], dtype=torch.int32)
    b = SampleBatch.make("int4", DECODE, lens, head_size=80, block_size=block_size, num_kv_heads=2, group=4, dtype=torch.bfloat16)
    options = {"key_range": ranges} if block_size == 16 else {"window": 90}
    firsts = ranges[:, 0] if block_size == 16 else (torch.tensor(lens) - 90).clamp_min(0)
    pasts = ranges[:, 1] if block_size == 16 else torch.tensor(lens)
    expected = b.oracle(**options)
    for s, (first, past) in enumerate(zip(firsts.tolist(), pasts.tolist())):
        for token in {*range(lens[s])} - {*range(first, past)}:
            page, row = b.block_table[s, token // block_size], token % block_size
            for t in (b.cache.k.codes, b.cache.v.codes, b.cache.k.meta, b.cache.v.meta):
                t[page, row] = POISON if t.dtype == torch.uint8 else float("nan")
        b.block_table[s, : first // block_size] = -(2**30)
        b.block_table[s, -(-past // block_size) :] = -(2**30)
    call = b.call(max_query_len=1, **options)
    device.serve(call)
    assert relative_error(call.out, expected[0]) <= OUTPUT_BUDGET[torch.bfloat16]


@pytest.mark.parametrize("head_size, queries", [(64, DECODE), (256, DECODE), (128, VERIFY), (128, WIDE)])
def test_chains_of_a_trellis(head_size, queries, monkeypatch, tmp_path):
    """A chain is the share of four lanes, of two or of one."""
    attend(monkeypatch, tmp_path, "trellis2", queries, head_size=head_size)


SINKS = [lambda t: t.repeat_interleave(3)[::3], lambda t: t[:1].half().expand(8), torch.Tensor.bfloat16]


@pytest.mark.parametrize("make", SINKS)
def test_sinks_of_any_strides_and_dtype(make, monkeypatch, tmp_path):
    attend(monkeypatch, tmp_path, "int4", options={"sinks": make(torch.linspace(-2, 2, 8))})


@pytest.mark.parametrize("name", ["int4", "tq4", "five_bits"])
def test_matrices_and_offsets(name, monkeypatch, tmp_path):
    generator = torch.Generator().manual_seed(1)
    sides = []
    for key_mean in (torch.randn(5, 2, 128, generator=generator), None):
        a = torch.linalg.qr(torch.randn(2, 128, 128, generator=generator, dtype=torch.float64))[0]
        a = a * (1 + torch.rand(2, 1, 128, generator=generator))
        sides.append(LinearMap(a.float(), torch.linalg.inv(a).float(), key_mean))
    attend(monkeypatch, tmp_path, name, VERIFY, maps=LayerMaps(*sides), max_tiles=4, options={"window": 300, "softcap": 30.0})


EVENED = [  # queries, shape, options: in registers, of three groups of packed rows, by chunks, spilled, by wgmma, unsplit or not
    (DECODE, {}, {"sinks": torch.linspace(-2, 2, 8)}),
    (VERIFY, dict(dtype=torch.float16, block_size=32), {"window": 300, "softcap": 30.0}),
    ((3, 2, 1, 3), dict(head_size=96), {}),
    (DECODE, dict(head_size=80, head_size_v=176), {}),
    (DECODE, dict(head_size=256, group=16, num_kv_heads=1), {}),
    (WIDE, dict(head_size=64), {}),
]


@pytest.mark.parametrize("multiprocessors", [1, 16])
@pytest.mark.parametrize("queries, shape, options", EVENED, ids=str)
@pytest.mark.parametrize("name", ["levels4", "int8/int4"])
def test_hadamard_matrices_and_steps(name, queries, shape, options, multiprocessors, monkeypatch, tmp_path):
    """Of each head its own, as presets have them: no matrix is read, and calls may be unsplit."""
    heads, size = shape.get("num_kv_heads", 2), shape.get("head_size", 128)
    buckets = 5 if name == "levels4" else None
    maps = LayerMaps(evened(size, heads, buckets).k, evened(shape.get("head_size_v", size), heads).v)
    usual = {"head_size": 128, "num_kv_heads": 2, "group": 4, "dtype": torch.bfloat16}
    b = SampleBatch.make(name, queries, LENS, **{**usual, **shape}, maps=maps)
    config = hopper.Plan(b.call(max_query_len=max(queries)), multiprocessors).main.config
    assert (config.key_map, config.value_map, config.by_integers) == ("EVENED", "EVENED", False)
    attend(monkeypatch, tmp_path, name, queries, multiprocessors=multiprocessors, options=options, maps=maps, **shape)


def signed_maps(head_size, matrix=None):
    """Of both sides, and key means with which some keys are shorter, and some are not."""
    plain = default_map(get_format("levels4").k, head_size)
    forward, inverse = (plain.forward, plain.inverse) if matrix is None else (matrix, torch.linalg.inv(matrix.double()).float())
    key_mean = 2.4 / head_size**0.5 * torch.randn(5, 2, head_size, generator=torch.Generator().manual_seed(0))
    return LayerMaps(LinearMap(forward, inverse, key_mean), plain)


@pytest.mark.parametrize(
    "queries, options", [(DECODE, {}), (VERIFY, {"window": 300, "softcap": 30.0}), (WIDE, {})], ids=["1", "few", "wide"]
)
@pytest.mark.parametrize("name", ["levels4", "levels5/int4", "trellis2"])
def test_keys_that_are_stored_without_their_offset(name, queries, options, monkeypatch, tmp_path):
    attend(monkeypatch, tmp_path, name, queries, maps=signed_maps(128), max_tiles=4, options=options)


def test_keys_without_their_offset_under_any_matrix(monkeypatch, tmp_path):
    matrix = torch.linalg.qr(torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(1)))[0].contiguous()
    attend(monkeypatch, tmp_path, "levels2", VERIFY, maps=signed_maps(128, matrix), max_tiles=4)


WRITTEN = ["bf16", "fp8", "fp8_token", "int8", "int4", "int2", "tq4", "tq3", "five_bits", "five_bits/int4", *LEVELS[:6], "levels6/levels3"]
WRITTEN += ["trellis2", "int8/trellis2", "trellis2/levels4"]
SIZED = [(name, 128, torch.bfloat16) for name in WRITTEN]  # pairs, whose sides are written one by one, at this size alone
SIZED += [(name, *how) for name in WRITTEN if "/" not in name for how in ((64, torch.float16), (256, torch.bfloat16))]


@pytest.mark.parametrize("name, head_size, dtype", SIZED, ids=str)
def test_bytes(name, head_size, dtype, monkeypatch, tmp_path):
    """The specification's, all of them, but for what the order of a norm's additions may move."""
    scale = 0.37 if name == "fp8" else 1.0
    caches = [PagedCache(get_format(name).cache_spec(2, head_size), 5, k_scale=scale, v_scale=scale) for _ in range(2)]
    write(caches, monkeypatch, tmp_path, dtype)


WRITTEN_SIZES = [("int4", 80, 96), ("levels3", 112, 48), ("levels2", 144, 144), ("tq_k8v4", 192, 80), ("int4", 512, 512)]
WRITTEN_SIZES += [("int4+bf16", 512, 64), ("levels4+bf16", 512, 64), ("int4+int8", 512, 64)]  # latents


@pytest.mark.parametrize("name, head_size, head_size_v", WRITTEN_SIZES)
def test_bytes_of_other_sizes(name, head_size, head_size_v, monkeypatch, tmp_path):
    caches = [PagedCache(get_format(name).cache_spec(2, head_size, head_size_v, 8), 10) for _ in range(2)]
    write(caches, monkeypatch, tmp_path, torch.bfloat16)


@pytest.mark.parametrize("name, head_size", [("levels4", 128), ("levels4", 80), ("levels8", 64), ("levels5/int8", 256), ("trellis2", 128)])
def test_bytes_of_keys_without_their_offset(name, head_size, monkeypatch, tmp_path):
    caches = [PagedCache(get_format(name).cache_spec(2, head_size), 5, maps=signed_maps(head_size)) for _ in range(2)]
    write(caches, monkeypatch, tmp_path, torch.bfloat16, torch.arange(45) * 6)
    scales = caches[0].k.meta.view(torch.int16)[caches[0].k.meta.isfinite()]
    assert 0.1 < (scales < 0).float().mean() < 0.9


@pytest.mark.parametrize("heads", [1, 2])
def test_bytes_with_offsets(heads, monkeypatch, tmp_path):
    plain = default_map(get_format("int4").k, 128)
    key_mean = 4 * torch.randn(3, heads, 128, generator=torch.Generator().manual_seed(0))
    maps = LayerMaps(k=LinearMap(plain.forward, plain.inverse, key_mean))
    caches = [PagedCache(get_format("int4").cache_spec(2, 128), 5, maps=maps) for _ in range(2)]
    write(caches, monkeypatch, tmp_path, torch.bfloat16, torch.arange(45) * 6)


def write(caches, monkeypatch, folder, dtype, positions=None):
    expected, cache = caches
    heads, head_size = cache.spec.num_kv_heads, cache.spec.head_size
    key, value = rows(45, heads, head_size, dtype), rows(45, heads, cache.spec.head_size_v, dtype, 1)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(3))[:45]
    slots[[7, 20]] = torch.tensor([-1, -5])
    for c in caches:
        c.buffer.fill_(POISON)
    expected.write(key, value, slots, positions, implementation="reference")
    call = WriteCall(key, value, cache.k, cache.v, cache.format, slots, cache.maps, positions)
    Device(monkeypatch, folder).serve(call)
    rotated = 1e-4 * cache.buffer.numel() if cache.format.k.map != "none" else 0  # the order of a sum's additions moves few codes
    assert (cache.buffer != expected.buffer).sum() <= rotated


@pytest.mark.parametrize("dtype, size", [(torch.float16, 65504.0), (torch.bfloat16, 2.0**66)], ids=str)
@pytest.mark.parametrize(
    "name", ["int8", "fp8_token", "int4", "int2", "tq4", "tq3", "five_bits", "levels2", "levels5", "levels8", "trellis2"]
)
def test_finite_rows_are_stored_as_finite_ones(name, dtype, size, monkeypatch, tmp_path):
    """Rows of the largest fp16 number, whose rotation no fp16 holds, and of 2^66, whose squares no float32 holds."""
    cache = PagedCache(get_format(name).cache_spec(2, 128), 2)
    key = rows(20, 2, 128, dtype)
    key[10:] = size
    key[11] *= torch.where(torch.arange(128) % 3 > 0, 1.0, -1.0).to(dtype)
    slots = torch.arange(20)
    call = WriteCall(key, key, cache.k, cache.v, cache.format, slots, cache.maps)
    Device(monkeypatch, tmp_path).serve(call)
    for side, codec in ((cache.k, cache.format.k), (cache.v, cache.format.v)):
        codes, meta = (t.flatten(0, 1)[:20] for t in (side.codes, side.meta))
        assert meta.isfinite().all() and codec.dequantize(codes, meta, torch.float64).isfinite().all()
