"""Device functions that the kernels share: planes, maps, and which keys a tile of queries looks at."""

import triton
import triton.language as tl

HALVES = tl.constexpr({n: (tl.float16,) * n for n in (2, 4, 8)})  # what inline PTX returns


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
    LEVELS: tl.constexpr = 3 if P == 8 else P // 2
    planes = (x,)
    for _ in tl.static_range(LEVELS):
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
    LEVELS: tl.constexpr = 3 if P == 8 else P // 2
    for _ in tl.static_range(LEVELS):
        planes = join_pairs(planes)
    return planes[0]


@triton.jit
def join_operand(planes):
    """`join_planes` of 16-bit planes. As integers: Triton 3.6 fuses the reshape into the dot's shared memory; it fails."""
    if len(planes) > 1:
        words = ()
        for p in tl.static_range(len(planes)):
            words = words + (planes[p].to(tl.int16, bitcast=True),)
        return join_planes(words).to(planes[0].dtype, bitcast=True)
    else:
        return planes[0]


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
    """Rows at the pointers `rows [R]` as planes `[R, W]`: less their offset and mapped, in float32, or as they are."""
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


@triton.jit
def word_pointers(pages, page, slot, head, PLAN: tl.constexpr):
    """Pointers `[N, W]` to the words, or to their first bytes, of rows in slots `slot [N]` of pages `page`, `[N]` or one."""
    base = page * pages.stride_page + head * pages.stride_head + slot * pages.stride_slot
    STEP: tl.constexpr = 3 if PLAN.codec.word_bytes == 3 else 1
    return pages.words + base[:, None] + STEP * tl.arange(0, PLAN.width)[None, :]


@triton.jit
def meta_pointers(pages, page, slot, head):
    return pages.meta + (page * pages.meta_page + head * pages.meta_head + slot * pages.meta_slot)


@triton.jit
def load_words3(pages, base, mask, PLAN: tl.constexpr):
    """Words of three bytes `[N, W]` in int32, whose highest byte may hold anything. Read as triples of int32, which copies to
    shared memory ahead of time can do, or, where rows are not aligned to them, byte by byte."""
    if pages.words.dtype.element_ty == tl.int32:
        GROUPS: tl.constexpr = PLAN.width // 4
        group = tl.arange(0, GROUPS)[None, :]
        at = pages.words + base[:, None] + 3 * group
        real = mask[:, None] & (4 * group < PLAN.columns)
        a = tl.load(at, mask=real, other=0).to(tl.uint32, bitcast=True)
        b = tl.load(at + 1, mask=real, other=0).to(tl.uint32, bitcast=True)
        c = tl.load(at + 2, mask=real, other=0).to(tl.uint32, bitcast=True)
        even = tl.join(a, (b >> 16) | (c << 16))
        odd = tl.join((a >> 24) | (b << 8), c >> 8)
        return tl.reshape(tl.join(even, odd), [base.shape[0], PLAN.width]).to(tl.int32, bitcast=True)
    else:
        word = tl.arange(0, PLAN.width)[None, :]
        at = pages.words + base[:, None] + 3 * word
        real = mask[:, None] & (word < PLAN.columns)
        total = tl.zeros(at.shape, tl.int32)
        for i in tl.static_range(3):
            total |= tl.load(at + i, mask=real, other=0).to(tl.int32) << (8 * i)
        return total


@triton.jit
def load_cached(pages, page, slot, head, mask, PLAN: tl.constexpr):
    """words `[N, W]` and metadata, a tuple of `[N]` float32, of N cached rows. What is masked reads as zero bits: an unwritten
    slot may hold NaN, in the codes and in the metadata."""
    NUM_META: tl.constexpr = PLAN.codec.num_meta
    if PLAN.codec.word_bytes == 3:
        words = load_words3(pages, page * pages.stride_page + head * pages.stride_head + slot * pages.stride_slot, mask, PLAN)
    else:
        real = mask[:, None]
        if PLAN.width != PLAN.columns:
            real = real & (tl.arange(0, PLAN.width) < PLAN.columns)[None, :]
        words = tl.load(word_pointers(pages, page, slot, head, PLAN), mask=real, other=0)
    meta = ()
    if NUM_META > 0:
        at = meta_pointers(pages, page, slot, head)
        for i in tl.static_range(NUM_META):
            meta = meta + (tl.load(at + i, mask=mask, other=0.0).to(tl.float32),)
    return words, meta


@triton.jit
def decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    """What rows hold, and the scale and bias to read it with: words `[N, W]`, or `[W, N]` if TURNED."""
    CODEC: tl.constexpr = PLAN.codec
    P: tl.constexpr = PLAN.codec.planes
    PTX: tl.constexpr = PLAN.codec.ptx
    REGISTERS: tl.constexpr = PLAN.codec.registers
    if PTX != "":
        halves = tl.inline_asm_elementwise(PTX, REGISTERS, [words], HALVES[P], is_pure=True, pack=2)
        planes = ()
        for p in tl.static_range(P):
            planes = planes + (halves[p],)
    else:
        planes = CODEC.unpack(words, table, PLAN)
    return planes, CODEC.affine(planes, meta, PLAN, TURNED)


@triton.jit
def find_sequence(query_start, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that owns tile `block`: sequence s begins at tile query_start[s] // BLOCK_Q + s, so that all fit."""
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
def load_range(ranges, index):
    return tl.load(ranges + index * 2).to(tl.int32), tl.load(ranges + index * 2 + 1).to(tl.int32)


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
            start, end = load_range(extras.prefix_ranges, seq * extras.num_ranges + r)
            touched = (start < end) & (start <= last) & (first <= end)
            high = tl.where(touched, tl.maximum(high, end + 1), high)
            if not F.prefix_clamped:
                low = tl.where(touched, tl.minimum(low, start), low)
        high = tl.minimum(high, seq_len)
    if F.key_range:
        start, end = load_range(extras.key_range, seq)
        low = tl.maximum(low, start)
        high = tl.minimum(high, end)
    return low, high


@triton.jit
def split_bounds(low, high, split, BLOCK_N: tl.constexpr, F: tl.constexpr):
    """Tiles of slots, from begin to before end, that this split of slots low .. high reads."""
    begin = low // BLOCK_N
    end = tl.cdiv(high, BLOCK_N)
    if F.split_tiles > 0:
        return tl.maximum(begin, split * F.split_tiles), tl.minimum(end, (split + 1) * F.split_tiles)
    else:
        share = tl.cdiv(end - begin, tl.num_programs(1))
        begin += split * share
        return begin, tl.minimum(end, begin + share)


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
            start, end = load_range(extras.prefix_ranges, seq * extras.num_ranges + r)
            both = both | ((start < end) & (start <= query) & (query <= end) & (start <= key) & (key <= end))
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
