"""The compiled kernel that maps rows before they are encoded: the reference's operations in the reference's order, to the bit."""

from __future__ import annotations

import numpy as np
from numba import boolean, float32, int64

from .compiling import compiled

FLOAT32, BFLOAT16, FLOAT16 = range(3)
f32, i32 = np.float32, np.int32
ZERO = f32(0)
SMALLEST_NORMAL = f32(2.0**-14)  # of fp16
TO_SUBNORMAL = f32(0.75)  # its last bit is worth as much as that of fp16's subnormal numbers: adding it rounds to them


@compiled(boolean(float32[:, ::1], float32[::1], int64, int64, float32, float32[:, ::1]), nogil=True)
def map_rows(rows, signs, block, rounding, largest, mapped):
    """`mapped [N, D]`: Hadamard matrices of `block` dimensions times `signs * rows`, no number larger than `largest`, rounded to the dtype
    that `rounding` names. False if one is not finite: sums too large for float32 have another way in the reference."""
    bits, size, finite = mapped.view(np.int32), rows.shape[1], True
    for n in range(rows.shape[0]):
        for d in range(size):
            mapped[n, d] = rows[n, d] * signs[d]
        distance = 1
        while distance < block:
            for start in range(0, size, 2 * distance):
                for d in range(start, start + distance):
                    a, b = mapped[n, d], mapped[n, d + distance]
                    mapped[n, d], mapped[n, d + distance] = a + b, a - b
            distance *= 2
        for d in range(size):
            x = mapped[n, d]
            finite = finite and x - x == ZERO
            mapped[n, d] = largest if x > largest else -largest if x < -largest else x
        if rounding == BFLOAT16:
            for d in range(size):
                bits[n, d] = (bits[n, d] + i32(0x7FFF) + (bits[n, d] >> i32(16) & i32(1))) & i32(-0x10000)
        elif rounding == FLOAT16:
            for d in range(size):
                if abs(mapped[n, d]) < SMALLEST_NORMAL:
                    mapped[n, d] = (mapped[n, d] + TO_SUBNORMAL) - TO_SUBNORMAL
                else:
                    bits[n, d] = (bits[n, d] + i32(0xFFF) + (bits[n, d] >> i32(13) & i32(1))) & i32(-0x2000)
    return finite
