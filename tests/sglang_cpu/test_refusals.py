"""What is refused by name before weights are loaded, and servers that stop because quantkv does not serve."""

import json

import engine
import pytest
import tiny_models

LOADED = "Load weight begin"  # in the log


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


def refused(report, *said):
    """The engine did not start, and the message has these parts."""
    assert report.error
    assert all(part in report.error for part in said), report.error
    assert LOADED not in report.log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"page_size": 1}, ["ValueError: page_size=1", "one of 16, 32, 64, 128"]),
        ({"kv_cache_dtype": "bfloat16"}, ["kv_cache_dtype='bfloat16'", "allowed: 'auto'"]),
        ({"enable_hierarchical_cache": True, "disable_radix_cache": False}, ["enable_hierarchical_cache=True", "allowed: False"]),
        ({"enable_memory_saver": True}, ["enable_memory_saver=True", "allowed: False"]),
        ({"disaggregation_mode": "prefill"}, ["disaggregation_mode='prefill'", "allowed: 'null'"]),
        ({"enable_deterministic_inference": True}, ["enable_deterministic_inference=True", "allowed: False"]),
        ({"decode_attention_backend": "torch_native"}, ["prefill_attention_backend='quantkv_int4'", "'torch_native'", "name one for both"]),
    ],
    ids=lambda given: "-".join(map(str, next(iter(given.items())))) if isinstance(given, dict) else None,
)
def test_arguments(llama, arguments, said):
    refused(engine.run(llama, "quantkv_int4", **arguments), *said)


def test_names_that_are_no_format(llama):
    refused(engine.run(llama, "quantkv_int5"), "ValueError: attention_backend='quantkv_int5'", "quantkv_4bit, ", "quantkv_int4, ")


def test_formats_of_latents(llama):
    refused(engine.run(llama, "quantkv_int4+int8"), "ValueError", "a layer that keeps keys and values takes 'int4'")


def test_formats_that_heads_cannot_have(tmp_path):
    refused(engine.run(tiny_models.write("heads_of_80", tmp_path), "quantkv_tq4"), "ValueError", "head_size=80")


def test_latents(tmp_path):
    said = "NotImplementedError: quantkv: DeepseekV3ForCausalLM keeps latents (MLA)"
    refused(engine.run(tiny_models.write("latents", tmp_path), "quantkv_int4", json_model_override_args="{}"), said)


def test_a_policy_and_its_file_need_each_other(llama, tmp_path):
    refused(engine.run(llama, "quantkv_policy"), "attention_backend='quantkv_policy', QUANTKV_POLICY=None", "need each other")
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"policy_version": 1, "format": "int4", "layers": {"2": "int8"}}))
    environment = {"QUANTKV_POLICY": str(file)}
    refused(engine.run(llama, "quantkv_int4", environment=environment), f"QUANTKV_POLICY={str(file)!r}", "need each other")
    refused(engine.run(llama, "quantkv_policy", environment=environment), "ValueError", "layers")  # the model has layers 0 and 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("h.resolve_kv_pool_class = lambda own, *given, **named: own(*given, **named)", "would serve 16 bits"),
        ("h.compute_cell_size = lambda own, *given: own(*given)", "would serve 16 bits"),
        ("h.configure = None", "is not callable"),
        ("h.make_backend = lambda runner: registry.create_torch_native_backend(runner)", "served by TorchNativeAttnBackend"),
        ("h.hook_runner = None", "Invalid attention backend: quantkv_int4"),
    ],
    ids=["pool", "sizes", "configure", "backend", "registration"],
)
def test_a_server_that_would_serve_16_bits_stops(llama, fault, said):
    """SGLang swallows what fails while plug-ins are loaded."""
    setup = "import quantkv.integrations.sglang.hooks as h\nimport sglang.srt.layers.attention.attention_registry as registry\n"
    report = engine.run(llama, "quantkv_int4", [[3, 4, 5]], setup=setup + fault)
    assert report.error == "the engine's process ended" and not report.answers
    assert said in report.log
