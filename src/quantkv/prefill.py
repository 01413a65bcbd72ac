"""Many queries over a quantized cache: its keys and values go once through a bounded 16-bit scratch to dense attention.

With hundreds of queries attention is bound by arithmetic, and writing the rows out costs a few percent of it: 2 ns a key on
an H200, where 4,096 queries of 32 heads cost 100 ns. So the pages are dequantized slice by slice, the best dense kernel there
is (`dense.py`) runs on each slice, and log-sum-exps merge the results. New tokens are read back like all others: the result
is attention over the cache, whatever ran.

Rows stay in their mapped space, where a slice needs no product: `q . k^ = (A^-T q) . (y^ + A off)`, so q is mapped once, and
the merged output once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from . import dense, reference
from .format import Format
from .maps import OFFSET_BUCKET, LayerMaps, LinearMap
from .reference import AttentionOptions, Side

SCRATCH_BYTES = 256 << 20  # of a slice's keys and values; 65,536 tokens of 8 heads of 128
MIN_QUERIES = 256  # fewer do not pay for writing the rows out
MAX_SEQUENCES = 8  # each costs its own launches


def refusal(
    q: torch.Tensor, v: Side, fmt: Format, num_seqs: int, options: AttentionOptions, batch_invariant: bool = False
) -> str | None:
    """Why `attend` here does not serve a call, None where it does: the one rule. Reads no tensor."""
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
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "lengths are read on the host, which a captured graph cannot do"
    if dense.choose(q.device, q.dtype, q.shape[2], head_size_of(v, fmt)) is None:
        return f"no dense backend for {q.dtype} rows of {q.shape[2]} and {head_size_of(v, fmt)} on {q.device.type}"
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention as `reference.attend` has it: out `[T, HQ, D_V]` of q's dtype, log-sum-exp `[T, HQ]` float32.

    backend: of `dense.py`; None: the fastest for these rows. triton: whether Triton kernels move the rows (else PyTorch);
    None: on an accelerator. scratch_bytes: bound of the rows that are 16-bit at one time.
    The lengths are read on the host: one synchronisation.
    """
    head_size_v, heads = head_size_of(v, fmt), k.codes.shape[2]
    backend = backend or dense.choose(q.device, q.dtype, q.shape[2], head_size_v)
    if maps is None:
        maps = LayerMaps.of(fmt, q.shape[2], head_size_v, q.device)
    steps = _steps(q.is_cuda if triton is None else triton)
    k_map, v_map = scratch_map(maps.k), scratch_map(maps.v)
    out = q.new_empty(q.shape[0], q.shape[1], head_size_v) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    rows = q if k_map.inverse is None else steps.map_rows(q, k_map.inverse.mT)

    token_bytes = heads * (q.shape[2] + head_size_v) * q.dtype.itemsize
    most = max(scratch_bytes // token_bytes // OFFSET_BUCKET, 1) * OFFSET_BUCKET
    most = min(most, block_table.shape[1] * k.codes.shape[1])
    scratch = [q.new_empty(heads * most * size) for size in (q.shape[2], head_size_v)]
    sides = ((k, fmt.k, k_map, q.shape[2]), (v, fmt.v, v_map, head_size_v))
    for piece in _pieces(cu_seqlens_q.tolist(), seq_lens.tolist(), most):
        total = None
        for first, count in piece.slices:
            sliced = [
                buffer[: heads * count * size].view(heads, count, size) for buffer, (*_, size) in zip(scratch, sides)
            ]
            steps.gather(sides, block_table[piece.sequence], first, sliced)
            causal = first == piece.context
            part = dense.attend(backend, rows[piece.tokens], *sliced, scale, causal)
            if causal:  # the last
                steps.finish(total, part, v_map.inverse, out[piece.tokens], lse[piece.tokens])
            else:
                total = part if total is None else steps.merge(total, part)
    return out, lse


def head_size_of(side: Side, fmt: Format) -> int:
    """Elements of a V row."""
    return side.codes.shape[-1] * 8 * side.codes.dtype.itemsize // fmt.v.row.code_bits


@dataclass(frozen=True)
class _Piece:
    """Queries of one sequence that are served together, and the slices (first key, count) of keys that they see."""

    sequence: int
    tokens: slice
    context: int  # position of the first query
    slices: list[tuple[int, int]]


def _pieces(starts: list[int], lens: list[int], most: int) -> Iterator[_Piece]:
    """Cut the batch so that no slice has more than `most` keys. The last slice of a piece is the queries' own keys, which
    they see causally; the earlier ones they see whole."""
    for s, length in enumerate(lens):
        for first in range(starts[s], starts[s + 1], most):
            last = min(first + most, starts[s + 1])
            context = length - (starts[s + 1] - first)
            slices = [(low, min(most, context - low)) for low in range(0, context, most)]
            yield _Piece(s, slice(first, last), context, [*slices, (context, last - first)])


@dataclass(frozen=True)
class ScratchMap:
    """A side's map for rows that are stored divided by `gain`, a power of two near the map's own gain: an unnormalised
    Hadamard matrix would carry fp16 rows out of range.

    inverse: `gain A^-1`, `[HK or 1, D, D]` float32, None for no map. offset: `A off / gain`, `[buckets, HK or 1, D]` float32.
    """

    gain: float = 1.0
    inverse: torch.Tensor | None = None
    offset: torch.Tensor | None = None


@lru_cache(maxsize=256)  # by identity: a layer's tensors
def scratch_map(map_: LinearMap | None) -> ScratchMap:
    if map_ is None:
        return ScratchMap()
    rms = float(map_.forward.square().sum(-1).mean().sqrt())
    gain = 2.0 ** round(math.log2(rms)) if rms > 0 else 1.0
    offset = map_.offset
    if offset is not None:
        size = max(offset.shape[1], map_.forward.shape[0])
        offset = reference.apply_map(map_.forward, offset.expand(-1, size, -1)) / gain
    return ScratchMap(gain, map_.inverse * gain, offset)


class _TorchSteps:
    """What happens between the pages and the dense kernel, in PyTorch; `kernels/prefill.py` has the same three in Triton."""

    @staticmethod
    def map_rows(q: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """`matrix[h] @ q[t, g]` for the query heads g of kv head h, rounded to q's dtype."""
        if matrix.shape[0] > 1:
            matrix = matrix.repeat_interleave(q.shape[1] // matrix.shape[0], 0)
        return reference.apply_map(matrix, q.float()).to(q.dtype)

    @staticmethod
    def gather(sides, pages: torch.Tensor, first: int, scratch: list[torch.Tensor]) -> None:
        """Keys and values first to first + count, as they are in their mapped space, into scratch `[HK, count, D]`.

        sides: (side, codec, scratch map, head size) of K and of V. pages: `[n]`, one sequence's row of the block table.
        """
        for (side, codec, map_, _), target in zip(sides, scratch):
            size = side.codes.shape[1]
            position = torch.arange(first, first + target.shape[1], device=pages.device)
            slots = pages[position // size].long() * size + position % size
            rows = reference.dequantize(side._replace(scale=side.scale / map_.gain), codec, None, slots)
            if map_.offset is not None:
                rows = rows + map_.offset[(position // OFFSET_BUCKET).clamp_max(map_.offset.shape[0] - 1)]
            target.copy_(rows.transpose(0, 1))

    @staticmethod
    def merge(a, b):
        """Attention over the union of two key sets: (out float32, lse)."""
        return reference.merge(torch.stack([a[0].float(), b[0].float()]), torch.stack([a[1], b[1]]))

    @staticmethod
    def finish(total, part, matrix: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge with the last part (total: None where it is the only one), map back, store."""
        rows, sums = part if total is None else _TorchSteps.merge(total, part)
        out.copy_(rows if matrix is None else _TorchSteps.map_rows(rows.float(), matrix))
        lse.copy_(sums)


def _steps(triton: bool):
    if not triton:
        return _TorchSteps
    from .kernels import prefill

    return prefill
