"""`quantkv plan` against vLLM's log of the tokens that fit, of engines of tiny models: for eleven configurations, mixed ones included."""

import json
import re

import engine
import pytest
import tiny_models

from quantkv import geometry, policy_file
from quantkv.capacity import capacity
from quantkv.vllm_pages import pool
from test_options import policy

MEMORY, LENGTH, STEP = 2**30, 256, 128  # an engine within the process has one step in flight
EXACT = {"full_precision": {"sink": 16, "recent": 24}}
CASES = {  # the model, and a policy
    "llama, int4": ("llama", {"format": "int4"}),
    "llama, tuned": ("llama", {"format": "levels3", "layers": {"1": "trellis2"}}),
    "llama, one int8 layer": ("llama", {"format": "int4", "layers": {"0": "int8"}}),
    "a window": ("window", {"format": "levels4"}),
    "windows beside full attention": ("six_layers", {"format": "int4"}),
    "the same, one int8 and one 16-bit layer": ("six_layers", {"format": "int4", "layers": {"1": "int8", "4": "none"}}),
    "the same, full-precision tokens": ("six_layers", {"format": "int4", "layers": {"1": "int8", "4": "none"}, **EXACT}),
    "sinks, sliding layers of another format": ("sinks", {"format": "int8", "layers": {"0": "int4"}}),
    "latents": ("latents", {"format": "int4"}),
    "latents, in a format of their own": ("latents", {"format": "levels4", "latents": "int4+int8"}),
    "latents, one layer of 8 bits": ("latents", {"format": "int4", "layers": {"1": "int8"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_vllms_within_one_percent(tmp_path, case):
    family, given = CASES[case]
    folder = tiny_models.write(family, tmp_path / "model")
    asked = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": STEP,
        **policy(tmp_path, **given),
    }
    report = engine.run(folder, "quantkv_policy", **asked)
    assert report.error == ""
    logged = int(re.search(r"KV cache size: (\S+) tokens", report.log)[1].replace(",", ""))
    model = geometry.read(json.loads((tmp_path / "model" / "config.json").read_text()))
    made = capacity(model, policy_file.read(asked["additional_config"]["quantkv_policy"]))
    blocks = pool(model, made)
    planned = made.longest(MEMORY) if blocks is None else blocks.tokens(MEMORY, LENGTH, STEP)
    print(f"| {case} | {logged:,} | {planned:,} | {planned / logged - 1:+.2%} |")
    assert abs(planned / logged - 1) <= 0.01
