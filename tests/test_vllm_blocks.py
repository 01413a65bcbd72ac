"""vLLM's pool of blocks as the plug-in plans it, for models of a few layers: what is packed, what is left to vLLM, what is said of it."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vLLM looks for a device
pytest.importorskip("vllm")

from vllm.config import CacheConfig, KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as pages
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.worker_base import WorkerBase

import vllm_layers
from quantkv import get_format
from quantkv.full_precision import FullPrecisionTokens
from quantkv.geometry import Kind
from quantkv.integrations.vllm import blocks
from quantkv.integrations.vllm.backend import QuantKVBackend
from quantkv.policy import Policy
from quantkv.vllm_pages import PooledLayer, packed_beside_states, pool_of

BYTES = {"int4": 2 * (32 + 4), "int8": 2 * (64 + 4), "none": 2 * 128}  # K and V of a token of one head of 64 numbers, with metadata


def rows(name="int4", cls=pages.FullAttentionSpec, heads=2, block_size=16, **more):
    """What vLLM's layer of attention says of its pages."""
    common = {"num_kv_heads": heads, "head_size": 64, "dtype": torch.uint8, "kv_quant_mode": pages.KVQuantMode.CUSTOM}
    return QuantKVBackend.of(get_format(name)).customize_spec(cls(block_size=block_size, **common, **more))


def state(numbers=4096, **more):
    return pages.MambaSpec(block_size=512, shapes=((numbers,),), dtypes=(torch.float32,), **more)


def windows(name="int4", **more):
    return rows(name, pages.SlidingWindowSpec, sliding_window=512, **more)


def named(*specs):
    return {f"layers.{number}": spec for number, spec in enumerate(specs)}


TWO_KINDS = named(rows("int8"), *[rows(), windows()] * 3)  # which vLLM would pad
HYBRID = named(rows("int8"), rows(), *[state()] * 4)


@pytest.fixture
def config():
    """A configuration that leaves the layout to the plug-in."""
    cache = CacheConfig(block_size=16)
    cache.cache_dtype, cache.kv_cache_layout, cache.mamba_cache_mode = "quantkv_int4", "BLHNC", "none"
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(
            max_model_len=4096, original_max_model_len=4096, supports_kv_cache_grouping=False, is_hybrid=True, use_mla=False
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(**{f"{n}_parallel_size": 1 for n in ("decode_context", "prefill_context", "tensor", "pipeline")}),
        **dict.fromkeys(("kv_transfer_config", "additional_config", "speculative_config")),
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=4096,
    )


@pytest.fixture
def told(monkeypatch):
    found = []
    for name in ("info", "info_once"):
        monkeypatch.setattr(blocks.logger, name, lambda text, *given: found.append(text % given))
    return found


def test_a_page_is_small_where_it_may_have_a_copy():
    assert [blocks.largest_page(policy) for policy in (None, Policy("int4"))] == [128, 128]
    assert blocks.largest_page(Policy("int4", full_precision=FullPrecisionTokens(16, 24))) == 16
    assert blocks.STEP == 16 and blocks.PACKED is KVCacheLayout.BLHNC


def test_the_layout_is_the_plug_ins_unless_one_of_these_asks_for_another(config, monkeypatch):
    assert blocks.can_pack(config) is True
    changes = [
        (config.cache_config, "cache_dtype", "fp8", False),
        (config.cache_config, "cache_dtype", "quantkv_policy:1f0c", True),
        (config.scheduler_config, "disable_hybrid_kv_cache_manager", True, False),
        (config.attention_config, "hisparse_config", object(), False),
        (config.parallel_config, "pipeline_parallel_size", 2, False),
        (config.parallel_config, "decode_context_parallel_size", 2, False),
        (config.parallel_config, "tensor_parallel_size", 2, True),
    ]
    for part, name, value, packs in changes:
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            assert blocks.can_pack(config) is packs, name
    for own, of_connector, packs in ((None, None, True), (None, "BLHNC", True), (None, "LBHNC", False), ("LBHNC", "BLHNC", False)):
        monkeypatch.setattr(blocks, "envs", SimpleNamespace(VLLM_KV_CACHE_LAYOUT=own))
        monkeypatch.setattr(blocks, "get_kv_connector_cache_layout", lambda config, found=of_connector: found)
        assert blocks.can_pack(config) is packs


