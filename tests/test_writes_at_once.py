"""Writes with a mean and with copies: at once by the Hopper kernel, on a Hopper GPU or else by its source run on a CPU, and one after the
other by who has no such kernel."""

from dataclasses import replace

import pytest
import torch

from hopper_on_cpu import AVAILABLE, Device
from quantkv import LayerMaps, LinearMap, PagedCache, get_format
from quantkv.calls import WriteCall
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies
from quantkv.full_precision import FullPrecisionTokens
from quantkv.implementations.hopper import write as hopper
from quantkv.implementations.hopper.host.sass import opcodes
from quantkv.prepared import PreparedWrite
from quantkv.testing import POISON, rows

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cuda" if ON_HOPPER else "cpu"
runs = pytest.mark.skipif(not (ON_HOPPER or AVAILABLE), reason="needs a Hopper GPU, or g++")
LATENT, ROPE, SIZE, TOKENS = 512, 64, 16, 45
PAGES, COPIES = 6, 4


def caches(fmt, maps=None, dtype=torch.bfloat16, device="cpu"):
    """Pages and 16-bit copies of latents, poisoned, twice."""
    spec = get_format(fmt).latent_spec(LATENT, ROPE, SIZE, dtype)
    found = []
    for _ in range(2):
        pages = PagedCache(spec, PAGES, device, maps=maps)
        found.append((pages, cache_of_copies(pages, COPIES, dtype)))
    for cache in (cache for pair in found for cache in pair):
        cache.buffer.fill_(POISON)
    return found


def given(dtype=torch.bfloat16, device="cpu"):
    """Keys, values, a mean, slots of pages and of copies."""
    g = torch.Generator().manual_seed(3)
    key, value = rows(TOKENS, 1, LATENT, dtype), rows(TOKENS, 1, ROPE, dtype, 1)
    mean = (3 * torch.randn(LATENT, generator=g)).to(dtype)
    slots, copies = torch.randperm(PAGES * SIZE, generator=g)[:TOKENS], torch.full((TOKENS,), -1, dtype=torch.int32)
    slots[[7, 20]] = torch.tensor([-1, -5])
    copies[5:40] = torch.randperm(COPIES * SIZE, generator=g)[:35].int()
    return tuple(t.to(device) for t in (key, value, mean, slots, copies))


def call_of(pages, copies, key, value, mean, slots, copy_slots):
    second = None
    if copies is not None:
        second = WriteCall(key, value, copies.k, copies.v, copies.format, copy_slots, copies.maps)
    return WriteCall(key, value, pages.k, pages.v, pages.format, slots, pages.maps, None, mean, second)


def prepared_for(call, monkeypatch, folder):
    """What serves it, on the GPU or by a stand-in."""
    if not ON_HOPPER:
        Device(monkeypatch, folder)
    return hopper.prepare(call)


def moved(ours, right):
    """Bytes that differ."""
    return int((ours.buffer != right.buffer).sum())


@runs
@pytest.mark.parametrize("with_copies", [True, False])
@pytest.mark.parametrize("with_mean", [True, False])
@pytest.mark.parametrize("fmt, dtype", [("levels4", torch.bfloat16), ("int4", torch.float16), ("int8", torch.bfloat16)])
def test_bytes(fmt, dtype, with_mean, with_copies, monkeypatch, tmp_path):
    """Those of writes one after the other, by the specification, of rows that were made less their mean by torch."""
    (pages, copies), (expected, expected_copies) = caches(fmt, dtype=dtype, device=DEVICE)
    key, value, mean, slots, copy_slots = given(dtype, DEVICE)
    less = key - mean if with_mean else key
    expected.write(less, value, slots, implementation="reference")
    call = call_of(pages, copies if with_copies else None, key, value, mean if with_mean else None, slots, copy_slots)
    assert hopper.at_once(call) and len(hopper.configurations(call)) == 1
    prepared_for(call, monkeypatch, tmp_path)(call)
    assert moved(pages, expected) <= 1e-4 * pages.buffer.numel()  # the order of a sum's additions moves few codes
    assert torch.equal(pages.v.codes.view(torch.int16), expected.v.codes.view(torch.int16))
    if with_copies:
        expected_copies.write(less, value, copy_slots, implementation="reference")
        assert moved(copies, expected_copies) <= 1e-3 * copies.buffer.numel()  # a last bit of 8, where a sum is near the middle of two
        assert torch.equal(copies.v.codes.view(torch.int16), expected_copies.v.codes.view(torch.int16))
    else:
        assert (copies.buffer == POISON).all()


@runs
def test_a_layer_after_the_other(monkeypatch, tmp_path):
    """What was prepared for one layer writes another's rows, by its mean and into its copies; and then a step without a mean."""
    (pages, copies), (others, other_copies) = caches("int4", device=DEVICE)
    key, value, mean, slots, copy_slots = given(device=DEVICE)
    first = call_of(pages, copies, key, value, mean, slots, copy_slots)
    prepared = prepared_for(first, monkeypatch, tmp_path)
    prepared(first)
    prepared(call_of(others, other_copies, 2 * key, value, 2 * mean, slots, copy_slots))
    page, at = copy_slots.clamp_min(0).long() // SIZE, copy_slots.clamp_min(0).long() % SIZE
    rows_of = [t.k.codes[page, at][copy_slots >= 0].float() for t in (copies, other_copies)]
    assert torch.equal(2 * rows_of[0], rows_of[1]) and 10 < rows_of[0].abs().mean() < 1000
    page, at = slots.clamp_min(0) // SIZE, slots.clamp_min(0) % SIZE
    assert torch.equal(*(t.k.codes[page, at][slots >= 0] for t in (pages, others)))  # of rows twice as long: scales are twice
    again = call_of(others, other_copies, key, value, None, slots, copy_slots)
    alone = PagedCache(others.spec, PAGES, DEVICE)
    alone.buffer.fill_(POISON)
    alone.write(key, value, slots, implementation="reference")
    prepared(again)
    assert moved(others, alone) <= 1e-4 * alone.buffer.numel()


