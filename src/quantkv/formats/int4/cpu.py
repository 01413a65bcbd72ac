"""int4's encoder, compiled: the operations of `_encode` one by one, to the bit."""

from __future__ import annotations

import numpy as np
import torch
from numba import boolean, float32, uint8

from ...implementations.cpu.compiling import compiled
from ..int8 import LARGEST, SMALLEST_SCALE
from . import INT4, ZERO_POINT_BITS

f32, i32 = np.float32, np.int32
SMALLEST, GREATEST = f32(SMALLEST_SCALE), f32(LARGEST)
ZERO, HALF, ONE, TOP = f32(0), f32(0.5), f32(1), f32(15)


@compiled(boolean(float32[:, ::1], uint8[:, ::1], float32[:, ::1]), nogil=True)
def encode_rows(rows, codes, meta):
    """Codes `[N, D / 2]` and scales with their zero points `[N, 1]` of `rows [N, D]`. False if a number is not finite."""
    bits, finite = meta.view(np.int32), True
    for n in range(rows.shape[0]):
        low, high = rows[n, 0], rows[n, 0]
        for d in range(rows.shape[1]):
            x = rows[n, d]
            low, high, finite = min(low, x), max(high, x), finite and x - x == ZERO
        scale = min(max((high - low) / TOP, SMALLEST), GREATEST)
        zero_point = i32(min(max(HALF - low / scale, ZERO), TOP))
        inverse, shift = ONE / scale, f32(zero_point)
        for i in range(codes.shape[1]):
            first = i32(min(max(rows[n, 2 * i] * inverse + shift + HALF, ZERO), TOP))
            second = i32(min(max(rows[n, 2 * i + 1] * inverse + shift + HALF, ZERO), TOP))
            codes[n, i] = uint8(first | second << i32(4))
        meta[n, 0] = scale
        bits[n, 0] = (bits[n, 0] & ~i32(ZERO_POINT_BITS)) | zero_point
    return finite


def encode(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codec's `encode`, of rows `[T, HK, D]`."""
    codes, meta = np.empty((*y.shape[:2], y.shape[2] // 2), np.uint8), np.empty((*y.shape[:2], 1), np.float32)
    if not encode_rows(y.contiguous().view(-1, y.shape[2]).numpy(), codes.reshape(-1, codes.shape[2]), meta.reshape(-1, 1)):
        return INT4.encode(y)
    return torch.from_numpy(codes), torch.from_numpy(meta)
