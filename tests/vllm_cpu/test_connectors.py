"""vLLM's KV connectors over quantkv's pages: what leaves the engine and comes back says what pages that stayed say, to the last bit.

One prompt runs at a time but where a test says so, so that a prompt that begins with pages that came back is computed in the same steps as
one that finds them in the prefix cache: the numbers are the same, and no tolerance is needed.
"""

import re

import engine
import pytest
import tiny_models

import prompts
from test_options import policy

IMPLEMENTATION = "quantkv.integrations.vllm.implementation.QuantKVImpl"
LAYERS, BLOCK = 30, 16
ASKED = [prompts.FACTS, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, " * 2, "def fibonacci(n):\n    " * 9]
ALONE = {"tokens": 8, "max_num_seqs": 1}
TIGHT = {"num_gpu_blocks_override": 16, "max_model_len": 240}  # one prompt's pages take the place of another's


def stayed(smollm2, stored):
    """Asked twice; the second time the prompts' pages are found where they were written."""
    return engine.run(smollm2, f"quantkv_{stored}", ASKED, rounds=2, enable_prefix_caching=True, **ALONE)


def ran(report, stored):
    assert report.error == "" and report.classes == {IMPLEMENTATION}
    assert report.formats == [stored] * LAYERS and report.calls["write"] > 0


def offloading(**extra):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28, **extra},
    }


@pytest.mark.parametrize("stored", ["fp32", "int4"])
def test_pages_that_were_offloaded_say_the_same(smollm2, stored):
    plain = stayed(smollm2, stored)
    connector = offloading(spec_name="HostOffloadingSpec", spec_module_path="host_offloading")
    arguments = {**ALONE, **TIGHT, "enable_prefix_caching": True, "kv_transfer_config": connector}
    report = engine.run(smollm2, f"quantkv_{stored}", ASKED, rounds=2, **arguments)
    for one in (plain, report):
        ran(one, stored)
    assert report.layout == "LBHNC"  # the connector asks for it
    moved = {what: sum(map(int, re.findall(rf"host_offloading: {what} (\d+) blocks", report.log))) for what in ("stored", "loaded")}
    blocks = sum(plain.answers[1].cached) // BLOCK
    assert blocks >= 20 and moved["stored"] == blocks
    assert blocks / 2 < moved["loaded"] <= blocks  # some found room where they were
    assert report.answers == plain.answers


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_pages_come_back_under_load(tmp_path, layout):
    """Twelve prompts at once, on three beginnings, with room for four of them: blocks leave and come back while others run.

    The first round asks one prompt after another, so that pages have the same bytes; the other rounds ask all together. Fewer run at once
    with less room, and sums end in other bits then. The first token reads pages that came back alone: its log-probability is within 1e-4.
    The tokens after it read new rows too, of which a sum's last bit may move a code: 0.01. Blocks that end within an answer would preempt.
    """
    folder = tiny_models.write("llama", tmp_path / "model")
    given = [tiny_models.prompt(n // 4, 96) + tiny_models.prompt(10 + n, BLOCK * (2 + n % 6) + 1 + n % 8) for n in range(12)]
    asked = {"rounds": 3, "singly": 1, "tokens": 8, "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": len(given)}
    asked |= {"enable_prefix_caching": True, "environment": {"VLLM_KV_CACHE_LAYOUT": layout}}
    connector = offloading(spec_name="HostOffloadingSpec", spec_module_path="host_offloading")
    stay = engine.run(folder, "quantkv_int4", given, **asked, num_gpu_blocks_override=400)
    report = engine.run(folder, "quantkv_int4", given, **asked, num_gpu_blocks_override=36, kv_transfer_config=connector)
    for one in (stay, report):
        assert (one.error, one.layout, one.preemptions) == ("", layout, 0) and one.classes == {IMPLEMENTATION}
    loaded = [int(blocks) for blocks in re.findall(r"host_offloading: loaded (\d+) blocks", report.log)]
    blocks = sum((len(prompt) - 1) // BLOCK for prompt in given) - 9 * 96 // BLOCK  # nine prompts find their beginning there
    assert len(loaded) >= 2 * len(given) and sum(loaded) > 1.5 * blocks
    assert report.answers[0] == stay.answers[0]
    for here, there in zip(stay.answers[1:], report.answers[1:]):
        assert there.cached == here.cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in given]
        assert there.tokens == here.tokens
        assert [row[0] for row in there.logprobs] == pytest.approx([row[0] for row in here.logprobs], abs=1e-4)
        assert there.logprobs == [pytest.approx(row, abs=0.01) for row in here.logprobs]


def test_packed_blocks_that_were_offloaded_say_the_same(tmp_path):
    """Of layers in several formats, windows beside full attention: blocks go and come back whole, in the layout that vLLM's own worker
    gets."""
    folder = tiny_models.write("six_layers", tmp_path / "model")
    given = [tiny_models.prompt(seed, length) for seed, length in enumerate((345, 400) * 4)]
    asked = {"rounds": 2, "enable_prefix_caching": True, "skip_tokenizer_init": True, "max_num_batched_tokens": 128, **ALONE}
    asked |= policy(tmp_path, format="int4", layers={"1": "int8", "4": "none"})
    stay = engine.run(folder, "quantkv_policy", given, **asked)
    connector = offloading(spec_name="HostOffloadingSpec", spec_module_path="host_offloading")
    tight = {"kv_transfer_config": connector, "num_gpu_blocks_override": 18, "environment": {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}}
    report = engine.run(folder, "quantkv_policy", given, **asked, **tight)
    assert (stay.error, report.error) == ("", "") and {stay.layout, report.layout} == {"BLHNC"}
    assert len(re.findall(r"host_offloading: loaded \d+ blocks", report.log)) >= 2
    assert report.answers == stay.answers and min(report.answers[1].cached) > 0


@pytest.mark.parametrize("layout", ["LBHNC", "BHLNC"])
def test_pages_of_one_process_are_read_in_another(smollm2, tmp_path, layout):
    """vLLM's example connector writes a prompt's blocks to files; another engine takes them from there."""
    plain = stayed(smollm2, "int4")
    extra = {"shared_storage_path": str(tmp_path)}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    arguments = {**ALONE, "kv_transfer_config": connector, "environment": {"VLLM_KV_CACHE_LAYOUT": layout}}
    for seed, answers, hits in ((0, plain.answers[0], 0), (1, plain.answers[1], len(ASKED))):
        report = engine.run(smollm2, "quantkv_int4", ASKED, seed=seed, **arguments)
        ran(report, "int4")
        assert report.layout == layout and report.log.count("External Cache Hit!") == hits
        assert report.answers == [answers]
        assert len(list(tmp_path.glob("*/*.safetensors"))) == LAYERS * len(ASKED)


def test_vllms_own_worker_needs_a_gpu(smollm2):
    """Why the copies above are the test's own: vLLM refuses to offload on a CPU. The layout is chosen before."""
    report = engine.run(smollm2, "quantkv_int4", kv_transfer_config=offloading())
    assert "CPU Offloading is currently only supported on CUDA-alike and XPU GPUs" in report.error + report.log
    assert "Using BLHNC KV cache layout" in report.log
