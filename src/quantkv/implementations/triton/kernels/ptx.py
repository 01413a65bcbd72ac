"""Unpacking in inline PTX. A program takes two words, in register $P or, of three bytes each, in $P and $P+1, and leaves the two fp16
numbers of plane p in $p. tests/test_ptx.py runs them without a GPU."""

from __future__ import annotations

import struct
from itertools import product
from typing import NamedTuple


class Program(NamedTuple):
    """text: PTX. exponents: plane p comes out times `2**-exponents[p]`; all 0 if empty. capability: what it needs, 10 x major + minor."""

    text: str
    exponents: tuple[int, ...] = ()
    capability: int = 80


def _half2(x: float) -> str:
    """x twice in fp16."""
    return f"0x{2 * struct.pack('>e', x).hex()}"


def _uniform(bits: int, registers: str, *fields: tuple[str, int]) -> Program:
    """Codes less half their range. Masked in place at bit b, a code n is the fp16 subnormal n 2^(b - 24): tensor cores take those at full
    speed. fields: register and bit of each plane."""
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    steps = (
        f"and.b32 n, {register}, 0x{mask * 0x10001 << b:08x}; mov.b32 m, {_half2(-half * 2.0 ** (b - 24))}; add.f16x2 ${p}, n, m;"
        for p, (register, b) in enumerate(fields)
    )
    return Program(f"{{ .reg .b32 n, m, s, t, u; {registers} {''.join(steps)} }}", tuple(24 - b for _, b in fields))


NIBBLES = _uniform(4, "shr.b32 s, $4, 8;", ("$4", 0), ("$4", 4), ("s", 0), ("s", 4))
TRIPLETS = _uniform(
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
BYTES = Program(  # byte b + 128 under the exponent of 1024 is the fp16 number 1152 + b
    "{ .reg .b32 t, a, b, c; mov.b32 c, 0x64806480; lop3.b32 a, $2, 0x00ff00ff, c, 0x6a; shr.b32 t, $2, 8;"
    "lop3.b32 b, t, 0x00ff00ff, c, 0x6a; mov.b32 c, 0xe480e480; add.f16x2 $0, a, c; add.f16x2 $1, b, c; }"
)
E4M3 = Program(
    "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $2, 0, 0x3120; mov.b32 {lo, hi}, t;"
    "cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }",
    capability=89,
)


def _pairs() -> Program:
    """int2's levels, 661 low bit + 1227 high bit - 944, from each bit masked in place."""
    steps = []
    for p in range(8):
        word, low = ("$8", 2 * p) if p < 5 else ("t", 2 * p - 10)
        for b, level, total in ((low, 661, "c"), (low + 1, 1227, f"${p}")):
            mask, factor = f"0x{0x10001 << b:08x}", _half2(level / 2**b)
            steps.append(f"and.b32 a, {word}, {mask}; mov.b32 b, {factor}; fma.rn.f16x2 ${p}, a, b, {total};")
    return Program(f"{{ .reg .b32 t, a, b, c; mov.b32 c, {_half2(-944 * 2.0**-24)}; shr.b32 t, $8, 10; {''.join(steps)} }}", (24,) * 8)


def _book3() -> Program:
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


def _book4() -> Program:
    """The eight positive levels of four bits are 8 low and 8 high bytes; t, the sign where negative, is put on afterwards."""
    tables = "mov.b32 la, 0x8a41361c; mov.b32 lb, 0x76237906; mov.b32 ha, 0x3b393630; mov.b32 hb, 0x41403e3d;"
    index = ("not.b32 t, $4; and.b32 t, t, 0x88888888; shr.b32 u, t, 3; sub.u32 u, t, u;"  # u: 7 where negative
             "and.b32 s, $4, 0x77777777; xor.b32 s, s, u;")  # fmt: skip
    look_up = "prmt.b32 l, la, lb, s; prmt.b32 h, ha, hb, s; prmt.b32 {}, l, h, 0x5140; prmt.b32 {}, l, h, 0x7362;"
    signed = (f"prmt.b32 l, {words}, {halves}; shl.b32 u, t, {12 - 4 * p}; and.b32 u, u, 0x80008000; or.b32 ${p}, l, u;"
              for p, (words, halves) in enumerate(product(("a, c", "b, d"), ("0x5410", "0x7632"))))  # fmt: skip
    four = f"{look_up.format('a', 'b')} shr.b32 s, s, 16; {look_up.format('c', 'd')}"
    return Program(f"{{ .reg .b32 t, u, s, l, h, a, b, c, d, la, lb, ha, hb; {tables} {index} {four} {''.join(signed)} }}")


PAIRS, BOOK3, BOOK4 = _pairs(), _book3(), _book4()
