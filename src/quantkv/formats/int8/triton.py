"""The Triton codec of 8-bit integers."""

from dataclasses import replace

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import absmax_scale, pack_codes, reciprocal, round_codes
from ...implementations.triton.kernels.ptx import Program
from ...implementations.triton.kernels.views import TritonCodec


@triton.jit
def int8_encode(x, real, table, PLAN: tl.constexpr):
    """Integers from -128 to 127 under a scale a row, its largest number over 127."""
    scale = absmax_scale(x, 127.0)
    inverse = reciprocal(scale)[:, None]
    codes = (round_codes(x[0] * inverse, -128, 127) & 0xFF, round_codes(x[1] * inverse, -128, 127) & 0xFF)
    return pack_codes(codes, 8), (scale,)


@triton.jit
def int8_unpack(words, table, PLAN: tl.constexpr):
    """Two planes of fp16 integers."""
    return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16))


@triton.jit
def int8_fields(words, table, PLAN: tl.constexpr):
    """Two planes of fp16 integers from 0 to 255: 128 more than what they stand for."""
    return (((words & 255) ^ 128).to(tl.float16), (((words >> 8) & 255) ^ 128).to(tl.float16))


@triton.jit
def int8_zero(meta, PLAN: tl.constexpr):
    """The zero of such planes."""
    return tl.full(meta[0].shape, 128.0, tl.float32)


BYTES = Program(  # byte b + 128 under the exponent of 1024 is the fp16 number 1152 + b
    "{ .reg .b32 t, a, b, c; mov.b32 c, 0x64806480; lop3.b32 a, $2, 0x00ff00ff, c, 0x6a; shr.b32 t, $2, 8;"
    "lop3.b32 b, t, 0x00ff00ff, c, 0x6a; mov.b32 c, 0xe480e480; add.f16x2 $0, a, c; add.f16x2 $1, b, c; }"
)
FIELDS = Program(  # byte b + 128 in place is the fp16 subnormal (128 + b) 2^-24
    "{ .reg .b32 t; lop3.b32 $0, $2, 0x00ff00ff, 0x00800080, 0x6a; shr.b32 t, $2, 8; lop3.b32 $1, t, 0x00ff00ff, 0x00800080, 0x6a; }",
    exponents=(24, 24),
)
CENTRED = TritonCodec(2, int8_encode, int8_unpack, num_meta=1, program=BYTES)
INT8 = replace(CENTRED, lean=replace(CENTRED, unpack=int8_fields, zero=int8_zero, program=FIELDS))
