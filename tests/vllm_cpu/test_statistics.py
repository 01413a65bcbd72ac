"""Statistics that vLLM takes of its own model at start, and the presets that ask for them."""

import json

import engine
import pytest
import tiny_models
import torch
from test_exact import PREFIX, differences
from test_smollm2 import BOUNDS, TIGHT, TOKENS
from transformers import AutoModelForCausalLM

import prompts
from quantkv.calibration import Calibration
from quantkv.integrations.sample_tokens import sample_tokens
from quantkv.integrations.transformers import calibrate

LIMIT = 256  # positions: so few that moments are averaged over all of them
ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": LIMIT}
STORED = {"additional_config": {"quantkv_prompt": "stored"}}
PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((5, 90, 150))]
TWO = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}


def scores(report):
    assert report.error == ""
    return torch.cat([torch.tensor(p) for p in report.answers[0].prompt_logprobs])


def policy(folder, **given):
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, **given}))
    return {"additional_config": {"quantkv_policy": str(path)}}


@pytest.mark.parametrize("family", ["llama", "biases", "window", "softcap", "sinks"])
def test_the_engine_measures_what_calibrate_measures(tmp_path, family):
    folder = tiny_models.write(family, tmp_path / "model")
    file = tmp_path / "measured.safetensors"
    report = engine.run(folder, "quantkv_4bit", environment={engine.MEASURED: str(file)}, **ARGUMENTS)
    assert report.error == "" and "key means and Hessians of 2 layers (512 tokens at random" in report.log
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    expected = calibrate(model, sample_tokens(None, 128, 512)[0].view(-1, LIMIT), limit=LIMIT)
    found = Calibration.load(file)
    assert found.geometry == expected.geometry
    for number, layer in expected.layers.items():
        for name, t in layer.tensors().items():
            if name != "weights":
                ours, theirs = found.layers[number].tensors()[name].double(), t.double()
                assert (ours - theirs).norm() < 1e-3 * theirs.norm(), (number, name)  # float16 of key means: 2^-11


def test_rows_that_are_scaled_after_their_rotation_are_understood(tmp_path):
    """Llama 4 norms them, and vLLM keeps its heads in another order of their numbers: so norms and traces are compared."""
    folder = tiny_models.write("chunks", tmp_path / "model")
    file = tmp_path / "measured.safetensors"
    assert engine.run(folder, "quantkv_4bit", environment={engine.MEASURED: str(file)}, **ARGUMENTS).error == ""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    expected = calibrate(model, sample_tokens(None, 128, 512)[0].view(-1, LIMIT), limit=LIMIT)
    for number, layer in expected.layers.items():
        found = Calibration.load(file).layers[number]
        torch.testing.assert_close(found.key_mean.norm(dim=2), layer.key_mean.norm(dim=2), rtol=2e-3, atol=1e-3)
        for ours, theirs in ((found.key_hessian, layer.key_hessian), (found.value_hessian, layer.value_hessian)):
            torch.testing.assert_close(*(t.diagonal(dim1=1, dim2=2).sum(1) for t in (ours, theirs)), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "stored"), [("8bit", "int8"), ("4bit", "levels4")])
def test_large_key_biases_are_not_stored(tmp_path, name, stored):
    """Without its mean a key is 6 times shorter: 16 of 64 numbers have biases of 30, all have a deviation of 2.4."""
    folder = tiny_models.write("biases", tmp_path / "model")
    off = policy(tmp_path, format=stored, full_precision={"sink": 16, "recent": 24}, prompt="stored")
    plain = scores(engine.run(folder, "quantkv_fp32", PROMPTS, scored=True, **ARGUMENTS))
    preset = scores(engine.run(folder, f"quantkv_{name}", PROMPTS, scored=True, **STORED, **ARGUMENTS))  # prompts read pages, too
    warned = [
        engine.run(folder, kv, PROMPTS, scored=True, **ARGUMENTS, **given) for kv, given in (("quantkv_policy", off), ("quantkv_int4", {}))
    ]
    assert all("have biases of up to" in report.log and "quantkv_4bit (or quantkv_8bit" in report.log for report in warned)
    assert "have biases" not in engine.run(folder, f"quantkv_{name}", PROMPTS, scored=True, **STORED, **ARGUMENTS).log
    without = scores(warned[0])
    lost, before = ((found - plain).abs().mean() for found in (preset, without))
    assert 0 < lost < before / 2  # at 4 bits the greater loss ends where a row says nothing


