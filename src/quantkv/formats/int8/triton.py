"""The Triton half of 8-bit integers."""

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


BYTES = Program(  # byte b + 128 under the exponent of 1024 is the fp16 number 1152 + b
    "{ .reg .b32 t, a, b, c; mov.b32 c, 0x64806480; lop3.b32 a, $2, 0x00ff00ff, c, 0x6a; shr.b32 t, $2, 8;"
    "lop3.b32 b, t, 0x00ff00ff, c, 0x6a; mov.b32 c, 0xe480e480; add.f16x2 $0, a, c; add.f16x2 $1, b, c; }"
)
INT8 = TritonCodec(2, int8_encode, int8_unpack, num_meta=1, program=BYTES)