@pytest.mark.parametrize(
    ("spec", "layer"),
    [
        (rows(), PooledLayer(Kind(), 2 * BYTES["int4"], (2, 64, 64))),
        (rows("int8", heads=3), PooledLayer(Kind(), 3 * BYTES["int8"], (3, 64, 64))),
        (windows(), PooledLayer(Kind(512), 2 * BYTES["int4"], (2, 64, 64))),
        (
            rows("none", pages.ChunkedLocalAttentionSpec, attention_chunk_size=32),
            PooledLayer(Kind(32, True), 2 * BYTES["none"], (2, 64, 64)),
        ),
        (replace(rows(), tokens_per_state=2), None),
        (pages.CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8), None),
        (state(3), PooledLayer(None, 16, False)),
        (state(4), PooledLayer(None, 16, False)),
        (state(5, tp_replicated=True), PooledLayer(None, 32, True)),
    ],
)
def test_a_layer_of_the_pool_is_what_vllms_layer_says(spec, layer):
    """A state's bytes are a multiple of a record's alignment."""
    assert blocks._pooled(spec) == layer


@pytest.mark.parametrize(("mode", "held"), [("none", 4), ("align", 5)])
def test_states_that_a_sequence_holds_are_the_most_of_a_layer(mode, held, config):
    config.cache_config.mamba_cache_mode = mode
    specs = named(rows(), state(), state(num_speculative_blocks=3), state(num_speculative_blocks=1))
    assert blocks._states_held(config, specs) == held


def layers_of(specs):
    return tuple(map(blocks._pooled, specs.values()))


