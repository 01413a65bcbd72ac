"""A real model, SmolLM2 in float32, served by stock SGLang from quantkv's pages."""

import math

import engine
import pytest
import torch

import prompts
from quantkv import get_format

OWN = "torch_native"  # SGLang's backend for a CPU
BACKEND, POOL = "quantkv.integrations.sglang.backend.QuantKVBackend", "quantkv.integrations.sglang.pool.QuantKVPool"
LAYERS, HEADS, HEAD_SIZE, PAGE = 30, 3, 64, 16
TOKENS = 24
CHUNKED = {"chunked_prefill_size": 64}
MIXED = {"chunked_prefill_size": 64, "enable_mixed_chunk": True}
STORED = {"environment": {"QUANTKV_PROMPT": "stored"}}
SCORED = {"tokens": 2, "scored": True}
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
    """What SGLang says from its own pool and by its own attention."""
    report = engine.run(smollm2, OWN, asked, tokens=TOKENS)
    assert (
        report.error == ""
        and "TorchNativeAttnBackend" in report.backend
        and report.pools == ["sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"]
    )
    return report.answers[0].tokens


def ran(report, *formats):
    """quantkv's backend served over quantkv's pool, it was called for every layer, and the layers have these formats."""
    assert report.error == "", report.log[-4000:]
    assert (report.backend, report.pools) == (BACKEND, [POOL])
    assert set(report.formats) == set(formats) and len(report.formats) == LAYERS
    assert report.calls["write"] >= LAYERS and report.calls["write"] % LAYERS == 0
    assert report.calls["write"] == report.calls["decode"] + report.calls["mixed"]


@pytest.mark.parametrize("arguments", [{}, CHUNKED, MIXED, engine.TIGHT], ids=["at_once", "chunked", "mixed", "retracted"])
def test_the_unquantized_format_says_what_sglang_says(smollm2, asked, expected, arguments):
    report = engine.run(smollm2, "quantkv_none", asked, tokens=TOKENS, **arguments)
    ran(report, "fp32")
    assert report.answers[0].tokens == expected
    assert (report.retracted > 0) == (arguments is engine.TIGHT)
    assert report.calls["mixed"] > (3 * LAYERS if arguments in (CHUNKED, MIXED) else 0)


@pytest.mark.slow
def test_without_overlap_it_says_the_same(smollm2, asked, expected):
    report = engine.run(smollm2, "quantkv_none", asked, tokens=TOKENS, disable_overlap_schedule=True)
    ran(report, "fp32")
    assert report.answers[0].tokens == expected


def test_pages_found_in_the_radix_cache_say_the_same(smollm2, asked, expected):
    report = engine.run(smollm2, "quantkv_none", asked, tokens=TOKENS, rounds=2, disable_radix_cache=False)
    ran(report, "fp32")
    first, again = report.answers
    assert first.tokens == again.tokens == expected
    assert again.cached == [(len(prompt) - 1) // PAGE * PAGE for prompt in asked]
    assert sum(first.cached) < sum(again.cached)


def test_chunks_read_back_what_was_stored(smollm2, tokenize):
    """At 4 bits, where prompts read what is stored of them. Sums of another batch differ in their last bits, which now and then moves a
    code: log-probabilities differ by a part of what 4 bits cost, and greedy tokens need not be equal."""
    text = [tokenize(prompts.SCORED)]
    whole, cut = (engine.run(smollm2, "quantkv_int4", text, **SCORED, **STORED, **given) for given in ({}, CHUNKED))
    for report in (whole, cut):
        ran(report, "int4")
    assert (cut.calls["mixed"], whole.calls["mixed"]) == (math.ceil(len(text[0]) / 64) * LAYERS, LAYERS)
    off = [torch.tensor(report.answers[0].prompt_logprobs[0]) for report in (whole, cut)]
    assert (off[0] - off[1]).abs().mean() < BOUNDS["int4"] / 10


@pytest.mark.parametrize("stored", [name if name == "int4" else pytest.param(name, marks=pytest.mark.slow) for name in BOUNDS])
def test_quantized_pages_keep_the_probabilities(smollm2, tokenize, stored):
    text = [tokenize(prompts.SCORED)]
    plain = engine.run(smollm2, "quantkv_none", text, **SCORED).answers[0].prompt_logprobs[0]
    report = engine.run(smollm2, f"quantkv_{stored}", text, **SCORED, **STORED)
    ran(report, stored)
    off = (torch.tensor(report.answers[0].prompt_logprobs[0]) - torch.tensor(plain)).abs().mean()
    print(stored, float(off))
    assert len(plain) == len(text[0]) - 1
    assert BOUNDS[stored] / 4 < off < BOUNDS[stored]
    page = get_format(stored).cache_spec(HEADS, HEAD_SIZE, block_size=PAGE).block_bytes
    assert report.page_bytes == [page] * LAYERS
    assert report.pool_bytes == LAYERS * page * (report.tokens // PAGE + 1)
