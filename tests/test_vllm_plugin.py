"""The plug-in against the classes of the vLLM that is installed: signatures, page bytes, refusals, batches. No model, no engine."""

import contextlib
import inspect
import os
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vLLM looks for a device
vllm = pytest.importorskip("vllm")

from vllm.config import VllmConfig, compilation  # noqa: E402
from vllm.config.cache import get_kv_cache_dtype_handler  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.model_executor.layers.attention import mla_attention  # noqa: E402
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend  # noqa: E402
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend  # noqa: E402
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend  # noqa: E402
from vllm.model_executor.layers.attention.static_sink_attention import create_static_sink_attention_backend  # noqa: E402
from vllm.model_executor.models.whisper_causal import create_whisper_attention_backend_with_block_pooling  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402
from vllm.v1 import kv_cache_interface as pages  # noqa: E402
from vllm.v1.attention import backend as contract  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.worker_base import WorkerBase  # noqa: E402

import quantkv.integrations.vllm as plug_in  # noqa: E402
from quantkv import PagedCache, assumed, calls, get_format, implementations, known_models  # noqa: E402
from quantkv.calls import AttendCall, AttentionOptions  # noqa: E402
from quantkv.engine.layer import LayerAttention, PagedLayer  # noqa: E402
from quantkv.engine.layer_config import LayerConfig  # noqa: E402
from quantkv.engine.warm_up import WarmUps, summary  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.geometry import Heads  # noqa: E402
from quantkv.integrations import asked, serving  # noqa: E402
from quantkv.integrations.seen_layers import SeenLayers  # noqa: E402
from quantkv.integrations.vllm import blocks, connectors, implementation, metadata, mixed, mla, platform, statistics  # noqa: E402
from quantkv.integrations.vllm.asked import policy_of, reads_own_rows  # noqa: E402
from quantkv.integrations.vllm.backend import BLOCK_SIZES, UNQUANTIZED, QuantKVBackend, format_of  # noqa: E402
from quantkv.integrations.vllm.blocks import PackedBlocks, kernel_pages  # noqa: E402
from quantkv.integrations.vllm.implementation import QuantKVImpl  # noqa: E402
from quantkv.integrations.vllm.metadata import QuantKVBuilder  # noqa: E402
from quantkv.integrations.vllm.mla_metadata import LatentMetadata, QuantKVLatentBuilder  # noqa: E402
from quantkv.policy import Policy  # noqa: E402

PAIRS = [
    (QuantKVBackend, contract.AttentionBackend),
    (QuantKVImpl, contract.AttentionImpl),
    (QuantKVBuilder, contract.AttentionMetadataBuilder),
    (mla.QuantKVLatentBackend, mla_attention.MLACommonBackend),
    (mla.QuantKVLatentImpl, mla_attention.MLACommonImpl),
    (QuantKVLatentBuilder, contract.AttentionMetadataBuilder),
]
HEADS = 3


class Layer:
    """A layer whose pages vLLM has not bound yet."""

    kv_cache = torch.empty(0)

    def __init__(self, kind, name="int4"):
        self.asked = []
        told = {
            "attend of 1 x 1 queries": "hopper",
            "attend of 2 x 9 queries of 9 keys": "triton",
            "attend of 1 x 9 queries of 64 keys": "triton",
        }
        self.impl = SimpleNamespace(kind=kind, format=get_format(name), full_precision=None, owner=None)
        self.impl.warm_up = lambda *given: self.asked.append(given) or told
        self.impl.who_serves = lambda *given: self.asked.append(given) or told

    def bind_kv_cache(self, kv_cache):
        self.kv_cache = kv_cache


def builder_of(layers, device, width=24, block_size=64, alignment=None, speculative=None, group=None):
    names = layers if isinstance(layers, dict) else {str(number): layer for number, layer in enumerate(layers)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=names, cudagraph_capture_sizes=[]),
        speculative_config=speculative,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    spec = SimpleNamespace(block_size=block_size, block_stride_alignment=alignment)
    return QuantKVBuilder(spec, group or list(names), config, torch.device(device), block_table_width=width)


def test_kernels_are_compiled_when_pages_are_bound(monkeypatch):
    """For the pages and tables that vLLM has, once for layers that the same kernels serve; pages that lie otherwise are another kind."""
    monkeypatch.setattr(serving, "served", {})
    layers = [Layer("a"), Layer("a"), Layer("b")]
    builder_of(layers, "cuda")
    assert [layer.asked for layer in layers] == [[], [], []]
    pages = torch.empty(5, HEADS, 64, 40, dtype=torch.uint8)
    for layer in layers:
        assert [layer.asked for layer in layers] == [[], [], []]  # kinds are compiled together
        layer.bind_kv_cache(pages)
        assert layer.kv_cache is pages
    assert [[given[1:] for given in layer.asked] for layer in layers] == [[(1, 24)], [], [(1, 24)]]
    assert layers[0].asked[0][0] is pages
    layers[1].bind_kv_cache(pages[::2])
    assert len(layers[1].asked) == 1
    of_latents = pages[:, 0]
    for tokens, times in ((64, 2), (32, 3), (64, 3)):
        layers[1].bind_kv_cache(of_latents[:, :tokens])
        assert len(layers[1].asked) == times
    del layers[1].asked[1:]
    again = [Layer.__new__(Layer) for _ in layers]  # vLLM profiles with other pages first, and makes its builders again
    for layer, known in zip(again, layers):
        layer.asked, layer.impl = known.asked, known.impl
    builder_of(again, "cuda")
    for layer in again:
        layer.bind_kv_cache(pages[:2])
    assert [len(layer.asked) for layer in layers] == [1, 1, 1]
    builder = builder_of(again, "cuda", width=48)
    again[0].bind_kv_cache(pages[:0])
    again[1].bind_kv_cache(pages)
    assert [len(layer.asked) for layer in layers] == [1, 1, 1]
    monkeypatch.setattr(builder, "_build", lambda *given, **more: len(layers[1].asked))
    shared = SimpleNamespace(max_seq_len=1)
    assert builder.build(0, shared) == builder.build_for_cudagraph_capture(shared) == 2  # before a step, at the latest
    assert [len(layer.asked) for layer in layers] == [1, 2, 1]


def test_groups_of_layers_are_warmed_up_together_and_told_of_once(monkeypatch, caplog):
    """vLLM has a builder for each group; one group's layers may be of two kinds, and a kind in two groups."""
    monkeypatch.setattr(serving, "served", {})
    monkeypatch.setattr(metadata.logger, "propagate", True)
    layers = [Layer("window"), Layer("window"), Layer("full")]
    names = {str(number): layer for number, layer in enumerate(layers)} | {"mamba": SimpleNamespace()}
    for group in (["0"], ["1", "2"]):
        builder_of(names, "cuda", group=group)
    pages = torch.empty(5, HEADS, 64, 40, dtype=torch.uint8)
    with caplog.at_level("INFO", metadata.logger.name):
        for layer in layers:
            assert [layer.asked for layer in layers] == [[], [], []]
            layer.bind_kv_cache(pages)
    assert [len(layer.asked) for layer in layers] == [1, 0, 1]
    assert [record.getMessage()[:26] for record in caplog.records] == ["quantkv: 2 layers of int4:", "quantkv: 1 layers of int4:"]


def test_on_a_cpu_who_serves_is_asked(monkeypatch):
    monkeypatch.setattr(serving, "served", {})
    layers = [Layer("a"), Layer("a")]
    builder_of(layers, "cpu")
    assert [layer.asked for layer in layers] == [[(torch.device("cpu"), 64, 1, 24)], []]


def test_blocks_that_hold_several_pages(monkeypatch):
    """Of 80 tokens, in five pages of 16: the kernels get tables and tensors of pages, where a graph may replay them."""
    monkeypatch.setattr(serving, "served", {})
    layer = Layer("a")
    builder = builder_of([layer], "cpu", block_size=80, alignment=5 * 16)
    assert layer.asked == [(torch.device("cpu"), 16, 1, 5 * 24)] and layer.impl.pages_per_block == 5
    blocks = torch.tensor([[3, 0], [1, 7]], dtype=torch.int32)
    table = builder.pages.table(blocks)
    assert table.tolist() == [[15, 16, 17, 18, 19, 0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 35, 36, 37, 38, 39]]
    assert builder.pages.table(blocks + 1).data_ptr() == table.data_ptr() and table[0, 0] == 20
    for size, alignment in ((64, None), (16, None), (64, 16)):
        whole = builder_of([layer], "cpu", block_size=size, alignment=alignment)
        assert layer.impl.pages_per_block == 1 and whole.pages.table(blocks) is blocks


def test_pages_of_a_packed_block_stand_one_stride_apart():
    """Two layers of 10 and 6 bytes a token share blocks of 32 tokens: a page of each, then the next of each."""
    size = 32 * 2 * 16
    memory = torch.arange(3 * size, dtype=torch.int32)
    place = 0
    for width in (10, 6):
        whole = memory.as_strided((3, 2, 32, width), (size, 32 * width, width, 1), place)
        pages = kernel_pages(whole, 2)
        assert pages.shape == (6, 2, 16, width) and kernel_pages(whole, 1) is whole
        for page in range(6):
            assert pages[page].flatten().tolist() == list(range(page * size // 2 + place // 2, page * size // 2 + place // 2 + 32 * width))
        place += 2 * 32 * width


def test_vllm_asks_the_plug_in_how_blocks_are_cut_for_its_own_types_alone():
    """However often it is registered."""
    plug_in.register()
    asked = {}
    for name in ("quantkv_int4", "quantkv_policy:digest", "auto", "fp8"):
        config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=name), model_config=None)
        asked[name] = resolve_obj_by_qualname(current_platform.get_kv_cache_config_builder_cls(config))
        current_platform.update_block_size_for_backend(config)
    ours, again, *others = asked.values()
    assert ours is again is PackedBlocks and others == [DefaultKVCacheConfigBuilder] * 2
    assert WorkerBase.get_supported_kv_cache_layouts.__module__ == PackedBlocks.__module__


def test_a_packed_block_stays_whole():
    """vLLM cuts its own blocks into those that the kernels read."""
    spec = SimpleNamespace(block_size=80, block_stride_alignment=80)
    assert QuantKVBackend.get_supported_kernel_block_sizes(spec) == [80]
    spec.block_stride_alignment = None
    assert QuantKVBackend.get_supported_kernel_block_sizes(spec) == QuantKVBackend.get_supported_kernel_block_sizes() == BLOCK_SIZES


def test_who_serves_a_layer_on_a_cpu_is_what_its_calls_choose(monkeypatch):
    """The kinds of calls that the engine makes, each resolved: here by a rule that no implementation has."""
    chosen = lambda call: ("cpu" if isinstance(call, AttendCall) else "reference", {})
    monkeypatch.setattr(implementations, "resolve", chosen)
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.paged = PagedLayer(LayerConfig(get_format("int4")), Heads(HEADS, 64, 64), torch.float32)
    impl.attention = LayerAttention(2 * HEADS)
    scheduler = SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64)
    impl.config = SimpleNamespace(scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=256))
    told = impl.who_serves(torch.device("cpu"), 32, 3, 8)
    writes = {f"write of {n} tokens": "reference" for n in (1, 8, 64)}
    assert told == writes | {f"attend of {s} x {n} queries": "cpu" for n in (1, 3) for s in (1, 8)}


