"""Calls as tensors, numbers and strings, which is what a `torch.library` operator takes, and back: loops over their fields."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from .calls import AttentionOptions, PagedTensor, Segment
from .format import Format, get_format
from .maps import LayerMaps

Caches = tuple[list[torch.Tensor], list[int], list[torch.Tensor | None], list[torch.Tensor | None], list[float], str]


def flatten_cache(k: PagedTensor, v: PagedTensor) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors, and where the views lie in the one that is their base; no layout without a base."""
    if k.base is not None and k.base is v.base:
        return [k.base], [*k.layout, *v.layout]
    return [t for t in (k.codes, k.meta, v.codes, v.meta) if t is not None], []


def unflatten_cache(tensors: list[torch.Tensor], layout: list[int], fmt: Format, scales: list[float]) -> tuple[PagedTensor, PagedTensor]:
    """K and V of the tensors and numbers that `flatten_cache` made."""
    dtypes = [(c.code_dtype, getattr(torch, c.row.meta[0]) if c.row.meta else None) for c in (fmt.k, fmt.v)]
    base = tensors[0]
    if layout:
        storage = base.untyped_storage()  # an engine's pages need not be one run: no view of base reaches all of them
        tensors = [
            torch.empty(0, dtype=dtype, device=base.device).set_(
                storage, layout[9 * i + 8], layout[9 * i : 9 * i + 4], layout[9 * i + 4 : 9 * i + 8]
            )
            for i, dtype in enumerate(d for pair in dtypes for d in pair if d is not None)
        ]
    left = iter(tensors)
    sides = (PagedTensor(next(left), next(left) if meta else None, scale) for (_, meta), scale in zip(dtypes, scales))
    return tuple(side.in_storage_of(base) if layout else side for side in sides)


def flatten_segments(segments: Sequence[Segment]) -> Caches:
    """Segments as lists of tensors, integers and floats and the names of their formats, which an operator takes."""
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


def unflatten_segments(caches, layouts, tables, maps, factors, formats) -> tuple[Segment, ...]:
    """The segments that `flatten_segments` took apart."""
    segments, names = [], formats.split(";")
    num_maps, num_factors = len(maps) // len(names), len(factors) // len(names)
    for i, name in enumerate(names):
        (num_tensors, num_ints), layouts = layouts[:2], layouts[2:]
        fmt, table, numbers = get_format(name), tables[3 * i : 3 * i + 3], factors[num_factors * i : num_factors * (i + 1)]
        k, v = unflatten_cache(caches[:num_tensors], layouts[:num_ints], fmt, numbers[-2:])
        caches, layouts = caches[num_tensors:], layouts[num_ints:]
        layer = LayerMaps.unflatten(maps[num_maps * i : num_maps * (i + 1)], numbers[:-2])
        segments.append(Segment(k, v, fmt, table[0], layer, *table[1:]))
    return tuple(segments)


def flatten_options(options: AttentionOptions) -> tuple[list[torch.Tensor | None], str]:
    """A place for each field, None where it holds no tensor; and the others, by name."""
    values = [getattr(options, f.name) for f in fields(options)]
    tensors = [value if isinstance(value, torch.Tensor) else None for value in values]
    others = [f"'{f.name}': {value!r}" for f, value in zip(fields(options), values) if not isinstance(value, torch.Tensor)]
    return tensors, "{" + ", ".join(others) + "}"


def unflatten_options(tensors: list[torch.Tensor | None], others: str) -> AttentionOptions:
    """The options that `flatten_options` took apart."""
    given: dict[str, Any] = {f.name: t for f, t in zip(fields(AttentionOptions), tensors) if t is not None}
    return AttentionOptions(**given, **ast.literal_eval(others))
