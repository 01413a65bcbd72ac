"""Codes of 1 to 8 bits in bytes: a row is the bit string of its codes, code i at bit `bits * i`, bytes little-endian.

A *word* is the least whole number of bytes that holds whole codes: 5 bits are eight codes in five bytes, 4 bits two in one.
Plane p of a row is what stands at the p-th place of its words: dimensions p, p + P, p + 2 P, ...
"""

from __future__ import annotations

import math

import torch


def _word(bits: int) -> tuple[int, int]:
    """Bytes of a word, and codes in it."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits={bits!r}: codes of 1 to 8 bits can be packed")
    whole = math.lcm(bits, 8)
    return whole // 8, whole // bits


def planes_of(bits: int) -> int:
    """Codes of a word. ValueError unless bits is 1 to 8, here and below."""
    return _word(bits)[1]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers `[..., D]` below 2**bits -> uint8 `[..., D * bits / 8]`. ValueError unless D is whole words."""
    word_bytes, count = _word(bits)
    if values.shape[-1] % count:
        raise ValueError(f"values.shape={tuple(values.shape)}: rows of {bits}-bit codes are multiples of {count}")
    word, *others = values.to(torch.int32 if word_bytes < 4 else torch.int64).unflatten(-1, (-1, count)).unbind(-1)
    for i, field in enumerate(others, 1):
        word = word | field << bits * i
    if word_bytes == 1:
        return word.to(torch.uint8)
    return torch.stack([word >> 8 * i & 0xFF for i in range(word_bytes)], -1).flatten(-2).to(torch.uint8)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., D * bits / 8]` -> the codes' planes, uint8 `[P, ..., D / P]`. `interleave(unpack(pack(x)))` is x.

    ValueError unless the bytes are whole words."""
    word_bytes, count = _word(bits)
    if codes.shape[-1] % word_bytes:
        raise ValueError(f"codes.shape={tuple(codes.shape)}: rows of {bits}-bit codes are multiples of {word_bytes} bytes")
    if word_bytes > 1:
        fields = codes.to(torch.int32 if word_bytes < 4 else torch.int64).unflatten(-1, (-1, word_bytes)).unbind(-1)
        codes = sum(field << 8 * i for i, field in enumerate(fields))
    planes = torch.empty(count, *codes.shape, dtype=codes.dtype, device=codes.device)
    torch.bitwise_and(codes, 2**bits - 1, out=planes[0])
    for i in range(1, count):
        torch.bitwise_right_shift(codes, bits * i, out=planes[i])
    if count > 2:  # above the last there is nothing
        planes[1:-1] &= 2**bits - 1
    return planes.to(torch.uint8)


def interleave(planes: torch.Tensor) -> torch.Tensor:
    """`[P, ..., D / P]` -> `[..., D]`, dimensions in their order."""
    return planes.movedim(0, -1).flatten(-2)