def test_who_writes_at_once():
    (pages, copies), _ = caches("levels4")
    key, value, mean, slots, copy_slots = given()
    call = call_of(pages, copies, key, value, mean, slots, copy_slots)
    assert hopper.at_once(call)
    assert not hopper.at_once(call_of(pages, copies, key.half(), value.half(), mean.half(), slots, copy_slots))  # V is not as given
    turned = LayerMaps(k=LinearMap(pages.maps.k.forward.clone(), pages.maps.k.inverse.clone()))
    under_another_map = PagedCache(copies.spec, COPIES, maps=turned)
    assert not hopper.at_once(call_of(pages, under_another_map, key, value, mean, slots, copy_slots))
    longer = PagedCache(get_format("none", torch.bfloat16).latent_spec(LATENT, ROPE, 2 * SIZE, torch.bfloat16), COPIES, maps=pages.maps)
    assert not hopper.at_once(call_of(pages, longer, key, value, mean, slots, copy_slots))
    quantized = PagedCache(pages.spec, COPIES, maps=pages.maps)
    assert not hopper.at_once(call_of(pages, quantized, key, value, mean, slots, copy_slots))
    dense = PagedCache(get_format("int4").cache_spec(1, 128), PAGES)
    rows_ = torch.randn(TOKENS, 1, 128).bfloat16()
    plain = call_of(dense, None, rows_, rows_, None, slots, None)
    assert not hopper.at_once(plain) and [type(c) for c in hopper.configurations(plain)] == [hopper.WriteConfig]


@pytest.mark.parametrize("mean_given", [True, False])
@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_one_after_the_other(implementation, mean_given):
    """On a CPU nobody writes both at once: the bits of two writes, call after call."""
    (pages, copies), (expected, expected_copies) = caches("levels4")
    key, value, mean, slots, copy_slots = given()
    tokens = FullPrecisionTokens(sink=16, recent=16)
    pool = CopiedPages(tokens, SIZE, 1, PAGES)
    pool.num_copies = COPIES
    step = FullPrecisionStep(tokens, SIZE, 1, TOKENS, torch.device("cpu"))
    step.slots.copy_(copy_slots)
    write = PreparedWrite(slots, implementation=implementation, full_precision=step)
    for scale in (1, 2):
        rows_ = (scale * key)[:, :, :], value
        write(CacheWithCopies(pages, copies, pool), *rows_, *([mean] if mean_given else []))
        less = rows_[0] - mean if mean_given else rows_[0]
        expected.write(less, value, slots, implementation=implementation)
        expected_copies.write(less, value, copy_slots, implementation=implementation)
        assert moved(pages, expected) == moved(copies, expected_copies) == 0


def test_means_of_other_sizes_and_dtypes_are_refused():
    (pages, _), _ = caches("int4")
    key, value, mean, slots, _ = given()
    for wrong in (mean[:-1], mean.float(), mean[None]):
        with pytest.raises(ValueError, match="mean"):
            call_of(pages, None, key, value, wrong, slots, None)


@pytest.mark.parametrize("fmt, tokens, budget, local", [("levels4", 64, 2450, 40), ("levels4", 4096, 5700, 0), ("int4", 64, 2800, 0)])
def test_what_it_is_compiled_to(fmt, tokens, budget, local, tmp_path):
    """Of few rows the code is short, as it runs once in each block; levels of a row then lie in local memory. Else nothing is spilled."""
    pytest.importorskip("cuda.core")
    (pages, copies), _ = caches(fmt)
    key, value, mean, slots, copy_slots = given()
    more = tokens // TOKENS + 1
    repeated = (t.repeat(more, *[1] * (t.ndim - 1))[:tokens] for t in (key, value))
    call = call_of(pages, copies, *repeated, mean, slots.repeat(more)[:tokens], copy_slots.repeat(more)[:tokens])
    (config,) = hopper.configurations(call)
    cubin = tmp_path / "given.cubin"
    cubin.write_bytes(config.cubin())
    names = opcodes(cubin)
    assert len(names) <= budget and sum(name in ("LDL", "STL") for name in names) <= local


@runs
def test_the_bits_of_few_rows_and_of_many(monkeypatch, tmp_path):
    """Codes that a loop makes are those that many rows are written with."""
    (pages, copies), (others, other_copies) = caches("levels4", device=DEVICE)
    key, value, mean, slots, copy_slots = given(device=DEVICE)
    few, many = (call_of(*pair, key, value, mean, slots, copy_slots) for pair in ((pages, copies), (others, other_copies)))
    prepared_for(few, monkeypatch, tmp_path)(few)
    config = hopper.configuration
    monkeypatch.setattr(hopper, "configuration", lambda call: replace(config(call), warps=2))
    assert [c.macros()["ROLLED"] for c in hopper.configurations(many)] == [0]
    hopper.prepare(many)(many)
    assert moved(pages, others) == moved(copies, other_copies) == 0 and (pages.buffer != POISON).sum() > TOKENS * LATENT / 4
