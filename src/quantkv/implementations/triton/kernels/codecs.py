"""Device halves of the codecs that come with quantkv. Each mirrors the `encode_ref` and `decode_ref` of its format."""

from dataclasses import replace

import triton
import triton.language as tl

from . import ptx
from .views import DeviceCodec


@triton.jit
def round_codes(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Nearest integers, halves away from zero, within LOW .. HIGH."""
    codes = (x + tl.where(x < 0, -0.5, 0.5)).to(tl.int32)
    return tl.minimum(tl.maximum(codes, LOW), HIGH)


@triton.jit
def row_range(x, real):
    """Minimum and maximum `[T]` of rows given as planes."""
    low = x[0]
    high = x[0]
    for p in tl.static_range(1, len(x)):
        low = tl.minimum(low, x[p])
        high = tl.maximum(high, x[p])
    return tl.min(tl.where(real[None, :], low, float("inf")), 1), tl.max(tl.where(real[None, :], high, -float("inf")), 1)


@triton.jit
def absmax_scale(x, LARGEST: tl.constexpr):
    largest = tl.max(tl.maximum(tl.abs(x[0]), tl.abs(x[1])), axis=1)
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), 1e-6)


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def sum_of_squares(x):
    """Elementwise over the planes."""
    total = x[0] * x[0]
    for p in tl.static_range(1, len(x)):
        total += x[p] * x[p]
    return total


@triton.jit
def pack_codes(codes, BITS: tl.constexpr):
    word = codes[0]
    for p in tl.static_range(1, len(codes)):
        word |= codes[p] << (BITS * p)
    return word


@triton.jit
def plain_encode(x, real, table, PLAN: tl.constexpr):
    return x[0], ()


@triton.jit
def plain_unpack(words, table, PLAN: tl.constexpr):
    return (words,)


@triton.jit
def int8_encode(x, real, table, PLAN: tl.constexpr):
    scale = absmax_scale(x, 127.0)
    inverse = reciprocal(scale)[:, None]
    codes = (round_codes(x[0] * inverse, -128, 127) & 0xFF, round_codes(x[1] * inverse, -128, 127) & 0xFF)
    return pack_codes(codes, 8), (scale,)


@triton.jit
def int8_unpack(words, table, PLAN: tl.constexpr):
    return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16))


@triton.jit
def to_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Codes int32 of float32 x: nearest even, saturating; NaN stays NaN. Arithmetic, for GPUs without 8-bit floats."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    m = magnitude.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    normal = ((m + ((1 << (SHIFT - 1)) - 1) + ((m >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number codes are spaced evenly: adding 2^23 rounds to one of them.
    small = (magnitude * (2.0 ** (MANTISSA + BIAS - 1)) + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), small, normal)
    return tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def e4m3_encode(x, real, table, PLAN: tl.constexpr):
    return pack_codes((to_float8(x[0], 3, 7, 448.0), to_float8(x[1], 3, 7, 448.0)), 8), ()


@triton.jit
def e4m3_token_encode(x, real, table, PLAN: tl.constexpr):
    scale = absmax_scale(x, 448.0)
    inverse = reciprocal(scale)[:, None]
    return pack_codes((to_float8(x[0] * inverse, 3, 7, 448.0), to_float8(x[1] * inverse, 3, 7, 448.0)), 8), (scale,)


@triton.jit
def e4m3_high_byte(words):
    """High bytes of int16 words as fp16 numbers times 2^-8: the exponents' biases differ by 8."""
    magnitude = (words & 0x7F00) >> 1
    magnitude = tl.where(magnitude == 0x3F80, 0x7E00, magnitude).to(tl.int16)
    return (magnitude | (words & -32768)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_unpack(words, table, PLAN: tl.constexpr):
    return (e4m3_high_byte(words << 8), e4m3_high_byte(words))


@triton.jit
def e5m2_encode(x, real, table, PLAN: tl.constexpr):
    return pack_codes((to_float8(x[0], 2, 15, 57344.0), to_float8(x[1], 2, 15, 57344.0)), 8), ()


@triton.jit
def e5m2_unpack(words, table, PLAN: tl.constexpr):
    return ((words << 8).to(tl.float16, bitcast=True), (words & -256).to(tl.float16, bitcast=True))


@triton.jit
def unpack_codes(words, PLAN: tl.constexpr):
    BITS: tl.constexpr = PLAN.bits
    P: tl.constexpr = PLAN.codec.planes
    codes = ()
    for p in tl.static_range(P):
        codes = codes + ((words >> (BITS * p)) & ((1 << BITS) - 1),)
    return codes


@triton.jit
def uniform_unpack(words, table, PLAN: tl.constexpr):
    """Codes less half their range."""
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        planes = planes + ((codes[p] - (1 << (PLAN.bits - 1))).to(tl.float16),)
    return planes


@triton.jit
def int4_encode(x, real, table, PLAN: tl.constexpr):
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32)), 1e-6)
    zero_point = round_codes(tl.div_rn(-low, scale), 0, 15)
    inverse = reciprocal(scale)[:, None]
    shift = zero_point.to(tl.float32)[:, None]
    codes = ()
    for p in tl.static_range(len(x)):
        codes = codes + (round_codes(x[p] * inverse + shift, 0, 15),)
    stored = (scale.to(tl.int32, bitcast=True) & -16) | zero_point
    return pack_codes(codes, 4), (stored.to(tl.float32, bitcast=True),)


