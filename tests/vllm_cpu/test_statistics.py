"""Statistics that vLLM takes of its own model at start, and the presets that ask for them."""

import json

import engine
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from quantkv.calibration import Calibration
from quantkv.integrations.sample_tokens import sample_tokens
from quantkv.integrations.transformers import calibrate

LIMIT = 256  # positions: so few that moments are averaged over all of them
ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": LIMIT}
PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((5, 90, 150))]
TWO = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}


def scores(report):
    assert report.error == ""
    return torch.cat([torch.tensor(p) for p in report.answers[0].prompt_logprobs])


def policy(folder, **given):
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, **given}))
    return {"additional_config": {"quantkv_policy": str(path)}}


@pytest.mark.parametrize("family", ["llama", "biases", "window", "softcap", "sinks", "alibi"])
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
                assert (ours - theirs).norm() < 1e-3 * theirs.norm(), (number, name)  # float16 of offsets: 2^-11
