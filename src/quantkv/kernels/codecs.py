"""Device halves of the codecs that come with quantkv. Each mirrors the `encode_ref` and `decode_ref` of its format."""

import triton
import triton.language as tl

from .views import DeviceCodec


@triton.jit
def round_half_away(x):
    return (x + tl.where(x < 0, -0.5, 0.5)).to(tl.int32)


@triton.jit
def clamp_codes(codes, LOW: tl.constexpr, HIGH: tl.constexpr):
    return tl.minimum(tl.maximum(codes, LOW), HIGH)


@triton.jit
def row_range(x, real):
    """Minimum and maximum `[T]` of rows given as planes."""
    low = tl.min(tl.where(real[None, :], x[0], float("inf")), axis=1)
    high = tl.max(tl.where(real[None, :], x[0], -float("inf")), axis=1)
    for p in tl.static_range(1, len(x)):
        low = tl.minimum(low, tl.min(tl.where(real[None, :], x[p], float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(real[None, :], x[p], -float("inf")), axis=1))
    return low, high


@triton.jit
def absmax_scale(x, LARGEST: tl.constexpr):
    largest = tl.max(tl.abs(x[0]), axis=1)
    for p in tl.static_range(1, len(x)):
        largest = tl.maximum(largest, tl.max(tl.abs(x[p]), axis=1))
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), 1e-6)


@triton.jit
def reciprocal(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def sum_of_squares(x, AXIS: tl.constexpr):
    total = tl.sum(x[0] * x[0], axis=AXIS)
    for p in tl.static_range(1, len(x)):
        total += tl.sum(x[p] * x[p], axis=AXIS)
    return total


# ---- as given


@triton.jit
def plain_encode(x, real, table, PLAN: tl.constexpr):
    return x[0], ()


@triton.jit
def plain_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (words,), ()


def plain(operand, word_bytes: int) -> DeviceCodec:
    """Rows stored in a dtype that dots take."""
    return DeviceCodec(1, plain_encode, plain_decode, word_bytes, operand=operand)


BF16, FP16, FP32 = plain(tl.bfloat16, 2), plain(tl.float16, 2), plain(tl.float32, 4)


# ---- int8


@triton.jit
def int8_encode(x, real, table, PLAN: tl.constexpr):
    scale = absmax_scale(x, 127.0)
    inverse = reciprocal(scale)[:, None]
    low = clamp_codes(round_half_away(x[0] * inverse), -128, 127)
    high = clamp_codes(round_half_away(x[1] * inverse), -128, 127)
    return (low & 0xFF) | (high << 8), (scale,)


@triton.jit
def int8_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16)), (meta[0],)


