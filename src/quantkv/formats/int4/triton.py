"""The Triton codec of int4."""

from dataclasses import replace

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import (
    LARGEST,
    field_unpack,
    pack_codes,
    reciprocal,
    round_codes,
    row_range,
    saturate,
    uniform_unpack,
)
from ...implementations.triton.kernels.ptx import NIBBLE_FIELDS, NIBBLES
from ...implementations.triton.kernels.views import TritonCodec


@triton.jit
def int4_encode(x, real, table, PLAN: tl.constexpr):
    """Codes 0 to 15 between minimum and maximum; the zero point lies in the low bits of the scale."""
    low, high = row_range(x, real)
    scale = saturate(tl.maximum(tl.div_rn(high - low, tl.full(low.shape, 15.0, tl.float32)), 1e-6), LARGEST)
    zero_point = round_codes(tl.div_rn(-low, scale), 0, 15)
    inverse = reciprocal(scale)[:, None]
    shift = zero_point.to(tl.float32)[:, None]
    codes = ()
    for p in tl.static_range(len(x)):
        codes = codes + (round_codes(x[p] * inverse + shift, 0, 15),)
    stored = (scale.to(tl.int32, bitcast=True) & -16) | zero_point
    return pack_codes(codes, 4), (stored.to(tl.float32, bitcast=True),)


@triton.jit
def int4_affine(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Scale and bias of codes that were unpacked less 8."""
    bits = meta[0].to(tl.int32, bitcast=True)
    scale = (bits & -16).to(tl.float32, bitcast=True)
    return (scale, (8 - (bits & 15)).to(tl.float32) * scale)


@triton.jit
def int4_lean(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The scale."""
    return ((meta[0].to(tl.int32, bitcast=True) & -16).to(tl.float32, bitcast=True),)


@triton.jit
def int4_zero(meta, PLAN: tl.constexpr):
    """The zero point of codes as they are."""
    return (meta[0].to(tl.int32, bitcast=True) & 15).to(tl.float32)


CENTRED = TritonCodec(4, int4_encode, uniform_unpack, int4_affine, num_meta=1, program=NIBBLES)
INT4 = replace(CENTRED, warps=8, lean=replace(CENTRED, unpack=field_unpack, affine=int4_lean, zero=int4_zero, program=NIBBLE_FIELDS))
