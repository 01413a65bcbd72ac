"""What each layer is, read from config.json files as plain data, against what transformers makes of the same files."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, DynamicCache  # noqa: E402

from architectures import ARCHITECTURES, SIZES, Architecture, before  # noqa: E402
from quantkv import geometry  # noqa: E402
from quantkv.geometry import Heads  # noqa: E402
from quantkv.integrations.transformers_model import geometry_of, max_positions, plan_layers  # noqa: E402
from quantkv.known_models import MODELS, config_of  # noqa: E402

ROOT = Path(__file__).parent.parent
DERIVED = (  # what a config.json may leave out, as its class has a default for it or works it out
    *("layer_types", "layers_block_type", "head_dim", "no_rope_layers", "sliding_window", "attention_chunk_size", "rope_parameters"),
    *("max_position_embeddings", "attention_head_dim", "per_layer_config", "num_kv_shared_layers", "v_head_dim"),
)
NAMES = {architecture.name: architecture for architecture in ARCHITECTURES}


def written(architecture: Architecture, **beside: Any) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    sizes = {**SIZES, **copy.deepcopy(dict(architecture.sizes)), **beside}
    kind = getattr(transformers, architecture.family + architecture.config)
    made = kind(**{architecture.text: sizes}, **copy.deepcopy(dict(architecture.beside))) if architecture.text else kind(**sizes)
    return json.loads(made.to_json_string(use_diff=False))


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    """A config.json that leaves out these, in its decoder's part too."""
    return {name: without(value, *names) if name == "text_config" else value for name, value in config.items() if name not in names}


def seen(config: dict[str, Any]) -> Any:
    """By `geometry`: kind, window and states of each layer, and the positions."""
    try:
        model = geometry.read(config)
    except NotImplementedError:
        return "refused"
    return [(layer.kind.replace("shared", "none"), layer.window, layer.states) for layer in model.layers], model.max_positions


def expected(config: dict[str, Any]) -> Any:
    """The same by transformers' own classes; None where these refuse the file."""
    try:
        made = AutoConfig.for_model(**copy.deepcopy(config))
        plans = plan_layers(made)
    except NotImplementedError:
        return "refused"
    except Exception:  # of transformers: the fields do not fit together
        return None
    kinds = []
    for plan in plans:
        if plan.kind is None:
            kinds.append(("state" if plan.states else "none", 0, plan.states))
        else:
            name = "latent" if plan.latent else "chunked" if plan.kind.chunked else "sliding" if plan.kind.window else "full"
            kinds.append((name, plan.kind.window, plan.states))
    return kinds, max_positions(made)


def compare(config: dict[str, Any]) -> bool:
    """Whether transformers takes the file. What `geometry` reads is what its classes say, or an older one is known to say otherwise."""
    theirs, text = expected(config), config.get("text_config", config)
    if theirs is None:
        return False
    model_type = text.get("model_type")
    if model_type == "recurrent_gemma" and before("5.23"):  # its model kept its states itself
        assert theirs == "refused"
        made = AutoConfig.for_model(**copy.deepcopy(config))
        kinds = {"recurrent": ("state", 0, True), "attention": ("sliding", made.attention_window_size, False)}
        theirs = [kinds[name] for name in made.layers_block_type], max_positions(made)
    if model_type == "mimo_v2_flash" and before("5.20") and text.get("sliding_window") is None:  # 128, the query itself included
        assert {window for _, window, _ in theirs[0]} == {0, 128}
        right = 1 + text.get("sliding_window_size", 128)  # so many before the query, as its reference in SGLang reads
        theirs = [(kind, window and right, states) for kind, window, states in theirs[0]], theirs[1]
    if theirs != "refused" and before("5.23"):  # layers that share keys had no place in a cache
        shared = AutoConfig.for_model(**copy.deepcopy(config)).get_text_config(decoder=True)
        shared = getattr(shared, "num_kv_shared_layers", None) or 0
        theirs = theirs[0] + [("none", 0, False)] * shared, theirs[1]
    assert seen(config) == theirs
    return True


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_layers_are_those_of_transformers(architecture: Architecture):
    """Of a whole file, of one without each field that may be left out, without all of them, and of nothing but the model's type."""
    if not architecture.is_known:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.family}")
    whole = written(architecture)
    if whole["model_type"] in geometry.REFUSED:
        with pytest.raises(NotImplementedError, match=whole["model_type"]):
            geometry.read(whole)
        return
    text = whole.get("text_config", whole)
    files = [whole, *(without(whole, name) for name in DERIVED if name in text)]
    files += [without(whole, *DERIVED), {"model_type": whole["model_type"]}]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    files += [{**without(whole, "rope_parameters"), "rope_scaling": rope}] if "rope_theta" in text.get("rope_parameters", {}) else []
    assert any([compare(file) for file in files])


