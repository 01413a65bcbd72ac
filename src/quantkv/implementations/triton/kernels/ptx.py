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


def uniform(bits: int, registers: str, *fields: tuple[str, int]) -> Program:
    """Codes less half their range. Masked in place at bit b, a code n is the fp16 subnormal n 2^(b - 24): tensor cores take those at full
    speed. fields: register and bit of each plane."""
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    steps = (
        f"and.b32 n, {register}, 0x{mask * 0x10001 << b:08x}; mov.b32 m, {half2(-half * 2.0 ** (b - 24))}; add.f16x2 ${p}, n, m;"
        for p, (register, b) in enumerate(fields)
    )
    return Program(f"{{ .reg .b32 n, m, s, t, u; {registers} {''.join(steps)} }}", tuple(24 - b for _, b in fields))


NIBBLES = uniform(4, "shr.b32 s, $4, 8;", ("$4", 0), ("$4", 4), ("s", 0), ("s", 4))
