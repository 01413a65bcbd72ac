"""Layers of keys and values in the plug-in, without a model or an engine: what is checked when they are made, and what a step does."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vLLM looks for a device
pytest.importorskip("vllm")

from vllm.compilation import backends
from vllm.platforms import current_platform

from quantkv import PagedCache, get_format
from quantkv.calls import AttentionOptions, Batch
from quantkv.engine.layer import LayerAttention, PagedLayer
from quantkv.engine.layer_config import LayerConfig, Shard
from quantkv.full_precision import FullPrecisionTokens
from quantkv.geometry import Heads
from quantkv.integrations import serving
from quantkv.integrations.seen_layers import SeenLayers
from quantkv.integrations.vllm import backend, implementation, mla
from quantkv.integrations.vllm.backend import QuantKVBackend
from quantkv.integrations.vllm.implementation import QuantKVImpl
from quantkv.policy import Policy
from test_vllm_plugin import HEADS, layers_configuration, ready_for_layers


@pytest.fixture
def made(monkeypatch):
    return ready_for_layers(monkeypatch)


def bare(**given):
    """A layer that was not made, of which a test says what it needs."""
    impl = QuantKVImpl.__new__(QuantKVImpl)
    vars(impl).update(given)
    return impl


def test_a_new_layer_has_pages_of_its_own_and_no_statistics():
    impl = bare()
    assert impl.paged is impl.owner is impl.number is impl.observer is impl.measured is None
    assert (impl.of_latents, impl.lends, impl.unmeasured, impl.pages_per_block, impl.sizes) == (False, False, False, 1, ())
    assert impl.backend is QuantKVBackend


def test_arguments_that_are_not_known_are_refused_unless_they_ask_for_nothing(made):
    QuantKVImpl(4, 64, 0.125, some=None, other=False)
    for value in (True, 1, "x", 0):
        with pytest.raises(NotImplementedError, match=r"attention arguments \['other'\] are not supported"):
            QuantKVImpl(4, 64, 0.125, some=None, other=value)
    with pytest.raises(NotImplementedError, match="attn_type='encoder'; decoders only"):
        QuantKVImpl(4, 64, 0.125, attn_type="encoder")


def test_context_parallelism_is_refused_with_its_sizes(made):
    config, _ = made
    config.parallel_config.prefill_context_parallel_size = 1
    config.parallel_config.decode_context_parallel_size = 2
    impl = bare(total_cp_world_size=2)
    with pytest.raises(NotImplementedError, match="decode_context_parallel_size=2, prefill_context_parallel_size=1; 1 is needed"):
        impl.__init__(4, 64, 0.125)
    impl.total_cp_world_size = 1
    impl.__init__(4, 64, 0.125)


def test_what_a_configuration_says_is_checked_with_every_layer(made, monkeypatch):
    config, _ = made
    asked = []
    monkeypatch.setattr(implementation, "check_connectors", asked.append)
    QuantKVImpl(4, 64, 0.125)
    assert asked == [config]
    config.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(NotImplementedError, match="kv_sharing_fast_prefill=True; False is needed"):
        QuantKVImpl(4, 64, 0.125)


def test_a_format_that_heads_cannot_have_is_refused_where_a_model_names_its_backend_itself(made):
    with pytest.raises(ValueError, match="head_size=80"):
        QuantKVImpl(4, 80, 0.125, kv_cache_dtype="quantkv_int2")


@pytest.mark.parametrize("statistics", ["off", "auto", "require"])
def test_statistics_are_checked_where_a_policy_wants_some(statistics, made, monkeypatch):
    config, _ = made
    asked, policy = [], Policy("levels4", statistics=statistics)
    monkeypatch.setattr(implementation, "policy_of", lambda config: policy)
    monkeypatch.setattr(implementation, "reads_own_rows", lambda *given: True)
    monkeypatch.setattr(implementation, "check_statistics", lambda *given: asked.append(given))
    QuantKVImpl(4, 64, 0.125)
    assert asked == ([] if statistics == "off" else [(config, policy)])


def test_a_policy_of_full_precision_is_checked_with_its_layer(made, monkeypatch):
    config, _ = made
    monkeypatch.setattr(implementation, "policy_of", lambda config: Policy("int4", full_precision=FullPrecisionTokens(16, 24)))
    monkeypatch.setattr(implementation, "reads_own_rows", lambda *given: True)
    config.parallel_config.use_ubatching = True
    with pytest.raises(NotImplementedError, match=r"policy\.full_precision with steps that are cut into two batches"):
        QuantKVImpl(4, 64, 0.125)


def test_a_policy_of_a_model_that_drafts_is_said_to_count_in_part(monkeypatch):
    told = []
    monkeypatch.setattr(implementation, "drafts_now", lambda: True)
    monkeypatch.setattr(implementation.logger, "info_once", lambda text, *given: told.append(text % given))
    bare()._served(Policy("int4", {0: "int8"}))
    assert told == ["quantkv: the model that drafts stores its rows in int4, without what else the policy says"]


@pytest.mark.parametrize(("tag", "drafts"), [("backbone", False), ("draft_model", True), ("eagle_head", True), ("head_of", False)])
def test_a_model_that_drafts_is_known_by_the_tag_of_its_compilation(tag, drafts, monkeypatch):
    monkeypatch.setattr(backends, "model_tag", tag)
    assert implementation.drafts_now() is drafts


def test_a_vllm_without_flash_attention_is_no_error(monkeypatch):
    told = []
    monkeypatch.setattr(implementation.logger, "debug", lambda text, *given: told.append(text))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)
    implementation.load_flash_attention.__wrapped__()
    assert told == ["quantkv: no FlashAttention here: %s"]
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", SimpleNamespace())
    implementation.load_flash_attention.__wrapped__()
    assert len(told) == 1


def test_a_layers_metadata_is_that_of_its_group_in_the_first_of_two_batches(monkeypatch):
    layer, step, other = SimpleNamespace(layer_name="layers.1"), object(), object()
    for held in (step, [step, other], {"layers.1": step, "layers.0": other}, [{"layers.1": step}, {"layers.1": other}]):
        monkeypatch.setattr(implementation, "get_forward_context", lambda held=held: SimpleNamespace(attn_metadata=held))
        assert implementation.step_of(layer) is step


def page_of(bytes_of_16):
    """A format whose page of 16 tokens has as many bytes as is said, and whose other pages have ten a token."""
    page = lambda size: bytes_of_16 if size == 16 else 10 * size
    spec = lambda heads, *sizes, block_size=16: SimpleNamespace(page_bytes=page(block_size), block_size=block_size)
    fmt = SimpleNamespace(cache_spec=spec)
    fmt.latents, fmt.of_keys_and_values = lambda dtype: fmt, lambda: fmt
    return fmt


def test_bytes_of_a_token_are_those_of_the_smallest_page(monkeypatch):
    """A format of another package may have pages that are no whole number of bytes a token."""
    impl = bare(dtype=torch.bfloat16, head_size=64)
    for module in (implementation, backend):
        monkeypatch.setattr(module, "format_of", lambda name, dtype, latent=False: page_of(int(name) - 8 * latent))
    asks = (lambda name: impl._token_bytes(name), lambda name: mla.latent_bytes(page_of(int(name)), (256, 64), torch.bfloat16))
    for ask in asks:
        assert ask("176") == 11
        with pytest.raises(ValueError, match="block_size=16: a page of 168 bytes is no whole number of bytes a token"):
            ask("168")
    given = (64, torch.bfloat16)
    assert QuantKVBackend.supports_combination(*given, "176", None, False, False, False, False, None) is None
    assert "block_size=16" in QuantKVBackend.supports_combination(*given, "168", None, False, False, False, False, None)
    assert "block_size=16" in QuantKVBackend.supports_combination(*given, "176", None, True, False, False, False, None)  # of latents
    assert QuantKVBackend.supports_combination(*given, "168", 32, False, False, False, False, None) is None
    assert QuantKVBackend.token_bytes(page_of(168), 64, 32, torch.bfloat16) == 10


def test_what_vllm_asks_a_backend_is_answered_with_yes_but_for_lengths_that_only_the_device_knows():
    answers = ("sink", "sliding_window", "alibi_sqrt", "mm_prefix", "batch_invariance", "device_cpu_query_lens_mismatch")
    assert [getattr(QuantKVBackend, f"supports_{name}")() for name in answers] == [True] * 5 + [False]
    assert QuantKVBackend.is_supported_on_current_device(64, 128, True) is True
    assert QuantKVBackend.set_head_size_v(128) is None


class Loaded:
    """Layers whose weights are loaded, in a model of one group: `layers.0` owns pages, `layers.1` reads these."""

    def __init__(self, monkeypatch, policy, stored="quantkv_levels4", **of_layers):
        self.config, self.done = layers_configuration(), []
        self.config.cache_config.block_size, self.config.scheduler_config = 16, SimpleNamespace(max_num_seqs=2)
        monkeypatch.setattr(implementation, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(implementation, "measure_before_sizing", lambda config: self.done.append(config))
        monkeypatch.setattr(PagedLayer, "reserve_copies", lambda paged, *given: self.done.append((paged, *given)))
        self.impls = []
        for number, shares in enumerate((None, "layers.0")):
            impl = bare(policy=policy, kv_cache_dtype=stored, config=self.config, dtype=torch.float32, kv_sharing_target_layer_name=shares)
            impl.num_kv_heads, impl.head_size, impl.attention = HEADS, 64, LayerAttention(2 * HEADS, 0.125)
            layer = SimpleNamespace(impl=impl, layer_name=f"layers.{number}", head_size_v=64, attn_backend=QuantKVBackend, **of_layers)
            self.config.compilation_config.static_forward_context[layer.layer_name] = layer
            self.impls.append(impl)

    def load(self):
        for impl in self.impls:
            impl.process_weights_after_loading(torch.float32)


@pytest.mark.parametrize("statistics", ["off", "auto"])
def test_a_loaded_layer_is_what_its_policy_says(statistics, monkeypatch):
    """The model is measured before its pages are sized where statistics are wanted. A layer that reads another's pages takes no copies."""
    policy = Policy("levels4", {0: "int8"}, statistics=statistics)
    loaded = Loaded(monkeypatch, policy)
    loaded.load()
    owner, reader = loaded.impls
    copies = (owner.paged, 16, 2, torch.device(current_platform.device_type))
    assert loaded.done == ([copies] if statistics == "off" else [loaded.config, copies, loaded.config])
    assert owner.format.name == reader.format.name == "int8" and owner.number == reader.number == 0
    assert owner.owner is None and reader.owner is owner and owner.lends and not reader.lends
    assert [impl.wants_statistics for impl in loaded.impls] == [statistics == "auto"] * 2
    assert (owner.observed_as, reader.observed_as) == ((0, None) if statistics == "auto" else (None, None))
    layers = loaded.config.compilation_config.static_forward_context.values()
    assert [layer.attn_backend for layer in layers] == [QuantKVBackend.of(get_format("int8"))] * 2


