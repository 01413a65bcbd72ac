"""Layer types of a model where its config.json does not list them: the rules of transformers' configuration classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]
REMAPPED = {  # older names
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of Nemotron-H's patterns


def _count(c: Fields) -> range:
    return range(c["num_hidden_layers"])


def _full_if(c: Fields, full: Callable[[int], bool], other: str = "sliding_attention") -> list[str]:
    return ["full_attention" if full(i) else other for i in _count(c)]


def _every(period: int | str, default: int = 1, other: str = "sliding_attention") -> Callable[[Fields], list[str]]:
    """Full attention in each layer of that period, by number or by the name of a field; `other` before it."""

    def types(c: Fields) -> list[str]:
        length = period if isinstance(period, int) else c.get(period, default)
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"config.{period}={length!r}: a positive number of layers is needed")
        return _full_if(c, lambda i: (i + 1) % length == 0, other)

    return types


def _late_windows(c: Fields) -> list[str]:
    window = c.get("sliding_window") is not None
    return ["sliding_attention" if window and i >= c["max_window_layers"] else "full_attention" for i in _count(c)]


def _qwen2_moe(c: Fields) -> list[str]:
    return _full_if(c, lambda i: not (i % 2 == 0 and i < c["max_window_layers"] and c.get("use_sliding_window")))


def _no_rope(c: Fields) -> list[Any]:
    return c.get("no_rope_layers") or [int((i + 1) % c["no_rope_layer_interval"] != 0) for i in _count(c)]


def _smollm3(c: Fields) -> list[str]:
    sliding = c.get("use_sliding_window") and c.get("sliding_window") is not None
    return ["sliding_attention" if sliding and not rope else "full_attention" for rope in _no_rope(c)]


def _llama4(c: Fields) -> list[str]:
    return ["chunked_attention" if rope else "full_attention" for rope in _no_rope(c)]


def _gemma4(c: Fields) -> list[str]:
    return [*(c.get("layer_types") or _every(6)(c))[:-1], "full_attention"]


def _olmo_hybrid(c: Fields) -> list[str]:
    types = _full_if(c, lambda i: i % 4 == 3, "linear_attention")
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


def _zamba(c: Fields) -> list[str]:
    rest = ("hybrid" if i % c["attn_layer_period"] == c["attn_layer_offset"] else "linear_attention" for i in _count(c)[:-3])
    return ["linear_attention", "linear_attention", "hybrid", *rest]


def _zamba2(c: Fields) -> list[str]:
    runs = (6, *[5] * 6, 4, 3)  # of Mamba layers, before each hybrid one
    return [name for run in runs for name in (*["linear_attention"] * run, "hybrid")] + ["linear_attention"] * 2


def _nemotron_h(c: Fields) -> list[str]:
    given = c.get("layer_types")
    if isinstance(given, str):
        unknown = sorted(set(given) - set(_LETTERS))
        if unknown:
            raise ValueError(f"config.hybrid_override_pattern: {''.join(unknown)!r}: letters of {''.join(_LETTERS)!r} are needed")
        return [_LETTERS[letter] for letter in given]
    return given if given is not None else ["linear_attention", "moe", "full_attention", "mlp"]


def _kimi_linear(c: Fields) -> list[str]:
    own = c.get("linear_attn_config") or {}
    if "full_attn_layers" in own and "kda_layers" in own:
        return _full_if(c, lambda i: i + 1 in own["full_attn_layers"], "linear_attention")
    return _full_if(c, lambda i: i > 0 and i % 4 == 0, "linear_attention")


def _lfm3(c: Fields) -> list[str]:
    return ["full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv" for i in _count(c)]


def _lara_mini(c: Fields) -> list[str]:
    period = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
    return [period[i % len(period)] for i in _count(c)]


def _recurrent_gemma(c: Fields) -> list[str]:
    blocks = (list(c["block_types"]) * 100)[: c["num_hidden_layers"]]
    return ["linear_attention" if block == "recurrent" else "sliding_attention" for block in blocks]


ALWAYS: dict[str, Callable[[Fields], list[str]]] = {  # whatever a config.json lists
    "recurrent_gemma": _recurrent_gemma,
    "falcon_h1": lambda c: ["hybrid"] * c["num_hidden_layers"],
    "jamba": lambda c: _full_if(c, lambda i: i % c["attn_layer_period"] == c["attn_layer_offset"], "linear_attention"),
    "bamba": lambda c: _full_if(c, lambda i: i in (c.get("attn_layer_indices") or ()), "linear_attention"),
    "gemma4_text": _gemma4,
    "nemotron_h": _nemotron_h,
}
ELSE: dict[str, Callable[[Fields], list[str]]] = {
    **dict.fromkeys(("gemma2", "vaultgemma", "gpt_oss"), _every(2)),
    "gemma3_text": _every("sliding_window_pattern", 6),
    "gemma3n_text": _every(5),
    "olmo3": _every(4),
    "cohere2": _every("sliding_window_pattern", 4),
    "exaone4": _every("sliding_window_pattern"),
    "afmoe": _every("global_attn_every_n_layers"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _every("full_attention_interval", 4, "linear_attention")),
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_vl_text", "dots1"), _late_windows),
    "qwen2_moe": _qwen2_moe,
    "smollm3": _smollm3,
    "llama4_text": _llama4,
    "olmo_hybrid": _olmo_hybrid,
    "granitemoehybrid": lambda c: ["linear_attention"] * c["num_hidden_layers"],
    "zamba": _zamba,
    "zamba2": _zamba2,
    "kimi_linear": _kimi_linear,
    "lfm2": lambda c: _full_if(c, lambda i: i in (_count(c) if c.get("full_attn_idxs") is None else c["full_attn_idxs"]), "conv"),
    "lfm3": _lfm3,
    "lara_mini": _lara_mini,
    "mimo_v2_flash": lambda c: _full_if(c, lambda i: i == 0 or (i + 1) % 6 == 0),
    "deepseek_v32": lambda c: ["indexed_attention"] * c["num_hidden_layers"],
    "deepseek_v4": lambda c: ["heavily_compressed_attention"] * c["num_hidden_layers"],
}


def types_of(c: Fields) -> list[str] | None:
    """Names of the layers' types by the rule of a model_type, or as its config.json lists them; None where it has neither."""
    rule = ALWAYS.get(c["model_type"]) or (ELSE.get(c["model_type"]) if c.get("layer_types") is None else None)
    return rule(c) if rule is not None else c.get("layer_types")
