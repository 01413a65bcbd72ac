"""Queries and keys of a round as 8-bit integers for Hopper's kernel: three small launches before it.

They read queries and keys once, and 1,024 keys of each head once more, and write half as many bytes: of one prompt of 32,768 tokens with 32
query and 8 kv heads of 128 0.5 GB.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton

from ..hopper.prefill import EightBitRows
from ..reference.eight_bit import LARGEST, SAMPLE, SMALLEST
from ..triton import launch
from .eight_bit_kernels import round_keys_kernel, round_queries_kernel, sample_mean_kernel
from .plan import Round

BLOCK = 64  # queries, and sampled keys, of a program at a time


def rounded(
    q: torch.Tensor, k: torch.Tensor, round: Round, ends: Sequence[torch.Tensor], block: int, kept: dict[Hashable, Any] | None = None
) -> EightBitRows:
    """Queries `[M, HQ, D]` and keys `[HK, N, D]` of a round, whose last axes are dense. ends: `Round.ends` on the device. block: keys that
    share a scale. kept: launches for the next call with the round."""
    (tokens, num_heads, size), (heads, num_rows, _), sequences = q.shape, k.shape, len(round.reads)
    codes, key_codes = (torch.empty(t.shape, dtype=torch.int8, device=q.device) for t in (q, k))
    means = q.new_empty(sequences, heads, size, dtype=torch.float32)
    scales, added = q.new_empty(2, tokens, num_heads, dtype=torch.float32)
    key_scales = q.new_empty(heads, num_rows, dtype=torch.float32)
    queries, rows, used = ends
    width = triton.next_power_of_2(size)
    integers = {"LARGEST": LARGEST, "SMALLEST": SMALLEST}
    keys = {"keys": k, "key_head": k.stride(0), "key_row": k.stride(1), "rows": rows, "used": used, "means": means}
    _launch(
        sample_mean_kernel,
        (sequences, heads),
        {**keys, "num_heads": heads, "D": size, "WIDTH": width, "SAMPLE": SAMPLE, "BLOCK": BLOCK},
        (round, kept),
    )
    shape = {"codes": key_codes, "scales": key_scales, "num_rows": num_rows, "num_heads": heads, "D": size, "WIDTH": width}
    _launch(
        round_keys_kernel,
        (triton.cdiv(round.longest[1], block), sequences, heads),
        {**keys, **shape, **integers, "BLOCK": block, "ROOM": triton.next_power_of_2(block)},
        (round, kept),
    )
    rows_of = {"q": q, "q_token": q.stride(0), "q_head": q.stride(1), "queries": queries, "means": means}
    shape = {"codes": codes, "scales": scales, "added": added, "D": size, "WIDTH": width, "HEADS": num_heads, "GROUP": num_heads // heads}
    _launch(
        round_queries_kernel,
        (triton.cdiv(round.longest[0], BLOCK), sequences, num_heads),
        {**rows_of, **shape, **integers, "BLOCK": BLOCK},
        (round, kept),
    )
    return EightBitRows(codes, scales, added, key_codes, key_scales)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], of: tuple[Round, dict[Hashable, Any] | None]) -> None:
    """Launch a kernel, again where the round's plan has kept its launch."""
    round, kept = of
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    others = tuple((name, n) for name, n in arguments.items() if name not in tensors)
    key = (round, kernel.__name__, others, *(t.dtype for t in tensors.values()))
    make = lambda: launch.Launch(kernel, grid, arguments, {"num_warps": 8, "enable_fp_fusion": False}, tuple(tensors))
    launch.launch_kept(kept, key, next(iter(tensors.values())).device, list(tensors.values()), make)