@pytest.mark.parametrize("own_rows", [True, False])
def test_layers_read_the_rows_of_their_step(own_rows):
    """Rows beyond the tokens are padding. A layer whose pages are another's reads that one's rows too, whatever took their memory since."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, other = (torch.randn(9, heads, 64, generator=generator) for heads in (4, 2, 2, 2))
    cache = PagedCache(get_format("int2").cache_spec(2, 64), 4)
    before, tokens, table = torch.randn(2, 5, 2, 64, generator=generator), 7, torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    cache.write(*before, torch.arange(5) + 32)
    slots = torch.tensor([37, 38, 39, 40, 16, 17, 18])
    starts, lens = torch.tensor([0, 4, 7], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
    step = serving.Step("mixed", calls.Batch(starts, lens, 4), table, slots, num_tokens=tokens)
    owner, reader = (QuantKVImpl.__new__(QuantKVImpl) for _ in "ab")
    reader.owner, owner.lends = owner, True
    found = []
    for impl, rows in ((owner, (key.clone(), value.clone())), (reader, (other, other))):
        impl.scale, impl._per_layer, impl.cache_of = 0.125, {}, lambda kv_cache: cache
        impl.attention = LayerAttention(4, 0.125, own_rows=own_rows)
        out = torch.full((9, 4, 64), 7.0)
        if impl is owner:
            step.write(cache, *rows)
        found.append(impl.forward(None, query, *rows, None, step, out))
        for t in rows:
            t.fill_(float("nan"))
    batch = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": starts, "scale": 0.125}
    own = (key[:tokens], value[:tokens]) if own_rows else None
    expected = cache.attend(query[:tokens], own=own, **batch)
    for out in found:
        assert torch.equal(out[:tokens], expected) and bool((out[tokens:] == 7).all())


def test_what_prompts_read_is_what_a_configuration_says(tmp_path):
    """Where answers must not depend on the batch, nobody's prompt reads its own rows: the batch decides how it is cut."""
    files = {prompt: tmp_path / f"{prompt}.json" for prompt in ("own", "stored")}
    for prompt, path in files.items():
        Policy("int4", prompt=prompt).save(path)

    def asked(invariant=False, policy=None, **options):
        options |= {} if policy is None else {"quantkv_policy": str(files[policy])}
        cache = SimpleNamespace(cache_dtype="quantkv_int4" if policy is None else "quantkv_policy")
        model = SimpleNamespace(use_mla=False)
        return reads_own_rows(SimpleNamespace(additional_config=options, cache_config=cache, model_config=model), invariant)

    assert asked() and asked(policy="own") and not asked(policy="stored") and not asked(quantkv_prompt="stored")
    assert asked(policy="stored", quantkv_prompt="own") and not asked(policy="own", quantkv_prompt="stored")
    assert not asked(True) and not asked(True, policy="own") and not asked(True, quantkv_prompt="stored")
    with pytest.raises(ValueError, match="quantkv_prompt='own' with VLLM_BATCH_INVARIANT=1"):
        asked(True, quantkv_prompt="own")
    with pytest.raises(ValueError, match="quantkv_prompt='fresh': one of own, stored is needed"):
        asked(quantkv_prompt="fresh")


def test_a_line_of_the_log_names_each_number_of_queries_once():
    who = Layer("a").impl.who_serves()
    assert summary(who) == "attend of 1 x 1 queries by hopper; 9 queries among others by triton"


BATCHES = {  # queries and keys of each sequence, padding sequences, the kind, tokens
    "decode": ([1, 1, 1], [5, 6, 7], 0, "decode", 3),
    "padded decode": ([1, 1], [5, 6], 2, "decode", 2),
    "prompts": ([30, 64], [30, 80], 0, "mixed", 94),
    "mixed": ([1, 1, 64, 50], [50, 60, 64, 70], 0, "mixed", 116),
    "padded mixed": ([1, 64], [50, 64], 2, "mixed", 65),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    plug_in.register()
    plug_in.register()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda c: c.__name__)
def test_methods_are_called_as_vllm_defines_them(ours, theirs):
    assert not inspect.isabstract(ours)
    compared = 0
    named = {name: vars(of)[name] for of in reversed(ours.__mro__) if of.__module__.startswith("quantkv.") for name in vars(of)}
    for name, method in named.items():
        known = inspect.getattr_static(theirs, name, None)
        if not isinstance(known, staticmethod | classmethod) and not inspect.isfunction(known):
            assert not callable(known) or name in ("__orig_bases__", "__init_subclass__"), name
            continue
        wanted, taken = (list(inspect.signature(getattr(c, name)).parameters) for c in (theirs, ours))
        assert type(method) is type(known), name
        if taken[-1:] == ["latents"]:  # all further ones
            taken, wanted = taken[:-1], wanted[: len(taken) - 1]
        assert taken[: len(wanted)] == [p for p in wanted if p not in ("args", "kwargs")], name
        compared += 1
    assert compared >= 3


def test_what_vllm_calls_by_other_means_is_there():
    """do_kv_cache_update, process_weights_after_loading and the flags are no abstract methods: vLLM looks them up."""
    assert QuantKVBackend.forward_includes_kv_cache_update is False
    assert list(inspect.signature(QuantKVImpl.do_kv_cache_update).parameters)[1:] == ["layer", "key", "value", "kv_cache", "slot_mapping"]
    wanted = inspect.signature(contract.AttentionImplBase.process_weights_after_loading)
    assert inspect.signature(QuantKVImpl.process_weights_after_loading).parameters.keys() == wanted.parameters.keys()
    assert AttentionBackendEnum[QuantKVBackend.get_name()].get_class() is QuantKVBackend


def test_a_type_of_ours_names_custom_before_a_model_names_a_backend(monkeypatch):
    """Gemma 4's hook names Triton's backend where none is named."""
    seen, custom, triton = [], AttentionBackendEnum.CUSTOM, AttentionBackendEnum.TRITON_ATTN
    monkeypatch.setattr(VllmConfig, "try_verify_and_update_config", lambda self: seen.append(self.attention_config.backend))
    for _ in range(2):
        platform.take_custom()
    stored = {name: SimpleNamespace(cache_dtype=name) for name in ("quantkv_4bit", "fp8")}
    for cache, backend in ((stored["quantkv_4bit"], None), (stored["quantkv_4bit"], triton), (stored["fp8"], None), (None, None)):
        config = SimpleNamespace(attention_config=SimpleNamespace(backend=backend), cache_config=cache)
        VllmConfig.try_verify_and_update_config(config)
    assert seen == [custom, triton, None, None]


def test_backends_of_two_sizes_are_vllms_where_custom_was_not_asked_for(monkeypatch):
    """MiMo names them whatever was asked for."""
    asked = SimpleNamespace(attention_config=SimpleNamespace(backend=AttentionBackendEnum.CUSTOM))
    monkeypatch.setattr(platform, "get_current_vllm_config", lambda: asked)
    members = [AttentionBackendEnum[name] for name in platform.TWO_SIZES]
    assert [member.get_class() for member in members] == [QuantKVBackend] * 2
    asked.attention_config.backend = None
    assert [member.get_class().get_name() for member in members] == list(platform.TWO_SIZES)


def selector(**given):
    return AttentionSelectorConfig(**{**USUAL, **given})


@pytest.mark.parametrize("is_cpu", [True, False])
def test_custom_is_for_latents_too(monkeypatch, is_cpu):
    """On a GPU vLLM's own platform goes on with the backend of latents in place of CUSTOM; all else goes on as it was."""
    seen = []

    class Platform:
        @classmethod
        def is_cpu(cls):
            return is_cpu

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            seen.append(selected_backend)
            return "theirs"

        @classmethod
        def check_and_update_config(cls, vllm_config):
            seen.append(vllm_config)
            for part in (vllm_config.scheduler_config, vllm_config.cache_config):
                vars(part).update(dict.fromkeys(vars(part), 2))

    dims = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128)
    model = SimpleNamespace(hf_text_config=dims, dtype=torch.bfloat16, architecture="DeepseekV3ForCausalLM")
    for module in (platform, mla):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: SimpleNamespace(model_config=model))
    monkeypatch.setattr(platform, "current_platform", Platform())
    platform.take_custom()
    platform.take_custom()
    custom, latents = AttentionBackendEnum.CUSTOM, AttentionBackendEnum[plug_in.LATENTS]
    ask = Platform.get_attn_backend_cls
    rows = selector(head_size=576, use_mla=True)
    found = ask(custom, rows), ask(custom, selector()), ask(AttentionBackendEnum.FLASHMLA, rows), ask(None, rows)
    if is_cpu:
        assert found == (plug_in.LATENT_BACKEND, plug_in.BACKEND, "theirs", "theirs")
        assert seen == [AttentionBackendEnum.FLASHMLA, None]
        with pytest.raises(ValueError, match="batch invariance"):
            ask(custom, rows._replace(use_batch_invariant=True))
    else:
        assert found == ("theirs",) * 4 and seen == [latents, custom, AttentionBackendEnum.FLASHMLA, None]
    asked = SimpleNamespace(backend=custom)
    config = SimpleNamespace(model_config=model, attention_config=asked, scheduler_config=SimpleNamespace(), cache_config=SimpleNamespace())
    for part, names in ((config.scheduler_config, platform.OF_STEPS), (config.cache_config, platform.OF_PAGES)):
        vars(part).update(dict.fromkeys(names, 1))
    model.use_mla = True
    seen.clear()
    Platform.check_and_update_config(config)
    asked_for = {*vars(config.scheduler_config).values(), *vars(config.cache_config).values()}
    assert seen == [config] and asked_for == {1 if is_cpu else 2}
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        with pytest.raises(NotImplementedError, match=r"VLLM_BATCH_INVARIANT=1 with latents \(MLA\)"):
            Platform.check_and_update_config(config)
    model.architecture = "KimiLinearForCausalLM"
    with pytest.raises(NotImplementedError, match="KimiLinearForCausalLM has layers that store latents themselves"):
        Platform.check_and_update_config(config)
    model.architecture, dims.index_topk = "DeepseekV32ForCausalLM", 2048
    with pytest.raises(NotImplementedError, match="DeepseekV32ForCausalLM attends to latents that a sparse indexer selects"):
        Platform.check_and_update_config(config)
    asked.backend = None
    Platform.check_and_update_config(config)


RANK, ROPE, NOPE, VALUES, COUNT = 256, 64, 32, 48, 4  # of a model with latents; COUNT query heads


class LatentLayer(torch.nn.Module):
    """What vLLM makes of a layer's up-projection: views of it."""

    def __init__(self, weight):
        super().__init__()
        self.load(weight)

    def load(self, weight):
        up, values = weight.view(RANK, COUNT, NOPE + VALUES).split([NOPE, VALUES], 2)
        for name, made in (("W_UK_T", up.permute(1, 2, 0)), ("W_UV", values.transpose(0, 1))):
            if hasattr(self, name):
                getattr(self, name).data = made
            else:
                setattr(self, name, torch.nn.Parameter(made, requires_grad=False))


def latent_impl(fmt, full_precision=None):
    impl = mla.QuantKVLatentImpl.__new__(mla.QuantKVLatentImpl)
    impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale, impl._projections = RANK, ROPE, (NOPE + ROPE) ** -0.5, {}
    config = LayerConfig(get_format(fmt).latents(torch.float32), full_precision=full_precision)
    impl.paged = PagedLayer(config, Heads(1, RANK, ROPE), torch.float32)
    impl.attention, impl.owner, impl._pages = LayerAttention(COUNT, impl.scale, own_rows=False), None, (lambda: None, None)
    return impl


