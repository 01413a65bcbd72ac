"""Queries and pages -> partial outputs. One kernel for decode, verify, chunk and ragged prefill; formats come in as codecs."""

import triton
import triton.language as tl

from .columns import LEAST_COLUMNS, decayed, halve, narrow, partial_sum, spread, transposed, widen
from .masks import bias_score, find_sequence, key_bounds, seen_by_all, split_bounds, used_slots, visible, whole_tiles
from .powers import inverse_power, largest_finite, power_of_two_below
from .tiles import decode, join_operand, join_planes, key_mean_row, load_cached, load_rows, split_planes, zero_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def hidden(score, meta, seen, used, WHOLE: tl.constexpr):
    """score, -inf where it is not seen; metadata, zeros where a row is not used, unless it was masked as it was loaded (WHOLE is 0)."""
    kept = meta
    if WHOLE > 0:
        kept = ()
        for i in tl.static_range(len(meta)):
            kept = kept + (tl.where(used, meta[i], 0.0),)
    return tl.where(seen, score, float("-inf")), kept


@triton.jit
def hide(score, meta, seen, used, partly, WHOLE: tl.constexpr, EVERY: tl.constexpr):
    """Scores of a tile and metadata of its values without what is not to be read: an unwritten slot may hold NaN. partly: whether there is
    such; EVERY: in every tile, by what is known ahead."""
    if EVERY:  # noqa: SIM114  the other is a branch of the kernel, and none where EVERY
        score, meta = hidden(score, meta, seen, used, WHOLE)
    elif partly:
        score, meta = hidden(score, meta, seen, used, WHOLE)
    return score, meta


@triton.jit
def load_query(q, token, head, row_mask, map, kv_head, K: tl.constexpr, PRECISION: tl.constexpr, least=0.0, KEYS: tl.constexpr = 1):
    """q mapped, as planes in the dtype of K's operand, with the empty rows of `spread` where keys run down (KEYS is 0); its sum and what
    the planes were divided by, each `[M]`.

    Each row is brought to magnitudes near 2^10, where fp16 holds a plane that is to meet an operand 2^-24 small. least: of what they are
    divided by."""
    P: tl.constexpr = K.codec.planes
    F32: tl.constexpr = q.ptr.dtype.element_ty == tl.float32
    DTYPE: tl.constexpr = tl.float32 if F32 else K.codec.operand
    FACTORS: tl.constexpr = K.factors
    M: tl.constexpr = token.shape[0]
    token, head, row_mask = spread(token, head, row_mask, KEYS)
    at = q.ptr + token * q.stride_token + head * q.stride_head
    loaded = load_rows(at, row_mask, map, kv_head, token, K, False, PRECISION)
    largest = tl.full([token.shape[0]], 2.0**-100, tl.float32)  # a query of zeros has a unit too
    for p in tl.static_range(P):
        largest = tl.maximum(largest, tl.max(tl.abs(loaded[p]).to(tl.float32), axis=1))
    unit = tl.maximum(power_of_two_below(largest) * (1 / 1024), least)
    planes = ()
    total = tl.zeros([token.shape[0]], tl.float32)
    for p in tl.static_range(P):
        plane = (loaded[p].to(tl.float32) * ((FACTORS[p] / FACTORS[0]) / unit)[:, None]).to(DTYPE)
        total += tl.sum(plane.to(tl.float32), axis=1) * (FACTORS[0] / FACTORS[p])
        planes = planes + (plane,)
    return planes, halve(total, M), halve(unit, M)


