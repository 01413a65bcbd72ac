"""Attention over latents: what its launches have beside those of attention over keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton

from ...calls import AttendCall, Segment
from ...maps import LinearMap
from . import launch
from .kernels.latents import attend_latents_kernel, map_rows_kernel
from .kernels.views import Features, LatentTile
from .launch import Target
from .tiling import Tiling

PLACES = ("q.ptr", "q_rope.ptr", "latents.words", "latents.meta", "rope.words", "rope.meta", "rope_map.matrix")
MAP_PLACES = ("rows.ptr", "out.ptr", "map.matrix")
COLUMNS = 128  # of a program that maps rows


def outer_factor(map_: LinearMap) -> float:
    """The part of a map's inverse factor, a power of two, that keeps rows that go through its matrix about as long as they were."""
    return 2.0 ** round(math.log2(map_.operands.inverse_factor) / 2)


def inner_factor(map_: LinearMap) -> float:
    """The rest of the inverse factor."""
    return map_.operands.inverse_factor / outer_factor(map_)


def own_map(call: AttendCall) -> LinearMap | None:
    """The map of a call's latents; None where they are stored as they are."""
    return next((s.maps.k for s in call.segments if s.maps.k is not None), None)


def mapped_apart(call: AttendCall) -> bool:
    """Whether the output is mapped back by a launch of its own: what a matrix of 512 x 512 takes is read once for many rows then."""
    return all(s.maps.k is not None for s in call.segments) and call.options.output_scale is None


def query_parts(call: AttendCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries to the latents, and those to the rotated dimensions: views."""
    q, size = launch.dense_rows(call.q), call.segments[0].stored_sizes[0]
    return q[..., :size], q[..., size:]


def tensors(s: Segment, q: tuple[torch.Tensor, torch.Tensor], mapped: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What stands at PLACES. mapped: the queries to the latents, mapped."""
    matrix = None if s.maps.v is None else s.maps.v.operands.query
    return q[0] if s.maps.k is None else mapped, q[1], s.k.codes, s.k.meta, s.v.codes, s.v.meta, matrix


def attend_launch(
    call: AttendCall,
    s: Segment,
    given: Sequence[torch.Tensor | None],
    tiling: Tiling,
    group: int,
    target: Target,
    shared: dict[str, Any],
    features: Features,
    grid: tuple[int, int],
    places: tuple[str, ...],
) -> launch.Launch:
    """The launch over a segment. given: what stands at PLACES and then at `places`, those of the arguments `shared` with the kernel over
    keys and values. group: heads of a tile."""
    q, q_rope, *_, matrix = given[: len(PLACES)]
    sides = ((s.k, s.fmt.k, None), (s.v, s.fmt.v, s.maps.v))
    views = [launch.pages(side, codec, size) for (side, codec, _), size in zip(sides, s.stored_sizes)]
    exact, lean = call.q.dtype == torch.float32, call.q.dtype if tiling.lean else None
    plans = [
        launch.row_plan(codec, size, map_, side.scale, view, target, exact, lean)
        for (side, codec, map_), size, view in zip(sides, s.stored_sizes, views)
    ]
    factors = [1.0 if m is None else f(m) for m, f in ((s.maps.k, inner_factor), (s.maps.v, _inverse_factor))]
    arguments = {
        "q": launch.rows_view(q),
        "q_rope": launch.rows_view(q_rope),
        "part": shared.pop("part"),
        "lse": shared.pop("lse"),
        "latents": views[0],
        "rope": views[1],
        "rope_map": launch.map_view(matrix),
        **shared,
        "scale": call.scale,
        "latent_scale": s.k.scale * factors[0],
        "rope_scale": s.v.scale * factors[1],
        "T": LatentTile(group, tiling.parts, s.k.codes.shape[1], tiling.block_m, tiling.block_n),
        "K": plans[0],
        "R": plans[1],
        "F": features,
    }
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    return launch.Launch(attend_latents_kernel, grid, arguments, options, (*PLACES, *places))


def _inverse_factor(map_: LinearMap) -> float:
    return map_.operands.inverse_factor


def map_launch(rows: torch.Tensor, out: torch.Tensor, matrix: torch.Tensor, factor: float, heads: int, target: Target) -> launch.Launch:
    """The launch of rows `[T, HQ, D]` through the map of each of `heads` kv heads, times factor."""
    tokens, num_heads, head_size = rows.shape
    count = tokens * (num_heads // heads)
    block = 16 if count <= 16 * target.processors else 64
    arguments = {
        "rows": launch.rows_view(rows),
        "out": launch.rows_view(out),
        "map": launch.map_view(matrix),
        "num_rows": count,
        "factor": factor,
        "GROUP": num_heads // heads,
        "D": head_size,
        "BLOCK_M": block,
        "WIDTH": COLUMNS,
        "PRECISION": target.precision,
    }
    grid = (triton.cdiv(count, block), triton.cdiv(head_size, COLUMNS), heads)
    return launch.Launch(map_rows_kernel, grid, arguments, {"num_warps": 4}, MAP_PLACES)
