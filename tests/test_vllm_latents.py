"""Layers of latents (MLA) in the plug-in, without a model or an engine: what they show, gather and absorb, by numbers."""

import math
import os
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vLLM looks for a device
pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import mla_attention

import quantkv.integrations.vllm as plug_in
from quantkv import PagedCache, get_format
from quantkv.calibration import Calibration
from quantkv.engine.layer import LayerAttention
from quantkv.engine.observed import moments_of
from quantkv.engine.warm_up import StepLimits
from quantkv.geometry import Heads
from quantkv.integrations.vllm import mla
from quantkv.integrations.vllm.implementation import QuantKVImpl
from quantkv.integrations.vllm.mla_metadata import QuantKVLatentBuilder
from quantkv.policy import Policy
from test_vllm_plugin import COUNT, NOPE, RANK, ROPE, VALUES, latent_impl


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_projection(impl):
    """A layer's up-projection, and what it makes of latents: keys and values of every head."""
    weight = random(RANK, COUNT * (NOPE + VALUES), seed=9) / RANK**0.5
    impl.kv_b_proj = lambda latents: (latents @ weight, None)
    impl.num_heads, impl.qk_nope_head_dim, impl.v_head_dim = COUNT, NOPE, VALUES
    impl._use_flashinfer_concat_mla_k = False  # which is for GPUs

    def keys_and_values(latents, rotated):
        heads = (latents @ weight).view(len(latents), COUNT, NOPE + VALUES)
        return torch.cat([heads[..., :NOPE], rotated.expand(-1, COUNT, -1)], 2), heads[..., NOPE:]

    return keys_and_values


def dense(q, k, v, scale, first=None):
    """Attention of `[T, HQ, D]` over all keys, or of a sequence whose query 0 stands at `first`, with its log-sum-exp `[HQ, T]`."""
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if first is not None:
        scores = scores.masked_fill(torch.arange(len(k)) > first + torch.arange(len(q))[:, None], -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(2), v), scores.logsumexp(2)


def test_the_backend_of_latents_is_what_vllm_is_told_of_it():
    backend = mla.QuantKVLatentBackend
    assert backend.get_name() == plug_in.LATENTS == "CUSTOM_MLA"
    assert backend.get_impl_cls() is mla.QuantKVLatentImpl and backend.get_builder_cls() is QuantKVLatentBuilder
    answers = ("sink", "sliding_window", "alibi_sqrt", "mm_prefix", "batch_invariance")
    assert [getattr(backend, f"supports_{name}")() for name in answers] == [False] * 5
    impl = mla.QuantKVLatentImpl
    assert impl.of_latents is True and impl.supports_pcp is False and impl.backend is backend
    assert not QuantKVImpl.of_latents


def test_bytes_of_a_token_are_of_its_latent_and_of_rotated_dimensions_as_the_model_computes_them(monkeypatch):
    """Before the layers have their formats, of the configuration's type."""
    model, cache = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(cache_dtype="quantkv_int8")
    monkeypatch.setattr(mla, "get_current_vllm_config", lambda: SimpleNamespace(model_config=model, cache_config=cache))
    monkeypatch.setattr(
        mla, "get_mla_dims", lambda given: SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE) if given is model else None
    )
    backend = mla.QuantKVLatentBackend
    int4, int8 = (get_format(name) for name in ("int4", "int8"))
    meta = int8.cache_spec(1, RANK, block_size=16).page_bytes // 32 - RANK  # of a row of the latent's size
    assert backend.content_bytes(None) == RANK + meta + 2 * ROPE
    model.dtype = torch.float32
    assert backend.content_bytes(None) == RANK + meta + 4 * ROPE
    assert backend.token_bytes(int8, 999, 64, torch.bfloat16) == RANK + meta + 2 * ROPE
    cache.cache_dtype = "quantkv_4bit"
    assert backend.content_bytes(None) == RANK // 2 + meta + ROPE + 4  # int4+int8
    assert backend.of(int4.latents(torch.bfloat16), RANK, ROPE).content_bytes(None) == RANK // 2 + meta + 2 * ROPE


