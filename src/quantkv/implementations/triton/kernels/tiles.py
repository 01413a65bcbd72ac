"""Device functions that the kernels share: rows as planes, mapped, and as they are cached."""

import triton
import triton.language as tl

HALVES = tl.constexpr({n: (tl.float16,) * n for n in (1, 2, 4, 8, 16)})  # what inline PTX returns
LOG2 = tl.constexpr({1 << n: n for n in range(12)})
PAIRINGS = tl.constexpr({1: 0, 2: 1, 4: 2, 8: 3, 16: 4})  # how often planes are joined by pairs


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
    COUNT: tl.constexpr = PAIRINGS[P]
    planes = (x,)
    for _ in tl.static_range(COUNT):
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
    COUNT: tl.constexpr = PAIRINGS[P]
    for _ in tl.static_range(COUNT):
        planes = join_pairs(planes)
    return planes[0]


@triton.jit
def join_operand(planes):
    """`join_planes` of numbers. As integers: Triton 3.6 fuses the reshape into the dot's shared memory; it fails."""
    if len(planes) > 1:
        INTEGER: tl.constexpr = tl.int32 if planes[0].dtype == tl.float32 else tl.int16
        words = ()
        for p in tl.static_range(len(planes)):
            words = words + (planes[p].to(INTEGER, bitcast=True),)
        return join_planes(words).to(planes[0].dtype, bitcast=True)
    else:
        return planes[0]


@triton.jit
def map_product(x, matrix, total, PRECISION: tl.constexpr):
    """total + x matrix^T. A bfloat16 matrix has entries 0 and +-1 only: with 16-bit x its products are exact, and x in float32 is the sum
    of three numbers of 8 bits each, of which they are, in fewer instructions and registers than products in float32."""
    transposed = tl.trans(matrix)
    if x.dtype == tl.float32 and matrix.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        rest = tl.where(tl.abs(x) < float("inf"), x - high.to(tl.float32), 0.0)  # inf - inf is no number
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, transposed, tl.dot(middle, transposed, tl.dot(low, transposed, total)))
    elif x.dtype == tl.float32 or matrix.dtype == tl.float32:
        return tl.dot(x.to(tl.float32), transposed.to(tl.float32), total, input_precision=PRECISION)
    else:
        return tl.dot(x, transposed.to(x.dtype), total)


