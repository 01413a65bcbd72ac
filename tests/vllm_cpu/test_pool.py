"""Tokens that fit by `vllm_pages`, against the blocks that vLLM plans for layers of the plug-in's own specs; and the warning."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig
from vllm.v1 import kv_cache_interface as pages
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_capacity
from vllm.v1.worker.utils import customize_attention_spec

from quantkv import geometry, get_format
from quantkv.capacity import capacity
from quantkv.geometry import Heads, Layer, Model
from quantkv.integrations.vllm.backend import backend_of
from quantkv.known_models import config_of
from quantkv.policy_file import PolicyFile
from quantkv.vllm_pages import pool

FREE = 8 << 30
SMALL, LARGE = Heads(4, 256, 256), Heads(2, 512, 512)
MODELS = {
    **{name: geometry.read(config_of(name)).layers for name in ("llama-3-8b", "gemma-3-4b", "gpt-oss-20b", "mistral-7b-v0.1")},
    "chunks": (*[Layer("chunked", 2048, SMALL)] * 3, Layer("full", 0, SMALL)) * 4,
    "heads of two sizes": (*[Layer("sliding", 1024, SMALL)] * 5, Layer("full", 0, LARGE)) * 3,
    "nearly as many of each kind": (*[Layer("sliding", 128, SMALL), Layer("full", 0, SMALL)] * 6, Layer("full", 0, SMALL)),
}
FORMATS = {
    "uniform": lambda layer: "int4",
    "one int8 layer": lambda layer: "int8" if layer == 0 else "int4",
    "an int8 layer of the other kind": lambda layer: "int8" if layer == 5 else "int4",
    "16 bits in between": lambda layer: "none" if layer in (3, 4) else "levels4",
    "pages that divide": lambda layer: "fp8" if layer % 2 else "fp32",
    "two and eight bits": lambda layer: "int8" if layer % 3 else "trellis2",
}


def planned(model, policy, length, in_flight):
    """The tokens that vLLM would log, of specs as its attention layers make them."""
    specs = {}
    for number, layer in model.attention.items():
        backend, heads = backend_of(get_format(policy.name_of(number))), layer.heads
        common = {"num_kv_heads": heads.num_kv_heads, "head_size": heads.head_size, "head_size_v": heads.head_size_v}
        common |= {"dtype": torch.uint8, "block_size": 16, "kv_quant_mode": pages.KVQuantMode.CUSTOM}
        kinds = {
            "full": (pages.FullAttentionSpec, {}),
            "sliding": (pages.SlidingWindowSpec, {"sliding_window": layer.window}),
            "chunked": (pages.ChunkedLocalAttentionSpec, {"attention_chunk_size": layer.window}),
        }
        kind, more = kinds[layer.kind]
        specs[f"model.layers.{number}.self_attn.attn"] = customize_attention_spec(backend, kind(**common, **more))
    cache_config = CacheConfig(block_size=16)
    cache_config.kv_cache_layout = "LBHNC"
    config = SimpleNamespace(
        cache_config=cache_config,
        model_config=SimpleNamespace(max_model_len=length, original_max_model_len=length, supports_kv_cache_grouping=False),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=in_flight,
    )
    groups = get_global_kv_cache_groups(config, [specs])
    made = get_kv_cache_configs(config, [specs], [FREE], groups)
    return get_kv_cache_capacity(config, generate_scheduler_kv_cache_config(made))[0]


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_that_vllm_plans(name, stored):
    model = Model("made", MODELS[name], 8, None, {})
    policy = PolicyFile("int4", {layer: FORMATS[stored](layer) for layer in range(len(model.layers))})
    made = pool(model, capacity(model, policy))
    for length, in_flight in ((4096, 16384), (8192, 1025), (1000, 100)):
        assert made.tokens(FREE, length, in_flight) == pytest.approx(planned(model, policy, length, in_flight), abs=1)
