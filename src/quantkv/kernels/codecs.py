"""Device halves of the codecs that come with quantkv. Each mirrors the `encode_ref` and `decode_ref` of its format."""

import struct

import triton
import triton.language as tl

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


# Inline PTX sees two words in a register of 32 bits (or in two), and returns a plane's two numbers in one.
TWO, FOUR, EIGHT = (tl.constexpr((tl.float16,) * n) for n in (2, 4, 8))


@triton.jit
def two_planes(ASM: tl.constexpr, words):
    p = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [words], TWO, is_pure=True, pack=2)
    return (p[0], p[1])


@triton.jit
def four_planes(ASM: tl.constexpr, words):
    p = tl.inline_asm_elementwise(ASM, "=&r,=&r,=&r,=&r,r", [words], FOUR, is_pure=True, pack=2)
    return (p[0], p[1], p[2], p[3])


@triton.jit
def eight_planes(ASM: tl.constexpr, words):
    REGISTERS: tl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r" if words.dtype == tl.int16 else "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r"
    p = tl.inline_asm_elementwise(ASM, REGISTERS, [words], EIGHT, is_pure=True, pack=2)
    return (p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7])


@triton.jit
def plain_encode(x, real, table, PLAN: tl.constexpr):
    return x[0], ()


@triton.jit
def plain_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (words,), ()


BF16 = DeviceCodec(1, plain_encode, plain_decode, operand=tl.bfloat16)
FP16 = DeviceCodec(1, plain_encode, plain_decode, operand=tl.float16)
FP32 = DeviceCodec(1, plain_encode, plain_decode, word_bytes=4, operand=tl.float32)


@triton.jit
def int8_encode(x, real, table, PLAN: tl.constexpr):
    scale = absmax_scale(x, 127.0)
    inverse = reciprocal(scale)[:, None]
    codes = (round_codes(x[0] * inverse, -128, 127) & 0xFF, round_codes(x[1] * inverse, -128, 127) & 0xFF)
    return pack_codes(codes, 8), (scale,)


@triton.jit
def int8_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16)), meta


# Byte b + 128 under the exponent of 1024 is the fp16 number 1152 + b.
INT8_ASM = tl.constexpr(
    "{ .reg .b32 t, a, b, c;"
    "mov.b32 c, 0x64806480; lop3.b32 a, $2, 0x00ff00ff, c, 0x6a;"
    "shr.b32 t, $2, 8; lop3.b32 b, t, 0x00ff00ff, c, 0x6a;"
    "mov.b32 c, 0xe480e480; add.f16x2 $0, a, c; add.f16x2 $1, b, c; }"
)


@triton.jit
def int8_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return two_planes(INT8_ASM, words), meta


INT8 = DeviceCodec(2, int8_encode, int8_decode, num_meta=1, ptx=DeviceCodec(2, int8_encode, int8_decode_ptx, num_meta=1))


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
def e4m3_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (e4m3_high_byte(words << 8), e4m3_high_byte(words)), meta


E4M3_ASM = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 lo, hi;"
    "prmt.b32 t, $2, 0, 0x3120; mov.b32 {lo, hi}, t;"
    "cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }"
)


@triton.jit
def e4m3_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return two_planes(E4M3_ASM, words), meta


@triton.jit
def e5m2_encode(x, real, table, PLAN: tl.constexpr):
    return pack_codes((to_float8(x[0], 2, 15, 57344.0), to_float8(x[1], 2, 15, 57344.0)), 8), ()


@triton.jit
def e5m2_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return ((words << 8).to(tl.float16, bitcast=True), (words & -256).to(tl.float16, bitcast=True)), meta


def _e4m3(encode, num_meta: int) -> DeviceCodec:
    native = DeviceCodec(2, encode, e4m3_decode_ptx, num_meta=num_meta)
    return DeviceCodec(2, encode, e4m3_decode, num_meta=num_meta, exponents=(8, 8), ptx=native, ptx_capability=89)


E4M3, E4M3_TOKEN = _e4m3(e4m3_encode, 0), _e4m3(e4m3_token_encode, 1)
E5M2 = DeviceCodec(2, e5m2_encode, e5m2_decode)


@triton.jit
def unpack_codes(words, BITS: tl.constexpr, COUNT: tl.constexpr):
    codes = ()
    for p in tl.static_range(COUNT):
        codes = codes + ((words >> (BITS * p)) & ((1 << BITS) - 1),)
    return codes


