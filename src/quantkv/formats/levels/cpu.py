"""Levels by a Hessian, compiled: `rounding.round_to_levels` row by row."""

from __future__ import annotations

import numpy as np
import torch
from numba import float32, int64, uint8, void

from ... import rounding as reference
from ...implementations.cpu import rounding as by_row
from ...implementations.cpu.compiling import SUMS, compiled
from ...rounding import CANDIDATES, TINY, Rounding

f32 = np.float32
ZERO, HALF, ONE, TWO, SMALLEST = f32(0), f32(0.5), f32(1), f32(2), f32(TINY)
FIRST, SECOND, THIRD, FOURTH = (f32(c) for c in CANDIDATES)


@compiled(
    void(int64, int64, float32[:, ::1], float32[:, :, ::1], float32[:, ::1], float32[::1], uint8[:, ::1], float32[::1]),
    fastmath=SUMS,
    nogil=True,
)
def round_rows(first, last, rows, feedback, gain, levels, codes, scales):
    """Codes `[N, D]` and scales `[N]` of `rows [N, D]` from first to last; arguments as of `implementations.cpu.rounding`.

    The row and what each candidate makes of it are multiplied with the Hessian's factor, a dimension at a time: its products are sums of
    theirs, and the error so far is what is fed back.
    """
    size, heads, count = rows.shape[1], feedback.shape[0], levels.shape[0]
    boundaries = np.empty(count, f32)
    for i in range(count - 1):
        boundaries[i] = (levels[i] + levels[i + 1]) * HALF
    unit, e0, e1, e2, e3 = np.empty(size, f32), np.empty(size, f32), np.empty(size, f32), np.empty(size, f32), np.empty(size, f32)
    tried, made = np.empty((4, size), uint8), np.empty(4, f32)
    inverse = (ONE / FIRST, ONE / SECOND, ONE / THIRD, ONE / FOURTH)
    candidates = (FIRST, SECOND, THIRD, FOURTH)
    dots, lengths = np.empty(4, f32), np.empty(4, f32)
    for n in range(first, last):
        head = n % heads
        squares = ZERO
        for d in range(size):
            squares += rows[n, d] * rows[n, d]
        root = max(np.sqrt(squares / f32(size)), SMALLEST)
        for d in range(size):
            unit[d] = rows[n, d] / root
            e0[d], e1[d], e2[d], e3[d] = ZERO, ZERO, ZERO, ZERO
        itself = ZERO
        dots[:] = ZERO
        lengths[:] = ZERO
        for i in range(size):
            own, a0, a1, a2, a3 = ZERO, ZERO, ZERO, ZERO, ZERO
            for j in range(min(i + 15 & ~15, size)):  # beyond i there are zeros
                f = feedback[head, i, j]
                own += f * unit[j]
                a0 += f * e0[j]
                a1 += f * e1[j]
                a2 += f * e2[j]
                a3 += f * e3[j]
            own += unit[i]
            weight = gain[head, i]
            itself += weight * own * own
            made[0], made[1], made[2], made[3] = a0, a1, a2, a3
            for c in range(4):
                x = unit[i] * inverse[c]
                target = x + made[c]
                code, step = 0, count >> 1
                while step:
                    code += step * int64(target > boundaries[code + step - 1])
                    step >>= 1
                value = levels[code]
                tried[c, i] = code
                rounded = own * inverse[c] - (target - value)
                dots[c] += weight * own * rounded
                lengths[c] += weight * rounded * rounded
                made[c] = x - value
            e0[i], e1[i], e2[i], e3[i] = made[0], made[1], made[2], made[3]
        best, most = 0, -ONE
        for c in range(4):
            dot = max(dots[c], ZERO)
            cosine = dot * dot / max(lengths[c], SMALLEST)
            if cosine > most:
                best, most = c, cosine
        unbiased = itself * inverse[best] / max(dots[best], SMALLEST)
        scales[n] = root * candidates[best] * min(max(unbiased, HALF), TWO)
        codes[n] = tried[best]


def round_to_levels(rows: torch.Tensor, rounding: Rounding, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rounding.round_to_levels`, its codes as uint8."""
    return by_row.round_rows(
        round_rows, lambda *some: reference.round_to_levels(*some, levels), rows, rounding, rows.shape[2], levels.numpy()
    )