def test_layers_that_vllm_would_pad_are_packed(config, monkeypatch):
    """In multiples of the smallest block, in pages as large as the policy lets them be."""
    assert blocks.plan(config, TWO_KINDS) == pool_of(layers_of(TWO_KINDS), 16, 128)
    of_other_blocks = {name: replace(spec, block_size=16 * (1 + (n == 0))) for n, (name, spec) in enumerate(TWO_KINDS.items())}
    assert blocks.plan(config, of_other_blocks) == pool_of(layers_of(TWO_KINDS), 16, 128)
    policy = Policy("int4", full_precision=FullPrecisionTokens(16, 24))
    monkeypatch.setattr(blocks, "policy_of", lambda config: policy)
    small = blocks.plan(config, TWO_KINDS)
    assert small == pool_of(layers_of(TWO_KINDS), 16, 16) and {group.block_size // group.pages for group in small.groups} == {16}


@pytest.mark.parametrize(("mode", "held"), [("none", 1), ("align", 2)])
def test_pages_of_several_sizes_beside_states_are_packed(mode, held, config):
    config.cache_config.mamba_cache_mode = mode
    found = blocks.plan(config, HYBRID)
    assert found == packed_beside_states(layers_of(HYBRID), held, 16, 16, 128) and found.packed


def test_what_vllm_plans_as_well_is_left_to_it(config):
    """Layers of one size, layers that are not known, states alone or of several sizes, and rows of two kinds beside states."""
    assert blocks.plan(config, named(rows(), rows(), rows())) is None
    assert blocks.plan(config, TWO_KINDS | {"other": replace(rows(), tokens_per_state=2)}) is None
    assert blocks.plan(config, named(state(), state())) is None
    assert blocks.plan(config, HYBRID | {"other": state(5000)}) is None
    assert blocks.plan(config, HYBRID | {"other": windows()}) is None
    for tokens in (16, 32):
        assert blocks.plan(config, named(rows(), rows(block_size=tokens), state(), state())) is None
    assert blocks.plan(config, named(rows("int8"), rows(), state(4096))) is not None


def test_groups_of_packed_blocks_are_those_of_the_plan(config, told):
    """Groups of unlike layers keep each layer's spec; the log says how many tokens are in a block."""
    planned = blocks.plan(config, TWO_KINDS)
    found = blocks.PackedBlocks().get_kv_cache_groups(config, TWO_KINDS)
    names = list(TWO_KINDS)
    assert [group.layer_names for group in found] == [[names[n] for n in group.layers] for group in planned.groups]
    for made, group in zip(found, planned.groups):
        for name, spec in zip(made.layer_names, list(pages.iter_layer_specs(made.kv_cache_spec)) * len(made.layer_names)):
            changed = {"block_size": group.block_size, "page_size_padded": None, "block_stride_alignment": 16 * group.pages}
            assert spec == replace(TWO_KINDS[name], **changed)
        alike = len({TWO_KINDS[name] for name in made.layer_names}) == 1
        assert isinstance(made.kv_cache_spec, pages.UniformTypeKVCacheSpecs) is not alike
    assert {isinstance(group.kv_cache_spec, pages.UniformTypeKVCacheSpecs) for group in found} == {True, False}
    sizes = ", ".join(f"{len(group.layers)} layers x {group.block_size}" for group in planned.groups)
    assert told == [f"quantkv: blocks of {planned.block_bytes:,} bytes hold the pages of {sizes} tokens"]


def test_groups_of_states_have_blocks_of_a_state(config, told):
    """The log says what a request takes, and counts no states among the tokens."""
    config.cache_config.mamba_cache_mode = "align"
    specs = named(rows("int8"), rows(), *[state(4095)] * 4)
    planned = blocks.plan(config, specs)
    found = blocks.PackedBlocks().get_kv_cache_groups(config, specs)
    assert [group.layer_names for group in found] == [[f"layers.{n}" for n in group.layers] for group in planned.groups]
    for group in found[1:]:
        assert group.kv_cache_spec == replace(specs["layers.2"], page_size_padded=4 * 4096)
    size = planned.groups[0].block_size
    assert told == [
        f"quantkv: blocks of {planned.block_bytes:,} bytes hold the pages of 2 layers x {size} tokens",
        f"quantkv: this model keeps states: a request takes at least one block of {size} tokens, and a block or more in each of "
        f"{len(found) - 1} groups",
    ]


@pytest.mark.parametrize("change", ["layout", "type", "plan"])
def test_groups_are_vllms_own_where_blocks_are_not_packed(change, config, told, monkeypatch):
    """Another layout was resolved, the type is not quantkv's, or its own plan serves these layers as well."""
    monkeypatch.setattr(DefaultKVCacheConfigBuilder, "get_kv_cache_groups", lambda self, config, specs: ["theirs"])
    said = []
    monkeypatch.setattr(blocks, "_say_beside_states", said.append)
    if change == "layout":
        config.cache_config.kv_cache_layout = "LBHNC"
    elif change == "type":
        config.cache_config.cache_dtype = "fp8"
    specs = named(rows(), rows()) if change == "plan" else TWO_KINDS
    assert blocks.PackedBlocks().get_kv_cache_groups(config, specs) == ["theirs"] and said == [["theirs"]] and told == []
    if change != "plan":
        config.cache_config.kv_cache_layout, config.cache_config.cache_dtype = "BLHNC", "quantkv_int4"
        assert len(blocks.PackedBlocks().get_kv_cache_groups(config, specs)) == len(said[1]) > 1


def test_what_a_request_takes_beside_states_is_said_of_models_that_have_both(told):
    groups = [pages.KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate((rows(), rows(block_size=64), state(), state(), state()))]
    for some in (groups[:2], groups[2:], []):
        blocks._say_beside_states(some)
    assert told == []
    blocks._say_beside_states(groups)
    assert told == [
        "quantkv: this model keeps states: a request takes at least one block of 64 tokens, and a block or more in each of 3 groups"
    ]


def test_vllm_asks_the_plug_in_at_four_places():
    blocks.pack_blocks()
    platform = type(current_platform)
    for owner, name in (
        (platform, "get_kv_cache_config_builder_cls"),
        (platform, "update_block_size_for_backend"),
        (WorkerBase, "get_supported_kv_cache_layouts"),
        (backend_utils, "get_kv_connector_cache_layout"),
    ):
        assert getattr(owner, name).__module__ == blocks.__name__


@pytest.mark.parametrize("asked", [None, "LBHNC", "BLHNC", "BHLNC"])
def test_a_block_is_one_copy_where_it_is_offloaded(config, asked):
    """vLLM's connector asks for LBHNC, in which it is a copy for each layer. Whatever else is asked for stays."""
    found = lambda: blocks._connector_layout(lambda config: asked, config)
    assert found() == asked
    config.model_config.is_hybrid = False
    config.kv_transfer_config = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    assert found() == ("BLHNC" if asked == "LBHNC" else asked) and blocks._connector_layout(lambda config: asked) == asked
    assert blocks.can_pack(config) is True  # its own answer is LBHNC
    for part, name, value in (
        (config.kv_transfer_config, "kv_connector", "NixlConnector"),
        (config.kv_transfer_config, "kv_connector_extra_config", {"spec_name": "TieringOffloadingSpec"}),
        (config.kv_transfer_config, "kv_connector_extra_config", {"canonical_layout": True}),
        (config.kv_transfer_config, "kv_connector", "MultiConnector"),
        (config.cache_config, "cache_dtype", "fp8"),
        (config.model_config, "is_hybrid", True),
        (config.parallel_config, "pipeline_parallel_size", 2),
        (config.parallel_config, "decode_context_parallel_size", 2),
        (config.scheduler_config, "disable_hybrid_kv_cache_manager", True),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, name, value)
            assert found() == asked, name


def test_a_builder_of_another_platform_stays(config):
    own = lambda cls, config: "theirs.Builder"
    assert blocks._builder(own, None, config) == "theirs.Builder"
    own = lambda cls, config: blocks.BUILDERS[0]
    assert blocks._builder(own, None, config) == "quantkv.integrations.vllm.blocks.PackedBlocks"
    config.cache_config.cache_dtype = "auto"
    assert blocks._builder(own, None, config) == blocks.BUILDERS[0]


def test_blocks_beside_states_are_chosen_after_vllm_has_chosen(config, monkeypatch):
    """Of hybrid models whose blocks may be packed."""
    done = []
    monkeypatch.setattr(blocks, "_choose_beside_states", lambda config: done.append("ours"))
    update = lambda: blocks._update_sizes(lambda cls, config: done.append(cls), "theirs", config)
    update()
    assert done == ["theirs", "ours"]
    for part, name, value in (
        (config.model_config, "is_hybrid", False),
        (config.cache_config, "cache_dtype", "fp8"),
        (config, "model_config", None),
    ):
        done.clear()
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            update()
        assert done == ["theirs"]


def test_the_packed_layout_is_preferred_by_workers_whose_blocks_are_packed(config):
    own = ["LBHNC", "LHBNC", "BLHNC"]
    worker = SimpleNamespace(vllm_config=config, get_kv_cache_spec=lambda: TWO_KINDS)
    ask = lambda names=own: blocks._layouts(lambda worker: list(names), worker)
    assert ask() == ["BLHNC", "LBHNC", "LHBNC"] and ask(own[:2]) == own[:2]
    config.cache_config.cache_dtype = "fp8"
    assert ask() == own
    config.cache_config.cache_dtype, worker.get_kv_cache_spec = "quantkv_int4", lambda: named(rows(), rows())
    assert ask() == own


@pytest.mark.parametrize(("mode", "alignment", "step"), [("none", 48, 16), ("align", None, 16), ("align", 48, 48)])
def test_tokens_of_a_block_beside_states_are_a_multiple_of_what_states_ask_for(mode, alignment, step, config, monkeypatch):
    """Where states are kept at the ends of blocks. Layers that keep nothing, and what is no layer of attention, say nothing."""
    monkeypatch.setattr(blocks, "get_mamba_prefill_checkpoint_alignment", lambda config: alignment)
    specs = named(rows("int8", block_size=512), rows(block_size=512), *[state(6000)] * 4)
    config.compilation_config = SimpleNamespace(static_forward_context=vllm_layers.context(specs))
    cache = config.cache_config
    cache.mamba_cache_mode, cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded = mode, 512, 64, 65536
    blocks._choose_beside_states(config)
    held = 2 if mode == "align" else 1
    expected, other = (packed_beside_states(layers_of(specs), held, n, None, 128).groups[0].block_size for n in (step, 64 - step))
    assert expected % step == 0 and expected not in (other, 512)
    assert (cache.block_size, cache.mamba_page_size_padded) == (expected, None)
    assert cache.mamba_block_size == (expected if mode == "align" else 64)


@pytest.mark.parametrize(("name", "numbers"), [("int4", 4096), ("int8", 16)])
def test_tokens_of_a_block_beside_states_stay_where_nothing_is_packed(name, numbers, config):
    """Pages have one size, or a state has fewer bytes than so many tokens."""
    specs = named(rows(), rows(name), state(numbers))
    config.compilation_config, cache = SimpleNamespace(static_forward_context=vllm_layers.context(specs)), config.cache_config
    cache.block_size, cache.mamba_page_size_padded = 512, 65536
    blocks._choose_beside_states(config)
    assert (cache.block_size, cache.mamba_page_size_padded) == (512, 65536)


@pytest.mark.parametrize(("graphs", "most"), [(None, 4), ([], 4), ([2, 8], 8)])
def test_tables_of_pages_have_room_for_a_graphs_padding(graphs, most):
    """Pages of a block follow each other."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4), compilation_config=SimpleNamespace(cudagraph_capture_sizes=graphs)
    )
    for tokens, alignment, number in ((64, None, 1), (64, 16, 1), (32, 32, 2), (80, 80, 5)):
        spec = SimpleNamespace(block_size=tokens, block_stride_alignment=alignment)
        found = blocks.PagesOfBlocks(spec, config, 3, torch.device("cpu"))
        assert (found.pages, found.tokens, found.width) == (number, tokens // number, 3 * number)
        given = torch.arange(most * 3, dtype=torch.int32).view(most, 3)
        table = found.table(given)
        assert table.dtype == torch.int32 and table.tolist() == [
            [b * number + i for b in row for i in range(number)] for row in given.tolist()
        ]
        assert (found._table is None) == (number == 1) and (number == 1 or found._table.shape == (most, 3 * number))
