"""Tiny random models: what they say from quantkv's pages, against transformers."""

import json

import engine
import pytest
import references
import tiny_models
import torch

from quantkv import get_format

TOKENS, PAGE = 16, 16
LONG = tiny_models.prompt(4, 300)
PROMPTS = [tiny_models.prompt(seed, length) for seed, length in ((1, 70), (2, 5), (3, 33))]


def says_what_transformers_says(report, folder, prompts):
    """In every round the very tokens, and the log-probabilities of the next ones at each step, and of a prompt's own where they were asked:
    a key too few in a window moves those alone."""
    assert report.error == "", report.log[-3000:]
    for answers in report.answers:
        for prompt, tokens, found, own in zip(prompts, answers.tokens, answers.logprobs, answers.prompt_logprobs, strict=True):
            assert tokens == references.continued(folder, prompt, TOKENS)
            expected = references.most_probable(folder, prompt + tokens[:-1], engine.NEXT)[len(prompt) - 1 :]
            assert (torch.tensor(found) - expected).abs().max() < 5e-5
            assert len(own) in (0, len(prompt) - 1)
            if own:
                assert (torch.tensor(own) - references.scored(folder, prompt)).abs().max() < 5e-5


@pytest.mark.parametrize("family", ["llama", "softcap"])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_unquantized_format_says_what_transformers_says(tmp_path, family, chunked):
    folder = tiny_models.write(family, tmp_path)
    arguments = {"chunked_prefill_size": 32} if chunked else {}
    changes = '{"hidden_act": "gelu_pytorch_tanh"}' if family == "softcap" else "{}"  # where transformers has another name
    report = engine.run(folder, "quantkv_none", PROMPTS, tokens=TOKENS, scored=True, json_model_override_args=changes, **arguments)
    says_what_transformers_says(report, folder, PROMPTS)
    assert report.formats == ["fp32", "fp32"] and report.calls["decode"] > 0


@pytest.mark.parametrize("page_size", [pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow), 128])
def test_larger_pages_say_the_same(tmp_path, page_size):
    """Behind a prefix that the radix cache holds too, and in chunks that end within a page."""
    folder = tiny_models.write("llama", tmp_path)
    given = {"disable_radix_cache": False, "chunked_prefill_size": 128, "json_model_override_args": "{}"}
    report = engine.run(folder, "quantkv_none", [LONG, *PROMPTS], tokens=TOKENS, rounds=2, page_size=page_size, **given)
    says_what_transformers_says(report, folder, [LONG, *PROMPTS])
    assert report.page_size == page_size
    assert report.page_bytes == [get_format("fp32").cache_spec(2, 64, block_size=page_size).block_bytes] * 2
    assert report.answers[1].cached[0] == (len(LONG) - 1) // page_size * page_size


