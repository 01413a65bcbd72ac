"""Configurations of models in which fields are anything: a plan is made, or they are refused by name."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from quantkv import capacity, geometry
from quantkv.cli import configs
from quantkv.known_models import MODELS, config_of
from quantkv.policy_file import PolicyFile

SHARE = 2

NUMBERS = [-1, 0, 1, 3, 16, 1 << 27, 10**30, 10**400]
VALUES = ["null", "true", "[]", "{}", '""', '"abc"', "2.5", "NaN", "Infinity", "1e308", "[1]", '["x"]', "[[]]", '{"0": "x"}', '{"a": [1]}']
VALUES += ["[" * 100_000, *map(str, NUMBERS)]
ROPE = ("rope_parameters", "rope_scaling")
OTHER = ("model_type", "text_config", "per_layer_config", "quantization_config", "linear_attn_config", "full_attention_interval", *ROPE)
FIELDS = sorted({*geometry.FIELDS, *OTHER, "hybrid_override_pattern", "global_head_dim", "sliding_window_size", "layers_block_type"})
PLACE = "@"  # where a value goes, which need not be JSON


@dataclass(frozen=True)
class Case:
    """model: a known name, or a model_type with what all have. changed: values as they stand in the file, by field; those of `ROPE` are of
    a field inside. shape: of a tensor in a safetensors file beside it; None: there is none."""

    model: str
    changed: tuple[tuple[str, str], ...]
    rope: tuple[str, str] | None = None
    shape: str | None = None


@st.composite
def cases(draw) -> Case:
    model = draw(st.sampled_from([*MODELS, *geometry.model_types()["types"]]))
    own = [*(config_of(model) if model in MODELS else geometry.model_types()["types"][model]["fields"])]
    field = st.one_of(st.sampled_from(own), st.sampled_from(FIELDS)) if own else st.sampled_from(FIELDS)
    changed = tuple(draw(st.lists(st.tuples(field, st.sampled_from(VALUES)), min_size=0, max_size=2)))
    inside = st.sampled_from(["factor", "rope_type", "type", "original_max_position_embeddings"])
    rope = draw(st.one_of(st.none(), st.tuples(inside, st.sampled_from(VALUES))))
    return Case(model, changed, rope, draw(st.one_of(st.none(), st.none(), st.sampled_from(VALUES))))


def text_of(case: Case) -> str:
    given = dict(config_of(case.model)) if case.model in MODELS else {"model_type": case.model, "num_hidden_layers": 4, "hidden_size": 64}
    values = dict(case.changed)
    if case.rope is not None:
        given[ROPE[len(case.rope[0]) % 2]] = {"rope_type": "yarn", "factor": 4.0, case.rope[0]: PLACE + "rope"}
        values["rope"] = case.rope[1]
    text = json.dumps({**given, **{name: PLACE + name for name, _ in case.changed}})
    for name, value in values.items():
        text = text.replace(json.dumps(PLACE + name), value)
    return text


def check(case: Case) -> None:
    """The target."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(text_of(case))
        if case.shape is not None:
            header = f'{{"t": {{"dtype": "F32", "shape": [{case.shape}], "data_offsets": [0, 4]}}}}'.encode()
            (Path(folder) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        try:
            described = configs.describe(folder)
        except (ValueError, NotImplementedError) as error:
            assert str(error).startswith(f"MODEL {folder}"), error
            return
    model, weights = described.model, described.weights
    assert configs.in_words(model) and len(model.layers) <= geometry.MOST_LAYERS
    assert weights is None or f"{weights.nbytes / 2**30:.2f}{(weights.parameters or 0) / 1e9:.2f}"
    try:
        made = capacity.capacity(model, PolicyFile("int4", {}))
    except (ValueError, NotImplementedError) as error:
        assert str(error), error
        return
    assert made.longest(1 << 34) >= 0 and made.sequence_bytes(min(model.max_positions or 8192, 8192)) > 0