@pytest.mark.parametrize("fmt", ["int4", "int8", "levels4"])
def test_projections_of_decode_hold_the_rotation_of_latents(fmt):
    """The same answer, of pages that are read as they are stored; the weights, of which vLLM's projections are views, stay as they are,
    and weights that are loaded again come into the same memory."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(RANK, COUNT * (NOPE + VALUES), generator=generator) for _ in range(2)]
    q, rotated = (torch.randn(3, COUNT, n, generator=generator) for n in (NOPE, ROPE))
    impl, layer = latent_impl(fmt), LatentLayer(weights[0].clone())
    layer.kv_cache = torch.zeros(2, 4, 16, impl.paged.spec(16).page_bytes // 16, dtype=torch.uint8)[1]  # a part of vLLM's memory
    cache = impl.pages_of(layer.kv_cache)
    cache.write(torch.randn(40, 1, RANK, generator=generator), torch.randn(40, 1, ROPE, generator=generator), torch.arange(40))
    table, lens = torch.arange(3, dtype=torch.int32).repeat(3, 1), torch.tensor([40, 17, 33], dtype=torch.int32)
    read, where = [], []

    def attend(pages, parts, scale, options, mean):
        assert mean is None
        read.append(pages)
        return pages.attend(torch.cat(parts, 2), block_table=table, seq_lens=lens, scale=scale)

    def ask():
        absorbed = torch.bmm(q.transpose(0, 1), layer.W_UK_T).transpose(0, 1)
        step = SimpleNamespace(decoded=SimpleNamespace(attend=attend))
        out, lse = impl.forward_mqa((absorbed, rotated), layer.kv_cache.view(torch.int8), step, layer)
        assert lse is None
        return torch.bmm(out.transpose(0, 1), layer.W_UV)

    for weight in weights:
        given = weight.clone()
        layer.load(given)
        impl.absorbed, impl._read = False, (None, None)
        expected = ask()
        impl.absorb(layer)
        impl._read = None, None
        found = ask()
        assert torch.equal(given, weight)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        where.append([layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()])
    turned = cache.maps.k is not None  # int8 stores latents as they are
    assert where[0] == where[1] or not turned
    assert [pages.maps.k is None for pages in read] == [not turned, True] * 2


@pytest.mark.parametrize("tokens", [None, FullPrecisionTokens(16, 24), FullPrecisionTokens(0, 24)])
def test_what_prompts_in_chunks_gather_is_compiled_at_start(tokens, monkeypatch):
    """Latents before a chunk: of pages, and of copies where some tokens are at full precision, which no pool is there for yet."""
    impl, gathered = latent_impl("levels4", tokens), []
    cache = torch.zeros(4, 16, impl.paged.spec(16).page_bytes // 16, dtype=torch.uint8)
    impl.dtype, impl.mean, impl.absorbed = torch.float32, None, False
    impl._layer, impl._limits = lambda: SimpleNamespace(kv_cache=cache), lambda *steps: None
    monkeypatch.setattr(mla, "warm_up", lambda *given: {})
    monkeypatch.setattr(PagedCache, "gather", lambda self, table, starts, *rest: gathered.append((self.spec, table.shape, starts.tolist())))
    impl.warm_up(cache, 1, 7)
    pages, plain = impl.pages_of(cache).spec, get_format("none", torch.float32).latents(torch.float32)
    count = 0 if tokens is None else sum(tokens.copied_pages(16))
    copies = [(plain.cache_spec(1, pages.head_size, pages.head_size_v, 16), (1, count), [0, 16 * count])] * (tokens is not None)
    assert gathered == [(pages, (1, 7), [0, 1]), *copies] and impl.paged.pool is None


def test_a_step_over_latents_is_what_its_lengths_say(monkeypatch):
    """Two sequences that decode, or verify, and two prompts; vLLM says which are which. Layers are told who serves, as any other."""
    monkeypatch.setattr(serving, "served", {})
    theirs = mla_attention.MLACommonMetadataBuilder
    monkeypatch.setattr(theirs, "__init__", lambda self, *given, **more: vars(self).update(device=given[3], reorder_batch_threshold=2))
    layer, spec = Layer("a"), SimpleNamespace(block_size=64)
    scheduler = SimpleNamespace(max_num_seqs=4)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"0": layer}), scheduler_config=scheduler)
    builder = QuantKVLatentBuilder(spec, ["0"], config, torch.device("cpu"), 24)
    assert layer.asked == [(torch.device("cpu"), 64, 2, 24)]

    def build(queries, keys, decoded, prefill):
        made = SimpleNamespace(num_decodes=decoded, num_decode_tokens=sum(queries[:decoded]), decoded=None, before=None)
        made.prefill = prefill and SimpleNamespace(query_start_loc=torch.tensor(prefill))
        monkeypatch.setattr(theirs, "build", lambda self, shared, m: made if shared == 0 else None)
        return builder._build(common(queries, keys), 99)

    found = build([1, 2, 5, 7], [5, 6, 30, 40], 2, [0, 5, 12])
    assert found.before.tolist() == [25, 33]
    for step, count, tokens, most, longest in ((found.written, 4, 15, 7, None), (found.decoded, 2, 3, 2, 99)):
        batch = step.batch
        assert batch.cu_seqlens_q.tolist() == [0, 1, 3, 8, 15][: count + 1] and batch.seq_lens.tolist() == [5, 6, 30, 40][:count]
        assert (step.num_tokens, batch.max_query_len, batch.max_seq_len) == (tokens, most, longest)
        assert step.block_table.shape == (count, 8)
    alone = build([1, 1], [5, 6], 2, None)
    assert alone.before is None and alone.decoded.batch.max_query_len == 1
    assert build([5, 7], [30, 40], 0, [0, 5, 12]).decoded is None
    attached = []
    monkeypatch.setattr(builder, "attach_full_precision", lambda step, advance: attached.append(advance))
    for ask in (lambda m: builder.build(0, m), builder.build_for_cudagraph_capture, lambda m: builder.build_for_drafting(m, 0)):
        ask(common([5, 7], [30, 40]))
    assert attached == [True, False, True]
    part = SimpleNamespace(part=lambda count, first=0: (count, first))
    step = LatentMetadata.__new__(LatentMetadata)
    step.num_decodes, step.written = 2, SimpleNamespace(full_precision=part)
    assert step.full_precision_of_prompts(1, 3) == (3, 3)
    step.written.full_precision = None
    assert step.full_precision_of_prompts(1, 3) is None


def test_rows_of_prompts_are_given_or_read_back_from_pages(monkeypatch):
    """As the configuration says. Rows of padding stay zero; the step's metadata says which pages, and what is read at full precision."""
    impl, seen, gathered = latent_impl("int4"), [], []
    monkeypatch.setattr(mla.MLACommonImpl, "forward_mha", lambda self, *given: seen.append(given))
    monkeypatch.setattr(mla, "calls", Counter())

    def gather(cache, workspace, *given):
        gathered.append((cache, workspace.shape, bool(workspace.any()), *given))
        return "stored latents", "stored dimensions"

    impl._gather, impl._layer, impl.cache_of = gather, lambda: SimpleNamespace(kv_cache="bytes"), lambda kv_cache: ("pages", kv_cache)
    prefill = SimpleNamespace(block_table=torch.zeros(2, 3), query_start_loc="starts")
    step = SimpleNamespace(prefill=prefill, before="before", full_precision_of_prompts=lambda first, count: ("part", first, count))
    rows = torch.ones(7, RANK), torch.ones(7, 1, ROPE)
    for own in (True, False):
        impl.reads_own_rows = own
        impl.forward_mha("q", *rows, "cache", step, 1.0, "out", None)
    assert seen == [
        ("q", *rows, "cache", step, 1.0, "out", None),
        ("q", "stored latents", "stored dimensions", "cache", step, 1.0, "out", None),
    ]
    assert gathered == [(("pages", "bytes"), (7, RANK + ROPE), False, prefill.block_table, "starts", "before", 7, ("part", 0, 2))]
    written = []
    step.written = SimpleNamespace(write=lambda cache, *given: written.append(given))
    monkeypatch.setattr(mla, "step_of", lambda layer: step)
    impl._layer, impl.cache_of = lambda: None, lambda kv_cache: None
    for cache in (torch.empty(0), torch.empty(1)):
        impl.do_kv_cache_update(*rows, cache, torch.arange(7)[None], "quantkv_int4", None)
    ((latents, rotated, slots, mean),) = written
    assert latents.shape == (7, 1, RANK) and rotated is rows[1] and slots.tolist() == list(range(7)) and mean is None
    assert mla.calls == {"mixed": 2, "write": 1}


@pytest.mark.parametrize("fmt", ["levels4", "fp8"])
def test_the_mean_of_latents_comes_back_in_the_space_of_what_decode_reads(fmt):
    """It is of the one head and the one bucket of positions; fp8 takes none off."""
    impl = latent_impl(fmt)
    means = torch.randn(1, 1, RANK, generator=torch.Generator().manual_seed(0))
    impl.measured, impl.number, impl.dtype = SimpleNamespace(layers={3: SimpleNamespace(key_mean=means)}), 3, torch.float32
    config = impl._calibrated(impl.paged.config)
    assert config is impl.paged.config
    if fmt == "fp8":
        assert impl.mean is None
        return
    assert torch.equal(impl.mean, means[0, 0]) and impl._mean_of_outputs is impl.mean
    pages = torch.zeros(4, 16, impl.paged.spec(16).page_bytes // 16, dtype=torch.uint8)
    impl._layer, impl.absorbed = lambda: SimpleNamespace(kv_cache=pages), True
    vars(impl).pop("_mean_of_outputs")
    found, map_ = impl._mean_of_outputs, impl.pages_of(pages).maps.k
    assert found.dtype == torch.float32 and torch.allclose(map_.inverse[0].float() @ found, impl.mean, atol=1e-5)
    assert not torch.allclose(found, impl.mean, atol=0.1)
    asked = []
    step = SimpleNamespace(decoded=SimpleNamespace(attend=lambda *given, mean: asked.append(mean)))
    impl.forward_mqa(None, None, step, impl._layer())
    impl.mean = None
    impl.forward_mqa(None, None, step, impl._layer())
    assert asked[0] is found and asked[1] is None


def test_no_pass_of_the_compiler_writes_latents():
    """vLLM's own kernel, which it would put in place of our write, knows its own types alone."""
    passes = compilation.PassConfig(fuse_rope_kvcache_cat_mla=True)
    mla.keep_writes(SimpleNamespace(compilation_config=SimpleNamespace(pass_config=passes)))
    assert passes.fuse_rope_kvcache_cat_mla is False


def test_the_digest_of_latents_says_the_dtype_of_rotated_dimensions():
    def digest(use_mla, dtype):
        model = SimpleNamespace(use_mla=use_mla, dtype=dtype)
        cache = SimpleNamespace(cache_dtype="quantkv_int4", kv_cache_dtype_skip_layers=[])
        return connectors.page_digest(SimpleNamespace(model_config=model, cache_config=cache, additional_config={}), [16], "LBHNC")

    assert digest(False, torch.bfloat16) == digest(False, torch.float16)
    assert len({digest(False, torch.bfloat16), digest(True, torch.bfloat16), digest(True, torch.float16)}) == 3


def test_types_are_known():
    for name in asked.options():
        assert get_kv_cache_dtype_handler(name).torch_dtype() == torch.uint8
        assert QuantKVBackend.supports_kv_cache_dtype(name)
    assert not QuantKVBackend.supports_kv_cache_dtype("fp8")


def test_pairs_are_of_formats_that_have_one_codec():
    known = asked.names()
    assert known["quantkv_levels4/trellis2"] == "levels4/trellis2" and known["quantkv_int4+int8"] == "int4+int8"
    assert known["quantkv_k8v4"] == "k8v4" and known["quantkv_none"] == "none"
    assert known.keys().isdisjoint({"quantkv_k8v4/int4", "quantkv_int4/k8v4", "quantkv_int4/int4"})


def test_registering_stands_around_all_that_the_plug_in_changes(monkeypatch):
    done = []
    for module, name in ((connectors, "name_page_types"), (platform, "take_custom"), (blocks, "pack_blocks")):
        monkeypatch.setattr(module, name, lambda name=name: done.append(name))
    plug_in.register()
    assert done == ["name_page_types", "take_custom", "pack_blocks"]


def test_a_connector_is_made_under_a_type_that_vllm_knows(tmp_path):
    """Types of vLLM's own keep their names."""
    extra = {"shared_storage_path": str(tmp_path)}
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="quantkv_int4", kv_cache_dtype_skip_layers=[]),
        model_config=SimpleNamespace(use_mla=False, dtype=torch.float32),
        kv_transfer_config=SimpleNamespace(kv_connector="ExampleConnector", kv_connector_extra_config=extra),
        additional_config=None,
    )
    own = lambda cls, config, role, kv_cache_config: (cls, config.cache_config.cache_dtype, role)
    planned = SimpleNamespace(kv_cache_groups=[], kv_cache_layout="LBHNC")
    cls, name, role = connectors._create_connector(own, KVConnectorFactory, config, "worker", planned)
    assert (cls, role) == (KVConnectorFactory, "worker") and re.fullmatch("quantkv_int4:[0-9a-f]{16}", name)
    assert get_kv_cache_dtype_handler(name).torch_dtype() == torch.uint8
    assert [file.read_text() for file in tmp_path.iterdir()] == [name]
    config.cache_config.cache_dtype = "fp8"
    assert connectors._create_connector(own, KVConnectorFactory, config, "worker", planned)[1] == "fp8"


