"""Pages -> keys and values in rows, one after the other: what dense attention over a stored context reads."""

from __future__ import annotations

import importlib
from functools import lru_cache

import torch

from ..calls import Segment
from ..maps import LinearMap
from .own import has_launches
from .prefill.steps import gain
from .reference.write import apply_map, dequantize


def gather(
    segment: Segment, starts: torch.Tensor, first: torch.Tensor | None, out: tuple[torch.Tensor, torch.Tensor], implementation: str = "auto"
) -> None:
    """Fill `out`, keys `[N, HK, D]` and values `[N, HK, D_V]` (of latents, these and their rotated dimensions): rows starts[s] to before
    starts[s + 1] are those of sequence s at positions first[s] (None: 0), first[s] + 1, .. What is beyond the last row may hold anything.

    implementation: "triton", "reference" or "auto", on a GPU Triton where it serves the call. With Triton nothing waits for the device."""
    if implementation not in ("auto", "triton", "reference"):
        raise ValueError(f"implementation={implementation!r}: one of auto, triton, reference")
    reason = "chosen" if implementation == "reference" else _refusal(segment, implementation)
    if reason is None:
        maps = segment.maps.k, segment.maps.v
        rows = [t if map_ is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t, map_ in zip(out, maps)]
        kernels = importlib.import_module(f"{__package__}.triton.gather")
        kernels.run(segment, starts, first, rows, [1 / gain(map_) for map_ in maps])
        for mapped, map_, target in zip(rows, maps, out):
            if map_ is not None:
                _map_back(mapped, map_, target)
    elif implementation == "triton":
        raise ValueError(f"implementation={implementation!r}: {reason}")
    else:
        _by_slots(segment, starts, first, out)


def _refusal(segment: Segment, implementation: str) -> str | None:
    """Why Triton does not read the rows; None where it does."""
    if implementation == "auto" and not has_launches(segment.k.codes.device):
        return "no GPU with Triton"
    if segment.maps.by_position:
        return "maps.k.key_mean: keys with key means are gathered by the reference alone"
    return importlib.import_module(f"{__package__}.triton.gather").refusal(segment)


def _by_slots(segment: Segment, starts: torch.Tensor, first: torch.Tensor | None, out: tuple[torch.Tensor, torch.Tensor]) -> None:
    starts, size = starts.long(), segment.k.codes.shape[1]
    row = torch.arange(min(int(starts[-1]), len(out[0])), device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    position = row - starts[sequence]
    position = position if first is None else position + first.long()[sequence]
    slots = segment.block_table[sequence, position // size].long() * size + position % size
    for side, codec, map_, target in zip((segment.k, segment.v), (segment.fmt.k, segment.fmt.v), (segment.maps.k, segment.maps.v), out):
        target[: len(row)] = dequantize(side, codec, map_, slots, position)


@lru_cache(maxsize=256)  # by identity
def _back(map_: LinearMap, dtype: torch.dtype) -> torch.Tensor:
    """A^-1 times the gain of A, `[HK or 1, D, D]`: of a Hadamard matrix entries are powers of two, which 16 bits hold."""
    return (map_.operands.output.float() * (map_.operands.inverse_factor * gain(map_))).to(dtype)


def _map_back(rows: torch.Tensor, map_: LinearMap, target: torch.Tensor) -> None:
    """Rows `[N, HK, D]`, over the gain, into target of their shape and dtype."""
    matrix = _back(map_, rows.dtype)
    if rows.shape[1] == 1:
        torch.mm(rows[:, 0], matrix[0].mT, out=target[:, 0])
    else:
        target.copy_(apply_map(matrix, rows))