# Byte b + 128 under the exponent of 1024 is the fp16 number 1152 + b.
@triton.jit
def int8_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    planes = tl.inline_asm_elementwise(
        "{ .reg .b32 t, a, b, c;"
        "mov.b32 c, 0x64806480; lop3.b32 a, $2, 0x00ff00ff, c, 0x6a;"
        "shr.b32 t, $2, 8; lop3.b32 b, t, 0x00ff00ff, c, 0x6a;"
        "mov.b32 c, 0xe480e480; add.f16x2 $0, a, c; add.f16x2 $1, b, c; }",
        "=&r,=&r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return (planes[0], planes[1]), (meta[0],)


INT8 = DeviceCodec(2, int8_encode, int8_decode, num_meta=1, ptx=DeviceCodec(2, int8_encode, int8_decode_ptx, num_meta=1))


# ---- 8-bit floats, by arithmetic: the same bits on GPUs without them


@triton.jit
def to_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Codes int32 of float32 x: nearest even, saturating; NaN stays NaN."""
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
def pack_bytes(low, high):
    return low | (high << 8)


@triton.jit
def e4m3_encode(x, real, table, PLAN: tl.constexpr):
    return pack_bytes(to_float8(x[0], 3, 7, 448.0), to_float8(x[1], 3, 7, 448.0)), ()


@triton.jit
def e4m3_token_encode(x, real, table, PLAN: tl.constexpr):
    scale = absmax_scale(x, 448.0)
    inverse = reciprocal(scale)[:, None]
    return pack_bytes(to_float8(x[0] * inverse, 3, 7, 448.0), to_float8(x[1] * inverse, 3, 7, 448.0)), (scale,)


@triton.jit
def e4m3_high_byte(words):
    """High bytes of int16 words as fp16 numbers times 2^-8: the exponents' biases differ by 8."""
    magnitude = (words & 0x7F00) >> 1
    magnitude = tl.where(magnitude == 0x3F80, 0x7E00, magnitude).to(tl.int16)
    return (magnitude | (words & -32768)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (e4m3_high_byte(words << 8), e4m3_high_byte(words)), meta


@triton.jit
def e4m3_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    planes = tl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 lo, hi;"
        "prmt.b32 t, $2, 0, 0x3120; mov.b32 {lo, hi}, t;"
        "cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
        "=&r,=&r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    return (planes[0], planes[1]), meta


@triton.jit
def e5m2_encode(x, real, table, PLAN: tl.constexpr):
    return pack_bytes(to_float8(x[0], 2, 15, 57344.0), to_float8(x[1], 2, 15, 57344.0)), ()


@triton.jit
def e5m2_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return ((words << 8).to(tl.float16, bitcast=True), (words & -256).to(tl.float16, bitcast=True)), meta


def _e4m3(encode, num_meta: int) -> DeviceCodec:
    native = DeviceCodec(2, encode, e4m3_decode_ptx, num_meta=num_meta)
    return DeviceCodec(2, encode, e4m3_decode, num_meta=num_meta, exponents=(8, 8), ptx=native, ptx_capability=89)


E4M3, E4M3_TOKEN = _e4m3(e4m3_encode, 0), _e4m3(e4m3_token_encode, 1)
E5M2 = DeviceCodec(2, e5m2_encode, e5m2_decode)


# ---- codes of a few bits


@triton.jit
def pack_codes(codes, BITS: tl.constexpr):
    word = codes[0]
    for p in tl.static_range(1, len(codes)):
        word |= codes[p] << (BITS * p)
    return word


@triton.jit
def unpack_codes(words, BITS: tl.constexpr, COUNT: tl.constexpr):
    codes = ()
    for p in tl.static_range(COUNT):
        codes = codes + ((words >> (BITS * p)) & ((1 << BITS) - 1),)
    return codes


@triton.jit
def uniform_planes(words, BITS: tl.constexpr, COUNT: tl.constexpr, TURNED: tl.constexpr):
    """Codes as fp16 numbers; V's centred."""
    codes = unpack_codes(words, BITS, COUNT)
    CENTRE: tl.constexpr = 0 if TURNED else 1 << (BITS - 1)
    planes = ()
    for p in tl.static_range(COUNT):
        planes = planes + ((codes[p] - CENTRE).to(tl.float16),)
    return planes


# A nibble masked in place is an fp16 subnormal: n 2^-24 at bit 0, n 2^-20 at bit 4. Tensor cores take those at full speed.
@triton.jit
def nibble_planes_ptx(words, TURNED: tl.constexpr):
    if TURNED:
        planes = tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;"
            "shr.b32 t, $4, 8; and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:  # minus 8 in the same units
        planes = tl.inline_asm_elementwise(
            "{ .reg .b32 t, a, b, c; mov.b32 b, 0x80088008; mov.b32 c, 0x80808080;"
            "and.b32 a, $4, 0x000f000f; add.f16x2 $0, a, b; and.b32 a, $4, 0x00f000f0; add.f16x2 $1, a, c;"
            "shr.b32 t, $4, 8;"
            "and.b32 a, t, 0x000f000f; add.f16x2 $2, a, b; and.b32 a, t, 0x00f000f0; add.f16x2 $3, a, c; }",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return (planes[0], planes[1], planes[2], planes[3])


NIBBLE_EXPONENTS = (24, 20, 24, 20)


# ---- int4: the zero point in the scale's low mantissa bits


@triton.jit
def int4_encode(x, real, table, PLAN: tl.constexpr):
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32)), 1e-6)
    zero_point = clamp_codes(round_half_away(tl.div_rn(-low, scale)), 0, 15)
    inverse = reciprocal(scale)[:, None]
    shift = zero_point.to(tl.float32)[:, None]
    codes = ()
    for p in tl.static_range(len(x)):
        codes = codes + (clamp_codes(round_half_away(x[p] * inverse + shift), 0, 15),)
    stored = (scale.to(tl.int32, bitcast=True) & -16) | zero_point
    return pack_codes(codes, 4), (stored.to(tl.float32, bitcast=True),)


