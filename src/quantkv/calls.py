"""What write and attend are given: a cache's sides, the options of attention, the segments of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .format import Format
from .maps import LayerMaps


class Side(NamedTuple):
    """K or V of a paged cache, as strided views.

    codes: `[num_blocks, block_size, HK, code_bytes]` of the codec's code dtype.
    meta: `[num_blocks, block_size, HK, fields]` float32 or float16, None for a codec without metadata.
    scale: per-tensor scale, a float: rows are divided by it before they are encoded.
    base, layout: `in_storage_of` fills them in, for what needs the one buffer that a side is a view of: the Hopper kernel, and
        torch.compile, which cannot follow writes to views of one storage that differ in dtype.
    """

    codes: torch.Tensor
    meta: torch.Tensor | None = None
    scale: float = 1.0
    base: torch.Tensor | None = None
    layout: tuple[int, ...] = ()

    def in_storage_of(self, base: torch.Tensor) -> Side:
        """The same side, known as views of the storage that uint8 tensor `base` begins: shape, strides and offset of each."""
        views = [t for t in (self.codes, self.meta) if t is not None]
        return self._replace(base=base, layout=tuple(n for t in views for n in (*t.shape, *t.stride(), t.storage_offset())))


@dataclass(frozen=True)
class AttentionOptions:
    """Every option of attention; the defaults are plain causal attention. Sequence s has L keys and n queries; query i
    stands at position `L - n + i`.

    causal: a bool, or bool `[S]`: key j <= position.
    window: > 0: `position - j < window`, where not causal also `j - position < window`. 0: no window.
    chunk_lookback: >= 0: instead of the window, `position // size - j // size <= chunk_lookback` with
        `size = window // (chunk_lookback + 1)`.
    softcap: > 0: `softcap * tanh(score / softcap)`.
    sinks: float `[HQ]`: one more term `exp(sink)` in the denominator.
    alibi_slopes: float `[HQ]`: `score += slope * (j - (L - n))`, with alibi_sqrt `slope * -sqrt(position - j)`.
    qq_bias: float `[Q, Q]`: `score += qq_bias[i, j - (L - n)]` between the queries of this call.
    prefix_ranges: int `[S, R, 2]`, inclusive: query and key inside one range see each other, whatever the mask says;
        unused where start >= end. clamp_prefix_to_window: not further back than the window.
    output_scale: the output is `clamp(out / output_scale, -448, 448)` as float8_e4m3fn.
    key_start: int `[S]`: position of the key in the first slot; 0 if None.
    key_range: int `[S, 2]`: only positions from start to before end are read; all below L if None.
    """

    causal: bool | torch.Tensor = True
    window: int = 0
    chunk_lookback: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    alibi_sqrt: bool = False
    qq_bias: torch.Tensor | None = None
    prefix_ranges: torch.Tensor | None = None
    clamp_prefix_to_window: bool = False
    output_scale: float | None = None
    key_start: torch.Tensor | None = None
    key_range: torch.Tensor | None = None


class Memo(dict):
    """What the layers of one forward pass have in common, worked out for the first of them.

    Make one for each forward pass: all calls that share it have the same slots, block table, lengths and options; only sinks,
    alibi_slopes, qq_bias and softcap may differ.
    """

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self:
            self[key] = make()
        return self[key]

    def scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialized memory that the next call hands out again: fresh pages cost more than what is written to them."""
        size = math.prod(shape)
        held = self.get((dtype, device))
        if held is None or len(held) < size:
            held = self[dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)


class Segment(NamedTuple):
    """Some of the keys of every sequence, in one cache: `key_start` and `key_range` (as in `AttentionOptions`) say which."""

    k: Side
    v: Side
    fmt: Format
    block_table: torch.Tensor
    maps: LayerMaps
    key_start: torch.Tensor | None = None
    key_range: torch.Tensor | None = None