def test_a_layers_calibration_is_of_one_head(monkeypatch):
    """On every rank, however many there are."""
    impl, heads = latent_impl("levels4"), Heads(1, RANK, ROPE)
    found = Calibration(1, {0: moments_of(torch.zeros(1, 1, RANK), torch.eye(RANK)[None], torch.eye(ROPE)[None])}, {})
    impl.policy, impl.dtype = Policy("levels4", calibration=found), torch.float32
    impl.config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=8))
    assert impl._all_kv_heads() == 1
    assert impl._by_policy(0, heads).format == get_format("levels4").latents(torch.float32)


def test_a_layer_shows_its_latents_while_it_is_watched_and_attends_to_its_own_rows():
    """vLLM's own forward is back where nobody watches."""
    impl, tokens = latent_impl("levels4"), 7
    expected, layer, shown = with_projection(impl), SimpleNamespace(), []
    impl._layer, impl.number, impl.policy = lambda: layer, 3, Policy("levels4", statistics="auto")
    observer = SimpleNamespace(add_latents=lambda *given: shown.append(given))
    impl.watch(None)
    assert vars(layer) == {} and impl.observer is None
    impl.watch(observer)
    assert impl.observer is observer
    q, latents, rotated = random(tokens, COUNT, NOPE + ROPE), random(tokens, RANK, seed=1), random(tokens, 1, ROPE, seed=2)
    out = torch.empty(tokens, COUNT * VALUES)
    assert layer.forward_impl(q, latents, rotated, None, None, output=out) is out
    ((number, given),) = shown
    assert number == 3 and given is latents
    found = dense(q, *expected(latents, rotated), impl.scale, 0)[0]
    assert torch.allclose(out.view(tokens, COUNT, VALUES), found, atol=1e-5)
    impl.watch(None)
    assert vars(layer) == {} and impl.observer is None


