"""Tokens that fit by `vllm_pages`, against the blocks that vLLM plans for layers of the plug-in's own specs; and where pages lie."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as pages
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_capacity
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, customize_attention_spec

import vllm_layers
from quantkv import geometry, get_format
from quantkv.capacity import capacity
from quantkv.geometry import Heads, Layer, Model
from quantkv.integrations.vllm import blocks
from quantkv.integrations.vllm.backend import QuantKVBackend
from quantkv.known_models import config_of
from quantkv.policy_file import PolicyFile
from quantkv.vllm_pages import pool, unified

FREE = 8 << 30
SMALL, LARGE = Heads(4, 256, 256), Heads(2, 512, 512)
MODELS = {
    **{name: geometry.read(config_of(name)).layers for name in ("llama-3-8b", "gemma-3-4b", "gpt-oss-20b", "mistral-7b-v0.1")},
    "chunks": (*[Layer("chunked", 2048, SMALL)] * 3, Layer("full", 0, SMALL)) * 4,
    "gemma 4 26b": (*[Layer("sliding", 1024, Heads(8, 256, 256))] * 5, Layer("full", 0, LARGE)) * 5,
    "gemma 4 e4b": (*[Layer("sliding", 512, Heads(2, 256, 256))] * 5, Layer("full", 0, LARGE)) * 4,  # that keep keys and values
    "gemma-3-27b": geometry.read(config_of("gemma-3-27b")).layers,
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


def specs_of(model, policy):
    """Specs as vLLM's attention layers make them."""
    specs = {}
    for number, layer in model.attention.items():
        backend, heads = QuantKVBackend.of(get_format(policy.name_of(number))), layer.heads
        common = {"num_kv_heads": heads.num_kv_heads, "head_size": heads.head_size, "head_size_v": heads.head_size_v}
        common |= {"dtype": torch.uint8, "block_size": 16, "kv_quant_mode": pages.KVQuantMode.CUSTOM}
        kinds = {
            "full": (pages.FullAttentionSpec, {}),
            "sliding": (pages.SlidingWindowSpec, {"sliding_window": layer.window}),
            "chunked": (pages.ChunkedLocalAttentionSpec, {"attention_chunk_size": layer.window}),
        }
        kind, more = kinds[layer.kind]
        specs[f"model.layers.{number}.self_attn.attn"] = customize_attention_spec(backend, kind(**common, **more))
    return specs


def configuration(length, in_flight, layout=None):
    blocks.pack_blocks()
    cache_config = CacheConfig(block_size=16)
    cache_config.cache_dtype, cache_config.kv_cache_layout = "quantkv_int4", layout
    cache_config.mamba_cache_mode = "align"
    parallel = {f"{kind}_parallel_size": 1 for kind in ("decode_context", "prefill_context", "tensor", "pipeline")}
    return SimpleNamespace(
        cache_config=cache_config,
        model_config=SimpleNamespace(max_model_len=length, original_max_model_len=length, supports_kv_cache_grouping=False, use_mla=False),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(**parallel),
        kv_transfer_config=None,
        additional_config=None,
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=in_flight,
    )


def plans(specs, length=4096, in_flight=16384, layout=None):
    """vLLM's plan of layers, in the layout that the plug-in asks for, or in another one."""
    config = configuration(length, in_flight)
    wanted = "BLHNC" if blocks.can_pack(config) and blocks.plan(config, specs) is not None else "LBHNC"
    config.cache_config.kv_cache_layout = layout or wanted
    groups = get_global_kv_cache_groups(config, [specs])
    return config, get_kv_cache_configs(config, [specs], [FREE], groups)


def tokens_of(config, made):
    """The tokens that vLLM logs."""
    return get_kv_cache_capacity(config, generate_scheduler_kv_cache_config(made))[0]


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_that_vllm_plans(name, stored):
    """Packed or not, and as vLLM plans it alone."""
    model = Model("made", MODELS[name], 8, None, {})
    policy = PolicyFile("int4", {layer: FORMATS[stored](layer) for layer in range(len(model.layers))})
    made, specs = pool(model, capacity(model, policy)), specs_of(model, policy)
    alone = unified(made.layers, 16)
    for length, in_flight in ((4096, 16384), (8192, 1025), (1000, 100)):
        assert made.tokens(FREE, length, in_flight) == pytest.approx(tokens_of(*plans(specs, length, in_flight)), abs=1)
        assert alone.tokens(FREE, length, in_flight) == pytest.approx(tokens_of(*plans(specs, length, in_flight, "LBHNC")), abs=1)


