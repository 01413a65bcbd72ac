"""The Triton half of the levels of a Gaussian."""

from functools import partial

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import TINY, at_least, pack_codes, stored_scale, sum_of_squares, unpack_codes
from ...implementations.triton.kernels.views import TritonCodec
from . import CUBICS, table_of
from .arithmetic import cubic

CUBIC = tl.constexpr(CUBICS)
ROOTS = tl.constexpr({bits: cubic(bits)[0] for bits in CUBICS})
GAINS = tl.constexpr({bits: cubic(bits)[1] for bits in CUBICS})


@triton.jit
def levels_encode(x, real, table, PLAN: tl.constexpr):
    """table: the levels, then the boundaries between them. A code is how many boundaries are below the number, found bit by bit."""
    BITS: tl.constexpr = PLAN.bits
    squares = tl.sum(sum_of_squares(x), axis=1)
    mean = tl.div_rn(squares, tl.full(squares.shape, PLAN.head_size * 1.0, tl.float32))
    size = at_least(tl.sqrt_rn(mean), TINY)
    codes = ()
    itself = tl.zeros(x[0].shape, tl.float32)
    dot = tl.zeros(x[0].shape, tl.float32)
    for p in tl.static_range(len(x)):
        unit = tl.div_rn(x[p], tl.broadcast_to(size[:, None], x[p].shape))
        code = tl.zeros(unit.shape, tl.int32)
        for bit in tl.static_range(BITS):
            more = code + (1 << (BITS - 1 - bit))
            code = tl.where(unit > tl.load(table + (1 << BITS) - 1 + more), more, code)
        codes = codes + (code,)
        itself += unit * unit
        dot += unit * tl.load(table + code)
    unbiased = tl.clamp(tl.div_rn(tl.sum(itself, axis=1), tl.maximum(tl.sum(dot, axis=1), TINY)), 0.5, 2.0)
    return pack_codes(codes, BITS), (stored_scale(size * unbiased),)


@triton.jit
def levels_unpack(words, table, PLAN: tl.constexpr):
    """The cubic in fp16, of codes that are the highest bits of a mantissa: numbers from 1 to 2, less what is in the middle."""
    BITS: tl.constexpr = PLAN.bits
    ROOT: tl.constexpr = ROOTS[BITS]
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        t = ((codes[p] << (10 - BITS)) | 0x3C00).to(tl.int16).to(tl.float16, bitcast=True) - (1.5 - 0.5 / 2**BITS)
        planes = planes + (t * (t * t + ROOT),)
    return planes


@triton.jit
def levels_affine(planes, meta, PLAN: tl.constexpr, TURNED: tl.constexpr):
    """The stored scale; under fp16 operands times the gain that their cubic leaves out."""
    if planes[0].dtype == tl.float32:
        return meta
    return (meta[0] * GAINS[PLAN.bits],)


@triton.jit
def levels_unpack_exact(words, table, PLAN: tl.constexpr):
    """The specification's levels, to the bit."""
    A: tl.constexpr = CUBIC[PLAN.bits][0]
    B: tl.constexpr = CUBIC[PLAN.bits][1]
    codes = unpack_codes(words, PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        t = codes[p].to(tl.float32) - ((1 << PLAN.bits) - 1) * 0.5
        planes = planes + ((t * (t * t * B + A)).to(tl.float16).to(tl.float32),)
    return planes


def half(bits: int, planes: int) -> TritonCodec:
    """The Triton half of the levels of so many bits, in words of `planes` codes."""
    return TritonCodec(
        planes,
        levels_encode,
        levels_unpack,
        levels_affine,
        word_bytes=planes * bits // 8,
        num_meta=1,
        exact=(levels_unpack_exact, tl.float32),
        table=partial(table_of, bits),
    )


LEVELS2, LEVELS3, LEVELS4, LEVELS5, LEVELS6, LEVELS8 = (half(*n) for n in ((2, 8), (3, 8), (4, 4), (5, 8), (6, 4), (8, 2)))