@pytest.mark.parametrize("arguments", [{"chunked_prefill_size": 32}, engine.TIGHT], ids=["chunked", "retracted"])
@pytest.mark.parametrize("stored", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_quantized_pages_survive_what_the_scheduler_does(tmp_path, stored, arguments):
    """Every row is read back as stored: it does not matter in which step it was written."""
    folder = tiny_models.write("llama", tmp_path)
    given = {"environment": {"QUANTKV_PROMPT": "stored"}, "json_model_override_args": "{}"}
    whole, cut = (engine.run(folder, f"quantkv_{stored}", PROMPTS, tokens=TOKENS, **given, **more) for more in ({}, arguments))
    assert (whole.error, cut.error) == ("", "") and cut.formats == [stored, stored]
    assert cut.answers[0].tokens == whole.answers[0].tokens
    assert (cut.retracted > 0) == (arguments is engine.TIGHT)


@pytest.mark.parametrize("stored", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "int4")), "4bit"])
def test_two_ranks_say_what_one_says(tmp_path, stored):
    """Each has half of the heads, and half of a page's bytes. A preset has each measure its own."""
    folder = tiny_models.write("llama", tmp_path)
    bound = {"environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}}  # SGLang asks for it where ranks outnumber NUMA nodes
    one, two = (
        engine.run(folder, f"quantkv_{stored}", PROMPTS, tokens=TOKENS, json_model_override_args="{}", **given)
        for given in ({}, {"tp_size": 2, **bound})
    )
    assert (one.error, two.error) == ("", ""), two.log[-3000:]
    assert two.answers[0].tokens == one.answers[0].tokens
    assert [2 * size for size in two.page_bytes] == one.page_bytes
    assert (one.log.count("key means and Hessians of 2 layers"), two.log.count("key means and Hessians of 2 layers")) == (
        (1, 2) if stored == "4bit" else (0, 0)
    )


def test_a_policy_gives_each_layer_its_format_and_its_bytes(tmp_path):
    """Layers of two sizes: each has pages of its own size."""
    folder, file = tiny_models.write("llama", tmp_path / "model"), tmp_path / "policy.json"
    file.write_text(json.dumps({"policy_version": 1, "format": "int4", "layers": {"1": "int8"}}))
    report = engine.run(
        folder, "quantkv_policy", PROMPTS, tokens=TOKENS, environment={"QUANTKV_POLICY": str(file)}, json_model_override_args="{}"
    )
    assert report.error == "", report.log[-3000:]
    assert report.formats == ["int4", "int8"] and len(report.answers[0].tokens[0]) == TOKENS
    pages = [get_format(name).cache_spec(2, 64, block_size=PAGE).block_bytes for name in ("int4", "int8")]
    assert report.page_bytes == pages
    assert report.pool_bytes == sum(pages) * (report.tokens // PAGE + 1)


@pytest.mark.parametrize("stored", ["none", "int4"])
def test_as_many_tokens_fit_as_the_pages_allow(tmp_path, stored):
    """SGLang takes a share of the machine's memory; the tokens that fit there follow from the bytes of a page."""
    memory = 64 << 20
    setup = f"""
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
KVCacheConfigurator._profile_available_bytes = lambda self, before: {memory}
"""
    folder = tiny_models.write("llama", tmp_path)
    report = engine.run(folder, f"quantkv_{stored}", setup=setup, max_total_tokens=None, json_model_override_args="{}")
    assert report.error == "", report.log[-3000:]
    page = 2 * get_format("fp32" if stored == "none" else stored).cache_spec(2, 64, block_size=PAGE).block_bytes
    assert report.tokens == memory // (page // PAGE) // PAGE * PAGE


def test_keys_and_values_apart_and_the_page_size_that_nobody_asks_for(tmp_path):
    folder = tiny_models.write("llama", tmp_path)
    report = engine.run(folder, "quantkv_int8/int4", page_size=None, json_model_override_args="{}")
    assert (report.error, report.page_size, report.formats) == ("", PAGE, ["int8/int4"] * 2)


@pytest.mark.parametrize("prompt", ["own", "stored"])
def test_prompts_read_their_own_rows_as_given(tmp_path, prompt):
    """At 2 bits, which otherwise cost more than a nat."""
    folder = tiny_models.write("llama", tmp_path)
    given = {"environment": {"QUANTKV_PROMPT": prompt}, "scored": True, "json_model_override_args": "{}"}
    report = engine.run(folder, "quantkv_int2", [LONG], **given)
    off = (torch.tensor(report.answers[0].prompt_logprobs[0]) - references.scored(folder, LONG)).abs()
    assert off.max() < 1e-4 if prompt == "own" else off.mean() > 1.0


def test_prompts_with_8_bit_scores(tmp_path):
    """They lose little, and something; who serves is said in the log."""
    folder = tiny_models.write("llama", tmp_path)
    given = {"environment": {"QUANTKV_PROMPT_PRECISION": "8bit"}, "scored": True, "json_model_override_args": "{}"}
    report = engine.run(folder, "quantkv_int8", [LONG, LONG[:100]], **given)
    off, short = (
        (torch.tensor(found) - references.scored(folder, tokens)).abs()
        for found, tokens in zip(report.answers[0].prompt_logprobs, (LONG, LONG[:100]))
    )
    assert 1e-4 < off.mean() < 0.1 and short.max() < 1e-4
    assert "128 queries among others with 8bit scores by reference" in report.log
    refused = engine.run(folder, "quantkv_int8", environment={"QUANTKV_PROMPT_PRECISION": "fp8"}, json_model_override_args="{}")
    assert "QUANTKV_PROMPT_PRECISION='fp8': one of 16bit, 8bit is needed" in refused.error


SWA = {"hidden_act": "gelu_pytorch_tanh", "is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0]}  # layer 0 gets SGLang's pool for windows
# SGLang has it for models that a CPU does not run; of Gemma 2 it keeps all layers in one pool.
ALLOWED = """
from sglang.srt.configs.model_config import ModelConfig
own = ModelConfig._derive_hybrid_model
def derive(self):
    self.disable_hybrid_swa_memory = False
    own(self)
ModelConfig._derive_hybrid_model = derive
"""


@pytest.mark.parametrize("stored", ["none", "int4"])
def test_layers_with_windows_have_a_pool_of_their_own(tmp_path, stored):
    """Tokens leave it behind the window, and their slots are given to others."""
    folder = tiny_models.write("softcap", tmp_path)
    given = {"max_total_tokens": 512, "swa_full_tokens_ratio": 0.5, "json_model_override_args": json.dumps(SWA)}
    report = engine.run(folder, f"quantkv_{stored}", PROMPTS, tokens=TOKENS, rounds=2, disable_radix_cache=False, setup=ALLOWED, **given)
    assert report.error == "", report.log[-3000:]
    pool = "quantkv.integrations.sglang.pool.QuantKVPool"
    assert report.pools == [pool, pool] and (report.tokens, report.window_tokens) == (512, 256)
    page = get_format("fp32" if stored == "none" else stored).cache_spec(2, 64, block_size=PAGE).block_bytes
    assert report.page_bytes == [page, page] and report.pool_bytes == page * (512 // PAGE + 1 + 256 // PAGE + 1)
    if stored == "none":
        says_what_transformers_says(report, folder, PROMPTS)
    assert sum(report.answers[1].cached) > 0


@pytest.mark.parametrize("stored", ["none", "int4"])
def test_pools_for_windows_fill_the_memory(tmp_path, stored):
    """Bytes of pages, not of rows, say how many tokens each of the two pools holds."""
    memory = 64 << 20
    setup = f"""
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
KVCacheConfigurator._profile_available_bytes = lambda self, before: {memory}
"""
    given = {"max_total_tokens": None, "json_model_override_args": json.dumps(SWA)}
    report = engine.run(tiny_models.write("softcap", tmp_path), f"quantkv_{stored}", setup=ALLOWED + setup, **given)
    assert report.error == "", report.log[-3000:]
    page = get_format("fp32" if stored == "none" else stored).cache_spec(2, 64, block_size=PAGE).block_bytes
    assert 0 < report.window_tokens < report.tokens
    assert memory - 3 * page < (report.tokens + report.window_tokens) // PAGE * page <= memory
