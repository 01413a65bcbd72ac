"""Many queries over a quantized cache: its keys and values go once through a bounded 16-bit scratch to dense attention.

With hundreds of queries attention is bound by arithmetic, and writing the rows out costs a few percent of it: 2 ns a key on
an H200, where 4,096 queries of 32 heads cost 100 ns. So the pages are dequantized slice by slice, the best dense kernel there
is (`backends.py`) runs on each slice, and log-sum-exps merge the results. New tokens are read back like all others: the result
is attention over the cache, whatever ran.

Segments beside one that holds all positions, exact tokens say, are written over its rows in the scratch.

Rows may stay in their mapped space, where a slice needs no product: `q . k^ = (A^-T q) . (y^ + A off)`, so q is mapped once, and
the merged output once. Where there are not many more rows than queries, the rows are mapped back as they are written out: one
product in a launch that waits for memory, instead of two launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...calls import AttendCall
from ...maps import LayerMaps
from . import backends
from .steps import Part, TorchSteps

SCRATCH_BYTES = 256 << 20  # of a slice's keys and values; 65,536 tokens of 8 heads of 128
MIN_QUERIES = 128  # fewer do not pay for writing the rows out: measured over 2,048 and 16,384 keys
# Rows of a cache for each query row, at most, that are mapped back: 131,072 keys and values take 15 us longer then, and as many
# queries and outputs take 50 us to map.
MAPPED_BACK = 2
MAX_SEQUENCES = 8  # each costs its own launches


HONOURED: frozenset[str] = frozenset()  # plain causal attention only
QUERIES = range(MIN_QUERIES, 1 << 62)  # of a sequence, that this is made for


def refusal(call: AttendCall) -> str | None:
    """Why `run` does not serve a call, None where it does: the one rule. Reads no tensor."""
    q, s, num_seqs, lengths = call.q, call.segments[0], call.batch.num_seqs, call.batch.lengths
    if s.key_start is not None or ((len(call.segments) > 1 or s.key_range is not None) and not s.complete):
        return "several segments, or a range of keys, of which the first does not hold all positions"
    if any((other.key_start is None) == (other.key_range is None) for other in call.segments[1:]):
        return "a second segment with neither key_start nor key_range, or with both"
    if call.out.dtype != q.dtype:
        return f"out of {call.out.dtype}: q's dtype is needed"
    if num_seqs > MAX_SEQUENCES:
        return f"{num_seqs} sequences, more than {MAX_SEQUENCES}"
    if q.shape[0] < MIN_QUERIES * num_seqs:
        return f"{q.shape[0]} queries, fewer than {MIN_QUERIES} for each of {num_seqs} sequences"
    if lengths is not None and min(queries for queries, _ in lengths) < MIN_QUERIES:
        return f"a sequence has fewer than {MIN_QUERIES} queries"
    if lengths is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the lengths would be read on the host, which a captured graph cannot do"
    sizes = (q.shape[2], s.head_size_v)
    if backends.choose(q.device, q.dtype, *sizes) is None:
        return f"no dense backend for {q.dtype} rows of {sizes[0]} and {sizes[1]} on {q.device.type}"
    return None


def run(call: AttendCall) -> None:
    """Serve `call`, into its out and lse. Lengths that the host does not know are read from the device, which it waits for: 5 to 10 %
    of a chunk of 4,096 on an H200."""
    serve(call)


def prepare(call: AttendCall) -> Callable[[AttendCall], None]:
    """What serves every call of the same batch."""
    lengths = call.batch.host_lengths()
    return lambda call: serve(call, lengths=lengths)


def serve(
    call: AttendCall,
    *,
    backend: str | None = None,
    triton: bool | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> None:
    """`run`, with what it would choose given. backend: of `backends.py`; None: the fastest for these rows. triton: whether Triton kernels
    move the rows (else PyTorch); None: on an accelerator. scratch_bytes: bound of the rows that are 16-bit at one time.
    lengths: (queries, keys) of each sequence; None: those of the batch."""
    q, out, scale, (k, v, fmt, block_table, maps, *_) = call.q, call.out, call.scale, call.segments[0]
    lengths = call.batch.host_lengths() if lengths is None else lengths
    heads, sizes = k.codes.shape[2], (q.shape[2], call.segments[0].head_size_v)
    backend = backend or backends.choose(q.device, q.dtype, *sizes)
    if backend is None:
        raise ValueError(f"q: no dense backend for {q.dtype} rows of {sizes[0]} and {sizes[1]} on {q.device.type}")
    few = heads * sum(keys for _, keys in lengths) <= MAPPED_BACK * q.shape[0] * q.shape[1]
    steps = _steps(q.is_cuda if triton is None else triton)((k, v), fmt, maps, heads, few and _cheap(maps))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if call.lse is None else call.lse
    whole = backend in backends.BOTTOM_RIGHT
    ragged = not whole and any(queries % backends.PLANNED for queries, _ in lengths)
    rows = steps.map_query(q, backends.PLANNED if ragged else 0)

    most = max(scratch_bytes // (heads * sum(sizes) * q.element_size()) // backends.PLANNED, 1) * backends.PLANNED
    most = min(most, backends.planned(block_table.shape[1] * k.codes.shape[1]))
    scratch = [q.new_empty(heads * most * size) for size in sizes]
    for piece in _pieces(lengths, most, whole):
        total = None
        start, stop = piece.tokens.start, piece.tokens.stop
        # Rows beyond the piece's own, another sequence's or none, are computed for a planned shape's sake and dropped.
        queries = rows[start : stop if whole else start + backends.planned(stop - start)]
        for first, count in piece.slices:
            causal = (first, count) == piece.slices[-1]
            room = len(queries) if causal and not whole else count
            sliced = [buffer[: heads * room * size].view(heads, room, size) for buffer, size in zip(scratch, sizes)]
            steps.gather(block_table[piece.sequence], first, count, sliced)
            for other in call.segments[1:]:
                steps.patch(other, piece.sequence, lengths[piece.sequence][1], first, count, sliced)
            target = out[piece.tokens]
            ready = len(piece.slices) == 1 and steps.maps[1] is None and len(queries) == len(target)  # nothing is left to do to the rows
            found = backends.attend(backend, queries, *sliced, scale, causal, target if ready else None)
            part = Part(*(t[: stop - start] for t in found))
            if causal:  # the last
                steps.finish(total, part, target, lse[piece.tokens])
            else:
                total = part if total is None else steps.merge(total, part)


@dataclass(frozen=True)
class _Piece:
    """Queries of one sequence that are served together, and the slices (first key, count) of keys that they see."""

    sequence: int
    tokens: slice
    slices: list[tuple[int, int]]


def _pieces(lengths: Sequence[tuple[int, int]], most: int, whole: bool) -> Iterator[_Piece]:
    """Cut the batch so that no slice has more than `most` keys. The queries see the last slice of a piece causally, the earlier
    ones whole. The last one is the queries' own keys, and all of the others but one are of a planned size; if `whole`, as much
    of the context as fits comes before their own keys."""
    end = 0
    for s, (queries, keys) in enumerate(lengths):
        start, end = end, end + queries
        for first in range(start, end, most):
            last = min(first + most, end)
            context = keys - (end - first)
            stop = context + last - first
            if whole:
                cuts = {*range(0, stop - most, most), max(stop - most, 0), stop}
            else:
                cuts = {*range(0, context, most), context - context % backends.PLANNED, context, stop}
            yield _Piece(s, slice(first, last), [(low, high - low) for low, high in pairwise(sorted(cuts))])


def _cheap(maps: LayerMaps) -> bool:
    """Whether a product by every matrix is one 16-bit dot of a tile: entries 0 and +-f only, and no more than 128 of them a row."""
    inverses = [map_.operands.output for map_ in (maps.k, maps.v) if map_ is not None]
    return all(inverse.dtype == torch.bfloat16 and inverse.shape[-1] <= 128 for inverse in inverses)


def _steps(triton: bool) -> type[TorchSteps]:
    if not triton:
        return TorchSteps
    from .triton_steps import TritonSteps

    return TritonSteps