@pytest.mark.parametrize(
    "model_type,fields",
    {
        "llama4_text": {"no_rope_layers": [0, 1, 1, 0], "num_hidden_layers": 4},
        "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 4},
        "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 3, "num_hidden_layers": 6},
        "qwen3_moe": {"use_sliding_window": True},
        "dots1": {"max_window_layers": 2, "num_hidden_layers": 4},
        "smollm3": {"use_sliding_window": True, "sliding_window": 64, "no_rope_layer_interval": 3},
        "gemma3_text": {"sliding_window_pattern": 4},
        "gemma3": {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34}},
        "cohere2": {"sliding_window_pattern": 3},
        "afmoe": {"global_attn_every_n_layers": 3},
        "qwen3_next": {"full_attention_interval": 3},
        "olmo_hybrid": {"num_hidden_layers": 3},
        "bamba": {"attn_layer_indices": [1, 5]},
        "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2},
        "nemotron_h": {"hybrid_override_pattern": "M-M*E"},
        "lfm2": {"full_attn_idxs": [2, 5]},
        "kimi_linear": {"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4]}},
        "mimo_v2_flash": {"sliding_window_size": 63},
        "recurrent_gemma": {"block_types": ["attention", "recurrent"]},
        "qwen2_vl": {"num_hidden_layers": 5, "max_position_embeddings": 99},
        "llava": {"text_config": {"model_type": "mistral", "sliding_window": 77}},
        "mistral3": {"text_config": {"sliding_window": 77}},
        "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    }.items(),
)
def test_layers_by_rules_of_a_family(model_type: str, fields: dict[str, Any]):
    config = {"model_type": model_type, **fields}
    assert seen(config) != "refused" and compare(config)


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "Cohere 2", "RecurrentGemma", "Llama", "MiMo-V2-Flash", "Gemma 4", "GPTBigCode"])
def test_heads_are_those_that_a_model_makes(name: str):
    """Where a config.json names a size of heads that others than its class would take. `families.py` compares the heads of all models."""
    import torch

    architecture = NAMES[name]._replace(sizes={**NAMES[name].sizes, "head_dim": 32})
    model = architecture.build()
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=(cache := DynamicCache(config=model.config)))
    made = geometry.read(written(architecture))
    for number, layer in made.attention.items():
        keys, values = cache.layers[number].keys, cache.layers[number].values
        assert layer.heads == Heads(keys.shape[1], keys.shape[3], values.shape[3])


@pytest.mark.parametrize("shared", [None, True, False])
def test_heads_of_gemma_4_as_its_files_name_them(shared: bool | None):
    config = {"model_type": "gemma4_text", "global_head_dim": 128, "num_global_key_value_heads": 2}
    config |= {} if shared is None else {"attention_k_eq_v": shared}
    made = geometry.read(config).attention
    assert {number: layer.heads for number, layer in made.items()} == geometry_of(AutoConfig.for_model(**config)).heads
    assert made[5].heads == Heads(2 if shared else 4, 128, 128)