def test_weights_that_are_loaded_again_leave_what_was_measured(monkeypatch):
    loaded = Loaded(monkeypatch, Policy("levels4", statistics="auto"))
    measured = []

    def with_calibration(config, found, number):
        measured.append((found, number))
        return replace(config, full_precision="as measured")

    monkeypatch.setattr(LayerConfig, "with_calibration", with_calibration)
    loaded.load()
    assert measured == []
    owner = loaded.impls[0]
    pages = owner.paged
    owner.take_statistics("calibration")
    assert measured == [("calibration", 0)] and owner.paged.config.full_precision == "as measured"
    assert not owner.wants_statistics and owner.observed_as is None
    owner.process_weights_after_loading(torch.float32)
    assert measured == [("calibration", 0)] * 2 and owner.paged is pages and pages.config.full_precision == "as measured"


def test_scales_of_a_checkpoint_are_taken_and_taken_again(monkeypatch):
    """By codecs that have one a tensor."""
    loaded = Loaded(monkeypatch, None, "quantkv_fp8", _k_scale_float=0.5, _v_scale_float=0.25)
    loaded.load()
    owner = loaded.impls[0]
    per_tensor = owner.format.k.scaled_per_tensor
    assert owner.paged.scales == ((0.5, 0.25) if per_tensor else (1.0, 1.0))
    layer = loaded.config.compilation_config.static_forward_context["layers.0"]
    layer._k_scale_float = 2.0
    owner.process_weights_after_loading(torch.float32)
    assert owner.paged.scales == ((2.0, 0.25) if per_tensor else (1.0, 1.0)) and owner.number is None


