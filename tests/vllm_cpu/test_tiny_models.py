"""Softcap, sinks, ALiBi, sliding windows: tiny random models, compared with transformers by log-probability."""

import json

import engine
import pytest
import references
import tiny_models
import torch

from quantkv import PagedCache, assumed, get_format
from quantkv.integrations.vllm import early
from quantkv.integrations.vllm.implementation import QuantKVImpl
from quantkv.warmup import who_serves
from test_options import STORED, policy

PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((5, 33, 90, 150))]
TOKENS = 12
ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256}
CHUNKED = {"max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, str] = {}

    def folder(family):
        if family not in made:
            made[family] = tiny_models.write(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.mark.parametrize("chunked", [False, True], ids=["at_once", "chunked"])
@pytest.mark.parametrize("family", ["llama", "window", "softcap", "sinks", "alibi", "chunks", "two_sizes"])
def test_a_family_has_the_probabilities_of_transformers(folder_of, family, chunked):
    folder = folder_of(family)
    report = engine.run(folder, "quantkv_fp32", PROMPTS, tokens=TOKENS, scored=True, **ARGUMENTS, **(CHUNKED if chunked else {}))
    assert report.error == ""
    assert set(report.formats) == {"fp32"}
    assert report.calls["decode"] > 0
    found = report.answers[0]
    for prompt, tokens, scores, prompt_scores in zip(PROMPTS, found.tokens, found.logprobs, found.prompt_logprobs):
        wanted = references.scored(folder, prompt + tokens)
        torch.testing.assert_close(torch.tensor(prompt_scores + scores), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["window", "softcap", "alibi"])
def test_a_family_at_eight_bits_is_near(folder_of, family):
    plain, found = (
        engine.run(folder_of(family), f"quantkv_{name}", PROMPTS, tokens=TOKENS, scored=True, **ARGUMENTS, **STORED)
        .answers[0]
        .prompt_logprobs
        for name in ("fp32", "int8")
    )
    off = torch.cat([torch.tensor(a) - torch.tensor(b) for a, b in zip(plain, found)]).abs().mean()
    assert 0 < off < 0.05


def test_scales_of_a_checkpoint(folder_of):
    """Per-tensor fp8 divides by them: powers of two leave its roundings as they are. What has scales of its own, or none, does not."""
    reports = {}
    for family, stored in (("llama", "fp32"), ("llama", "fp8"), ("scales", "fp8"), ("scales", "int8")):
        report = engine.run(folder_of(family), f"quantkv_{stored}", PROMPTS, tokens=TOKENS, scored=True, **ARGUMENTS, **STORED)
        assert report.error == ""
        scores = torch.cat([torch.tensor(p) for p in report.answers[0].prompt_logprobs])
        reports[family, stored] = scores, set(report.scales)
    assert reports["scales", "fp8"][1] == {tuple(tiny_models.SCALES.values())}
    assert reports["llama", "fp8"][1] == reports["scales", "int8"][1] == {(1.0, 1.0)}
    plain, unscaled, scaled = (reports[key][0] for key in (("llama", "fp32"), ("llama", "fp8"), ("scales", "fp8")))
    lost = (unscaled - plain).abs().mean()
    assert 0 < (scaled - unscaled).abs().mean() < lost / 4


def test_the_log_says_who_serves(folder_of):
    """What attention and writes of the same shapes choose in a process that has vLLM loaded, as this one has."""
    report = engine.run(folder_of("llama"), "quantkv_int8", PROMPTS, tokens=TOKENS, scored=True, **ARGUMENTS)
    cache = PagedCache(get_format("int8").cache_spec(2, 64, block_size=16), 1)
    wanted = {what: name for what, (name, _) in who_serves(cache, 4, dtype=torch.float32, batch_sizes=(1, 8), write_sizes=(1, 8)).items()}
    assert len(wanted) == 4 and wanted.items() <= report.served["int8"].items()
    assert f"2 layers of int8: write of 1 tokens by {wanted['write of 1 tokens']}; " in report.log


def test_full_precision_tokens_within_chunks(folder_of, tmp_path):
    """Pages of 2 bits, all of whose tokens are exact: what 32 bits give, in layers with chunks and without."""
    asked = {
        "tokens": TOKENS,
        "scored": True,
        **policy(tmp_path, format="int2", full_precision={"sink": 16, "recent": 200}),
        **ARGUMENTS,
        **CHUNKED,
    }
    report = engine.run(folder_of("chunks"), "quantkv_policy", PROMPTS, **asked)
    assert report.error == "" and set(report.formats) == {"int2"}
    found = report.answers[0]
    for prompt, tokens, scores, prompt_scores in zip(PROMPTS, found.tokens, found.logprobs, found.prompt_logprobs):
        wanted = references.scored(folder_of("chunks"), prompt + tokens)
        torch.testing.assert_close(torch.tensor(prompt_scores + scores), wanted, rtol=0, atol=2e-4)


EARLY = [("llama", "int4"), ("alibi", "int4"), ("llama", "4bit"), ("softcap", "4bit"), ("sinks", "4bit")]


@pytest.mark.parametrize("family, kv_type", EARLY)
def test_what_is_compiled_early_is_for_the_layer_as_it_is(folder_of, family, kv_type, tmp_path, monkeypatch):
    """What is told of a layer when vLLM makes it, and the layer that serves: its kernels are chosen by these numbers."""
    seen, served = tmp_path / "seen", QuantKVImpl.who_serves
    monkeypatch.setattr(early, "begin", lambda impl: setattr(impl, "told", early.wanted_by(impl, assumed.GPUS["h100"])))

    def who_serves(impl, device, block_size, verified, width):
        told = impl.told
        layer, attention = told.layer()
        of_maps = [
            tuple(traits and traits[:5] for traits in kind[4]) for kind in (layer.kind(attention), impl.kind)
        ]  # not of their lengths
        pairs = {
            "kind": [(kind[:4], kind[5:]) for kind in (layer.kind(attention), impl.kind)],
            "maps": of_maps,
            "full precision": (layer.config.full_precision, impl.full_precision),
            "page": (told.block_size, block_size),
            "limits": (told.limits, impl._limits(verified, width)),
            "dtype": (layer.dtype, impl.paged.dtype),
        }
        wrong = {what: f"{a} {b}" for what, (a, b) in pairs.items() if a != b}
        with seen.open("a") as file:
            file.write(json.dumps(wrong) + "\n")
        return served(impl, device, block_size, verified, width)

    monkeypatch.setattr(QuantKVImpl, "who_serves", who_serves)
    report = engine.run(folder_of(family), f"quantkv_{kv_type}", [PROMPTS[0]], environment={"QUANTKV_TEST": str(tmp_path)}, **ARGUMENTS)
    assert not report.error, report.log[-3000:]
    assert {*seen.read_text().splitlines()} == {"{}"}


def test_layers_of_which_too_little_is_known_are_compiled_at_the_warm_up(folder_of, tmp_path, monkeypatch):
    """Those that keep to chunks: which do is said later."""
    seen = tmp_path / "seen"
    monkeypatch.setattr(early, "begin", lambda impl: seen.open("a").write(f"{early.wanted_by(impl, assumed.GPUS['h100'])}\n"))
    engine.run(folder_of("chunks"), "quantkv_int4", [PROMPTS[0]], environment={"QUANTKV_TEST": str(tmp_path)}, **ARGUMENTS)
    assert {*seen.read_text().splitlines()} == {"None"}