def test_models_without_rotations_have_one_key_mean(tmp_path):
    folder = tiny_models.write("alibi", tmp_path / "model")
    file = tmp_path / "measured.safetensors"
    report = engine.run(
        folder,
        "quantkv_policy",
        environment={engine.MEASURED: str(file)},
        **ARGUMENTS,
        **policy(tmp_path, format="levels4", statistics="require"),
    )
    assert report.error == ""
    assert [tuple(layer.key_mean.shape) for layer in Calibration.load(file).layers.values()] == [(1, 4, 32)] * 2


def test_layers_at_16_bits_are_not_measured(tmp_path):
    folder = tiny_models.write("llama", tmp_path / "model")
    report = engine.run(folder, "quantkv_4bit", PROMPTS, kv_cache_dtype_skip_layers=["0"], **ARGUMENTS)
    assert report.error == "" and report.formats == ["fp32", "levels4"]
    assert "key means and Hessians of 1 layers" in report.log


def test_two_ranks_measure_their_own_heads(tmp_path):
    folder = tiny_models.write("biases", tmp_path / "model")
    arguments = {"tokens": 8, "scored": True, "max_num_batched_tokens": 64, **ARGUMENTS}
    plain = scores(engine.run(folder, "quantkv_fp32", PROMPTS, **arguments))
    one = scores(engine.run(folder, "quantkv_4bit", PROMPTS, **arguments))
    report = engine.run(folder, "quantkv_4bit", PROMPTS, **arguments, **TWO)
    lost = (one - plain).abs().mean()
    assert (scores(report) - one).abs().mean() < lost / 4  # a sum over ranks is rounded otherwise
    assert report.log.count("key means and Hessians of 2 layers") == 2


def test_a_model_that_cannot_be_measured(tmp_path):
    """Its states of a recurrence are left out of a pass without pages."""
    folder = tiny_models.write("hybrid", tmp_path / "model")
    asked = policy(tmp_path, format="levels4", statistics="require")
    report = engine.run(folder, "quantkv_policy", **ARGUMENTS, **asked)
    assert "policy.statistics='require': the model cannot be measured: the model keeps states" in report.error + report.log
    (tmp_path / "auto").mkdir()
    asked = policy(tmp_path / "auto", format="levels8", statistics="auto")
    report = engine.run(folder, "quantkv_policy", **ARGUMENTS, **asked)
    assert report.error == "" and "levels8" in report.formats
    assert report.log.count("keys and values are stored without key means and Hessians: the model keeps states") == 1


def test_steps_that_are_too_short_are_refused_where_statistics_are_required(tmp_path):
    folder = tiny_models.write("llama", tmp_path / "model")
    asked = {**ARGUMENTS, "max_num_batched_tokens": 16, "max_num_seqs": 4, "enable_chunked_prefill": True}
    report = engine.run(folder, "quantkv_policy", **asked, **policy(tmp_path, format="levels4", statistics="require"))
    assert "the model cannot be measured: steps of 16 tokens are too short" in report.error + report.log


def test_pages_do_not_leave_an_engine_that_measures_for_itself(tmp_path):
    folder = tiny_models.write("llama", tmp_path / "model")
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    report = engine.run(folder, "quantkv_8bit", kv_transfer_config=connector, **ARGUMENTS)
    assert "policy.statistics='auto' with kv_connector='ExampleConnector'" in report.error + report.log


@pytest.mark.parametrize("arguments", [TIGHT, PREFIX], ids=["preempted", "prefix"])
def test_rows_written_again_mean_the_same(smollm2, arguments):
    """Blocks that are taken away and computed again, and blocks of a prefix, by a preset."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, trust_remote_code=False)
    asked = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts.PROMPTS]
    whole = engine.run(smollm2, "quantkv_4bit", asked, tokens=TOKENS)
    found = engine.run(smollm2, "quantkv_4bit", asked, tokens=TOKENS, rounds=1 + (arguments is PREFIX), **arguments)
    assert (found.preemptions > 0) == (arguments is TIGHT)
    assert (sum(found.answers[-1].cached) > 300) == (arguments is PREFIX)
    assert "key means and Hessians of 30 layers (512 tokens of text)" in whole.log
    off = differences(found, whole)
    assert len(off) > TOKENS * len(asked) / 2 and off.mean() < BOUNDS["int4"] / 2
