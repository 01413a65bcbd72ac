"""Pages copied to and from memory that an engine owns: vLLM's layouts over this project's pages, and vLLM's own cache tensors."""

from itertools import product

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, PageViews, copy_pages_between, get_format
from quantkv.calls import AttendCall, Batch
from quantkv.ops import attend
from quantkv.vllm_api import page_views
from vllm_api_calls import BLOCK_SIZE, BLOCKS, DEVICE, HEADS, PRESETS, golden
from vllm_layouts import LAYERS, LAYOUTS, ONE_RUN, engine_memory

pytestmark = pytest.mark.usefixtures("on_device")
# vLLM's cache types, the format that has their bytes, and their name in the golden file.
OWN = {
    "auto": ("bf16", "none"),
    "fp8": ("fp8", "fp8_per_tensor"),
    "int8_per_token_head": ("int8", "int8_per_token_head"),
    "fp8_per_token_head": ("fp8_token", "fp8_per_token_head"),
    "int4_per_token_head": ("int4", "int4_per_token_head"),
    **dict(zip(PRESETS, zip(("tq_k8v4", "tq4", "tq_k3v4", "tq3"), PRESETS))),
}


def cache_of(name, heads=2, blocks=5, d=64, block_size=16, seed=None, **kwargs):
    cache = PagedCache(get_format(name).cache_spec(heads, d, block_size=block_size), blocks, DEVICE, **kwargs)
    if seed is not None:
        cache.buffer.random_(generator=torch.Generator(DEVICE).manual_seed(seed))
    return cache


def answers(cache, q, **batch):
    """Attention, of a cache or of pages elsewhere: out and log-sum-exp."""
    options = {name: batch[name] for name in ("cu_seqlens_q", "seq_lens")}
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    call = AttendCall(q, (cache.segment(batch["block_table"]),), Batch(**options), None, out=torch.empty_like(q), lse=lse)
    return attend(call)


# ---- this project's pages in vLLM's layouts


