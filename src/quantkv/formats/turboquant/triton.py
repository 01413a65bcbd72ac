"""The Triton half of TurboQuant's keys and values."""

import triton
import triton.language as tl

from ...implementations.triton.kernels import ptx
from ...implementations.triton.kernels.codes import pack_codes, round_codes, row_range, sum_of_squares, uniform_unpack, unpack_codes
from ...implementations.triton.kernels.views import TritonCodec


@triton.jit
def book_encode(x, real, table, PLAN: tl.constexpr):
    """table: the levels for N(0, 1), then the midpoints for N(0, 1 / D)."""
    BITS: tl.constexpr = PLAN.bits
    norm = tl.sqrt_rn(tl.sum(sum_of_squares(x), axis=1))
    codes = ()
    for p in tl.static_range(len(x)):
        unit = tl.div_rn(x[p], tl.broadcast_to((norm + 1e-8)[:, None], x[p].shape))
        code = tl.zeros(x[p].shape, tl.int32)
        for i in tl.static_range((1 << BITS) - 1):
            code += (unit >= tl.load(table + (1 << BITS) + i)).to(tl.int32)
        codes = codes + (code,)
    return pack_codes(codes, BITS), (norm,)


@triton.jit
def book_magnitude(table, index, BITS: tl.constexpr):
    """|level| by its index from the middle outwards, chosen bit by bit: selects are cheaper than gathers."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    levels = ()
    for i in tl.static_range(HALF):
        levels = levels + (tl.load(table + HALF + i).to(tl.float16),)
    for bit in tl.static_range(BITS - 1):
        odd = ((index >> bit) & 1) != 0
        halved = ()
        for i in tl.static_range(len(levels) // 2):
            halved = halved + (tl.where(odd, levels[2 * i + 1], levels[2 * i]),)
        levels = halved
    return levels[0]


@triton.jit
def book_affine(planes, meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    """Scale that brings the row of levels to the length in the metadata."""
    squares = sum_of_squares(planes)
    if PLAN.width != PLAN.columns:
        real = tl.arange(0, PLAN.width) < PLAN.columns
        squares = tl.where(real[:, None] if TURNED else real[None, :], squares, 0.0)
    if TURNED:  # as a product: then all that reads the planes has them in one layout, and they are decoded once
        length = tl.max(tl.dot(tl.full([16, PLAN.width], 1.0, squares.dtype), squares), axis=0)
    else:
        length = tl.sum(squares.to(tl.float32), axis=1)
    return (meta[0] * tl.rsqrt(length),)


@triton.jit
def book_unpack(words, table, PLAN: tl.constexpr):
    MIDDLE: tl.constexpr = (1 << (PLAN.bits - 1)) - 1
    codes = unpack_codes(words.to(tl.int32), PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        upper = codes[p] > MIDDLE  # level[top - code] = -level[code]
        magnitude = book_magnitude(table, (codes[p] ^ tl.where(upper, 0, MIDDLE)) & MIDDLE, PLAN.bits)
        planes = planes + (tl.where(upper, magnitude, -magnitude),)
    return planes


@triton.jit
def uniform_encode(x, real, table, PLAN: tl.constexpr):
    TOP: tl.constexpr = (1 << PLAN.bits) - 1
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, TOP * 1.0, tl.float32)), 1e-8)
    codes = ()
    for p in tl.static_range(len(x)):
        codes = codes + (round_codes(tl.div_rn(x[p] - low[:, None], tl.broadcast_to(scale[:, None], x[p].shape)), 0, TOP),)
    return pack_codes(codes, PLAN.bits), (scale, low)


@triton.jit
def uniform_affine(planes, meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (meta[0], meta[1] + (1 << (PLAN.bits - 1)) * meta[0])


TQ4 = TritonCodec(4, book_encode, book_unpack, book_affine, num_meta=1, program=ptx.BOOK4)
TQ3 = TritonCodec(8, book_encode, book_unpack, book_affine, word_bytes=3, num_meta=1, program=ptx.BOOK3)
U4 = TritonCodec(4, uniform_encode, uniform_unpack, uniform_affine, num_meta=2, program=ptx.NIBBLES)
U3 = TritonCodec(8, uniform_encode, uniform_unpack, uniform_affine, word_bytes=3, num_meta=2, program=ptx.TRIPLETS)