@pytest.mark.parametrize(
    ("name", "extra", "named"),
    [
        ("NixlConnector", {}, ["handshakes"]),
        ("LMCacheMPConnector", {}, ["keys"]),
        ("ExampleConnector", {"shared_storage_path": "here"}, ["here"]),
        ("ExampleConnector", {}, ["/tmp"]),
        ("OffloadingConnector", {"shared_storage_path": "here"}, []),
        (
            "MultiConnector",
            {"connectors": [{"kv_connector": "LMCacheMPConnector"}, {"kv_connector": "NixlPushConnector"}]},
            ["keys", "handshakes"],
        ),
        (
            "MultiConnector",
            {"connectors": [{"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "there"}}]},
            ["there"],
        ),
        ("OffloadingConnector", {"connectors": [{"kv_connector": "NixlConnector"}]}, []),
    ],
)
def test_a_type_is_named_where_its_connector_compares_it(name, extra, named, monkeypatch):
    """Those that a MultiConnector holds, too. The digest is of the blocks of each group: packed ones say whose pages they hold."""
    done, digested = [], []
    monkeypatch.setattr(connectors, "_name_in_handshakes", lambda: done.append("handshakes"))
    monkeypatch.setattr(connectors, "_name_in_keys", lambda: done.append("keys"))
    monkeypatch.setattr(connectors, "_check_folder", lambda folder, stored: done.append(str(folder)))
    monkeypatch.setattr(connectors, "page_digest", lambda config, *given: digested.append(given) or "1f" * 8)
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="quantkv_int4:of another start"), kv_transfer_config=transfer)
    row = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}
    whole = pages.FullAttentionSpec(block_size=16, **row)
    packed = replace(whole, block_size=80, block_stride_alignment=5 * 16)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=("a", "b")) for spec in (whole, packed)]
    own = lambda cls, config, *given: (config.cache_config.cache_dtype, *given)
    planned = SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="BLHNC")
    assert connectors._create_connector(own, None, config, "worker", planned) == (f"quantkv_int4:{'1f' * 8}", "worker", planned)
    assert done == named and digested == [([16, [80, 80, ["a", "b"]]], "BLHNC")]


def test_a_connector_that_is_not_vllms_is_warned_of(monkeypatch):
    told = []
    monkeypatch.setattr(connectors.logger, "warning_once", lambda text, *given: told.append(text % given))
    transfer = SimpleNamespace(kv_connector=None, kv_connector_extra_config={}, enable_permute_local_kv=False)
    config = SimpleNamespace(kv_transfer_config=transfer, cache_config=SimpleNamespace(cache_dtype="quantkv_int4"))
    for transfer.kv_connector in (None, "OffloadingConnector"):
        connectors.check_connectors(config)
    assert told == []
    transfer.kv_connector = "TheirOwnConnector"
    connectors.check_connectors(config)
    assert len(told) == 1 and told[0].startswith("quantkv: kv_connector='TheirOwnConnector' is not vLLM's")
    transfer.enable_permute_local_kv = True
    with pytest.raises(NotImplementedError, match="enable_permute_local_kv=True"):
        connectors.check_connectors(config)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("stored", ["quantkv_int4:1f", "auto"])
def test_handshakes_of_nixl_end_in_the_types_name(stored, layout, ranks):
    """However often they are named, and with the number of ranks where a block of all layers is sent as one."""
    base_worker = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker")
    own = base_worker.compute_nixl_compatibility_hash
    with pytest.MonkeyPatch.context() as patch:
        standing = lambda config, *given, **more: f"hash of {given} and {more}"
        patch.setattr(base_worker, "compute_nixl_compatibility_hash", standing)
        for _ in range(2):
            connectors._name_in_handshakes()
        cache = SimpleNamespace(cache_dtype=stored, get_resolved_kv_cache_layout=lambda: layout)
        config = SimpleNamespace(cache_config=cache, parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
        name = f" of {stored}" + (f" in BHLNC of {ranks} ranks" if layout is KVCacheLayout.BHLNC else "")
        named = base_worker.compute_nixl_compatibility_hash(config, 1, two=2)
    assert named == "hash of (1,) and {'two': 2}" + (name if stored != "auto" else "")
    assert base_worker.compute_nixl_compatibility_hash is own


@pytest.mark.parametrize("change", ["policy", "format", "layers", "skipped", "blocks", "layout", "dtype"])
def test_the_digest_says_what_bytes_mean(change, monkeypatch):
    """Layers that are skipped in any order."""

    def digest(policy=None, name="quantkv_int4", layers=4, skipped=("1", "2"), blocks=(16,), layout="LBHNC", dtype=torch.float16):
        monkeypatch.setattr(connectors, "policy_of", lambda config: policy)
        model = SimpleNamespace(use_mla=False, dtype=dtype, get_total_num_hidden_layers=lambda: layers)
        cache = SimpleNamespace(cache_dtype=name, kv_cache_dtype_skip_layers=list(skipped))
        return connectors.page_digest(SimpleNamespace(model_config=model, cache_config=cache), list(blocks), layout)

    mixed = Policy("int4", {1: "none"})
    base = {"policy": {}, "dtype": {"policy": mixed}, "layers": {"policy": mixed}}.get(change, {})
    other = {
        "policy": {"policy": mixed},
        "format": {"name": "quantkv_int8"},
        "layers": {"layers": 5},
        "skipped": {"skipped": ("1",)},
        "blocks": {"blocks": (32,)},
        "layout": {"layout": "BLHNC"},
        "dtype": {"dtype": torch.bfloat16},
    }[change]
    assert digest(**base) == digest(**base, **({} if "skipped" in other else {"skipped": ("2", "1")}))
    assert digest(**base) != digest(**base | other)
    assert re.fullmatch("[0-9a-f]{16}", digest(**base))


def test_connectors_are_told_what_bytes_mean():
    connectors.check_connectors(SimpleNamespace(kv_transfer_config=None))  # there is none
    assert KVConnectorFactory.create_connector.__func__.__module__ == connectors.__name__


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("LMCacheConnectorV1", {}, "takes a token's bytes"),
        ("NixlConnector", {"enforce_handshake_compat": False}, "enforce_handshake_compat=False"),
        ("MultiConnector", {"connectors": [{"kv_connector": "LMCacheConnectorV1"}]}, "'LMCacheConnectorV1' takes"),
        ("MooncakeConnector", {}, "kv_connector='MooncakeConnector' takes blocks without comparing what their bytes mean"),
        ("MultiConnector", {"connectors": [{"kv_connector": "HF3FSKVConnector"}]}, "'HF3FSKVConnector' takes blocks without comparing"),
        ("NixlConnector", {}, None),
        ("OffloadingConnector", {"enforce_handshake_compat": True}, None),
    ],
)
def test_connectors_that_would_misread_blocks_are_refused(name, extra, said):
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra, enable_permute_local_kv=False)
    config = SimpleNamespace(kv_transfer_config=transfer, cache_config=SimpleNamespace(cache_dtype="quantkv_int4"))
    if said is None:
        connectors.check_connectors(config)
        config.cache_config.cache_dtype = "auto"
        said = f"kv_connector={name!r} with kv_cache_dtype='auto'"
        if name != "NixlConnector":
            return connectors.check_connectors(config)
    with pytest.raises(NotImplementedError, match=re.escape(said)):
        connectors.check_connectors(config)


def test_every_connector_of_vllm_is_served_or_refused_by_name():
    """Which of them compare the type's name was read in vLLM 0.33; one that is new there has to be read, too."""
    refused = {
        *connectors.BY_HEAD_SIZE,
        *("DecodeBenchConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector"),
        *("MoRIIOConnector", "MooncakeConnector", "MooncakeStoreConnector"),
    }
    assert set(KVConnectorFactory._registry) == refused | set(connectors.SERVED) and refused.isdisjoint(connectors.SERVED)
    for name in refused:
        transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config={}, enable_permute_local_kv=False)
        with pytest.raises(NotImplementedError, match=f"quantkv: kv_connector='{name}' takes"):
            connectors.check_connectors(
                SimpleNamespace(kv_transfer_config=transfer, cache_config=SimpleNamespace(cache_dtype="quantkv_int4"))
            )


def test_keys_of_lmcache_have_the_digest(monkeypatch):
    """LMCache's module is stood in for."""
    home = ModuleType("lmcache_stand_in")
    home.get_dcp_decorated_model_name = lambda config, blocks=None: config.model_config.model
    home.LMCacheMPConnector = type("LMCacheMPConnector", (), {"__module__": home.__name__})
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class_by_name", {"LMCacheMPConnector": home.LMCacheMPConnector}.get)
    for _ in range(2):
        connectors._name_in_keys()
    for stored, key in ((f"quantkv_int4:{'1f' * 8}", f"llama of quantkv_int4:{'1f' * 8}"), ("auto", "llama")):
        config = SimpleNamespace(model_config=SimpleNamespace(model="llama"), cache_config=SimpleNamespace(cache_dtype=stored))
        assert home.get_dcp_decorated_model_name(config, None) == key
    del home.get_dcp_decorated_model_name
    with pytest.raises(NotImplementedError, match=r"of lmcache_stand_in; that of LMCache 0\.5\.6 is needed"):
        connectors._name_in_keys()


def test_a_folder_of_blocks_says_whose_they_are(tmp_path):
    """vLLM's example connector compares nothing: blocks of another meaning would be read as these."""
    folder, theirs, ours = tmp_path / "blocks", "1f" * 8, "2e" * 8
    folder.mkdir()  # which may be there
    for _ in range(2):  # the first engine, and one like it
        connectors._check_folder(folder, f"quantkv_int4:{theirs}")
    said = f"quantkv_int4: this engine's are quantkv_int4; what the bytes mean has the digest {theirs}, {ours} is needed"
    with pytest.raises(ValueError, match=f"shared_storage_path='{folder}' has blocks of kv_cache_dtype={said}"):
        connectors._check_folder(folder, f"quantkv_int4:{ours}")
    with pytest.raises(ValueError, match=f"kv_cache_dtype=quantkv_int4: this engine's are quantkv_int8; .* {theirs}, {theirs}"):
        connectors._check_folder(folder, f"quantkv_int8:{theirs}")
    assert [file.read_text() for file in folder.iterdir()] == [f"quantkv_int4:{theirs}"]
    connectors._check_folder(tmp_path / "new" / "blocks", f"quantkv_int4:{ours}")
    assert (tmp_path / "new" / "blocks" / connectors.TYPE_FILE).read_text() == f"quantkv_int4:{ours}"


