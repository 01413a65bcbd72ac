"""What a `QuantizedCache` is given: formats and policies in any form are taken, anything else is refused in one line that says what to
write; and a cache is for the model that it was made for."""

import copy
import json
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from architectures import ARCHITECTURES  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.geometry import Heads  # noqa: E402
from quantkv.integrations.transformers import QuantizedCache, use_quantkv_attention  # noqa: E402
from quantkv.integrations.transformers_model import geometry_of  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from test_transformers import logits, prompts, tiny  # noqa: E402

GIVEN = {"policy_version": 1, "format": "int4", "layers": {"0": "int8"}, "full_precision": {"sink": 16, "recent": 8}}


@pytest.fixture(scope="module")
def llama():
    return use_quantkv_attention(tiny("llama"))


def formats(cache):
    return [layer.requested for layer in cache.quantized_layers.values()]


def one_line(error, *words):
    """Whatever the value was, the message is a line that people read."""
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    for word in words:
        assert word in text


@pytest.mark.parametrize("form", ["path", "text", "dict", "numbers", "no version"])
def test_a_policy_is_taken_as_a_file_and_as_a_dict(form, tmp_path, llama):
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(GIVEN))
    numbers = {**GIVEN, "layers": {0: "int8"}}
    unversioned = {name: value for name, value in GIVEN.items() if name != "policy_version"}
    given = {"path": file, "text": str(file), "dict": GIVEN, "numbers": numbers, "no version": unversioned}[form]
    cache = QuantizedCache(llama.config, given)
    assert formats(cache) == ["int8", "int4"]
    assert [sequences.full_precision for sequences in cache.sequences.values()] == [FullPrecisionTokens(16, 8)]


def test_a_file_brings_what_it_names(tmp_path, llama):
    """The calibration beside it: what the cache reads is what it reads by the loaded policy."""
    from quantkv.integrations.transformers import calibrate

    ids, mask = prompts([256])
    policy = Policy("levels4", calibration=calibrate(llama, ids))
    policy.save(tmp_path / "policy.json")
    ids, mask = ids[:, :30], mask[:, :30]
    by_policy, by_path = (logits(llama, QuantizedCache(llama.config, p), ids, mask, [0, 20]) for p in (policy, tmp_path / "policy.json"))
    assert torch.equal(by_policy, by_path)
    assert not torch.equal(by_path, logits(llama, QuantizedCache(llama.config, "levels4"), ids, mask, [0, 20]))


@pytest.mark.parametrize("name", ["maps", "calibration"])
def test_a_dict_names_no_files(name, llama):
    with pytest.raises(ValueError, match=f"policy.{name}=") as error:
        QuantizedCache(llama.config, {**GIVEN, name: "a.safetensors"})
    one_line(error, "path")


@pytest.mark.parametrize(
    "given, words",
    [
        (None, ["format=None", "'int4'"]),
        (4, ["format=4", "'int4'"]),
        (4.0, ["format=4.0", "'int4'"]),
        (b"int4", ["format=b'int4'", "'int4'"]),
        (torch.int8, ["format=torch.int8", "'int4'"]),
        ("quantkv_int4", ["format='quantkv_int4'", "did you mean 'int4'"]),
        ("INT4", ["format='INT4'", "did you mean 'int4'"]),
        ("int8/INT4", ["format='INT4'", "did you mean 'int4'"]),
        (["int8", 4], ["format=4"]),
        ("nowhere/policy.json", ["policy='nowhere/policy.json'", "No such file"]),
        ({"formats": "int4"}, ["policy=", "format"]),
    ],
    ids=repr,
)
def test_anything_else_is_refused_in_a_line_that_says_what_to_write(given, words, llama):
    with pytest.raises(ValueError) as error:
        QuantizedCache(llama.config, given)
    one_line(error, *words)


def test_a_module_as_a_format_is_named_by_its_class(llama):
    with pytest.raises(ValueError, match="format=LlamaForCausalLM: ") as error:
        QuantizedCache(llama.config, llama)
    one_line(error, "'int4'")


def test_what_is_no_configuration_is_refused(llama):
    for given, name in ((llama, "LlamaForCausalLM"), ("int4", "str"), (llama.config.to_dict(), "dict")):
        with pytest.raises(ValueError, match=f"config={name}: ") as error:
            QuantizedCache(given, "int4")
        one_line(error, "QuantizedCache(model.config, ")


