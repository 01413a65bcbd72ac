"""The Hopper kernels at other head sizes, keys and values of two sizes, and pages of 8: on a Hopper GPU against float64 over the
dequantized cache, and bytes against the reference's; anywhere, the rule that says what is served."""

import math

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, available_formats, get_format
from quantkv.calls import WriteCall
from quantkv.implementations.hopper import attend, geometry, write
from quantkv.implementations.hopper.decode import wgmma
from quantkv.implementations.hopper.decode.warps import CallShape
from quantkv.testing import POISON, SampleBatch, check, rows

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
LENS = (700, 33, 1, 1300)  # ragged: several splits, part of a page, one token
ONE, FEW = (1, 1, 1, 1), (2, 4, 1, 3)
# One format of each family and width, as keys and as values, but those that take powers of two alone.
ANY_SIZE = ["int8", "fp8_token", "int4", "k8v4", "tq_k8v4", *(f"levels{bits}" for bits in (2, 3, 4, 5, 6, 8)), "fp8_token/levels3", "none"]
POWERS_OF_TWO = ["int2", "tq4", "tq3", "int2/tq4", "trellis2", "int8/trellis2"]
PAIRS = [(192, 128), (128, 192), (64, 128), (256, 64), (48, 512), (80, 240), (512, 128)]


def batch(name, queries=ONE, lens=LENS, **arguments):
    plain = {"num_kv_heads": 8, "group": 4, "dtype": torch.bfloat16, "device": "cuda"}
    return SampleBatch.make(name, queries, lens, **{**plain, **arguments})


def run(b, **options):
    most = int(b.cu_seqlens_q.diff().max())
    result, again = (b.attend(implementation="hopper", max_query_len=most, **options) for _ in range(2))
    check(b, result, **options)
    assert all(torch.equal(x, y) for x, y in zip(result, again)), "two runs of one input differ"


# Each case compiles a kernel or two, for seconds: not all with all.
@hopper_only
@pytest.mark.parametrize("head_size", geometry.HEAD_SIZES)
def test_head_sizes(head_size):
    run(batch("int4", head_size=head_size))
    run(batch("int4", FEW, head_size=head_size, dtype=torch.float16), window=500, softcap=20.0)


@hopper_only
@pytest.mark.parametrize("name", ANY_SIZE)
@pytest.mark.parametrize("head_size", [80, 96, 512])
def test_formats(name, head_size):
    run(batch(name, FEW, head_size=head_size), window=500)


@hopper_only
@pytest.mark.parametrize("name", POWERS_OF_TWO)
@pytest.mark.parametrize("head_size", [64, 512])
def test_powers_of_two(name, head_size):
    run(batch(name, FEW, head_size=head_size), window=500)


@hopper_only
@pytest.mark.parametrize("name", ["trellis2", "trellis2/int4"])
def test_whole_chains(name):
    run(batch(name, head_size=192))


@hopper_only
@pytest.mark.parametrize("sizes", PAIRS, ids=str)
def test_two_sizes(sizes):
    for queries in (ONE, FEW):
        run(batch("int4", queries, head_size=sizes[0], head_size_v=sizes[1]), window=300)


@hopper_only
@pytest.mark.parametrize("name", ["int8", "levels4", "levels3/int4", "tq_k8v4", "none"])
def test_two_sizes_of_other_formats(name):
    run(batch(name, head_size=192, head_size_v=128))


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "int2", "tq4", "tq3", "levels4", "trellis2", "none"])
def test_pages_of_8(name):
    run(batch(name, block_size=8, head_size=128))
    run(batch(name, (8, 8, 1, 8), head_size=64, block_size=8), window=200)


@hopper_only
@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("shape", [dict(head_size=96), dict(head_size=512), dict(head_size=80, block_size=8)], ids=str)
def test_groups(shape, group):
    run(batch("int4", (8, 3, 1, 5), num_kv_heads=2, group=group, **shape))


