"""Calls as tensors, numbers and strings, which is what a `torch.library` operator takes, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .calls import AttentionOptions, Segment, Side
from .format import Format, get_format
from .maps import LayerMaps

OPTION_TENSORS = ("sinks", "alibi_slopes", "qq_bias", "prefix_ranges")


def flatten_cache(k: Side, v: Side) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors, and where the views lie in the one that is their base; no layout without a base."""
    if k.base is not None and k.base is v.base:
        return [k.base], [*k.layout, *v.layout]
    return [t for t in (k.codes, k.meta, v.codes, v.meta) if t is not None], []


def unflatten_cache(tensors: list[torch.Tensor], layout: list[int], fmt: Format, scales: list[float]) -> tuple[Side, Side]:
    dtypes = [(c.code_dtype, getattr(torch, c.row.meta[0]) if c.row.meta else None) for c in (fmt.k, fmt.v)]
    base = tensors[0]
    if layout:
        flat = base.reshape(-1)
        tensors = [
            flat.view(dtype).as_strided(layout[9 * i : 9 * i + 4], layout[9 * i + 4 : 9 * i + 8], layout[9 * i + 8])
            for i, dtype in enumerate(d for pair in dtypes for d in pair if d is not None)
        ]
    left = iter(tensors)
    sides = (Side(next(left), next(left) if meta else None, scale) for (_, meta), scale in zip(dtypes, scales))
    return tuple(side.in_storage_of(base) if layout else side for side in sides)


def flatten_segments(segments: Sequence[Segment]):
    caches, layouts, tables, maps, factors = [], [], [], [], []
    for s in segments:
        tensors, layout = flatten_cache(s.k, s.v)
        caches += tensors
        layouts += [len(tensors), len(layout), *layout]
        tables += [s.block_table, s.key_start, s.key_range]
        tensors, numbers = s.maps.flatten()
        maps += tensors
        factors += [*numbers, s.k.scale, s.v.scale]
    return caches, layouts, tables, maps, factors, ";".join([s.fmt.name for s in segments])


def unflatten_segments(caches, layouts, tables, maps, factors, formats) -> list[Segment]:
    segments = []
    for i, name in enumerate(formats.split(";")):
        (num_tensors, num_ints), layouts = layouts[:2], layouts[2:]
        fmt, table, numbers = get_format(name), tables[3 * i : 3 * i + 3], factors[6 * i : 6 * i + 6]
        k, v = unflatten_cache(caches[:num_tensors], layouts[:num_ints], fmt, numbers[4:])
        caches, layouts = caches[num_tensors:], layouts[num_ints:]
        segments.append(Segment(k, v, fmt, table[0], LayerMaps.unflatten(maps[16 * i : 16 * i + 16], numbers[:4]), *table[1:]))
    return segments


def flatten_options(o: AttentionOptions):
    causal = None if isinstance(o.causal, bool) else o.causal
    tensors = [causal, *[getattr(o, name) for name in OPTION_TENSORS]]
    return (
        tensors,
        [o.causal is True, o.alibi_sqrt, o.clamp_prefix_to_window],
        o.window,
        o.chunk_lookback,
        float(o.softcap),
        o.output_scale,
    )