def test_a_version_that_was_not_tested_gets_one_line(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(plug_in, "BACKEND", "elsewhere")
    plug_in.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is QuantKVBackend
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for word in ("0.34.0", "0.33.x", plug_in.ANY_VERSION):
        assert word in caplog.text


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_vllm_counts_the_bytes_of_a_page(format_name, head_size):
    fmt = get_format(format_name)
    backend = QuantKVBackend.of(fmt)
    for size in BLOCK_SIZES:
        mode = pages.get_kv_quant_mode(plug_in.PREFIX + format_name)
        spec = pages.FullAttentionSpec(block_size=size, num_kv_heads=HEADS, head_size=head_size, dtype=torch.uint8, kv_quant_mode=mode)
        ours = backend.customize_spec(spec)
        assert backend.customize_spec(ours) == ours
        assert ours.page_size_bytes == fmt.cache_spec(HEADS, head_size, block_size=size).block_bytes
    window = pages.SlidingWindowSpec(block_size=1, num_kv_heads=HEADS, head_size=head_size, dtype=torch.uint8, sliding_window=512)
    assert backend.customize_spec(window).page_size_bytes * 16 == fmt.cache_spec(HEADS, head_size).block_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_left_at_16_bits_has_the_bytes_that_vllm_counts(dtype):
    spec = pages.FullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=64, dtype=dtype)
    assert QuantKVBackend.customize_spec(spec) == spec
    for name in UNQUANTIZED:
        assert spec.page_size_bytes == format_of(name, dtype).cache_spec(HEADS, 64).block_bytes


