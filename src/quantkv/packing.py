"""Codes of 2, 3, 4 bits in bytes: value i of a word stands at bit `bits * i`, words little-endian.

2 and 4 bits: a word is one byte. 3 bits: eight values in three bytes. Plane p of a row is what stands at the p-th place
of its words: dimensions p, p + P, p + 2 P, ...
"""

from __future__ import annotations

import torch

_WORDS = {2: (1, 4), 3: (3, 8), 4: (1, 2)}  # bits -> bytes of a word, values in it


def planes_of(bits: int) -> int:
    """Values of a word."""
    return _WORDS[bits][1]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers `[..., D]` below 2**bits -> uint8 `[..., D * bits / 8]`."""
    word_bytes, count = _WORDS[bits]
    word, *others = values.to(torch.int32).unflatten(-1, (-1, count)).unbind(-1)
    for i, field in enumerate(others, 1):
        word = word | field << bits * i
    if word_bytes == 1:
        return word.to(torch.uint8)
    return torch.stack([word >> 8 * i & 0xFF for i in range(word_bytes)], -1).flatten(-2).to(torch.uint8)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., D * bits / 8]` -> the values' planes, uint8 `[P, ..., D / P]`. `interleave(unpack(pack(x)))` is x."""
    word_bytes, count = _WORDS[bits]
    if word_bytes > 1:
        fields = codes.to(torch.int32).unflatten(-1, (-1, word_bytes)).unbind(-1)
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
