"""The Triton codec of TurboQuant's keys and values."""

from dataclasses import replace
from functools import partial
from itertools import product

import triton
import triton.language as tl

from ...implementations.triton.kernels.codes import (
    LARGEST_HALF,
    field_unpack,
    pack_codes,
    round_codes,
    row_range,
    saturate,
    sum_of_squares,
    uniform_unpack,
    unpack_codes,
)
from ...implementations.triton.kernels.ptx import NIBBLE_FIELDS, NIBBLES, Program, fields, uniform
from ...implementations.triton.kernels.views import TritonCodec
from . import book_table


@triton.jit
def book_encode(x, real, table, PLAN: tl.constexpr):
    """table: the levels for N(0, 1), then the midpoints for N(0, 1 / D)."""
    BITS: tl.constexpr = PLAN.bits
    norm = tl.sqrt_rn(tl.sum(sum_of_squares(x), axis=1))
    codes = ()
    for p in tl.static_range(len(x)):
        unit = tl.div_rn(x[p], tl.broadcast_to((norm + 1e-8)[:, None], x[p].shape))
        code = tl.zeros(x[p].shape, tl.int32)
        for i in tl.static_range((1 << BITS) - 1):
            code += (unit >= tl.load(table + (1 << BITS) + i)).to(tl.int32)
        codes = codes + (code,)
    return pack_codes(codes, BITS), (saturate(norm, LARGEST_HALF),)


@triton.jit
def book_magnitude(table, index, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """|level| by its index from the middle outwards, chosen bit by bit: selects are cheaper than gathers."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    levels = ()
    for i in tl.static_range(HALF):
        levels = levels + (tl.load(table + HALF + i).to(DTYPE),)
    for bit in tl.static_range(BITS - 1):
        odd = ((index >> bit) & 1) != 0
        halved = ()
        for i in tl.static_range(len(levels) // 2):
            halved = halved + (tl.where(odd, levels[2 * i + 1], levels[2 * i]),)
        levels = halved
    return levels[0]


@triton.jit
def book_affine(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Scale that brings the row of levels to the length in the metadata."""
    squares = sum_of_squares(planes)
    if PLAN.width != PLAN.columns:
        real = tl.arange(0, PLAN.width) < PLAN.columns
        squares = tl.where(real[:, None] if TRANSPOSED else real[None, :], squares, 0.0)
    if TRANSPOSED:  # as a product: then all that reads the planes has them in one layout, and they are decoded once
        length = tl.max(tl.dot(tl.full([16, PLAN.width], 1.0, squares.dtype), squares, input_precision="ieee"), axis=0)
    else:
        length = tl.sum(squares.to(tl.float32), axis=1)
    return (meta[0] * tl.rsqrt(length),)


@triton.jit
def book_lean(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """As `book_affine`; by a product where planes are its rows too."""
    if TRANSPOSED or PLAN.width != PLAN.columns:
        return book_affine(planes, meta, PLAN, TRANSPOSED)
    else:
        squares = sum_of_squares(planes)
        length = tl.max(tl.dot(squares, tl.full([PLAN.width, 8], 1.0, squares.dtype), input_precision="ieee"), axis=1)
        return (meta[0] * tl.rsqrt(length),)


@triton.jit
def book_levels(words, table, PLAN: tl.constexpr, DTYPE: tl.constexpr):
    """Planes of the codebook's levels in DTYPE; half of the book is kept, it is odd."""
    MIDDLE: tl.constexpr = (1 << (PLAN.bits - 1)) - 1
    codes = unpack_codes(words.to(tl.int32), PLAN)
    planes = ()
    for p in tl.static_range(len(codes)):
        upper = codes[p] > MIDDLE  # level[top - code] = -level[code]
        magnitude = book_magnitude(table, (codes[p] ^ tl.where(upper, 0, MIDDLE)) & MIDDLE, PLAN.bits, DTYPE)
        planes = planes + (tl.where(upper, magnitude, -magnitude),)
    return planes


@triton.jit
def book_unpack(words, table, PLAN: tl.constexpr):
    """Levels as fp16 operands."""
    return book_levels(words, table, PLAN, tl.float16)


@triton.jit
def book_unpack_exact(words, table, PLAN: tl.constexpr):
    """Levels in float32, for who reads rows back."""
    return book_levels(words, table, PLAN, tl.float32)


@triton.jit
def uniform_encode(x, real, table, PLAN: tl.constexpr):
    """Codes in equal steps from the minimum to the maximum; fp16 scale and minimum."""
    TOP: tl.constexpr = (1 << PLAN.bits) - 1
    low, high = row_range(x, real)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(low.shape, TOP * 1.0, tl.float32)), 1e-8)
    codes = ()
    for p in tl.static_range(len(x)):
        codes = codes + (round_codes(tl.div_rn(x[p] - low[:, None], tl.broadcast_to(scale[:, None], x[p].shape)), 0, TOP),)
    return pack_codes(codes, PLAN.bits), (saturate(scale, LARGEST_HALF), saturate(low, LARGEST_HALF))


