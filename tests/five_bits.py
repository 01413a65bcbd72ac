"""A format made outside the package: 5 bits between a row's minimum and maximum, with an fp16 scale and an fp16 minimum. Eight codes
are a word of five bytes, which no integer is as long as."""

import torch
import triton
import triton.language as tl

from quantkv import Codec, Format, RowLayout, register
from quantkv.implementations.triton.kernels.codes import pack_codes, row_range, uniform_unpack
from quantkv.implementations.triton.kernels.views import TritonCodec
from quantkv.packing import pack, planes_of, unpack

TOP, SMALLEST, LARGEST = 31, 2.0**-14, 65504.0  # the largest code; fp16's range


def encode(y):
    low, high = y.aminmax(dim=-1, keepdim=True)
    low = low.clamp(-LARGEST, LARGEST).half()
    scale = ((high - low.float()) / TOP).clamp(SMALLEST, LARGEST).half()
    codes = ((y - low.float()) / scale.float() + 0.5).clamp(0, TOP).to(torch.uint8)
    return pack(codes, 5), torch.cat([scale, low], -1)


def decode(codes, meta, dtype):
    scale, low = meta.to(dtype).split(1, -1)
    return unpack(codes, 5), scale, low


# ---- Triton


@triton.jit
def five_encode(x, real, table, PLAN: tl.constexpr):
    low, high = row_range(x, real)
    low = tl.clamp(low, -65504.0, 65504.0).to(tl.float16).to(tl.float32)
    step = tl.div_rn(high - low, tl.full(low.shape, 31.0, tl.float32))
    scale = tl.clamp(step, 2.0**-14, 65504.0).to(tl.float16).to(tl.float32)
    codes = ()
    for p in tl.static_range(len(x)):
        steps = tl.div_rn(x[p] - low[:, None], tl.broadcast_to(scale[:, None], x[p].shape))
        codes = codes + (tl.clamp(steps + 0.5, 0.0, 31.0).to(tl.int32),)
    return pack_codes(codes, 5), (scale, low)


@triton.jit
def five_affine(planes, meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    return (meta[0], meta[1] + 16 * meta[0])  # `uniform_unpack` gives codes less 16


DEVICE = TritonCodec(planes_of(5), five_encode, uniform_unpack, five_affine, word_bytes=5, num_meta=2)


FIVE = Codec("five", RowLayout(5, ("float16", "float16")), encode, decode, head_size_multiple=8, planes=planes_of(5), triton=lambda: DEVICE)
register(Format("five", FIVE, FIVE, "5 bits between minimum and maximum"), "five_per_token_head")
