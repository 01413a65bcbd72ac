"""Presets: statistics that SGLang's server takes of its own model at start, and full-precision tokens."""

import json

import engine
import pytest
import references
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from quantkv.calibration import Calibration
from quantkv.integrations.sample_tokens import sample_tokens
from quantkv.integrations.transformers import QuantizedCache, calibrate, use_quantkv_attention

TOKENS = 16
LIMIT = 256  # positions: so few that moments are averaged over all of them
PROMPTS = [tiny_models.prompt(seed, length) for seed, length in ((1, 70), (2, 5), (3, 33))]
PROMPT = tiny_models.prompt(4, 300)
AS_IT_IS = {"json_model_override_args": "{}"}


def asked(folder, **policy):
    file = folder / f"{policy.get('statistics', 'policy')}.json"
    file.write_text(json.dumps({"policy_version": 1, **policy}))
    return {"environment": {"QUANTKV_POLICY": str(file)}, **AS_IT_IS}


@pytest.fixture(scope="module")
def biases(tmp_path_factory):
    """A model whose keys have large biases: 4 bits without key means say nothing."""
    return tiny_models.write("biases", tmp_path_factory.mktemp("biases"))


def scores(report):
    return report.answers[0].prompt_logprobs[0]


def agree(report, folder):
    """How many of the tokens are transformers', up to the first that is not."""
    assert report.error == "", report.log[-3000:]
    wanted = [references.continued(folder, prompt, TOKENS) for prompt in PROMPTS]
    same = [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), TOKENS) for pair in zip(report.answers[0].tokens, wanted)]
    return sum(same) / TOKENS / len(PROMPTS)


def test_a_preset_takes_statistics_and_loses_less(biases):
    """Of prompts that read what is stored of them, and of the tokens behind them."""
    ask = {"scored": True, "environment": {"QUANTKV_PROMPT": "stored"}, **AS_IT_IS}
    plain, preset, bare = (engine.run(biases, f"quantkv_{name}", [PROMPT], **ask) for name in ("none", "4bit", "levels4"))
    assert [report.error for report in (plain, preset, bare)] == ["", "", ""]
    assert "quantkv: key means and Hessians of 2 layers (512 tokens at random" in preset.log and "key means" not in bare.log
    assert [report.log.count("have biases of up to") > 0 for report in (plain, preset, bare)] == [False, False, True]
    off = [(torch.tensor(scores(report)) - torch.tensor(scores(plain))).abs().mean() for report in (preset, bare)]
    assert 0 < off[0] < off[1] / 2  # at 4 bits the greater loss ends where a row says nothing


