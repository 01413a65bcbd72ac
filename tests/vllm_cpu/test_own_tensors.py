"""vLLM's own cache tensors, as vLLM shapes and splits them, against `page_views` and `PagedCache.wrap`."""

from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from quantkv import PagedCache, get_format
from quantkv.integrations.vllm.backend import QuantKVBackend
from quantkv.vllm_api import page_views

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 5, 2, 16, 64, 3
TYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.uint8, "int4_per_token_head": torch.uint8, "fp8": torch.uint8}


def spec_of(cache_dtype, dtype):
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=dtype, kv_quant_mode=get_kv_quant_mode(cache_dtype)
    )


def layers_of(spec, layout):
    """vLLM's views of the layers, over one allocation."""
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    size = LAYERS * BLOCKS * spec.page_size_bytes
    place = KVCacheTensor(size=size, layers=["a", "b", "c"], layer_stride=strides[0], block_stride=strides[1])
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    return create_kv_cache_views(raw, spec, BLOCKS, layout, place)


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("cache_dtype", TYPES)
def test_keys_values_and_scales_lie_where_vllm_has_them(cache_dtype, layout):
    spec = TritonAttentionBackend.customize_spec(spec_of(cache_dtype, TYPES[cache_dtype]))
    kv_cache = layers_of(spec, layout)[1]
    views = page_views(kv_cache, cache_dtype, SIZE)
    impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
    if cache_dtype == "fp8":
        key, value = kv_cache.transpose(1, 2).split(SIZE, dim=-1)  # as in its forward
    else:
        impl.kv_cache_dtype, impl.fp8_dtype, impl._kv_quant_mode = cache_dtype, torch.float8_e4m3fn, spec.kv_quant_mode
        impl._ensure_scale_caches(kv_cache)
        key, value = kv_cache.transpose(1, 2).split(kv_cache.shape[-1] // 2, dim=-1)
        for side, scales in ((views.k, impl._k_scale_cache), (views.v, impl._v_scale_cache)):
            assert (side.meta.data_ptr(), side.meta.shape[:3], side.meta.stride()[:3]) == (scales.data_ptr(), scales.shape, scales.stride())
    for side, theirs in ((views.k, key), (views.v, value)):
        codes = side.codes.view(torch.uint8)
        assert codes.data_ptr() == theirs.data_ptr() and codes.stride() == theirs.stride() and codes.shape[:3] == theirs.shape[:3]


@pytest.mark.parametrize("preset", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
def test_turboquant_slots_are_vllms(preset):
    config = TurboQuantConfig.from_cache_dtype(preset, SIZE)
    spec = replace(spec_of(preset, torch.uint8), state_content_bytes=config.slot_size_aligned)
    kv_cache = layers_of(spec, KVCacheLayout.LBNHC)[2]
    views = page_views(kv_cache, preset, SIZE)
    assert views.v.codes.data_ptr() - kv_cache.data_ptr() == config.key_packed_size
    assert compute_layer_kv_cache_shape_bytes(spec, BLOCKS) == tuple(kv_cache.shape)


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_the_layouts_that_the_backend_declares_are_those_that_wrap_takes(layout):
    fmt = get_format("int4")
    spec = QuantKVBackend.of(fmt).customize_spec(spec_of("auto", torch.uint8))
    kv_cache = layers_of(spec, layout)[1]
    pages = fmt.cache_spec(HEADS, SIZE, block_size=TOKENS)
    if layout not in QuantKVBackend.supported_kv_cache_layouts():
        with pytest.raises(ValueError, match="one run of bytes"):
            PagedCache.wrap(kv_cache, pages)
        return
    cache = PagedCache.wrap(kv_cache, pages)
    for block in range(BLOCKS):
        for head in range(HEADS):
            assert torch.equal(cache.buffer[block, head], kv_cache[block, head].flatten())
    assert cache.buffer.data_ptr() == kv_cache.data_ptr()
