"""Device functions that the kernels share: planes, maps, and which keys a tile of queries looks at."""

import triton
import triton.language as tl

# ---- planes


@triton.jit
def split_pairs(planes):
    """Each plane into its even columns, then each into its odd columns."""
    even, odd = (), ()
    for i in tl.static_range(len(planes)):
        pair = tl.split(tl.reshape(planes[i], [planes[i].shape[0], planes[i].shape[1] // 2, 2]))
        even = even + (pair[0],)
        odd = odd + (pair[1],)
    return even + odd


@triton.jit
def split_planes(x, P: tl.constexpr):
    """`[R, D]` -> tuple of P `[R, D / P]`; plane p holds columns p, p + P, .."""
    planes = (x,)
    if P >= 2:
        planes = split_pairs(planes)
    if P >= 4:
        planes = split_pairs(planes)
    if P >= 8:
        planes = split_pairs(planes)
    return planes


@triton.jit
def join_pairs(planes):
    """Reverses `split_pairs`."""
    HALF: tl.constexpr = len(planes) // 2
    joined = ()
    for i in tl.static_range(HALF):
        pair = tl.join(planes[i], planes[i + HALF])
        joined = joined + (tl.reshape(pair, [planes[i].shape[0], planes[i].shape[1] * 2]),)
    return joined


@triton.jit
def join_planes(planes):
    """Reverses `split_planes`."""
    P: tl.constexpr = len(planes)
    if P >= 2:
        planes = join_pairs(planes)
    if P >= 4:
        planes = join_pairs(planes)
    if P >= 8:
        planes = join_pairs(planes)
    return planes[0]


@triton.jit
def join_operand(planes):
    """`join_planes` of 16-bit planes, as integers: Triton 3.6 would else fuse the reshape into the dot's shared memory, and fail."""
    if len(planes) == 1:
        return planes[0]
    else:
        words = ()
        for p in tl.static_range(len(planes)):
            words = words + (planes[p].to(tl.int16, bitcast=True),)
        return join_planes(words).to(planes[0].dtype, bitcast=True)


# ---- maps


@triton.jit
def map_product(x, matrix, total, PRECISION: tl.constexpr):
    """total + x matrix^T. A 16-bit matrix has entries 0 and +-1 only: with 16-bit x its products are exact."""
    turned = tl.trans(matrix)
    if x.dtype == tl.float32 or matrix.dtype == tl.float32:
        return tl.dot(x.to(tl.float32), turned.to(tl.float32), total, input_precision=PRECISION)
    else:
        return tl.dot(x, turned.to(x.dtype), total)


@triton.jit
def load_matrix(map, head, out, start, D: tl.constexpr, CHUNK: tl.constexpr):
    """Rows `out [W]`, columns start .. start + CHUNK of the head's matrix: `[W, CHUNK]`."""
    column = start + tl.arange(0, CHUNK)
    at = map.matrix + head * map.stride_head + out[:, None] * D + column[None, :]
    return tl.load(at, mask=(out < D)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def offset_row(map, head, bucket, column, D: tl.constexpr):
    """Columns of the head's offset for each bucket of positions; the last row serves what lies beyond the table."""
    row = tl.minimum(bucket, map.num_buckets - 1).to(tl.int64)
    return tl.load(map.offset + row * map.offset_bucket + head * map.offset_head + column, mask=column < D, other=0.0)


@triton.jit
def load_rows(rows, row_mask, map, head, position, PLAN: tl.constexpr, OFFSET: tl.constexpr, PRECISION: tl.constexpr):
    """Rows at the pointers `rows [R]`, less the offset of their position, mapped, as planes `[R, W]`: float32 where mapped, else as they are."""
    P: tl.constexpr = PLAN.codec.planes
    D: tl.constexpr = PLAN.head_size
    W: tl.constexpr = PLAN.width
    if PLAN.mapped:
        CHUNK: tl.constexpr = 64 if W <= 128 else 32
        word = tl.arange(0, W)
        planes = ()
        for _ in tl.static_range(P):
            planes = planes + (tl.zeros([rows.shape[0], W], tl.float32),)
        for start in tl.static_range(0, D, CHUNK):
            column = (start + tl.arange(0, CHUNK))[None, :]
            x = tl.load(rows[:, None] + column, mask=row_mask[:, None] & (column < D), other=0.0)
            if OFFSET:
                x = x.to(tl.float32) - offset_row(map, head, (position // 64)[:, None], column, D)
            updated = ()
            for p in tl.static_range(P):
                matrix = load_matrix(map, head, word * P + p, start, D, CHUNK)
                updated = updated + (map_product(x, matrix, planes[p], PRECISION),)
            planes = updated
        return planes
    else:
        column = tl.arange(0, W * P)[None, :]
        return split_planes(tl.load(rows[:, None] + column, mask=row_mask[:, None] & (column < D), other=0.0), P)


# ---- pages


@triton.jit
def word_pointers(pages, page, slot, head, PLAN: tl.constexpr):
    """Pointers `[N, W]` to the words, or to their first bytes, of rows in slots `slot [N]` of pages `page [N] or scalar`, int64."""
    base = page * pages.stride_page + head * pages.stride_head + slot * pages.stride_slot
    STEP: tl.constexpr = 3 if PLAN.codec.word_bytes == 3 else 1
    return pages.words + base[:, None] + STEP * tl.arange(0, PLAN.width)[None, :]


@triton.jit
def meta_pointers(pages, page, slot, head):
    return pages.meta + (page * pages.meta_page + head * pages.meta_head + slot * pages.meta_slot)


@triton.jit
def load_cached(pages, page, slot, head, mask, PLAN: tl.constexpr):
    """words `[N, W]` and metadata, a tuple of `[N]` float32, of N cached rows. What is masked reads as zero bits: an unwritten slot
    may hold NaN, in the codes and in the metadata."""
    NUM_META: tl.constexpr = PLAN.codec.num_meta
    real = mask[:, None]
    if PLAN.width != PLAN.columns:
        real = real & (tl.arange(0, PLAN.width) < PLAN.columns)[None, :]
    at = word_pointers(pages, page, slot, head, PLAN)
    words = tl.load(at, mask=real, other=0)
    if PLAN.codec.word_bytes == 3:
        second = tl.load(at + 1, mask=real, other=0).to(tl.int32)
        third = tl.load(at + 2, mask=real, other=0).to(tl.int32)
        words = words.to(tl.int32) | (second << 8) | (third << 16)
    meta = ()
    if NUM_META > 0:
        at = meta_pointers(pages, page, slot, head)
        for i in tl.static_range(NUM_META):
            meta = meta + (tl.load(at + i, mask=mask, other=0.0).to(tl.float32),)
    return words, meta


# ---- queries and keys


@triton.jit
def find_sequence(query_start, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that owns tile `block` where each sequence takes as many whole tiles as fit between its start and its end, plus one."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle).to(tl.int32) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def key_bounds(first, last, seq_len, seq, extras, F: tl.constexpr):
    """Positions from low to before high outside of which no query at positions first .. last sees a key."""
    low = 0
    high = seq_len
    if F.causal == 1:
        high = tl.minimum(last + 1, seq_len)
    if F.chunk > 0:
        low = tl.maximum(first // F.chunk - F.chunk_lookback, 0) * F.chunk
    elif F.window > 0:
        low = tl.maximum(first - F.window + 1, 0)
        high = tl.minimum(high, last + F.window)
    if F.causal == 2:
        causal = tl.load(extras.causal + seq) != 0
        high = tl.where(causal, tl.minimum(high, last + 1), high)
    if F.prefix:
        for r in range(extras.num_ranges):
            at = extras.prefix_ranges + (seq * extras.num_ranges + r) * 2
            start = tl.load(at).to(tl.int32)
            end = tl.load(at + 1).to(tl.int32)
            touched = (start < end) & (start <= last) & (first <= end)
            high = tl.where(touched, tl.maximum(high, end + 1), high)
            if not F.prefix_clamped:
                low = tl.where(touched, tl.minimum(low, start), low)
        high = tl.minimum(high, seq_len)
    if F.key_range:
        low = tl.maximum(low, tl.load(extras.key_range + seq * 2).to(tl.int32))
        high = tl.minimum(high, tl.load(extras.key_range + seq * 2 + 1).to(tl.int32))
    return low, high


@triton.jit
def visible(query, key, key_mask, seq, extras, F: tl.constexpr):
    """Which keys each query sees, by position: query `[M, 1]`, key `[1, N]` -> bool `[M, N]`."""
    distance = query - key
    if F.causal == 1:
        seen = distance >= 0
    elif F.causal == 2:
        seen = (distance >= 0) | (tl.load(extras.causal + seq) == 0)
    else:
        seen = distance == distance
    back = seen
    if F.chunk > 0:
        back = query // F.chunk - key // F.chunk <= F.chunk_lookback
        seen = seen & back
    elif F.window > 0:
        back = distance < F.window
        seen = seen & back & (distance > -F.window)
    if F.prefix:
        both = distance != distance
        for r in range(extras.num_ranges):
            at = extras.prefix_ranges + (seq * extras.num_ranges + r) * 2
            start = tl.load(at).to(tl.int32)
            end = tl.load(at + 1).to(tl.int32)
            inside = (start <= query) & (query <= end) & (start <= key) & (key <= end)
            both = both | (inside & (start < end))
        if F.prefix_clamped and (F.chunk > 0 or F.window > 0):
            both = both & back
        seen = seen | both
    return seen & key_mask


@triton.jit
def bias_score(score, query, key, context, slope, row_mask, extras, F: tl.constexpr):
    """ALiBi and the bias between queries. query `[M, 1]`, key `[1, N]` positions."""
    if F.alibi == 1:
        score += slope * (key - context).to(tl.float32)
    if F.alibi == 2:
        score += slope * -tl.sqrt(tl.maximum(query - key, 0).to(tl.float32))
    if F.qq_bias:
        column = key - context
        row = tl.minimum(query - context, extras.qq_rows - 1)
        inside = (column >= 0) & (column < extras.qq_cols) & row_mask
        score += tl.load(extras.qq_bias + row * extras.qq_stride + column, mask=inside, other=0.0).to(tl.float32)
    return score
