"""What can be asked of the engine beside a format: layers at 16 bits, policies, layouts, speculative decoding; and what is refused."""

import json

import engine
import pytest
import tiny_models
import torch

import prompts
from quantkv import weights
from quantkv.calibration import Calibration, LayerMoments

LAYERS = 30
SCORED = [prompts.SCORED]
ASK = {"tokens": 2, "scored": True}
STORED = {"additional_config": {"quantkv_prompt": "stored"}}  # prompts read pages, so that their tokens show what pages lose


def scores(report):
    assert report.error == ""
    return torch.tensor(report.answers[0].prompt_logprobs[0])


def policy(folder, **content):
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, **content}))
    return {"additional_config": {"quantkv_policy": str(path)}}


def test_layers_left_as_they_are(smollm2):
    plain = scores(engine.run(smollm2, "quantkv_fp32", SCORED, **ASK))
    whole = scores(engine.run(smollm2, "quantkv_int4", SCORED, **ASK, **STORED))
    left = [str(number) for number in range(0, LAYERS, 2)]
    report = engine.run(smollm2, "quantkv_int4", SCORED, **ASK, **STORED, kv_cache_dtype_skip_layers=left)
    assert report.formats == ["fp32", "int4"] * (LAYERS // 2)
    assert len(set(report.page_bytes)) == 1  # of one size, whatever is in them
    assert 0 < (scores(report) - plain).abs().mean() < 0.9 * (whole - plain).abs().mean()


def test_a_policy_gives_each_layer_its_format(smollm2, tmp_path):
    plain = scores(engine.run(smollm2, "quantkv_fp32", SCORED, **ASK))
    whole = scores(engine.run(smollm2, "quantkv_int4", SCORED, **ASK, **STORED))
    asked = policy(tmp_path, format="int4", layers={"0-3": "int8", "29": "none"}, prompt="stored")
    report = engine.run(smollm2, "quantkv_policy", SCORED, **ASK, **asked)
    assert report.formats == [*["int8"] * 4, *["int4"] * 25, "fp32"]
    assert report.calls["decode"] > 0
    assert 0 < (scores(report) - plain).abs().mean() < (whole - plain).abs().mean()


def test_prompts_lose_nothing_to_their_own_rows(smollm2):
    """In one step nothing at all, in several what pages of the steps before lose; rows that are stored lose more."""
    plain = scores(engine.run(smollm2, "quantkv_fp32", SCORED, **ASK))
    stored, whole, cut = (
        (scores(engine.run(smollm2, "quantkv_int4", SCORED, **ASK, **arguments)) - plain).abs()
        for arguments in (STORED, {}, {"max_num_batched_tokens": 64})
    )
    assert whole.max() < 2e-4  # additions in another order
    assert cut[:63].max() < 2e-4 < cut[64:].mean() < stored.mean()


def test_prompts_with_8_bit_scores(smollm2):
    """They lose little, and something; a prompt of fewer than 128 tokens loses nothing. Who serves is said in the log."""
    asked = {"additional_config": {"quantkv_prompt_precision": "8bit"}}
    for text, least, most in ((prompts.SCORED, 1e-4, 0.1), (prompts.SCORED[:200], 0, 0)):
        plain, report = (engine.run(smollm2, "quantkv_int8", [text], **ASK, **given) for given in ({}, asked))
        off = (scores(report) - scores(plain)).abs()
        assert (len(off) >= 128) == (most > 0) and least <= off.mean() <= most, (len(off), off.mean())
    assert "128 queries among others with 8bit scores by reference" in report.log and "8bit scores" not in plain.log


@pytest.mark.parametrize("layout", ["BLHNC", "BHLNC", "LHBNC"])
def test_a_layout_changes_no_bit(smollm2, layout):
    wanted = engine.run(smollm2, "quantkv_int8", SCORED, **ASK)
    found = engine.run(smollm2, "quantkv_int8", SCORED, **ASK, environment={"VLLM_KV_CACHE_LAYOUT": layout})
    assert (wanted.layout, found.layout) == ("LBHNC", layout)
    assert wanted.strides != found.strides
    assert found.answers == wanted.answers
    assert found.tokens == wanted.tokens


def test_a_layout_in_which_a_page_is_scattered_is_refused(smollm2):
    report = engine.run(smollm2, "quantkv_int8", environment={"VLLM_KV_CACHE_LAYOUT": "LBNHC"})
    assert "VLLM_KV_CACHE_LAYOUT=LBNHC" in report.error


def test_drafted_tokens_are_verified(smollm2):
    """Drafts come from the text itself; what they change is only how many tokens a step has."""
    asked = [
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3,",
        "a b c d a b c d a b c d a b",
        "The capital of France is",
    ]
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    plain = engine.run(smollm2, "quantkv_fp32", asked, tokens=32)
    found = engine.run(smollm2, "quantkv_fp32", asked, tokens=32, speculative_config=ngram)
    assert found.error == ""
    assert found.answers[0].tokens == plain.answers[0].tokens
    assert found.drafted >= found.accepted > 10
    assert found.calls["mixed"] == plain.calls["mixed"] == LAYERS  # the prompts' step: verification is served as decode is


def test_a_model_that_drafts_reads_pages_too(tmp_path):
    """The engine only starts here: vLLM's wheel has no operators for a CPU that draft."""
    folder = tiny_models.write("llama", tmp_path)
    drafts = {"model": folder, "method": "draft_model", "num_speculative_tokens": 3}
    report = engine.run(folder, "quantkv_fp32", skip_tokenizer_init=True, max_model_len=256, speculative_config=drafts)
    assert report.error == ""
    assert report.formats == ["fp32"] * 4  # two layers of each model


REFUSED = {
    "a head size that the format cannot take": ("heads_of_80", "quantkv_int2", {}, "head_size=80"),
    "a type that is no format": ("llama", "quantkv_int5", {}, "quantkv_int5"),
    "latents where there are none": ("llama", "quantkv_int4+int8", {}, "a layer that keeps keys and values takes 'int4'"),
    "pages that are no multiple of 16 tokens": ("llama", "quantkv_int4", {"block_size": 24}, "block_size"),
    "a policy without a file": ("llama", "quantkv_policy", {}, "quantkv_policy"),
    "prompts that skip layers which share pages": ("llama", "quantkv_int4", {"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_weights_are_loaded(tmp_path, case):
    family, kv_cache_dtype, arguments, said = REFUSED[case]
    report = engine.run(tiny_models.write(family, tmp_path), kv_cache_dtype, skip_tokenizer_init=True, max_model_len=256, **arguments)
    assert said in report.error
    assert "Loading weights took" not in report.log


WRONG_POLICIES = {
    "a layer that the model lacks": ({"format": "int4", "layers": {"2": "int8"}}, "layers 0 to 1"),
    "an unknown format": ({"format": "int3"}, "int3"),
    "a format of latents": ({"format": "int4", "layers": {"1": "int4+int8"}}, "a layer that keeps keys and values takes 'int4'"),
    "an unknown field": ({"format": "int4", "layer": {}}, "'layer'"),
}


WRONG_CALIBRATIONS = {  # layers, kv heads, head size
    "of another model": ((3, 2, 64), "made for 3 layers: the model has 2"),
    "of other heads": ((2, 4, 64), "made for kv heads: 4 of 64: the model has 2 of 64"),
}


@pytest.mark.parametrize("case", WRONG_CALIBRATIONS)
def test_a_wrong_calibration_is_refused_before_the_weights_are_loaded(tmp_path, case):
    (layers, heads, size), said = WRONG_CALIBRATIONS[case]
    eye = torch.eye(size).repeat(heads, 1, 1)
    Calibration(layers, {i: LayerMoments(None, eye, eye) for i in range(layers)}).save(tmp_path / "other.safetensors")
    asked = policy(tmp_path, format="levels4", calibration="other.safetensors")
    folder = tiny_models.write("llama", tmp_path / "model")
    report = engine.run(folder, "quantkv_policy", skip_tokenizer_init=True, max_model_len=256, **asked)
    assert said in report.error
    assert "Loading weights took" not in report.log


def test_a_calibration_of_other_weights_is_refused_before_these_are_loaded(tmp_path):
    folder, eye = tiny_models.write("llama", tmp_path / "model"), torch.eye(64).repeat(2, 1, 1)
    samples = weights.of_checkpoint(folder)
    assert list(samples) == [0, 1]
    for sign, said in ((1, ""), (-1, "calibration=made of other weights: those of layer 1 are 2.00 apart")):
        layers = {0: LayerMoments(None, eye, eye, samples[0]), 1: LayerMoments(None, eye, eye, sign * samples[1])}
        own = tmp_path / f"sign {sign}"  # an engine that was asked the same before is not asked again
        own.mkdir()
        Calibration(2, layers).save(own / "made.safetensors")
        asked = policy(own, format="levels4", calibration="made.safetensors")
        report = engine.run(folder, "quantkv_policy", skip_tokenizer_init=True, max_model_len=256, **asked)
        assert (said in report.error) if said else report.error == ""
    assert "Loading weights took" not in report.log


@pytest.mark.parametrize("case", WRONG_POLICIES)
def test_a_wrong_policy_is_refused_before_the_weights_are_loaded(tmp_path, case):
    content, said = WRONG_POLICIES[case]
    folder = tiny_models.write("llama", tmp_path / "model")
    report = engine.run(folder, "quantkv_policy", skip_tokenizer_init=True, max_model_len=256, **policy(tmp_path, **content))
    assert said in report.error
    assert "Loading weights took" not in report.log


@pytest.mark.parametrize("family", ["llama", "latents", "two_sizes"])
def test_a_type_of_ours_names_its_backend(tmp_path, family):
    """Without --attention-backend the answers are those with it, and layers that are left at 16 bits are served too."""
    folder = tiny_models.write(family, tmp_path / "model")
    arguments = {"skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_dtype_skip_layers": ["1"] if family == "llama" else []}
    named, unnamed = (
        engine.run(folder, "quantkv_int4", [tiny_models.prompt(0, 40)], tokens=8, attention_backend=backend, **arguments)
        for backend in ("CUSTOM", None)
    )
    assert named.error == unnamed.error == ""
    assert unnamed.answers == named.answers and unnamed.formats == named.formats and unnamed.page_bytes == named.page_bytes
    assert all(name.startswith("quantkv.") for name in unnamed.classes)


def test_a_backend_that_cannot_read_the_pages_is_refused(tmp_path):
    """vLLM says so itself."""
    report = engine.run(
        tiny_models.write("llama", tmp_path), "quantkv_int4", skip_tokenizer_init=True, max_model_len=256, attention_backend="CPU_ATTN"
    )
    assert "--kv-cache-dtype quantkv_int4 is not supported" in report.error
