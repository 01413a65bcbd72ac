"""Pages -> 16-bit rows for a dense attention kernel, and its outputs over several slices of keys -> one."""

import triton
import triton.language as tl

from ..triton.kernels.tiles import decode, join_operand, join_planes, load_cached, load_matrix, map_product, offset_row


@triton.jit
def gather_rows(
    pages,
    map,
    table,
    target,
    head,
    first,
    index,
    count,
    room,
    factor,
    back_factor,
    PAGE: tl.constexpr,
    PLAN: tl.constexpr,
    BACK: tl.constexpr,
):
    """Decode keys first + index of one head, times factor, into `target [HK, room, D]`: mapped as they are, or mapped back, times
    back_factor (BACK). What is beyond count reads as zero bits, which are finite. map.offset: in units of what is stored; not added to
    rows that were stored without."""
    FACTORS: tl.constexpr = PLAN.factors
    P: tl.constexpr = PLAN.codec.planes
    D: tl.constexpr = PLAN.head_size
    W: tl.constexpr = PLAN.width
    key = first + index
    mask = index < count
    page = tl.load(table + key // PAGE, mask=mask, other=0).to(tl.int64)
    words, meta = load_cached(pages, page, key % PAGE, head, mask, PLAN)
    planes, affine = decode(words, meta, pages.table, PLAN, False)
    shifted = mask
    if PLAN.signed:
        shifted = mask & (affine[0] >= 0)
    rows = ()
    for p in tl.static_range(P):
        x = planes[p].to(tl.float32) * FACTORS[p]
        if len(affine) > 0:
            x *= affine[0][:, None]
        if len(affine) > 1:
            x += affine[1][:, None]
        x *= factor
        if PLAN.offset and not BACK:
            offset = offset_row(map, head, (key // 64)[:, None], (tl.arange(0, W) * P + p)[None, :], D)
            x += tl.where(shifted[:, None], offset, 0.0)
        rows = rows + (x.to(target.dtype.element_ty),)
    column = tl.arange(0, W * P)
    if BACK:
        if target.dtype.element_ty.primitive_bitwidth == 16:
            operand = join_operand(rows)
        else:
            operand = join_planes(rows)
        matrix = load_matrix(map, head, column, 0, D, W * P)
        joined = map_product(operand, matrix, tl.zeros([index.shape[0], W * P], tl.float32), "ieee") * back_factor
        if PLAN.offset:
            joined += tl.where(shifted[:, None], offset_row(map, head, (key // 64)[:, None], column[None, :], D), 0.0)
        joined = joined.to(target.dtype.element_ty)
    else:
        joined = join_planes(rows)
    at = target + (head * room + index)[:, None] * D + column[None, :]
    tl.store(at, joined, mask=(index < room)[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["first", "count", "room"])
def gather_kernel(
    k_pages,
    v_pages,
    k_map,
    v_map,
    table,
    keys,
    values,
    first,
    count,
    room,
    k_factor,
    v_factor,
    k_back,
    v_back,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BACK: tl.constexpr,
):
    """Grid (blocks of keys, kv heads, 2: K and V). table: one sequence's pages. BACK: mapped rows are mapped back, by matrices of
    entries 0 and +-1."""
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        gather_rows(k_pages, k_map, table, keys, head, first, index, count, room, k_factor, k_back, PAGE, K, BACK and K.mapped)
    else:
        gather_rows(v_pages, v_map, table, values, head, first, index, count, room, v_factor, v_back, PAGE, V, BACK and V.mapped)


@triton.jit
def row_pointers(rows, token, head):
    """Where the row of a token and head begins."""
    return rows.ptr + token * rows.stride_token + head * rows.stride_head


@triton.jit(do_not_specialize=["num_rows"])
def fold_kernel(
    a,
    b,
    a_lse,
    b_lse,
    out_lse,
    out,
    map,
    num_rows,
    factor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
    MAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of rows, kv heads); a row is one of the GROUP heads of a token. Two results over disjoint keys, merged by
    their natural log-sum-exps (MERGED, else a alone), and then through the map, times factor (MAPPED)."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = index < num_rows
    token = index // GROUP
    q_head = head * GROUP + index % GROUP
    weight = tl.full([BLOCK], 1.0, tl.float32)
    other = tl.zeros([BLOCK], tl.float32)
    if MERGED:
        x = tl.load(row_pointers(a_lse, token, q_head), mask=real, other=0.0)
        y = tl.load(row_pointers(b_lse, token, q_head), mask=real, other=0.0)
        top = tl.maximum(x, y)
        weight = tl.exp(x - top)
        other = tl.exp(y - top)
        total = weight + other
        tl.store(row_pointers(out_lse, token, q_head), top + tl.log(total), mask=real)
        weight /= total
        other /= total
    column = tl.arange(0, WIDTH)
    stored = real[:, None] & (column < D)[None, :]
    CHUNK: tl.constexpr = 64 if MAPPED and WIDTH > 64 else WIDTH
    result = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in tl.static_range(0, D, CHUNK):
        part = start + tl.arange(0, CHUNK)[None, :]
        mask = real[:, None] & (part < D)
        x = tl.load(row_pointers(a, token, q_head)[:, None] + part, mask=mask, other=0.0)
        if MERGED:
            y = tl.load(row_pointers(b, token, q_head)[:, None] + part, mask=mask, other=0.0).to(tl.float32)
            x = x.to(tl.float32) * weight[:, None] + y * other[:, None]
        if MAPPED:
            matrix = load_matrix(map, head, column, start, D, CHUNK)
            if matrix.dtype == out.ptr.dtype.element_ty:
                x = x.to(matrix.dtype)  # a and b were rounded to it: once more costs less than a second product
            else:
                x = x.to(tl.float32)
            result = map_product(x, matrix, result, PRECISION)
        else:
            result = x.to(tl.float32)
    tl.store(row_pointers(out, token, q_head)[:, None] + column[None, :], result * factor, mask=stored)
