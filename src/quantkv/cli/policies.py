"""What is evaluated: formats, policies, calibrations and full-precision tokens, by name, and what each takes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..full_precision import BLOCK_SIZE, FullPrecisionTokens
from .common import caches_of, formats_of

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..geometry import Geometry
    from ..policy import Policy
    from ..spec import CacheSpec


@dataclass(frozen=True)
class Size:
    """What a policy takes at a context: bytes a token over all layers, and of one layer's token and kv head on average; with exact
    tokens at their share. elements: K and V of a token."""

    bytes_per_token: float
    bytes_per_head: float
    elements: int

    @property
    def bits_per_element(self) -> float:
        """Bits of a number of K or V, metadata and full-precision tokens included."""
        return 8 * self.bytes_per_token / self.elements

    @classmethod
    def of(cls, specs: dict[int, CacheSpec], full_precision: FullPrecisionTokens | None, sliding: set[int], context: int) -> Size:
        """specs: of the quantized layers, by number. sliding: layers with a window, which keep no full-precision sink tokens."""
        heads = sum(spec.num_kv_heads for spec in specs.values())
        total = sum(
            spec.bytes_per_token + 2 * spec.elements_per_token * full_precision_share(full_precision, context, number in sliding)
            for number, spec in specs.items()
        )
        return cls(total, total / heads, sum(spec.elements_per_token for spec in specs.values()))


def full_precision_share(full_precision: FullPrecisionTokens | None, context: int, sliding: bool = False) -> float:
    """Tokens with a 16-bit copy, of those of a context, on average over where the latest page ends."""
    if full_precision is not None and sliding:
        full_precision = full_precision.without_sink()
    return 0.0 if full_precision is None else full_precision.share(context, BLOCK_SIZE)


def full_precision_of(given: str | None) -> FullPrecisionTokens | None:
    """`--full-precision SINK,RECENT`. ValueError for anything but two numbers of tokens."""
    if given is None:
        return None
    words = given.split(",")
    if len(words) != 2 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--full-precision {given}: two numbers of tokens are needed, the sink and the recent ones, such as 16,24")
    sink, recent = map(int, words)
    return FullPrecisionTokens(sink, recent) if sink or recent else None


def policies_of(kv: str, calibration: Path | None = None, full_precision: str | None = None) -> dict[str, Policy]:
    """Policies of `--kv A,4bit,FILE.json` by the names that tables show: formats, of which "all" stands for every one, presets and files.

    calibration, full_precision: of the formats; a policy brings its own. ValueError for names, files and numbers that are wrong, and where
    two have one name.
    """
    from ..policy import Policy

    given, files = caches_of(kv)
    formats = formats_of(",".join(given)) if given or not files else []
    if not formats and (calibration is not None or full_precision is not None):
        raise ValueError(f"--kv {kv}: a policy brings its own; --calibration and --full-precision are of formats, such as --kv levels4")
    tokens, moments = full_precision_of(full_precision), None if calibration is None else load_calibration(calibration)
    ending = ("" if moments is None else " cal") + ("" if tokens is None else f" +{tokens.sink},{tokens.recent}")
    guides = {name: value for name, value in (("calibration", moments), ("full_precision", tokens)) if value is not None}
    named = [(name + ending, Policy(name, **guides)) for name in formats]
    for file in files:
        try:
            named.append((Path(file).stem, Policy.given(file)))
        except ValueError as error:
            raise ValueError(f"--kv: {error}") from error
    policies: dict[str, Policy] = {}
    for name, policy in named:
        if name in policies:
            raise ValueError(f"--kv: {name!r} is named twice")
        policies[name] = policy
    return policies


def one_policy(kv: str, calibration: Path | None = None, full_precision: str | None = None) -> tuple[str, Policy]:
    """The one policy of `--kv FORMAT|FILE.json`, and its name. ValueError as of `policies_of`, and for several."""
    policies = policies_of(kv, calibration, full_precision)
    if len(policies) > 1:
        raise ValueError(f"--kv {kv}: one name is needed, not {len(policies)}")
    return next(iter(policies.items()))


def load_calibration(file: Path) -> Calibration:
    """The calibration of `--calibration FILE`. ValueError that names the option."""
    from ..calibration import Calibration

    try:
        return Calibration.load(file)
    except ValueError as error:
        raise ValueError(f"--calibration: {error}") from error


def fitting(policies: Mapping[str, Policy], config: Any, strict: bool) -> tuple[dict[str, Policy], dict[str, str]]:
    """The policies that a model of this configuration can take, by name, and the reasons of the others; ValueError for the first of them
    if `strict`."""
    from ..integrations.transformers_model import geometry_of

    kept, reasons, geometry = {}, {}, geometry_of(config)
    for name, policy in policies.items():
        try:
            check(policy, geometry)
            kept[name] = policy
        except ValueError as error:
            if strict:
                raise ValueError(f"{name}: {error}") from error
            reasons[name] = str(error)
    return kept, reasons


def check(policy: Policy, geometry: Geometry) -> None:
    """ValueError where a policy is of another geometry than the model: layers, heads, sizes that its formats cannot take."""
    policy.check(geometry.num_layers)
    for layer, heads in geometry.heads.items():
        if heads is None:
            continue
        policy.of(layer).cache_spec(*heads)
        maps = policy.maps.get(layer)
        for side, map_, size in () if maps is None else (("k", maps.k, heads.head_size), ("v", maps.v, heads.head_size_v)):
            if map_ is not None:
                map_.check(size, heads.num_kv_heads, side)
    if policy.calibration is not None:
        policy.calibration.check(geometry)