@pytest.mark.parametrize("with_mean", [False, True])
def test_prompts_attend_to_what_is_before_them_in_chunks(with_mean, monkeypatch):
    """20 tokens before the first prompt and 9 before the second: 12 in the first chunk, which the second goes on with. A third has none."""
    impl = latent_impl("fp32")
    expected, pages = with_projection(impl), impl.paged.allocate(4, 16, torch.device("cpu"))
    impl.mean = random(RANK, seed=5) if with_mean else None
    latents, rotated = random(29, 1, RANK), random(29, 1, ROPE, seed=1)
    pages.write(latents, rotated, torch.cat([torch.arange(20), 48 + torch.arange(9)]))
    impl.cache_of, impl._layer = lambda kv_cache: pages if kv_cache == "bytes" else None, lambda: SimpleNamespace(kv_cache="bytes")
    q, ran = random(6, COUNT, NOPE + ROPE, seed=2), []

    def run(chunk, q, k, v):
        ran.append((len(q), len(k)))
        outs, lses, at = [], [], 0
        for number, (start, end) in enumerate(chunk.queries):
            begin, last = chunk.cu_seq_lens[number : number + 2].tolist()
            out, lse = dense(q[start:end], k[begin:last], v[begin:last], impl.scale)
            outs.append(out), lses.append(lse)
            at = last
        assert at == len(k) == chunk.num_context_tokens
        return torch.cat(outs), torch.cat(lses, 1)

    def merge(output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse):
        lse = torch.logaddexp(prefix_lse, suffix_lse)
        weights = [(part - lse).exp().T[..., None] for part in (prefix_lse, suffix_lse)]
        output.copy_(weights[0] * prefix_output + weights[1] * suffix_output), output_lse.copy_(lse)

    monkeypatch.setattr(mla_attention, "merge_attn_states", merge)
    of_first = {"request_slice": slice(0, 1), "token_slice": slice(0, 3), "queries": [(0, 3)], "num_context_tokens": 12}
    of_both = {"request_slice": slice(0, 2), "token_slice": slice(0, 5), "queries": [(0, 3), (3, 5)], "num_context_tokens": 17}
    chunks = [
        SimpleNamespace(**of_first, cu_seq_lens=torch.tensor([0, 12]), starts=torch.tensor([0]), is_continuation=False),
        SimpleNamespace(**of_both, cu_seq_lens=torch.tensor([0, 8, 17]), starts=torch.tensor([12, 0]), is_continuation=True),
    ]
    for chunk in chunks:
        chunk.cu_seq_lens, chunk.starts, chunk.continuation_token_end = chunk.cu_seq_lens.int(), chunk.starts.int(), 3
    chunked = SimpleNamespace(chunks=chunks, workspace=torch.full((32, RANK + ROPE), 7.0), empty_token_slices=[slice(5, 6)])
    table = torch.tensor([[0, 1], [3, 0], [0, 0]], dtype=torch.int32)
    prefill = SimpleNamespace(chunked_context=chunked, block_table=table, prefill_backend=SimpleNamespace(run_prefill_context_chunk=run))
    asked = []
    step = SimpleNamespace(prefill=prefill, full_precision_of_prompts=lambda *given: asked.append(given))
    out, lse = impl._compute_prefill_context(q, None, step, None)
    assert ran == [(3, 12), (5, 17)] and asked == [(0, 1), (0, 2)]
    stored = latents[:, 0] + (impl.mean if with_mean else 0)
    k, v = expected(stored, rotated)
    for rows, keys in ((slice(0, 3), slice(0, 20)), (slice(3, 5), slice(20, 29))):
        wanted, wanted_lse = dense(q[rows], k[keys], v[keys], impl.scale)
        assert torch.allclose(out[rows], wanted, atol=1e-5) and torch.allclose(lse[:, rows], wanted_lse, atol=1e-5)
    assert not out[5:].any() and bool((lse[:, 5:] == -math.inf).all())
    assert len(out) == 6


def test_projections_absorb_rotations_once_vllm_has_made_them():
    """vLLM's layers of another backend stay as they are."""
    assert mla.MLAAttention.process_weights_after_loading.__module__ == mla.__name__
    impl, done = latent_impl("int4"), []
    impl.absorb = lambda layer: done.append(("absorbed", layer))
    own = lambda layer, dtype: done.append((layer, dtype))
    for layer in (ours := SimpleNamespace(impl=impl), theirs := SimpleNamespace(impl=QuantKVImpl.__new__(QuantKVImpl))):
        mla._absorb(own, layer, torch.bfloat16)
    assert done == [(ours, torch.bfloat16), ("absorbed", ours), (theirs, torch.bfloat16)]


