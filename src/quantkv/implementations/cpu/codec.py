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
    encode: returns a compiled function of rows `[N, D]` float32, all finite, that fills codes `[N, code_bytes]` uint8 and metadata
        `[N, fields]` with the bytes of `Codec.encode`. None: that one encodes.
    """

    operands: Callable[[int], torch.Tensor] | None = None
    zero_point_bits: int = 0
    unit_length: bool = False
    encode: Callable[[], Callable] | None = None
