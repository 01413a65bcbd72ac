"""A format made outside the package, in one file and a CUDA snippet beside it: 5 bits between the row's minimum and maximum, for keys
and values alike, with an fp16 scale and minimum. 8 codes take 5 bytes, lowest bits first."""

from functools import cache
from pathlib import Path

import torch

from quantkv import Codec, Format, RowLayout, register
from quantkv.implementations.hopper.codec import HopperCodec


def encode(y):
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = ((high - low) / torch.full_like(low, 31)).clamp_min(1e-8)
    values = torch.trunc((y - low) / scale + 0.5).clamp(0, 31).long().unflatten(-1, (-1, 8))
    word = (values << 5 * torch.arange(8, device=y.device)).sum(-1)
    codes = (word[..., None] >> 8 * torch.arange(5, device=y.device)) & 0xFF
    return codes.flatten(-2).to(torch.uint8), torch.cat([scale, low], -1).half()


def decode(codes, meta, dtype):
    word = (codes.long().unflatten(-1, (-1, 5)) << 8 * torch.arange(5, device=codes.device)).sum(-1)
    values = (word[..., None] >> 5 * torch.arange(8, device=codes.device)) & 31
    scale, low = meta.to(dtype).split(1, -1)
    return values.flatten(-2).to(dtype), scale, low


@cache
def hopper():
    return HopperCodec(Path(__file__).with_suffix(".cuh"), "FiveBits")


CODEC = Codec("five_bits", RowLayout(5, ("float16", "float16")), encode, decode, head_size_multiple=8, hopper=hopper)
FIVE_BITS = register(Format("five_bits", CODEC, CODEC, "minimum and maximum"))