@triton.jit
def hadamard(x, BLOCK: tl.constexpr):
    """x `[R, W]` through Hadamard matrices of BLOCK x BLOCK, a power of two, unnormalised. Neighbours always stand side by side: a stage
    turns the bits of the index by one."""
    STEPS: tl.constexpr = LOG2[BLOCK]
    ROWS: tl.constexpr = x.shape[0] * x.shape[1] // BLOCK
    y = tl.reshape(x, [ROWS, BLOCK])
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(y, [ROWS, BLOCK // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [0, 2, 1]), [ROWS, BLOCK])
    return tl.reshape(y, x.shape)


@triton.jit
def word_signs(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Hadamard matrices of BLOCK x BLOCK in blocks, `[WIDTH, WIDTH]` of bfloat16: -1 where row and column share an odd number of bits."""
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    shared = row & column & (BLOCK - 1)
    for i in tl.static_range(3):
        shared ^= shared >> (4 >> i)
    return tl.where(row // BLOCK == column // BLOCK, 1.0 - 2.0 * (shared & 1).to(tl.float32), 0.0).to(tl.bfloat16)


@triton.jit
def hadamard_planes(planes, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """`hadamard` of a row as its P planes `[R, W]`: the bits of a word's index by a product, those of a plane's by butterflies. So what
    comes out lies as a product leaves it, and a loop loads it as it loads others."""
    P: tl.constexpr = len(planes)
    W: tl.constexpr = planes[0].shape[1]
    WORDS: tl.constexpr = BLOCK // P if BLOCK > P else 1
    STEPS: tl.constexpr = LOG2[P if BLOCK > P else BLOCK]
    signs = word_signs(W, WORDS)
    mapped = ()
    for p in tl.static_range(P):
        mapped = mapped + (map_product(planes[p], signs, tl.zeros(planes[p].shape, tl.float32), PRECISION),)
    for bit in tl.static_range(STEPS):
        turned = ()
        for p in tl.static_range(P):
            if (p >> bit) % 2 == 0:
                turned = turned + (mapped[p] + mapped[p + (1 << bit)],)
            else:
                turned = turned + (mapped[p - (1 << bit)] - mapped[p],)
        mapped = turned
    return mapped


@triton.jit
def load_diagonal(map, head, column, D: tl.constexpr):
    """Numbers `column [W]` of the head's diagonal: `[1, W]`."""
    return tl.load(map.matrix + head * map.stride_head + column, mask=column < D, other=0.0)[None, :]


@triton.jit
def load_matrix(map, head, out, start, D: tl.constexpr, CHUNK: tl.constexpr):
    """Rows `out [W]`, columns start .. start + CHUNK of the head's matrix: `[W, CHUNK]`."""
    column = start + tl.arange(0, CHUNK)
    at = map.matrix + head * map.stride_head + out[:, None] * D + column[None, :]
    return tl.load(at, mask=(out < D)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def key_mean_row(map, head, bucket, column, D: tl.constexpr):
    """Columns of the head's key mean for each bucket of positions; the last row serves what lies beyond the table."""
    row = tl.minimum(bucket, map.num_buckets - 1).to(tl.int64)
    return tl.load(map.key_mean + row * map.key_mean_bucket + head * map.key_mean_head + column, mask=column < D, other=0.0)


@triton.jit
def add_mapped(
    planes,
    rows,
    row_mask,
    map,
    head,
    position,
    start,
    PLAN: tl.constexpr,
    KEY_MEAN: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The planes `[R, W]` and what CHUNK dimensions of the rows from `start` on, less their key mean, add to them through the map."""
    P: tl.constexpr = PLAN.codec.planes
    D: tl.constexpr = PLAN.head_size
    word = tl.arange(0, PLAN.width)
    column = (start + tl.arange(0, CHUNK))[None, :]
    x = tl.load(rows[:, None] + column, mask=row_mask[:, None] & (column < D), other=0.0)
    if KEY_MEAN:
        x = x.to(tl.float32) - key_mean_row(map, head, (position // 64)[:, None], column, D)
    updated = ()
    for p in tl.static_range(P):
        matrix = load_matrix(map, head, word * P + p, start, D, CHUNK)
        updated = updated + (map_product(x, matrix, planes[p], PRECISION),)
    return updated


@triton.jit
def load_rows(rows, row_mask, map, head, position, PLAN: tl.constexpr, KEY_MEAN: tl.constexpr, PRECISION: tl.constexpr):
    """Rows at the pointers `rows [R]` as planes `[R, W]`: less their key mean and mapped, in float32, or as they are."""
    P: tl.constexpr = PLAN.codec.planes
    D: tl.constexpr = PLAN.head_size
    W: tl.constexpr = PLAN.width
    if PLAN.hadamard > 0:
        EXACT: tl.constexpr = tl.bfloat16 if rows.dtype.element_ty == tl.bfloat16 else tl.float32  # by a diagonal of powers of two
        planes = ()
        for p in tl.static_range(P):
            column = tl.arange(0, W) * P + p
            x = tl.load(rows[:, None] + column[None, :], mask=row_mask[:, None] & (column < D)[None, :], other=0.0)
            planes = planes + ((x.to(tl.float32) * load_diagonal(map, head, column, D)).to(EXACT),)
        return hadamard_planes(planes, PLAN.hadamard, PRECISION)
    elif PLAN.mapped:
        CHUNK: tl.constexpr = 64 if W <= 128 else 32
        planes = ()
        for _ in tl.static_range(P):
            planes = planes + (tl.zeros([rows.shape[0], W], tl.float32),)
        if D <= 256:
            for start in tl.static_range(0, D, CHUNK):
                planes = add_mapped(planes, rows, row_mask, map, head, position, start, PLAN, KEY_MEAN, CHUNK, PRECISION)
        else:  # unrolled, it would compile for 10 seconds; loaded ahead, matrices would not fit shared memory
            for start in tl.range(0, D, CHUNK, num_stages=1):
                planes = add_mapped(planes, rows, row_mask, map, head, position, start, PLAN, KEY_MEAN, CHUNK, PRECISION)
        return planes
    else:
        column = tl.arange(0, W * P)[None, :]
        return split_planes(tl.load(rows[:, None] + column, mask=row_mask[:, None] & (column < D), other=0.0), P)


@triton.jit
def word_pointers(pages, page, slot, head, PLAN: tl.constexpr, ROWS: tl.constexpr = 0):
    """Pointers `[N, W]` to the words, or to their first bytes, of rows in slots `slot [N]` of pages `page`, `[N]` or one; `[W, N]` where
    ROWS, the axis of the rows, is 1."""
    ALIGN: tl.constexpr = PLAN.align
    STEP: tl.constexpr = PLAN.codec.word_bytes if PLAN.codec.bytewise else 1
    row = tl.multiple_of(slot * PLAN.slot_words, ALIGN)
    inside = tl.expand_dims(row, 1 - ROWS) + STEP * tl.expand_dims(tl.arange(0, PLAN.width), ROWS)
    rows = pages.words + tl.multiple_of(head * pages.stride_head, ALIGN) + inside  # of any page: the same in every tile of a loop
    record = tl.multiple_of(page * PLAN.page_words, ALIGN)
    if len(record.shape) > 0:
        return rows + tl.expand_dims(record, 1 - ROWS)
    else:
        return rows + record


@triton.jit
def meta_pointers(pages, page, slot, head, PLAN: tl.constexpr, WHOLE: tl.constexpr = 0):
    """Where the metadata of a row begins. WHOLE: so many slots at a time lie in one page; 0: nothing is known."""
    ALIGN: tl.constexpr = PLAN.align_meta
    record = tl.multiple_of(page * PLAN.page_meta + head * pages.meta_head, ALIGN)
    if WHOLE > 0 and len(record.shape) > 0:
        record = tl.max_constancy(record, WHOLE)
    return pages.meta + record + slot * PLAN.slot_meta


@triton.jit
def load_bytes(pages, base, mask, PLAN: tl.constexpr):
    """Words `[N, W]` as long as no integer is. Of three bytes: in int32 whose highest byte may hold anything, four from three int32,
    which can be copied to shared memory ahead of time, where rows are aligned to them. Else byte by byte."""
    BYTES: tl.constexpr = PLAN.codec.word_bytes
    QUADS: tl.constexpr = pages.words.dtype.element_ty == tl.int32
    word = tl.arange(0, PLAN.width // 4)[None, :] * 4 if QUADS else tl.arange(0, PLAN.width)[None, :]
    at = pages.words + base[:, None] + (word // 4 * 3 if QUADS else word * BYTES)
    real = mask[:, None] & (word < PLAN.columns)
    if QUADS:
        a = tl.load(at, mask=real, other=0).to(tl.uint32)
        b = tl.load(at + 1, mask=real, other=0).to(tl.uint32)
        c = tl.load(at + 2, mask=real, other=0).to(tl.uint32)
        words = tl.join(tl.join(a, (b >> 16) | (c << 16)), tl.join((a >> 24) | (b << 8), c >> 8))
        return tl.reshape(words, [base.shape[0], PLAN.width]).to(tl.int32, bitcast=True)
    else:
        DTYPE: tl.constexpr = tl.int32 if BYTES == 3 else tl.int64
        words = tl.load(at, mask=real, other=0).to(DTYPE)
        for i in tl.static_range(1, BYTES):
            words |= tl.load(at + i, mask=real, other=0).to(DTYPE) << 8 * i
        return words


@triton.jit
def load_cached(
    pages, page, slot, head, mask, PLAN: tl.constexpr, ROWS: tl.constexpr = 0, ANY: tl.constexpr = False, WHOLE: tl.constexpr = 0
):
    """words, `[N, W]` or, where ROWS is 1, `[W, N]`, and metadata, a tuple of `[N]` float32. What is masked reads as zero bits: an
    unwritten slot may hold NaN. ANY: words that are masked may hold anything. WHOLE: so may metadata, and so many slots at a time lie in
    one page: it can be copied ahead of time."""
    NUM_META: tl.constexpr = PLAN.codec.num_meta
    if PLAN.codec.bytewise:
        words = load_bytes(pages, page * PLAN.page_words + head * pages.stride_head + slot * PLAN.slot_words, mask, PLAN)
        words = tl.trans(words) if ROWS == 1 else words
    else:
        real = tl.expand_dims(mask | ANY, 1 - ROWS)
        if PLAN.width != PLAN.columns:
            real = real & tl.expand_dims(tl.arange(0, PLAN.width) < PLAN.columns, ROWS)
        words = tl.load(word_pointers(pages, page, slot, head, PLAN, ROWS), mask=real, other=0)
        if PLAN.codec.overlap > 0:
            OVERLAP: tl.constexpr = PLAN.codec.overlap
            BITS: tl.constexpr = words.dtype.primitive_bitwidth
            goes_on = tl.expand_dims(tl.arange(0, PLAN.width) % PLAN.codec.chain != 0, ROWS)
            before = tl.load(word_pointers(pages, page, slot, head, PLAN, ROWS) - 1, mask=real & goes_on, other=0).to(tl.int32)
            last = (before >> (BITS - OVERLAP)) & ((1 << OVERLAP) - 1)
            words = ((words.to(tl.int32) & ((1 << BITS) - 1)) << OVERLAP) | last
    meta = ()
    if NUM_META > 0:
        at = meta_pointers(pages, page, slot, head, PLAN, WHOLE)
        for i in tl.static_range(NUM_META):
            loaded = tl.load(at + i) if WHOLE > 0 else tl.load(at + i, mask=mask, other=0.0)
            meta = meta + (loaded.to(tl.float32),)
    return words, meta


@triton.jit
def decode(words, meta, table, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What rows hold, and the scale and bias to read it with: words `[N, W]`, or `[W, N]` if TRANSPOSED."""
    CODEC: tl.constexpr = PLAN.codec
    P: tl.constexpr = PLAN.codec.planes
    PTX: tl.constexpr = PLAN.codec.ptx
    REGISTERS: tl.constexpr = "=&r," * P + PLAN.codec.registers
    if PTX != "":
        halves = tl.inline_asm_elementwise(PTX, REGISTERS, [words], HALVES[P], is_pure=True, pack=2)
        planes = ()
        for p in tl.static_range(P):
            planes = planes + (halves[p],)
    else:
        planes = CODEC.unpack(words, table, PLAN)
    return planes, meta if CODEC.affine is None else CODEC.affine(planes, meta, PLAN, TRANSPOSED)


@triton.jit
def zero_of(meta, PLAN: tl.constexpr):
    """What is to be taken off the planes, `[N]`, in a tuple; or none."""
    CODEC: tl.constexpr = PLAN.codec
    if CODEC.zero is None:
        return ()
    else:
        return (CODEC.zero(meta, PLAN),)
