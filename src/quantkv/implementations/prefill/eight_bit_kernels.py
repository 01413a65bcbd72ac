"""Queries and keys of a prompt -> 8-bit integers, as `reference/eight_bit.py` says."""

import triton
import triton.language as tl

ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float added to it is rounded to an integer, ties to even


@triton.jit
def load_rows(ptr, stride, row, real, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows as float32 `[N, WIDTH]`, zeros where they are not real and beyond D."""
    column = tl.arange(0, WIDTH)
    mask = real[:, None] & (column < D)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rounded(x, largest, LARGEST: tl.constexpr):
    """Integers of rows `[N, WIDTH]`, of which largest `[N or 1]` becomes LARGEST. A number half as large as the largest is a tie, which
    half an ulp of the step decides: so division is to nearest, and a launch that fuses no product with an addition."""
    step = tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
    return ((x * step[:, None] + ROUNDER) - ROUNDER).to(tl.int8)


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """What an integer stands for."""
    return tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit(do_not_specialize=["num_heads"])
def sample_mean_kernel(
    keys, key_head, key_row, rows, used, means, num_heads, D: tl.constexpr, WIDTH: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (sequences, kv heads). means `[S, HK, D]` float32: of at most SAMPLE of a sequence's keys."""
    seq, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(rows + seq), tl.load(used + seq)
    step = tl.maximum((count + SAMPLE - 1) // SAMPLE, 1)
    taken = (count + step - 1) // step
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, taken, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.sum(load_rows(keys + head.to(tl.int64) * key_head, key_row, first + index * step, index < taken, D, WIDTH), 0)
    column = tl.arange(0, WIDTH)
    tl.store(means + (seq * num_heads + head) * D + column, total / tl.maximum(taken, 1), mask=column < D)


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def round_keys_kernel(
    keys,
    key_head,
    key_row,
    rows,
    used,
    means,
    codes,
    scales,
    num_rows,
    num_heads,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Grid (blocks of BLOCK keys, sequences, kv heads). codes `[HK, num_rows, D]`; scales `[HK, num_rows]`: that of a block where its
    first key is. ROOM: the next power of two."""
    at, seq, head = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, count = tl.load(rows + seq), tl.load(used + seq)
    if at >= count:
        return
    column, index = tl.arange(0, WIDTH), tl.arange(0, ROOM)
    real = (index < BLOCK) & (at + index < count)
    mask = real[:, None] & (column < D)[None, :]
    row = first + at + index
    mean = tl.load(means + (seq * num_heads + head) * D + column, mask=column < D, other=0.0)
    x = tl.where(mask, load_rows(keys + head * key_head, key_row, row, real, D, WIDTH) - mean[None, :], 0.0)
    largest = tl.max(tl.max(tl.abs(x), 1, keep_dims=True), 0)
    largest = tl.maximum(largest, SMALLEST) + tl.sum(tl.sum(x * 0.0, 1, keep_dims=True), 0)  # a maximum may pass over NaN
    place = head * num_rows + row.to(tl.int64)
    tl.store(codes + place[:, None] * D + column[None, :], rounded(x, largest, LARGEST), mask=mask)
    tl.store(scales + head * num_rows + first + at + tl.arange(0, 1), scale_of(largest, LARGEST))


@triton.jit
def round_queries_kernel(
    q,
    q_token,
    q_head,
    queries,
    means,
    codes,
    scales,
    added,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of BLOCK queries of a sequence, sequences, HEADS query heads). codes `[M, HEADS, D]`; scales, added `[M, HEADS]`:
    added is the query times the mean of its sequence's keys."""
    seq, head = tl.program_id(1), tl.program_id(2)
    token = tl.load(queries + seq) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = token < tl.load(queries + seq + 1)
    column = tl.arange(0, WIDTH)
    mean = tl.load(means + (seq * (HEADS // GROUP) + head // GROUP) * D + column, mask=column < D, other=0.0)
    x = load_rows(q + head.to(tl.int64) * q_head, q_token, token, real, D, WIDTH)
    largest = tl.maximum(tl.max(tl.abs(x), 1), SMALLEST) + tl.sum(x * 0.0, 1)
    place = token.to(tl.int64) * HEADS + head
    tl.store(codes + place[:, None] * D + column[None, :], rounded(x, largest, LARGEST), mask=real[:, None] & (column < D)[None, :])
    tl.store(scales + place, scale_of(largest, LARGEST), mask=real)
    tl.store(added + place, tl.sum(x * mean[None, :], 1), mask=real)
