"""int4's encoder, compiled: the operations of `_encode` one by one, to the bit."""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, uint8, void

from ...implementations.cpu.compiling import compiled
from ..int8 import LARGEST, SMALLEST_SCALE
from . import INT4, ZERO_POINT_BITS

f32, i32 = np.float32, np.int32
SMALLEST, GREATEST = f32(SMALLEST_SCALE), f32(LARGEST)
ZERO, HALF, ONE, TOP = f32(0), f32(0.5), f32(1), f32(15)


@compiled(void(float32[:, ::1], uint8[:, ::1], float32[:, ::1]), nogil=True)
def encode_rows(rows, codes, meta):
    """Codes `[N, D / 2]` and scales with their zero points `[N, 1]` of `rows [N, D]`, all finite."""
    bits = meta.view(np.int32)
    for n in range(rows.shape[0]):
        low, high = rows[n, 0], rows[n, 0]
        for d in range(rows.shape[1]):
            low, high = min(low, rows[n, d]), max(high, rows[n, d])
        scale = min(max((high - low) / TOP, SMALLEST), GREATEST)
        zero_point = i32(min(max(HALF - low / scale, ZERO), TOP))
        inverse, shift = ONE / scale, f32(zero_point)
        for i in range(codes.shape[1]):
            first = i32(min(max(rows[n, 2 * i] * inverse + shift + HALF, ZERO), TOP))
            second = i32(min(max(rows[n, 2 * i + 1] * inverse + shift + HALF, ZERO), TOP))
            codes[n, i] = uint8(first | second << i32(4))
        meta[n, 0] = scale
        bits[n, 0] = (bits[n, 0] & ~i32(ZERO_POINT_BITS)) | zero_point


def encode(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codec's `encode`, of rows `[T, HK, D]`."""
    rows = y.contiguous().view(-1, y.shape[-1]).numpy()
    if not np.isfinite(rows).all():
        return INT4.encode(y)
    codes, meta = np.empty((len(rows), rows.shape[1] // 2), np.uint8), np.empty((len(rows), 1), np.float32)
    encode_rows(rows, codes, meta)
    return tuple(torch.from_numpy(t).view(*y.shape[:-1], t.shape[1]) for t in (codes, meta))