@triton.jit
def uniform_planes(words, BITS: tl.constexpr, COUNT: tl.constexpr):
    """Codes less half their range, as fp16 numbers."""
    codes = unpack_codes(words, BITS, COUNT)
    planes = ()
    for p in tl.static_range(COUNT):
        planes = planes + ((codes[p] - (1 << (BITS - 1))).to(tl.float16),)
    return planes


# A nibble masked in place is an fp16 subnormal: n 2^-24 at bit 0, n 2^-20 at bit 4; minus 8 in the same units. Tensor cores
# take subnormals at full speed.
NIBBLE_ASM = tl.constexpr(
    "{ .reg .b32 t, a, b, c; mov.b32 b, 0x80088008; mov.b32 c, 0x80808080;"
    "and.b32 a, $4, 0x000f000f; add.f16x2 $0, a, b; and.b32 a, $4, 0x00f000f0; add.f16x2 $1, a, c;"
    "shr.b32 t, $4, 8;"
    "and.b32 a, t, 0x000f000f; add.f16x2 $2, a, b; and.b32 a, t, 0x00f000f0; add.f16x2 $3, a, c; }"
)
NIBBLE_EXPONENTS = (24, 20, 24, 20)


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
def int4_affine(meta):
    bits = meta[0].to(tl.int32, bitcast=True)
    scale = (bits & -16).to(tl.float32, bitcast=True)
    return (scale, (8 - (bits & 15)).to(tl.float32) * scale)


@triton.jit
def int4_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return uniform_planes(words, 4, 4), int4_affine(meta)


@triton.jit
def int4_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return four_planes(NIBBLE_ASM, words), int4_affine(meta)


_INT4_PTX = DeviceCodec(4, int4_encode, int4_decode_ptx, num_meta=1, exponents=NIBBLE_EXPONENTS)
INT4 = DeviceCodec(4, int4_encode, int4_decode, num_meta=1, ptx=_INT4_PTX)


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
def int2_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    """Levels +-0.4528 = 283 x 0.0016 and +-1.5104 = 944 x 0.0016: fp16 holds the integers exactly."""
    codes = unpack_codes(words, 2, 8)
    planes = ()
    for p in tl.static_range(8):
        planes = planes + ((codes[p] * 661 - (codes[p] >> 1) * 95 - 944).to(tl.float16),)
    return planes, (meta[0] * (PLAN.head_size * 0.0016),)


def _pair(x: float) -> str:
    """x twice in fp16, as PTX."""
    return f"0x{2 * struct.pack('>e', x).hex()}"


def _int2_asm() -> str:
    """Levels 661 low bit + 1227 high bit - 944, times 2^-24: a bit masked in place at b is the fp16 subnormal 2^(b - 24)."""
    steps = []
    for p in range(8):
        word, bit = ("$8", 2 * p) if p < 5 else ("t", 2 * p - 10)
        for b, level, total in ((bit, 661, "c"), (bit + 1, 1227, f"${p}")):
            steps.append(f"and.b32 a, {word}, 0x{0x10001 << b:08x}; mov.b32 b, {_pair(level / 2**b)}; fma.rn.f16x2 ${p}, a, b, {total};")
    return f"{{ .reg .b32 t, a, b, c; mov.b32 c, {_pair(-944 / 2**24)}; shr.b32 t, $8, 10;" + "".join(steps) + "}"


INT2_ASM = tl.constexpr(_int2_asm())


@triton.jit
def int2_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return eight_planes(INT2_ASM, words), (meta[0] * (PLAN.head_size * 0.0016),)


_INT2_PTX = DeviceCodec(8, int2_encode, int2_decode_ptx, num_meta=1, exponents=(24,) * 8)
INT2 = DeviceCodec(8, int2_encode, int2_decode, num_meta=1, ptx=_INT2_PTX)


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
TQ4_ASM = tl.constexpr(
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
    "prmt.b32 l, b, d, 0x7632; and.b32 u, t, 0x80008000; or.b32 $3, l, u; }"
)


@triton.jit
def tq4_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    planes = four_planes(TQ4_ASM, words)
    return planes, book_affine(planes, meta, PLAN, TURNED)


TQ4 = DeviceCodec(4, book_encode, book_decode, num_meta=1, ptx=DeviceCodec(4, book_encode, tq4_decode_ptx, num_meta=1))