@triton.jit
def int4_affine(planes, meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    bits = meta[0].to(tl.int32, bitcast=True)
    scale = (bits & -16).to(tl.float32, bitcast=True)
    return (scale, (8 - (bits & 15)).to(tl.float32) * scale)


@triton.jit
def int2_encode(x, real, table, PLAN: tl.constexpr):
    norm = tl.sqrt_rn(tl.sum(sum_of_squares(x), axis=1) + 1e-12)
    factor = tl.div_rn(tl.full(norm.shape, PLAN.head_size**0.5, tl.float32), norm)[:, None]
    codes = ()
    for p in tl.static_range(len(x)):
        z = x[p] * factor
        codes = codes + ((z >= -0.9816).to(tl.int32) + (z >= 0.0).to(tl.int32) + (z >= 0.9816).to(tl.int32),)
    return pack_codes(codes, 2), (tl.div_rn(norm, tl.full(norm.shape, PLAN.head_size**1.5, tl.float32)),)


@triton.jit
def int2_unpack(words, table, PLAN: tl.constexpr):
    """Levels +-0.4528 = 283 x 0.0016 and +-1.5104 = 944 x 0.0016: fp16 holds the integers exactly."""
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(8):
        planes = planes + ((codes[p] * 661 - (codes[p] >> 1) * 95 - 944).to(tl.float16),)
    return planes


@triton.jit
def int2_affine(planes, meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (meta[0] * (PLAN.head_size * 0.0016),)


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


BF16 = DeviceCodec(1, plain_encode, plain_unpack, operand=tl.bfloat16)
FP16 = DeviceCodec(1, plain_encode, plain_unpack)
FP32 = DeviceCodec(1, plain_encode, plain_unpack, word_bytes=4, operand=tl.float32)
INT8 = DeviceCodec(2, int8_encode, int8_unpack, num_meta=1, program=ptx.BYTES)
E4M3 = DeviceCodec(2, e4m3_encode, e4m3_unpack, exponents=(8, 8), program=ptx.E4M3)
E4M3_TOKEN = replace(E4M3, encode=e4m3_token_encode, num_meta=1)
E5M2 = DeviceCodec(2, e5m2_encode, e5m2_unpack)
INT4 = DeviceCodec(4, int4_encode, uniform_unpack, int4_affine, num_meta=1, program=ptx.NIBBLES)
INT2 = DeviceCodec(8, int2_encode, int2_unpack, int2_affine, num_meta=1, program=ptx.PAIRS)
TQ4 = DeviceCodec(4, book_encode, book_unpack, book_affine, num_meta=1, program=ptx.BOOK4)
TQ3 = DeviceCodec(8, book_encode, book_unpack, book_affine, word_bytes=3, num_meta=1, program=ptx.BOOK3)
U4 = DeviceCodec(4, uniform_encode, uniform_unpack, uniform_affine, num_meta=2, program=ptx.NIBBLES)
U3 = DeviceCodec(8, uniform_encode, uniform_unpack, uniform_affine, word_bytes=3, num_meta=2, program=ptx.TRIPLETS)