TUNED = ("levels2", "levels3", "levels4", "levels5", "levels6", "trellis2")
SLIDING_INT4 = lambda model: {n: "int4" for n, layer in model.attention.items() if layer.kind == "sliding"}
TABLE = {  # model, policy by layer, most bytes over what the layers need of 32,768 tokens: vLLM alone, packed
    "gemma-3-4b, int4": ("gemma-3-4b", "int4", lambda model: {}, 1.03, 1.03),
    "gemma-3-4b, int4, one int8, one 16-bit": ("gemma-3-4b", "int4", lambda model: {0: "int8", 5: "none"}, 3.7, 1.01),
    "gemma-3-27b, int4, one int8": ("gemma-3-27b", "int4", lambda model: {0: "int8"}, 2.0, 1.01),
    "gemma-3-27b, tuned": ("gemma-3-27b", "int4", lambda model: {n: TUNED[n % 6] for n in range(62)}, 2.6, 1.01),
    "gpt-oss-20b, int4, one int8": ("gpt-oss-20b", "int4", lambda model: {0: "int8"}, 1.9, 1.01),
    "gpt-oss-20b, int4, one int8, one 16-bit": ("gpt-oss-20b", "int4", lambda model: {0: "int8", 5: "none"}, 3.6, 1.01),
    "gpt-oss-20b, int8, sliding int4": ("gpt-oss-20b", "int8", SLIDING_INT4, 1.7, 1.01),
    "gpt-oss-20b, tuned": ("gpt-oss-20b", "int4", lambda model: {n: TUNED[n % 6] for n in range(24)}, 2.0, 1.01),
    "gemma 4 26b, int4": ("gemma 4 26b", "int4", lambda model: {}, 2.1, 1.02),
    "gemma 4 e4b, int4": ("gemma 4 e4b", "int4", lambda model: {}, 2.1, 1.02),
    "llama-3-8b, tuned": ("llama-3-8b", "int4", lambda model: {n: TUNED[n % 6] for n in range(32)}, 1.0, 1.0),
}


