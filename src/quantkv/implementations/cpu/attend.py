"""Attention over pages on a CPU: decode, and a few queries a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...calls import AttendCall, Batch, PagedTensor, Segment
from ...format import Codec
from ...kept import Kept
from ...maps import LinearMap
from ...reads import window_size
from ..reference.attend import combine
from . import sides
from .compiling import missing
from .threads import in_parts

SUPPORTED = frozenset(("causal", "window", "chunk_lookback", "softcap", "sinks", "output_scale", "batch_invariant"))
LATENTS = True
MOST_QUERIES = 16  # of a sequence: larger products are for the reference, which leaves them to a BLAS
MOST_LATENT_ROWS = 16  # queries of a sequence and all heads, over latents: rows so long are for a BLAS sooner
SMALLEST_PART = 1 << 17  # numbers that a thread reads: fewer are not worth waking one


def refusal(call: AttendCall) -> str | None:
    """Why a call is not for these kernels, in words; None where it is."""
    if call.q.device.type != "cpu":
        return f"q lies on {call.q.device}: CPUs only"
    if reason := missing():
        return reason
    queries = _most_queries(call.batch)
    if queries > MOST_QUERIES:
        return f"a sequence has {queries} queries: at most {MOST_QUERIES}"
    rows = queries * call.q.shape[1]
    if call.segments[0].fmt.latent and rows > MOST_LATENT_ROWS:
        return f"a sequence has {rows} queries of all heads over latents: at most {MOST_LATENT_ROWS}"
    reasons = (sides.refusal(side, codec) for s in call.segments for side, codec in ((s.k, s.fmt.k), (s.v, s.fmt.v)))
    return next(filter(None, reasons), None)


def _most_queries(batch: Batch) -> int:
    if batch.lengths is not None:
        return max((queries for queries, _ in batch.lengths), default=0)
    return int(batch.cu_seqlens_q.diff().max()) if batch.num_seqs else 0


def run(call: AttendCall) -> None:
    """Serve `call`, into its out and lse."""
    prepare(call)(call)


def prepare(call: AttendCall) -> Callable[[AttendCall], None]:
    """What serves every call of the same batch and options: what is read is kept."""
    traits = [(sides.described(s.k, s.fmt.k), sides.described(s.v, s.fmt.v)) for s in call.segments]
    matrices: dict[Any, tuple[LinearMap | None, torch.Tensor | None]] = {}
    plans = Kept(lambda call: [SegmentPlan.of(call, segment) for segment in call.segments])

    def matrix(of: Callable, map_: LinearMap | None, planes: int, scale: float) -> torch.Tensor | None:
        key = of, id(map_), planes, scale
        if key not in matrices:
            matrices[key] = map_, of(map_, planes, scale)  # with the map, so that no other one gets its id
        return matrices[key][1]

    def launch(call: AttendCall) -> None:
        if call.q.shape[0] == 0:
            return
        results = [_attend_segment(call, *parts, matrix) for parts in zip(call.segments, plans.of(call), traits)]
        if call.options.sinks is not None:  # a value of zero that every query sees
            (out, lse), sinks = results[0], call.options.sinks.float()
            results.append((torch.zeros_like(out), sinks.expand_as(lse)))
        out, lse = results[0] if len(results) == 1 else combine(*(torch.stack(x) for x in zip(*results)))
        if call.options.output_scale is not None:
            out = (out / call.options.output_scale).clamp(-448, 448)
        call.out.copy_(out)
        if call.lse is not None:
            call.lse.copy_(lse)

    return launch


class SegmentPlan(NamedTuple):
    """What is read of one segment; arrays as of `kernels.attend_chunks`.

    first: `[S + 1]`, the first chunk of each sequence. packed_rows: of all chunks, rows of sums and totals."""

    chunks: np.ndarray
    first: np.ndarray
    pages: np.ndarray
    starts: np.ndarray
    seen: np.ndarray
    origins: np.ndarray
    packed_rows: int

    @classmethod
    def of(cls, call: AttendCall, segment: Segment) -> SegmentPlan:
        """What `call` reads of `segment`, by the numbers that its tensors hold now."""
        from .kernels import CHUNK

        starts = _wide(call.batch.cu_seqlens_q)
        counts, num_seqs = np.diff(starts), call.batch.num_seqs
        origins = np.zeros(num_seqs, np.int64) if segment.key_start is None else _wide(segment.key_start)
        sequence = np.repeat(np.arange(num_seqs), counts)
        seen = _seen(call, segment, sequence, starts)
        seen = np.maximum(seen - origins[sequence, None], 0)
        seen[seen[:, 0] >= seen[:, 1]] = 0
        some = seen[:, 1] > 0
        low, high = np.full(num_seqs, np.iinfo(np.int64).max), np.zeros(num_seqs, np.int64)
        np.minimum.at(low, sequence[some], seen[some, 0])
        np.maximum.at(high, sequence[some], seen[some, 1])
        begin = np.minimum(low, high) // CHUNK
        first = np.concatenate([[0], np.cumsum(-(-high // CHUNK) - begin)])
        owner = np.repeat(np.arange(num_seqs), np.diff(first))
        chunk = np.arange(len(owner)) - first[owner] + begin[owner]
        ends = np.cumsum(counts[owner] * call.q.shape[1])
        rows = ends - counts[owner] * call.q.shape[1]
        chunks = np.stack([owner, chunk * CHUNK, rows], 1)
        return cls(chunks, first, _wide(segment.block_table), starts, seen, origins, int(ends[-1]) if len(ends) else 0)


def _wide(t: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(t.numpy(), np.int64)


def _seen(call: AttendCall, segment: Segment, sequence: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The positions `[T, 2]`, from and to before, that each query sees: with the options supported here it is one interval."""
    options, lengths = call.options, _wide(call.batch.seq_lens)[sequence]
    position = lengths - starts[sequence + 1] + np.arange(len(sequence))
    causal = options.causal if isinstance(options.causal, bool) else options.causal.numpy()[sequence]
    low, high = np.zeros_like(position), np.where(causal, position + 1, lengths)
    window, chunk = window_size(options)
    if chunk:
        low = (position // chunk - options.chunk_lookback) * chunk
    elif window:
        low, high = position - window + 1, np.minimum(high, position + window)
    if segment.key_range is not None:
        bounds = _wide(segment.key_range)[sequence]
        low, high = np.maximum(low, bounds[:, 0]), np.minimum(high, bounds[:, 1])
    return np.stack([np.maximum(low, 0), np.minimum(high, lengths)], 1)


def _attend_segment(
    call: AttendCall, segment: Segment, plan: SegmentPlan, traits: tuple[sides.Description, sides.Description], matrix: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """out `[T, HQ, D_V]` and log-sum-exp `[T, HQ]`, float32, over the keys of one segment."""
    from . import kernels

    (k, v, fmt), maps, heads = segment[:3], segment.maps, segment.k.codes.shape[2]
    q = call.q.detach().float()
    parts = q.split(segment.stored_sizes, -1) if fmt.latent else (q,)
    met = (k, fmt.k, maps.k), (v, fmt.v, maps.v)  # of rows that are no latents the first alone
    mapped = [_for_keys(part, *side, call.scale, matrix, heads) for part, side in zip(parts, met)]
    queries = mapped[0] if len(mapped) == 1 else torch.cat(mapped, -1)
    key_mean = None if maps.k is None else maps.k.key_mean
    mean_scores = q.new_empty(*q.shape[:2], 0) if key_mean is None else _by_head(q * call.scale, key_mean.permute(1, 2, 0), heads)
    out, lse = q.new_empty(*q.shape[:2], segment.head_size_v), q.new_empty(q.shape[:2])
    sums, totals = np.empty((plan.packed_rows, segment.head_size_v), np.float32), np.empty((plan.packed_rows, 2), np.float32)
    key, other, size = traits[0].of(k), traits[1].of(v), k.codes.shape[1]
    rotated, value = (other, key) if fmt.latent else (other[:0], other)
    where = (size, plan.chunks, plan.pages, plan.starts, plan.seen, plan.origins)
    what = (key, rotated, value, queries.contiguous().numpy(), mean_scores.contiguous().numpy(), call.options.softcap, sums, totals)
    smallest = SMALLEST_PART // (kernels.CHUNK * (q.shape[2] + segment.head_size_v))
    in_parts(len(plan.chunks) * heads, smallest, lambda first, last: kernels.attend_chunks(first, last, *where, *what))
    kernels.combine_chunks(plan.chunks, plan.first, plan.starts, sums, totals, out.numpy(), lse.numpy())
    side, codec, value_map = segment.values
    by_map = matrix(sides.output_matrix, value_map, codec.planes, side.scale)
    if by_map is not None:
        return _by_head(out, by_map, heads), lse
    out = out.unflatten(-1, (codec.planes, -1)).mT.flatten(-2)
    return out if side.scale == 1 else out * side.scale, lse


def _for_keys(
    q: torch.Tensor, side: PagedTensor, codec: Codec, map_: LinearMap | None, scale: float, matrix: Callable, heads: int
) -> torch.Tensor:
    """Queries `[T, HQ, D]` as they meet what a side stores: mapped, in its planes and scaled."""
    by_map = matrix(sides.query_matrix, map_, codec.planes, scale * side.scale)
    if by_map is not None:
        return _by_head(q, by_map, heads)
    return (q * (scale * side.scale)).unflatten(-1, (-1, codec.planes)).mT.flatten(-2)


def _by_head(rows: torch.Tensor, matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """`rows [T, HQ, D]` times the matrix of each one's kv head, `[HK or 1, D, N]`: `[T, HQ, N]`."""
    if matrix.shape[0] == 1:
        return rows @ matrix[0]
    return (
        (rows.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2) @ matrix).unflatten(1, (len(rows), -1)).transpose(0, 1).flatten(1, 2)
    )
