"""What each layer of a model keeps for each token, from its config.json as plain data. Pure Python: a planner needs neither torch nor
transformers.

A config.json leaves out what transformers' configuration classes have defaults for. `model_types.json`, which
`scripts/model_types.py` writes, holds those of the models in docs/models.md; a model_type that it does not have is refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from .layer_types import REMAPPED, types_of
from .refusals import refuse

ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID_TYPES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
STATE_TYPES = ("linear_attention", "conv")  # states of recurrences and convolutions
EMPTY_TYPES = ("moe", "mlp", "dummy")  # nothing of their own
REASONS = {
    "indexed_attention": "each query reads the keys that an index chooses",
    "deepseek_sparse_attention": "each query reads the keys that an index chooses",
    "qwen_sparse_attention": "each query reads the keys that an index chooses",
    "minimax_m3_sparse": "each query reads the blocks of keys that an index chooses",
    "compressed_sparse_attention": "it keeps compressed blocks of keys",
    "heavily_compressed_attention": "it keeps compressed blocks of keys",
}
MODELS = {  # model_type, where the layers alone do not tell
    "diffllama": "its code joins keys and values of two halves of its heads after it has read the cache",
    "jetmoe": "its code repeats keys and values after it has read the cache",
    "doge": "its masks depend on the values",
    "minimax": "it takes a cache of its own class only",
    **dict.fromkeys(("dory", "inkling2_loop_text"), "it runs some layers several times in a pass, and keeps keys and values of each time"),
}
REFUSED = {  # what is found only when the model is made
    **dict.fromkeys(("falcon", "bloom", "mpt", "gpt_neo", "xglm"), "its code computes attention by itself and cannot read quantized pages"),
    "mamba": "it has no attention layers, so no keys and values to quantize",
    "moshi": "its masks are not those of its configuration",
}
ENCODERS = (
    *("albert", "bert", "big_bird", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm"),
    *("longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "nystromformer", "rembert", "roberta", "roformer"),
    *("squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod", "clip", "siglip", "vit"),
)
MOST_LAYERS = 10_000  # of a model, and MOST of anything else: what goes beyond is damage, or would take a planner's time and memory
MOST = 1 << 40
STRETCHED_ROPES = ("linear", "dynamic", "yarn")  # configs of the other types count the stretched positions
TEXTS = ("text_config", "decoder", "generator")  # what configurations call that of their decoder
# What is read of a configuration: what its layers are, and how many parameters it has.
SHAPE = (
    *("num_hidden_layers", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    *("attention_head_dim", "v_head_dim", "layer_types", "sliding_window", "attention_chunk_size", "use_sliding_window"),
    *("max_window_layers", "sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layers", "no_rope_layer_interval"),
    *("attn_layer_period", "attn_layer_offset", "attn_layer_indices", "block_types", "full_attn_idxs", "layers_block_type"),
    *("kv_lora_rank", "qk_rope_head_dim", "num_kv_shared_layers", "attention_k_eq_v", "multi_query", "max_position_embeddings"),
    *("is_encoder_decoder", "use_bidirectional_attention", "use_long_context"),
)
LINEAR = (  # of the states of gated delta nets
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
SIZES = (
    *("vocab_size", "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts"),
    *("n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace", "tie_word_embeddings", "attention_bias"),
    *("mlp_bias", "decoder_sparse_step", "mlp_only_layers", "q_lora_rank", "qk_nope_head_dim"),
    *LINEAR,
)
FIELDS = frozenset((*SHAPE, *SIZES))


class Heads(NamedTuple):
    """The kv heads of one layer."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True)
class Geometry:
    """What a model and a calibration have to have in common.

    num_layers: of the model, with those that have no attention. heads: of the layers that keep keys and values; None for a layer whose
    heads are not known yet.
    """

    num_layers: int
    heads: Mapping[int, Heads | None]


