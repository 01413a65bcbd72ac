"""16-bit copies among rows that are read back from pages."""

from __future__ import annotations

from typing import Any

import torch

from .cache import PagedCache


def put_copies(
    copies: PagedCache, step: Any, starts: torch.Tensor, first: torch.Tensor | None, out: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Put the copies of tokens that a step, a `FullPrecisionStep`, reads at full precision in the place of their rows in `out`, which are
    laid out as `PagedCache.gather` says by starts and first. Nothing waits for the device."""
    (recent, key_start), sink = step.recent, None if step.sink is None else step.sink[0]
    table, sinks = (recent, 0) if sink is None else (torch.cat([sink, recent], 1), sink.shape[1])
    size, (sequences, pages), device = copies.spec.block_size, table.shape, table.device
    width = pages * size  # tokens of a sequence that may have copies
    held = tuple(rows.new_empty(sequences * width, *rows.shape[1:]) for rows in out)
    copies.gather(table, torch.arange(sequences + 1, device=device) * width, held)
    row, starts = torch.arange(len(out[0]), device=device), starts.long()
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp_max(sequences - 1)
    position = row - starts[sequence] + (0 if first is None else first[sequence])
    begin, end = (t[sequence] for t in step.between.unbind(1))
    exact = ((position < begin) | (position >= end)) & (row < starts[-1])
    at = torch.where(position < begin, position, sinks * size + position - key_start[sequence]).clamp(0, width - 1)
    for rows, copied in zip(out, held):
        rows.copy_(torch.where(exact[:, None, None], copied[sequence * width + at], rows))