def taken(config, made, own):
    """Bytes of a request over those of its layers' own pages, by vLLM's plan."""
    groups = made[0].kv_cache_groups
    size = made[0].kv_cache_tensors[0].size // made[0].num_blocks
    used = sum(-(-g.kv_cache_spec.max_memory_usage_bytes(config) // g.kv_cache_spec.page_size_bytes) for g in groups) * size
    return used / own


@pytest.mark.parametrize("case", TABLE)
def test_bytes_over_what_layers_need(case, monkeypatch):
    told = []
    monkeypatch.setattr(blocks.logger, "info", lambda text, *given: told.append(text % given))
    name, default, layers, alone, packed = TABLE[case]
    model = Model("made", MODELS[name], 8, None, {})
    policy = PolicyFile(default, layers(model))
    own = pool(model, capacity(model, policy)).unpadded_bytes(32768)
    specs = specs_of(model, policy)
    before, after = (taken(*plans(specs, 32768, layout=layout), own) for layout in ("LBHNC", None))
    print(f"| {case} | {before - 1:+.1%} | {after - 1:+.1%} |")
    assert 1 - 1e-9 <= after <= packed
    assert before <= alone and (after == before or before > 1.02)
    assert ["quantkv: blocks of" in line for line in told] == [True] * (after != before)


@pytest.mark.parametrize("case", ["gemma-3-4b, int4, one int8, one 16-bit", "gpt-oss-20b, int8, sliding int4", "gemma 4 26b, int4"])
def test_no_two_pages_share_a_byte(case):
    """Each kernel page of a block lies within the block, and the pages of a group's layers share no byte. A state too."""
    name, default, layers, *_ = TABLE[case]
    model = Model("made", MODELS[name][:12], 8, None, {})
    _, (made,) = plans(specs_of(model, PolicyFile(default, layers(model))))
    check_disjoint(made)


@pytest.mark.parametrize(("name", "first"), [("llama-3-8b", "LBHNC"), ("gemma-3-4b", "BLHNC")])
def test_a_worker_prefers_the_layout_that_packed_blocks_need(name, first):
    """Where the layers have pages of one size it keeps its own order."""
    specs = specs_of(Model("made", MODELS[name], 8, None, {}), PolicyFile("int4", {0: "int8"} if first == "BLHNC" else {}))
    own, worker = ["LBHNC", "BLHNC"], SimpleNamespace(vllm_config=configuration(4096, 1024), get_kv_cache_spec=lambda: specs)
    assert blocks._layouts(lambda worker: list(own), worker) == sorted(own, key=lambda name: name != first)
    assert blocks._layouts(lambda worker: ["LBHNC"], worker) == ["LBHNC"]
    worker.vllm_config.cache_config.cache_dtype = "fp8"
    assert blocks._layouts(lambda worker: list(own), worker) == own


def test_the_layout_is_the_plug_ins_where_nothing_else_asks_for_one(monkeypatch):
    config = configuration(4096, 1024)
    assert blocks.can_pack(config)
    changes = [(config.cache_config, "cache_dtype", "fp8"), (config.attention_config, "hisparse_config", object())]
    changes += [(config.scheduler_config, "disable_hybrid_kv_cache_manager", True)]
    changes += [(config.parallel_config, f"{kind}_parallel_size", 2) for kind in ("pipeline", "decode_context")]
    for part, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            assert not blocks.can_pack(config), name
    for own, of_connector, packs in ((None, "BLHNC", 1), (None, "LBHNC", 0), ("LBHNC", None, 0), ("BLHNC", None, 1), ("LBHNC", "BLHNC", 0)):
        monkeypatch.setattr(blocks, "envs", SimpleNamespace(VLLM_KV_CACHE_LAYOUT=own))
        monkeypatch.setattr(blocks, "get_kv_connector_cache_layout", lambda config, found=of_connector: found)
        assert blocks.can_pack(config) == bool(packs)


LINEAR, FULL = "linear_attention", "full_attention"
COMMON = {"vocab_size": 1024, "intermediate_size": 1024, "hidden_size": 4096, "max_position_embeddings": 131072, "num_attention_heads": 32}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
HYBRIDS = {  # a configuration; shapes of its states, and bytes of a number of the recurrence, as vLLM has them on a GPU; layers at int8, 16
    "nemotron-h-8b": (
        {
            **{"model_type": "nemotron_h", "num_hidden_layers": 52, "num_key_value_heads": 8, "head_dim": 128, "n_groups": 8},
            **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "conv_kernel": 4},
            "layers_block_type": [{"M": LINEAR, "*": FULL, "-": "mlp"}[c] for c in NEMOTRON],
        },
        MambaStateShapeCalculator.mamba2_state_shape(1, 8192, 8, 128, 64, 128, 4),
        torch.float32,
        (7, 18),
    ),
    "granite-4-h-small": (
        {
            **{"model_type": "granitemoehybrid", "num_hidden_layers": 40, "num_key_value_heads": 8, "mamba_n_heads": 128},
            **{"mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2},
            "layer_types": [FULL if n % 10 == 5 else LINEAR for n in range(40)],
        },
        MambaStateShapeCalculator.mamba2_state_shape(1, 8192, 1, 128, 64, 128, 4),
        torch.bfloat16,
        (5, 15),
    ),
    "qwen3.5-27b": (
        {
            **{"model_type": "qwen3_5_text", "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
            **{"linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "hidden_size": 5120},
            "layer_types": [FULL if n % 4 == 3 else LINEAR for n in range(64)],
        },
        MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 48, 128, 128, 4),
        torch.float32,
        (3, 7),
    ),
}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name, mixed):
    """States in groups of layers beside keys and values: with pages of one size as vLLM plans them, else packed."""
    config, shapes, dtype, (eight, sixteen) = HYBRIDS[name]
    model = geometry.read({**COMMON, **config})
    policy = PolicyFile("int4", {eight: "int8", sixteen: "none"} if mixed else {})
    made = pool(model, capacity(model, policy))
    size, row = made.groups[0].block_size, made.layers[0].nbytes
    state = sum(torch.empty(shape, dtype=d, device="meta").nbytes for shape, d in zip(shapes, (torch.bfloat16, dtype)))
    assert made.packed == mixed and {layer.nbytes for layer in made.layers if layer.kind is None} == {state}
    if not mixed:
        assert size == -(-state // (16 * row)) * 16  # as vLLM's platform says
    specs = {name: replace(spec, block_size=size) for name, spec in specs_of(model, policy).items()}
    of_state = {"shapes": shapes, "dtypes": (torch.bfloat16, dtype), "mamba_cache_mode": "align", "block_size": size}
    padded = None if mixed else size * row
    specs |= {f"state.{n}": pages.MambaSpec(**of_state, page_size_padded=padded) for n, layer in enumerate(model.layers) if layer.states}
    for length in (4096, 32768, 131072):
        config, planned = plans(specs, length)
        groups = planned[0].kv_cache_groups
        assert tokens_of(config, planned) == pytest.approx(made.tokens(FREE, length), abs=1)
        assert len(groups) == len(made.groups) and planned[0].kv_cache_tensors[0].size // planned[0].num_blocks == made.block_bytes
    print(f"| {name}, {'int4, one int8, one 16-bit' if mixed else 'int4'} | {made.padding(32768) - 1:+.1%} | blocks of {size} tokens")
    if mixed:
        assert made.padding(131072) < 1.03
        check_disjoint(planned[0])


@pytest.mark.parametrize("mode", ["align", "none"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_of_a_block_beside_states_are_chosen_by_all_layers(name, mode):
    """vLLM has chosen 4096 by then, by the first layer. Layers that keep nothing, and what is no layer of attention, say nothing."""
    content, shapes, dtype, (eight, sixteen) = HYBRIDS[name]
    model = geometry.read({**COMMON, **content})
    policies = [PolicyFile("int4", layers) for layers in ({}, {eight: "int8", sixteen: "none"})]
    of_state = {"shapes": shapes, "dtypes": (torch.bfloat16, dtype), "mamba_cache_mode": mode, "block_size": 4096}
    for policy, packed in zip(policies, (False, True)):
        specs = {name: replace(spec, block_size=4096) for name, spec in specs_of(model, policy).items()}
        specs |= {f"state.{n}": pages.MambaSpec(**of_state) for n, layer in enumerate(model.layers) if layer.states}
        config = configuration(4096, 16384)
        config.compilation_config = SimpleNamespace(static_forward_context=vllm_layers.context(specs))
        cache = config.cache_config
        cache.mamba_cache_mode, cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded = mode, 4096, 512, 64
        blocks._choose_beside_states(config)
        size = pool(model, capacity(model, policy)).groups[0].block_size if packed else 4096
        assert (size < 4096) == packed and cache.block_size == size
        assert cache.mamba_block_size == (size if packed and mode == "align" else 512)
        assert cache.mamba_page_size_padded == (None if packed else 64)


def check_disjoint(made):
    size = made.kv_cache_tensors[0].size // made.num_blocks
    for tensor in made.kv_cache_tensors:
        tensor.size = 3 * size
    made.num_blocks = 3
    sizes = [group.kv_cache_spec.block_size for group in made.kv_cache_groups]
    caches = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout.BLHNC, sizes)
    for group in made.kv_cache_groups:
        (per_page,) = {spec.block_stride_alignment for spec in pages.iter_layer_specs(group.kv_cache_spec)}
        whole = torch.zeros(3 * size, dtype=torch.uint8)
        for name in group.layer_names:
            found = blocks.kernel_pages(caches[name], (per_page or 16) // 16)
            start, per_block = found.storage_offset(), found.shape[0] // 3
            marked = whole.as_strided(found.shape, found.stride(), start)
            assert not marked.any()
            for block in range(3):
                marked[block * per_block : (block + 1) * per_block] = block + 1
        for block in range(3):
            own = whole[block * size : (block + 1) * size]
            assert bool(((own == 0) | (own == block + 1)).all())
