"""Unpacking in inline PTX: what the programs of several formats share. A program takes two words, in register $P or, of three or four
bytes each, in $P and $P+1, and leaves the two fp16 numbers of plane p in $p. tests/test_ptx.py runs them without a GPU."""

from __future__ import annotations

import struct
from typing import NamedTuple


class Program(NamedTuple):
    """text: PTX. exponents: plane p comes out times `2**-exponents[p]`; all 0 if empty. capability: what it needs, 10 x major + minor."""

    text: str
    exponents: tuple[int, ...] = ()
    capability: int = 80


def half2(x: float) -> str:
    """x twice in fp16."""
    return f"0x{2 * struct.pack('>e', x).hex()}"


def fields(bits: int, registers: str, *places: tuple[str, int]) -> Program:
    """Codes as they are. Masked in place at bit b, a code n is the fp16 subnormal n 2^(b - 24): tensor cores take those at full speed.
    places: register and bit of each plane."""
    steps = (f"and.b32 ${p}, {register}, 0x{((1 << bits) - 1) * 0x10001 << b:08x};" for p, (register, b) in enumerate(places))
    return Program(f"{{ .reg .b32 s, t, u; {registers} {''.join(steps)} }}", tuple(24 - b for _, b in places))


def uniform(bits: int, registers: str, *places: tuple[str, int]) -> Program:
    """`fields` less half their range."""
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    steps = (
        f"and.b32 n, {register}, 0x{mask * 0x10001 << b:08x}; mov.b32 m, {half2(-half * 2.0 ** (b - 24))}; add.f16x2 ${p}, n, m;"
        for p, (register, b) in enumerate(places)
    )
    return Program(f"{{ .reg .b32 n, m, s, t, u; {registers} {''.join(steps)} }}", tuple(24 - b for _, b in places))


def four_levels() -> Program:
    """Eight codes of 2 bits as -10, -3, 3 and 10, times 2^-24: 20/3 code - 10, once rounded to an integer, and subnormals are integers."""
    steps = []
    for p in range(8):
        word, at = ("$8", 2 * p) if p < 5 else ("t", 2 * p - 10)
        steps.append(f"and.b32 a, {word}, 0x{0x30003 << at:08x}; mov.b32 b, {half2(20 / 3 / 2**at)}; fma.rn.f16x2 ${p}, a, b, c;")
    return Program(f"{{ .reg .b32 t, a, b, c; mov.b32 c, {half2(-10 * 2.0**-24)}; shr.b32 t, $8, 10; {''.join(steps)} }}", (24,) * 8)


FOUR_LEVELS = four_levels()
FOUR_BITS = (4, "shr.b32 s, $4, 8;", ("$4", 0), ("$4", 4), ("s", 0), ("s", 4))
NIBBLES, NIBBLE_FIELDS = uniform(*FOUR_BITS), fields(*FOUR_BITS)
