"""A policy: how a cache is stored. Each layer's format, what guides its writers, which tokens are read at 16 bits; also as a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from . import deprecated, policy_file, tensor_file, whole_file
from .calibration import Calibration
from .checks import digest_of, instance, refuse
from .format import Format
from .formats import get_format
from .full_precision import FullPrecisionTokens
from .maps import LayerMaps, LinearMap
from .page_meaning import meaning_digest, rows_meaning

MAPS_FORMAT, MAPS_VERSION = "quantkv-maps", "1"
# Tensors of a map in a file, such as layers.3.k.forward: fields of `LinearMap`. Names in files never change.
PARTS = {"forward": "forward", "inverse": "inverse", "offset": "key_mean", "metric": "hessian"}


@deprecated.keywords(exact="full_precision")
@dataclass(frozen=True)
class Policy:
    """A format for every layer, what replaces the maps that the formats ask for, and which tokens are read exactly.

    format: of the layers that `layers` does not name; "K/V" pairs and "none" (16 bits, as the model computes) are formats too.
    layers: format of a layer by its number, counted from 0.
    maps: maps of a layer by its number, for all of its kv heads; a side that they name goes before the calibration's.
    calibration: of the model: key means, and Hessians for the writers of all layers.
    full_precision: tokens with 16-bit copies; None: there are none.
    statistics: "auto": without a calibration, an engine measures the model itself before it stores the first row, and says so where it
        cannot; "require": it refuses where it cannot; "off": it never does.
    prompt: "own": a sequence with several new tokens reads the rows of these as the model computed them; "stored": it reads pages alone,
        so that its answer does not depend on how a prompt was cut.
    prompt_precision: "8bit": scores of sequences with at least 128 new tokens are products of 8-bit integers, as of `AttentionOptions`.
        What pages hold does not depend on it.
    latents: format of the layers that `layers` does not name, where they keep latents (MLA); None: `format`.
    """

    format: str
    layers: dict[int, str] = field(default_factory=dict)
    maps: dict[int, LayerMaps] = field(default_factory=dict)
    calibration: Calibration | None = None
    full_precision: FullPrecisionTokens | None = None
    statistics: str = "off"
    prompt: str = policy_file.PROMPTS[0]
    prompt_precision: str = policy_file.PRECISIONS[0]
    latents: str | None = None

    def __post_init__(self) -> None:
        get_format(self.format)
        if self.latents is not None:
            get_format(self.latents)
        for name, of, kind in (("layers", self.layers, str), ("maps", self.maps, LayerMaps)):
            if not isinstance(of, dict) or not all(_is_number(key) and isinstance(value, kind) for key, value in of.items()):
                refuse(name, repr(of), f"a dict of {kind.__name__} by the number of a layer is needed")
        for name in self.layers.values():
            get_format(name)
        for name, kind in (("calibration", Calibration), ("full_precision", FullPrecisionTokens)):
            instance(name, getattr(self, name), (kind, type(None)), f"{kind.__name__} or None")
        for name in policy_file.CHOICES:
            policy_file.check_choice(name, name, getattr(self, name))

    @classmethod
    def load(cls, path: str | Path, *, elsewhere: bool = False) -> Policy:
        """Read a JSON file: `{"policy_version": 1, "format": "int4", "layers": {"0": "int8", "2-5": "k8v4"}, "maps": "maps.safetensors",
        "calibration": "model.safetensors", "full_precision": {"sink": 16, "recent": 24}, "statistics": "off"}`.

        All but the version and format may be left out. maps: a file beside this one, with tensors such as `layers.3.k.forward
        [HK or 1, D, D]`, `layers.3.k.inverse` and, where wanted, `layers.3.k.metric` and, for keys, `layers.3.k.offset [buckets, HK or 1,
        D]`, float32; the digest in its metadata, which `save` writes, is checked where there is one. calibration: a file of
        `Calibration.save`, likewise beside it. full_precision: numbers of `FullPrecisionTokens`. prompt: "own" or "stored".
        prompt_precision: "16bit" or "8bit". latents: a format, such as "int4+int8".
        elsewhere: whether the names of these files may lead out of the policy's folder, by `..` or from the root.
        ValueError naming what is wrong.
        """
        path, given = Path(path), policy_file.read(path, elsewhere=elsewhere)
        maps = _read_maps(path.parent / given.maps) if given.maps is not None else {}
        calibration = Calibration.load(path.parent / given.calibration) if given.calibration is not None else None
        return cls(given.format, given.layers, maps, calibration, given.full_precision, **_chosen(given), latents=given.latents)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Policy:
        """A policy from what a JSON file holds: see `load`. The version may be left out, and layers may be numbers. ValueError naming what
        is wrong: a dict names no files."""
        parsed = policy_file.parse({"policy_version": policy_file.VERSION, **given})
        for name in ("maps", "calibration"):
            file = getattr(parsed, name)
            if file is not None:
                refuse(f"policy.{name}", repr(file), f"a dict has no folder to look in: write Policy(..., {name}=...) or a policy's path")
        return cls(parsed.format, parsed.layers, full_precision=parsed.full_precision, **_chosen(parsed), latents=parsed.latents)

    @classmethod
    def given(cls, value: Any) -> Policy | None:
        """The policy that a value is or names: one, a preset such as "4bit" (`policy_file.PRESETS`), the path of its JSON file, or what
        that holds as a dict. None for anything else, such as the name of a format. ValueError as of `load`."""
        if isinstance(value, str) and value in policy_file.PRESETS:
            return cls.from_dict(policy_file.PRESETS[value])
        if isinstance(value, os.PathLike) or (isinstance(value, str) and policy_file.is_name(value)):
            return cls.load(value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        return value if isinstance(value, cls) else None

    def save(self, path: str | Path, calibration: str | None = None) -> None:
        """Write it to a JSON file, and what it names to files beside that: `NAME.maps.safetensors`, `NAME.calibration.safetensors`. Each
        file appears whole or not at all, the JSON file last.

        calibration: the name of a file in the folder, or below it, that holds its calibration already; none is written then.
        ValueError for another name, and where that file holds another one. OSError where a file cannot be written.
        """
        path = Path(path)
        if calibration is not None:
            policy_file.check_name("calibration", calibration)
        given: dict[str, Any] = {"policy_version": policy_file.VERSION, "format": self.format}
        if self.layers:
            given["layers"] = dict(_ranges(self.layers))
        if self.maps:
            given["maps"] = f"{path.stem}.maps.safetensors"
            tensors = dict(_map_tensors(self.maps))
            metadata = {"format": MAPS_FORMAT, "version": MAPS_VERSION, "digest": digest_of(tensors)}
            whole_file.write(path.parent / given["maps"], save(tensors, metadata))
        if self.calibration is not None:
            given["calibration"] = calibration or f"{path.stem}.calibration.safetensors"
            file = path.parent / given["calibration"]
            if calibration is None:
                self.calibration.save(file)
            elif Calibration.load(file).digest != self.calibration.digest:
                refuse("calibration", str(file), "it holds another calibration than the policy")
        if self.latents is not None:
            given["latents"] = self.latents
        if self.full_precision is not None:
            given["full_precision"] = {"sink": self.full_precision.sink, "recent": self.full_precision.recent}
        defaults = {name: allowed[0] for name, allowed in policy_file.CHOICES.items()}
        given |= {name: said for name, said in _chosen(self).items() if said != defaults[name]}  # older versions read what is not said
        whole_file.write(path, (json.dumps(given, indent=2) + "\n").encode())  # last: it names the others

    def check(self, num_layers: int) -> None:
        """ValueError where it names a layer that a model of `num_layers` lacks."""
        policy_file.check_layers(num_layers, layers=self.layers, maps=self.maps)

    def of_latents(self) -> Policy:
        """The same for a model whose layers keep latents."""
        return self if self.latents is None else replace(self, format=self.latents, latents=None)

    @property
    def wants_statistics(self) -> bool:
        """Whether an engine has to measure the model before it stores the first row."""
        return self.statistics != "off" and self.calibration is None

    def name_of(self, layer: int) -> str:
        """Name of a layer's format."""
        return self.layers.get(layer, self.format)

    def of(self, layer: int, dtype: torch.dtype = torch.bfloat16) -> Format:
        """Format of a layer; "none" stores `dtype`."""
        return get_format(self.name_of(layer), dtype)

    def maps_of(self, layer: int) -> LayerMaps:
        """Maps of a layer, for all of its kv heads: those given, else the calibration's; None on a side that the format decides.
        ValueError where the calibration does not hold the layer."""
        given = self.maps.get(layer, LayerMaps())
        if self.calibration is None:
            return given
        made = self.calibration.maps(layer, self.of(layer))
        return LayerMaps(made.k if given.k is None else given.k, made.v if given.v is None else given.v, made.calibration)

    def fingerprint(self, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> str:
        """Digest of what the bytes of a model's pages mean: 16 hexadecimal digits, of each layer's format and maps. Policies with the same
        one write comparable bytes, whatever else they say. dtype: what "none" stores.

        Layers that a calibration does not hold keep no keys and values, and are left out.
        """
        held = [number for number in range(num_layers) if self.calibration is None or number in self.calibration.layers]
        return meaning_digest([[number, *rows_meaning(self.of(number, dtype), self.maps_of(number))] for number in held])


def _chosen(given: Policy | policy_file.PolicyFile) -> dict[str, str]:
    """The fields of `policy_file.CHOICES`."""
    return {name: getattr(given, name) for name in policy_file.CHOICES}


def _is_number(key: Any) -> bool:
    return isinstance(key, int) and not isinstance(key, bool) and key >= 0


def _ranges(layers: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Numbers of layers as "3" and "2-5", the reverse of `_layers`."""
    for (_, name), run in groupby(enumerate(sorted(layers)), lambda pair: (pair[1] - pair[0], layers[pair[1]])):
        numbers = [number for _, number in run]
        yield str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", name


def _map_tensors(maps: dict[int, LayerMaps]) -> Iterator[tuple[str, torch.Tensor]]:
    """As a file names them, the reverse of `_read_maps`."""
    for number, layer in maps.items():
        for side in ("k", "v"):
            for part, field_name in PARTS.items():
                t = getattr(getattr(layer, side), field_name, None)
                if t is not None:
                    yield f"layers.{number}.{side}.{part}", t.clone(memory_format=torch.contiguous_format)  # layers may share one


def _read_maps(path: Path) -> dict[int, LayerMaps]:
    """Maps of a file by layer. ValueError naming the file and the cause where it is absent, cut, damaged, or holds something else."""
    where = f"policy.maps={str(path)!r}"
    metadata, tensors = tensor_file.read("policy.maps", path)
    if "digest" in metadata or metadata.get("format") == MAPS_FORMAT:  # a file that other tools wrote has neither
        needed = {"format": MAPS_FORMAT, "version": MAPS_VERSION, "digest": digest_of(tensors)}
        for name, value in needed.items():
            if metadata.get(name) != value:
                refuse(f"{where}: {name}", metadata.get(name), f"{value} is needed: damaged, or of another version")
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, t in tensors.items():
        words = name.split(".")
        if (
            len(words) != 4
            or words[0] != "layers"
            or not (words[1].isdecimal() and len(words[1]) <= policy_file.DIGITS)
            or words[2] not in ("k", "v")
            or words[3] not in PARTS
        ):
            refuse("policy.maps", name, f"tensors are named layers.NUMBER.k or v.{', '.join(PARTS)}")
        parts.setdefault((int(words[1]), words[2]), {})[words[3]] = t
    sides: dict[int, dict[str, LinearMap]] = {}
    for (number, side), given in parts.items():
        if {"forward", "inverse"} - given.keys():
            refuse("policy.maps", sorted(given), f"layers.{number}.{side} needs forward and inverse")
        try:
            sides.setdefault(number, {})[side] = LinearMap(*(given.get(part) for part in PARTS))
        except ValueError as error:
            raise ValueError(f"{where}: layers.{number}.{side}.{error}") from error
    return {number: LayerMaps(**both) for number, both in sides.items()}
