"""The Triton codec of the levels of a Gaussian."""

from dataclasses import replace
from functools import partial

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import (
    TINY,
    at_least,
    four_levels_unpack,
    pack_codes,
    stored_scale,
    sum_of_squares,
    unpack_codes,
)
from ...implementations.triton.kernels.ptx import FOUR_LEVELS, Program, half2
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
def levels_affine(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
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


@triton.jit
def two_bits_lean(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The stored scale, of levels that 10 and 3 stand for: 10 / 6.62 = 1.5106 and 3 / 6.62 = 0.4532."""
    return (meta[0] * (1 / 6.62),)


def cubic_program(bits: int, registers: str, *places: tuple[str, int]) -> Program:
    """The cubic, of codes that are masked in place: fp16 subnormals, which one multiply-add brings to t, exactly, in units of 2^steps.
    places: register and bit of each plane, from `lowest`, below which no factor of fp16 reaches, to 11 - bits, above which a code were not
    linear."""
    lowest = 3 if bits < 5 else 0
    steps = 9 - lowest
    unit = 2.0 ** (bits - steps)  # of the cubic
    middle, root = half2(-(2**bits - 1) / 2 / 2**steps), half2(cubic(bits)[0] * unit * unit)
    codes = "".join(
        f"and.b32 a, {register}, 0x{((1 << bits) - 1) * 0x10001 << at:08x}; mov.b32 b, {half2(2.0 ** (24 - at - steps))};"
        f"fma.rn.f16x2 a, a, b, m; fma.rn.f16x2 b, a, a, r; mul.f16x2 ${p}, a, b;"
        for p, (register, at) in enumerate(places)
    )
    constants = f"mov.b32 m, {middle}; mov.b32 r, {root};"
    return Program(f"{{ .reg .b32 a, b, m, r, s, t, u, v, w; {constants} {registers} {codes} }}", (3 * (steps - bits),) * len(places))


TRIPLES = "prmt.b32 s, $8, $9, 0x5410; prmt.b32 u, $8, $9, 0x6521; shl.b32 t, s, 3; shr.b32 v, s, 5; shr.b32 w, u, 5;"
SIXES = "prmt.b32 s, $4, $5, 0x5410; prmt.b32 u, $4, $5, 0x6521; shr.b32 t, s, 6; shr.b32 v, u, 6;"
# Of few queries: in the kernel of many, the ptxas of Triton 3.6 leaves a matrix's address unset where a loop before has no turns (8 bits).
PROGRAMS = {  # a word of five bytes is no register
    3: cubic_program(3, TRIPLES, ("t", 3), ("s", 3), ("s", 6), ("v", 4), ("u", 4), ("u", 7), ("w", 5), ("w", 8)),
    4: cubic_program(4, "shl.b32 s, $4, 3; shr.b32 t, $4, 5;", ("s", 3), ("$4", 4), ("t", 3), ("t", 7)),
    6: cubic_program(6, SIXES, ("s", 0), ("t", 0), ("u", 4), ("v", 4)),
    8: cubic_program(8, "shr.b32 s, $2, 8;", ("$2", 0), ("s", 0)),
}


def backend_codec(bits: int, planes: int) -> TritonCodec:
    """The Triton codec of the levels of so many bits, in words of `planes` codes."""
    made = TritonCodec(
        planes,
        levels_encode,
        levels_unpack,
        levels_affine,
        word_bytes=planes * bits // 8,
        num_meta=1,
        exact=(levels_unpack_exact, tl.float32),
        table=partial(table_of, bits),
        warps=64 if bits in PROGRAMS or bits == 2 else 8,
    )
    if bits == 2:
        return replace(made, lean=replace(made, unpack=four_levels_unpack, affine=two_bits_lean, coarse=True, program=FOUR_LEVELS))
    return replace(made, lean=replace(made, program=PROGRAMS[bits])) if bits in PROGRAMS else made


LEVELS2, LEVELS3, LEVELS4, LEVELS5, LEVELS6, LEVELS8 = (backend_codec(*n) for n in ((2, 8), (3, 8), (4, 4), (5, 8), (6, 4), (8, 2)))
