"""Queries and pages of latents -> partial outputs: what attend.py does, of rows that are keys and, but for their rotated dimensions,
values. A tile of rows is read once for both."""

import triton
import triton.language as tl

from .attend import LOG2E, add_values, confine, find_slots, finish_values, key_score, load_query, natural_score, no_values, softmax_step
from .columns import transposed
from .masks import find_sequence, key_bounds, seen_by_all, split_bounds, used_slots, visible, whole_tiles
from .tiles import decode, load_cached, load_matrix, map_product, zero_of


@triton.jit
def load_queries(q, q_rope, token, q_head, row_mask, map, head, K: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr):
    """Both parts of the queries, planes and their sum, the first one's unit, and the ratio `[M]` of the second's to it. The first is in no
    unit so much smaller that the ratio is out of range."""
    rotated, rotated_sum, rotated_unit = load_query(q_rope, token, q_head, row_mask, map, head, R, PRECISION, 0.0)
    planes, q_sum, unit = load_query(q, token, q_head, row_mask, map, head, K, PRECISION, rotated_unit * 2.0**-24)
    return (planes, q_sum), (rotated, rotated_sum), unit, rotated_unit / unit


@triton.jit
def rotated_score(score, queries, pages, page, slot, head, used, ratio, factor, R: tl.constexpr, PRECISION: tl.constexpr):
    """score + factor * ratio * (rotated dimensions of the queries and keys). ratio `[M]`: of their unit to that of score."""
    words, meta = load_cached(pages, page, slot, head, used, R, 1, True)
    operand, affine = decode(words, meta, pages.table, R, True)
    part = key_score(queries[0], queries[1], operand, affine, zero_of(meta, R), factor, R, 1, PRECISION)
    return score + part * ratio[:, None]


