"""Samples of key projections: another model of the same geometry is told, the same one in other dtypes is not."""

import logging

import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

from quantkv import weights  # noqa: E402
from quantkv.calibration import Calibration  # noqa: E402
from quantkv.integrations import asked  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, calibrate, use_quantkv_attention  # noqa: E402
from quantkv.model_analysis.sensitivity import sensitivities  # noqa: E402
from quantkv.model_analysis.teacher_forced import teacher_forced  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import tiny  # noqa: E402

IDS = torch.randint(1, 128, (4, 80), generator=torch.Generator().manual_seed(0))


def other(model, seed=1):
    """A model of the same geometry with other weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.std() if parameter.ndim > 1 else parameter)
    return model


@pytest.fixture(scope="module")
def made():
    return calibrate(tiny("llama"), IDS)


def run(model, calibration):
    use_quantkv_attention(model)
    cache = QuantizedCache(model.config, Policy("levels4", calibration=calibration))
    with torch.no_grad():
        model(IDS[:, :8], past_key_values=cache)
    return cache


READERS = {
    "a cache": run,
    "a teacher-forced pass": lambda model, calibration: teacher_forced(model, Policy("levels4", calibration=calibration)).__enter__(),
    "sensitivities": lambda model, calibration: sensitivities(model, IDS, ["levels4"], Policy("int4", calibration=calibration)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_another_model_is_refused(made, read, tmp_path):
    made.save(tmp_path / "made.safetensors")
    calibration = Calibration.load(tmp_path / "made.safetensors")
    with pytest.raises(
        ValueError, match=r"calibration=made of other weights: those of layer 0 are 1\.\d+ apart: .*quantkv calibrate MODEL"
    ):
        read(other(tiny("llama")), calibration)


def test_the_same_model_is_taken_in_other_dtypes_and_after_tuning(made):
    same = tiny("llama")
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0)
    for model in (tiny("llama"), tiny("llama").bfloat16(), same):
        assert not any(layer.is_new for layer in run(model, made).quantized_layers.values())  # each was compared, once


def test_one_other_layer_is_enough(made):
    model = tiny("llama")
    torch.nn.init.normal_(model.model.layers[1].self_attn.k_proj.weight)
    with pytest.raises(ValueError, match="of layer 1 are"):
        run(model, made)


def test_a_refused_pass_leaves_the_cache_empty(made):
    model = use_quantkv_attention(other(tiny("llama")))
    cache = QuantizedCache(model.config, Policy("levels4", calibration=made))
    with torch.no_grad(), pytest.raises(ValueError, match="other weights"):
        model(IDS[:, :8], past_key_values=cache)
    assert cache.get_seq_length() == 0 and not cache.is_initialized


def test_samples():
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(0))
    taken = weights.sample(weight)
    assert taken.shape == (64,) and taken.dtype == torch.float16 and abs(float(taken.double().norm()) - 1) < 1e-3
    flat = weight.flatten()[[i * (weight.numel() - 1) // 63 for i in range(64)]]
    assert torch.equal(taken, (flat.double() / flat.double().norm()).half())
    assert torch.equal(weights.sample(4 * weight), taken)  # a scale of the whole is none of the model
    assert float((weights.sample(weight.bfloat16()) - taken).norm()) < 0.01
    nothing = (None, weight[0], weight[:0], torch.zeros(8, 8), weight.char(), weight.to("meta"), weight * float("nan"))
    assert [weights.sample(t) for t in nothing] == [None] * len(nothing)


def test_what_one_side_lacks_is_not_compared():
    one, two = weights.sample(torch.eye(8)), weights.sample(-torch.eye(8))
    weights.check({0: one, 1: None, 2: two}, {0: one, 1: two, 3: one})
    weights.check({}, {0: one})
    with pytest.raises(ValueError, match=r"layer 2 are 2\.00 apart"):
        weights.check({0: one, 2: two}, {0: one, 2: one})


def test_a_checkpoint_has_the_samples_of_its_model(tmp_path, made):
    tiny("llama").save_pretrained(tmp_path)
    found = weights.of_checkpoint(tmp_path)
    assert {number: torch.equal(layer.weights, found[number]) for number, layer in made.layers.items()} == {0: True, 1: True}
    made.check_weights(found)


def test_checkpoints_that_say_nothing(tmp_path):
    one = torch.eye(8)
    towers = {"text.layers.0.self_attn.k_proj.weight": one, "vision.layers.0.self_attn.k_proj.weight": one.clone()}
    towers |= {"text.layers.1.self_attn.qkv_proj.weight": one.clone(), "text.layers.2.self_attn.k_proj.qweight": one.int()}
    save_file(towers, tmp_path / "model.safetensors")
    assert list(weights.of_checkpoint(tmp_path)) == [1]
    (tmp_path / "damaged.safetensors").write_bytes(b"no header")
    assert weights.of_checkpoint(tmp_path) == weights.of_checkpoint(tmp_path / "absent") == {}


def test_files_of_version_1_are_read(made, tmp_path, monkeypatch):
    """They have no samples; nothing is compared."""
    from dataclasses import replace

    import quantkv.calibration

    old = Calibration(made.num_layers, {number: replace(layer, weights=None) for number, layer in made.layers.items()})
    with monkeypatch.context() as patch:
        patch.setattr(quantkv.calibration, "FILE_VERSION", "1")
        old.save(tmp_path / "old.safetensors")
    read = Calibration.load(tmp_path / "old.safetensors")
    assert read.digest == old.digest != made.digest
    run(other(tiny("llama")), read)


@pytest.mark.parametrize(
    ("name", "policy", "said"),
    [("int4", None, 1), ("levels4", Policy("levels4"), 1), ("none", None, 0), ("levels4", Policy.given("4bit"), 0)],
)
def test_a_server_warns_of_key_biases_that_a_format_would_store(tmp_path, caplog, name, policy, said):
    """By the files of the checkpoint: the largest bias of any layer."""
    biases = {
        f"model.layers.{layer}.self_attn.{part}.bias": torch.full((8,), size)
        for layer, part, size in ((0, "k_proj", 3.0), (1, "k_proj", -77.0), (1, "v_proj", 900.0))
    }
    save_file(biases, tmp_path / "model.safetensors")
    asked.warn_of_biases(str(tmp_path), None, policy, name, logging.getLogger("quantkv"))
    assert caplog.text.count("have biases of up to 77, and format") == said and caplog.text.count("quantkv_4bit") == said
    biases["model.layers.1.self_attn.k_proj.bias"] = torch.full((8,), 7.0)
    save_file(biases, tmp_path / "model.safetensors")
    caplog.clear()
    asked.warn_of_biases(str(tmp_path), None, policy, name, logging.getLogger("quantkv"))
    assert not caplog.text