@triton.jit
def int4_affine(meta, TURNED: tl.constexpr):
    bits = meta[0].to(tl.int32, bitcast=True)
    scale = (bits & -16).to(tl.float32, bitcast=True)
    CENTRE: tl.constexpr = 0 if TURNED else 8
    return (scale, (CENTRE - (bits & 15)).to(tl.float32) * scale)


@triton.jit
def int4_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return uniform_planes(words, 4, 4, TURNED), int4_affine(meta, TURNED)


@triton.jit
def int4_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return nibble_planes_ptx(words, TURNED), int4_affine(meta, TURNED)


INT4 = DeviceCodec(
    4,
    int4_encode,
    int4_decode,
    num_meta=1,
    ptx=DeviceCodec(4, int4_encode, int4_decode_ptx, num_meta=1, exponents=NIBBLE_EXPONENTS),
)


# ---- int2: Lloyd-Max levels +-0.4528 = 283 x 0.0016 and +-1.5104 = 944 x 0.0016, so that fp16 holds them exactly


@triton.jit
def int2_encode(x, real, table, PLAN: tl.constexpr):
    norm = tl.sqrt_rn(sum_of_squares(x, 1) + 1e-12)
    factor = tl.div_rn(tl.full(norm.shape, PLAN.head_size**0.5, tl.float32), norm)[:, None]
    codes = ()
    for p in tl.static_range(len(x)):
        z = x[p] * factor
        codes = codes + ((z >= -0.9816).to(tl.int32) + (z >= 0.0).to(tl.int32) + (z >= 0.9816).to(tl.int32),)
    return pack_codes(codes, 2), (tl.div_rn(norm, tl.full(norm.shape, PLAN.head_size**1.5, tl.float32)),)


@triton.jit
def int2_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    codes = unpack_codes(words, 2, 8)
    planes = ()
    for p in tl.static_range(8):
        planes = planes + ((codes[p] * 661 - (codes[p] >> 1) * 95 - 944).to(tl.float16),)
    return planes, (meta[0] * (PLAN.head_size * 0.0016),)


INT2 = DeviceCodec(8, int2_encode, int2_decode, num_meta=1)


# ---- TurboQuant. A key codec's table: its levels for N(0, 1), then the midpoints for N(0, 1 / D)


@triton.jit
def book_encode(x, real, table, PLAN: tl.constexpr):
    BITS: tl.constexpr = PLAN.bits
    norm = tl.sqrt_rn(sum_of_squares(x, 1))
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
    AXIS: tl.constexpr = 0 if TURNED else 1
    real = tl.arange(0, PLAN.width) < PLAN.columns
    real = real[:, None] if TURNED else real[None, :]
    squares = planes[0] * planes[0]
    for p in tl.static_range(1, len(planes)):
        squares += planes[p] * planes[p]
    length = tl.sum(tl.where(real, squares.to(tl.float32), 0.0), axis=AXIS)
    return (meta[0] / tl.sqrt(length),)


