"""Many queries over a quantized cache: its keys and values go once through a bounded 16-bit scratch to dense attention.

With hundreds of queries attention is bound by arithmetic, and writing the rows out costs a few percent of it: 2 ns a key on
an H200, where 4,096 queries of 32 heads cost 100 ns. So the pages are dequantized slice by slice, the best dense kernel there
is (`dense.py`) runs on each slice, and log-sum-exps merge the results. New tokens are read back like all others: the result
is attention over the cache, whatever ran.

Rows may stay in their mapped space, where a slice needs no product: `q . k^ = (A^-T q) . (y^ + A off)`, so q is mapped once, and
the merged output once. Where there are not many more rows than queries, the rows are mapped back as they are written out: one
product in a launch that waits for memory, instead of two launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch

from ...calls import AttentionOptions, Side
from ...format import Format
from ...maps import LayerMaps
from . import backends as dense
from .steps import Part, TorchSteps

SCRATCH_BYTES = 256 << 20  # of a slice's keys and values; 65,536 tokens of 8 heads of 128
MIN_QUERIES = 128  # fewer do not pay for writing the rows out: measured over 2,048 and 16,384 keys
# Rows of a cache for each query row, at most, that are mapped back: 131,072 keys and values take 15 us longer then, and as many
# queries and outputs take 50 us to map.
MAPPED_BACK = 2
MAX_SEQUENCES = 8  # each costs its own launches


def refusal(
    q: torch.Tensor,
    v: Side,
    fmt: Format,
    num_seqs: int,
    options: AttentionOptions,
    batch_invariant: bool = False,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> str | None:
    """Why `attend` here does not serve a call, None where it does: the one rule. Reads no tensor. lengths: as there."""
    for field in fields(options):
        value = getattr(options, field.name)
        if value is not field.default and (isinstance(value, torch.Tensor) or value != field.default):
            return f"{field.name} is set"
    if batch_invariant:
        return "batch_invariant: the choice depends on the batch"
    if num_seqs > MAX_SEQUENCES:
        return f"{num_seqs} sequences, more than {MAX_SEQUENCES}"
    if q.shape[0] < MIN_QUERIES * num_seqs:
        return f"{q.shape[0]} queries, fewer than {MIN_QUERIES} for each of {num_seqs} sequences"
    if lengths is not None and min(queries for queries, _ in lengths) < MIN_QUERIES:
        return f"a sequence has fewer than {MIN_QUERIES} queries"
    if lengths is None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the lengths would be read on the host, which a captured graph cannot do"
    sizes = (q.shape[2], fmt.v.head_size(v.codes))
    if dense.choose(q.device, q.dtype, *sizes) is None:
        return f"no dense backend for {q.dtype} rows of {sizes[0]} and {sizes[1]} on {q.device.type}"
    return None


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
    maps: LayerMaps | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
    triton: bool | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention as `reference.attend` has it: out `[T, HQ, D_V]` of q's dtype, log-sum-exp `[T, HQ]` float32.

    backend: of `dense.py`; None: the fastest for these rows. triton: whether Triton kernels move the rows (else PyTorch);
    None: on an accelerator. scratch_bytes: bound of the rows that are 16-bit at one time.
    lengths: (queries, keys) of each sequence, where the host knows them. None: they are read from the device, which the host
    waits for: 5 to 10 % of a chunk of 4,096 on an H200.
    """
    if lengths is None:
        read = torch.cat([cu_seqlens_q.diff(), seq_lens]).tolist()  # one synchronisation
        lengths = list(zip(read, read[len(seq_lens) :]))
    heads, sizes = k.codes.shape[2], (q.shape[2], fmt.v.head_size(v.codes))
    backend = backend or dense.choose(q.device, q.dtype, *sizes)
    if backend is None:
        raise ValueError(f"q: no dense backend for {q.dtype} rows of {sizes[0]} and {sizes[1]} on {q.device.type}")
    maps = LayerMaps.of(fmt, *sizes, q.device) if maps is None else maps
    few = heads * sum(keys for _, keys in lengths) <= MAPPED_BACK * q.shape[0] * q.shape[1]
    steps = _steps(q.is_cuda if triton is None else triton)((k, v), fmt, maps, heads, few and _cheap(maps))
    out = q.new_empty(*q.shape[:2], sizes[1]) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    whole = backend in dense.BOTTOM_RIGHT
    ragged = not whole and any(queries % dense.PLANNED for queries, _ in lengths)
    rows = steps.map_query(q, dense.PLANNED if ragged else 0)

    most = max(scratch_bytes // (heads * sum(sizes) * q.element_size()) // dense.PLANNED, 1) * dense.PLANNED
    most = min(most, dense.planned(block_table.shape[1] * k.codes.shape[1]))
    scratch = [q.new_empty(heads * most * size) for size in sizes]
    for piece in _pieces(lengths, most, whole):
        total = None
        start, stop = piece.tokens.start, piece.tokens.stop
        # Rows beyond the piece's own, another sequence's or none, are computed for a planned shape's sake and dropped.
        queries = rows[start : stop if whole else start + dense.planned(stop - start)]
        for first, count in piece.slices:
            causal = (first, count) == piece.slices[-1]
            room = len(queries) if causal and not whole else count
            sliced = [buffer[: heads * room * size].view(heads, room, size) for buffer, size in zip(scratch, sizes)]
            steps.gather(block_table[piece.sequence], first, count, sliced)
            target = out[piece.tokens]
            ready = len(piece.slices) == 1 and steps.maps[1] is None and len(queries) == len(target)  # nothing is left to do to the rows
            found = dense.attend(backend, queries, *sliced, scale, causal, target if ready else None)
            part = Part(*(t[: stop - start] for t in found))
            if causal:  # the last
                steps.finish(total, part, target, lse[piece.tokens])
            else:
                total = part if total is None else steps.merge(total, part)
    return out, lse


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
                cuts = {*range(0, context, most), context - context % dense.PLANNED, context, stop}
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
