"""Where the time of a step goes on the GPU, by torch's profiler: what the kernels of CUDA graphs do is known by their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

KINDS = {  # parts of the names of kernels; the first kind that has one takes a kernel
    "writes": ("reshape_and_cache", "write_kernel", "write_given_kernel", "round_kernel", "trellis_kernel"),
    "attention": (
        *("flash", "prepare_varlen", "decode_kernel", "decode_wgmma_kernel", "attend_kernel", "attend_latents_kernel", "combine"),
        *("prefill_kernel", "gather_kernel", "gather_rows_kernel", "patch_kernel", "fold_kernel"),
        *("map_rows_kernel", "round_keys_kernel", "round_queries_kernel", "sample_mean_kernel"),
    ),
    "places of rows": ("doubt_kernel", "claim_kernel", "take_kernel", "lay_out_kernel", "note_kernel", "own_rows_kernel"),
    "products": ("gemm", "nvjet", "cutlass", "splitk", "gemv", "cublas"),
    "between products": ("rms_norm", "rotary", "act_and_mul"),
    "copies": ("memcpy", "memset"),
}
REST = "others"  # samplers, and what prepares a step
NAMED = 12  # kernels that are named, the longest first


def kind(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts)), REST)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of the time lies in one of these intervals at least: kernels run beside each other."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def summary(kernels: list[tuple[str, float, float]], steps: int) -> dict:
    """Milliseconds of a step in which a kernel ran at least, and one of each kind, of kernels (name, start and end in microseconds): kinds
    may run beside each other. Of the longest kernels, milliseconds and launches of a step: one may wait for another."""
    of_kinds, named = defaultdict(list), defaultdict(list)
    for name, start, end in kernels:
        of_kinds[kind(name)].append((start, end))
        named[name].append(end - start)
    a_step = lambda microseconds: round(microseconds / steps / 1e3, 3)
    longest = sorted(named.items(), key=lambda item: -sum(item[1]))[:NAMED]
    return {
        "busy_ms": a_step(covered((start, end) for _, start, end in kernels)),
        "of_kinds_ms": {kind: a_step(covered(times)) for kind, times in of_kinds.items()},
        "longest": [(name[:80], a_step(sum(times)), len(times) / steps) for name, times in longest],
    }


def of_steps(engine, steps: int = 6) -> dict:
    """`summary` of the engine's next steps."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return summary([(e.name, e.time_range.start, e.time_range.end) for e in on_gpu], steps)
