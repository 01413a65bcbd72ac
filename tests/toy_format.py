"""A format made outside the package, in one file: 8-bit integers with one fp16 scale a row, keys only in steps of a power of
two."""

import torch

from quantkv import Codec, Format, RowLayout, register


def encode(y):
    scale = torch.exp2(torch.ceil(torch.log2(y.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 127)))
    return (y / scale).round().to(torch.int8), scale.half()


def decode(codes, scale, dtype):
    return codes.to(dtype), scale.to(dtype), None


TOY = Codec("toy8", RowLayout(8, ("float16",)), encode, decode, code_dtype=torch.int8)
register(Format("toy", TOY, TOY), "toy_per_token_head")
