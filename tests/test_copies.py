"""Formats, codecs and caches pickled and copied: formats and codecs by name, caches with their bytes, maps and scales."""

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch

from quantkv import Format, LayerMaps, LinearMap, PagedCache, available_formats, get_format
from quantkv.format import register, unregister

DUPLICATES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}


@pytest.fixture(params=DUPLICATES)
def duplicate(request):
    return DUPLICATES[request.param]


def test_a_format_and_its_codecs_are_themselves(format_name, duplicate):
    fmt = get_format(format_name)
    for thing in (fmt, fmt.k, fmt.v):
        assert duplicate(thing) is thing and copy.copy(thing) is thing


def test_pairs_have_names_too(duplicate):
    assert duplicate(get_format("int8/int4")) == get_format("int8/int4")


def test_another_process_knows_what_a_pickle_names():
    things = [get_format("int8/int4"), get_format("tq4"), get_format("k4v2").v]
    code = "import pickle, sys; print(*(x.name for x in pickle.load(sys.stdin.buffer)))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(things), capture_output=True, check=True)
    assert done.stdout.decode().split() == [thing.name for thing in things]


def test_what_is_not_registered_cannot_be_pickled():
    codec = dataclasses.replace(get_format("int8").k, name="mine")
    fmt = Format("mine", codec, codec)
    other = dataclasses.replace(get_format("int8"), k=codec)  # a registered one's name, but not that one
    for thing, name in ((codec, "codec='mine'"), (fmt, "format='mine'"), (other, "format='int8")):
        with pytest.raises(ValueError, match=f"{name}.*register"):
            pickle.dumps(thing)
        assert copy.deepcopy(thing) is thing
    register(fmt)
    pickled = [pickle.dumps(thing) for thing in (codec, fmt)]
    assert [pickle.loads(data) for data in pickled] == [codec, fmt]
    unregister("mine")
    for data in pickled:
        with pytest.raises(ValueError, match="'mine' is unknown here: import what registers it"):
            pickle.loads(data)


def test_codecs_have_names_of_their_own():
    codecs = [codec for fmt in map(get_format, available_formats()) for codec in (fmt.k, fmt.v)]
    by_name = {codec.name: codec for codec in codecs}
    assert all(by_name[codec.name] is codec for codec in codecs)


def rows(n, seed=0):
    return torch.randn(n, 2, 64, generator=torch.Generator().manual_seed(seed))


def attention(cache):
    batch = dict(block_table=torch.tensor([[4, 1, 0]]), seq_lens=torch.tensor([40]))
    return cache.attend(rows(1, 7).repeat(1, 2, 1), **batch)


def test_a_cache_goes_on_without_its_copy(format_name, duplicate):
    cache = PagedCache(get_format(format_name).cache_spec(2, 64), 6)
    cache.write(rows(80), rows(80, 1), torch.arange(80))
    before, again = attention(cache), duplicate(cache)
    assert type(again) is PagedCache and again.spec == cache.spec and torch.equal(again.buffer, cache.buffer)
    again.write(rows(80, 2), rows(80, 3), torch.arange(80))
    assert torch.equal(attention(cache), before) and not torch.equal(attention(again), before)
    cache.write(rows(80, 2), rows(80, 3), torch.arange(80))
    assert torch.equal(cache.buffer, again.buffer) and torch.equal(attention(cache), attention(again))


def test_maps_and_scales_go_along(duplicate):
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator))[0].contiguous()
    key_mean = torch.randn(3, 2, 64, generator=generator)
    maps = LayerMaps(k=LinearMap(turn, turn.mT.contiguous(), key_mean), v=LinearMap(turn.mT.contiguous(), turn))
    cache = PagedCache(get_format("int8").cache_spec(2, 64), 6, maps=maps, k_scale=2.0, v_scale=0.5)
    cache.write(rows(80), rows(80, 1), torch.arange(80), torch.arange(80))
    again = duplicate(cache)
    assert again.maps.fingerprint() == cache.maps.fingerprint() and (again.k.scale, again.v.scale) == (2.0, 0.5)
    assert torch.equal(attention(again), attention(cache))


def test_a_map_is_moved_to_a_device_once(duplicate):
    turn = torch.linalg.qr(torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0)))[0].contiguous()
    here = LinearMap(turn, turn.mT.contiguous(), hessian=torch.eye(64)[None])
    assert here.to("cpu") is here
    with torch.inference_mode():
        there = here.to("meta")
    assert there.forward.device.type == "meta" and not there.forward.is_inference()
    assert here.to(torch.device("meta")) is there and there.to("meta") is there
    caches = [PagedCache(get_format("int8").cache_spec(1, 64), 6, device="meta", maps=LayerMaps(v=here)) for _ in range(2)]
    assert caches[0].maps.v is caches[1].maps.v is there  # a call over both is of one map
    again = duplicate(here)
    assert torch.equal(again.forward, turn) and again.to("meta") is not there
    last = weakref.ref(there)
    del there, caches
    gc.collect()
    assert last() is None  # nothing keeps a device's memory


def test_a_view_of_an_engines_memory_takes_only_itself_along(duplicate):
    spec = get_format("int8").cache_spec(2, 64)  # without a map
    memory = torch.zeros(6, 9, 2, spec.page_bytes, dtype=torch.uint8)  # pages of 9 layers, interleaved
    cache = PagedCache.wrap(memory[:, 4], spec)
    cache.write(rows(80), rows(80, 1), torch.arange(80))
    assert len(pickle.dumps(cache)) < memory.nbytes / 2
    again = duplicate(cache)
    assert torch.equal(again.buffer, cache.buffer) and again.buffer.untyped_storage().nbytes() == cache.nbytes
    again.buffer.zero_()
    assert cache.buffer.any()


def test_a_format_that_has_changed_since_is_refused():
    fmt, wide = get_format("int8"), get_format("bf16")
    register(Format("mine", fmt.k, fmt.v))
    data = pickle.dumps(PagedCache(get_format("mine").cache_spec(2, 64), 6))
    unregister("mine")
    register(Format("mine", wide.k, wide.v))
    try:
        with pytest.raises(ValueError, match="format 'mine' stores"):
            pickle.loads(data)
    finally:
        unregister("mine")
