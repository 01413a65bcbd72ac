"""What is measured of a model once, so that its cache loses less in the same bytes. docs/calibration.md says what it is good for.

A calibration file is a safetensors file with, for each layer N that keeps keys and values, `layers.N.k.offset` float16
`[buckets, HK, D]`, `layers.N.k.metric` float32 `[HK, D, D]`, `layers.N.v.metric` float32 `[HK, D_V, D_V]`, since version 2
`layers.N.weights` float16 `[64]` and, since version 3, `layers.N.k.spread` float32 `[HK, D]`. Its metadata: format, version, geometry
(JSON), made_of (JSON, for people) and digest, a SHA-256 over the tensors and the geometry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from . import deprecated, plain_json, tensor_file, weights, whole_file
from .checks import digest_of, instance, integer, refuse
from .format import Codec, Format
from .geometry import MOST_LAYERS, Geometry, Heads
from .maps import KEY_MEAN_BUCKET, SMALLEST_STEP, LayerMaps, LinearMap, default_map

MIN_TOKENS = 256  # fewer say too little of a model
NUMBERS = frozenset(map(str, range(MOST_LAYERS)))  # of layers, as a file spells them
FILE_FORMAT, FILE_VERSION, VERSIONS = "quantkv-calibration", "3", ("1", "2", "3")
PARTS = {"k.offset": "key_mean", "k.metric": "key_hessian", "v.metric": "value_hessian", "weights": "weights", "k.spread": "key_spread"}
# what a file calls a tensor: field of `LayerMoments`; names in files never change
OPTIONAL = ("key_mean", "weights", "key_spread")
UNEVEN = 8.0  # variances of a head's dimensions, their mean over their geometric mean: from there on they are evened out
SMALLEST_SPREAD = 1e-4  # of the mean variance of a head's dimensions, that one dimension counts with


@deprecated.keywords(key_offset="key_mean", key_metric="key_hessian", value_metric="value_hessian")
@dataclass(frozen=True, eq=False)
class LayerMoments:
    """Key mean and Hessians of one layer, for all of its kv heads, in the model's own space.

    key_mean: float16 `[buckets, HK, D]`: the mean key of each bucket of 64 positions; None where the model's rotation of keys is not
        understood.
    key_hessian: float32 `[HK, D, D]`: what an error e of a key costs, `e^T key_hessian e`: second moments of the queries.
    value_hessian: float32 `[HK, D_V, D_V]`: the same of values: of the output projection's columns.
    weights: float16 `[64]`: the sample of the layer's key projection (`weights.sample`), by which another model is told; None: not known.
    key_spread: float32 `[HK, D]`: variance of each dimension of the keys about `key_mean`; None: not known.
    """

    key_mean: torch.Tensor | None
    key_hessian: torch.Tensor
    value_hessian: torch.Tensor
    weights: torch.Tensor | None = None
    key_spread: torch.Tensor | None = None

    @property
    def heads(self) -> Heads:
        """kv heads and head sizes of K and V."""
        return Heads(*self.key_hessian.shape[:2], self.value_hessian.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parts by their names in a file, without those that are absent."""
        return {part: t for part, name in PARTS.items() if (t := getattr(self, name)) is not None}

    def check(self, layer: int) -> None:
        """ValueError unless shapes, dtypes and numbers are what they have to be."""
        for part, name in PARTS.items():
            t = getattr(self, name)
            if name not in OPTIONAL or t is not None:
                instance(f"layers.{layer}.{part}", t, torch.Tensor, "a tensor")
                if name not in ("weights", "key_spread") and (t.ndim != 3 or not t.numel()):
                    refuse(f"layers.{layer}.{part}", tuple(t.shape), "three dimensions are needed, none of them 0")
        (heads, size, size_v), key_mean = self.heads, self.key_mean
        buckets = 1 if key_mean is None else key_mean.shape[0]
        needed = {"k.offset": ((buckets, heads, size), torch.float16)}
        needed |= {"k.metric": ((heads, size, size), torch.float32), "v.metric": ((heads, size_v, size_v), torch.float32)}
        needed |= {"weights": ((weights.SAMPLE,), torch.float16), "k.spread": ((heads, size), torch.float32)}
        for part, t in self.tensors().items():
            shape, dtype = needed[part]
            if tuple(t.shape) != shape or t.dtype != dtype:
                refuse(f"layers.{layer}.{part}", f"{tuple(t.shape)} of {t.dtype}", f"{shape} of {dtype} is needed")
            if not bool(t.isfinite().all()):
                refuse(f"layers.{layer}.{part}", "numbers that are not finite", "finite ones are needed")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Moments of a model's layers. `quantkv.integrations.transformers.calibrate` makes one, a `Policy` carries it.

    num_layers: of the model. layers: moments by the number of the layer, of those that keep keys and values.
    made_of: what it was made of, for people: the model, the text, how many tokens.
    """

    num_layers: int
    layers: Mapping[int, LayerMoments]
    made_of: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        integer("num_layers", self.num_layers, 1, f"a number of layers, of at most {MOST_LAYERS:,},", MOST_LAYERS)
        beyond = sorted(number for number in self.layers if not 0 <= number < self.num_layers)
        if beyond or not self.layers:
            refuse("calibration.layers", beyond, f"layers of 0 to {self.num_layers - 1} are needed")
        for number, moments in self.layers.items():
            moments.check(number)

    @property
    def geometry(self) -> Geometry:
        """Number of layers, and the heads of each that is calibrated: what a model must have."""
        return Geometry(self.num_layers, {number: moments.heads for number, moments in self.layers.items()})

    @property
    def positions(self) -> int:
        """Positions that the key means of all layers cover; beyond them the last bucket's is used. A layer with one bucket, whose keys do
        not turn with their position, covers all. 0: no layer has key means."""
        buckets = {m.key_mean.shape[0] for m in self.layers.values() if m.key_mean is not None}
        return KEY_MEAN_BUCKET * min(buckets - {1}, default=max(buckets, default=0))

    @cached_property
    def digest(self) -> str:
        """SHA-256, 64 hexadecimal digits, of every number and of the geometry."""
        return digest_of(self._tensors(), self._geometry_text())

    def save(self, path: str | Path) -> None:
        """Write it to a file, which appears whole or not at all. OSError where that cannot be written. ValueError or TypeError where
        `made_of` is no JSON."""
        metadata = {"format": FILE_FORMAT, "version": FILE_VERSION, "geometry": self._geometry_text()}
        metadata |= {"made_of": json.dumps(dict(self.made_of), sort_keys=True, allow_nan=False), "digest": self.digest}
        own = {name: t.cpu().clone(memory_format=torch.contiguous_format) for name, t in self._tensors().items()}  # of no shared memory
        whole_file.write(path, save(own, metadata))

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file. ValueError naming it and the cause where it is absent, cut, damaged, or no calibration of this version."""
        metadata, tensors = tensor_file.read("calibration", path)
        for name, needed in (("format", (FILE_FORMAT,)), ("version", VERSIONS)):
            if metadata.get(name) not in needed:
                refuse(f"calibration={str(path)!r}: {name}", metadata.get(name), f"{' or '.join(map(repr, needed))} is needed")
        try:
            made = cls(*_parse(metadata, tensors))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"calibration={str(path)!r}: damaged, or no calibration: {error}") from error
        if metadata.get("digest") != made.digest or metadata.get("geometry") != made._geometry_text():
            found = f"its numbers have the digest {made.digest[:16]}, the file says {str(metadata.get('digest'))[:16]}"
            raise ValueError(f"calibration={str(path)!r}: damaged: {found}")
        return made

    def check(self, geometry: Geometry) -> None:
        """ValueError unless it was made for a model of this geometry: as many layers, keys and values in the same ones, the same heads."""
        ours = self.geometry
        if ours.num_layers != geometry.num_layers:
            refuse("calibration", f"made for {ours.num_layers} layers", f"the model has {geometry.num_layers}")
        if ours.heads.keys() != geometry.heads.keys():
            apart = sorted(ours.heads.keys() ^ geometry.heads.keys())
            refuse("calibration", f"keys and values in layers {sorted(ours.heads)}", f"the model differs in layers {apart}")
        for number, heads in geometry.heads.items():
            if heads is not None:
                self.check_layer(number, heads)

    def check_one(self, num_layers: int, heads: Heads) -> None:
        """ValueError unless it was made for a model of so many layers, of which one has these kv heads; the size of values is not compared.
        For engines that make layers before these have their numbers."""
        known = {found[:2] for found in self.geometry.heads.values()}
        if self.num_layers != num_layers:
            refuse("calibration", f"made for {self.num_layers} layers", f"the model has {num_layers}")
        if heads[:2] not in known:
            made = ", ".join(f"{count} of {size}" for count, size in sorted(known))
            refuse("calibration", f"made for kv heads: {made}", f"the model has {heads.num_kv_heads} of {heads.head_size}")

    def check_layer(self, number: int, heads: Heads) -> None:
        """ValueError unless the layer is there, with these heads."""
        if number not in self.layers:
            refuse("calibration.layers", sorted(self.layers), f"layer {number} keeps keys and values and is not among them")
        found = self.layers[number].heads
        if found != heads:
            names = "{} kv heads of {} (values {})".format
            refuse("calibration", f"made for {names(*found)} in layer {number}", f"the model has {names(*heads)}")

    def check_weights(self, found: Mapping[int, torch.Tensor | None]) -> None:
        """ValueError where it was made of another model than samples of weights, by layer, were found in (`weights.check`)."""
        weights.check({number: layer.weights for number, layer in self.layers.items()}, found)

    @deprecated.keywords(offset="key_mean")
    def maps(self, layer: int, fmt: Format, key_mean: bool | None = None) -> LayerMaps:
        """What a layer's writer and readers in format `fmt` take of it: each codec's own matrix, with the key means and with
        the Hessian in mapped space, its mean diagonal 1 for each head. None for a side that has no use for either. Where dimensions of keys
        differ by far about their means (`UNEVEN`), the matrix of a codec that rounds by a Hessian evens them out first.

        key_mean: whether keys are stored without their mean; None: where `gains_from_key_mean`.
        ValueError for a layer that it does not hold, or a head size that the format cannot take.
        """
        known = self._maps
        key = layer, fmt.name, key_mean
        if key not in known:
            if layer not in self.layers:
                refuse("layer", layer, f"the calibration holds layers {sorted(self.layers)}")
            moments = self.layers[layer]
            with_key_mean = gains_from_key_mean(fmt.k) if key_mean is None else key_mean
            given = (moments.key_mean, moments.key_spread) if with_key_mean else ()
            k = _map(fmt.k, moments.key_hessian, *given)
            v = _map(fmt.v, moments.value_hessian)
            known[key] = LayerMaps(k, v, None if k is None and v is None else self.digest)
        return known[key]

    @cached_property
    def _maps(self) -> dict[tuple[int, str, bool | None], LayerMaps]:
        """Those that were asked for: an engine makes many caches of one model."""
        return {}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {f"layers.{number}.{part}": t for number, moments in self.layers.items() for part, t in moments.tensors().items()}

    def _geometry_text(self) -> str:
        heads = {str(number): list(moments.heads) for number, moments in sorted(self.layers.items())}
        geometry = {"num_layers": self.num_layers, "heads": heads, "positions": self.positions}
        return json.dumps(geometry, sort_keys=True)


