"""Attention over pages in plain PyTorch, on any device: what every kernel is compared with, and the CPU path.

float32 inside, float64 on request. No Python loop over tokens, heads or pages; the one loop, over tiles of sequences and
queries, bounds memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ...calls import AttendCall, AttentionOptions, PagedTensor, Segment
from ...format import Codec
from ...kept import Kept
from ...maps import LinearMap
from ...options import PROMPT_QUERIES
from ...packing import interleave
from . import eight_bit
from .plan import TileRead, plan, positions
from .scratch import Scratch
from .write import as_integers

MASKS = ("causal", "window", "chunk_lookback", "prefix_ranges", "clamp_prefix_to_window")  # `plan` says which keys they leave
ADDED = ("softcap", "alibi_slopes", "alibi_sqrt", "qq_bias")
SUPPORTED = frozenset((*MASKS, *ADDED, "sinks", "output_scale", "batch_invariant", "prompt_precision"))
LATENTS = True
Gathered = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def refusal(call: AttendCall) -> str | None:
    """Always None: the reference serves every call, anywhere."""
    return None


def run(call: AttendCall) -> None:
    """Serve `call`, into its out and lse."""
    prepare(call)(call)


def prepare(call: AttendCall) -> Callable[[AttendCall], None]:
    """What serves every call of the same batch and options: for decode, the tiles and the pages are kept."""
    decode = call.q.shape[0] == call.batch.num_seqs  # the masks of a prompt are too large to keep
    scratch, kept = Scratch(), Kept(lambda call: [list(plan(call, segment)) for segment in call.segments] if decode else None)

    def launch(call: AttendCall) -> None:
        out, lse = compute(call, reads=kept.of(call), scratch=scratch)
        call.out.copy_(out)
        if call.lse is not None:
            call.lse.copy_(lse)

    return launch


def withheld(call: AttendCall) -> str | None:
    """Why "auto" does not take it on a GPU: prompts in their thousands of queries are what 8-bit scores are for."""
    if call.q.device.type != "cpu" and call.options.prompt_precision == "8bit":
        return "prompt_precision: the reference serves 8bit where it is asked for by name"
    return None


def compute(
    call: AttendCall, dtype: torch.dtype = torch.float32, reads: list[list[TileRead]] | None = None, scratch: Scratch | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out `[T, HQ, D_V]` of `dtype`, in which everything is computed, float8_e4m3fn with an output scale; log-sum-exp `[T, HQ]` of `dtype`,
    None where the call asks for none. reads: what `plan` gives for each segment, where it is known."""
    scratch = Scratch() if scratch is None else scratch
    options, combined = call.options, len(call.segments) > 1
    plain = replace(options, sinks=None) if combined else options
    results = []
    for i, segment in enumerate(call.segments):
        tiles = plan(call, segment) if reads is None else reads[i]
        results.append(_attend_segment(call, segment, plain, tiles, scratch, dtype, combined or call.lse is not None))
    out, lse = results[0]
    if combined:
        outs, lses = (torch.stack(x) for x in zip(*results))
        if options.sinks is not None:  # a segment whose one value is zero
            outs = torch.cat([outs, torch.zeros_like(outs[:1])])
            lses = torch.cat([lses, options.sinks.to(dtype).expand_as(lses[:1])])
        out, lse = combine(outs, lses)
    if options.output_scale is not None:
        out = (out / options.output_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return out, lse


def _attend_segment(call, segment: Segment, options: AttentionOptions, reads, scratch: Scratch, dtype, return_lse: bool):
    """out and log-sum-exp over the keys of one segment."""
    q = call.q
    out = q.new_zeros(q.shape[0], q.shape[1], segment.head_size_v, dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype) if return_lse else None
    if return_lse and options.sinks is not None:  # what a query without a key has
        lse[:] = options.sinks
    for read in reads:
        _attend_tile(read, call, segment, options, scratch, out, lse)
    return out, lse


def _gather(side: PagedTensor, codec: Codec, read: TileRead, dtype: torch.dtype, scratch: Scratch) -> Gathered:
    """Operand `[S, HK, N, D]` or its planes, in memory that the next call overwrites, scale and bias `[S, HK, 1, N]` (or None)
    of the keys that a tile reads.

    Slots that no query uses read as zero bytes: what they hold, NaN perhaps, must not reach a product."""
    used, n = read.used, read.tile.num_keys

    def rows(t):  # [num_blocks, block_size, HK, X] -> [S, HK, pages, block_size, X]
        t = t[None, read.pages] if isinstance(read.pages, slice) else t[read.pages]  # neighbours need no gather
        t = t.permute(0, 3, 1, 2, 4)
        return t if used is None else t.masked_fill(~used[:, None, :, :, None], 0)

    codes = rows(as_integers(side.codes)).view(side.codes.dtype)
    operand, *affine = codec.decode(codes, None if side.meta is None else rows(side.meta), dtype)
    if operand.dtype != dtype:
        operand = scratch.take(operand.shape, dtype, operand.device).copy_(operand)
    return operand.flatten(-3, -2)[..., :n, :], *(t if t is None else t.flatten(2)[:, :, None, :n] for t in affine)


def _attend_tile(read: TileRead, call: AttendCall, segment: Segment, options: AttentionOptions, scratch: Scratch, out, lse) -> None:
    """One tile, written into out and lse. Axes: S sequences, H kv heads, G query heads of each, M queries, N keys."""
    k, fmt, tile, seen, maps = segment.k, segment.fmt, read.tile, read.seen, segment.maps
    dtype, heads, (side, codec, value_map) = out.dtype, k.codes.shape[2], segment.values
    rows = tile.take(call.q).to(dtype)
    rows = rows.view(*rows.shape[:2], heads, -1, rows.shape[3]).permute(0, 2, 3, 1, 4)  # [S, H, G, M, D]
    groups, rows = rows.shape[2:4], rows.flatten(2, 3)
    if fmt.latent:  # the rotated dimensions first: what is gathered next overwrites them
        rows, rope = rows.split(segment.stored_sizes, -1)
        by_rope = _scores(rope, segment.v, fmt.v, maps.v, call.scale, _gather(segment.v, fmt.v, read, dtype, scratch))
    keys = _gather(k, fmt.k, read, dtype, scratch)
    score = _scores(rows, k, fmt.k, maps.k, call.scale, keys)
    if options.prompt_precision == "8bit":
        _score_prompts(score, rows, call, read, segment, keys)
    score = (score.add_(by_rope) if fmt.latent else score).unflatten(2, groups)
    shifted = keys[1] >= 0 if fmt.k.signed else None
    _add_by_position(score, rows, call.scale, read, options, segment, shifted)
    if seen is not None:
        score.masked_fill_(~seen[:, None, None], -math.inf)

    weight, total = _softmax(score, options.sinks, lse is not None)
    values = keys if fmt.latent else _gather(side, codec, read, dtype, scratch)
    result = _weighted_values(weight.flatten(2, 3), groups, codec, read, values)
    if side.scale != 1:
        result *= side.scale
    if value_map is not None:
        result = result @ _for_heads(value_map.inverse.to(dtype).mT)
    result = result.unflatten(2, groups)
    if options.qq_bias is not None:  # which may hide keys as well
        result = result.masked_fill((score == -math.inf).all(-1)[..., None], 0)
    elif seen is not None:  # a query without a key
        result = result.masked_fill(~seen.any(-1)[:, None, None, :, None], 0)
    tile.put(out, result.permute(0, 3, 1, 2, 4).flatten(2, 3))
    if lse is not None:
        tile.put(lse, total.permute(0, 3, 1, 2).flatten(2, 3))


def _scores(rows: torch.Tensor, side: PagedTensor, codec: Codec, map_: LinearMap | None, scale: float, gathered: Gathered) -> torch.Tensor:
    """`rows [S, H, R, D]` times every key, times scale: `[S, H, R, N]`."""
    mapped = _mapped(rows, map_) * (scale * side.scale)
    operand, k_scale, k_bias = gathered
    score = _dot_keys(mapped, operand, codec.planes)
    if k_scale is not None:
        score *= k_scale
    return score if k_bias is None else score.addcmul_(mapped.sum(-1, keepdim=True), k_bias)


def _mapped(rows: torch.Tensor, map_: LinearMap | None) -> torch.Tensor:
    """Queries `[S, H, R, D]` in the space of mapped keys."""
    return rows if map_ is None else rows @ _for_heads(map_.inverse.to(rows.dtype))


def _score_prompts(score: torch.Tensor, rows: torch.Tensor, call: AttendCall, read: TileRead, segment: Segment, gathered: Gathered) -> None:
    """Prompts' scores of `score [S, H, R, N]` anew, by `eight_bit`. Key means by position are added to them later, unrounded."""
    side, codec, map_ = segment.k, segment.fmt.k, segment.maps.k
    counts = call.batch.cu_seqlens_q.diff()[read.tile.seqs].tolist()
    operand, scale, bias = gathered
    keys = operand if codec.planes == 1 else interleave(operand)
    keys = keys if scale is None else keys * scale.mT
    keys = keys if bias is None else keys + bias.mT
    for i, queries in enumerate(counts):
        if queries < PROMPT_QUERIES:
            continue
        used = slice(None) if read.used is None else read.used[i].flatten()[: keys.shape[2]]
        mapped = _mapped(rows[i : i + 1], map_)[0]
        score[i][:, :, used] = eight_bit.scores(mapped, keys[i][:, used]) * (call.scale * side.scale)


def _weighted_values(weight: torch.Tensor, groups: tuple[int, int], codec: Codec, read: TileRead, gathered: Gathered) -> torch.Tensor:
    """The values summed with `weight [S, H, G * M, N]`: `[S, H, G * M, D_V]`, in their mapped space."""
    planes = codec.planes
    operand, scale, bias = gathered

    def total(weight, operand, scale, bias):
        shift = None if bias is None else (weight * bias).sum(-1, keepdim=True)
        result = (weight if scale is None else weight * scale) @ operand
        result = result if planes == 1 else interleave(result)
        return result if shift is None else result + shift

    result = total(weight, operand, scale, bias)
    if read.seen is not None and len(read.tile.queries) > 1 and not bool(result.isfinite().all()):
        # A row that is not finite may reach only the queries that see it: zero times it is not zero.
        finite = operand.isfinite().all(-1)
        broken = ~(finite if planes == 1 else finite.all(0))  # [S, H, N]
        for t in (scale, bias):
            if t is not None:
                broken = broken | ~t[:, :, 0].isfinite()
        clean = [t if t is None else t.masked_fill(broken[:, :, None], 0) for t in (scale, bias)]
        alone = total(weight, operand.masked_fill(broken[..., None], 0), *clean)
        sees = (read.seen[:, None] & broken[:, :, None]).any(-1)  # [S, H, M]
        result = torch.where(sees[:, :, None, :, None].expand(-1, -1, groups[0], -1, -1).flatten(2, 3), result, alone)
    return result


def _for_heads(matrix: torch.Tensor) -> torch.Tensor:
    """`[H or 1, D, D]` to multiply `[S, H, R, D]` with; one matrix for all heads makes one product of it."""
    return matrix[0] if matrix.shape[0] == 1 else matrix


def _dot_keys(rows: torch.Tensor, operand: torch.Tensor, planes: int) -> torch.Tensor:
    """`rows [S, H, R, D]` times every key: `[S, H, R, N]`."""
    if planes == 1:
        return rows @ operand.mT
    return (rows.unflatten(-1, (-1, planes)).movedim(-1, 0) @ operand.mT).sum(0)


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


def _add_by_position(
    score: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    read: TileRead,
    options: AttentionOptions,
    segment: Segment,
    shifted: torch.Tensor | None,
) -> None:
    """What is added to `score [S, H, G, M, N]`, in place, by where query and key stand: key_mean, then after the softcap ALiBi, bias.

    shifted: bool `[S, H, 1, N]`, which keys were stored with the key mean taken off; None: all."""
    dtype, heads, tile = score.dtype, score.shape[1], read.tile
    map_ = segment.maps.k
    key_mean = None if map_ is None else map_.key_mean
    if key_mean is not None or options.alibi_slopes is not None or options.qq_bias is not None:
        query, key = positions(tile, segment, score.device)
        since_context = key - tile.column(tile.contexts, score.device)
    if key_mean is not None:
        by_key = map_.key_mean_rows(key[:, 0]).to(dtype).permute(0, 2, 3, 1)  # [S or 1, H or 1, D, N]
        by_mean = (rows * scale) @ by_key
        score += (by_mean if shifted is None else by_mean * shifted).unflatten(2, score.shape[2:4])
    if options.softcap > 0:
        score.div_(options.softcap).tanh_().mul_(options.softcap)
    if options.alibi_slopes is not None:
        slope = options.alibi_slopes.to(dtype).view(1, heads, -1, 1, 1)
        behind = (query - key).clamp_min(0).to(dtype)
        score += slope * (-behind.sqrt() if options.alibi_sqrt else since_context.to(dtype))[:, None, None]
    if options.qq_bias is not None:
        size = options.qq_bias.shape
        index = torch.arange(tile.queries.start, tile.queries.stop, device=score.device)[:, None]
        inside = (since_context >= 0) & (since_context < size[1])
        bias = options.qq_bias.to(dtype)[index.clamp_max(size[0] - 1), since_context.clamp(0, size[1] - 1)]
        score += torch.where(inside, bias, 0)[:, None, None]


def combine(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets: `sum_i exp(lse_i - lse) out_i`. outs `[N, T, HQ, D]`, lses `[N, T, HQ]`."""
    lse = torch.logsumexp(lses, 0)
    weight = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0))
    return (weight[..., None].to(outs.dtype) * outs).sum(0), lse