@pytest.mark.parametrize("layout", QuantKVBackend.supported_kv_cache_layouts(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("stored", ["int4", "int8", "tq4", "int2", "k8v4", "bf16"])
def test_pages_lie_where_vllm_puts_them(stored, layout):
    """Rows that are written through vLLM's view of the second of three layers: the bytes of a cache of quantkv's own, and no others."""
    layers, blocks = 3, 7
    fmt = get_format(stored)
    spec = pages.FullAttentionSpec(
        block_size=16, num_kv_heads=HEADS, head_size=64, dtype=torch.uint8, kv_quant_mode=pages.get_kv_quant_mode("quantkv_int4")
    )
    spec = QuantKVBackend.of(fmt).customize_spec(spec)
    memory = torch.zeros(layers * blocks * spec.page_size_bytes, dtype=torch.int8)
    stride = pages.compute_layout_strides(spec, blocks, layers, layout)
    tensor = pages.KVCacheTensor(size=memory.numel(), layers=["a", "b", "c"], layer_stride=stride[0], block_stride=stride[1])
    views = pages.create_kv_cache_views(memory, spec, blocks, layout, tensor, 16)
    layer = QuantKVImpl.__new__(QuantKVImpl)
    layer.paged, layer.attention = PagedLayer(LayerConfig(fmt), Heads(HEADS, 64, 64), torch.bfloat16), LayerAttention(2 * HEADS)
    layer._pages = lambda: None, None
    wrapped = [layer.cache_of(view) for view in views]
    own = PagedCache(fmt.cache_spec(HEADS, 64), blocks)
    k, v = torch.randn(2, 40, HEADS, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.randperm(blocks * 16, generator=torch.Generator().manual_seed(1))[:40]
    slots[5] = -1
    for cache in (own, wrapped[1]):
        cache.write(k, v, slots)
    assert torch.equal(wrapped[1].buffer, own.buffer)
    assert int(memory.count_nonzero()) == int(own.buffer.view(torch.int8).count_nonzero())


USUAL = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "quantkv_int4",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_size": 80, "kv_cache_dtype": "quantkv_int2"}, "head_size=80"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "quantkv_int5"}, "int5"),
        ({"block_size": 24}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_dcp": True}, "DCP"),
        ({"dtype": torch.float64}, "dtype"),
    ],
    ids=str,
)
def test_refused_by_name(change, said):
    for name in ("quantkv_int4", "quantkv_policy", None):  # formats of a policy are checked when its layers are made
        assert QuantKVBackend.validate_configuration(device_capability=None, **USUAL | {"kv_cache_dtype": name}) == []
    assert said in "; ".join(QuantKVBackend.validate_configuration(device_capability=None, **USUAL | change))


WRAPPERS = {
    "StaticSink": lambda: create_static_sink_attention_backend(QuantKVBackend, sink_len=16),
    "EncoderOnlyAttention": lambda: create_encoder_only_attention_backend(QuantKVBackend),
    "CrossAttention": lambda: create_cross_attention_backend(QuantKVBackend),
    "WhisperCausalAttentionWithBlockPooling": lambda: create_whisper_attention_backend_with_block_pooling(QuantKVBackend, 2, 64),
    "FastPrefill": lambda: create_fast_prefill_custom_backend("FastPrefill", QuantKVBackend.of(get_format("int4"))),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_attention_that_vllm_derives_from_the_backend_is_refused_by_name(name):
    """A layer derives it before weights are loaded. Of Whisper's vLLM itself says that it takes no backend but its own."""
    with pytest.raises(NotImplementedError, match="QuantKVBackend" if name.startswith("Whisper") else f"quantkv.*{name}"):
        WRAPPERS[name]()


@pytest.mark.parametrize("kv_cache_dtype", ["quantkv_int4", "auto"])
@pytest.mark.parametrize("size", [32, None])
def test_chunks_are_an_option_of_the_layer(kv_cache_dtype, size):
    """Whatever the layer stores, its backend makes no virtual batches any more."""
    wrapped = QuantKVBackend if size is None else create_chunked_local_attention_backend(QuantKVBackend, size)
    assert wrapped.get_name() == "CUSTOM" and (size is None or wrapped.get_builder_cls() is not QuantKVBuilder)
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.kv_sharing_target_layer_name = impl.policy = None
    impl.kv_cache_dtype, impl.dtype, impl.attention = kv_cache_dtype, torch.bfloat16, LayerAttention(2 * HEADS)
    impl.num_kv_heads, impl.head_size = HEADS, 64
    layer = SimpleNamespace(impl=impl, layer_name="model.layers.0.attn", head_size_v=64, attn_backend=wrapped, attention_chunk_size=size)
    impl.config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={layer.layer_name: layer}),
        cache_config=SimpleNamespace(block_size=16),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
    )
    impl.process_weights_after_loading(torch.bfloat16)
    assert layer.attn_backend is (QuantKVBackend if kv_cache_dtype == "auto" else QuantKVBackend.of(get_format("int4")))
    assert layer.attn_backend.get_builder_cls() is QuantKVBuilder
    assert impl.attention.options == (AttentionOptions() if size is None else AttentionOptions(window=32, chunk_lookback=0))
    assert impl.attention.options in impl.kind
    paged = impl.paged
    impl.process_weights_after_loading(torch.bfloat16)  # as weights that are loaded again
    assert impl.attention.options.window == (size or 0) and impl.paged is paged
    impl.config.model_config = SimpleNamespace(is_mm_prefix_lm=False, use_mla=False)
    impl._set_options(prompt_precision="8bit")  # refused once the chunks are known
    why = "no dense backend" if size is None else "chunks of 32 tokens"
    with assumed.assuming(assumed.GPUS["a100"]), pytest.raises(ValueError, match=f"^prompt_precision=8bit: {why}"):
        impl.process_weights_after_loading(torch.bfloat16)


def test_profiling_claims_what_a_step_of_its_layer_takes(monkeypatch):
    claimed, impl = [], QuantKVImpl.__new__(QuantKVImpl)
    impl.attention = LayerAttention(4, options=AttentionOptions(prompt_precision="8bit"))
    monkeypatch.setattr(implementation, "claim_scratch", lambda *given: claimed.append(given))
    q, out = torch.zeros(5, 4, 64), torch.ones(5, 4, 64)
    assert impl.forward(None, q, None, None, None, None, out) is out and not out.any()
    assert claimed == [(q, impl.attention.options)]


def layers_configuration(**attention):
    """A vLLM configuration as a layer's constructor reads it. No layer of the model exists yet."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="quantkv_int4", kv_sharing_fast_prefill=False),
        **dict.fromkeys(("speculative_config", "kv_transfer_config", "additional_config")),
        compilation_config=SimpleNamespace(static_forward_context={}, pass_config=SimpleNamespace(fuse_rope_kvcache_cat_mla=True)),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2, get_total_num_kv_heads=lambda: 2, use_mla=False),
        attention_config=SimpleNamespace(**attention),
    )


def ready_for_layers(monkeypatch):
    """The configuration that layers are made with, and what is done once a model or once a layer, in that order."""
    config, done = layers_configuration(use_prefill_query_quantization=False), []
    monkeypatch.setattr(implementation, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(implementation, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(QuantKVImpl, "_check_weights", lambda self: done.append("weights"))
    for name in ("check_hybrid", "warn_of_padding", "load_flash_attention"):
        monkeypatch.setattr(implementation, name, lambda *given, name=name: done.append(name))
    return config, done


@pytest.fixture
def made(monkeypatch):
    return ready_for_layers(monkeypatch)


def test_a_layer_is_what_vllm_says_of_it(made):
    """What concerns the whole model is checked with its first layer."""
    config, done = made
    first = QuantKVImpl(2 * HEADS, 64, 0.125, HEADS, [0.5] * 2 * HEADS, 8, "quantkv_int4", 30.0)
    once = ["weights", "check_hybrid", "warn_of_padding"]
    assert done == [*once, "load_flash_attention"]
    config.compilation_config.static_forward_context["other"] = SimpleNamespace(impl=None)
    second = QuantKVImpl(2 * HEADS, 64, 0.25, sinks=torch.arange(6.0))
    assert done == [*once, "load_flash_attention"] * 2
    config.compilation_config.static_forward_context["first"] = SimpleNamespace(impl=first)
    QuantKVImpl(2 * HEADS, 64, 0.25)
    assert done == [*once, "load_flash_attention"] * 2 + ["load_flash_attention"]
    assert (first.num_kv_heads, first.kv_cache_dtype, second.num_kv_heads, second.kv_cache_dtype) == (HEADS, "quantkv_int4", 6, "auto")
    assert first.attention.options == AttentionOptions(window=8, softcap=30.0) and second.attention.options == AttentionOptions()
    assert (first.attention.num_heads, first.attention.scale, first.attention.own_rows) == (6, 0.125, True)
    assert first.attention.alibi_slopes.tolist() == [0.5] * 6 and second.attention.alibi_slopes is None
    assert first.attention.sinks is None and second.attention.sinks.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_precision_of_prompts_is_what_a_configuration_says(made, tmp_path):
    """And is refused, before weights are loaded, where nobody serves it."""
    config, _ = made
    Policy("int4", prompt_precision="8bit").save(tmp_path / "policy.json")
    config.model_config.is_mm_prefix_lm = False

    def precision(dtype="quantkv_int4", *given, **options):
        config.cache_config.cache_dtype, config.additional_config = dtype, options
        return QuantKVImpl(4, 64, 0.125, 2, *given).attention.options.prompt_precision

    named = {"quantkv_policy": str(tmp_path / "policy.json")}
    assert precision() == "16bit" and precision(quantkv_prompt_precision="8bit") == precision("quantkv_policy", **named) == "8bit"
    assert precision("quantkv_policy", **named, quantkv_prompt_precision="16bit") == "16bit"
    with pytest.raises(ValueError, match="quantkv_prompt_precision='fp8': one of 16bit, 8bit is needed"):
        precision(quantkv_prompt_precision="fp8")
    with assumed.assuming(assumed.GPUS["a100"]):
        assert precision() == "16bit"
        with pytest.raises(ValueError, match=r"^prompt_precision=8bit: no dense backend"):
            precision(quantkv_prompt_precision="8bit")
    with assumed.assuming(assumed.GPUS["h100"]), pytest.raises(ValueError, match=r"^prompt_precision=8bit: alibi_slopes"):
        precision("quantkv_int4", [0.5] * 4, quantkv_prompt_precision="8bit")
    config.model_config.is_mm_prefix_lm = True
    assert precision() == "16bit"
    with pytest.raises(NotImplementedError, match="quantkv_prompt_precision='8bit' with images"):
        precision(quantkv_prompt_precision="8bit")


def test_a_policy_that_a_layer_cannot_have_is_refused_with_it(made, tmp_path):
    """The layers that it names, and the format that heads of 80 numbers cannot have."""
    config, _ = made
    config.cache_config.cache_dtype = "quantkv_policy"

    def layer(policy, head_size):
        path = tmp_path / f"{policy.format}, {list(policy.layers)}.json"  # a file that was read is not read again
        policy.save(path)
        config.additional_config = {"quantkv_policy": str(path)}
        return QuantKVImpl(4, head_size, 0.125, 2)

    for policy, head_size, said in ((Policy("int4", {2: "int8"}), 64, "layers 0 to 1"), (Policy("int2"), 80, "head_size=80")):
        with pytest.raises(ValueError, match=said):
            layer(policy, head_size)
    assert layer(Policy("int4", {1: "int8"}), 64).policy.layers == {1: "int8"}


def test_weights_are_compared_with_those_of_a_calibration(monkeypatch):
    """And key biases with the format that most layers have."""
    asked = []
    monkeypatch.setattr(implementation, "check_weights", lambda *given: asked.append(given))
    monkeypatch.setattr(implementation, "warn_of_biases", lambda *given: asked.append(given[:4]))
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.config = SimpleNamespace(model_config=SimpleNamespace(model="folder", revision="main"))
    impl.kv_cache_dtype, impl.dtype = "quantkv_int8", torch.float32
    for policy, name in ((None, "int8"), (Policy("int4"), "int4")):
        impl.policy = policy
        impl._check_weights()
        assert asked == [("folder", "main", policy), ("folder", "main", policy, name)]
        asked.clear()


def test_a_model_that_drafts_has_a_policys_format_and_no_more(monkeypatch):
    impl, policy = (
        QuantKVImpl.__new__(QuantKVImpl),
        Policy("int4", {0: "int8"}, full_precision=FullPrecisionTokens(16, 24), prompt="stored"),
    )
    assert impl._served(None) is None and impl._served(policy) is policy
    monkeypatch.setattr(implementation, "drafts_now", lambda: True)
    assert impl._served(None) is None and impl._served(policy) == Policy("int4", prompt="stored")


def test_a_layer_of_latents_is_what_vllm_says_of_it(made, monkeypatch):
    config, _ = made
    monkeypatch.setattr(
        mla.MLACommonImpl, "__init__", lambda self, *given, **more: vars(self).update(kv_lora_rank=256, qk_rope_head_dim=64)
    )
    usual = {"num_heads": 4, "head_size": 320, "scale": 0.1, "num_kv_heads": 1, "attn_type": "decoder"}
    usual |= dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name", "indexer"))
    config.model_config.is_mm_prefix_lm, config.additional_config = False, {"quantkv_prompt_precision": "8bit"}
    with pytest.raises(NotImplementedError, match=r"quantkv_prompt_precision='8bit' with latents \(MLA\): 16bit is needed"):
        mla.QuantKVLatentImpl(**usual, kv_cache_dtype="quantkv_int4")
    config.additional_config = None
    impl = mla.QuantKVLatentImpl(**usual, kv_cache_dtype="quantkv_int4")
    assert (impl.attention.num_heads, impl.attention.scale, impl.kv_cache_dtype) == (4, 0.1, "quantkv_int4")
    assert impl.reads_own_rows and not impl.attention.own_rows and not impl.supports_quant_query_input
    assert impl.config is config and config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla is False
    asked = []
    monkeypatch.setattr(implementation, "check_policy", lambda policy, layers, heads, nbytes: asked.append((layers, heads)))
    impl.policy = Policy("int4")
    impl._check_policy()
    assert asked == [(2, Heads(1, 320, 320))]
    for name, value in (("alibi_slopes", [1.0] * 4), ("indexer", object()), ("q_pad_num_heads", 8), ("topk_indices_buffer", object())):
        with pytest.raises(NotImplementedError, match=rf"latents \(MLA\) with {name} are not supported"):
            mla.QuantKVLatentImpl(**{**usual, name: value}, kv_cache_dtype="quantkv_int4")
    config.attention_config.use_prefill_query_quantization = True
    with pytest.raises(NotImplementedError, match="use_prefill_query_quantization=True"):
        mla.QuantKVLatentImpl(**usual, kv_cache_dtype="quantkv_int4")


def test_a_layer_takes_what_it_says_of_images_and_the_memory_of_its_copies(made, monkeypatch):
    """Once its weights are loaded."""
    config, _ = made
    reserved = []
    monkeypatch.setattr(PagedLayer, "reserve_copies", lambda self, *given: reserved.append(given))
    config.cache_config.block_size, config.scheduler_config = 16, SimpleNamespace(max_num_seqs=2)
    impl = QuantKVImpl(4, 64, 0.125, 2, None, 8, "quantkv_int4")
    layer = SimpleNamespace(impl=impl, layer_name="model.layers.0.attn", head_size_v=64, attn_backend=QuantKVBackend)
    layer.mm_prefix_clamp_sliding_window = True
    config.compilation_config.static_forward_context[layer.layer_name] = layer
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.attention.options == AttentionOptions(window=8, clamp_prefix_to_window=True)
    assert reserved == [(16, 2, torch.device(current_platform.device_type))]


def test_layers_that_may_store_latents_themselves_are_refused():
    impl = latent_impl("int4")
    with pytest.raises(NotImplementedError, match="LatentLayer is no MLAAttention"):
        impl._heads_of(LatentLayer(torch.zeros(RANK, COUNT * (NOPE + VALUES))))
    assert impl._heads_of(mla.MLAAttention.__new__(mla.MLAAttention)) == Heads(1, RANK, ROPE)


def test_a_worker_measures_its_model_before_it_tells_how_much_memory_is_free(monkeypatch):
    done = []

    class Worker:
        vllm_config, model_runner = "config", "runner"

        def determine_available_memory(self):
            done.append("memory")
            return 7

    monkeypatch.setattr(statistics, "resolve_obj_by_qualname", lambda name: {"the worker": Worker}[name])
    monkeypatch.setattr(statistics, "take_statistics", lambda *given: done.append(given))
    for _ in range(2):
        statistics.measure_before_sizing(SimpleNamespace(parallel_config=SimpleNamespace(worker_cls="the worker")))
    assert Worker().determine_available_memory() == 7 and done == [("config", "runner"), "memory"]


def test_chunks_and_a_window_are_refused():
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.attention = LayerAttention(2 * HEADS, options=AttentionOptions(window=8))
    with pytest.raises(NotImplementedError, match="chunks of 32 tokens and a window of 8"):
        impl._take_chunks(32)


@pytest.mark.parametrize(
    ("asked", "own", "given"),
    [(None, None, "CUSTOM"), (None, "auto", None), ("FLASH_ATTN", None, "FLASH_ATTN"), (None, "quantkv_int8", "CUSTOM")],
)
def test_drafts_get_the_backend_that_reads_their_pages(asked, own, given):
    """asked, own: the backend and the type of the cache in the speculative configuration."""
    drafts = SimpleNamespace(attention_backend=asked and AttentionBackendEnum[asked], kv_cache_dtype=own)
    impl = QuantKVImpl.__new__(QuantKVImpl)
    cache = SimpleNamespace(kv_sharing_fast_prefill=False, cache_dtype="quantkv_int4")
    impl.config = SimpleNamespace(cache_config=cache, speculative_config=drafts)
    impl._check_configuration()
    assert drafts.attention_backend == (given and AttentionBackendEnum[given])


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's platform here is not its CPU")
def test_the_cpu_platform_takes_custom_where_it_is_asked_for():
    config = AttentionSelectorConfig(**USUAL)
    chosen = current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config)
    assert chosen == plug_in.BACKEND
    with pytest.raises(ValueError, match=r"CUSTOM cannot serve this model: .*head_size=80"):
        current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, config._replace(kv_cache_dtype="quantkv_int2", head_size=80))
    assert current_platform.get_attn_backend_cls(None, config._replace(kv_cache_dtype="auto")) == AttentionBackendEnum.CPU_ATTN.value
    with pytest.raises(ValueError, match="quantkv_int4 is not supported"):
        current_platform.get_attn_backend_cls(None, config)


def common(queries, keys, padding=0, **more):
    """What vLLM's runner tells a builder of sequences with these queries and keys, in tensors that may be longer; page i * 8 + j is page j
    of sequence i."""
    count = len(queries) + padding
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist(), *[sum(queries)] * (padding + 1)], dtype=torch.int32)
    lengths = torch.tensor([*keys, *[0] * (padding + 1)], dtype=torch.int32)
    return contract.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=count,
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(keys),
        block_table_tensor=torch.arange(count * 8, dtype=torch.int32).view(count, 8),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
        positions=torch.arange(sum(queries)),
        seq_lens_cpu_upper_bound=lengths,
        **more,
    )


@pytest.fixture
def builder():
    found = QuantKVBuilder.__new__(QuantKVBuilder)
    found.warm_ups = WarmUps()
    found.reorder_batch_threshold, found.device = 1, torch.device("cpu")
    found.pages = SimpleNamespace(table=lambda table: table)
    return found


@pytest.mark.parametrize("case", BATCHES)
def test_a_batch_is_what_its_lengths_say(case, builder):
    queries, keys, padding, kind, tokens = BATCHES[case]
    given = common(queries, keys, padding)
    found = builder.build(0, given)
    assert (found.kind, found.num_tokens) == (kind, tokens)
    served = given.num_reqs if kind == "decode" else len(queries)  # a graph's padding stays, what no graph holds goes
    assert found.batch.seq_lens.tolist() == given.seq_lens[:served].tolist()
    assert found.batch.cu_seqlens_q.tolist() == given.query_start_loc[: served + 1].tolist()
    assert found.block_table.shape == (served, 8)


@pytest.mark.parametrize("invariant, precision", [(False, "16bit"), (True, "16bit"), (False, "8bit")])
def test_lengths_of_a_mixed_step_where_vllm_does_not_know_them(invariant, precision, builder, monkeypatch):
    """They are read from the device where who serves a sequence must not depend on the others, or depends on whether it is a prompt."""
    options = [AttentionOptions(), AttentionOptions(prompt_precision=precision)]
    builder.layers = [SimpleNamespace(impl=SimpleNamespace(attention=LayerAttention(4, options=given))) for given in options]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    builder.device = torch.device("cuda")
    given = common([1, 20], [5, 30])
    assert builder.build(0, given).batch.lengths == ((1, 5), (20, 30))
    given.seq_lens_cpu_upper_bound = None
    known = invariant or precision == "8bit"
    assert builder.build(0, given).batch.lengths == (((1, 5), (20, 30)) if known else None)


def test_a_graph_has_no_bound_of_the_longest_sequence(builder):
    given = common([1, 1], [5, 6])
    assert builder.build(0, given).batch.max_seq_len == 6
    assert builder.build_for_cudagraph_capture(given).batch.max_seq_len is None
    assert builder.build_for_drafting(given, 0).batch.max_seq_len is None


def test_drafts_of_one_graph_read_what_vllm_has_filled_anew(monkeypatch):
    """A captured step, once it is updated, stores and answers as one that is built of the same numbers: lengths, slots, positions and
    blocks of five pages."""
    monkeypatch.setattr(serving, "served", {})
    drafts, fresh = (builder_of([Layer("a")], "cpu", block_size=80, alignment=5 * 16) for _ in range(2))
    assert drafts.supports_draft_decode_metadata_update is True
    generator = torch.Generator().manual_seed(0)
    held, q = PagedCache(get_format("fp32").cache_spec(1, 16), 80), torch.randn(2, 1, 16, generator=generator)
    held.write(*torch.randn(2, 80 * 16, 1, 16, generator=generator), torch.arange(80 * 16))
    row = torch.randn(2, 1, 16, generator=generator)
    given = common([1, 1], [100, 30])
    step = drafts.build_for_cudagraph_capture(given)
    before = step.attend(held, q, 0.25)
    given.block_table_tensor.copy_(given.block_table_tensor.flip(0))
    given.seq_lens[:2] += 1
    given.slot_mapping.copy_(torch.tensor([9 * 80 + 20, 30]))
    drafts.update_draft_decode_metadata(step)
    step.write(held, row, row)
    found, expected = (one.attend(held, q, 0.25) for one in (step, fresh.build(0, replace(given, max_seq_len=101))))
    assert torch.equal(found, expected) and not torch.isclose(found, before).any(-1).any()
    assert torch.equal(held.dequantize(given.slot_mapping)[0], row)


def test_full_precision_tokens_are_of_layers_with_pages_of_their_own(builder, monkeypatch):
    """In the order of their numbers."""
    given, Impl = [], partial(SimpleNamespace, who_serves=None)
    monkeypatch.setattr(metadata, "full_precision_group", lambda layers, *rest: given.append(layers) or layers)
    held = {
        f"layers.{number}": SimpleNamespace(layer_name=f"layers.{number}", impl=Impl(full_precision=tokens, owner=owner))
        for number, tokens, owner in ((10, "some", None), (11, "some", None), (9, "some", None), (3, "some", "layers.9"), (2, None, None))
    }
    builder.take_layers(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=held)), list(held))
    assert given == [[held[f"layers.{number}"] for number in (9, 10, 11)]] and builder.last is held["layers.11"]
    assert builder.supports_draft_decode_metadata_update is False  # which pages have a copy is worked out outside of graphs
    given.clear()
    builder.full_precision = None
    builder.take_layers(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=held)), ["layers.3", "layers.2"])
    assert builder.supports_draft_decode_metadata_update is True
    assert given == [] and builder.full_precision is None and builder.layers == [held["layers.3"], held["layers.2"]]


@pytest.mark.parametrize(("graphs", "limits"), [([], (4, 48)), (None, (4, 48)), ([8, 16], (16, 48)), ([64], (64, 64))])
def test_full_precision_tokens_are_of_steps_as_large_as_any(graphs, limits, monkeypatch):
    """Of a graph's padding too; copies are of sequences."""
    made = []
    monkeypatch.setattr(metadata, "FullPrecisionGroup", lambda *given: made.append(given))
    scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=48)
    config = SimpleNamespace(scheduler_config=scheduler, compilation_config=SimpleNamespace(cudagraph_capture_sizes=graphs))
    metadata.full_precision_group([SimpleNamespace(impl=SimpleNamespace(paged=n)) for n in (1, 2)], config, torch.device("cpu"))
    assert made == [([1, 2], *limits, 4, torch.device("cpu"))]