def test_defaults_are_those_of_transformers():
    """`scripts/model_types.py` writes the file."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import model_types as script
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    held = json.loads(script.FILE.read_text())
    if held["transformers"] != transformers.__version__:
        pytest.skip(f"the file is of transformers {held['transformers']}")
    some = ["gemma3", "llava", "mistral3", "qwen2_vl"]  # all take ten seconds
    assert held["types"] == json.loads(json.dumps(script.types()))
    assert script.texts(held["types"], some) == {name: held["texts"][name] for name in some}


SMALL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.mark.parametrize(
    "config,error,message",
    [
        ([1], ValueError, "list is no object with a model_type"),
        ({"num_hidden_layers": 2}, ValueError, "model_type=None"),
        ({"model_type": "llamma"}, NotImplementedError, "'llamma' is unknown: did you mean llama"),
        ({"model_type": "t5", "is_encoder_decoder": True}, NotImplementedError, "t5 is an encoder-decoder"),
        ({"model_type": "t5"}, NotImplementedError, "t5 is an encoder-decoder"),
        ({"model_type": "bert"}, NotImplementedError, "bert is an encoder"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, NotImplementedError, "gemma3_text is an encoder"),
        ({"model_type": "mamba"}, NotImplementedError, "no attention layers"),
        ({"model_type": "granitemoehybrid"}, NotImplementedError, "no attention layers"),
        ({"model_type": "deepseek_v32"}, NotImplementedError, "indexed_attention.*an index chooses"),
        ({**SMALL, "num_hidden_layers": 0}, ValueError, "num_hidden_layers=0: a positive integer"),
        ({**SMALL, "num_hidden_layers": "2"}, ValueError, "num_hidden_layers='2'"),
        ({**SMALL, "num_hidden_layers": True}, ValueError, "num_hidden_layers=True"),
        ({**SMALL, "num_key_value_heads": 3}, ValueError, "num_key_value_heads=3: a divisor of num_attention_heads=4"),
        ({**SMALL, "head_dim": -1}, ValueError, "head_dim=-1"),
        ({**SMALL, "layer_types": ["full_attention"]}, ValueError, "1 names; num_hidden_layers=2"),
        ({**SMALL, "layer_types": "full_attention"}, ValueError, "a list of names"),
        ({**SMALL, "layer_types": ["full_attention", "wide_attention"]}, NotImplementedError, "'wide_attention' of model_type llama"),
        ({**SMALL, "layer_types": ["sliding_attention"] * 2}, ValueError, "sliding_window=None"),
        ({**SMALL, "model_type": "nemotron_h", "hybrid_override_pattern": "MX*"}, ValueError, "'X': letters of"),
        ({**SMALL, "model_type": "exaone4", "sliding_window_pattern": 0}, ValueError, "sliding_window_pattern=0"),
    ],
)
def test_refused_by_name(config: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        geometry.read(config)


@pytest.mark.parametrize("name", MODELS)
def test_known_models_are_known(name: str):
    config = {key: value for key, value in config_of(name.upper()).items() if key != "quantization_config"}
    assert seen(config) == expected(config)
    assert not set(config) - geometry.FIELDS - {"model_type", "full_attention_interval", "num_experts_per_tok"}


@pytest.mark.parametrize("kind,positions", [("yarn", 131072), ("linear", 131072), ("llama3", 32768)])
def test_positions_that_a_rotation_stretches(kind: str, positions: int):
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 32768}
    assert geometry.read({**config_of("qwen2.5-7b"), "rope_scaling": rope}).max_positions == positions
    assert geometry.read({**config_of("qwen2.5-7b"), "rope_parameters": rope}).max_positions == positions


@pytest.mark.parametrize("kind", geometry.STRETCHED_ROPES)
def test_a_stretch_that_is_counted_already_takes_no_positions_away(kind: str):
    """Configurations whose max_position_embeddings are those after it, or more."""
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 8192}
    assert geometry.stretched(32768, rope) == 32768
    assert geometry.read({**config_of("qwen2.5-7b"), "rope_parameters": rope}).max_positions == 32768


def test_a_known_model_is_found_by_its_nearest_name():
    with pytest.raises(ValueError, match="did you mean llama-3-8b"):
        config_of("llama3-8b")
    config_of("llama-3-8b")["hidden_size"] = 1
    assert config_of("llama-3-8b")["hidden_size"] == 4096


def test_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from quantkv.geometry import read; from quantkv.known_models import config_of; print(len(read(config_of('gemma-3-4b'))"
    )
    code += ".attention), [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "34 []\n"
