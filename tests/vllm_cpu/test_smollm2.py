"""A real model, SmolLM2 in float32, served by stock vLLM from quantkv's pages."""

import engine
import pytest
import references
import torch

import prompts
from quantkv import get_format
from test_options import STORED

IMPLEMENTATION = "quantkv.integrations.vllm.implementation.QuantKVImpl"
LAYERS, HEADS, HEAD_SIZE, BLOCK = 30, 3, 64, 16
TOKENS = 24
CHUNKED = {"max_num_batched_tokens": 64}
TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 320}  # for 8 prompts of 600 tokens in all
SCORED, ASK = [prompts.SCORED], {"tokens": 2, "scored": True}
MEMORY = 1 << 30  # $VLLM_CPU_KVCACHE_SPACE
# Mean |difference of a prompt token's log-probability| from the unquantized format's; a quarter above what was measured.
BOUNDS = {"int8": 0.017, "k8v4": 0.035, "tq4": 0.131, "int4": 0.143}


@pytest.fixture(scope="module")
def tokenize(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, trust_remote_code=False)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def asked(tokenize):
    return [tokenize(prompt) for prompt in prompts.PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2, asked):
    return [references.continued(smollm2, prompt, TOKENS) for prompt in asked]


def ran(report, *formats):
    """The class that served the layers is quantkv's, it was called for every layer, and the layers have these formats."""
    assert report.error == ""
    assert report.classes == {IMPLEMENTATION}
    assert set(report.formats) == set(formats)
    assert len(report.formats) == LAYERS
    assert report.calls["write"] >= LAYERS
    assert report.calls["write"] == report.calls["decode"] + report.calls["mixed"]
    assert report.calls["write"] % LAYERS == 0


@pytest.mark.parametrize("arguments", [{}, CHUNKED, TIGHT], ids=["at_once", "chunked", "preempted"])
def test_the_unquantized_format_says_what_transformers_says(smollm2, asked, expected, arguments):
    report = engine.run(smollm2, "quantkv_fp32", asked, tokens=TOKENS, **arguments)
    ran(report, "fp32")
    assert report.answers[0].tokens == expected
    assert (report.preemptions > 0) == (arguments is TIGHT)
    assert report.calls["mixed"] > (3 * LAYERS if arguments is CHUNKED else 0)


def test_pages_found_in_the_prefix_cache_say_the_same(smollm2, asked, expected):
    report = engine.run(smollm2, "quantkv_fp32", asked, tokens=TOKENS, rounds=2, enable_prefix_caching=True)
    ran(report, "fp32")
    first, again = report.answers
    assert first.tokens == again.tokens == expected
    whole = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in asked]
    assert again.cached == whole
    assert sum(first.cached) < sum(again.cached)


@pytest.mark.parametrize("arguments", [CHUNKED, TIGHT], ids=["chunked", "preempted"])
def test_quantized_pages_survive_what_the_scheduler_does(smollm2, asked, arguments):
    """Every row is read back at 4 bits, where prompts read what is stored of them: it does not matter in which step it was written."""
    whole = engine.run(smollm2, "quantkv_int4", asked, tokens=TOKENS, **STORED)
    cut = engine.run(smollm2, "quantkv_int4", asked, tokens=TOKENS, **STORED, **arguments)
    for report in (whole, cut):
        ran(report, "int4")
    assert cut.answers[0].tokens == whole.answers[0].tokens
    assert (cut.preemptions > 0) == (arguments is TIGHT)


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8", "k8v4", "tq4", "int4", "int2"])
def test_memory_holds_as_many_tokens_as_the_pages_allow(smollm2, stored):
    report = engine.run(smollm2, f"quantkv_{stored}", SCORED, **ASK)
    ran(report, stored)
    block = get_format(stored).cache_spec(HEADS, HEAD_SIZE, block_size=BLOCK).block_bytes
    assert report.page_bytes == [block]
    assert report.block_sizes == [BLOCK]
    assert report.tokens == MEMORY // (LAYERS * block) * BLOCK


def test_how_many_times_the_tokens_of_16_bits(smollm2):
    tokens = {f: engine.run(smollm2, f"quantkv_{f}", SCORED, **ASK).tokens for f in ("bf16", "int8", "tq4", "int4", "int2")}
    assert {f: round(n / tokens["bf16"], 2) for f, n in tokens.items()} == {"bf16": 1, "int8": 1.88, "tq4": 3.66, "int4": 3.56, "int2": 6.4}


@pytest.mark.parametrize("stored", BOUNDS)
def test_quantized_pages_keep_the_probabilities(smollm2, tokenize, stored):
    plain = engine.run(smollm2, "quantkv_fp32", SCORED, **ASK).answers[0].prompt_logprobs[0]
    wanted = references.scored(smollm2, tokenize(prompts.SCORED))
    torch.testing.assert_close(torch.tensor(plain), wanted, rtol=0, atol=2e-4)
    found = engine.run(smollm2, f"quantkv_{stored}", SCORED, **ASK, **STORED).answers[0].prompt_logprobs[0]
    off = (torch.tensor(found) - torch.tensor(plain)).abs().mean()
    assert BOUNDS[stored] / 4 < off < BOUNDS[stored]