@pytest.mark.parametrize("absorbed", [False, True])
def test_what_decode_reads_is_compiled_at_start_beside_what_prompts_read(absorbed, monkeypatch):
    """Rotated pages for prompts; as they are stored for decode, where the projections hold the rotation."""
    impl, asked = latent_impl("levels4"), []
    impl.dtype, impl.absorbed = torch.float32, absorbed
    impl._limits = lambda *given: given

    def compiled(paged, attention, limits, pages):
        asked.append((paged, attention, limits, pages.maps.k is None, pages.num_blocks))
        return {f"call {len(asked)}": "somebody"}

    monkeypatch.setattr(mla, "warm_up", compiled)
    gathered = []
    monkeypatch.setattr(PagedCache, "gather", lambda self, *given: gathered.append(given))
    told = impl.warm_up(torch.zeros(4, 16, impl.paged.spec(16).page_bytes // 16, dtype=torch.uint8), 1, None)
    rest = impl.paged, impl.attention, (1, None)
    assert asked == [(*rest, False, 4), (*rest, True, 4)][: 1 + absorbed]
    assert told == {f"call {n + 1}": "somebody" for n in range(1 + absorbed)}
    ((table, starts, (latents, rotated), first),) = gathered
    assert table.tolist() == [[0]] and starts.tolist() == [0, 1] and first.tolist() == [0]
    assert latents.shape == (1, 1, RANK) and rotated.shape == (1, 1, ROPE)
    assert {t.dtype for t in (table, starts, first)} == {torch.int32} and latents.dtype == rotated.dtype == torch.float32


def test_scratch_of_the_largest_step_of_decode_is_claimed(monkeypatch):
    impl, claimed = latent_impl("int4"), []
    monkeypatch.setattr(mla, "claim_scratch", claimed.append)
    impl.config, impl.num_heads, impl.dtype = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=5)), COUNT, torch.float16
    impl.reserve_workspace()
    (query,) = claimed
    assert query.shape == (5, COUNT, RANK + ROPE) and query.dtype == torch.float16


@pytest.mark.parametrize("absorbed", [False, True])
def test_what_decode_reads_is_made_once_for_a_tensor_of_vllms(absorbed, monkeypatch):
    monkeypatch.setattr(mla, "calls", Counter())
    impl, read = latent_impl("int4"), []
    impl.absorbed, impl.attention = absorbed, LayerAttention(COUNT, 0.5)
    step = SimpleNamespace(decoded=SimpleNamespace(attend=lambda pages, q, scale, options, mean: read.append((pages, q, scale, options))))
    width = impl.paged.spec(16).page_bytes // 16
    layers = [SimpleNamespace(kv_cache=torch.zeros(blocks, 16, width, dtype=torch.uint8)) for blocks in (2, 3)]
    for layer in (layers[0], layers[0], layers[1]):
        assert impl.forward_mqa("q", None, step, layer)[1] is None
    (first, *given), (again, *_), (other, *_) = read
    assert first is again and (first.num_blocks, other.num_blocks) == (2, 3) and given == ["q", impl.scale, impl.attention.options]
    assert [pages.maps.k is None for pages in (first, other)] == [absorbed] * 2
    assert mla.calls == {"decode": 3}


def test_no_row_is_stored_before_vllm_has_given_the_layer_its_pages(monkeypatch):
    """A tensor without bytes stands for pages until then."""
    impl, written = latent_impl("int4"), []
    monkeypatch.setattr(mla, "calls", Counter())
    step = SimpleNamespace(written=SimpleNamespace(write=lambda cache, *given: written.append(cache)))
    monkeypatch.setattr(mla, "step_of", lambda layer: step)
    impl._layer, impl.cache_of = lambda: None, lambda kv_cache: kv_cache.numel()
    for size in (0, 1, 2):
        impl.do_kv_cache_update(torch.ones(1, RANK), torch.ones(1, 1, ROPE), torch.empty(size), torch.zeros(1, 1), "quantkv_int4", None)
    assert written == [1, 2] and mla.calls == {"write": 2}


def test_vllms_tensor_may_have_the_axis_of_its_one_head():
    impl = latent_impl("int4")
    memory = torch.zeros(2, 16, impl.paged.spec(16).page_bytes // 16, dtype=torch.uint8)
    for given in (memory, memory[:, None]):
        pages = impl._wrap(given)
        assert (pages.num_blocks, pages.spec.num_kv_heads, pages.spec.block_size) == (2, 1, 16)
        assert pages.buffer.data_ptr() == memory.data_ptr()


def test_limits_of_steps_are_the_schedulers():
    impl = latent_impl("int4")
    scheduler, model = SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=64), SimpleNamespace(max_model_len=512)
    impl.config = SimpleNamespace(scheduler_config=scheduler, model_config=model)
    assert impl._limits(2, 32) == StepLimits(3, 64, 512, 2, 32)