@triton.jit(do_not_specialize=["num_seqs", "first_split", "all_splits"])
def attend_latents_kernel(
    q,
    q_rope,
    part,
    lse,
    latents,
    rope,
    rope_map,
    batch,
    extras,
    num_seqs,
    first_split,
    all_splits,
    scale,
    latent_scale,
    rope_scale,
    T: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
):
    """Grid (tiles of queries x parts of the heads of each kv head, splits of the keys). Otherwise as `attend_kernel`: part, in the latents'
    mapped space, and lse. q, q_rope: the queries' two parts, the first mapped; latent_scale, rope_scale: of what was encoded."""
    GROUP: tl.constexpr = T.group
    PAGE: tl.constexpr = T.page
    BLOCK_M: tl.constexpr = T.block_m
    BLOCK_N: tl.constexpr = T.block_n
    PARTS: tl.constexpr = T.parts
    BLOCK_Q: tl.constexpr = 1 if F.single else BLOCK_M // GROUP
    K_CODEC: tl.constexpr = K.codec
    DTYPE: tl.constexpr = tl.float32 if q.ptr.dtype.element_ty == tl.float32 else K_CODEC.operand
    MASKED: tl.constexpr = F.prefix or BLOCK_Q != 1
    NATURAL: tl.constexpr = F.softcap > 0 or F.alibi > 0 or F.qq_bias
    TILES: tl.constexpr = F.num_kv_heads * PARTS
    PRECISION: tl.constexpr = F.precision
    tile_head = (tl.program_id(0) % TILES).to(tl.int64)
    head = tile_head // PARTS
    block = tl.program_id(0) // TILES

    seq = block if F.one_block else find_sequence(batch.query_start, block, num_seqs, BLOCK_Q)
    first = tl.load(batch.query_start + seq)
    q_low = 0 if F.one_block else (block - first // BLOCK_Q - seq).to(tl.int32) * BLOCK_Q
    num_q = (tl.load(batch.query_start + seq + 1) - first).to(tl.int32)
    if q_low >= num_q:
        return
    seq_len = tl.load(batch.seq_lens + seq).to(tl.int32)
    context = seq_len - num_q
    row = tl.arange(0, BLOCK_M)
    query = q_low + (tl.zeros([1], tl.int32) if BLOCK_Q == 1 else row // GROUP)
    row_mask = (query < num_q) & (row < BLOCK_Q * GROUP)
    q_head = tile_head * GROUP + row % GROUP
    token = first.to(tl.int64) + query + tl.zeros([BLOCK_M], tl.int64)
    out_row = (token * (TILES * GROUP) + q_head) * all_splits + first_split + tl.program_id(1)

    first_slot = tl.load(extras.key_start + seq).to(tl.int32) if F.key_start else 0
    last = tl.minimum(q_low + BLOCK_Q, num_q) - 1
    low, high = key_bounds(context + q_low, context + last, seq_len, seq, extras, F)
    low = tl.maximum(low - first_slot, 0)
    high = tl.maximum(high - first_slot, 0)
    begin, end = split_bounds(low, high, tl.program_id(1), BLOCK_N, F)
    if begin >= end:
        tl.store(lse + out_row, float("-inf"), mask=row_mask)
        return
    position = (context + query)[:, None]
    table = batch.block_table + tl.cast(seq, tl.int64) * batch.stride_table
    queries, rotated, q_unit, ratio = load_queries(q, q_rope, token, q_head, row_mask, rope_map, head, K, R, PRECISION)
    factor = scale * (1.0 if NATURAL else LOG2E)
    score_unit = tl.full([BLOCK_M], 1.0, tl.float32) if NATURAL else q_unit
    slope = tl.load(extras.alibi_slopes + q_head, mask=row_mask, other=0.0).to(tl.float32) if F.alibi > 0 else row_mask
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    shift = tl.zeros([BLOCK_M], tl.float32)
    unit = tl.full([], 2.0**-100 if K_CODEC.num_meta > 0 else 1.0, tl.float32)
    acc = no_values(BLOCK_M, K, 1, False)
    whole = whole_tiles(begin, end, context + q_low - first_slot, BLOCK_N, F) if MASKED else end
    FIRST: tl.constexpr = 1 if MASKED and F.one_loop else 0
    for masked in tl.static_range(FIRST, 2 if MASKED else 1):  # as in attend_kernel
        for start in tl.range((whole if masked else begin) * BLOCK_N, (end if masked else whole) * BLOCK_N, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            key = index + first_slot
            used = used_slots(index, low, high, F)
            seen = used[None, :]
            if masked:
                seen = visible(position, key[None, :], seen, seq, extras, F)
            if F.prefix:
                used = tl.max(seen.to(tl.int32), axis=0) > 0
            page, slot = find_slots(table, start, low, high, used, PAGE, BLOCK_N, F)
            words, meta = load_cached(latents, page, slot, head, used, K, 0, not K_CODEC.floats)
            values, affine = decode(words, meta, latents.table, K, False)
            zero = zero_of(meta, K)
            score = key_score(queries[0], queries[1], transposed(values), affine, zero, factor * latent_scale, K, 1, PRECISION)
            score = rotated_score(score, rotated, rope, page, slot, head, used, ratio, factor * rope_scale, R, PRECISION)
            if NATURAL:
                asked, slopes = row_mask[:, None], slope[:, None]
                score *= q_unit[:, None]
                score = natural_score(score, position, key[None, :], context, slopes, asked, extras, F)
            score = tl.where(seen, score, float("-inf"))
            prob, decay, row_max = softmax_step(score, score_unit, row_max, 1)
            row_sum = row_sum * decay + tl.sum(prob, axis=1)
            if masked:
                values, affine, bad = confine(values, affine, seen_by_all(key, context + q_low, context + last, F), K, 1)
                shift += tl.sum(tl.where(seen, bad[None, :], 0.0), axis=1)
            acc, shift, unit = add_values(acc, shift, unit, prob, decay, values, affine, zero, K, DTYPE, 1, PRECISION)

    tl.store(lse + out_row, row_max + tl.log2(row_sum), mask=row_mask)
    norm = tl.where(row_sum > 0, 1 / row_sum, 0.0) * extras.v_factor
    out = finish_values(acc, norm * unit, norm * shift, K, 1, False)
    column = tl.arange(0, K.width * K_CODEC.planes)[None, :]
    tl.store(part + out_row[:, None] * K.head_size + column, out, mask=row_mask[:, None] & (column < K.head_size))


@triton.jit(do_not_specialize=["num_rows"])
def map_rows_kernel(
    rows,
    out,
    map,
    num_rows,
    factor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of rows, blocks of WIDTH columns, kv heads): rows `[T, HQ, D]` through a map whose matrix is too large for one program,
    times factor, into out. A row is one of the GROUP heads of a token."""
    head = tl.program_id(2).to(tl.int64)
    index = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = index < num_rows
    token = index // GROUP
    q_head = head * GROUP + index % GROUP
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    at = rows.ptr + (token * rows.stride_token + q_head * rows.stride_head)[:, None]
    for start in range(0, D, 64):
        part = start + tl.arange(0, 64)[None, :]
        x = tl.load(at + part, mask=real[:, None] & (part < D), other=0.0)
        total = map_product(x, load_matrix(map, head, column, start, D, 64), total, PRECISION)
    to = out.ptr + (token * out.stride_token + q_head * out.stride_head)[:, None] + column[None, :]
    tl.store(to, total * factor, mask=real[:, None] & (column < D)[None, :])
