"""Which format each layer of a model is stored in, as a file: a policy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .checks import refuse
from .format import Format
from .formats import get_format
from .maps import LayerMaps, LinearMap

VERSION = 1
FIELDS = ("policy_version", "format", "layers", "maps")
PARTS = ("forward", "inverse", "offset")  # of a map, as tensors of a file are named: layers.3.k.forward


@dataclass(frozen=True)
class Policy:
    """A format for every layer, and what replaces the maps that the formats ask for.

    format: of the layers that `layers` does not name; "K/V" pairs and "none" (16 bits, as the model computes) are formats too.
    layers: format of a layer by its number, counted from 0.
    maps: maps of a layer by its number, for all of its kv heads.
    """

    format: str
    layers: dict[int, str] = field(default_factory=dict)
    maps: dict[int, LayerMaps] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.format, *self.layers.values()):
            get_format(name)

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a JSON file: `{"policy_version": 1, "format": "int4", "layers": {"0": "int8", "2-5": "k8v4"}, "maps": "maps.safetensors"}`.

        layers and maps may be left out. maps: a file beside this one, with tensors such as `layers.3.k.forward [HK or 1, D, D]`,
        `layers.3.k.inverse` and, for keys, `layers.3.k.offset [buckets, HK or 1, D]`, float32. ValueError naming what is wrong.
        """
        path = Path(path)
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"policy={str(path)!r}: {error}") from error
        if not isinstance(given, dict) or given.keys() - set(FIELDS) or "format" not in given:
            refuse("policy", given, f"an object with format and, where needed, {', '.join(FIELDS)} is needed")
        if given.get("policy_version") != VERSION:
            refuse("policy_version", given.get("policy_version"), f"{VERSION} is needed")
        layers = _layers(given.get("layers", {}))
        maps = _read_maps(path.parent / given["maps"]) if "maps" in given else {}
        return cls(given["format"], layers, maps)

    def check(self, num_layers: int) -> None:
        """ValueError where it names a layer that a model of `num_layers` lacks."""
        for name, given in (("layers", self.layers), ("maps", self.maps)):
            beyond = sorted(number for number in given if number >= num_layers)
            if beyond:
                refuse(f"policy.{name}", beyond, f"the model has layers 0 to {num_layers - 1}")

    def of(self, layer: int, dtype: torch.dtype = torch.bfloat16) -> Format:
        """Format of a layer; "none" stores `dtype`."""
        return get_format(self.layers.get(layer, self.format), dtype)


def _layers(given: Any) -> dict[int, str]:
    """ "3" and "2-5" as numbers of layers."""
    if not isinstance(given, dict):
        refuse("policy.layers", given, 'an object such as {"0": "int8", "2-5": "k8v4"} is needed')
    layers: dict[int, str] = {}
    for key, name in given.items():
        first, _, last = key.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            refuse("policy.layers", key, 'a number of a layer such as "3", or a range such as "2-5", is needed')
        for number in range(int(first), int(last or first) + 1):
            if number in layers:
                refuse("policy.layers", key, f"layer {number} is named twice")
            layers[number] = name
    return layers


def _read_maps(path: Path) -> dict[int, LayerMaps]:
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                words = name.split(".")
                if (
                    len(words) != 4
                    or words[0] != "layers"
                    or not words[1].isdecimal()
                    or words[2] not in ("k", "v")
                    or words[3] not in PARTS
                ):
                    refuse("policy.maps", name, "tensors are named layers.NUMBER.k or v.forward, inverse or offset")
                parts.setdefault((int(words[1]), words[2]), {})[words[3]] = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"policy.maps={str(path)!r}: {error}") from error
    sides: dict[int, dict[str, LinearMap]] = {}
    for (number, side), tensors in parts.items():
        if {"forward", "inverse"} - tensors.keys():
            refuse("policy.maps", sorted(tensors), f"layers.{number}.{side} needs forward and inverse")
        sides.setdefault(number, {})[side] = LinearMap(*(tensors.get(part) for part in PARTS))
    return {number: LayerMaps(**given) for number, given in sides.items()}
