"""The trellis's search, compiled: `search.search` row by row, and the row's scale."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import float32, int64, njit, uint8, void

from ...implementations.cpu.compiling import SUMS, compiled
from ...implementations.cpu.rounding import round_rows
from ...rounding import TINY, Rounding
from . import WIDE, _search, pairs
from .search import CHAIN, STATES

f32 = np.float32
ZERO, HALF, ONE, TWO, SMALLEST, INFINITE = f32(0), f32(0.5), f32(1), f32(2), f32(TINY), f32(np.inf)


@njit(fastmath=SUMS)
def chain(target, own, feedback, gain, pairs, came_from, codes):
    """Codes `[C]` of one chain of 2 C dimensions, lowest cost first to last, by dynamic programming.

    target `[16, 64]`: of each way that ends in a code, what is aimed at: the row's own numbers and the errors before, fed back; the first
    way's is given. own, gain `[2 C]`. feedback `[64, 64]`: that of the chain, transposed. pairs `[2, 16, 16]`. came_from `[32, 16]`.
    """
    size, states = own.shape[0], pairs.shape[2]  # a loop of as many codes as an array says becomes vector instructions
    cost, best, now = np.full(STATES, INFINITE, f32), np.empty(STATES, f32), np.empty((STATES, CHAIN), f32)
    before, totals = np.zeros(STATES, np.int32), np.empty((STATES, STATES), f32)
    cost[0] = ZERO
    for way in range(1, STATES):
        for d in range(size):
            target[way, d] = target[0, d]
    for i in range(0, size, 2):
        back, weight, next_weight = feedback[i, i + 1], gain[i], gain[i + 1]
        for way in range(STATES):
            one, two, so_far = target[way, i], target[way, i + 1] + back * own[i], cost[way]
            for code in range(states):
                first, second = pairs[0, way, code], pairs[1, way, code]
                a, b = one - first, two - back * first - second
                totals[way, code] = so_far + weight * a * a + next_weight * b * b
        for code in range(states):
            least, from_way = totals[0, code], np.int32(0)
            for way in range(1, STATES):
                total = totals[way, code]
                from_way = np.int32(way) if total < least else from_way
                least = total if total < least else least
            best[code], before[code] = least, from_way
        for code in range(states):
            way = before[code]
            cost[code] = best[code]
            came_from[i >> 1, code] = way
            one, two = own[i] - pairs[0, way, code], own[i + 1] - pairs[1, way, code]
            for d in range(size):  # of which what lies behind is not read again
                now[code, d] = target[way, d] + one * feedback[i, d] + two * feedback[i + 1, d]
        target, now = now, target
    code = 0
    for way in range(1, STATES):
        code = way if cost[way] < cost[code] else code
    for i in range(size // 2 - 1, -1, -1):
        codes[i] = code
        code = came_from[i, code]


@compiled(
    void(int64, int64, float32[:, ::1], float32[:, :, ::1], float32[:, ::1], float32[:, :, ::1], float32, uint8[:, ::1], float32[::1]),
    fastmath=SUMS,
    nogil=True,
)
def search_rows(first, last, rows, feedback, gain, pairs, wide, codes, scales):
    """Codes `[N, D / 2]` and scales `[N]` of `rows [N, D]` from first to last; arguments as of `implementations.cpu.rounding`.

    pairs `[2, 16, 16]`: a code's first and second numbers, by the code before. wide: the unit of rows, over their root mean square."""
    size, heads = rows.shape[1], feedback.shape[0]
    unit, error = np.empty(size, f32), np.empty(size, f32)
    target, inside = np.empty((STATES, CHAIN), f32), np.empty((CHAIN, CHAIN), f32)
    came_from = np.empty((CHAIN // 2, STATES), uint8)
    for n in range(first, last):
        head = n % heads
        squares = ZERO
        for d in range(size):
            squares += rows[n, d] * rows[n, d]
        root = max(np.sqrt(squares / f32(size)), SMALLEST) * wide
        for d in range(size):
            unit[d] = rows[n, d] / root
        for start in range(0, size, CHAIN):
            count = min(CHAIN, size - start)
            for i in range(count):
                fed = ZERO
                for j in range(start):
                    fed += feedback[head, start + i, j] * error[j]
                target[0, i] = unit[start + i] + fed
                for j in range(count):
                    inside[j, i] = feedback[head, start + i, start + j]
            own, found = unit[start : start + count], codes[n, start // 2 : (start + count) // 2]
            chain(target, own, inside, gain[head, start : start + count], pairs, came_from, found)
            before = 0
            for i in range(count // 2):
                code = found[i]
                error[start + 2 * i] = own[2 * i] - pairs[0, before, code]
                error[start + 2 * i + 1] = own[2 * i + 1] - pairs[1, before, code]
                before = code
        itself, dot = ZERO, ZERO  # by the Hessian's factor
        for i in range(size):
            own, off = unit[i], error[i]
            for j in range(i):
                own += feedback[head, i, j] * unit[j]
                off += feedback[head, i, j] * error[j]
            itself += gain[head, i] * own * own
            dot += gain[head, i] * own * (own - off)
        scales[n] = root * min(max(itself / max(dot, SMALLEST), HALF), TWO)


@cache
def _alike(size: int) -> Rounding:
    """What follows from no Hessian: all errors cost alike, and none is fed back."""
    alike = torch.eye(size, device="cpu")[None]
    return Rounding(alike, torch.zeros_like(alike), torch.ones_like(alike[:, 0]))


def search(rows: torch.Tensor, rounding: Rounding | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 `[T, HK, D / 2]` and scales `[T, HK, 1]` of rows `[T, HK, D]`."""
    size, table = rows.shape[2], pairs().permute(2, 0, 1).contiguous().numpy()
    wide = 1.0 if rounding is None else WIDE
    return round_rows(search_rows, lambda some, _: _search(some, rounding), rows, rounding or _alike(size), size // 2, table, wide)
