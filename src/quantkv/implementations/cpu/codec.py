"""The codec for the CPU kernels: numbers alone, so that one compiled kernel reads every codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CpuCodec:
    """What the bytes of a row stand for. Of the metadata the first field is the row's scale, a second one its bias.

    operands: head size -> the operand of each code, `[2 ** bits]`. None: a code is the number itself, of the codec's code dtype.
    zero_point_bits: the low bits of a float32 scale that hold a zero point z, and are no part of the scale: the bias is -z * scale.
    unit_length: the operands of a row are scaled to a vector of length 1.
    chain: dimensions of a trellis that hang together. A code of 4 bits is two operands, by the code before it too, 0 where a chain begins;
        `operands` are `[256, 2]`, by both codes, the one before in the index's low half. 0: each code is one operand.
    encode: returns a faster `Codec.encode`, of rows `[T, HK, D]`; likewise encode_in. None: the codec's own one encodes.
    """

    operands: Callable[[int], torch.Tensor] | None = None
    zero_point_bits: int = 0
    unit_length: bool = False
    chain: int = 0
    encode: Callable[[], Callable] | None = None
    encode_in: Callable[[], Callable] | None = None
