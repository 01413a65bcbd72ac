"""Models with latents (MLA), under the same two options as any other: tiny random ones, compared with transformers by log-probability."""

import json
from contextlib import contextmanager

import engine
import pytest
import references
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_tiny_models import PROMPTS, TOKENS

from quantkv import PagedCache, get_format
from test_options import STORED, policy

ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256}
CHUNKED = {"max_num_batched_tokens": 48}
BACKEND = {"quantkv.integrations.vllm.mla.QuantKVLatentImpl"}
ROW = 256, 64  # numbers of a latent and of its rotated dimensions
SAME = 2e-4  # additions in another order


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    return tiny_models.write("latents", tmp_path_factory.mktemp("latents"))


def ask(folder, name, **given):
    report = engine.run(folder, f"quantkv_{name}", PROMPTS, **{"tokens": TOKENS, "scored": True, **ARGUMENTS, **given})
    assert report.error == ""
    assert report.classes == BACKEND
    return report


def scores(report):
    return torch.cat([torch.tensor(prompt) for prompt in report.answers[0].prompt_logprobs])


@pytest.mark.parametrize("given", [{}, CHUNKED, {**CHUNKED, **STORED}], ids=["at_once", "chunked", "chunked_stored"])
def test_the_probabilities_of_transformers(latents, given):
    report = ask(latents, "none", **given)
    assert set(report.formats) == {"fp32+fp32"}
    assert report.calls["decode"] and report.calls["mixed"]
    found = report.answers[0]
    for prompt, tokens, logprobs, of_prompt in zip(PROMPTS, found.tokens, found.logprobs, found.prompt_logprobs):
        wanted = references.scored(latents, prompt + tokens)
        torch.testing.assert_close(torch.tensor(of_prompt + logprobs), wanted, rtol=0, atol=SAME)


@contextmanager
def rounded(folder, fmt):
    """transformers with rows of latents as a format stores them: in one step it says what pages say."""
    spec = get_format(fmt, torch.float32).latent_spec(*ROW, 16, torch.float32)

    def through_pages(*rows):
        cache, slots = PagedCache(spec, 32), torch.arange(rows[0].shape[-2])
        cache.write(*(part.view(len(slots), 1, -1) for part in rows), slots)
        return [stored.view_as(part) for stored, part in zip(cache.dequantize(slots), rows)]

    attentions = [layer.self_attn for layer in references.model(folder).model.layers]
    for attention in attentions:
        attention.expand_kv = lambda *rows, own=attention.expand_kv: own(*through_pages(*rows))
    try:
        yield
    finally:
        for attention in attentions:
            del attention.expand_kv


@pytest.mark.parametrize("name", ["int4", "levels4", "int4+int8"])
def test_quantized_latents_are_those_of_the_format(latents, name):
    """A number at the edge of two codes may fall on the other side. However a prompt that reads what is stored is cut, the answer is the
    same."""
    plain, whole, cut = (scores(ask(latents, of, **given)) for of, given in (("none", {}), (name, STORED), (name, {**STORED, **CHUNKED})))
    with rounded(latents, name):
        wanted = torch.cat([references.scored(latents, prompt) for prompt in PROMPTS])
    lost = (wanted - plain).abs().mean()
    assert lost > 0.1
    assert (whole - wanted).abs().mean() < lost / 20
    assert (whole - cut).abs().mean() < lost / 20


def test_prompts_in_one_step_lose_nothing(latents):
    plain, whole, cut = (scores(ask(latents, name, **given)) for name, given in (("none", {}), ("int4", {}), ("int4", CHUNKED)))
    assert (whole - plain).abs().max() < SAME < (cut - plain).abs().max()


@pytest.mark.parametrize("name", ["none", "int4", "int4+int8"])
def test_as_many_tokens_as_the_pages_allow(latents, name):
    """A page is one row a token, in no second copy."""
    report = ask(latents, name)
    spec = get_format(name, torch.float32).latent_spec(*ROW, 16, torch.float32)
    assert report.page_bytes == [spec.page_bytes]
    memory, layers = 2**30, 2
    assert report.tokens == memory // (layers * spec.page_bytes) * 16


def test_pages_found_in_the_prefix_cache_say_the_same(latents):
    given = {"rounds": 2, "scored": False, "enable_prefix_caching": True}
    plain = ask(latents, "none", scored=False)
    report = ask(latents, "none", **given)
    assert [answers.tokens for answers in report.answers] == [plain.answers[0].tokens] * 2
    assert report.answers[1].cached == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    stored = ask(latents, "int4", **given, **STORED)
    assert stored.answers[0].tokens == stored.answers[1].tokens  # what is found is what was written


