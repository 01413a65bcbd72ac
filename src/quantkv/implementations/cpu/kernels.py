"""The compiled kernels of attention on a CPU. All of one file: what numba keeps on disk is known to be stale by its file alone.

A row is read as planes (`packing.py`): the queries come and the outputs go in that order, so nothing is shuffled here. Addresses are
those of torch's memory, which the call keeps alive and whose pages it has checked.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, njit, types, void
from numba.extending import intrinsic

from .compiling import SUMS, compiled

CHUNK = 512  # keys that are attended to at once. Cuts go by position: what a sequence gets depends on nothing beside it
ROWS = 16  # rows of a page that are unpacked at once
# Of the numbers that describe a side: addresses, strides in bytes, traits.
CODES, PAGE, TOKEN, HEAD, META, META_PAGE, META_TOKEN, META_HEAD = range(8)
SIZE, BITS, PLANES, WORD_BYTES, OPERANDS, SIGN, FIELDS, HALVES, ZERO_POINT, UNIT_LENGTH, SIGNED, HEADS, BUCKET_BITS, CHAIN = range(8, 22)
NUMBERS = 22

f32 = np.float32
ZERO, ONE, TWO, LOWEST = f32(0), f32(1), f32(2), f32(-np.inf)
LOG2_E, LN2_HIGH, LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)  # the high part times an exponent is exact
TO_INTEGER = f32(1.5 * 2**23)  # adding it rounds, and leaves the integer in the low bits
SMALLEST = f32(-87)  # its exponential is the last one that is no subnormal
EXP_0, EXP_1, EXP_2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)  # Cephes' polynomial of exp
EXP_3, EXP_4, EXP_5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)


def _loaded(type_, widened):
    """A function of an address and an index: what lies there, of `type_`, as a `widened`."""

    @intrinsic
    def at(typing, address, index):
        def generate(context, builder, signature, arguments):
            pointer = builder.inttoptr(arguments[0], context.get_value_type(type_).as_pointer())
            value = builder.load(builder.gep(pointer, [arguments[1]]), align=1)
            return value if type_ is widened else builder.zext(value, context.get_value_type(widened))

        return widened(int64, int64), generate

    return at


byte_at, short_at, float_at = _loaded(types.uint8, int32), _loaded(types.uint16, int32), _loaded(float32, float32)


@intrinsic
def float_of(typing, bits):
    """The float32 that an int32 is the bits of."""
    return float32(int32), lambda context, builder, signature, given: builder.bitcast(given[0], context.get_value_type(float32))


@intrinsic
def bits_of(typing, number):
    """The bits of a float32, int32."""
    return int32(float32), lambda context, builder, signature, given: builder.bitcast(given[0], context.get_value_type(int32))


@njit(fastmath={"contract"})
def exp(x):
    """To 1e-7 of its size, for x up to 88; zero below -87. A loop of it becomes vector instructions."""
    rounded = x * LOG2_E + TO_INTEGER
    n = rounded - TO_INTEGER
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = ((((EXP_0 * r + EXP_1) * r + EXP_2) * r + EXP_3) * r + EXP_4) * r + EXP_5
    p = p * r * r + r + ONE
    power = float_of(int32((bits_of(rounded) << int32(23)) + int32(0x3F800000)))
    return ZERO if x < SMALLEST else p * power


@njit(fastmath=SUMS)
def unpack(side, address, count, tile):
    """The operands of `count` rows of a page, from `address` on, into `tile [ROWS, D]`."""
    size, bits, table, stride = side[SIZE], side[BITS], side[OPERANDS], side[TOKEN]
    half = size // 2
    if side[CHAIN]:
        for r in range(count):
            before = int32(0)
            for i in range(size // 4):
                byte = byte_at(address + r * stride, i)
                before = int32(0) if 4 * i % side[CHAIN] == 0 else before
                first, second = 2 * (before | (byte & 15) << 4), 2 * byte
                tile[r, 4 * i], tile[r, 4 * i + 1] = float_at(table, first), float_at(table, first + 1)
                tile[r, 4 * i + 2], tile[r, 4 * i + 3] = float_at(table, second), float_at(table, second + 1)
                before = byte >> 4
    elif bits == 4 and table:
        for r in range(count):
            for i in range(half):
                byte = byte_at(address + r * stride, i)
                tile[r, i] = float_at(table, byte & 15)
                tile[r, half + i] = float_at(table, byte >> 4)
    elif bits == 4:
        for r in range(count):
            for i in range(half):
                byte = byte_at(address + r * stride, i)
                tile[r, i] = f32(byte & int32(15))
                tile[r, half + i] = f32(byte >> int32(4))
    elif bits == 8 and table:
        for r in range(count):
            for i in range(size):
                tile[r, i] = float_at(table, byte_at(address + r * stride, i))
    elif bits == 8:
        sign = int32(side[SIGN])  # 128 turns two's complement into numbers, 0 leaves them as they are
        for r in range(count):
            for i in range(size):
                tile[r, i] = f32((byte_at(address + r * stride, i) ^ sign) - sign)
    elif bits == 16:
        for r in range(count):
            for i in range(size):
                tile[r, i] = float_at(table, short_at(address + r * stride, i))
    elif bits == 32:
        for r in range(count):
            for i in range(size):
                tile[r, i] = float_at(address + r * stride, i)
    else:
        planes, width, mask = side[PLANES], side[WORD_BYTES], (1 << bits) - 1
        words = size // planes
        for r in range(count):
            for w in range(words):
                word = int64(0)
                for b in range(width):
                    word |= int64(byte_at(address + r * stride, w * width + b)) << (8 * b)
                for p in range(planes):
                    tile[r, p * words + w] = float_at(table, (word >> (bits * p)) & mask)


@njit(fastmath=SUMS)
def read(side, page, slot, head, count, tile, scales, biases):
    """`count` rows of a page from `slot` on: operands, scales and biases."""
    unpack(side, side[CODES] + page * side[PAGE] + slot * side[TOKEN] + head * side[HEAD], count, tile)
    address = side[META] + page * side[META_PAGE] + slot * side[META_TOKEN] + head * side[META_HEAD]
    fields, halves, stride, size = side[FIELDS], side[HALVES], side[META_TOKEN], side[SIZE]
    mask, unit_length = int32(side[ZERO_POINT]), side[UNIT_LENGTH]
    for r in range(count):
        scale, bias = ONE, ZERO
        if fields and halves:
            scale = float_at(halves, short_at(address + r * stride, 0))
            if fields > 1:
                bias = float_at(halves, short_at(address + r * stride, 1))
        elif fields:
            scale = float_at(address + r * stride, 0)
            if fields > 1:
                bias = float_at(address + r * stride, 1)
        if mask:
            bits = bits_of(scale)
            scale = float_of(int32(bits & ~mask))
            bias = -f32(bits & mask) * scale
        if unit_length:
            squares = ZERO
            for d in range(size):
                squares += tile[r, d] * tile[r, d]
            scale /= np.sqrt(squares)
        scales[r], biases[r] = scale, bias


@njit(fastmath=SUMS)
def score_keys(key, pages, first, last, size, head, queries, sums, low, high, mean_scores, origin, tile, scores, added):
    """`scores [C, CHUNK]` of the keys in slots first to last, CHUNK of them from first rounded down, for each of the packed query rows
    `queries [C, D]` that sees them: from `low[c]` to before `high[c]`. added: whether they come to those that are there."""
    start, packed_rows = first // CHUNK * CHUNK, queries.shape[0]
    scales, biases = np.empty(ROWS, f32), np.empty(ROWS, f32)
    signed, buckets, bits = key[SIGNED] != 0, mean_scores.shape[1], key[BUCKET_BITS]
    slot = first
    while slot < last:
        page, place = slot // size, slot % size
        count = min(ROWS, size - place, last - slot)
        read(key, pages[page], place, head, count, tile, scales, biases)
        for c in range(packed_rows):
            for r in range(max(low[c] - slot, 0), min(high[c] - slot, count)):
                dot = ZERO
                for d in range(queries.shape[1]):
                    dot += tile[r, d] * queries[c, d]
                score = dot * scales[r] + sums[c] * biases[r]
                if buckets and (not signed or scales[r] >= ZERO):
                    score += mean_scores[c, min((origin + slot + r) >> bits, buckets - 1)]
                scores[c, slot + r - start] = score + (scores[c, slot + r - start] if added else ZERO)
        slot += count


@njit(fastmath=SUMS)
def weigh(scores, softcap):
    """Turn scores into weights, in place: the largest score, and the sum of the weights."""
    largest, total = LOWEST, ZERO
    if softcap > ZERO:
        for i in range(scores.shape[0]):
            x = scores[i] / softcap
            small = exp(-TWO * abs(x))  # tanh is odd
            scores[i] = softcap * np.copysign((ONE - small) / (ONE + small), x)
    for i in range(scores.shape[0]):
        largest = scores[i] if scores[i] > largest else largest
    for i in range(scores.shape[0]):
        weight = exp(scores[i] - largest)
        scores[i] = weight
        total += weight
    return largest, total


@njit(fastmath=SUMS)
def add_values(value, pages, first, last, size, head, low, high, weights, tile, sums):
    """Add the values in slots first to last, weighted, to `sums [C, D_V]`."""
    start, packed_rows, width = first // CHUNK * CHUNK, sums.shape[0], value[SIZE]
    scales, biases = np.empty(ROWS, f32), np.empty(ROWS, f32)
    slot = first
    while slot < last:
        page, place = slot // size, slot % size
        count = min(ROWS, size - place, last - slot)
        read(value, pages[page], place, head, count, tile, scales, biases)
        for c in range(packed_rows):
            r, stop = max(low[c] - slot, 0), min(high[c] - slot, count)
            at, shift = slot - start, ZERO
            while r < stop:  # four rows at once, where there are
                a, shift = weights[c, at + r] * scales[r], shift + weights[c, at + r] * biases[r]
                if r + 3 < stop:
                    w1, w2, w3 = weights[c, at + r + 1], weights[c, at + r + 2], weights[c, at + r + 3]
                    shift += w1 * biases[r + 1] + w2 * biases[r + 2] + w3 * biases[r + 3]
                    w1, w2, w3 = w1 * scales[r + 1], w2 * scales[r + 2], w3 * scales[r + 3]
                    for d in range(width):
                        sums[c, d] += (a * tile[r, d] + w1 * tile[r + 1, d]) + (w2 * tile[r + 2, d] + w3 * tile[r + 3, d])
                    r += 4
                else:
                    for d in range(width):
                        sums[c, d] += a * tile[r, d]
                    r += 1
            if shift != ZERO:
                for d in range(width):
                    sums[c, d] += shift
        slot += count


F2, F3, I1, I2 = float32[:, ::1], float32[:, :, ::1], int64[::1], int64[:, ::1]


@compiled(void(int64, int64, int64, I2, I2, I1, I2, I1, I1, I1, I1, F3, F3, float32, F2, F2), fastmath=SUMS, nogil=True)
def attend_chunks(
    first, last, size, chunks, pages, starts, seen, origins, key, rotated, value, queries, mean_scores, softcap, sums, totals
):
    """Chunks first to last (heads innermost) of the work: each is one kv head and CHUNK slots of one sequence.

    size: slots of a page. chunks: `[N, 3]`, a sequence, its first slot, and where the chunk's packed query rows begin in sums and totals.
    pages `[S, pages]`. starts `[S + 1]`: where a sequence's queries begin. seen `[T, 2]`: which slots a query sees, from, to before.
    origins `[S]`: the position of slot 0. rotated: of latents, the side with their rotated dimensions; of other keys empty. queries
    `[T, HQ, D]`: mapped and scaled, in planes, those to rotated dimensions last. mean_scores `[T, HQ, buckets]`: what the keys' key mean
    adds to a score. sums `[rows, D_V]`, totals `[rows, 2]`: weighted values; the largest score and the sum of weights.
    """
    heads, head_size = key[HEADS], key[SIZE]
    group, rotated_size = queries.shape[1] // heads, queries.shape[2] - head_size
    tile = np.empty((ROWS, max(head_size, value[SIZE])), f32)
    for work in range(first, last):
        chunk, head = work // heads, work % heads
        sequence, begin, row = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
        token, count = starts[sequence], starts[sequence + 1] - starts[sequence]
        packed_rows = group * count
        row += head * packed_rows
        rows, by_bucket = np.empty((packed_rows, head_size), f32), np.empty((packed_rows, mean_scores.shape[2]), f32)
        rotated_rows, rotated_sums = np.empty((packed_rows, rotated_size), f32), np.zeros(packed_rows, f32)
        low, high, sums_q = np.empty(packed_rows, np.int64), np.empty(packed_rows, np.int64), np.zeros(packed_rows, f32)
        least, most = begin + CHUNK, begin
        for c in range(packed_rows):
            t, h = token + c % count, head * group + c // count
            low[c], high[c] = max(seen[t, 0], begin), min(seen[t, 1], begin + CHUNK)
            if low[c] < high[c]:
                least, most = min(least, low[c]), max(most, high[c])
            for d in range(head_size):
                rows[c, d] = queries[t, h, d]
                sums_q[c] += queries[t, h, d]
            for d in range(rotated_size):
                rotated_rows[c, d] = queries[t, h, head_size + d]
                rotated_sums[c] += queries[t, h, head_size + d]
            for b in range(mean_scores.shape[2]):
                by_bucket[c, b] = mean_scores[t, h, b]
        scores = np.empty((packed_rows, CHUNK), f32)
        where = pages[sequence], least, most, size, head
        score_keys(key, *where, rows, sums_q, low, high, by_bucket, origins[sequence], tile, scores, False)
        if rotated_size:
            score_keys(rotated, *where, rotated_rows, rotated_sums, low, high, by_bucket, origins[sequence], tile, scores, True)
        for c in range(packed_rows):
            totals[row + c, 0], totals[row + c, 1] = LOWEST, ZERO
            sums[row + c] = ZERO
            if low[c] < high[c]:
                totals[row + c, 0], totals[row + c, 1] = weigh(scores[c, low[c] - begin : high[c] - begin], softcap)
        add_values(value, pages[sequence], least, most, size, head, low, high, scores, tile, sums[row : row + packed_rows])


@compiled(void(I2, I1, I1, F2, F2, F3, F2), fastmath=SUMS, nogil=True)
def combine_chunks(chunks, first, starts, sums, totals, out, lse):
    """The chunks of each sequence, first[s] to before first[s + 1], as its output `[T, HQ, D_V]` and log-sum-exp `[T, HQ]`; zero
    and -inf where a query sees no key."""
    for sequence in range(starts.shape[0] - 1):
        count = starts[sequence + 1] - starts[sequence]
        for c in range(out.shape[1] * count):
            t, h = starts[sequence] + c % count, c // count
            largest, total = LOWEST, ZERO
            for p in range(first[sequence], first[sequence + 1]):
                row = chunks[p, 2] + c
                if totals[row, 1] != ZERO and totals[row, 0] > largest:
                    largest = totals[row, 0]
            out[t, h] = ZERO
            for p in range(first[sequence], first[sequence + 1]):
                row = chunks[p, 2] + c
                if totals[row, 1] != ZERO:
                    weight = exp(totals[row, 0] - largest)
                    total += weight * totals[row, 1]
                    for d in range(out.shape[2]):
                        out[t, h, d] += weight * sums[row, d]
            lse[t, h] = largest
            if total != ZERO:
                for d in range(out.shape[2]):
                    out[t, h, d] /= total
                if largest < f32(np.inf):
                    lse[t, h] = largest + np.log(total)
