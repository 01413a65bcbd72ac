"""The pool of a model that has layers of another kind beside attention, by SGLang's own pool of such models."""

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

from quantkv import PagedCache, get_format
from quantkv.integrations.sglang.pool import QuantKVPool, pool_class

PAGE = 16


def test_layers_with_attention_alone_have_pages():
    """Layers 1 and 3 of four, each in its format; SGLang is told the bytes that they take."""
    specs = {1: get_format("int4").cache_spec(2, 64, block_size=PAGE), 3: get_format("int8").cache_spec(2, 64, block_size=PAGE)}
    made = {n: SimpleNamespace(allocate=lambda count, _, device, spec=spec: PagedCache(spec, count, device)) for n, spec in specs.items()}
    layers = SimpleNamespace(of={n: SimpleNamespace(paged=paged, windowed=None, cache=None) for n, paged in made.items()})
    kind = pool_class(layers, SimpleNamespace(start_layer=0, end_layer=4), [1, 3], has_windows=False)
    given = {"head_num": 2, "head_dim": 64, "full_attention_layer_ids": [1, 3], "device": "cpu", "mamba_pool": None}
    whole = HybridLinearKVPool(64, torch.float32, PAGE, full_kv_pool_class=kind, **given)
    assert isinstance(whole.full_kv_pool, QuantKVPool) and kind.numbers == {None: [1, 3]}
    assert [layers.of[n].cache.spec for n in (1, 3)] == list(specs.values()) and not layers.of[1].windowed
    assert sum(whole.get_kv_size_bytes()) == sum(spec.block_bytes for spec in specs.values()) * (64 // PAGE + 1)
    assert whole.get_kv_size_bytes()[1] == (16 * (32 + 4) + 16 * (64 + 4)) * 2 * 5  # codes and metadata of 16 tokens, 2 heads, 5 pages
