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
    fields = values.unflatten(-1, (-1, count)).to(torch.int32)
    shifts = torch.arange(0, bits * count, bits, device=values.device, dtype=torch.int32)
    word = (fields << shifts).sum(-1, dtype=torch.int32)
    parts = [(word >> (8 * i)) & 0xFF for i in range(word_bytes)]
    return torch.stack(parts, -1).flatten(-2).to(torch.uint8)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., D * bits / 8]` -> uint8 `[..., D]`. Reverses `pack`."""
    word_bytes, count, wide = _WORDS[bits]
    word = codes.to(wide)
    if word_bytes > 1:
        word = word.unflatten(-1, (-1, word_bytes))
        word = sum(word[..., i] << (8 * i) for i in range(word_bytes))
    # Shift value i from bit bits*i to bit 8*i of the wide integer and look at its bytes: no interleaving copy.
    spread = word & (2**bits - 1)
    for i in range(1, count):
        spread |= (word << ((8 - bits) * i)) & ((2**bits - 1) << (8 * i))
    return spread.contiguous().view(torch.uint8)