def test_full_precision_tokens_are_attached_once_there_are_pages(builder):
    """Of the last layer, as vLLM gave them."""
    attached = []
    builder.attach_full_precision("step", True)
    builder.full_precision = SimpleNamespace(attach=lambda *given: attached.append(given))
    for size in (0, 1, 2):
        builder.last = SimpleNamespace(kv_cache=torch.empty(size), impl=SimpleNamespace(pages_of=lambda kv_cache: kv_cache.numel()))
        builder.attach_full_precision("step", size == 2)
    assert attached == [("step", 1, False), ("step", 2, True)]


def test_layers_of_a_kind_are_named_in_the_log_once(monkeypatch):
    """With their number."""
    told = []
    monkeypatch.setattr(metadata, "tell", lambda logger, *given: told.append(given))
    layers = [Layer("a"), Layer("a"), Layer("b", "int8")]
    builder_of(layers, "cpu")
    assert told == [("int4", layers[0].impl.who_serves(), 2), ("int8", layers[0].impl.who_serves(), 1)]


def test_a_preset_has_a_format_of_its_own_for_latents():
    """One policy in each process, for each kind of model."""
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="quantkv_4bit"), additional_config=None)
    found = []
    for latents, fmt in ((False, "levels4"), (True, "int4+int8")):
        config.model_config = SimpleNamespace(use_mla=latents)
        found.append(policy_of(config))
        assert found[-1].format == fmt and found[-1].statistics == "auto" and found[-1] is policy_of(config)
        assert format_of("quantkv_4bit", torch.bfloat16, latents).name == fmt
        assert format_of("quantkv_levels4", torch.bfloat16, latents).name == "levels4"  # what a type names stays


@pytest.mark.parametrize(("drafts", "queries"), [(None, 1), (3, 4)])
def test_sequences_that_verify_decode(drafts, queries, monkeypatch):
    """With one query more than tokens that are drafted; so wide are the batches of graphs, too."""
    monkeypatch.setattr(serving, "served", {})
    layer = Layer("a")
    speculative = drafts and SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    builder = builder_of([layer], "cpu", speculative=speculative)
    assert builder.reorder_batch_threshold == queries and layer.asked == [(torch.device("cpu"), 64, queries, 24)]
    assert builder.requires_block_table_width is True and builder.get_varlen_cudagraph_max_query_len(builder.vllm_config, None) == queries
    assert builder._cudagraph_support is QuantKVLatentBuilder._cudagraph_support is contract.AttentionCGSupport.UNIFORM_BATCH
    builder.pages = SimpleNamespace(table=lambda table: table)
    step = builder.build(0, common([4, 4], [10, 12]))
    assert (step.kind, step.batch.max_query_len, step.batch.chunks) == (("mixed", 4, True) if drafts is None else ("decode", 4, False))
    assert builder.build(0, common([5, 4], [10, 12])).batch.chunks == (drafts is None)


def test_full_precision_tokens_of_a_step(builder):
    """Its tensors stay where they are; a graph's capture changes no state, the steps after it do."""
    fmt = get_format("int4")
    spec = fmt.cache_spec(HEADS, 64)
    layer = QuantKVImpl.__new__(QuantKVImpl)
    layer.paged = PagedLayer(LayerConfig(fmt, full_precision=FullPrecisionTokens(16, 24)), Heads(HEADS, 64, 64), torch.bfloat16)
    layer.attention, layer._pages = LayerAttention(2 * HEADS), (lambda: None, None)
    memory = torch.zeros(16, HEADS, 16, spec.page_bytes // 16, dtype=torch.uint8)
    scheduler = SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=128)
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]), scheduler_config=scheduler)
    builder.last = SimpleNamespace(impl=layer, kv_cache=memory)
    builder.full_precision = metadata.full_precision_group([builder.last], config, torch.device("cpu"))

    def step(queries, keys, build):
        given = common(queries, keys)
        places = [s * 128 + p for s, (n, m) in enumerate(zip(queries, keys)) for p in range(m - n, m)]
        return build(replace(given, slot_mapping=torch.tensor(places)))

    first = step([1, 1], [4, 4], builder.build_for_cudagraph_capture)
    assert int(builder.full_precision.pool.now) == 0 and int(builder.full_precision.pool.owner.max()) == -1
    cache = layer.cache_of(memory)
    k, v = torch.randn(2, 90, HEADS, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = torch.randn(2, 2 * HEADS, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    step([40, 50], [40, 50], lambda m: builder.build(0, m)).write(cache, k, v)
    found = step([1, 1], [41, 51], lambda m: builder.build(0, m))
    found.write(cache, k[:2], v[:2])
    assert [t.data_ptr() for t in found.full_precision.joined] == [t.data_ptr() for t in first.full_precision.joined]
    assert found.full_precision.joined[2].tolist() == [[16, 16], [16, 16]] and found.full_precision.joined[1].tolist() == [0, 0]
    own = PagedCache(get_format("bf16").cache_spec(HEADS, 64), 16)
    own.write(torch.cat([k, k[:2]]), torch.cat([v, v[:2]]), torch.cat([torch.arange(40), 128 + torch.arange(50), torch.tensor([40, 178])]))
    expected = own.attend(q, block_table=found.block_table, seq_lens=found.batch.seq_lens, scale=0.125)
    assert torch.equal(found.attend(cache, q, 0.125), expected)


@pytest.mark.parametrize("clamp", [False, True])
def test_tokens_of_an_image_see_each_other(clamp, builder):
    """The second sequence's positions 3 to 40 are an image; the window is 8."""
    queries = [20, 60]
    cache = PagedCache(get_format("fp32").cache_spec(1, 16), 16)
    generator = torch.Generator().manual_seed(0)
    k, v, q = torch.randn(3, 80, 1, 16, generator=generator)
    cache.write(k, v, torch.cat([torch.arange(20), 128 + torch.arange(60)]))
    options = AttentionOptions(window=8, clamp_prefix_to_window=clamp)
    plain, images = (builder.build(0, common(queries, queries, 1, **more)) for more in ({}, {"mm_req_doc_ranges": {1: [(3, 40)]}}))
    before, after = (step.attend(cache, q, 0.25, options)[:, 0] for step in (plain, images))
    changed = (before != after).any(1).nonzero()[:, 0].tolist()
    assert changed == [20 + i for i in range(3, 40 + (not clamp))]  # clamped, the last token sees no more than causally
    first = 33 if clamp else 3  # of what position 40 sees
    weights = torch.softmax(0.25 * q[60, 0] @ k[20 + first : 61, 0].mT, -1)
    assert torch.allclose(after[60], weights @ v[20 + first : 61, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("images", "window", "clamp", "support"),
    [
        (False, 8, False, "UNIFORM_BATCH"),
        (True, None, False, "UNIFORM_SINGLE_TOKEN_DECODE"),
        (True, 8, True, "UNIFORM_SINGLE_TOKEN_DECODE"),
        (True, 8, False, "NEVER"),
        (True, 8, None, "NEVER"),  # the layer does not say
    ],
)
def test_graphs_of_models_with_images(images, window, clamp, support):
    layer = SimpleNamespace(sliding_window=window, **({} if clamp is None else {"mm_prefix_clamp_sliding_window": clamp}))
    compilation = SimpleNamespace(static_forward_context={"layer": layer, "whole": SimpleNamespace(sliding_window=None), "no": object()})
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=images), compilation_config=compilation)
    assert QuantKVBuilder.get_cudagraph_support(config, None).name == support


def test_a_pass_is_shown_to_one_that_watches_alone_while_it_runs():
    """Also where the model fails."""
    seen, told = object(), []
    impls = [SimpleNamespace(watch=lambda observer, n=n: told.append((n, observer))) for n in (0, 1)]
    with pytest.raises(KeyError), statistics.watching(seen, impls):
        told.append("runs")
        raise KeyError
    assert told == [(0, seen), (1, seen), "runs", (0, None), (1, None)]


def test_why_a_model_is_not_measured_is_said_by_name():
    def reason(stages=1, hybrid=False, encoder=False, lora=None, connector=None, spec=None, statistics="auto"):
        extra = SimpleNamespace(kv_connector=connector, get_from_extra_config=lambda name, default: spec or default)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
            model_config=SimpleNamespace(is_hybrid=hybrid, is_encoder_decoder=encoder),
            lora_config=lora,
            kv_transfer_config=extra if connector or spec else None,
        )
        check(config, SimpleNamespace(statistics=statistics))
        return why(config)

    check, why = statistics.check_statistics, statistics.reason_against
    assert reason() is reason(connector="OffloadingConnector") is reason(spec="other") is None
    against = {
        "pipeline_parallel_size": {"stages": 2},
        "states": {"hybrid": True},
        "encoder": {"encoder": True},
        "LoRA": {"lora": object()},
    }
    for said, given in against.items():
        assert said in reason(**given)
        with pytest.raises(NotImplementedError, match=f"policy.statistics='require': .*{said}"):
            reason(**given, statistics="require")
    for given in ({"connector": "NixlConnector"}, {"connector": "OffloadingConnector", "spec": "TieringOffloadingSpec"}):
        with pytest.raises(NotImplementedError, match=f"policy.statistics='auto' with kv_connector='{given['connector']}'"):
            reason(**given)