@triton.jit
def find_slots(table, start, low, high, used, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, F: tl.constexpr):
    """Pages of the BLOCK_N slots from start on, a multiple of BLOCK_N: one, or `[N]` where a tile is no part of a page; where they are
    in their pages `[N]`. Several warps look up a page for each slot: tensors of fewer numbers than warps are read beyond their
    shared memory by what Triton 3.6 makes of them."""
    slot = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        return tl.load(table + start // PAGE).to(tl.int64), start % PAGE + slot
    elif BLOCK_N % PAGE == 0 and F.by_page and not F.prefix:  # an entry of the table a page
        COUNT: tl.constexpr = BLOCK_N // PAGE
        first = start // PAGE + tl.arange(0, COUNT)
        page = tl.load(table + first, mask=used_slots(first * PAGE, low - PAGE + 1, high, F), other=0)
        page = tl.reshape(tl.broadcast_to(page[:, None], [COUNT, PAGE]), [BLOCK_N])
        return page.to(tl.int64), slot % PAGE
    else:
        index = start + slot
        return tl.load(table + index // PAGE, mask=used, other=0).to(tl.int64), index % PAGE


@triton.jit
def product(rows, columns, total, KEYS: tl.constexpr, PRECISION: tl.constexpr):
    """total + rows columns; where keys run down (KEYS is 0), what is given and what comes out are transposed."""
    if KEYS == 0:
        return tl.dot(columns, rows, total, input_precision=PRECISION)
    else:
        return tl.dot(rows, columns, total, input_precision=PRECISION)


@triton.jit
def key_score(q_operand, q_sum, operand, affine, zero, factor, K: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr):
    """factor * q . (scale (code - zero) + bias), in the units of q's rows: a tile of scores."""
    FACTORS: tl.constexpr = K.factors
    if KEYS == 0:
        score = tl.zeros([operand[0].shape[0], q_operand[0].shape[1]], tl.float32)
    else:
        score = tl.zeros([q_operand[0].shape[0], operand[0].shape[1]], tl.float32)
    for p in tl.static_range(len(operand)):
        score = product(q_operand[p], operand[p].to(q_operand[p].dtype), score, KEYS, PRECISION)
    if KEYS == 0:
        score = narrow(score, q_sum.shape[0])
    if len(zero) > 0:
        score -= tl.expand_dims(q_sum * (1 / FACTORS[0]), KEYS) * tl.expand_dims(zero[0], 1 - KEYS)
    if len(affine) > 0:
        score *= tl.expand_dims(affine[0] * (factor * FACTORS[0]), 1 - KEYS)
    else:
        score *= factor * FACTORS[0]
    if len(affine) > 1:
        score += tl.expand_dims(q_sum, KEYS) * tl.expand_dims(affine[1] * factor, 1 - KEYS)
    return score


@triton.jit
def key_mean_score(score, q_planes, map, head, key, first_key, affine, factor, K: tl.constexpr, KEYS: tl.constexpr):
    """score + factor * q . key_mean, of each key's bucket of 64 positions; nothing where a key was stored without. key `[N]` counts up from
    first_key; map.key_mean is mapped."""
    FACTORS: tl.constexpr = K.factors
    P: tl.constexpr = len(q_planes)
    word = tl.arange(0, K.width)
    bucket = first_key // 64
    for i in tl.static_range((key.shape[0] + 62) // 64 + 1):
        row = tl.zeros([q_planes[0].shape[0]], tl.float32)
        for p in tl.static_range(P):
            key_mean = key_mean_row(map, head, bucket + i, word * P + p, K.head_size) * (FACTORS[0] / FACTORS[p])
            row += tl.sum(q_planes[p].to(tl.float32) * key_mean[None, :], axis=1)
        row = halve(row, score.shape[1 - KEYS])
        here = key // 64 == bucket + i
        if K.signed:
            here = here & (affine[0] >= 0)
        score += tl.where(tl.expand_dims(here, 1 - KEYS), tl.expand_dims(row * factor, KEYS), 0.0)
    return score


@triton.jit
def natural_score(score, query, key, context, slope, row_mask, extras, F: tl.constexpr):
    """What options do to scores that are not in base 2 yet; then they are."""
    if F.softcap > 0:
        score = F.softcap * (2 * tl.sigmoid(score * (2 / F.softcap)) - 1)
    return LOG2E * bias_score(score, query, key, context, slope, row_mask, extras, F)


@triton.jit
def softmax_step(score, unit, row_max, KEYS: tl.constexpr):
    """prob of a tile of scores in units `[M]`, powers of two, relative to the new maximum `[M]`; the decay of what was added before."""
    new_max = tl.maximum(row_max, tl.max(score, axis=KEYS) * unit)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    return tl.exp2(score * tl.expand_dims(unit, KEYS) - tl.expand_dims(base, KEYS)), tl.exp2(row_max - base), new_max


@triton.jit
def confine(planes, affine, shown, V: tl.constexpr, KEYS: tl.constexpr):
    """planes and affine, zeros where a row that is not shown to all queries, `[N]`, holds an inf or a NaN; and NaN for each such row, 0 for
    others. A weight of 0 would not keep it from the queries that do not see the row."""
    bad = tl.zeros(shown.shape, tl.float32)
    confined = planes
    if V.codec.floats:
        confined = ()
        for p in tl.static_range(len(planes)):
            finite = tl.abs(planes[p]) < float("inf")
            confined = confined + (tl.where(finite | tl.expand_dims(shown, KEYS), planes[p], 0.0).to(planes[p].dtype),)
            bad = tl.maximum(bad, tl.max(tl.where(finite, 0.0, 1.0), axis=KEYS))
    for i in tl.static_range(len(affine)):
        bad = tl.where(tl.abs(affine[i]) < float("inf"), bad, 1.0)
    bad = tl.where(shown, 0.0, bad)
    finite_affine = ()
    for i in tl.static_range(len(affine)):
        finite_affine = finite_affine + (tl.where(bad > 0, 0.0, affine[i]),)
    return confined, finite_affine, tl.where(bad > 0, float("nan"), 0.0)


@triton.jit
def add_values(
    acc, shift, unit, prob, decay, planes, affine, zero, V: tl.constexpr, DTYPE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr
):
    """acc (in units of `unit`) and shift, decayed, plus prob . (scale code) and prob . bias.

    The unit follows the largest scale, in powers of two. It keeps weights below 2^14, so that fp16 holds those of rows 2^28 times smaller
    too. What planes are too large by is taken off before they are added, tile by tile: tensor cores truncate as they add, and so
    what they add to stays small."""
    FACTORS: tl.constexpr = V.factors
    weight = prob
    if len(affine) > 0:
        new_unit = tl.maximum(unit, 2.0**-13 * power_of_two_below(largest_finite(affine[0])))
        inverse = inverse_power(new_unit)
        weight = prob * tl.expand_dims(affine[0] * inverse, 1 - KEYS)
        if len(affine) > 1:
            shift = shift * decay + tl.sum(prob * tl.expand_dims(affine[1], 1 - KEYS), axis=KEYS)
        decay *= unit * inverse
        unit = new_unit
    weight = weight.to(DTYPE)
    excess = tl.zeros(decay.shape, tl.float32)
    if len(zero) > 0:
        excess = tl.sum(weight.to(tl.float32) * tl.expand_dims(zero[0], 1 - KEYS), axis=KEYS)
    if KEYS == 0:
        weight = widen(weight, acc[0].shape[1])
    updated = ()
    for p in tl.static_range(len(acc)):
        kept = decayed(acc[p], decay, excess * (1 / FACTORS[p]), KEYS)
        updated = updated + (product(weight, planes[p].to(DTYPE), kept, KEYS, PRECISION),)
    return updated, shift, unit


@triton.jit
def no_values(BLOCK_M: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, JOINED: tl.constexpr):
    """What `add_values` adds to first: a tile for each plane, or one for all."""
    WIDTH: tl.constexpr = V.width
    PLANES: tl.constexpr = V.codec.planes
    COLUMNS: tl.constexpr = LEAST_COLUMNS if BLOCK_M < LEAST_COLUMNS else BLOCK_M  # of a product, where keys run down
    if JOINED:
        acc = (tl.zeros([BLOCK_M, WIDTH * PLANES], tl.float32),)
    else:
        acc = ()
        for _ in tl.static_range(PLANES):
            acc = acc + (tl.zeros([WIDTH, COLUMNS] if KEYS == 0 else [BLOCK_M, WIDTH], tl.float32),)
    return acc


@triton.jit
def finish_values(acc, scale, shift, V: tl.constexpr, KEYS: tl.constexpr, JOINED: tl.constexpr):
    """scale acc + shift `[M, D_V]`, scale and shift `[M]`, with the planes brought to one unit."""
    FACTORS: tl.constexpr = V.factors
    P: tl.constexpr = V.codec.planes
    if JOINED:
        acc = split_planes(acc[0], P)
    planes = ()
    for p in tl.static_range(P):
        plane = tl.trans(narrow(acc[p], scale.shape[0])) if KEYS == 0 else acc[p]
        planes = planes + (plane * (scale * FACTORS[p])[:, None] + shift[:, None],)
    return join_planes(planes)


@triton.jit(do_not_specialize=["num_seqs", "first_split", "all_splits"])
def attend_kernel(
    q,
    part,
    lse,
    k_pages,
    v_pages,
    k_map,
    batch,
    extras,
    num_seqs,
    first_split,
    all_splits,
    scale,
    k_scale,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
):
    """Grid (tiles of queries x kv heads, splits of the keys). A tile: BLOCK_M // GROUP queries by the GROUP heads of a kv head.

    Writes part `[T, HQ, all_splits, D_V]` float32, normalised, in V's mapped space, and lse `[T, HQ, all_splits]`, base 2, from first_split
    on; a split without keys writes lse -inf and no part. k_scale multiplies what was encoded, not the key mean; extras.v_factor values."""
    BLOCK_Q: tl.constexpr = 1 if F.single else BLOCK_M // GROUP
    V_CODEC: tl.constexpr = V.codec  # Triton 3.6 passes on what is bound to a name, not the attribute of an attribute
    V_DTYPE: tl.constexpr = tl.float32 if q.ptr.dtype.element_ty == tl.float32 else V_CODEC.operand
    MASKED: tl.constexpr = F.prefix or BLOCK_Q != 1  # not every query sees all the keys of a tile that are used
    NATURAL: tl.constexpr = F.softcap > 0 or F.alibi > 0 or F.qq_bias
    HEADS: tl.constexpr = F.num_kv_heads
    PRECISION: tl.constexpr = F.precision
    KEYS: tl.constexpr = F.key_axis
    FEWER: tl.constexpr = PAGE if PAGE < BLOCK_N else BLOCK_N  # before 3.5, Triton's `min` of two constants is no constant
    WHOLE: tl.constexpr = FEWER if F.by_page and not F.prefix and PAGE % FEWER == 0 and BLOCK_N % FEWER == 0 else 0
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    block = tl.program_id(0) // HEADS

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
    q_head = head * GROUP + row % GROUP
    token = first.to(tl.int64) + query + tl.zeros([BLOCK_M], tl.int64)
    out_row = (token * (HEADS * GROUP) + q_head) * all_splits + first_split + tl.program_id(1)

    first_slot = tl.load(extras.key_start + seq).to(tl.int32) if F.key_start else 0
    last = tl.minimum(q_low + BLOCK_Q, num_q) - 1
    low, high = key_bounds(context + q_low, context + last, seq_len, seq, extras, F)
    low = tl.maximum(low - first_slot, 0)
    high = tl.maximum(high - first_slot, 0)
    begin, end = split_bounds(low, high, tl.program_id(1), BLOCK_N, F)
    if begin >= end:
        tl.store(lse + out_row, float("-inf"), mask=row_mask)
        return
    position = tl.expand_dims(context + query, KEYS)
    table = batch.block_table + tl.cast(seq, tl.int64) * batch.stride_table
    q_planes, q_sum, q_unit = load_query(q, token, q_head, row_mask, k_map, head, K, PRECISION, 0.0, KEYS)
    q_operand = (join_planes(q_planes),) if F.joined else transposed(q_planes) if KEYS == 0 else q_planes
    factor = scale * (1.0 if NATURAL else LOG2E)
    score_unit = tl.full([BLOCK_M], 1.0, tl.float32) if NATURAL else q_unit
    slope = tl.load(extras.alibi_slopes + q_head, mask=row_mask, other=0.0).to(tl.float32) if F.alibi > 0 else row_mask
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([8, BLOCK_M] if KEYS == 0 else [BLOCK_M], tl.float32)
    shift = tl.zeros([BLOCK_M], tl.float32)
    unit = tl.full([], 2.0**-100 if V_CODEC.num_meta > 0 else 1.0, tl.float32)
    acc = no_values(BLOCK_M, V, KEYS, F.joined)
    whole = whole_tiles(begin, end, context + q_low - first_slot, BLOCK_N, F) if MASKED else end
    FIRST: tl.constexpr = 1 if MASKED and F.one_loop else 0
    for masked in tl.static_range(FIRST, 2 if MASKED else 1):  # tiles that every query sees whole need no mask, and come first
        for start in tl.range((whole if masked else begin) * BLOCK_N, (end if masked else whole) * BLOCK_N, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            key = index + first_slot
            used = used_slots(index, low, high, F)
            seen = tl.expand_dims(used, 1 - KEYS)
            if masked:  # what one query sees, but for prefix ranges, is what lies between low and high
                seen = visible(position, tl.expand_dims(key, 1 - KEYS), seen, seq, extras, F)
            if F.prefix:  # the keys that some query sees are no interval
                used = tl.max(seen.to(tl.int32), axis=1 - KEYS) > 0
            page, slot = find_slots(table, start, low, high, used, PAGE, BLOCK_N, F)
            words, meta = load_cached(k_pages, page, slot, head, used, K, 0 if F.joined else KEYS, True, WHOLE)
            operand, affine = decode(words, meta, k_pages.table, K, KEYS == 1 and not F.joined)
            if F.joined:
                operand = (tl.trans(join_operand(operand)),)
            score = key_score(q_operand, q_sum, operand, affine, zero_of(meta, K), factor * k_scale, K, KEYS, PRECISION)
            if K.key_mean:
                score = key_mean_score(score, q_planes, k_map, head, key, start + first_slot, affine, factor, K, KEYS)
            if NATURAL:
                asked, slopes = tl.expand_dims(row_mask, KEYS), tl.expand_dims(slope, KEYS)
                score *= tl.expand_dims(q_unit, KEYS)
                score = natural_score(score, position, tl.expand_dims(key, 1 - KEYS), context, slopes, asked, extras, F)
            words, meta = load_cached(v_pages, page, slot, head, used, V, 1 - KEYS, not V_CODEC.floats, WHOLE)
            score, meta = hide(score, meta, seen, used, (start < low) | (start + BLOCK_N > high), WHOLE, MASKED or WHOLE == 0)

            prob, decay, row_max = softmax_step(score, score_unit, row_max, KEYS)
            row_sum = row_sum * decay + partial_sum(prob, KEYS)

            operand, affine = decode(words, meta, v_pages.table, V, KEYS == 0)
            if masked:
                operand, affine, bad = confine(operand, affine, seen_by_all(key, context + q_low, context + last, F), V, KEYS)
                shift += tl.sum(tl.where(seen, tl.expand_dims(bad, 1 - KEYS), 0.0), axis=KEYS)
            if F.joined:
                operand = (join_operand(operand),)
            acc, shift, unit = add_values(acc, shift, unit, prob, decay, operand, affine, zero_of(meta, V), V, V_DTYPE, KEYS, PRECISION)

    row_sum = tl.sum(row_sum, axis=0) if KEYS == 0 else row_sum
    tl.store(lse + out_row, row_max + tl.log2(row_sum), mask=row_mask)
    norm = tl.where(row_sum > 0, 1 / row_sum, 0.0) * extras.v_factor
    out = finish_values(acc, norm * unit, norm * shift, V, KEYS, F.joined)
    column = tl.arange(0, out.shape[1])[None, :]
    tl.store(part + out_row[:, None] * V.head_size + column, out, mask=row_mask[:, None] & (column < V.head_size))