class Kind(NamedTuple):
    """Which past keys the layers of one kind see: all, a sliding window of `window` tokens, or their own chunk of that many."""

    window: int = 0
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """Oldest position that a query at `position` or later sees."""
        if self.chunked:
            return position // self.window * self.window
        return max(position - self.window + 1, 0) if self.window else 0

    @property
    def options(self) -> dict[str, int]:
        """The window and chunks of its layers, as options of attention."""
        return {"window": self.window, "chunk_lookback": 0 if self.chunked else -1}


class Layer(NamedTuple):
    """What one layer keeps.

    kind: "full", "sliding" or "chunked" attention; "latent": one vector a token in place of keys and values (MLA); "state": nothing that
        grows; "shared": it reads the keys and values of another layer; "none".
    window: tokens of the window or of a chunk; 0: it sees all.
    heads: of its cache; a latent is one kv head, its rotated dimensions the value. None: it keeps nothing for a token.
    states: whether it keeps states of a recurrence or convolution, of one size for each sequence.
    """

    kind: str
    window: int = 0
    heads: Heads | None = None
    states: bool = False


@dataclass(frozen=True)
class Model:
    """A decoder.

    num_heads: of queries. max_positions: how many tokens it has positions for; None: its config sets no bound.
    fields: of its configuration, with transformers' defaults.
    """

    model_type: str
    layers: tuple[Layer, ...]
    num_heads: int
    max_positions: int | None
    fields: Mapping[str, Any]

    @property
    def attention(self) -> dict[int, Layer]:
        """The layers that keep something for each token, by number."""
        return {number: layer for number, layer in enumerate(self.layers) if layer.heads is not None}


@cache
def model_types() -> dict[str, Any]:
    """Defaults by model_type ("types"), and which of them decodes for a model of images or sound ("texts")."""
    return json.loads(files(__package__).joinpath("model_types.json").read_text(encoding="utf-8"))


def read(config: Mapping[str, Any]) -> Model:
    """A decoder from its config.json. ValueError for numbers that make no sense; NotImplementedError, by name, for what is not known, is
    no decoder, or cannot be quantized."""
    fields = text_fields(config)
    model_type = fields["model_type"]
    types = _layer_types(fields)
    for given in types:
        if given not in (*ATTENTION_TYPES, *HYBRID_TYPES, *STATE_TYPES, *EMPTY_TYPES):
            raise NotImplementedError(unknown_type(given, f"model_type {model_type}"))
    shared = positive(fields, "num_kv_shared_layers") if fields.get("num_kv_shared_layers") else 0
    layers = [_layer(fields, number, given) for number, given in enumerate(types)]
    layers = [layer if number < len(layers) - shared else Layer("shared") for number, layer in enumerate(layers)]
    if all(layer.heads is None for layer in layers):
        raise NotImplementedError(
            f"config: model_type {model_type} has no attention layers, so no keys and values to quantize (layer_types)"
        )
    if any(layer.states for layer in layers):
        own = model_types()["types"][model_type]["fields"]
        for name in LINEAR:
            if own.get(name) is not None or fields.get(name) is not None:  # some families work them out of None
                positive(fields, name)
    positions = stretched(fields.get("max_position_embeddings"), fields.get("rope_parameters"))
    return Model(model_type, tuple(layers), fields["num_attention_heads"], positions, fields)


