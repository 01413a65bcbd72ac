"""The Hopper write kernel: on a Hopper GPU its bytes against the reference's; anywhere, the rule that says when it runs."""

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, available_formats, get_format
from quantkv.calls import WriteCall
from quantkv.implementations.hopper import write as hopper
from quantkv.implementations.hopper.write import CHUNK, Hadamard
from quantkv.maps import default_map, rht_signs
from quantkv.testing import POISON, rows

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper_only = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
PAIRS = {name: (get_format(name).k.hopper, get_format(name).v.hopper) for name in available_formats()}
FORMATS = [name for name, pair in PAIRS.items() if None not in pair]
# Share of bytes that may differ: a sum that rounds otherwise moves a code across a boundary, or the last bit of a scale.
ROTATED = 1e-4


def caches(name, head_size, blocks, heads=8, block_size=16, scale=1.0):
    """The same poisoned cache on the CPU and on the GPU."""
    spec = get_format(name).cache_spec(heads, head_size, block_size=block_size)
    found = [PagedCache(spec, blocks, device, k_scale=scale, v_scale=scale) for device in ("cpu", "cuda")]
    for cache in found:
        cache.buffer.fill_(POISON)
    return found


def assert_same(cache, expected, moved=4):
    """Every byte, those that nothing wrote included, but for the share that rotation may move, and `moved` more."""
    got = cache.buffer.cpu()
    for (offset, size), codec in zip(cache.spec.sections, (cache.format.k, cache.format.v) * 2):
        ours, right = (t[:, :, offset : offset + size] for t in (got, expected.buffer))
        assert (ours != right).sum() <= (moved + ROTATED * right.numel() if codec.map != "none" else 0)


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes(name, head_size, dtype):
    expected, cache = caches(name, head_size, 8, scale=0.37 if name in ("fp8", "fp8_e5m2") else 1.0)
    key, value = rows(100, 8, head_size, dtype), rows(100, 8, head_size, dtype, 1)
    slots = torch.randperm(128)[:100]
    slots[[7, 50, 99]] = torch.tensor([-1, -5, -(2**40)])
    expected.write(key, value, slots)
    cache.write(key.cuda(), value.cuda(), slots.cuda(), implementation="hopper")
    assert_same(cache, expected)


