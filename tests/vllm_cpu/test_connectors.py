"""vLLM's KV connectors over quantkv's pages: what leaves the engine and comes back says the same text."""

import re

import engine
import prompts
import pytest

IMPLEMENTATION = "quantkv.integrations.vllm.implementation.QuantKVImpl"
LAYERS, TOKENS = 30, 24
# 8 prompts of 600 tokens: what is computed for one has to make room for another, and comes back from outside.
TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 320, "enable_prefix_caching": True}


def offloading(**extra):
    extra = {"cpu_bytes_to_use": 1 << 28, "offload_prompt_only": False, **extra}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def moved(report, what):
    """Blocks that the worker copied."""
    return sum(int(n) for n in re.findall(rf"host_offloading: {what} (\d+) blocks", report.log))


@pytest.mark.parametrize("stored", ["fp32", "int4"])
def test_pages_that_were_offloaded_say_the_same(smollm2, stored):
    plain = engine.run(smollm2, f"quantkv_{stored}", prompts.PROMPTS, tokens=TOKENS)
    connector = offloading(spec_name="HostOffloadingSpec", spec_module_path="host_offloading")
    report = engine.run(smollm2, f"quantkv_{stored}", prompts.PROMPTS, tokens=TOKENS, rounds=2, kv_transfer_config=connector, **TIGHT)
    assert plain.error == report.error == ""
    assert report.classes == {IMPLEMENTATION} and set(report.formats) == {stored} and len(report.formats) == LAYERS
    assert report.layout == "LBHNC"  # the connector asks for it
    assert moved(report, "stored") > 30 and moved(report, "loaded") > 20
    assert [answers.tokens for answers in report.answers] == [plain.answers[0].tokens] * 2


@pytest.mark.parametrize("layout", ["LBHNC", "BHLNC"])
def test_pages_of_one_process_are_read_in_another(smollm2, tmp_path, layout):
    """vLLM's example connector writes a prompt's blocks to files; another engine takes them from there."""
    extra = {"shared_storage_path": str(tmp_path)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    arguments = {"tokens": TOKENS, "kv_transfer_config": connector, "environment": {"VLLM_KV_CACHE_LAYOUT": layout}}
    plain = engine.run(smollm2, "quantkv_int4", prompts.PROMPTS, tokens=TOKENS)
    first = engine.run(smollm2, "quantkv_int4", prompts.PROMPTS, **arguments)
    assert len(list(tmp_path.glob("*/*.safetensors"))) % LAYERS == 0
    again = engine.run(smollm2, "quantkv_int4", prompts.PROMPTS, rounds=1, seed=1, **arguments)
    for report, hits in ((first, False), (again, True)):
        assert report.error == "" and report.classes == {IMPLEMENTATION} and report.layout == layout
        assert ("External Cache Hit!" in report.log) == hits
        assert report.answers[0].tokens == plain.answers[0].tokens
    assert sum(again.answers[0].cached) > sum(first.answers[0].cached) == 0


def test_vllms_own_worker_needs_a_gpu(smollm2):
    """Why the copies above are a test's own: vLLM refuses to offload on a CPU."""
    report = engine.run(smollm2, "quantkv_int4", kv_transfer_config=offloading())
    assert "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs" in report.error + report.log