def unknown_type(given: str, whose: str) -> str:
    """Why a type of layers is refused."""
    reason = f" ({REASONS[given]})" if given in REASONS else ""
    return f"config.layer_types: {given!r} of {whose}{reason}; allowed: {', '.join(ATTENTION_TYPES)}, and no attention"


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, or of its decoder's part, under the names that configurations share, with transformers' defaults.
    Refusals as of `read`."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config: {type(config).__name__} is no object with a model_type")
    outer = config.get("model_type")
    if not isinstance(outer, (str, type(None))):
        refuse("config.model_type", repr(outer), "a name such as llama is needed")
    if config.get("is_encoder_decoder"):
        raise NotImplementedError(f"config: model_type {outer} is an encoder-decoder; decoders only")
    nested = [config[name] for name in TEXTS if isinstance(config.get(name), Mapping)]
    given = dict(nested[0] if nested else config)
    texts, types = model_types()["texts"], model_types()["types"]
    if outer in texts:
        flat = given.get("model_type") == outer  # older configs have the decoder's fields beside the others
        given["model_type"] = texts[outer] if flat or not given.get("model_type") else given["model_type"]
    model_type = given.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        refuse("config.model_type", repr(model_type), "a name such as llama is needed")
    for reasons in (MODELS, REFUSED):
        if model_type in reasons:
            raise NotImplementedError(f"config: model_type {model_type}: {reasons[model_type]}")
    if model_type in ENCODERS or given.get("use_bidirectional_attention") in (True, "all"):
        raise NotImplementedError(f"config: model_type {model_type} is an encoder, which keeps no keys and values; decoders only")
    if model_type not in types:
        near = difflib.get_close_matches(model_type, types, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise NotImplementedError(f"config.model_type={model_type!r} is unknown: {hint}known: {', '.join(types)}")
    names = types[model_type].get("names", {})
    fields = {**types[model_type]["fields"], **given, **{names[name]: value for name, value in given.items() if name in names}}
    if fields.get("is_encoder_decoder"):
        raise NotImplementedError(f"config: model_type {model_type} is an encoder-decoder; decoders only")
    return _completed(fields, given)


def _completed(fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What classes work out from other fields."""
    model_type = fields["model_type"]
    if model_type == "longcat_flash":
        fields["num_hidden_layers"] = 2 * positive(fields, "num_layers")
    if fields.get("layer_types") is None and fields.get("layers_block_type") is not None:
        fields["layer_types"] = fields["layers_block_type"]
    if isinstance(given.get("hybrid_override_pattern"), str) and fields.get("layer_types") is None:
        fields["layer_types"] = given["hybrid_override_pattern"]
    if model_type == "nemotron_h":
        fields["num_hidden_layers"] = len(_layer_types(fields))
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        positive(fields, name)
    if not names_kv_heads(model_type):
        fields["num_key_value_heads"] = 1 if fields.get("multi_query") else None
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields.get("use_sliding_window") is False:
        fields["sliding_window"] = None
    if model_type == "mimo_v2_flash" and given.get("sliding_window_size") is not None:
        fields["sliding_window"] = positive(given, "sliding_window_size") + 1
    if fields.get("use_long_context"):
        fields["max_position_embeddings"] = 16384
    rope = given.get("rope_scaling") or fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {**rope, "rope_type": rope.get("rope_type", rope.get("type"))} if isinstance(rope, Mapping) else {}
    own = fields.get("per_layer_config")
    if own is not None and not (isinstance(own, Mapping) and all(str(k).isdecimal() and isinstance(v, Mapping) for k, v in own.items())):
        refuse("config.per_layer_config", repr(own), 'an object such as {"0": {"head_dim": 64}} is needed')
    positive(fields, "num_key_value_heads")
    if fields["num_attention_heads"] % fields["num_key_value_heads"]:
        heads = f"num_key_value_heads={fields['num_key_value_heads']}"
        raise ValueError(f"config.{heads}: a divisor of num_attention_heads={fields['num_attention_heads']} is needed")
    return fields


def positive(fields: Mapping[str, Any], name: str) -> int:
    """The positive integer of a field, such as a model can have. ValueError, naming the field, for anything else."""
    value, most = fields.get(name), MOST_LAYERS if name == "num_hidden_layers" else MOST
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        refuse(f"config.{name}", repr(value), f"a positive integer is needed, of at most {most:,}")
    return value


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    """Type of each layer, as transformers names them."""
    try:
        types, window = types_of(fields), "full_attention"
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # of fields that have another form than the family's
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"config.layer_types: of which type each layer is cannot be worked out ({reason})") from error
    if types is None:
        if fields.get("sliding_window") is not None:
            window = "sliding_attention"
        elif fields.get("attention_chunk_size") is not None:
            window = "chunked_attention"
        types = [window] * fields["num_hidden_layers"]
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        raise ValueError(f"config.layer_types={types!r}: a list of names is needed, one for each layer")
    types = [REMAPPED.get(name, name) for name in types]
    if fields["model_type"] != "nemotron_h" and len(types) != fields["num_hidden_layers"]:
        raise ValueError(f"config.layer_types: {len(types)} names; num_hidden_layers={fields['num_hidden_layers']} are needed")
    return types


def _layer(fields: Mapping[str, Any], number: int, given: str) -> Layer:
    if given in EMPTY_TYPES:
        return Layer("none")
    if given in STATE_TYPES:
        return Layer("state", states=True)
    attention, latent = HYBRID_TYPES.get(given, given), fields.get("kv_lora_rank") or 0
    window = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(attention)
    if window is not None:
        positive(fields, window)
    if latent and window is not None:
        raise NotImplementedError(f"config.kv_lora_rank={latent}: {given!r} layers that keep latents instead of keys and values")
    if latent:
        heads = Heads(1, positive(fields, "kv_lora_rank"), positive(fields, "qk_rope_head_dim"))
        return Layer("latent", 0, heads, given in HYBRID_TYPES)
    kind = attention.removesuffix("_attention")
    return Layer(kind, fields[window] if window else 0, heads_of(_own_fields(fields, number, attention), attention), given in HYBRID_TYPES)


def heads_of(fields: Mapping[str, Any], attention: str) -> Heads:
    """The kv heads of a layer of that type of attention, of a known model_type, from its completed fields."""
    model_type = fields["model_type"]
    computed = fields["hidden_size"] // fields["num_attention_heads"]
    if not names_kv_heads(model_type):  # nor another size of heads, whatever a config.json says
        positive({"head_dim": computed}, "head_dim")
        return Heads(1 if fields.get("multi_query") else fields["num_attention_heads"], computed, computed)
    if model_type in ("zamba", "zamba2"):  # heads of a row and the embedding, side by side
        size = 2 * computed if model_type == "zamba2" else fields.get("attention_head_dim") or 2 * computed
    else:
        size = fields.get("head_dim") or computed
    heads, size = positive(fields, "num_key_value_heads"), positive({"head_dim": size}, "head_dim")
    if model_type == "mimo_v2_flash":
        return Heads(2 * heads if attention == "sliding_attention" else heads, size, positive(fields, "v_head_dim"))
    return Heads(heads, size, size)


def names_kv_heads(model_type: str) -> bool:
    """Whether the configuration of a known model_type has a word for kv heads; else each query head has its own, or all share one."""
    return "num_key_value_heads" in model_types()["types"][model_type]["fields"]


def _own_fields(fields: Mapping[str, Any], number: int, attention: str) -> Mapping[str, Any]:
    """Fields of one layer, where a config has some for each."""
    per_layer = fields.get("per_layer_config")
    if per_layer is not None:
        return {**fields, **per_layer.get(str(number), {})}
    if fields["model_type"] == "gemma4_text" and attention == "full_attention":
        heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
        return {**fields, "head_dim": fields.get("global_head_dim", 512), "num_key_value_heads": heads or fields["num_key_value_heads"]}
    return fields


def stretched(known: int | None, rope: Mapping[str, Any] | None) -> int | None:
    """How many tokens a model has positions for; None if its config sets no bound.

    known: max_position_embeddings. rope: its rope_parameters. ValueError for what are no numbers of positions.
    """
    if not known:
        return None
    positive({"max_position_embeddings": known}, "max_position_embeddings")
    rope = rope or {}
    if rope.get("rope_type") not in STRETCHED_ROPES:
        return known
    first, factor = rope.get("original_max_position_embeddings") or known, rope.get("factor", 1)
    for name, value in (("original_max_position_embeddings", first), ("factor", factor)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST:
            refuse(f"config.rope_parameters.{name}", repr(value), f"a positive number is needed, of at most {MOST:,}")
    return max(known, int(first * factor))