@pytest.mark.parametrize("skipped", [False, True])
def test_the_pass_that_measures_is_as_long_as_a_step_and_of_text_where_there_is_a_tokenizer(skipped):
    """Every layer is watched; those that wait for it are measured."""
    measured = []

    class Seen:
        def __init__(self, *rotaries):
            pass

        def measure(self, served, numbers, values, forward, watching):
            measured.append((served, numbers))
            return watching

    config = VllmConfig()
    config.compilation_config.static_forward_context = {
        name: SimpleNamespace(impl=SimpleNamespace(number=number), layer_name=name) for number, name in enumerate(("layers.0", "layers.1"))
    }
    own = {"get_total_num_hidden_layers": lambda: 2, "get_vocab_size": lambda: 99, "dtype": torch.float16}
    config.model_config = SimpleNamespace(max_model_len=256, skip_tokenizer_init=skipped, tokenizer="its own", **own)
    config.scheduler_config.max_num_batched_tokens = 48
    runner, watched = SimpleNamespace(get_model=lambda: "model", device="cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "SeenLayers", Seen)
        patch.setattr(statistics, "watching", lambda seen, impls: watched.append([impl.number for impl in impls]))
        waiting = {"layers.1": config.compilation_config.static_forward_context["layers.1"]}
        statistics._measured(config, runner, waiting)
    assert watched == [[0, 1]]
    tokenizer = None if skipped else "its own"
    assert measured == [(statistics.ServedModel("model", "cpu", torch.float16, 2, 256, 48, 99, tokenizer), {1})]


@pytest.mark.parametrize("uses_mrope", [False, True])
def test_the_pass_that_measures_gives_each_axis_of_a_rotation_its_positions(uses_mrope):
    """Models whose rotations have three axes, of time, height and width, take three positions of each token. The pass is eager, and no
    step."""
    seen, asked = [], []
    config = VllmConfig()
    config.model_config = SimpleNamespace(uses_mrope=uses_mrope)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "set_forward_context", lambda *given, **options: contextlib.nullcontext(asked.append((*given, options))))
        statistics._forward(lambda **given: seen.append(given), config, ids := torch.tensor([7, 8, 9]))
    (given,) = seen
    assert given.pop("positions").tolist() == ([[0, 1, 2]] * 3 if uses_mrope else [0, 1, 2])
    assert given == {"input_ids": ids, "intermediate_tensors": None, "inputs_embeds": None}
    assert asked == [(None, config, {"num_tokens": 3, "skip_compiled": True})]


def test_values_are_measured_in_layers_with_keys_and_values_of_their_own():
    """Layer 2 reads the pages of layer 1."""
    layers = {}
    for number, owner, cls in ((0, 0, QuantKVImpl), (1, 1, QuantKVImpl), (2, 1, QuantKVImpl), (3, 3, mla.QuantKVLatentImpl)):
        impl = cls.__new__(cls)
        impl.number, impl.num_kv_heads, impl.num_heads = owner, 2, 4
        layers[f"model.layers.{number}.attn"] = SimpleNamespace(impl=impl, layer_name=f"model.layers.{number}.attn", head_size_v=48)
    assert list(statistics._value_layers(layers)) == [(n, layers[f"model.layers.{n}.attn"], (2, 48, 4)) for n in (0, 1)]


@pytest.mark.parametrize(("policies", "required"), [(("auto", "require"), "require"), (("auto", "auto"), None)])
def test_statistics_that_one_layer_requires_are_required(policies, required, monkeypatch):
    asked = []
    monkeypatch.setattr(statistics, "measured", lambda *given: asked.append((given[0], given[1], given[4])))
    impls = [QuantKVImpl.__new__(QuantKVImpl) for _ in policies]
    for number, (impl, asks) in enumerate(zip(impls, policies)):
        impl.number, impl.policy = number, Policy("levels4", statistics=asks)
    monkeypatch.setattr(statistics, "reason_against", lambda config: "why")
    layers = {str(n): SimpleNamespace(impl=impl) for n, impl in enumerate(impls)} | {"other": SimpleNamespace(impl=None), "no": object()}
    statistics.take_statistics(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)), None)
    assert asked == [(required, "why", "key means and Hessians")] and all(impl.unmeasured for impl in impls)


@pytest.mark.parametrize(
    ("kinds", "what"), [("kk", "key means and Hessians"), ("lk", "key means and Hessians"), ("ll", "means of latents")]
)
def test_what_was_measured_is_given_to_the_layers_that_wait_for_it(kinds, what, monkeypatch):
    """Once, and not to a layer that has its statistics. What is measured has a name in the log."""
    asked, given = [], []
    impls = [{"k": QuantKVImpl, "l": mla.QuantKVLatentImpl}[kind] for kind in kinds + "k"]
    impls = [cls.__new__(cls) for cls in impls]
    for number, impl in enumerate(impls):
        impl.number, impl.policy, impl.measured = number, Policy("levels4", statistics="auto"), None
        impl.take_statistics = lambda made, number=number: given.append((number, made))
    impls[-1].measured = "before"
    layers = {str(n): SimpleNamespace(impl=impl) for n, impl in enumerate(impls)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    monkeypatch.setattr(statistics, "reason_against", lambda config: None)
    monkeypatch.setattr(statistics, "_measured", lambda *given: given)
    monkeypatch.setattr(statistics, "measured", lambda required, reason, make, *rest: asked.append((required, reason, *rest)) or make())
    statistics.take_statistics(config, "runner")
    made = config, "runner", {name: layers[name] for name in "01"}
    assert asked == [(None, None, statistics.logger, what)] and given == [(0, made), (1, made)]
    assert not any(impl.unmeasured for impl in impls)


def test_layers_without_keys_of_their_own_show_the_owners_in_the_pass_that_measures():
    generator = torch.Generator().manual_seed(0)
    owner, reader = (QuantKVImpl.__new__(QuantKVImpl) for _ in "ab")
    reader.owner, seen, shown, outs = owner, SeenLayers("no.package"), [], []
    seen.add = lambda *given: shown.append(given)
    rows = [torch.randn(5, heads, 16, generator=generator) for heads in (4, 2, 2)]
    for number, impl in enumerate((owner, reader)):
        impl.attention, impl.number, impl.policy = LayerAttention(4, 0.25), number, Policy("levels4", statistics="auto")
        impl.watch(seen)
        given = [t.clone() for t in rows] if impl is owner else [rows[0], *torch.zeros(2, 5, 2, 16)]
        outs.append(impl._observed(None, *given, torch.empty(5, 4, 16)))
    assert [number for number, *_ in shown] == [0, None] and seen.rows.keys() == {owner}
    assert torch.equal(*outs) and bool(outs[0].any())


def test_full_precision_is_refused_where_steps_are_cut_into_two_batches():
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False), kv_transfer_config=None)
    impl._check_full_precision()
    impl.config.parallel_config.use_ubatching = True
    with pytest.raises(NotImplementedError, match="enable_dbo"):
        impl._check_full_precision()


@pytest.mark.parametrize(
    ("name", "consumer", "budget", "served"),
    [
        ("OffloadingConnector", True, None, True),
        ("OffloadingConnector", True, 1 << 20, False),
        ("NixlConnector", True, None, False),
        ("NixlConnector", False, None, True),
    ],
)
def test_full_precision_is_refused_where_blocks_come_within_the_step_that_reads_them(name, consumer, budget, served):
    extra = lambda option, default: {"sync_load_budget_bytes": budget}[option] or default
    connector = SimpleNamespace(kv_connector=name, is_kv_consumer=consumer, get_from_extra_config=extra)
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False), kv_transfer_config=connector)
    with contextlib.nullcontext() if served else pytest.raises(NotImplementedError, match=f"kv_connector='{name}', which may load"):
        impl._check_full_precision()


HYBRID = {  # layers 1 and 3 keep keys and values
    **{"model_type": "jamba", "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "hidden_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 128},
}


@pytest.mark.parametrize("known", [True, False])
def test_layers_with_keys_alone_need_pages_of_one_size_beside_states(known, monkeypatch):
    """Where vLLM plans alone. Of a family that nothing is known of, all layers might have keys."""
    monkeypatch.setattr(mixed, "can_pack", lambda config: False)
    content = HYBRID if known else {"model_type": "new"}
    model = SimpleNamespace(is_hybrid=True, hf_config=SimpleNamespace(to_dict=lambda: content), get_total_num_hidden_layers=lambda: 4)
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(cache_dtype="quantkv_int4", kv_cache_dtype_skip_layers=[]))
    nbytes = {"int4": 72, "int8": 136, "quantkv_int4": 72, "none": 256}.__getitem__
    for policy in (None, Policy("int4"), *([Policy("int4", {0: "int8", 2: "int8"})] if known else [])):
        mixed.check_hybrid(config, policy, nbytes)
    for layer in (1, 3) if known else (0, 1, 3):
        with pytest.raises(NotImplementedError, match=r"int[48] \((72|136) bytes a token"):
            mixed.check_hybrid(config, Policy("int4", {layer: "int8"}), nbytes)
    with monkeypatch.context() as patch:
        patch.setattr(mixed, "can_pack", lambda config: True)
        mixed.check_hybrid(config, Policy("int4", {1: "int8"}), nbytes)
    model.is_hybrid = False
    mixed.check_hybrid(config, Policy("int4", {1: "int8"}), nbytes)
    model.is_hybrid = True
    config.cache_config.kv_cache_dtype_skip_layers = ["1"]
    with pytest.raises(NotImplementedError, match="kv_cache_dtype_skip_layers=\\['1'\\]"):
        mixed.check_hybrid(config, None, nbytes)


def test_padding_is_said_where_pages_are_padded_and_nowhere_else(monkeypatch):
    """Half of gpt-oss-20b's layers have a window; 4,096 tokens, of which all are in flight."""
    told, packs = [], []
    monkeypatch.setattr(mixed, "can_pack", lambda config: bool(packs))
    monkeypatch.setattr(mixed.logger, "warning", lambda text, *given: told.append(given))
    content, policy = known_models.config_of("gpt-oss-20b"), Policy("int4", {0: "int8"})
    cache = SimpleNamespace(kv_cache_dtype_skip_layers=[], block_size=16)
    model = SimpleNamespace(is_hybrid=False, max_model_len=4096, hf_config=SimpleNamespace(to_dict=lambda: content))
    parallel = SimpleNamespace(tensor_parallel_size=1)
    config = SimpleNamespace(model_config=model, cache_config=cache, parallel_config=parallel, max_in_flight_tokens=4096)
    say = lambda policy: mixed.warn_of_padding(config, policy, torch.bfloat16)
    for quiet in (None, Policy("int4"), Policy("levels4", {1: "levels5/levels3"})):
        say(quiet)
    for part, name, value in ((cache, "kv_cache_dtype_skip_layers", ["1"]), (model, "is_hybrid", True)):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, value)
            say(policy)
    packs.append(True)
    say(policy)
    packs.clear()
    assert told == []
    say(policy)
    row, full, window = 8 * (2 * 64 + 8), 12 * 256, 12 * (256 + 1)  # bytes of an int8 token; blocks of 4,096 tokens, 12 layers of each kind
    held = (full + window) * 16 * row
    (length, taken, times, needed, do), least = told[0], 12 * (4096 + 4096 + 16) * 8 * (2 * 32 + 8)
    assert (length, taken, do) == ("4,096", f"{held:,}", mixed.PACKS)
    needed = int(needed.replace(",", ""))
    assert least < needed < 1.1 * least and times == pytest.approx(held / needed)
    content = {"model_type": "new"}
    say(policy)
    assert len(told) == 1


def test_a_model_that_cannot_be_measured_is_named_once():
    """However often the worker is asked for its memory."""
    impl = QuantKVImpl.__new__(QuantKVImpl)
    impl.number, impl.policy, impl.measured = 0, Policy("levels8", statistics="auto"), None
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": SimpleNamespace(impl=impl)}),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        model_config=SimpleNamespace(is_hybrid=True),
    )
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics.logger, "warning", lambda text, *given: told.append(text % given))
        for _ in range(3):
            statistics.take_statistics(config, None)
    assert len(told) == 1 and "keeps states" in told[0] and not impl.wants_statistics
