"""Write src/quantkv/model_types.json, the defaults of transformers' configurations that a config.json may leave out:
`python scripts/model_types.py`.

Of the models in tests/architectures.py, by their model_type, what `quantkv.geometry` reads. tests/test_geometry.py compares them.
"""

import json
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from architectures import ARCHITECTURES  # noqa: E402
from quantkv.geometry import FIELDS, STRETCHED_ROPES  # noqa: E402

FILE = ROOT / "src" / "quantkv" / "model_types.json"


def text_class(kind: type) -> type:
    """The configuration of a model's decoder."""
    specs = getattr(kind, "sub_configs_defaults", None) or {}
    own = specs["text_config"].config_class if "text_config" in specs else kind
    return own if getattr(own, "model_type", "") else type(kind().text_config)  # of any class: its default


def defaults(kind: type) -> dict:
    """Of a class: its fields that matter, by the names that configurations share; and other names of them."""
    found = {f.name: f.default for f in fields(kind) if f.name in FIELDS and f.default is not MISSING}
    names = {given: name for name, given in kind.attribute_map.items() if name in FIELDS}
    found |= {name: f.default for f in fields(kind) if (name := names.get(f.name)) and f.default is not MISSING}
    rope = getattr(kind(), "rope_parameters", None) or {}
    if rope.get("rope_type") in STRETCHED_ROPES:
        found["rope_parameters"] = {name: rope[name] for name in ("rope_type", "factor", "original_max_position_embeddings")}
    return {"fields": found, "names": names} if names else {"fields": found}


def types() -> dict:
    classes = [getattr(transformers, a.family + a.config) for a in ARCHITECTURES if hasattr(transformers, a.family + a.config)]
    kinds = {kind.model_type: kind for kind in map(text_class, classes)}
    return {name: defaults(kind) for name, kind in sorted(kinds.items())}


def texts(known: dict, names: list[str]) -> dict:
    """Of models of images or sound, by their model_type, that of their decoder, where it is known."""
    found = {}
    for name in sorted(names):
        try:
            text = text_class(kind := CONFIG_MAPPING[name])
        except Exception:  # some cannot be made without arguments
            continue
        if text is not kind and text.model_type in known:
            found[name] = text.model_type
    return found


def text() -> str:
    known = types()
    parts = {"types": known, "texts": texts(known, list(CONFIG_MAPPING.keys()))}
    lines = [",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) for part in parts.values()]
    return '{{\n "transformers": "{}",\n "types": {{\n{}\n }},\n "texts": {{\n{}\n }}\n}}\n'.format(transformers.__version__, *lines)


if __name__ == "__main__":
    FILE.write_text(text())
