"""Codes of 2, 3, 4 bits in bytes: value i of a word stands at bit `bits * i`, words little-endian.

2 and 4 bits: a word is one byte. 3 bits: eight values in three bytes. Plane p of a row is what stands at the p-th place
of its words: dimensions p, p + P, p + 2 P, ...
"""

from __future__ import annotations

import torch

# bits -> (bytes of a word, values in it, an integer type with a byte for each value)
_WORDS = {2: (1, 4, torch.int32), 3: (3, 8, torch.int64), 4: (1, 2, torch.int16)}


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers `[..., D]` below 2**bits -> uint8 `[..., D * bits / 8]`."""
    word_bytes, count, _ = _WORDS[bits]
    word, *others = values.to(torch.int32).unflatten(-1, (-1, count)).unbind(-1)
    for i, field in enumerate(others, 1):
        word = word | field << bits * i
    if word_bytes == 1:
        return word.to(torch.uint8)
    return torch.stack([word >> 8 * i & 0xFF for i in range(word_bytes)], -1).flatten(-2).to(torch.uint8)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., D * bits / 8]` -> uint8 `[..., D]`. Reverses `pack`."""
    word_bytes, count, wide = _WORDS[bits]
    word = codes.to(wide)
    if word_bytes > 1:
        word = word.unflatten(-1, (-1, word_bytes))
        word = sum(word[..., i] << (8 * i) for i in range(word_bytes))
    # Give each value a byte of the wide integer, without an interleaving copy: move the upper half of the values apart from the
    # lower, then the halves of each half.
    group = count
    while group > 1:
        group //= 2
        word |= word << group * (8 - bits)
        word &= sum((2 ** (bits * group) - 1) << first * 8 for first in range(0, count, group))
    return word.contiguous().view(torch.uint8)