@hopper_only
@pytest.mark.parametrize("tokens", [1, 8, 63, 64, 8192])
@pytest.mark.parametrize("name", ["bf16", "int4", "int8/tq3", "tq4"])
def test_any_number_of_tokens(name, tokens):
    expected, cache = caches(name, 128, tokens // 16 + 1, heads=2)
    key, value = torch.randn(2, tokens, 2, 128).bfloat16()
    slots = torch.randperm(16 * (tokens // 16 + 1))[:tokens]
    expected.write(key, value, slots)
    cache.write(key.cuda(), value.cuda(), slots.cuda(), implementation="hopper")
    assert_same(cache, expected)


@hopper_only
@pytest.mark.parametrize("block_size", [8, 24, 64, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_pages_strides_and_slots(block_size, heads):
    """Rows inside a fused projection, int32 slots, pages of any size, an odd number of heads."""
    expected, cache = caches("int4", 128, 5, heads, block_size)
    fused = torch.randn(30, 3, heads, 128).half()
    slots = torch.randperm(5 * block_size)[:30].int()
    expected.write(fused[:, 1], fused[:, 2], slots)
    fused = fused.cuda()
    cache.write(fused[:, 1], fused[:, 2], slots.cuda(), implementation="hopper")
    assert_same(cache, expected)


@hopper_only
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("name", ["int4", "int2/int8", "tq3"])
def test_key_means(name, heads):
    """Of each head or of all; positions beyond the table take its last row."""
    spec, map_ = get_format(name).cache_spec(8, 128), default_map(get_format(name).k, 128)
    maps = LayerMaps(k=LinearMap(map_.forward, map_.inverse, 4 * torch.randn(3, heads, 128)))
    expected, cache = (PagedCache(spec, 8, device, maps=maps) for device in ("cpu", "cuda"))
    for dtype in (torch.int32, torch.int64):
        key, value = torch.randn(2, 100, 8, 128).bfloat16()
        slots, positions = torch.randperm(128)[:100], torch.randint(0, 300, (100,), dtype=dtype)
        expected.write(key, value, slots, positions)
        cache.write(key.cuda(), value.cuda(), slots.cuda(), positions.cuda(), implementation="hopper")
        # The key mean is taken off before the map in the reference and after it here: sums that differ by 2^-21 of their size round to
        # another bfloat16 in one of 2^12 numbers, and each moves two bytes of its row's scale.
        assert_same(cache, expected, 4 + 2 * 2**-12 * key.numel())


@hopper_only
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("name", ["levels2", "levels3", "levels4", "levels5", "levels6", "levels8", "levels4/int2"])
def test_keys_without_their_offset(name, head_size):
    """The same keys as the reference's; the rows that are read do not show which sum was rounded in which order."""
    spec, map_ = get_format(name).cache_spec(8, head_size), default_map(get_format(name).k, head_size)
    key_mean = 2.4 / head_size**0.5 * torch.randn(3, 8, head_size, generator=torch.Generator().manual_seed(0))
    maps = LayerMaps(k=LinearMap(map_.forward, map_.inverse, key_mean))
    expected, cache = (PagedCache(spec, 8, device, maps=maps) for device in ("cpu", "cuda"))
    key, value = torch.randn(2, 100, 8, head_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots, positions = torch.randperm(128)[:100], torch.randint(0, 300, (100,))
    expected.write(key, value, slots, positions)
    cache.write(key.cuda(), value.cuda(), slots.cuda(), positions.cuda(), implementation="hopper")
    scales, right = (c.k.meta.cpu()[slots // 16, slots % 16] for c in (cache, expected))
    assert 0.05 < (right < 0).float().mean() < 0.95 and torch.equal(scales < 0, right < 0)
    assert_same(cache, expected)


@hopper_only
@pytest.mark.parametrize("name", ["int8", "fp8_token", "int4", "int2", "tq4", "tq3", "levels2", "levels4", "levels6"])
def test_rows_that_break_quantizers(name):
    """Tiny, large and one-sided rows keep their bytes; a row with infinities spoils no other."""
    expected, cache = caches(name, 128, 2)
    key, value = rows(32, 8, 128, torch.bfloat16), rows(32, 8, 128, torch.bfloat16, 1)
    for x in (key, value):
        x[10] *= 1e-20
        x[11] *= 1e3
        x[12] = -0.0
        x[13, :, 64:] = 0
    slots = torch.arange(32)
    expected.write(key, value, slots)
    key[20, :, 3] = float("inf")
    cache.write(key.cuda(), value.cuda(), slots.cuda(), implementation="hopper")
    for at, c in ((slice(0, 1), 0), (slice(1, 2), 1)):  # the page of the spoiled row: its slot is taken from the reference
        for ours, right in ((cache.k, expected.k), (cache.v, expected.v)):
            for a, b in ((ours.codes, right.codes), (ours.meta, right.meta)):
                if c and a is not None:
                    a[at, 4] = b[at, 4].to(a.device)
    assert_same(cache, expected)


@hopper_only
def test_auto_takes_it_and_triton_serves_the_rest():
    _, cache = caches("int4", 128, 2)
    key = torch.randn(4, 8, 128, device="cuda").bfloat16()
    slots = torch.arange(4, device="cuda")
    cache.write(key, key, slots, implementation="hopper")
    expected = cache.buffer.clone()
    cache.buffer.fill_(POISON)
    cache.write(key, key, slots)
    assert torch.equal(cache.buffer, expected)
    cache.write(key.float(), key.float(), slots)  # float32 rows: by Triton
    with pytest.raises(ValueError, match="implementation='hopper': key of"):
        cache.write(key.float(), key.float(), slots, implementation="hopper")
    by_auto = cache.buffer.clone()
    cache.write(key.float(), key.float(), slots, implementation="triton")
    assert torch.equal(cache.buffer, by_auto)


@hopper_only
def test_prepared_launches_serve_every_layer():
    """Other caches, rows, maps of one kind and scales; what was compiled for another kind is refused."""
    for name, scales in (("int4", (1.0, 1.0)), ("fp8", (0.37, 2.5))):
        serve = None
        for layer, scale in enumerate(scales):
            expected, cache = caches(name, 128, 2, scale=scale)
            key, value = rows(20, 8, 128, torch.bfloat16, layer), rows(20, 8, 128, torch.bfloat16, layer + 7)
            slots = torch.arange(20)
            expected.write(key, value, slots)
            call = WriteCall(key.cuda(), value.cuda(), cache.k, cache.v, cache.format, slots.cuda(), cache.maps)
            serve = serve or hopper.prepare(call)
            serve(call)
            assert_same(cache, expected)
    other = call.with_tensors(call.key, call.value, call.k._replace(scale=1.0), call.v, call.maps)
    with pytest.raises(ValueError, match="scales: of another kind"):
        serve(other)


@hopper_only
@pytest.mark.parametrize("name", ["int4", "tq3"])
def test_a_captured_graph_writes_where_the_slots_say(name):
    expected, cache = caches(name, 128, 4)
    key, value = torch.randn(2, 20, 8, 128).bfloat16()
    given = [t.cuda() for t in (key, value, torch.arange(20))]
    cache.write(*given, implementation="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.write(*given, implementation="hopper")
    cache.buffer.fill_(POISON)
    slots = torch.randperm(64)[:20]
    given[2].copy_(slots)
    graph.replay()
    expected.write(key, value, slots)
    assert_same(cache, expected)


def refusal(name, maps=None, **shape):
    shape = {"tokens": 4, "heads": 2, "head_size": 128, "dtype": torch.bfloat16, **shape}
    cache = PagedCache(get_format(name).cache_spec(shape["heads"], shape["head_size"], shape.get("head_size_v")), 1, maps=maps)
    make = lambda size: torch.randn(shape["tokens"], shape["heads"], size).to(shape["dtype"])
    key, value = make(shape["head_size"]), make(shape.get("head_size_v", shape["head_size"]))
    return hopper._unsupported(WriteCall(key, value, cache.k, cache.v, cache.format, torch.arange(4), cache.maps))


def test_what_the_rule_refuses():
    matrix = torch.linalg.qr(torch.randn(1, 128, 128))[0].contiguous()
    assert refusal("int4") is None
    assert "Hadamard" in refusal("int4", maps=LayerMaps(k=LinearMap(matrix, matrix.mT.contiguous())))
    own = default_map(get_format("int4").k, 128)
    for steps, why in ((0.5, None), (2.0**-12, None), (0.75, "Hadamard"), (2.0, "Hadamard"), (2.0**-13, "Hadamard")):
        evened = torch.ones(2, 1, 128)
        evened[1, 0, 5] = steps
        reason = refusal("int4", maps=LayerMaps(k=LinearMap(own.forward * evened, own.inverse / evened.mT)))
        assert reason is None if why is None else why in reason
    assert "float32" in refusal("int8", dtype=torch.float32)
    assert "head_size 40:" in refusal("int8", head_size=40) and "head_size_v 520:" in refusal("int8", head_size_v=520)
    assert "no code for Hopper" in refusal("fp32")


def test_elsewhere_it_is_refused_by_name():
    cache = PagedCache(get_format("int4").cache_spec(2, 128), 1)
    key = torch.randn(4, 2, 128).bfloat16()
    with pytest.raises(ValueError, match="implementation='hopper': tensors are on cpu: a Hopper GPU is needed"):
        cache.write(key, key, torch.arange(4), implementation="hopper")


@pytest.mark.parametrize("head_size", [64, 80, 128, 160, 256, 512])
def test_signs_as_the_lanes_read_them(head_size):
    """Lane c's number e is dimension 4 (e - e % CHUNK) + CHUNK c + e % CHUNK; its sign is a bit of the lane's words."""
    signs = rht_signs(head_size).float()
    words = Hadamard.of(1.0, signs).signs.long() & 0xFFFFFFFF
    signs = torch.nn.functional.pad(signs, (0, -head_size % 32), value=1.0)  # what is no dimension has no sign
    for c in range(4):
        for e in range(len(signs) // 4):
            word, pair = words[c, e // 32], e // 2 % 16
            flipped = word >> (15 + 16 * (e % 2) - pair) & 1
            assert signs[4 * (e - e % CHUNK) + CHUNK * c + e % CHUNK] == 1 - 2 * flipped
    assert Hadamard.of(1.0, torch.ones(head_size)).signs is None


@pytest.mark.parametrize("name, head_size", [("int4", 128), ("int2", 128), ("tq3", 128), ("int4", 80), ("levels4", 96)])
def test_the_maps_of_the_formats_are_hadamard(name, head_size):
    codec = get_format(name).k
    found = hopper.hadamard_of(default_map(codec, head_size), 2, torch.bfloat16)
    assert found.factor == default_map(codec, head_size).forward.abs().max()
    assert (found.signs is None) == (codec.map != "rht")


@hopper_only
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("name", ["five_bits", "five_bits/int4", "int8/five_bits"])
def test_bytes_of_a_format_outside_the_package(name, head_size, five):
    test_bytes(name, head_size, torch.bfloat16)
