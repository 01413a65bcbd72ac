"""Pages -> rows of several sequences, one after the other."""

import triton
import triton.language as tl

from .tiles import decode, join_planes, load_cached


@triton.jit
def sequences_of(starts, row, num_seqs, BLOCK_N: tl.constexpr):
    """The sequence `[N]` whose rows `row [N]` are among: the last that begins at or before each of them."""
    low = tl.zeros([BLOCK_N], tl.int32)
    high = tl.zeros([BLOCK_N], tl.int32) + num_seqs
    for _ in range(32 if num_seqs > 65535 else 16):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(starts + middle).to(tl.int64) <= row)
        high = tl.where(below | (low >= high), high, middle)
        low = tl.where(below, middle + 1, low)
    return low - 1


@triton.jit
def copy_rows(pages, out, head, row, page, slot, mask, factor, PLAN: tl.constexpr):
    """Decode rows `[N]` in slots of pages, times factor, into rows of `out`, in their mapped space."""
    FACTORS: tl.constexpr = PLAN.factors
    P: tl.constexpr = PLAN.codec.planes
    words, meta = load_cached(pages, page, slot, head, mask, PLAN)
    planes, affine = decode(words, meta, pages.table, PLAN, False)
    rows = ()
    for p in tl.static_range(P):
        x = planes[p].to(tl.float32) * FACTORS[p]
        if len(affine) > 0:
            x *= affine[0][:, None]
        if len(affine) > 1:
            x += affine[1][:, None]
        rows = rows + ((x * factor).to(out.ptr.dtype.element_ty),)
    column = tl.arange(0, PLAN.width * P)[None, :]
    to = out.ptr + (row * out.stride_token + head * out.stride_head)[:, None] + column
    tl.store(to, join_planes(rows), mask=mask[:, None] & (column < PLAN.head_size))


@triton.jit(do_not_specialize=["starts", "first", "table", "num_seqs", "num_rows"])  # of any requests of a step, at any address
def gather_rows_kernel(
    k_pages,
    v_pages,
    starts,
    first,
    table,
    stride_table,
    keys,
    values,
    num_seqs,
    num_rows,
    k_factor,
    v_factor,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Grid (blocks of BLOCK_N rows, kv heads, 2: K and V). starts `[S + 1]`: the rows of each sequence. first `[S]`: the position of the
    first of them, or None: 0. keys, values `[num_rows or more, HK, D]`."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < tl.minimum(tl.load(starts + num_seqs).to(tl.int64), num_rows)
    sequence = sequences_of(starts, row, num_seqs, BLOCK_N)
    sequence = tl.minimum(sequence, num_seqs - 1)
    position = row - tl.load(starts + sequence).to(tl.int64)
    if first is not None:
        position += tl.load(first + sequence).to(tl.int64)
    page = tl.load(table + sequence.to(tl.int64) * stride_table + position // PAGE, mask=mask, other=0).to(tl.int64)
    if tl.program_id(2) == 0:
        copy_rows(k_pages, keys, head, row, page, position % PAGE, mask, k_factor, K)
    else:
        copy_rows(v_pages, values, head, row, page, position % PAGE, mask, v_factor, V)
