"""What the reference's attention reads: tiles of sequences and queries, which keys they see, in which pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...calls import AttendCall, AttentionOptions, Segment
from ...reads import window_size

TILE_ELEMENTS = 1 << 20  # scores of a tile of attend: temporaries that stay in a processor's cache


class Tile(NamedTuple):
    """Queries [S, M] of some sequences: padded to the longest."""

    seqs: slice
    queries: range  # M indices of queries within their sequences
    contexts: list[int]  # S positions of query 0
    seq_lens: list[int]  # S
    token: torch.Tensor | slice  # [S, M] row of q; a slice where no query is padding
    real: torch.Tensor | None  # [S, M] False for padding; None where there is none
    num_keys: int  # slots to look at: as far as any of the queries may see
    whole: bool  # one query a sequence, which sees all of them: no mask is needed

    def take(self, q: torch.Tensor) -> torch.Tensor:
        """The tile's rows of `q [T, HQ, D]`: `[S, M, HQ, D]`."""
        return q[self.token].unflatten(0, (-1, len(self.queries))) if self.real is None else q[self.token]

    def put(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows [S, M, ..]` to their places in `out [T, ..]`."""
        if self.real is None:
            out[self.token] = rows.flatten(0, 1)
        else:
            out[self.token[self.real]] = rows[self.real]

    def column(self, values: list[int], device: torch.device) -> torch.Tensor:
        """A number for each sequence, `[S, 1, 1]`."""
        return torch.tensor(values, device=device)[:, None, None]


class TileRead(NamedTuple):
    """A tile and what it reads of one segment."""

    tile: Tile
    seen: torch.Tensor | None  # [S, M, N] which keys each query sees; None: all
    used: torch.Tensor | None  # [S, pages, block_size] slots that any query sees; None: all
    pages: torch.Tensor | slice  # what to index the pages with


def _tiles(call: AttendCall, segment: Segment) -> Iterator[Tile]:
    """Cut the batch so that neither the scores nor the gathered rows of a tile pass TILE_ELEMENTS."""
    q, options, batch = call.q, call.options, call.batch
    starts, lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    first_key = [0] * len(lens) if segment.key_start is None else segment.key_start.tolist()
    past_key = lens if segment.key_range is None else segment.key_range[:, 1].tolist()
    slots = [max(min(n, past) - first, 0) for n, past, first in zip(lens, past_key, first_key)]
    heads, width = q.shape[1], segment.k.codes.shape[2] * q.shape[2]
    unmasked = isinstance(options.causal, bool) and not options.window and options.prefix_ranges is segment.key_range is None
    behind = options.causal is True and options.prefix_ranges is None  # no query sees past its own position
    s = 0
    while s < len(lens):
        e, most_keys, most_q = s, 0, 0
        while e < len(lens):
            keys, queries = max(most_keys, slots[e], 1), max(most_q, starts[e + 1] - starts[e])
            if e > s and (e + 1 - s) * keys * max(width, heads * queries) > TILE_ELEMENTS:
                break
            most_keys, most_q, e = keys, queries, e + 1
        step = max(1, TILE_ELEMENTS // ((e - s) * heads * most_keys))
        counts = [starts[i + 1] - starts[i] for i in range(s, e)]
        even = min(counts) == most_q  # then q's rows of these sequences form a rectangle
        whole = unmasked and even and most_q == 1 and min(slots[s:e]) == most_keys
        contexts = [length - count for length, count in zip(lens[s:e], counts)]
        for first in range(0, most_q, step):
            queries = range(first, min(first + step, most_q))
            if even and (e - s == 1 or len(queries) == most_q):
                token, real = slice(starts[s] + first, starts[e] - (most_q - queries.stop)), None
            else:
                index = torch.arange(first, queries.stop, device=q.device)
                token = (batch.cu_seqlens_q[s:e, None].long() + index).clamp_max(q.shape[0] - 1)
                real = index < torch.tensor(counts, device=q.device)[:, None]
            later = [max(count - queries.stop, 0) if behind else 0 for count in counts]
            seen_until = (min(n - ahead, past) - low for n, ahead, past, low in zip(lens[s:e], later, past_key[s:e], first_key[s:e]))
            keys = max(0, *seen_until)
            if keys:  # without a key there is nothing to read, and out and lse say so already
                yield Tile(slice(s, e), queries, contexts, lens[s:e], token, real, keys, whole)
        s = e


def positions(tile: Tile, segment: Segment, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the queries `[S, M, 1]` and of the keys `[S or 1, 1, N]`."""
    index = torch.arange(tile.queries.start, tile.queries.stop, device=device)
    key = torch.arange(tile.num_keys, device=device)[None, None, :]
    if segment.key_start is not None:
        key = key + segment.key_start[tile.seqs, None, None].long()
    return tile.column(tile.contexts, device) + index[None, :, None], key


def visible_keys(tile: Tile, options: AttentionOptions, segment: Segment, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: bool `[S, M, N]`."""
    query, key = positions(tile, segment, device)
    distance = query - key
    causal = options.causal if isinstance(options.causal, bool) else options.causal[tile.seqs, None, None]
    past = (distance >= 0) | (not causal if isinstance(causal, bool) else ~causal)
    seen = past
    window, chunk = window_size(options)
    if chunk:
        seen = seen & (query // chunk - key // chunk <= options.chunk_lookback)
    elif window:
        seen = seen & (distance < window) & (-distance < window)  # the second is implied where causal
    if options.prefix_ranges is not None:
        start, end = options.prefix_ranges[tile.seqs].long()[:, None, None, :, :].unbind(-1)
        q_, k_ = query[..., None], key[..., None]
        both = ((start < end) & (start <= q_) & (q_ <= end) & (start <= k_) & (k_ <= end)).any(-1)
        seen = seen | (both & (distance < options.window) if options.clamp_prefix_to_window and options.window else both)
    seen = seen & (key < tile.column(tile.seq_lens, device))
    if tile.real is not None:
        seen = seen & tile.real[:, :, None]
    if segment.key_range is not None:
        low, high = segment.key_range[tile.seqs].long()[:, None, None, :].unbind(-1)
        seen = seen & (key >= low) & (key < high)
    return seen


def _pages(tile: Tile, block_table: torch.Tensor, block_size: int, used: torch.Tensor | None) -> torch.Tensor | slice:
    """What to index the pages with: `[S, pages]`, 0 for a page without used slots; a slice where one sequence's pages are neighbours."""
    count = -(-tile.num_keys // block_size)
    table = block_table[tile.seqs, :count].long()
    if used is not None:
        table = torch.nn.functional.pad(table, (0, count - table.shape[1])) * used.any(-1)
    if len(tile.seq_lens) == 1:
        run = table[0].tolist()
        if run == list(range(run[0], run[0] + count)):
            return slice(run[0], run[0] + count)
    return table


def plan(call: AttendCall, segment: Segment) -> Iterator[TileRead]:
    """What is read of a segment, tile by tile."""
    for tile in _tiles(call, segment):
        size = segment.k.codes.shape[1]
        seen = used = None
        if not tile.whole:
            seen = visible_keys(tile, call.options, segment, call.q.device)
            used = torch.nn.functional.pad(seen.any(1), (0, -tile.num_keys % size)).unflatten(1, (-1, size))
        yield TileRead(tile, seen, used, _pages(tile, segment.block_table, size, used))
