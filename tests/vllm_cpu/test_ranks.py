"""Two ranks of a tensor-parallel group, a process each: every rank holds one of the two kv heads, and that head's maps."""

import json
import math

import engine
import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from quantkv.integrations.transformers import calibrate
from quantkv.policy import Policy

PROMPTS = [tiny_models.prompt(seed, length) for seed, length in enumerate((5, 90, 150))]
ARGUMENTS = {"tokens": 8, "scored": True, "skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 64}
TWO = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}}


def policy(folder):
    """int8 behind a rotation of each kv head's own, its keys shifted by positions: with another head's, nothing would be right."""
    size, heads, random = tiny_models.SIZES["head_dim"], tiny_models.SIZES["num_key_value_heads"], torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(tiny_models.SIZES["num_hidden_layers"]):
        for side in ("k", "v"):
            rotation = torch.linalg.qr(torch.randn(heads, size, size, generator=random))[0].contiguous()
            tensors[f"layers.{layer}.{side}.forward"] = rotation
            tensors[f"layers.{layer}.{side}.inverse"] = rotation.transpose(1, 2).contiguous()
        tensors[f"layers.{layer}.k.offset"] = torch.randn(math.ceil(256 / 64), heads, size, generator=random)
    save_file(tensors, folder / "maps.safetensors")
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, "format": "int8", "maps": "maps.safetensors"}))
    return {"additional_config": {"quantkv_policy": str(path)}}


def calibrated(folder, model):
    """levels8 by a calibration of the model's own, keys without their mean."""
    ids = torch.randint(2, 90, (4, 128), generator=torch.Generator().manual_seed(0))
    made = calibrate(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False), ids)
    Policy("levels8", calibration=made).save(folder / "calibrated.json")
    return {"additional_config": {"quantkv_policy": str(folder / "calibrated.json")}}


def scores(report):
    assert report.error == ""
    return torch.cat([torch.tensor(p) for p in report.answers[0].prompt_logprobs])


@pytest.mark.parametrize("fmt", ["int8", "levels8"])
def test_two_ranks_say_what_one_says(tmp_path, fmt):
    folder = tiny_models.write("llama", tmp_path / "model")
    asked = policy(tmp_path) if fmt == "int8" else calibrated(tmp_path, folder)
    plain = scores(engine.run(folder, "quantkv_fp32", PROMPTS, **ARGUMENTS))
    one = scores(engine.run(folder, "quantkv_policy", PROMPTS, **ARGUMENTS, **asked))
    report = engine.run(folder, "quantkv_policy", PROMPTS, **ARGUMENTS, **asked, **TWO)
    lost = (one - plain).abs().mean()
    assert 0 < lost < 0.05
    assert (scores(report) - one).abs().mean() < lost / 4  # a sum over ranks is rounded otherwise, and with it, rarely, a code
    assert report.log.count(f"quantkv: 2 layers of {fmt}: write of 1 tokens by ") == 2  # each rank says who serves it
