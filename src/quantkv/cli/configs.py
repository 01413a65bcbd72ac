"""A model by its configuration alone, without weights or torch: a transformers directory, a config.json, a known name, or numbers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import geometry, known_models, parameters
from ..geometry import Heads, Layer, Model
from ..parameters import Weights

NUMBERS = ("layers", "heads", "kv_heads", "head_size", "head_size_v", "window", "windowed", "parameters", "positions")
NEEDED = ("layers", "kv_heads", "head_size")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Described:
    """name: for people. weights: None: not known. folder: where its files are, if it is one."""

    name: str
    model: Model
    weights: Weights | None
    folder: Path | None = None


def size_of(text: str, argument: str) -> int:
    """Bytes of a size such as 24GiB. ValueError for anything else."""
    word = text.strip().upper()
    digits = word.rstrip("BKMGTI")
    try:
        count = float(digits) * UNITS[word[len(digits) :] or "B"]
    except (KeyError, ValueError):
        count = 0.0
    if not 1 <= count < 2**60:
        raise ValueError(f"{argument} {text}: a size such as 24GiB, 80GB or a number of bytes is needed")
    return int(count)


def describe(source: str) -> Described:
    """What MODEL names. ValueError or NotImplementedError, naming it, for what is unknown, damaged, or no decoder."""
    if "=" in source and not Path(source).exists():
        return _of_numbers(source)
    path = Path(source)
    if not path.exists():
        if "/" in source or path.suffix in (".json", ".gguf", ".safetensors"):
            raise ValueError(f"MODEL {source}: no such file or directory; allowed: {_allowed()}")
        try:
            config = known_models.config_of(source)
        except ValueError as error:
            raise ValueError(f"MODEL: {error}") from error
        model = geometry.read(config)
        return Described(source.lower(), model, parameters.of_config(model.fields))
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".json":
        what = "no config.json in it" if path.is_dir() else "no config.json"
        raise ValueError(f"MODEL {source}: {what}; allowed: {_allowed()}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"MODEL {file}: no JSON, or cut short; allowed: a complete config.json ({error})") from error
    try:
        model = geometry.read(config)
        folder = file.resolve().parent
        weights = parameters.of_files(folder) or parameters.of_config(model.fields)
    except NotImplementedError as error:
        raise NotImplementedError(f"MODEL {file}: {error}") from error
    except ValueError as error:
        raise ValueError(f"MODEL {file}: {error}") from error
    if weights is not None and weights.source.startswith("its config") and model.model_type != config.get("model_type"):
        weights = weights._replace(source=f"{weights.source}; of its decoder alone")
    return Described(folder.name, model, weights, folder)


def _allowed() -> str:
    numbers = "numbers such as layers=32,kv_heads=8,head_size=128"
    return f"a transformers directory, a config.json, {numbers}, or {', '.join(known_models.MODELS)}"


def _of_numbers(source: str) -> Described:
    """`layers=32,kv_heads=8,head_size=128`."""
    given: dict[str, int] = {}
    for part in source.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            number = 0.0
        most = geometry.MOST_LAYERS if name in ("layers", "windowed") else geometry.MOST
        if name not in NUMBERS or name in given or not 1 <= number <= most or number != int(number):
            allowed = f"positive whole numbers as NAME=NUMBER of {', '.join(NUMBERS)}, here of at most {most:,}"
            raise ValueError(f"MODEL {source}: {part.strip()!r}; allowed: {allowed}")
        given[name] = int(number)
    missing = [name for name in NEEDED if name not in given]
    windowed = given.get("windowed", given.get("layers", 0)) if "window" in given else 0
    heads = given.get("heads", given.get("kv_heads", 1))
    if missing or ("windowed" in given and "window" not in given) or windowed > given["layers"] or heads % given["kv_heads"]:
        raise ValueError(
            f"MODEL {source}: {', '.join(NEEDED)} are needed; heads is a multiple of kv_heads, windowed, of a window, is at most layers"
        )
    of = Heads(given["kv_heads"], given["head_size"], given.get("head_size_v", given["head_size"]))
    layers = [Layer("sliding", given.get("window", 0), of)] * windowed + [Layer("full", 0, of)] * (given["layers"] - windowed)
    model = Model("numbers", tuple(layers), heads, given.get("positions"), {})
    count = given.get("parameters")
    weights = None if count is None else Weights(count, 2 * count, "as given, at 16 bits")
    return Described(source, model, weights)


def layer_groups(model: Model) -> list[dict[str, Any]]:
    """Layers that are alike, counted, in the order in which they come."""
    counts = Counter(model.layers)
    return [
        {"count": count, "kind": layer.kind, "window": layer.window, "states": layer.states, **_named(layer.heads)}
        for layer, count in counts.items()
    ]


def _named(heads: Heads | None) -> dict[str, int]:
    return {} if heads is None else {"kv_heads": heads.num_kv_heads, "head_size": heads.head_size, "head_size_v": heads.head_size_v}


def in_words(model: Model) -> str:
    """What the layers are, in a line."""
    words = []
    for group in layer_groups(model):
        kind, count = group["kind"], group["count"]
        if kind == "latent":
            words.append(f"{count} latent (MLA) of {group['head_size']} + {group['head_size_v']}")
        elif "kv_heads" in group:
            sizes = f"{group['head_size']}" + (f" and {group['head_size_v']}" if group["head_size_v"] != group["head_size"] else "")
            window = f" ({group['window']:,} tokens)" if group["window"] else ""
            beside = ", beside a state" if group["states"] else ""
            words.append(f"{count} {kind}{window}, {group['kv_heads']} kv heads of {sizes}{beside}")
        else:
            other = {"state": "with a state of one size", "shared": "that read another layer's", "none": "without attention"}[kind]
            words.append(f"{count} {other}")
    return f"{len(model.layers)} layers: {'; '.join(words)}"
