"""A format made outside the package, in one file: 8-bit integers with one fp16 scale a row, keys only in steps of a power of
two. The reference half says what the bytes mean; the Triton half gives it every kernel."""

import torch
import triton
import triton.language as tl

from quantkv import Codec, Format, RowLayout, register
from quantkv.implementations.triton.kernels.views import TritonCodec


def encode(y):
    scale = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp(1e-4, 4e6) / 127)))  # up to fp16's 2^15
    return (y / scale).round().clamp(-127, 127).to(torch.int8), scale.half()


def decode(codes, scale, dtype):
    return codes.to(dtype), scale.to(dtype), None


@triton.jit
def toy_encode(x, real, table, PLAN: tl.constexpr):
    largest = tl.max(tl.maximum(tl.abs(x[0]), tl.abs(x[1])), axis=1)
    scale = tl.exp2(tl.ceil(tl.log2(tl.clamp(largest, 1e-4, 4e6) / 127)))
    word = tl.zeros(x[0].shape, tl.int32)
    for p in tl.static_range(2):
        nearest = (x[p] / scale[:, None] + 12582912.0) - 12582912.0  # 1.5 x 2^23: what is left is rounded to an integer
        word |= (tl.clamp(nearest, -127.0, 127.0).to(tl.int32) & 0xFF) << (8 * p)
    return word, (scale,)


@triton.jit
def toy_unpack(words, table, PLAN: tl.constexpr):
    return (((words << 8) >> 8).to(tl.float16), (words >> 8).to(tl.float16))


DEVICE = TritonCodec(2, toy_encode, toy_unpack, num_meta=1)
TOY = Codec("toy8", RowLayout(8, ("float16",)), encode, decode, code_dtype=torch.int8, head_size_multiple=2, triton=lambda: DEVICE)
register(Format("toy", TOY, TOY), "toy_per_token_head")
