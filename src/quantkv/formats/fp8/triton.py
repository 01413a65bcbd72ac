"""The Triton codec of 8-bit floats."""

from dataclasses import replace

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import absmax_scale, pack_codes, reciprocal, to_float8
from ...implementations.triton.kernels.ptx import Program
from ...implementations.triton.kernels.views import TritonCodec


@triton.jit
def e4m3_encode(x, real, table, PLAN: tl.constexpr):
    """Rows as e4m3, saturating, under the layer's scale."""
    return pack_codes((to_float8(x[0], 3, 7, 448.0), to_float8(x[1], 3, 7, 448.0)), 8), ()


@triton.jit
def e4m3_token_encode(x, real, table, PLAN: tl.constexpr):
    """Rows as e4m3 under a scale each, their largest number over 448."""
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
    """Two planes of fp16 numbers of words of two e4m3 codes."""
    return (e4m3_high_byte(words << 8), e4m3_high_byte(words))


@triton.jit
def e5m2_encode(x, real, table, PLAN: tl.constexpr):
    """Rows as e5m2, saturating, under the layer's scale."""
    return pack_codes((to_float8(x[0], 2, 15, 57344.0), to_float8(x[1], 2, 15, 57344.0)), 8), ()


@triton.jit
def e5m2_unpack(words, table, PLAN: tl.constexpr):
    """Two planes of fp16 numbers: an e5m2 code is the high byte of one."""
    return ((words << 8).to(tl.float16, bitcast=True), (words & -256).to(tl.float16, bitcast=True))


CONVERTED = Program(
    "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $2, 0, 0x3120; mov.b32 {lo, hi}, t;"
    "cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
    capability=89,
)
E4M3 = TritonCodec(2, e4m3_encode, e4m3_unpack, exponents=(8, 8), program=CONVERTED, floats=True)
E4M3_TOKEN = replace(E4M3, encode=e4m3_token_encode, num_meta=1)
E5M2 = TritonCodec(2, e5m2_encode, e5m2_unpack, floats=True)