@triton.jit
def uniform_affine(planes, meta, PLAN: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Scale and bias of codes that were unpacked around zero."""
    return (meta[0], meta[1] + (1 << (PLAN.bits - 1)) * meta[0])


@triton.jit
def uniform_zero(meta, PLAN: tl.constexpr):
    """The middle of codes as they are."""
    HALF: tl.constexpr = 1 << (PLAN.bits - 1)
    return tl.full(meta[0].shape, HALF * 1.0, tl.float32)


def book3() -> Program:
    """Three bits spread to nibbles select the low and the high bytes of eight levels: four of them at a time."""
    spread = "".join(
        f"and.b32 a, {word}, 0xffffff; and.b32 b, {word}, 0xfff000; mad.lo.u32 a, b, 15, a;"
        f"and.b32 b, a, 0x0fc00fc0; mad.lo.u32 a, b, 3, a; and.b32 b, a, 0x38383838; add.u32 {nibbles}, a, b;"
        for word, nibbles in (("$8", "x"), ("$9", "y"))
    )
    look_up = "prmt.b32 l, la, lb, s; prmt.b32 h, ha, hb, s; prmt.b32 ${}, l, h, 0x6240; prmt.b32 ${}, l, h, 0x7351;"
    halves = (f"prmt.b32 s, x, y, {s}; {look_up.format(p, p + 1)} shr.b32 s, s, 16; {look_up.format(p + 2, p + 3)}"
              for s, p in (("0x5140", 0), ("0x7362", 4)))  # fmt: skip
    tables = "mov.b32 la, 0xd70c5f4d; mov.b32 lb, 0x4d5f0cd7; mov.b32 ha, 0xb3babdc0; mov.b32 hb, 0x403d3a33;"
    return Program(f"{{ .reg .b32 a, b, x, y, s, l, h, la, lb, ha, hb; {tables} {spread} {''.join(halves)} }}")


def book4() -> Program:
    """The eight positive levels of four bits are 8 low and 8 high bytes; t, the sign where negative, is put on afterwards."""
    tables = "mov.b32 la, 0x8a41361c; mov.b32 lb, 0x76237906; mov.b32 ha, 0x3b393630; mov.b32 hb, 0x41403e3d;"
    index = ("not.b32 t, $4; and.b32 t, t, 0x88888888; shr.b32 u, t, 3; sub.u32 u, t, u;"  # u: 7 where negative
             "and.b32 s, $4, 0x77777777; xor.b32 s, s, u;")  # fmt: skip
    look_up = "prmt.b32 l, la, lb, s; prmt.b32 h, ha, hb, s; prmt.b32 {}, l, h, 0x5140; prmt.b32 {}, l, h, 0x7362;"
    signed = (f"prmt.b32 l, {words}, {halves}; shl.b32 u, t, {12 - 4 * p}; and.b32 u, u, 0x80008000; or.b32 ${p}, l, u;"
              for p, (words, halves) in enumerate(product(("a, c", "b, d"), ("0x5410", "0x7632"))))  # fmt: skip
    four = f"{look_up.format('a', 'b')} shr.b32 s, s, 16; {look_up.format('c', 'd')}"
    return Program(f"{{ .reg .b32 t, u, s, l, h, a, b, c, d, la, lb, ha, hb; {tables} {index} {four} {''.join(signed)} }}")


THREE_BITS = (
    3,
    "prmt.b32 s, $8, $9, 0x5410; shr.b32 t, s, 9; prmt.b32 u, $8, $9, 0x6521; shr.b32 u, u, 7;",
    ("s", 0),
    ("s", 3),
    ("s", 6),
    ("t", 0),
    ("t", 3),
    ("u", 0),
    ("u", 3),
    ("u", 6),
)
BOOK = TritonCodec(4, book_encode, book_unpack, book_affine, num_meta=1, exact=(book_unpack_exact, tl.float32), warps=8)
TQ4 = replace(BOOK, table=partial(book_table, 4), program=book4())
TQ4 = replace(TQ4, lean=replace(TQ4, affine=book_lean))
TQ3 = replace(BOOK, planes=8, word_bytes=3, table=partial(book_table, 3), program=book3())
TQ3 = replace(TQ3, lean=replace(TQ3, affine=book_lean))
U4 = TritonCodec(4, uniform_encode, uniform_unpack, uniform_affine, num_meta=2, program=NIBBLES)
U4 = replace(U4, lean=replace(U4, unpack=field_unpack, zero=uniform_zero, program=NIBBLE_FIELDS))
U3 = TritonCodec(8, uniform_encode, uniform_unpack, uniform_affine, word_bytes=3, num_meta=2, program=uniform(*THREE_BITS))
U3 = replace(U3, lean=replace(U3, unpack=field_unpack, zero=uniform_zero, program=fields(*THREE_BITS)))