def _tq3_asm() -> str:
    """Each word's fields are spread to nibbles, which select the low and the high bytes of the eight levels."""
    spread = "".join(
        f"and.b32 a, {word}, 0xffffff; and.b32 b, {word}, 0xfff000; mad.lo.u32 a, b, 15, a;"
        f"and.b32 b, a, 0x0fc00fc0; mad.lo.u32 a, b, 3, a; and.b32 b, a, 0x38383838; add.u32 {nibbles}, a, b;"
        for word, nibbles in (("$8", "x"), ("$9", "y"))
    )
    look_up = "prmt.b32 l, la, lb, s; prmt.b32 h, ha, hb, s; prmt.b32 ${}, l, h, 0x6240; prmt.b32 ${}, l, h, 0x7351;"
    return (
        "{ .reg .b32 a, b, x, y, s, l, h, la, lb, ha, hb;"
        "mov.b32 la, 0xd70c5f4d; mov.b32 lb, 0x4d5f0cd7; mov.b32 ha, 0xb3babdc0; mov.b32 hb, 0x403d3a33;"
        + spread
        + f"prmt.b32 s, x, y, 0x5140; {look_up.format(0, 1)} shr.b32 s, s, 16; {look_up.format(2, 3)}"
        + f"prmt.b32 s, x, y, 0x7362; {look_up.format(4, 5)} shr.b32 s, s, 16; {look_up.format(6, 7)} }}"
    )


TQ3_ASM = tl.constexpr(_tq3_asm())


@triton.jit
def tq3_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    planes = eight_planes(TQ3_ASM, words)
    return planes, book_affine(planes, meta, PLAN, TURNED)


_TQ3_PTX = DeviceCodec(8, book_encode, tq3_decode_ptx, word_bytes=3, num_meta=1)
TQ3 = DeviceCodec(8, book_encode, book_decode, word_bytes=3, num_meta=1, ptx=_TQ3_PTX)


@triton.jit
def uniform_encode(x, real, table, PLAN: tl.constexpr):
    TOP: tl.constexpr = (1 << PLAN.bits) - 1
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, TOP * 1.0, tl.float32)), 1e-8)
    codes = ()
    for p in tl.static_range(len(x)):
        steps = tl.div_rn(x[p] - low[:, None], tl.broadcast_to(scale[:, None], x[p].shape))
        codes = codes + (round_codes(steps, 0, TOP),)
    return pack_codes(codes, PLAN.bits), (scale, low)


@triton.jit
def uniform_affine(meta, PLAN: tl.constexpr):
    return (meta[0], meta[1] + (1 << (PLAN.bits - 1)) * meta[0])


@triton.jit
def uniform_decode(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return uniform_planes(words, PLAN.bits, PLAN.planes), uniform_affine(meta, PLAN)


@triton.jit
def u4_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return four_planes(NIBBLE_ASM, words), uniform_affine(meta, PLAN)


_U4_PTX = DeviceCodec(4, uniform_encode, u4_decode_ptx, num_meta=2, exponents=NIBBLE_EXPONENTS)
U4 = DeviceCodec(4, uniform_encode, uniform_decode, num_meta=2, ptx=_U4_PTX)


def _u3_asm() -> str:
    """Three bits masked in place at o are a subnormal n 2^(o - 24); less 4 in the same units."""
    fields = [("a", 0), ("a", 3), ("a", 6), ("b", 0), ("b", 3), ("c", 0), ("c", 3), ("c", 6)]
    return (
        "{ .reg .b32 a, b, c, n, m; prmt.b32 a, $8, $9, 0x5410; shr.b32 b, a, 9; prmt.b32 c, $8, $9, 0x6521; shr.b32 c, c, 7;"
        + "".join(
            f"and.b32 n, {word}, 0x{0x70007 << o:08x}; mov.b32 m, 0x{0x80008000 | 0x40004 << o:08x}; add.f16x2 ${p}, n, m;"
            for p, (word, o) in enumerate(fields)
        )
        + "}"
    )


U3_ASM = tl.constexpr(_u3_asm())


@triton.jit
def u3_decode_ptx(words, meta, table, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return eight_planes(U3_ASM, words), uniform_affine(meta, PLAN)


_U3_PTX = DeviceCodec(8, uniform_encode, u3_decode_ptx, 3, num_meta=2, exponents=(24, 21, 18, 24, 21, 24, 21, 18))
U3 = DeviceCodec(8, uniform_encode, uniform_decode, word_bytes=3, num_meta=2, ptx=_U3_PTX)