@pytest.mark.parametrize(("rank", "size", "all_heads"), [(0, 1, HEADS), (1, 2, 2 * HEADS)])
def test_kv_heads_of_a_layer_are_those_of_all_ranks(rank, size, all_heads, monkeypatch):
    monkeypatch.setattr(implementation, "get_tensor_model_parallel_rank", lambda: rank)
    impl = bare(num_kv_heads=HEADS, config=layers_configuration())
    impl.config.parallel_config.tensor_parallel_size = size
    assert impl._shard() == Shard(rank, size) and impl._all_kv_heads() == all_heads


def stepping(monkeypatch):
    """A layer, and what it does with a step's metadata."""
    impl, done = bare(scale=0.25, _per_layer={"sinks": "own"}, attention=LayerAttention(4, 0.25, AttentionOptions(window=8))), []
    impl.cache_of = lambda kv_cache: ("cache", kv_cache.numel())
    step = SimpleNamespace(write=lambda *given: done.append(("write", *given)))
    step.attend = lambda *given, **named: done.append(("attend", given, named))
    step.own_rows = lambda *given: {"rows": given}
    monkeypatch.setattr(implementation, "step_of", lambda layer: step)
    return impl, step, done


def test_rows_are_stored_once_vllm_has_given_the_layer_its_pages(monkeypatch):
    """A tensor without bytes stands for pages until then."""
    impl, _, done = stepping(monkeypatch)
    for size in (0, 1, 2):
        impl.do_kv_cache_update("layer", "key", "value", torch.empty(size), "slots")
    assert done == [("write", ("cache", size), "key", "value", "slots") for size in (1, 2)]


