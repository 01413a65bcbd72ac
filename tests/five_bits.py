"""A format made outside the package, in this file and a CUDA snippet beside it: 5 bits between a row's minimum and maximum, for keys and
values alike, with an fp16 scale and minimum. Eight codes are a word of five bytes, which no integer is as long as."""

from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl

from quantkv import Codec, Format, RowLayout, register
from quantkv.implementations.hopper.codec import HopperCodec
from quantkv.implementations.triton.kernels.codes import LARGEST_HALF, pack_codes, row_range, saturate, uniform_unpack
from quantkv.implementations.triton.kernels.views import TritonCodec
from quantkv.packing import pack, planes_of, unpack

LARGEST = 65504.0  # of fp16: what is stored of finite rows is finite


def encode(y):
    low, high = y.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / torch.full_like(low, 31)).clamp_min(1e-8)
    codes = ((y - low) / scale + 0.5).clamp(0, 31).to(torch.uint8)
    return pack(codes, 5), torch.cat([scale, low], -1).clamp(-LARGEST, LARGEST).half()


def decode(codes, meta, dtype):
    scale, low = meta.to(dtype).split(1, -1)
    return unpack(codes, 5), scale, low


# ---- Triton


@triton.jit
def five_encode(x, real, table, PLAN: tl.constexpr):
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, 31.0, tl.float32)), 1e-8)
    codes = ()
    for p in tl.static_range(len(x)):
        steps = tl.div_rn(x[p] - low[:, None], tl.broadcast_to(scale[:, None], x[p].shape))
        codes = codes + (tl.clamp(steps + 0.5, 0.0, 31.0).to(tl.int32),)
    return pack_codes(codes, 5), (saturate(scale, LARGEST_HALF), saturate(low, LARGEST_HALF))


@triton.jit
def five_affine(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    return (meta[0], meta[1] + 16 * meta[0])  # `uniform_unpack` gives codes less 16


DEVICE = TritonCodec(planes_of(5), five_encode, uniform_unpack, five_affine, word_bytes=5, num_meta=2)


# ---- Hopper


@cache
def hopper():
    return HopperCodec(Path(__file__).with_suffix(".cuh"), "FiveBits")


CODEC = Codec(
    "five_bits",
    RowLayout(5, ("float16", "float16")),
    encode,
    decode,
    head_size_multiple=8,
    planes=planes_of(5),
    triton=lambda: DEVICE,
    hopper=hopper,
)
FIVE_BITS = register(Format("five_bits", CODEC, CODEC, "between minimum and maximum"))
