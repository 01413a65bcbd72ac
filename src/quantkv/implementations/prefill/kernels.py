"""Pages -> 16-bit rows for a dense attention kernel, and its outputs over several slices of keys -> one."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..triton.kernels.tiles import decode, join_operand, join_planes, key_mean_row, load_cached, load_matrix, map_product


class PlacesView(NamedTuple):
    """Where keys are, and where their rows go."""

    table: Any  # [S, pages], or of one sequence alone [pages]
    stride: Any  # of the table's sequences; 0 where there is one
    blocks: Any = None  # of several sequences, for each block: sequence, first key, keys, first row, rows


@triton.jit
def place_of(places, index, first, count, room, BLOCK_N: tl.constexpr):
    """Place of a block: its sequence's table, first key, keys from there on, first row, rows from there on."""
    if places.blocks is None:
        at = index * BLOCK_N
        return places.table, first + at, count - at, at, room - at
    else:
        block = places.blocks + index * 5
        table = places.table + tl.load(block).to(tl.int64) * places.stride
        return table, tl.load(block + 1), tl.load(block + 2), tl.load(block + 3), tl.load(block + 4)


@triton.jit
def gather_rows(
    pages,
    map,
    places,
    target,
    head,
    first,
    count,
    room,
    factor,
    back_factor,
    PAGE: tl.constexpr,
    PLAN: tl.constexpr,
    BACK: tl.constexpr,
    TOKEN_MAJOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Decode the keys of one head, BLOCK_N of each of a program's blocks, times factor, into rows of `target`: mapped as they are, or
    mapped back, times back_factor. What is beyond a sequence's keys reads as zero bits, which are finite. map.key_mean: of rows that are
    mapped back; else mapped, and back_factor times it is added. Nothing is added to rows that were stored without it."""
    REPEAT: tl.constexpr = max(BACK, 1)
    MAPPED_BACK: tl.constexpr = BACK > 0 and PLAN.mapped
    FACTORS: tl.constexpr = PLAN.factors
    P: tl.constexpr = PLAN.codec.planes
    D: tl.constexpr = PLAN.head_size
    W: tl.constexpr = PLAN.width
    column = tl.arange(0, W * P)
    if MAPPED_BACK:
        matrix = load_matrix(map, head, column, 0, D, W * P)
    for i in range(REPEAT):
        block = tl.program_id(0) * REPEAT + i
        table, own_first, own_count, row, rows_here = place_of(places, block, first, count, room, BLOCK_N)
        index = tl.arange(0, BLOCK_N)
        key = own_first + index
        mask = index < own_count
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
            if PLAN.key_mean and not MAPPED_BACK:
                key_mean = key_mean_row(map, head, (key // 64)[:, None], (tl.arange(0, W) * P + p)[None, :], D)
                x += tl.where(shifted[:, None], key_mean * back_factor, 0.0)
            rows = rows + (x.to(target.dtype.element_ty),)
        if MAPPED_BACK:
            if target.dtype.element_ty.primitive_bitwidth == 16:
                operand = join_operand(rows)
            else:
                operand = join_planes(rows)
            joined = map_product(operand, matrix, tl.zeros([BLOCK_N, W * P], tl.float32), "ieee") * back_factor
            if PLAN.key_mean:
                joined += tl.where(shifted[:, None], key_mean_row(map, head, (key // 64)[:, None], column[None, :], D), 0.0)
            joined = joined.to(target.dtype.element_ty)
        else:
            joined = join_planes(rows)
        if TOKEN_MAJOR:
            to = (row + index).to(tl.int64) * tl.num_programs(1) + head
        else:
            to = head * room + row + index
        to = target + to[:, None] * D + column[None, :]
        tl.store(to, joined, mask=(index < rows_here)[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["first", "count", "room"])
def gather_kernel(
    k_pages,
    v_pages,
    k_map,
    v_map,
    places,
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
    TOKEN_MAJOR: tl.constexpr,
):
    """Grid (programs, kv heads, 2: K and V). first, count: keys of the one sequence that there is, unless places.blocks has those of each
    block. room: rows of keys and values. TOKEN_MAJOR: these are `[room, HK, D]`, else `[HK, room, D]`. BACK: blocks of a program, where
    mapped rows are mapped back, by matrices of entries 0 and +-1; 0: they are not, and a program has one block."""
    head = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        gather_rows(
            k_pages, k_map, places, keys, head, first, count, room, k_factor, k_back,
            PAGE, K, BACK, TOKEN_MAJOR, BLOCK_N,
        )  # fmt: skip
    else:
        gather_rows(
            v_pages, v_map, places, values, head, first, count, room, v_factor, v_back,
            PAGE, V, BACK, TOKEN_MAJOR, BLOCK_N,
        )  # fmt: skip


class CopiesView(NamedTuple):
    """Pages of rows as they were given, `[num_blocks, block_size, HK, D]`. Strides in elements."""

    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any


class HeldView(NamedTuple):
    """Which keys of each sequence a segment holds."""

    table: Any  # [S, width]
    stride: Any
    width: Any
    key_start: Any = None  # [S]
    key_range: Any = None  # [S, 2]


@triton.jit
def patch_rows(
    pages,
    map,
    held,
    target,
    head,
    sequence,
    low,
    high,
    row,
    room,
    factor,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_MAJOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Those of the keys low to high that a segment holds, mapped if there is a map, times factor, over rows of `target` from `row` on."""
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = low + index
    real = key < high
    slot = key
    if held.key_start is not None:
        slot -= tl.load(held.key_start + sequence).to(tl.int32)
    real &= (slot >= 0) & (slot < held.width * PAGE)
    if held.key_range is not None:
        real &= (key >= tl.load(held.key_range + 2 * sequence)) & (key < tl.load(held.key_range + 2 * sequence + 1))
    page = tl.load(held.table + sequence.to(tl.int64) * held.stride + slot // PAGE, mask=real, other=0).to(tl.int64)
    rows = pages.ptr + page * pages.stride_page + slot % PAGE * pages.stride_slot + head * pages.stride_head
    column = tl.arange(0, WIDTH)
    MAPPED: tl.constexpr = map.matrix is not None
    CHUNK: tl.constexpr = 64 if MAPPED and WIDTH > 64 else WIDTH
    result = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    for start in tl.static_range(0, D, CHUNK):
        part = start + tl.arange(0, CHUNK)[None, :]
        x = tl.load(rows[:, None] + part, mask=real[:, None] & (part < D), other=0.0)
        if MAPPED:
            result = map_product(x, load_matrix(map, head, column, start, D, CHUNK), result, "ieee")
        else:
            result = x.to(tl.float32)
    if TOKEN_MAJOR:
        to = (row + index).to(tl.int64) * tl.num_programs(1) + head
    else:
        to = head * room + row + index
    x = (result * factor).to(target.dtype.element_ty)
    tl.store(target + to[:, None] * D + column[None, :], x, mask=real[:, None] & (column < D)[None, :])


@triton.jit(do_not_specialize=["sequence", "low", "high", "row", "room"])
def patch_kernel(
    k_pages,
    v_pages,
    k_map,
    v_map,
    held,
    keys,
    values,
    sequence,
    low,
    high,
    row,
    room,
    k_factor,
    v_factor,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_V: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKEN_MAJOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (blocks of keys, kv heads, 2: K and V). SIZE, SIZE_V: numbers of a row; WIDTH: a power of two that is no smaller than these."""
    head = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        patch_rows(
            k_pages, k_map, held, keys, head, sequence, low, high, row, room, k_factor,
            PAGE, SIZE, WIDTH, TOKEN_MAJOR, BLOCK_N,
        )  # fmt: skip
    else:
        patch_rows(
            v_pages, v_map, held, values, head, sequence, low, high, row, room, v_factor,
            PAGE, SIZE_V, WIDTH, TOKEN_MAJOR, BLOCK_N,
        )  # fmt: skip


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
    sinks,
    num_rows,
    factor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COMBINED: tl.constexpr,
    MAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of rows, kv heads); a row is one of the GROUP heads of a token. Two results over disjoint keys, combined by
    their natural log-sum-exps (COMBINED, else a alone), with the head's sink in the denominator (SINKS: out is multiplied by
    `sigmoid(lse - sink)`), and then through the map, times factor (MAPPED). out_lse: theirs, where it is asked for."""
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = index < num_rows
    token = index // GROUP
    q_head = head * GROUP + index % GROUP
    weight = tl.full([BLOCK], 1.0, tl.float32)
    other = tl.zeros([BLOCK], tl.float32)
    lse = tl.zeros([BLOCK], tl.float32)
    if COMBINED or SINKS or out_lse.ptr is not None:
        lse = tl.load(row_pointers(a_lse, token, q_head), mask=real, other=0.0)
    if COMBINED:
        y = tl.load(row_pointers(b_lse, token, q_head), mask=real, other=0.0)
        top = tl.maximum(lse, y)
        weight = tl.exp(lse - top)
        other = tl.exp(y - top)
        total = weight + other
        lse = top + tl.log(total)
        weight /= total
        other /= total
    if SINKS:
        ahead = tl.load(sinks + q_head, mask=real, other=0.0).to(tl.float32) - lse
        kept = 1 / (1 + tl.exp(ahead))
        weight *= kept
        other *= kept
        lse += tl.maximum(ahead, 0.0) + tl.log(1 + tl.exp(-tl.abs(ahead)))
    if out_lse.ptr is not None:
        tl.store(row_pointers(out_lse, token, q_head), lse, mask=real)
    column = tl.arange(0, WIDTH)
    stored = real[:, None] & (column < D)[None, :]
    CHUNK: tl.constexpr = 64 if MAPPED and WIDTH > 64 else WIDTH
    result = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in tl.static_range(0, D, CHUNK):
        part = start + tl.arange(0, CHUNK)[None, :]
        mask = real[:, None] & (part < D)
        x = tl.load(row_pointers(a, token, q_head)[:, None] + part, mask=mask, other=0.0)
        if COMBINED:
            y = tl.load(row_pointers(b, token, q_head)[:, None] + part, mask=mask, other=0.0).to(tl.float32)
            x = x.to(tl.float32) * weight[:, None] + y * other[:, None]
        elif SINKS:
            x = x.to(tl.float32) * weight[:, None]
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
