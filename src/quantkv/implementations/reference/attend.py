"""Attention over pages in plain PyTorch, on any device: what every kernel is compared with, and the CPU path.

float32 inside, float64 on request. No Python loop over tokens, heads or pages; the one loop, over tiles of sequences and
queries, bounds memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...calls import AttentionOptions, Memo, Segment, Side
from ...format import Codec, Format
from ...maps import LayerMaps
from ...packing import interleave
from .plan import Tile, plan, positions
from .write import as_integers


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
    memo: Memo | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`softmax(scale * q . k^) . v^` over the pages of each sequence: out `[T, HQ, D_V]`, log-sum-exp `[T, HQ]`.

    q: `[T, HQ, D]`, the queries of all sequences one after the other.
    cu_seqlens_q: int `[S + 1]`, where each sequence's queries start. seq_lens: int `[S]`, keys, the new ones included.
    block_table: int `[S, pages]`; entries of pages that no query sees may hold anything.
    dtype: in which to compute. out is of it, or float8_e4m3fn with an output scale; log-sum-exp is natural, sinks included,
    -inf where a query has no key. return_lse: None in its place if False, which costs less. memo: see there.
    """
    head_size_v = fmt.v.head_size(v.codes)
    if maps is None:
        maps = LayerMaps.of(fmt, q.shape[-1], head_size_v, q.device)
    out = q.new_zeros(q.shape[0], q.shape[1], head_size_v, dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype) if return_lse else None
    memo = Memo() if memo is None else memo
    reads = plan(q, k, cu_seqlens_q, seq_lens, block_table, options)
    if q.shape[0] == seq_lens.shape[0]:  # decode; the masks of a prompt are too large to keep
        reads = memo.once(("plan", q.shape, k.codes.shape[1:3]), lambda: list(reads))
    for tile, seen, used, pages in reads:
        _attend_tile(tile, seen, used, pages, q, k, v, fmt, scale, options, maps, memo, out, lse)
    return out if options.output_scale is None else _to_float8(out, options.output_scale), lse


