"""Rows of pages, one after the other, by the Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...calls import Segment

try:
    import triton
except ImportError:  # `refusal` says so
    triton = None
else:
    from . import launch
    from .kernels.gather import gather_rows_kernel


def refusal(segment: Segment) -> str | None:
    """Why `run` cannot read a segment; None where it can."""
    if triton is None:
        return "the package triton is missing: pip install 'quantkv[triton]'"
    return launch.refusal(segment.k.codes.device, ((segment.k, segment.fmt.k), (segment.v, segment.fmt.v)))


def run(segment: Segment, starts: torch.Tensor, first: torch.Tensor | None, out: Sequence[torch.Tensor], factors: Sequence[float]) -> None:
    """Rows of K and of V, in their mapped space, times a factor each, into `out`: two tensors `[N, HK, D]`, whose last axes are dense."""
    device, heads, rows = segment.k.codes.device, out[0].shape[1], out[0].shape[0]
    if not rows or len(starts) < 2:
        return
    target, table = launch.Target.of(device), segment.block_table
    table = table if table.stride(1) == 1 else table.contiguous()
    sides = ((segment.k, segment.fmt.k), (segment.v, segment.fmt.v))
    views = [launch.pages(side, codec, t.shape[2]) for (side, codec), t in zip(sides, out)]
    plans = [
        launch.row_plan(codec, t.shape[2], None, side.scale, view, target, exact=t.dtype == torch.float32)
        for (side, codec), t, view in zip(sides, out, views)
    ]
    block = 16 if max(t.shape[2] for t in out) > 256 else 32
    with launch.on_device(device):
        gather_rows_kernel[(triton.cdiv(rows, block), heads, 2)](
            *views,
            starts.contiguous(),
            launch.dense(first),
            table,
            table.stride(0),
            *map(launch.rows_view, out),
            len(starts) - 1,
            rows,
            *(side.scale * factor for (side, _), factor in zip(sides, factors)),
            PAGE=segment.k.codes.shape[1],
            BLOCK_N=block,
            K=plans[0],
            V=plans[1],
            num_warps=4,
        )
