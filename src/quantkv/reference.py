"""write, attend, dequantize in plain PyTorch, on any device: what every kernel is compared with, and the CPU path.

float32 inside, float64 on request. No Python loop over tokens, heads or pages; the one loop, over tiles of sequences and
queries, bounds memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .arguments import AttentionOptions, Segment, Side
from .format import Codec, Format
from .maps import LayerMaps, LinearMap

TILE_ELEMENTS = 1 << 20  # scores of a tile of attend: temporaries that stay in a processor's cache


def _raw(t: torch.Tensor) -> torch.Tensor:
    """The same storage as integers: 8-bit floats cannot be indexed or masked everywhere."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


# ---- write


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    k: Side,
    v: Side,
    fmt: Format,
    slot_mapping: torch.Tensor,
    maps: LayerMaps | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Encode `key [T, HK, D]` and `value [T, HK, D_V]`, any strides, into the slots `slot_mapping [T]`.

    Slot s is token `s % block_size` of page `s // block_size`; tokens with a negative slot are skipped.
    positions: int `[T]`, needed where the keys' map has an offset.
    """
    if maps is None:
        maps = LayerMaps.of(fmt, key.shape[-1], value.shape[-1], key.device)
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
        positions = None if positions is None else positions[kept]
    block_size = k.codes.shape[1]
    at = (slot_mapping // block_size, slot_mapping % block_size)
    if fmt.k is fmt.v and maps.k is maps.v and positions is None and k.scale == v.scale and key.shape == value.shape:
        both = encode(torch.cat((key, value)), fmt.k, maps.k, None, k.scale)  # rows are encoded one by one: half the calls
        encoded = zip(*(itertools.repeat(None, 2) if t is None else t.chunk(2) for t in both))
    else:
        encoded = encode(key, fmt.k, maps.k, positions, k.scale), encode(value, fmt.v, maps.v, positions, v.scale)
    for side, (codes, meta) in zip((k, v), encoded):
        _raw(side.codes)[at] = _raw(codes)
        if meta is not None:
            side.meta[at] = meta


def encode(
    rows: torch.Tensor, codec: Codec, map_: LinearMap | None = None, positions: torch.Tensor | None = None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and metadata of `rows [T, HK, D]`: `codec.encode_ref(A (rows - offset) / scale)`."""
    y = rows.float()
    if map_ is not None:
        if map_.offset is not None:
            y = y - map_.offset_rows(positions)
        # float64: the bytes must not depend on the order in which a BLAS adds.
        y = apply_map(map_.forward, y.double()).to(rows.dtype if codec.round_mapped else torch.float32).float()
    return codec.encode_ref(y if scale == 1.0 else y / scale)


