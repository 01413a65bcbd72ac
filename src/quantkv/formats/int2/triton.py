"""The Triton codec of int2."""

from dataclasses import replace

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import LARGEST, four_levels_unpack, pack_codes, saturate, sum_of_squares, unpack_codes
from ...implementations.triton.kernels.ptx import FOUR_LEVELS, Program, half2
from ...implementations.triton.kernels.views import TritonCodec


@triton.jit
def int2_encode(x, real, table, PLAN: tl.constexpr):
    """Codes 0 to 3 of rows over their norm, and the scale that is stored."""
    norm = saturate(tl.sqrt_rn(tl.sum(sum_of_squares(x), axis=1) + 1e-12), LARGEST)
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
def int2_affine(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The scale of centroids that were unpacked as integers."""
    return (meta[0] * (PLAN.head_size * 0.0016),)


@triton.jit
def int2_lean(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The scale of levels that 10 and 3 stand for: 10 / 6.62 = 1.5106 and 3 / 6.62 = 0.4532."""
    return (meta[0] * (PLAN.head_size / 6.62),)


def pairs() -> Program:
    """int2's levels, 661 low bit + 1227 high bit - 944, from each bit masked in place."""
    steps = []
    for p in range(8):
        word, low = ("$8", 2 * p) if p < 5 else ("t", 2 * p - 10)
        for b, level, total in ((low, 661, "c"), (low + 1, 1227, f"${p}")):
            mask, factor = f"0x{0x10001 << b:08x}", half2(level / 2**b)
            steps.append(f"and.b32 a, {word}, {mask}; mov.b32 b, {factor}; fma.rn.f16x2 ${p}, a, b, {total};")
    return Program(f"{{ .reg .b32 t, a, b, c; mov.b32 c, {half2(-944 * 2.0**-24)}; shr.b32 t, $8, 10; {''.join(steps)} }}", (24,) * 8)


CENTROIDS = TritonCodec(8, int2_encode, int2_unpack, int2_affine, num_meta=1, program=pairs())
INT2 = replace(CENTROIDS, lean=replace(CENTROIDS, unpack=four_levels_unpack, affine=int2_lean, coarse=True, program=FOUR_LEVELS))