OTHERS = {
    "more layers": ("llama", {"num_hidden_layers": 3}),
    "fewer layers": ("llama", {"num_hidden_layers": 1}),
    "kv heads": ("llama", {"num_key_value_heads": 4}),
    "head size": ("llama", {"head_dim": 32}),
    "windows": ("mistral", {}),
    "windows in some layers": ("gemma2", {}),
    "chunks": ("llama4", {}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_cache_of_another_model_is_refused_before_anything_is_stored(other, llama):
    """Windows and chunks go by the cache's configuration: the answer would be another model's."""
    name, changes = OTHERS[other]
    ids, mask = prompts([30])
    cache = QuantizedCache(tiny(name, **changes).config, "int4")
    with pytest.raises(ValueError, match="past_key_values=") as error:
        llama.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)
    one_line(error, "LlamaConfig", "QuantizedCache(model.config, ")
    assert cache.get_seq_length() == 0 and not cache.is_initialized


def test_a_cache_serves_every_model_of_its_layers(llama):
    """Another class whose layers keep the same; an equal configuration; a copy of the cache, which has a configuration of its own."""
    ids, mask = prompts([20])
    expected = logits(llama, QuantizedCache(llama.config, "int4"), ids, mask, [0, 10])
    same = transformers.LlamaConfig(**llama.config.to_dict())
    for cache in (QuantizedCache(tiny("qwen2").config, "int4"), QuantizedCache(same, "int4")):
        assert torch.equal(logits(llama, cache, ids, mask, [0, 10]), expected)
    for copied in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        cache = QuantizedCache(llama.config, "int4")
        logits(llama, cache, ids[:, :10], mask[:, :10], [0])
        assert torch.equal(logits(llama, copied(cache), ids, mask, [10]), expected[:, 10:])


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("block_size", 12, ["multiple of 8"]),
        ("block_size", 0, ["multiple of 8"]),
        ("block_size", None, ["multiple of 8"]),
        ("num_tokens", -1, ["number of tokens"]),
        ("num_tokens", "a", ["number of tokens"]),
        ("num_tokens", True, ["number of tokens"]),
        ("dtype", "bf16", ["torch.bfloat16"]),
        ("dtype", torch.int8, ["torch.bfloat16"]),
        ("fresh_prefill", "x", ["True or False"]),
    ],
)
def test_options_are_checked_where_they_are_given(option, value, words, llama):
    with pytest.raises(ValueError, match=f"^{option}=") as error:
        QuantizedCache(llama.config, "int4", **{option: value})
    one_line(error, *words)


def test_what_names_no_sequences_is_refused(llama):
    cache = QuantizedCache(llama.config, "int4")
    ids, mask = prompts([3, 3])
    logits(llama, cache, ids, mask, [0])
    for method, argument in ((cache.reorder_cache, "beam_idx"), (cache.batch_select_indices, "indices")):
        for given in (None, "a", ["a"]):
            with pytest.raises(ValueError, match=f"^{argument}=") as error:
                method(given)
            one_line(error, "numbers of sequences")
    assert cache.batch_size == 2
    cache.reorder_cache([1, 1])
    for call in (use_quantkv_attention, lambda config: use_quantkv_attention("llama")):
        with pytest.raises(ValueError, match=r"^model=") as error:
            call(llama.config)
        one_line(error, "a model of transformers")


def test_a_cache_with_states_takes_another_batch_after_a_reset():
    """Transformers' own layers keep their states' size when they are reset."""
    (lfm2,) = (given for given in ARCHITECTURES if given.name == "LFM2")
    model, ids = use_quantkv_attention(lfm2.build()), torch.arange(3, 13)
    cache = QuantizedCache(model.config, "int8")
    with torch.no_grad():
        model(ids.view(2, 5), past_key_values=cache)
        cache.reset()
        found, other = (
            model(ids[None], past_key_values=cache).logits,
            model(ids[None], past_key_values=QuantizedCache(model.config, "int8")).logits,
        )
    assert torch.equal(found, other)


@pytest.mark.skipif("mimo_v2_flash" not in transformers.CONFIG_MAPPING, reason="this transformers has no MiMo-V2-Flash")
def test_layers_with_a_window_have_heads_of_their_own_where_a_model_says_so():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16}
    kinds = ["full_attention", "sliding_attention"]
    config = transformers.CONFIG_MAPPING["mimo_v2_flash"](num_hidden_layers=2, layer_types=kinds, sliding_window=32, **sizes)
    assert geometry_of(config).heads == {0: Heads(2, 24, 16), 1: Heads(4, 24, 16)}
