"""The inline PTX of the codecs, run instruction by instruction, against the planes that their portable halves decode: no GPU needed."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quantkv import available_formats, get_format
from quantkv.formats.levels.arithmetic import cubic
from quantkv.formats.turboquant import centroids


def halves(x):
    return x.astype(np.uint32).view(np.float16).reshape(-1, 2).astype(np.float64)


def rounded(x):
    return x.astype(np.float16).reshape(-1).view(np.uint32)


def permute(a, b, selector):
    """prmt: four bytes of b:a by the low four nibbles, whose highest bit would spread the sign."""
    source = np.stack([(w >> np.uint32(8 * i)) & np.uint32(255) for w in (a, b) for i in range(4)], -1)
    total = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        assert (nibble < 8).all()
        total |= np.take_along_axis(source, nibble[:, None].astype(np.int64), -1)[:, 0] << np.uint32(8 * i)
    return total


def logic(a, b, c, table):
    bits = [(x[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) for x in (a, b, c)]
    chosen = (table[:, None] >> (bits[0] * 4 + bits[1] * 2 + bits[2])) & np.uint32(1)
    return (chosen << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": permute,
    "lop3.b32": logic,
    "mul.f16x2": lambda a, b: rounded(halves(a) * halves(b)),
    "add.f16x2": lambda a, b: rounded(halves(a) + halves(b)),
    "fma.rn.f16x2": lambda a, b, c: rounded(halves(a) * halves(b) + halves(c)),
}


def run(program, words, planes):
    """planes `[len(words[0]), 2]` float64 of the program, given its input registers as uint32 arrays."""
    registers = {f"${planes + i}": w.astype(np.uint32) for i, w in enumerate(words)}

    def value(operand):
        return registers[operand] if operand in registers else np.full(len(words[0]), int(operand, 0), np.uint32)

    for statement in program.strip("{} ").split(";"):
        name, _, operands = statement.strip().partition(" ")
        if name and name != ".reg":
            target, *sources = re.split(r",\s*", operands.strip())
            registers[target] = INSTRUCTIONS[name](*(value(s) for s in sources))
    return [halves(registers[f"${p}"]) for p in range(planes)]


def levels(bits):
    return centroids(bits, 1, torch.float16).double().numpy()


def cubic_levels(bits):
    """As `arithmetic` defines them, in units of the program's exponents."""
    root = cubic(bits)[0]
    t = (np.arange(2.0**bits) - (2**bits - 1) / 2) / 2**bits
    return np.float16(t * np.float16(t * t + root).astype(np.float64)).astype(np.float64)


CODECS = {codec.name: codec for name in available_formats() for codec in (get_format(name).k, get_format(name).v)}
CODES = {  # what each code stands for
    "int8": np.concatenate([np.arange(128.0), np.arange(-128.0, 0)]),
    "int4": np.arange(16.0) - 8,
    "int2": np.array([-944.0, -283, 283, 944]),
    "tq4": levels(4),
    "tq3": levels(3),
    "u4": np.arange(16.0) - 8,
    "u3": np.arange(8.0) - 4,
}
LEAN = {  # what a plane of the lean half holds of each code; what a zero takes off it is not yet off
    "int8": CODES["int8"] + 128,
    "int4": np.arange(16.0),
    "int2": np.array([-10.0, -3, 3, 10]),
    "levels2": np.array([-10.0, -3, 3, 10]),
    **{f"levels{bits}": cubic_levels(bits) for bits in (3, 4, 6, 8)},
    "u4": np.arange(16.0),
    "u3": np.arange(8.0),
}


@pytest.mark.parametrize("name,lean", [*((name, False) for name in CODES), *((name, True) for name in LEAN)])
def test_every_code_of_every_plane(name, lean):
    codec, numbers = (CODECS[name].triton().lean, LEAN[name]) if lean else (CODECS[name].triton(), CODES[name])
    bits = 8 * codec.word_bytes // codec.planes
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 1 << bits, (4096, 2, codec.planes)).astype(np.uint32)  # two words of a register, or of two
    words = (codes << (bits * np.arange(codec.planes, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    if codec.word_bytes == 2:
        inputs = [words[:, 0] | words[:, 1] << np.uint32(16)]
    else:  # the highest byte of a register holds anything
        inputs = list((words | generator.integers(0, 256, words.shape).astype(np.uint32) << np.uint32(24)).T)
    planes = run(codec.program.text, inputs, codec.planes)
    for p, factor in enumerate([2.0**e for e in codec.program.exponents] or [1.0] * codec.planes):
        rounded_off = factor * 2.0**-25 if name in ("levels6", "levels8") else 0.0  # their smallest levels are subnormals in this unit
        np.testing.assert_allclose(planes[p] * factor, numbers[codes[:, :, p]], rtol=0.0, atol=rounded_off)