@triton.jit
def book_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    MIDDLE: tl.constexpr = (1 << (PLAN.bits - 1)) - 1
    codes = unpack_codes(words.to(tl.int32), PLAN.bits, PLAN.planes)
    planes = ()
    for p in tl.static_range(len(codes)):
        upper = codes[p] > MIDDLE  # level[top - code] = -level[code]
        magnitude = book_magnitude(table, (codes[p] ^ tl.where(upper, 0, MIDDLE)) & MIDDLE, PLAN.bits)
        planes = planes + (tl.where(upper, magnitude, -magnitude),)
    return planes, book_affine(planes, meta, PLAN, TURNED)


# The same with byte permutes: the eight positive levels in fp16 are 8 low and 8 high bytes, which a nibble selects.
@triton.jit
def tq4_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    planes = tl.inline_asm_elementwise(
        "{ .reg .b32 t, u, s, l, h, a, b, c, d, la, lb, ha, hb;"
        "mov.b32 la, 0x8a41361c; mov.b32 lb, 0x76237906; mov.b32 ha, 0x3b393630; mov.b32 hb, 0x41403e3d;"
        "not.b32 t, $4; and.b32 t, t, 0x88888888; shr.b32 u, t, 3; sub.u32 u, t, u;"  # t: negative; u: 7 where negative
        "and.b32 s, $4, 0x77777777; xor.b32 s, s, u;"
        "prmt.b32 l, la, lb, s; prmt.b32 h, ha, hb, s; prmt.b32 a, l, h, 0x5140; prmt.b32 b, l, h, 0x7362;"
        "shr.b32 s, s, 16;"
        "prmt.b32 l, la, lb, s; prmt.b32 h, ha, hb, s; prmt.b32 c, l, h, 0x5140; prmt.b32 d, l, h, 0x7362;"
        "prmt.b32 l, a, c, 0x5410; shl.b32 u, t, 12; and.b32 u, u, 0x80008000; or.b32 $0, l, u;"
        "prmt.b32 l, a, c, 0x7632; shl.b32 u, t, 8; and.b32 u, u, 0x80008000; or.b32 $1, l, u;"
        "prmt.b32 l, b, d, 0x5410; shl.b32 u, t, 4; and.b32 u, u, 0x80008000; or.b32 $2, l, u;"
        "prmt.b32 l, b, d, 0x7632; and.b32 u, t, 0x80008000; or.b32 $3, l, u; }",
        "=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
    planes = (planes[0], planes[1], planes[2], planes[3])
    return planes, book_affine(planes, meta, PLAN, TURNED)


TQ4 = DeviceCodec(4, book_encode, book_decode, num_meta=1, ptx=DeviceCodec(4, book_encode, tq4_decode_ptx, num_meta=1))
TQ3 = DeviceCodec(8, book_encode, book_decode, word_bytes=3, num_meta=1)


@triton.jit
def uniform_encode(x, real, table, PLAN: tl.constexpr):
    TOP: tl.constexpr = (1 << PLAN.bits) - 1
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, TOP * 1.0, tl.float32)), 1e-8)
    codes = ()
    for p in tl.static_range(len(x)):
        steps = tl.div_rn(x[p] - low[:, None], tl.broadcast_to(scale[:, None], x[p].shape))
        codes = codes + (clamp_codes((steps + 0.5).to(tl.int32), 0, TOP),)
    return pack_codes(codes, PLAN.bits), (scale, low)


@triton.jit
def uniform_affine(meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    CENTRE: tl.constexpr = 0 if TURNED else 1 << (PLAN.bits - 1)
    return (meta[0], meta[1] + CENTRE * meta[0])


@triton.jit
def uniform_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return uniform_planes(words, PLAN.bits, PLAN.planes, TURNED), uniform_affine(meta, PLAN, TURNED)


@triton.jit
def u4_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return nibble_planes_ptx(words, TURNED), uniform_affine(meta, PLAN, TURNED)


_U4_PTX = DeviceCodec(4, uniform_encode, u4_decode_ptx, num_meta=2, exponents=NIBBLE_EXPONENTS)
U4 = DeviceCodec(4, uniform_encode, uniform_decode, num_meta=2, ptx=_U4_PTX)
U3 = DeviceCodec(8, uniform_encode, uniform_decode, word_bytes=3, num_meta=2)