def apply_map(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`matrix[h] @ rows[t, h]` for matrix `[H or 1, D, D]` and rows `[T, H, D]`, in the dtype of the rows."""
    matrix = matrix.to(rows.dtype)
    return rows @ matrix[0].mT if matrix.shape[0] == 1 else (rows.transpose(0, 1) @ matrix.mT).transpose(0, 1)


# ---- attend


def attend(
    q: torch.Tensor,
    k: Side,
    v: Side,
    fmt: Format,
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    options: AttentionOptions = AttentionOptions(),
    maps: LayerMaps | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q . k^) . v^` over the pages of each sequence: out `[T, HQ, D_V]`, log-sum-exp `[T, HQ]`.

    q: `[T, HQ, D]`, the queries of all sequences one after the other.
    cu_seqlens_q: int `[S + 1]`, where each sequence's queries start. seq_lens: int `[S]`, keys, the new ones included.
    block_table: int `[S, pages]`; entries of pages that no query sees may hold anything.
    dtype: in which to compute. out is of it, or float8_e4m3fn with an output scale; log-sum-exp is natural, sinks included,
    -inf where a query has no key.
    """
    head_size_v = v.codes.shape[-1] * 8 * v.codes.dtype.itemsize // fmt.v.row.code_bits
    if maps is None:
        maps = LayerMaps.of(fmt, q.shape[-1], head_size_v, q.device)
    out = q.new_zeros(q.shape[0], q.shape[1], head_size_v, dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype)
    for tile in _tiles(q, k, cu_seqlens_q, seq_lens, options):
        _attend_tile(tile, q, k, v, fmt, block_table, scale, options, maps, out, lse)
    if options.output_scale is not None:
        out = _to_float8(out, options.output_scale)
    return out, lse.float() if dtype == torch.float32 else lse


def _to_float8(out: torch.Tensor, scale: float) -> torch.Tensor:
    return (out / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


class _Tile(NamedTuple):
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
        return q[self.token].view(-1, len(self.queries), *q.shape[1:]) if self.real is None else q[self.token]

    def put(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows [S, M, ..]` to their places in `out [T, ..]`."""
        if self.real is None:
            out[self.token] = rows.flatten(0, 1)
        else:
            out[self.token[self.real]] = rows[self.real]

    def column(self, values: list[int], device: torch.device) -> torch.Tensor:
        """A number for each sequence, `[S, 1, 1]`."""
        return torch.tensor(values, device=device)[:, None, None]


def _tiles(q, k, cu_seqlens_q, seq_lens, options) -> Iterator[_Tile]:
    """Cut the batch so that neither the scores nor the gathered rows of a tile pass TILE_ELEMENTS."""
    starts, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    first_key = [0] * len(lens) if options.key_start is None else options.key_start.tolist()
    slots = [max(n - f, 0) for n, f in zip(lens, first_key)]
    heads, width = q.shape[1], k.codes.shape[2] * q.shape[2]
    unmasked = isinstance(options.causal, bool) and not options.window and options.prefix_ranges is options.key_range is None
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
        behind = options.causal is True and options.prefix_ranges is None  # no query sees past its own position
        contexts = [length - count for length, count in zip(lens[s:e], counts)]
        for first in range(0, most_q, step):
            queries = range(first, min(first + step, most_q))
            if even and (e - s == 1 or len(queries) == most_q):
                token, real = slice(starts[s] + first, starts[e] - (most_q - queries.stop)), None
            else:
                index = torch.arange(first, queries.stop, device=q.device)
                token = (cu_seqlens_q[s:e, None].long() + index).clamp_max(q.shape[0] - 1)
                real = index < torch.tensor(counts, device=q.device)[:, None]
            later = [max(count - queries.stop, 0) if behind else 0 for count in counts]
            keys = max(have - ahead for have, ahead in zip(slots[s:e], later))
            yield _Tile(slice(s, e), queries, contexts, lens[s:e], token, real, max(keys, 1), whole)
        s = e


def _positions(tile: _Tile, options: AttentionOptions, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the queries `[S, M, 1]` and of the keys `[S or 1, 1, N]`."""
    index = torch.arange(tile.queries.start, tile.queries.stop, device=device)
    key = torch.arange(tile.num_keys, device=device)[None, None, :]
    if options.key_start is not None:
        key = key + options.key_start[tile.seqs, None, None].long()
    return tile.column(tile.contexts, device) + index[None, :, None], key


def visible_keys(tile: _Tile, options: AttentionOptions, device: torch.device) -> torch.Tensor:
    """Which keys each query sees: bool `[S, M, N]`."""
    query, key = _positions(tile, options, device)
    distance = query - key
    causal = options.causal if isinstance(options.causal, bool) else options.causal[tile.seqs, None, None]
    past = (distance >= 0) | (not causal if isinstance(causal, bool) else ~causal)
    seen, back = past, torch.ones_like(past)
    if options.chunk_lookback >= 0:
        size = options.window // (options.chunk_lookback + 1)
        back = query // size - key // size <= options.chunk_lookback
        seen = seen & back
    elif options.window > 0:
        back = distance < options.window
        seen = seen & back & (-distance < options.window)  # the second is implied where causal
    if options.prefix_ranges is not None:
        start, end = options.prefix_ranges[tile.seqs].long()[:, None, None, :, :].unbind(-1)
        q_, k_ = query[..., None], key[..., None]
        both = ((start < end) & (start <= q_) & (q_ <= end) & (start <= k_) & (k_ <= end)).any(-1)
        seen = seen | (both & back if options.clamp_prefix_to_window else both)
    seen = seen & (key < tile.column(tile.seq_lens, device))
    if tile.real is not None:
        seen = seen & tile.real[:, :, None]
    if options.key_range is not None:
        low, high = options.key_range[tile.seqs].long()[:, None, None, :].unbind(-1)
        seen = seen & (key >= low) & (key < high)
    return seen


def _pages(tile: _Tile, block_table: torch.Tensor, block_size: int, used: torch.Tensor | None) -> torch.Tensor | slice:
    """What to index the pages with: `[S, pages]`, 0 for a page without used slots; a slice where one sequence's pages are neighbours."""
    count = -(-tile.num_keys // block_size)
    table = block_table[tile.seqs, :count].long()
    if used is not None:
        padded = torch.nn.functional.pad(used, (0, count * block_size - tile.num_keys))
        table = table * padded.unflatten(1, (count, block_size)).any(-1)
    if len(tile.seq_lens) == 1:
        run = table[0].tolist()
        if run == list(range(run[0], run[0] + count)):
            return slice(run[0], run[0] + count)
    return table


def _gather(side: Side, codec: Codec, pages: torch.Tensor | slice, n: int, used: torch.Tensor | None, dtype: torch.dtype):
    """Operand `[S, HK, N, D]`, scale and bias `[S, HK, 1, N]` (or None) of the first n keys in the pages that `_pages` named.

    Slots that are not `used [S, N]` (None: all are) read as zero bytes: what they hold, NaN perhaps, must not reach a product."""

    def rows(t):  # [num_blocks, block_size, HK, X] -> [S, HK, N, X]
        t = t[None, pages] if isinstance(pages, slice) else t[pages]  # neighbours need no gather
        t = t.permute(0, 3, 1, 2, 4).flatten(2, 3)[:, :, :n]
        return t if used is None else t.masked_fill(~used[:, None, :, None], 0)

    codes = rows(_raw(side.codes)).view(side.codes.dtype)
    operand, scale, bias = codec.decode_ref(codes, None if side.meta is None else rows(side.meta), dtype)
    return operand, *(t if t is None else t.mT for t in (scale, bias))


def _attend_tile(
    tile: _Tile, q, k: Side, v: Side, fmt: Format, block_table, scale, options: AttentionOptions, maps: LayerMaps, out, lse
) -> None:
    """One tile of `attend`, written into out and lse. Axes: S sequences, H kv heads, G query heads of each, M queries, N
    keys."""
    dtype, heads = out.dtype, k.codes.shape[2]
    seen = None if tile.whole else visible_keys(tile, options, q.device)
    used = None if seen is None else seen.any(1)
    pages = _pages(tile, block_table, k.codes.shape[1], used)

    rows = tile.take(q).to(dtype)
    rows = rows.view(*rows.shape[:2], heads, -1, rows.shape[3]).permute(0, 2, 3, 1, 4) * scale  # [S, H, G, M, D]
    mapped = rows if maps.k is None else rows @ _for_heads(maps.k.inverse.to(dtype))
    mapped = mapped * k.scale
    operand, k_scale, k_bias = _gather(k, fmt.k, pages, tile.num_keys, used, dtype)
    score = (mapped.flatten(2, 3) @ operand.mT).unflatten(2, rows.shape[2:4])  # [S, H, G, M, N]
    if k_scale is not None:
        score *= k_scale[:, :, None]
    if k_bias is not None:
        score += mapped.sum(-1, keepdim=True) * k_bias[:, :, None]
    _add_by_position(score, rows, tile, options, maps)
    if seen is not None:
        score.masked_fill_(~seen[:, None, None], -math.inf)

    sinks = None if options.sinks is None else options.sinks.to(dtype).view(1, heads, -1, 1)
    top = score.amax(-1)  # [S, H, G, M]
    top = (top if sinks is None else torch.maximum(top, sinks)).clamp_min_(torch.finfo(dtype).min)
    weight = score.sub_(top[..., None]).exp_()
    norm = weight.sum(-1)
    norm = norm if sinks is None else norm + torch.exp(sinks - top)
    operand, v_scale, v_bias = _gather(v, fmt.v, pages, tile.num_keys, used, dtype)
    shift = None if v_bias is None else weight.flatten(2, 3) @ v_bias.mT  # sum of weight times bias
    if v_scale is not None:
        weight *= v_scale[:, :, None]
    result = weight.flatten(2, 3) @ operand
    result = (result if shift is None else result + shift).unflatten(2, rows.shape[2:4])
    result = result * (v.scale / norm.clamp_min(1))[..., None]  # norm is 1 at least, or 0: no key, no sink
    if maps.v is not None:
        result = result @ _for_heads(maps.v.inverse.to(dtype).mT)
    tile.put(out, result.permute(0, 3, 1, 2, 4).flatten(2, 3))
    tile.put(lse, (top + norm.log()).permute(0, 3, 1, 2).flatten(2, 3))


def _for_heads(matrix: torch.Tensor) -> torch.Tensor:
    """`[H or 1, D, D]` to multiply `[S, H, G, M, D]` with; one matrix for all heads makes one product of it."""
    return matrix[0] if matrix.shape[0] == 1 else matrix[:, None]


def _add_by_position(score: torch.Tensor, rows: torch.Tensor, tile: _Tile, options: AttentionOptions, maps: LayerMaps) -> None:
    """What is added to `score [S, H, G, M, N]`, in place, by where query and key stand: offset, then after the softcap ALiBi, bias."""
    dtype, heads = score.dtype, score.shape[1]
    offset = None if maps.k is None else maps.k.offset
    if offset is not None or options.alibi_slopes is not None or options.qq_bias is not None:
        query, key = _positions(tile, options, score.device)
        since_context = key - tile.column(tile.contexts, score.device)
    if offset is not None:
        by_key = maps.k.offset_rows(key[:, 0]).to(dtype).permute(0, 2, 3, 1)  # [S or 1, H or 1, D, N]
        score += rows @ by_key[:, :, None]
    if options.softcap > 0:
        score.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.alibi_slopes is not None:
        slope = options.alibi_slopes.to(dtype).view(1, heads, -1, 1, 1)
        behind = (query - key).clamp_min(0).to(dtype)
        score += slope * (-behind.sqrt() if options.alibi_sqrt else since_context.to(dtype))[:, None, None]
    if options.qq_bias is not None:
        size = options.qq_bias.shape
        index = torch.arange(tile.queries.start, tile.queries.stop, device=score.device).clamp_max(size[0] - 1)
        bias = options.qq_bias.to(dtype)[index[:, None], since_context.clamp(0, size[1] - 1)]
        score += torch.where((since_context >= 0) & (since_context < size[1]), bias, 0)[:, None, None]


def attend_segments(
    q: torch.Tensor,
    segments: Sequence[Segment],
    *,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    options: AttentionOptions = AttentionOptions(),
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` over the keys of all segments, which are disjoint."""
    if len(segments) == 1:
        s = segments[0]
        return attend(
            q,
            s.k,
            s.v,
            s.fmt,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=s.block_table,
            scale=scale,
            options=replace(options, key_start=s.key_start, key_range=s.key_range),
            maps=s.maps,
            dtype=dtype,
        )
    plain = replace(options, sinks=None, output_scale=None)
    results = [
        attend_segments(q, [s], cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, scale=scale, options=plain, dtype=dtype)
        for s in segments
    ]
    outs, lses = (torch.stack(x) for x in zip(*results))
    if options.sinks is not None:  # a segment whose one value is zero
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
        lses = torch.cat([lses, options.sinks.to(lses.dtype).expand_as(lses[:1])])
    out, lse = merge(outs, lses)
    return out if options.output_scale is None else _to_float8(out, options.output_scale), lse


# ---- read back and merge


def dequantize(
    side: Side,
    codec: Codec,
    map_: LinearMap | None,
    slots: torch.Tensor,
    positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The rows `[T, HK, D]` that slots `[T]` hold: `A^-1 y^ + offset`. positions as in `write`."""
    block_size = side.codes.shape[1]
    at = (slots // block_size, slots % block_size)
    codes = _raw(side.codes)[at].view(side.codes.dtype)
    rows = codec.decode(codes, None if side.meta is None else side.meta[at], dtype) * side.scale
    if map_ is not None:
        rows = apply_map(map_.inverse, rows)
        if map_.offset is not None:
            rows = rows + map_.offset_rows(positions).to(dtype)
    return rows


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets: `sum_i exp(lse_i - lse) out_i`. outs `[N, T, HQ, D]`, lses `[N, T,
    HQ]`."""
    lse = torch.logsumexp(lses, 0)
    weight = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0))
    return (weight[..., None].to(outs.dtype) * outs).sum(0), lse