def test_the_pass_that_sizes_memory_claims_scratch_and_answers_zeros(monkeypatch):
    impl, _, done = stepping(monkeypatch)
    monkeypatch.setattr(implementation, "claim_scratch", lambda *given: done.append(given))
    query, out = torch.ones(3, 4, 16), torch.full((3, 4, 16), 7.0)
    assert impl.forward(None, query, None, None, torch.empty(0), None, out) is out and not out.any()
    assert len(done) == 1 and done[0][0] is query and done[0][1] is impl.attention.options


def test_a_step_attends_with_what_the_layer_has(monkeypatch):
    """Its own rows where it reads them as given: the owner's, where the pages are another's."""
    impl, step, done = stepping(monkeypatch)
    out, owner = torch.empty(1), bare()
    for reads, whose, lends in ((True, None, True), (True, owner, False), (False, None, False)):
        impl.attention, impl.owner, impl.lends = replace(impl.attention, own_rows=reads), whose, lends
        assert impl.forward(None, "query", "key", "value", torch.empty(2), step, out) is out
    given = (("cache", 2), "query", 0.25, AttentionOptions(window=8))
    rows = [{"rows": (impl, "key", "value", True)}, {"rows": (owner, None, None, False)}, {}]
    assert done == [("attend", given, {"out": out, "sinks": "own", **own}) for own in rows]
    with pytest.raises(NotImplementedError, match="fused quantization of the output"):
        impl.forward(None, "query", "key", "value", torch.empty(2), step, out, output_scale=torch.ones(1))


@pytest.mark.parametrize("sqrt", [False, True])
def test_slopes_count_the_distance_of_a_key_or_its_square_root(sqrt, made):
    """As the model says (Step-1 takes the root), over pages and in the pass that measures the model alike."""
    tokens, slopes = 20, [0.5, 0.25]
    impl = QuantKVImpl(2, 16, 0.25, 1, slopes, use_alibi_sqrt=sqrt)
    assert impl.attention.options == AttentionOptions(alibi_sqrt=sqrt)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(tokens, heads, 16, generator=generator) for heads in (2, 1, 1))
    behind = (torch.arange(tokens)[:, None] - torch.arange(tokens)).clamp(min=0)
    bias = torch.tensor(slopes)[:, None, None] * (behind.sqrt() if sqrt else behind)
    scores = (0.25 * torch.einsum("thd,sd->hts", query, key[:, 0]) - bias).masked_fill(
        torch.ones(tokens, tokens).triu(1).bool(), -torch.inf
    )
    expected = torch.einsum("hts,sd->thd", scores.softmax(2), value[:, 0])

    cache = PagedCache(get_format("fp32").cache_spec(1, 16), 2)
    table, starts, lens = torch.tensor([[0, 1]]).int(), torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
    step = serving.Step("mixed", Batch(starts, lens, tokens), table, torch.arange(tokens))
    step.write(cache, key, value)
    impl.cache_of, impl._per_layer = lambda kv_cache: cache, impl.attention.tensors(torch.device("cpu"))
    found = impl.forward(None, query, key, value, None, step, torch.empty(tokens, 2, 16))
    impl.watch(SeenLayers("vllm"))
    observed = impl.forward(None, query, key, value, None, None, torch.empty(tokens, 2, 16))
    assert torch.allclose(found, expected, atol=1e-5) and torch.allclose(observed, expected, atol=1e-5)


def test_a_layer_keeps_its_pages_while_vllms_tensor_is_the_same():
    """Sinks are brought to the device with it, and a layer that reads another's pages knows whose they are."""
    sinks = torch.arange(2.0 * HEADS)
    impl = bare(attention=LayerAttention(2 * HEADS, sinks=sinks), _pages=(lambda: None, None), owner=bare())
    for each in (impl, impl.owner):
        each.paged = PagedLayer(LayerConfig(get_format("int4")), Heads(HEADS, 64, 64), torch.float32)
    memory = torch.zeros(4, HEADS, 16, impl.paged.spec(16).page_bytes // 16, dtype=torch.uint8)
    pages = impl.pages_of(memory)
    assert (pages.num_blocks, pages.spec.block_size) == (4, 16) and impl.paged.owner is impl.owner.paged
    assert impl._per_layer.keys() == {"sinks"} and torch.equal(impl._per_layer["sinks"], sinks)
    assert impl.pages_of(memory) is pages
    other = memory[:2]
    assert impl.pages_of(other) is not pages and impl.pages_of(other).num_blocks == 2
    impl.pages_per_block = 2
    wrapped = impl._wrap(torch.zeros(4, HEADS, 32, memory.shape[3], dtype=torch.uint8))
    assert (wrapped.num_blocks, wrapped.spec.block_size) == (8, 16)