@pytest.mark.parametrize("layout", ONE_RUN)
def test_pages_go_to_an_engine_and_come_back(format_name, layout):
    cache, other = cache_of(format_name, seed=0), cache_of(format_name, blocks=7)
    spec = cache.spec
    layers = engine_memory(layout, 6, 2, 16, spec.page_bytes // 16)
    engine = PagedCache.wrap(layers[1], spec)
    assert engine.buffer.data_ptr() == layers[1].data_ptr()  # nothing was copied
    copy_pages_between(cache, engine, [4, 0, 2], [1, 5, 0])
    for theirs, ours in zip((1, 5, 0), (4, 0, 2)):
        record = layers[1][theirs].reshape(2, -1)
        for offset, size in spec.sections:
            assert torch.equal(record[:, offset : offset + size], cache.buffer[ours, :, offset : offset + size])
    untouched = [layers[0], layers[2], layers[1][2:5]]
    assert all((t == 0xFF).all() for t in untouched)
    copy_pages_between(engine, other, torch.tensor([1, 5, 0]), torch.tensor([6, 0, 1]))
    for offset, size in spec.sections:
        assert torch.equal(*(c.buffer[pages, :, offset : offset + size] for c, pages in ((other, [6, 0, 1]), (cache, [4, 0, 2]))))
    assert not other.buffer[2:6].any()


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_a_layout_that_breaks_records_is_refused(layout):
    spec = cache_of("int4").spec
    with pytest.raises(ValueError, match=r"buffer\.stride\(\)=.*one run of bytes"):
        PagedCache.wrap(engine_memory(layout, 6, 2, 16, spec.page_bytes // 16)[0], spec)


@pytest.mark.parametrize("layout", ONE_RUN)
@pytest.mark.parametrize("name", ["int4", "tq3", "bf16"])
def test_an_engine_writes_and_a_cache_reads(name, layout):
    """What is written into vLLM's memory gives the same bytes and the same attention after it has moved."""
    g = golden(64)
    spec = cache_of(name, HEADS, BLOCKS).spec
    memory = engine_memory(layout, BLOCKS, HEADS, BLOCK_SIZE, spec.page_bytes // BLOCK_SIZE)[2]
    engine = PagedCache.wrap(memory.view(torch.bfloat16) if name == "bf16" else memory, spec)
    cache = cache_of(name, HEADS, BLOCKS, seed=1)
    engine.write(g["key"], g["value"], g["slot_mapping"])
    copy_pages_between(engine, cache, range(BLOCKS))
    batch = {name: g[name] for name in ("block_table", "seq_lens", "cu_seqlens_q")}
    q = g["query"].bfloat16()
    for there, here in zip(answers(engine, q, **batch), answers(cache, q, **batch)):
        assert torch.equal(there, here) and here.isfinite().all()


@pytest.mark.parametrize("layout", ONE_RUN)
def test_compiled_calls_reach_pages_that_are_no_single_run(layout):
    """torch.compile passes the buffer to an operator, which has to find every page in it where it lies."""
    g, spec = golden(64), cache_of("int4", HEADS, BLOCKS).spec
    engine = PagedCache.wrap(engine_memory(layout, BLOCKS, HEADS, BLOCK_SIZE, spec.page_bytes // BLOCK_SIZE)[1], spec)
    cache = cache_of("int4", HEADS, BLOCKS)
    cache.write(g["key"], g["value"], g["slot_mapping"])
    batch = {name: g[name] for name in ("block_table", "seq_lens", "cu_seqlens_q")}

    @torch.compile(backend="aot_eager")
    def step(key, value, q, slots, batch):
        engine.write(key, value, slots)
        return engine.attend(q, **batch)

    assert torch.equal(step(g["key"], g["value"], g["query"], g["slot_mapping"], batch), cache.attend(g["query"], **batch))
    slots = g["slot_mapping"][g["slot_mapping"] >= 0]
    assert torch.equal(*(c.k.codes.flatten(0, 1)[slots] for c in (engine, cache)))


# ---- vLLM's own tensors


def vllm_tensor(cache_dtype, layout="LBHNC", head_size=64):
    """vLLM's tensor of one layer with the bytes that its own kernels wrote, `[blocks, heads, tokens, content]`."""
    g, name = golden(head_size), OWN[cache_dtype][1]
    if cache_dtype in PRESETS:
        slots = g[f"{name}.kv_cache"]
    else:
        parts = []
        for side in ("key", "value"):
            parts.append(g[f"{name}.{side}_cache"])
            if cache_dtype.endswith("per_token_head"):
                parts.append(g[f"{name}.{side[0]}_scale_cache"].unsqueeze(-1).view(torch.uint8))
        slots = torch.cat(parts, -1)
    memory = engine_memory(layout, BLOCKS, HEADS, BLOCK_SIZE, slots.shape[3])[1]
    memory.copy_(slots.transpose(1, 2))
    return memory


def options_of(cache_dtype, head_size=64):
    g = golden(head_size)
    return {"k_scale": g["k_descale"], "v_scale": g["v_descale"]} if cache_dtype == "fp8" else {}


def own_cache(cache_dtype, head_size=64, **kwargs):
    scales = {name: float(scale) for name, scale in options_of(cache_dtype, head_size).items()}
    return cache_of(OWN[cache_dtype][0], HEADS, BLOCKS, head_size, **scales, **kwargs)


def viewed(cache_dtype, tensor, head_size=64):
    return page_views(tensor.view(torch.bfloat16) if cache_dtype == "auto" else tensor, cache_dtype, head_size, **options_of(cache_dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", OWN)
def test_vllms_own_bytes_come_in_and_go_back(cache_dtype, layout):
    tensor, cache = vllm_tensor(cache_dtype, layout), own_cache(cache_dtype)
    written = own_cache(cache_dtype)
    copy_pages_between(viewed(cache_dtype, tensor), cache, range(BLOCKS))
    g = golden(64)
    slots = g["slot_mapping"][g["slot_mapping"] >= 0]
    if DEVICE.type == "cpu":  # on a GPU the project's own rounding may differ: docs/formats.md
        written.write(g["key"], g["value"], g["slot_mapping"])
        for there, here in zip((cache.k, cache.v), (written.k, written.v)):
            for a, b in ((there.codes, here.codes), (there.meta, here.meta)):
                assert a is None or torch.equal(*(t.view(torch.uint8).flatten(0, 1)[slots] for t in (a, b)))
    back = engine_memory(layout, BLOCKS + 1, HEADS, BLOCK_SIZE, tensor.shape[3])
    copy_pages_between(cache, viewed(cache_dtype, back[1]), [0, 3, 6], [1, 8, 0])
    assert torch.equal(back[1][[1, 8, 0]], tensor[[0, 3, 6]])
    assert all((t == 0xFF).all() for t in (back[0], back[2], back[1][2:8]))


@pytest.mark.parametrize("cache_dtype, layout", list(product(OWN, ("LBHNC", "BLNHC"))))
def test_attention_over_vllms_tensor_is_that_over_the_cache(cache_dtype, layout):
    tensor, cache, g = vllm_tensor(cache_dtype, layout), own_cache(cache_dtype, seed=2), golden(64)
    views = viewed(cache_dtype, tensor)
    assert isinstance(views, PageViews) and views.num_blocks == BLOCKS and views.device == cache.device
    copy_pages_between(views, cache, range(BLOCKS))
    batch = {name: g[name] for name in ("block_table", "seq_lens", "cu_seqlens_q")}
    for there, here in zip(answers(views, g["query"], **batch), answers(cache, g["query"], **batch)):
        assert here.isfinite().all()
        if DEVICE.type == "cpu":
            assert torch.equal(there, here)
        else:  # the two may be served by other kernels
            torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments, match",
    [
        (dict(kv_cache_dtype="nvfp4"), "nvfp4: one of"),
        (dict(head_size=128), r"kv_cache\.shape\[3\]=72: int4_per_token_head of head sizes \(128, 128\) has 136 bytes"),
        (dict(head_size_v=32), r"kv_cache\.shape\[3\]=72: .*\(64, 32\) has 56 bytes"),
        (dict(kv_cache_dtype="turboquant_4bit_nc"), r"kv_cache\.shape\[3\]=72: turboquant_4bit_nc .* has 70 bytes"),
        (dict(kv_cache_dtype="turboquant_4bit_nc", head_size_v=32), "head_size_v=32: .*one head size, 64"),
        (dict(kv_cache_dtype="bfloat16"), "dtype=torch.uint8: kv_cache_dtype='bfloat16'"),
        (dict(kv_cache=[1]), "kv_cache=list: a tensor is needed"),
        (dict(kv_cache=torch.zeros(8, 16, 72, dtype=torch.uint8)), r"kv_cache\.shape=\(8, 16, 72\)"),
        (dict(kv_cache=torch.zeros(8, 2, 16, 144, dtype=torch.uint8)[..., ::2]), r"kv_cache\.stride\(\)=.*one run"),
        (dict(kv_cache=torch.zeros(8, 2, 16, 73, dtype=torch.uint8)[..., :72]), r"kv_cache\.stride\(\)=.*multiples of 4 bytes"),
        (dict(kv_cache_dtype="fp8", head_size=36, k_scale=-1.0), "k_scale=-1.0"),
    ],
)
def test_what_is_no_tensor_of_that_type_is_refused(arguments, match):
    call = {"kv_cache": vllm_tensor("int4_per_token_head"), "kv_cache_dtype": "int4_per_token_head", "head_size": 64, **arguments}
    with pytest.raises((ValueError, AssertionError), match=match):
        page_views(**call)


# ---- copies that are refused, with nothing copied


TURN = torch.eye(64).roll(1, 0)[None]


@pytest.mark.parametrize(
    "target, match",
    [
        (dict(name="int8"), "source spec={'format': 'int4', 'k'.*: the target's is {'format': 'int8', 'k'"),
        (dict(name="k4v2"), "source spec={'format': 'int4', 'v'.*: the target's is {'format': 'k4v2', 'v'"),
        (dict(block_size=32), "source spec={'block_size': 16}: the target's is {'block_size': 32}"),
        (dict(heads=4), "source spec={'num_kv_heads': 2}: the target's is {'num_kv_heads': 4}"),
        (dict(d=128), "source spec={'head_size': 64, 'head_size_v': 64}: the target's is {'head_size': 128, 'head_size_v': 128}"),
        (dict(v_scale=0.5), r"source scales=\[1.0, 1.0\]: the target's is \[1.0, 0.5\]"),
        (dict(maps=LayerMaps(k=LinearMap(TURN, TURN.mT))), "source maps=[0-9a-f]{16}: the target's is [0-9a-f]{16}"),
    ],
)
def test_pages_of_another_kind_are_refused(target, match):
    source, other = cache_of("int4", seed=3), cache_of(**{"name": "int4", **target})
    with pytest.raises(ValueError, match=match):
        copy_pages_between(source, other, [0])
    assert not other.buffer.any()


@pytest.mark.parametrize(
    "pages, targets, match",
    [
        ([0, 5], None, r"^pages=5: values lie in 0\.\.4"),
        ([1, 1], [0, 1], "^pages=1: repeated"),
        ([0, 1], [2, 2], "^target_pages=2: repeated"),
        ([0, 1], [2, 7], r"^target_pages=7: values lie in 0\.\.6"),
        ([0, 1], [2], "^target_pages=1: a page is needed for each of the 2"),
        ([0.0], None, "^pages=.*integers"),
    ],
)
def test_page_numbers_are_checked_first(pages, targets, match):
    other = cache_of("int4", blocks=7)
    with pytest.raises(ValueError, match=match):
        copy_pages_between(cache_of("int4", seed=3), other, pages, targets)
    assert not other.buffer.any()


@pytest.mark.parametrize("wrong", [None, "cache", torch.zeros(4, 2, 16, dtype=torch.uint8)])
def test_what_has_no_pages_is_refused_by_name(wrong):
    cache = cache_of("int4", seed=3)
    before = cache.buffer.clone()
    for name, sides in (("source", (wrong, cache)), ("target", (cache, wrong))):
        with pytest.raises(ValueError, match=f"^{name}={type(wrong).__name__}: a PagedCache or PageViews is needed"):
            copy_pages_between(*sides, [0], [1])
    assert torch.equal(cache.buffer, before)


def test_pages_of_one_cache_may_change_places():
    cache = cache_of("int4", seed=4)
    before = cache.k.codes.clone()
    copy_pages_between(cache, cache, [0, 1], [1, 0])
    assert torch.equal(cache.k.codes[[0, 1]], before[[1, 0]]) and torch.equal(cache.k.codes[2:], before[2:])


def test_layers_of_the_helper_do_not_share_bytes():
    layers = engine_memory("BHLNC", 2, 2, 16, 8)
    layers[0].zero_()
    assert len(layers) == LAYERS and all((t == 0xFF).all() for t in layers[1:])
