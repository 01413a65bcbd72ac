"""4 bits, asymmetric, rotated: `scale = max((max - min) / 15, 1e-6)`, `zp = clamp(round(-min / scale), 0, 15)`,
`y^ = (code - zp) * scale`. One float32 a row carries both: the zero point lies in the scale's low four mantissa bits.

The zero point is an integer in 0..15, so a row that lies wholly on one side of zero saturates (docs/formats.md, known limits)."""

from __future__ import annotations

import torch

from ...format import Codec, Format, register
from ...packing import pack, unpack
from ...spec import RowLayout
from ..device import codec_in, cpu_codec, hopper_codec
from ..int8 import LARGEST, SMALLEST_SCALE, quotient

ZERO_POINT_BITS = 0xF


def _encode(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = y.aminmax(dim=-1, keepdim=True)
    scale = quotient(high - low, 15.0).clamp(SMALLEST_SCALE, LARGEST)
    zero_point = (0.5 - low / scale).clamp_(0, 15).int()  # truncation of what is not negative: halves go up
    codes = (y * scale.reciprocal()).add_(zero_point).add_(0.5).clamp_(0, 15).int()
    stored = (scale.view(torch.int32) & ~ZERO_POINT_BITS) | zero_point
    return pack(codes, 4), stored.view(torch.float32)


def _decode(codes: torch.Tensor, stored: torch.Tensor, dtype: torch.dtype):
    bits = stored.view(torch.int32)
    scale = (bits & ~ZERO_POINT_BITS).view(torch.float32).to(dtype)
    return unpack(codes, 4), scale, (bits & ZERO_POINT_BITS).to(dtype) * -scale


INT4 = Codec(
    "int4",
    RowLayout(4, ("float32",)),
    encode=_encode,
    decode=_decode,
    map="rht",
    round_mapped=True,
    head_size_multiple=8,
    planes=2,
    triton=codec_in(__name__, "INT4"),
    hopper=hopper_codec(__file__, "Int4", half=4, odd_unit=16.0, integers=True, latents=True),
    cpu=cpu_codec(zero_point_bits=ZERO_POINT_BITS, encode=codec_in(__name__, "encode", "cpu")),
)
register(Format("int4", INT4, INT4, "asymmetric, randomized Hadamard"), "int4_per_token_head")
