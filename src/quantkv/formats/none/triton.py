"""The Triton codec of rows as given."""

import triton
import triton.language as tl

from ...implementations.triton.kernels.views import TritonCodec


@triton.jit
def plain_encode(x, real, table, PLAN: tl.constexpr):
    """Rows as they are."""
    return x[0], ()


@triton.jit
def plain_unpack(words, table, PLAN: tl.constexpr):
    """One plane: the rows as they are."""
    return (words,)


BF16 = TritonCodec(1, plain_encode, plain_unpack, operand=tl.bfloat16, floats=True)
FP16 = TritonCodec(1, plain_encode, plain_unpack, floats=True)
FP32 = TritonCodec(1, plain_encode, plain_unpack, word_bytes=4, operand=tl.float32, floats=True)