@torch.inference_mode()
def through_our_cache(folder, policy):
    """Log-probability of each token of `PROMPT` but the first, in transformers over the same pages."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    use_quantkv_attention(model)
    logits = model(torch.tensor([PROMPT]), past_key_values=QuantizedCache(model.config, policy, prompt="stored")).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


WINDOW = {"full_precision": {"sink": 16, "recent": 24}}


@pytest.mark.parametrize("more", [{}, WINDOW], ids=["stored", "full_precision"])
def test_a_calibration_says_what_transformers_says_through_our_cache(biases, tmp_path, more):
    """On one rank, and on two that take their heads of it. A wrong layer, head or position costs nats."""
    model = AutoModelForCausalLM.from_pretrained(biases, dtype=torch.float32, trust_remote_code=False)
    calibrate(model, sample_tokens(None, 128, 512)[0]).save(tmp_path / "made.safetensors")
    given = asked(tmp_path, format="levels4", calibration="made.safetensors", prompt="stored", **more)
    wanted = through_our_cache(biases, given["environment"]["QUANTKV_POLICY"])
    given["environment"]["SGLANG_CPU_OMP_THREADS_BIND"] = "0|0"
    for ranks in (1, 2):
        report = engine.run(biases, "quantkv_policy", [PROMPT], scored=True, tp_size=ranks, **given)
        assert report.error == "", report.log[-3000:]
        assert (torch.tensor(scores(report)) - wanted).abs().max() < 1e-4


def test_what_the_engine_measures_is_what_its_layers_store_by(biases, tmp_path):
    file = tmp_path / "made.safetensors"
    given = asked(tmp_path, format="levels4", statistics="auto", prompt="stored")
    given["environment"][engine.MEASURED] = str(file)
    report = engine.run(biases, "quantkv_policy", [PROMPT], scored=True, **given)
    assert report.error == "", report.log[-3000:]
    again = asked(tmp_path, format="levels4", calibration=file.name, prompt="stored")
    wanted = through_our_cache(biases, again["environment"]["QUANTKV_POLICY"])
    assert (torch.tensor(scores(report)) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "biases", "softcap"])
def test_the_engine_measures_what_calibrate_measures(tmp_path, family):
    folder, file = tiny_models.write(family, tmp_path / "model"), tmp_path / "measured.safetensors"
    changes = '{"hidden_act": "gelu_pytorch_tanh"}' if family == "softcap" else "{}"
    asked = {"environment": {engine.MEASURED: str(file)}, "context_length": LIMIT, "json_model_override_args": changes}
    report = engine.run(folder, "quantkv_4bit", **asked)
    assert report.error == "", report.log[-3000:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    expected, found = calibrate(model, sample_tokens(None, 128, 512)[0].view(-1, LIMIT), limit=LIMIT), Calibration.load(file)
    assert found.geometry == expected.geometry
    for number, layer in expected.layers.items():
        for name, t in layer.tensors().items():
            if name != "weights":
                ours, theirs = found.layers[number].tensors()[name].double(), t.double()
                assert (ours - theirs).norm() < 1e-3 * theirs.norm(), (number, name)  # float16 of offsets: 2^-11


def test_a_model_that_cannot_be_measured_is_refused_where_that_is_required(biases, tmp_path):
    fault = {"setup": "import quantkv.integrations.sglang.statistics as s\ns.BODIES = ('no_such',)"}
    given = asked(tmp_path, format="levels4", statistics="require")
    report = engine.run(biases, "quantkv_policy", PROMPTS, **given, **fault)
    assert report.error and "policy.statistics='require': the model cannot be measured: Qwen2ForCausalLM has none of no_such" in report.log
    report = engine.run(biases, "quantkv_policy", PROMPTS, **asked(tmp_path, format="levels4", statistics="auto"), **fault)
    assert report.error == "" and "quantkv: no statistics of this model" in report.log


@pytest.mark.parametrize("arguments", [{"chunked_prefill_size": 32}, engine.TIGHT], ids=["chunked", "retracted"])
def test_all_tokens_at_full_precision_say_what_transformers_says(tmp_path, arguments):
    """Of int2, which would say something else. Copies are made again after a retraction."""
    folder = tiny_models.write("llama", tmp_path / "model")
    given = asked(tmp_path, format="int2", full_precision={"sink": 16, "recent": 496})
    report = engine.run(folder, "quantkv_policy", PROMPTS, tokens=TOKENS, **given, **arguments)
    assert agree(report, folder) == 1.0 and report.formats == ["int2", "int2"]
    assert (report.retracted > 0) == (arguments is engine.TIGHT)


def test_every_sequence_that_may_run_has_room_for_its_full_precision_tokens(tmp_path):
    """All of eight short sequences, at int2."""
    folder, prompts = tiny_models.write("llama", tmp_path / "model"), [tiny_models.prompt(seed, 18) for seed in range(10, 18)]
    given = asked(tmp_path, format="int2", full_precision={"sink": 16, "recent": 24})
    report = engine.run(folder, "quantkv_policy", prompts, tokens=TOKENS, **given)
    assert report.error == "", report.log[-3000:]
    assert report.answers[0].tokens == [references.continued(folder, prompt, TOKENS) for prompt in prompts]
