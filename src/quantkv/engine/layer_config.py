"""How one layer of a model is stored on one rank: the one place where that is worked out of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..calibration import Calibration
from ..checks import ROW_DTYPES
from ..format import Format
from ..formats import get_format
from ..full_precision import FullPrecisionTokens
from ..geometry import Heads
from ..maps import LayerMaps
from ..policy import Policy

PLAIN = [get_format("none", dtype) for dtype in ROW_DTYPES]
UNQUANTIZED = frozenset(fmt.name for plain, dtype in zip(PLAIN, ROW_DTYPES) for fmt in (plain, plain.latents(dtype)))  # rows as they are


@dataclass(frozen=True)
class Shard:
    """One rank of a tensor-parallel group. rank: its number. size: ranks of the group."""

    rank: int = 0
    size: int = 1

    def all_kv_heads(self, own: int, of_model: Callable[[], int]) -> int:
        """Kv heads of all ranks, of which this one has `own`; where each has one, several may hold the same of those of the model."""
        return own * self.size if own > 1 or self.size == 1 else of_model()

    def maps(self, maps: LayerMaps, heads: Heads, num_kv_heads: int) -> LayerMaps:
        """The maps of the kv heads that this rank holds, of those of the layer. heads: of the layer. num_kv_heads: of this rank.

        ValueError where a map is of other heads."""
        sides = {}
        for side, head_size in (("k", heads.head_size), ("v", heads.head_size_v)):
            map_ = getattr(maps, side)
            if map_ is not None:
                map_.check(head_size, heads.num_kv_heads, side)
                total = map_.num_heads
                start = self.rank * total // self.size  # fewer heads than ranks: several hold the same
                map_ = map_.heads(start, start + num_kv_heads) if total > 1 else map_
            sides[side] = map_
        return replace(maps, **sides)


@dataclass(frozen=True)
class LayerConfig:
    """How one layer's rows are stored on one rank.

    format: of its pages. maps: for the kv heads of this rank; a side that is None is as the format asks. full_precision: tokens with 16-bit
    copies; None: it has none. A layer's may be replaced until it stores its first row.
    """

    format: Format
    maps: LayerMaps = LayerMaps()
    full_precision: FullPrecisionTokens | None = None

    @classmethod
    def of(
        cls,
        policy: Policy,
        number: int,
        dtype: torch.dtype,
        heads: Heads | None = None,
        total_kv_heads: int | None = None,
        shard: Shard = Shard(),
        by_position: bool = False,
    ) -> LayerConfig:
        """What a policy says of layer `number`.

        dtype: what format "none" stores. heads: of this rank; None: they are not known yet, and the rank holds all. total_kv_heads: of all
        ranks; None: those of heads. by_position: see `full_precision_tokens`.
        ValueError where its calibration or its maps are of other heads.
        """
        whole = heads and heads._replace(num_kv_heads=total_kv_heads or heads.num_kv_heads)
        if whole is not None and policy.calibration is not None:
            policy.calibration.check_layer(number, whole)
        fmt, maps = policy.of(number, dtype), policy.maps_of(number)
        maps = maps if whole is None else shard.maps(maps, whole, heads.num_kv_heads)
        return cls(fmt, maps, full_precision_tokens(policy.full_precision, by_position, fmt))

    def scales(self, k: float | None, v: float | None) -> tuple[float, float]:
        """A checkpoint's scales of K and V as pages take them: 1.0 where it has none, or where the side's codec has none a tensor."""
        return tuple(1.0 if s is None or not codec.scaled_per_tensor else s for s, codec in zip((k, v), (self.format.k, self.format.v)))

    def with_calibration(self, calibration: Calibration, number: int) -> LayerConfig:
        """The same with the maps of layer `number` of a calibration of this rank's heads, on the sides that have no map of their own."""
        made, own = calibration.maps(number, self.format), self.maps
        k, v = made.k if own.k is None else own.k, made.v if own.v is None else own.v
        return replace(self, maps=LayerMaps(k, v, made.calibration))

    def with_format(self, fmt: Format, tokens: FullPrecisionTokens | None) -> LayerConfig:
        """The same in another format, where the layer's kind keeps `tokens` at full precision."""
        return replace(self, format=fmt, full_precision=full_precision_tokens(tokens, fmt=fmt))


def full_precision_tokens(
    tokens: FullPrecisionTokens | None, by_position: bool = False, fmt: Format | None = None
) -> FullPrecisionTokens | None:
    """The tokens of a policy that a layer keeps at full precision; None: none.

    by_position: whether its window moves on or its keys stand where they stand: then it keeps no first tokens. fmt: of its pages; rows
    that are kept as they are need no copies.
    """
    if tokens is None or (fmt is not None and fmt.name in UNQUANTIZED):
        return None
    return tokens.without_sink() if by_position else tokens
