"""`quantkv warm-up`: what a start compiles, compiled on a machine without a GPU."""

import pytest
import torch

from quantkv import assumed, warmup
from quantkv.cli import configs
from quantkv.engine import ahead
from quantkv.engine.warm_up import StepLimits, warm_up
from quantkv.implementations.hopper.prefill import PrefillConfig
from quantkv.implementations.triton import launch
from quantkv.policy import Policy
from quantkv.policy_file import PRESETS, VERSION
from quantkv.vllm_pages import table_width

LIMITS = StepLimits(4, 300, 600, 1, 48)
FOUR = Policy.from_dict({"policy_version": VERSION, **PRESETS["4bit"]})


@pytest.fixture
def collected(monkeypatch):
    """What would be compiled: NVRTC's configurations, Triton's launches."""
    found = []

    def compile_ahead(launches, pool, device):
        found.extend(launches)
        return len(launches)

    monkeypatch.setattr(
        warmup._Ahead, "compile", lambda self, configs: (configs := set(configs), found.extend(configs), self.begun.update(configs))
    )
    monkeypatch.setattr(launch, "compile_ahead", compile_ahead)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is compiled is worked out without a GPU")
@pytest.mark.parametrize(
    "name, gpu", [("int4", "H100"), ("4bit", "H100"), ("int4", "A100"), ("4bit", "A100"), ("int4 with 8-bit prompts", "H100")]
)
def test_ahead_is_what_a_start_compiles(name, gpu, collected, monkeypatch):
    """The same kernels, for the same numbers, as a start on that GPU."""
    from compiled import Gpu

    policy = FOUR if name == "4bit" else Policy("int4", prompt_precision="8bit" if "prompts" in name else "16bit")
    model = configs.describe("layers=3,heads=4,kv_heads=2,head_size=64").model
    (made,) = ahead.compile_ahead(model, policy, assumed.GPUS[gpu.lower()], LIMITS, block_size=16)
    assert made.layers == (0, 1, 2) and made.format == policy.format and (made.kernels["nvrtc"] > 5) == (gpu == "H100")
    mine, collected[:] = collected.copy(), []
    there = Gpu(monkeypatch, gpu)
    for each in mine:
        there._launched(each) if isinstance(each, launch.Launch) else there.found.add(each)
    mine = {what for what in there.found if not isinstance(what, PrefillConfig)}
    assert ("round_queries_kernel" in {what[0] for what in mine if isinstance(what, tuple)}) == ("prompts" in name)
    assert len(mine) > 15 and len(there.found) - len(mine) == (gpu == "H100")  # one for prompts
    there.found.clear()
    paged, attention = ahead._layer(model, policy, 0, model.layers[0], 1, torch.bfloat16)
    warm_up(paged, attention, LIMITS, paged.allocate(1, 16, torch.device("cpu")))
    start = there.found | there.ahead | {each for each in collected if not isinstance(each, launch.Launch)}
    assert {what for what in start if not isinstance(what, tuple) or what[0] != "prompt"} == mine


def test_a_gpu_without_kernels_for_8_bit_prompts_is_refused():
    model = configs.describe("layers=3,heads=4,kv_heads=2,head_size=64").model
    with pytest.raises(ValueError, match=r"^prompt_precision=8bit: no dense backend"):
        next(ahead.compile_ahead(model, Policy("int4", prompt_precision="8bit"), assumed.GPUS["a100"], LIMITS))


def test_kinds_of_layers(monkeypatch):
    """Gemma 3: layers with a window and without, which keep sinks or none; layers of one kind are compiled once."""
    asked = []

    def compile_ahead(pages, heads, full_precision, **given):
        asked.append((heads, pages.spec.num_kv_heads, given["window"], full_precision and full_precision.sink, pages.maps.by_position))
        assert assumed.assumed() is assumed.GPUS["h200"]
        return {"nvrtc": 1, "triton": 2}

    monkeypatch.setattr(warmup, "compile_ahead", compile_ahead)
    model = configs.describe("gemma-3-4b").model
    found = list(ahead.compile_ahead(model, FOUR, assumed.GPUS["h200"], LIMITS, ranks=2))
    assert sorted(asked) == [(4, 2, 0, 16, True), (4, 2, 1024, 0, True)]
    assert sorted(n for made in found for n in made.layers) == [*range(34)] and assumed.assumed() is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("llama-3-8b", "--gpu", "h42"), "--gpu h42: one of h100, h200"),
        (("llama-3-8b", "--seqs", "0"), "--seqs 0: at least 1"),
        (("llama-3-8b", "--tp", "3"), "3"),
        (("llama-3-8b", "--kv", "int5"), "int5"),
        (("no-such-model",), "MODEL"),
    ],
)
def test_what_is_refused(run, asked, said, monkeypatch):
    monkeypatch.setattr(warmup, "compile_ahead", None)  # nothing is compiled
    code, out, err = run("warm-up", *asked)
    assert code == 2 and said in err and not out


def test_what_it_prints(run, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path))
    monkeypatch.setattr(warmup, "compile_ahead", lambda *given, **named: asked.append(named) or {"nvrtc": 3, "triton": 2})
    code, out, err = run("warm-up", "llama-3-8b", "--kv", "int4", "--context", "2500")
    assert asked[0]["table_width"] == 160 and asked[0]["chunks"]  # as vLLM's: room for 2,560 tokens
    assert code == 0, err
    assert out.startswith("32 layers of int4: 3 by nvrtc, 2 by triton; ") and f"5 kernels for h100; those of NVRTC are in {tmp_path}" in out


def test_tables_are_as_wide_as_vllms():
    assert [table_width(n, size) for n, size in ((33280, 16), (2500, 16), (2561, 16), (100, 64), (129, 128), (5, 48))] == [
        2080,
        160,
        168,
        2,
        2,
        8,
    ]