def test_drafts_are_verified(latents):
    """Drafts come from the text itself; verification reads pages as decode does."""
    asked = {"skip_tokenizer_init": True, "max_model_len": 256, "tokens": 32}
    prompts = [[5, 6, 7, 8] * 6, [9, 10, 11] * 8, tiny_models.prompt(3, 40)]
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    for name in ("quantkv_none", "quantkv_int8"):
        plain, found = (engine.run(latents, name, prompts, **asked, **given) for given in ({}, {"speculative_config": ngram}))
        assert found.error == plain.error == ""
        assert found.answers[0].tokens == plain.answers[0].tokens
        assert found.drafted > 0


@pytest.mark.parametrize("given", [{}, CHUNKED, {**CHUNKED, **STORED}], ids=["at_once", "chunked", "chunked_stored"])
def test_all_tokens_at_full_precision_say_what_transformers_says(latents, tmp_path, given):
    """Nothing of int2 is to be seen: decode reads copies, rotated as its projections are, and prompts rows that are rotated back."""
    prompt = "stored" if "additional_config" in given else "own"
    exact = policy(tmp_path, format="int2", full_precision={"sink": 16, "recent": 512}, prompt=prompt)
    report = ask(latents, "policy", **{**given, **exact})
    assert set(report.formats) == {"int2+fp32"}
    found = report.answers[0]
    for prompt, tokens, logprobs, of_prompt in zip(PROMPTS, found.tokens, found.logprobs, found.prompt_logprobs):
        wanted = references.scored(latents, prompt + tokens)
        torch.testing.assert_close(torch.tensor(of_prompt + logprobs), wanted, rtol=0, atol=SAME)


def test_some_tokens_at_full_precision_lose_less(latents, tmp_path):
    """Of prompts that read what is stored of them; the first tokens are a part of every context."""
    plain, whole = scores(ask(latents, "none")), scores(ask(latents, "int2", **STORED))
    few = policy(tmp_path, format="int2", full_precision={"sink": 16, "recent": 24}, prompt="stored")
    off = (scores(ask(latents, "policy", **few, **CHUNKED)) - plain).abs().mean()
    assert 0.01 < off < 0.8 * (whole - plain).abs().mean()


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """Whose latents have a mean: all embeddings share a direction."""
    folder = tmp_path_factory.mktemp("shifted")
    tiny_models.write("latents", folder)
    held = load_file(folder / "model.safetensors")
    held["model.embed_tokens.weight"] += 0.5 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_a_preset_measures_the_mean_of_latents(shifted, tmp_path):
    """Prompts read what is stored of them, earlier ones and decode too."""
    stored = {"full_precision": {"sink": 16, "recent": 24}, "prompt": "stored"}
    plain = ask(shifted, "none")
    without = ask(shifted, "policy", **policy(tmp_path, format="levels4", latents="int4+int8", **stored))
    found = ask(shifted, "4bit", **STORED, **CHUNKED)
    assert set(without.formats) == set(found.formats) == {"int4+int8"}
    assert "quantkv: means of latents of 2 layers (512 tokens at random" in found.log
    lost, off = ((scores(report) - scores(plain)).abs().mean() for report in (without, found))
    assert off < lost / 2


def test_a_policy_gives_each_layer_its_format(latents, tmp_path):
    plain = scores(ask(latents, "none"))
    asked = policy(tmp_path, format="int4", layers={"1": "none"}, prompt="stored")
    report = ask(latents, "policy", **asked)
    assert report.formats == ["int4+fp32", "fp32+fp32"]
    assert 0 < (scores(report) - plain).abs().mean() < (scores(ask(latents, "int4", **STORED)) - plain).abs().mean()


def test_selected_latents_are_refused_by_name_before_the_weights_are_loaded(tmp_path):
    """DeepSeek-V3.2's: a sparse indexer (DSA)."""
    folder = tmp_path / "model"
    tiny_models.write("latents", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 64}
    config |= {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    report = engine.run(str(folder), "quantkv_int4", **ARGUMENTS)
    assert "DeepseekV32ForCausalLM attends to latents that a sparse indexer selects (DSA)" in report.error
    assert "Loading weights took" not in report.log


def test_batch_invariance_is_refused_before_the_weights_are_loaded(latents):
    report = engine.run(latents, "quantkv_int4", **ARGUMENTS, environment={"VLLM_BATCH_INVARIANT": "1"})
    assert "VLLM_BATCH_INVARIANT=1 with latents (MLA) is not supported" in report.error
    assert "Loading weights took" not in report.log
