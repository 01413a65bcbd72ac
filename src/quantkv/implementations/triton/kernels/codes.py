"""Rounding, packing and unpacking of codes: what several codecs share in Triton."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
LARGEST_HALF = tl.constexpr(65504.0)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
SMALLEST_HALF = tl.constexpr(2.0**-24)


@triton.jit
def saturate(x, LARGEST: tl.constexpr):
    """x within +-LARGEST: what is stored of finite rows is finite. NaN stays NaN."""
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_least(x, LEAST: tl.constexpr):
    """NaN stays NaN."""
    return tl.maximum(x, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def stored_scale(scale):
    """What fp16 holds, and never zero, so that it has a sign. NaN stays NaN."""
    return tl.clamp(scale, SMALLEST_HALF, LARGEST_HALF, propagate_nan=tl.PropagateNan.ALL)


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
    """A row's largest number over LARGEST, at least 1e-6, rounded as the reference rounds."""
    largest = tl.max(tl.maximum(tl.abs(x[0]), tl.abs(x[1])), axis=1)
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32)), 1e-6)


@triton.jit
def reciprocal(x):
    """1 / x, rounded to nearest."""
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
    """Words of codes int32 given as planes: int32, or int64 where it takes more bits."""
    DTYPE: tl.constexpr = tl.int32 if BITS * len(codes) <= 32 else tl.int64
    word = codes[0].to(DTYPE)
    for p in tl.static_range(1, len(codes)):
        word |= codes[p].to(DTYPE) << (BITS * p)
    return word


@triton.jit
def unpack_codes(words, PLAN: tl.constexpr):
    """The planes of codes in words, as the narrowest integers that hold them."""
    BITS: tl.constexpr = PLAN.bits
    P: tl.constexpr = PLAN.codec.planes
    WORD: tl.constexpr = words.dtype.primitive_bitwidth
    DTYPE: tl.constexpr = tl.int16 if WORD <= 16 else tl.int32  # signed, and no wider than it must be
    if WORD == 8:
        words = words.to(tl.int16)
    codes = ()
    for p in tl.static_range(P):
        codes = codes + (((words >> (BITS * p)) & ((1 << BITS) - 1)).to(DTYPE),)
    return codes


@triton.jit
def field_unpack(words, table, PLAN: tl.constexpr):
    """Codes as they are."""
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        planes = planes + (codes[p].to(tl.float16),)
    return planes


@triton.jit
def uniform_unpack(words, table, PLAN: tl.constexpr):
    """Codes less half their range."""
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        planes = planes + ((codes[p] - (1 << (PLAN.bits - 1))).to(tl.float16),)
    return planes


@triton.jit
def four_levels_unpack(words, table, PLAN: tl.constexpr):
    """Codes of 2 bits as the levels -10, -3, 3 and 10."""
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        planes = planes + ((codes[p] * 7 - (codes[p] >> 1) - 10).to(tl.float16),)
    return planes


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
