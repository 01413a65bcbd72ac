"""Which keys a call of attention can read, worked out on the host: intervals of positions, for the checks and the reference's plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .options import AttentionOptions


def window_size(options: AttentionOptions) -> tuple[int, int]:
    """The sliding window and the chunk that the options ask for, in tokens; 0 for none. At most one of them is not 0."""
    if options.chunk_lookback >= 0:
        return 0, options.window // (options.chunk_lookback + 1)
    return options.window, 0


def key_intervals(
    options: AttentionOptions, queries: Sequence[int], keys: Sequence[int], key_range: torch.Tensor | None = None
) -> list[list[tuple[int, int]]]:
    """For each sequence, the positions `(low, high)`, high not included, outside of which none of its queries sees a key.

    queries, keys: of each sequence. key_range: of a segment, which cuts them."""
    window, chunk = window_size(options)
    causal = [options.causal] * len(keys) if isinstance(options.causal, bool) else options.causal.tolist()
    ranges = [[]] * len(keys) if options.prefix_ranges is None else options.prefix_ranges.tolist()
    cuts = [(0, length) for length in keys] if key_range is None else key_range.tolist()
    found = []
    for count, length, behind, prefixes, (start, stop) in zip(queries, keys, causal, ranges, cuts):
        first, last, low = length - count, length - 1, 0
        back = max(first - options.window + 1, 0) if options.clamp_prefix_to_window and options.window else 0
        if chunk:
            low = max(first // chunk - options.chunk_lookback, 0) * chunk
        elif window:
            low = max(first - window + 1, 0)
        # Nobody sees past the last query but where not causal, and there the window reaches to the right as well.
        high = length if behind or not window else min(length, last + window)
        intervals = [(low, high)] if count else []
        for begin, end in prefixes if count else ():
            if begin < end and begin <= last and end >= first:
                intervals.append((max(begin, back), end + 1))
        stop = min(stop, length)
        clipped = [(max(low, start, 0), min(high, stop)) for low, high in intervals]
        found.append([(low, high) for low, high in clipped if low < high])
    return found
