"""Partial outputs -> output: the splits of a call, and the segments of a sequence, combined by their log-sum-exp."""

import triton
import triton.language as tl

from .attend import LOG2E
from .codes import to_float8
from .tiles import hadamard, load_diagonal, load_matrix, map_product


@triton.jit
def combine_splits(
    part, lse, row, row_mask, base, splits, begin, end, first_column, D: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Sum of exp2(lse - base) part `[R, WIDTH]`, from first_column on, over splits begin .. end; and of the weights, `[R]`."""
    column = (first_column + tl.arange(0, WIDTH))[None, None, :]
    total = tl.zeros([row.shape[0]], tl.float32)
    combined = tl.zeros([row.shape[0], WIDTH], tl.float32)
    for start in range(begin, end, CHUNK):
        split = start + tl.arange(0, CHUNK)
        at = row[None, :] * splits + split[:, None]
        weight = tl.exp2(tl.load(lse + at, mask=(split < end)[:, None] & row_mask[None, :], other=float("-inf")) - base[None, :])
        # A split without keys left its part unwritten.
        x = tl.load(part + at[:, :, None] * D + column, mask=(weight > 0)[:, :, None] & (column < D), other=0.0)
        combined += tl.sum(x * weight[:, :, None], axis=0)
        total += tl.sum(weight, axis=0)
    return combined, total


@triton.jit
def repeat_rows(x, COUNT: tl.constexpr):
    """`[R, W]` -> `[COUNT R, W]`: a dot needs 16 rows."""
    return tl.reshape(tl.broadcast_to(x[None, :, :], [COUNT, x.shape[0], x.shape[1]]), [COUNT * x.shape[0], x.shape[1]])


@triton.jit
def first_repeat(x, COUNT: tl.constexpr):
    """Reverses `repeat_rows`."""
    return tl.max(tl.reshape(x, [COUNT, x.shape[0] // COUNT, x.shape[1]]), axis=0)


@triton.jit(do_not_specialize=["num_rows", "splits", "mapped_splits"])
def combine_kernel(
    part,
    lse,
    out,
    out_lse,
    v_map,
    sinks,
    num_rows,
    splits,
    mapped_splits,
    mapped_factor,
    plain_factor,
    output_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
    PLAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of ROWS rows, kv heads, blocks of OWN columns); a row is one of the GROUP heads of a token. part `[T, HQ, splits, D]`,
    lse `[T, HQ, splits]` base 2 -> out `[T, HQ, D]`, out_lse `[T, HQ]` natural, sinks included (ptr None: not asked for).

    The first mapped_splits splits go through the map, times mapped_factor; the others are multiplied by plain_factor. MAPPED: 1, by the
    matrix that v_map has; -n, by Hadamard matrices of size n and the diagonal that it has; 0, there are none."""
    HADAMARD: tl.constexpr = -MAPPED if MAPPED < 0 else 0
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    row_mask = index < num_rows
    token = index // GROUP
    q_head = head * GROUP + index % GROUP
    row = token * heads + q_head
    CHUNK: tl.constexpr = 16 // ROWS

    top = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + q_head, mask=row_mask, other=0.0).to(tl.float32) * LOG2E
    sink = top
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)[:, None]
        value = tl.load(lse + row[None, :] * splits + split, mask=(split < splits) & row_mask[None, :], other=float("-inf"))
        top = tl.maximum(top, tl.max(value, axis=0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(sink - base)
    COLUMNS: tl.constexpr = OWN if OWN <= 64 or HADAMARD > 0 else 64 if WIDTH <= 128 else 32 if MAPPED != 0 else OWN
    mapped = tl.zeros([ROWS, WIDTH], tl.float32)
    if MAPPED != 0:
        mapped, weight = combine_splits(part, lse, row, row_mask, base, splits, 0, mapped_splits, 0, D, WIDTH, CHUNK)
        total += weight
    for done in tl.static_range(0, OWN, COLUMNS):
        first = tl.program_id(2) * OWN + done
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        column = first + tl.arange(0, COLUMNS)
        if HADAMARD > 0:
            result = hadamard(mapped, HADAMARD) * load_diagonal(v_map, head, column, D) * mapped_factor
        elif MAPPED != 0:
            matrix = load_matrix(v_map, head, column, 0, D, WIDTH)
            back = map_product(repeat_rows(mapped, CHUNK), matrix, tl.zeros([16, COLUMNS], tl.float32), PRECISION)
            result = first_repeat(back, CHUNK) * mapped_factor
        if PLAIN:
            x, weight = combine_splits(part, lse, row, row_mask, base, splits, mapped_splits, splits, first, D, COLUMNS, CHUNK)
            result += x * plain_factor
            if done == 0:
                total += weight
        result *= tl.where(total > 0, 1 / total, 0.0)[:, None]
        at = out.ptr + (token * out.stride_token + q_head * out.stride_head)[:, None] + column[None, :]
        stored = row_mask[:, None] & (column < D)[None, :]
        if out.ptr.dtype.element_ty == tl.uint8:  # float8 e4m3
            result = to_float8(tl.div_rn(result, tl.full(result.shape, 0.0, tl.float32) + output_scale), 3, 7, 448.0)
        tl.store(at, result, mask=stored)
    if out_lse.ptr is not None:
        at = out_lse.ptr + token * out_lse.stride_token + q_head * out_lse.stride_head
        tl.store(at, (base + tl.log2(total)) / LOG2E, mask=row_mask & (tl.program_id(2) == 0))