def _parse(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> tuple[int, dict[int, LayerMoments], dict[str, Any]]:
    """Number of layers, moments and made_of from what a file holds. ValueError, KeyError or TypeError where something is missing."""
    geometry, made_of = (plain_json.parse(text) for text in (metadata["geometry"], metadata.get("made_of", "{}")))
    for name, given in (("geometry", geometry), ("made_of", made_of)):
        instance(name, given, dict, "an object")
    num_layers = geometry["num_layers"]
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, t in tensors.items():
        prefix, number, part = (*name.split(".", 2), "", "")[:3]
        if prefix != "layers" or part not in PARTS or number not in NUMBERS:
            refuse("tensor", name, f"they are named layers.NUMBER and one of {', '.join(PARTS)}")
        parts.setdefault(int(number), {})[PARTS[part]] = t
    return num_layers, {number: LayerMoments(**{"key_mean": None, **given}) for number, given in sorted(parts.items())}, made_of


def gains_from_key_mean(codec: Codec) -> bool:
    """Whether keys in this codec are known to lose less without their mean.

    Those of a codec that stores a row either way do (`Codec.signed`), and so do those of 4 bits and more with a scale for each row: with
    key biases by far. At 2 and 3 bits rows without their mean shrink: a key that matches is scored too low beside full-precision tokens.
    """
    return codec.signed or (codec.row.code_bits >= 4 and bool(codec.row.meta))


def _even(own: LinearMap, spread: torch.Tensor) -> LinearMap:
    """The map behind one that gives each dimension of a head's rows about the same variance, in heads where `spread [HK, D]` is uneven.
    A row has one scale for all dimensions: a few large ones would set it, and what the Hessian saves is lost. Factors are powers of two
    from 1 down (`MapOperands.steps`)."""
    variance = spread.double()
    mean = variance.mean(1, keepdim=True)
    variance = torch.where(mean > 0, variance.clamp(min=SMALLEST_SPREAD * mean), 1.0)
    level = variance.log().mean(1, keepdim=True).exp()
    power = (variance.amin(1, keepdim=True) / variance).log2().div(2).round()  # of the factor
    factor = torch.where(mean > UNEVEN * level, power.clamp(min=math.log2(SMALLEST_STEP)).exp2(), 1.0)
    if bool((factor == 1.0).all()):
        return own
    forward, inverse = own.forward.double() * factor[:, None], own.inverse.double() / factor[:, :, None]
    return LinearMap(forward.float(), inverse.float())


def _map(
    codec: Codec, hessian: torch.Tensor, key_mean: torch.Tensor | None = None, key_spread: torch.Tensor | None = None
) -> LinearMap | None:
    """The codec's own map with what its writer can use of the Hessian `[HK, D, D]`, of the key mean and of the spread about it; None where
    that is nothing."""
    if key_mean is None and codec.encode_in is None:
        return None
    size = hessian.shape[1]
    codec.check_head_size(size)
    own = default_map(codec, size)
    if own is None:
        eye = torch.eye(size, device=hessian.device)[None]
        own = LinearMap(eye, eye)
    mapped = None
    if codec.encode_in is not None:
        own = own if key_spread is None else _even(own, key_spread)
        inverse = own.inverse.double()
        mapped = inverse.mT @ hessian.double() @ inverse
        mean = mapped.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        unread = torch.eye(size, dtype=torch.float64, device=hessian.device)  # of a head that no query reads
        mapped = torch.where(mean > 0, mapped / mean, unread).float()
    return LinearMap(own.forward, own.inverse, None if key_mean is None else key_mean.float(), hessian=mapped)