@hopper_only
@pytest.mark.parametrize("seed", range(12))
def test_random_lengths(seed):
    """Of sequences, of pages and of windows, at random sizes."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    lens = tuple(torch.randint(1, 3000, (one_of(range(1, 40)),), generator=generator).tolist())
    queries = tuple(min(n, one_of(range(1, 5))) for n in lens)
    shape = dict(head_size=one_of(geometry.HEAD_SIZES), head_size_v=one_of(geometry.HEAD_SIZES), block_size=one_of(geometry.READ_PAGES))
    b = batch(one_of(ANY_SIZE), queries, lens, num_kv_heads=one_of(range(1, 5)), group=one_of(range(1, 9)), seed=seed, **shape)
    run(b, window=one_of((0, 0, 100, 1000)))


@hopper_only
@pytest.mark.parametrize("name", ["int4", "int8", "levels5"])
@pytest.mark.parametrize("head_size", [48, 80, 96, 512])
def test_matrices_and_offsets(name, head_size):
    run(batch(name, FEW, head_size=head_size, maps=maps(8, head_size)), window=300, softcap=30.0)


@hopper_only
@pytest.mark.parametrize("name", ANY_SIZE)
@pytest.mark.parametrize("sizes", [(80, 48), (192, 112), (512, 512)], ids=str)
def test_bytes(name, sizes):
    for dtype in (torch.bfloat16, torch.float16):
        spec = get_format(name, dtype).cache_spec(8, *sizes, 16)
        expected, cache = (PagedCache(spec, 8, device) for device in ("cpu", "cuda"))
        key, value = rows(100, 8, sizes[0], dtype), rows(100, 8, sizes[1], dtype, 1)
        slots = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:100]
        slots[[7, 50]] = torch.tensor([-1, -5])
        for c in (expected, cache):
            c.buffer.fill_(POISON)
        expected.write(key, value, slots)
        cache.write(key.cuda(), value.cuda(), slots.cuda(), implementation="hopper")
        moved = 0 if cache.format.k.map == "none" == cache.format.v.map else 4 + 1e-4 * expected.buffer.numel()  # sums in another order
        assert (cache.buffer.cpu() != expected.buffer).sum() <= moved


def maps(heads, head_size):
    """A matrix for each head and side, and a mean of the keys."""
    generator = torch.Generator().manual_seed(1)
    sides = []
    for key_mean in (torch.randn(5, heads, head_size, generator=generator), None):
        a = torch.linalg.qr(torch.randn(heads, head_size, head_size, generator=generator, dtype=torch.float64))[0]
        a = a * (1 + torch.rand(heads, 1, head_size, generator=generator))
        sides.append(LinearMap(a.float(), torch.linalg.inv(a).float(), key_mean))
    return LayerMaps(*sides)


def reason(name, head_size, head_size_v=None, block_size=16):
    """Why a read and why a write of such a cache is refused."""
    b = SampleBatch.make(name, (1,), (20,), head_size=head_size, head_size_v=head_size_v, block_size=block_size, dtype=torch.bfloat16)
    c = b.cache
    call = WriteCall(b.key, b.value, c.k, c.v, c.format, b.slots, c.maps)
    return attend._unsupported(b.call(max_query_len=1)), write._unsupported(call)


def test_what_is_served():
    """Multiples of 16 from 48 to 256, and 512, of keys and of values; nothing between, below or above."""
    fmt, sizes = get_format("levels3/int4"), range(8, 600, 8)
    served = {*range(48, 257, 16), 512}
    for of in (lambda size: (size, 128), lambda size: (128, size)):
        assert {size for size in sizes if geometry.unreadable(fmt, *of(size), 16) is None} == served
        assert {size for size in sizes if geometry.unwritable(fmt, *of(size), 16, False) is None} == served
    for name in ("int4", "levels3"):
        assert reason(name, 80) == reason(name, 192, 128) == reason(name, 512) == reason(name, 128, block_size=8) == (None, None)
        assert all(why == "head_size 264: multiples of 16 from 48 to 256, and 512" for why in reason(name, 264))
        assert all("head_size_v 40:" in why for why in reason(name, 192, 40))
        assert reason(name, 128, block_size=24) == ("block_size 24: one of 8, 16, 32, 64, 128", None)


def test_what_is_chosen_by_errors():
    """Rows of whole chains are read; those that are searched for are written at three sizes, K and V alike."""
    assert reason("trellis2", 192)[0] is None and "multiples of 64 from 64 to 256" in reason("trellis2", 80)[0]
    for sizes in ((192, 192), (128, 64)):
        assert f"head_size {sizes[0]}, head_size_v {sizes[1]}: both one of 64, 128, 256" in reason("trellis2", *sizes)[1]
    assert reason("trellis2", 256) == (None, None)


def test_every_geometry_has_a_configuration():
    """For each codec and either kernel, in the shared memory that there is, where two blocks have no room: a ring of a tile more than a
    step takes."""
    codecs = {c.name: c for name in available_formats() for c in (get_format(name).k, get_format(name).v) if c.hopper is not None}
    keys, values = ([c for c in codecs.values() if getattr(c.hopper(), use)] for use in ("keys", "values"))
    for key in keys:
        for value in values:
            for head_size, head_size_v in (*((size, size) for size in (48, 80, 112, 160, 192, 512)), *PAIRS):
                if key.hopper().dimensions(head_size) * key.row.code_bits % 8 or head_size % key.hopper().step:
                    continue
                for packed_rows in (4, 32, 128):
                    for map_ in ("NO_MAP", "MATRIX"):
                        sizes = (head_size, head_size_v, 4, 8, 16, 1024)
                        shape = CallShape(key, value, *sizes, True, packed_rows, False, map_, map_, map_ == "MATRIX")
                        chosen = wgmma.choose(shape)
                        assert chosen.warps >= 2 and chosen.stages >= chosen.tiles_per_step + 1, chosen
                        assert chosen.shared_bytes + 1024 <= 228 * 1024 < 2 * (chosen.shared_bytes + 1024), chosen
                        assert chosen.beside_ring % 16 == 0, chosen
                        assert chosen.key_dimensions >= head_size and math.gcd(chosen.tile_bytes, 16) == 16