def _to_float8(out: torch.Tensor, scale: float) -> torch.Tensor:
    return (out / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _gather(side: Side, codec: Codec, pages: torch.Tensor | slice, n: int, used: torch.Tensor | None, dtype: torch.dtype, memo: Memo):
    """Operand `[S, HK, N, D]` or its planes, in memory that the next call overwrites, scale and bias `[S, HK, 1, N]` (or None)
    of the first n keys in the pages that `plan` named.

    Slots that are not `used [S, pages, block_size]` (None: all are) read as zero bytes: what they hold, NaN perhaps, must not
    reach a product."""

    def rows(t):  # [num_blocks, block_size, HK, X] -> [S, HK, pages, block_size, X]
        t = t[None, pages] if isinstance(pages, slice) else t[pages]  # neighbours need no gather
        t = t.permute(0, 3, 1, 2, 4)
        return t if used is None else t.masked_fill(~used[:, None, :, :, None], 0)

    codes = rows(as_integers(side.codes)).view(side.codes.dtype)
    operand, *affine = codec.decode(codes, None if side.meta is None else rows(side.meta), dtype)
    if operand.dtype != dtype:
        operand = memo.scratch(operand.shape, dtype, operand.device).copy_(operand)
    return operand.flatten(-3, -2)[..., :n, :], *(t if t is None else t.flatten(2)[:, :, None, :n] for t in affine)


def _attend_tile(
    tile: Tile, seen, used, pages, q, k: Side, v: Side, fmt: Format, scale, options: AttentionOptions, maps: LayerMaps, memo: Memo, out, lse
) -> None:
    """One tile of `attend`, written into out and lse. Axes: S sequences, H kv heads, G query heads of each, M queries, N
    keys."""
    dtype, heads = out.dtype, k.codes.shape[2]
    rows = tile.take(q).to(dtype)
    rows = rows.view(*rows.shape[:2], heads, -1, rows.shape[3]).permute(0, 2, 3, 1, 4)  # [S, H, G, M, D]
    groups, rows = rows.shape[2:4], rows.flatten(2, 3)
    mapped = rows if maps.k is None else rows @ _for_heads(maps.k.inverse.to(dtype))
    mapped = mapped * (scale * k.scale)
    operand, k_scale, k_bias = _gather(k, fmt.k, pages, tile.num_keys, used, dtype, memo)
    score = _dot_keys(mapped, operand, fmt.k.planes)  # [S, H, G * M, N]
    if k_scale is not None:
        score *= k_scale
    if k_bias is not None:
        score.addcmul_(mapped.sum(-1, keepdim=True), k_bias)
    score = score.unflatten(2, groups)
    _add_by_position(score, rows, scale, tile, options, maps)
    if seen is not None:
        score.masked_fill_(~seen[:, None, None], -math.inf)

    weight, total = _softmax(score, options.sinks, lse is not None)
    weight = weight.flatten(2, 3)
    operand, v_scale, v_bias = _gather(v, fmt.v, pages, tile.num_keys, used, dtype, memo)
    shift = None if v_bias is None else (weight * v_bias).sum(-1, keepdim=True)
    if v_scale is not None:
        weight *= v_scale
    result = _sum_values(weight, operand, fmt.v.planes)  # [S, H, G * M, D_V]
    if shift is not None:
        result += shift
    if v.scale != 1:
        result *= v.scale
    if maps.v is not None:
        result = result @ _for_heads(maps.v.inverse.to(dtype).mT)
    result = result.unflatten(2, groups)
    if seen is not None:  # a query without a key
        result = result.masked_fill(~seen.any(-1)[:, None, None, :, None], 0)
    tile.put(out, result.permute(0, 3, 1, 2, 4).flatten(2, 3))
    if lse is not None:
        tile.put(lse, total.permute(0, 3, 1, 2).flatten(2, 3))


def _for_heads(matrix: torch.Tensor) -> torch.Tensor:
    """`[H or 1, D, D]` to multiply `[S, H, R, D]` with; one matrix for all heads makes one product of it."""
    return matrix[0] if matrix.shape[0] == 1 else matrix


def _dot_keys(rows: torch.Tensor, operand: torch.Tensor, planes: int) -> torch.Tensor:
    """`rows [S, H, R, D]` times every key: `[S, H, R, N]`."""
    if planes == 1:
        return rows @ operand.mT
    return (rows.unflatten(-1, (-1, planes)).movedim(-1, 0) @ operand.mT).sum(0)


def _sum_values(weight: torch.Tensor, operand: torch.Tensor, planes: int) -> torch.Tensor:
    """Sums of the values with `weight [S, H, R, N]`: `[S, H, R, D_V]`."""
    result = weight @ operand
    return result if planes == 1 else interleave(result)


def _softmax(score: torch.Tensor, sinks: torch.Tensor | None, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of `score [S, H, G, M, N]`, NaN for a query without a key, and log-sum-exp `[S, H, G, M]` if asked for."""
    weight = score.softmax(-1)
    if sinks is None and not return_lse:
        return weight, None
    lse = score.logsumexp(-1)
    if sinks is not None:
        keys, lse = lse, torch.logaddexp(lse, sinks.to(score.dtype).view(1, score.shape[1], -1, 1))
        weight *= torch.exp(keys - lse)[..., None]
    return weight, lse


def _add_by_position(score: torch.Tensor, rows: torch.Tensor, scale: float, tile: Tile, options: AttentionOptions, maps: LayerMaps) -> None:
    """What is added to `score [S, H, G, M, N]`, in place, by where query and key stand: offset, then after the softcap ALiBi, bias."""
    dtype, heads = score.dtype, score.shape[1]
    offset = None if maps.k is None else maps.k.offset
    if offset is not None or options.alibi_slopes is not None or options.qq_bias is not None:
        query, key = positions(tile, options, score.device)
        since_context = key - tile.column(tile.contexts, score.device)
    if offset is not None:
        by_key = maps.k.offset_rows(key[:, 0]).to(dtype).permute(0, 2, 3, 1)  # [S or 1, H or 1, D, N]
        score += ((rows * scale) @ by_key).unflatten(2, score.shape[2:4])
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
    memo: Memo | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend` over the keys of all segments, which are disjoint."""
    if len(segments) == 1:
        s = segments[0]
        if s.key_start is not options.key_start or s.key_range is not options.key_range:
            options = replace(options, key_start=s.key_start, key_range=s.key_range)
        return attend(
            q,
            s.k,
            s.v,
            s.fmt,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_table=s.block_table,
            scale=scale,
            options=options,
            maps=s.maps,
            dtype=dtype,
            memo=memo,
            return_lse=return_lse,
        )
    plain = replace(options, sinks=None, output_scale=None)
    results = [
        attend_segments(q, [s], cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, scale=scale, options=plain, dtype=dtype) for s in segments
    ]
    outs, lses = (torch.stack(x) for x in zip(*results))
    if options.sinks is not None:  # a segment whose one value is zero
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
        lses = torch.cat([lses, options.sinks.to(lses.dtype).expand_as(lses[:1])])
    out, lse = merge(outs, lses)
    return out if options.output_scale is None else _to_float8(out, options.output_scale), lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets: `sum_i exp(lse_i - lse) out_i`. outs `[N, T, HQ, D]`, lses `[N, T,
    HQ]`."""
    lse = torch.logsumexp(lses, 0)
    weight = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0))
    return (weight[..., None].to(outs.dtype) * outs).sum(0), lse
