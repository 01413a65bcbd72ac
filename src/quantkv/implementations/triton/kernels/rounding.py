"""Rounding of rows by a Hessian, for codecs whose levels are an odd cubic of the code: blocks of 16 dimensions, one after the other."""

import triton
import triton.language as tl

from ....rounding import CANDIDATES
from .codes import TINY, at_least, pack_codes, stored_scale
from .tiles import join_planes, split_planes

TRIED = tl.constexpr(CANDIDATES)


@triton.jit
def level_of(code, PLAN: tl.constexpr):
    """Levels float32 of codes int32, before they are rounded to fp16."""
    A: tl.constexpr = PLAN.cubic[0]
    B: tl.constexpr = PLAN.cubic[1]
    t = code.to(tl.float32) - ((1 << PLAN.bits) - 1) * 0.5
    return t * (A + B * t * t)


@triton.jit
def nearest_code(u, PLAN: tl.constexpr):
    """How many boundaries between levels are below u, found bit by bit. Counted from the middle, boundary s is another cubic."""
    A: tl.constexpr = PLAN.cubic[0]
    B: tl.constexpr = PLAN.cubic[1]
    BITS: tl.constexpr = PLAN.bits
    code = tl.zeros(u.shape, tl.int32)
    for i in tl.static_range(BITS):
        more = code + (1 << (BITS - 1 - i))
        s = more.to(tl.float32) - (1 << (BITS - 1))
        code = tl.where(u > s * (A + 0.75 * B + B * s * s), more, code)
    return code


@triton.jit
def candidates(i):
    """The scales to try, at i `[4]`."""
    return tl.where(i < 2, tl.where(i == 0, TRIED[0], TRIED[1]), tl.where(i == 2, TRIED[2], TRIED[3]))


@triton.jit
def round_block(u, p, gain, column, cost, cross, PLAN: tl.constexpr):
    """Codes `[R, 16]` of a block, one dimension after the other. u: with what the blocks before feed forward; p, gain `[16]`: as in
    `round_rows`; column: pointers `[16]` to the block's first column of the feedback. cost, cross: sums over dimensions."""
    inner = tl.arange(0, 16)
    codes = tl.zeros(u.shape, tl.int32)
    for i in range(16):
        here = inner == i
        mine = tl.sum(tl.where(here[None, :], u, 0.0), axis=1)
        code = nearest_code(mine, PLAN)
        level = level_of(code, PLAN)
        left = mine - level
        weighted = left * tl.sum(tl.where(here, gain, 0.0), axis=0)
        cost += weighted * left
        cross += weighted * tl.sum(tl.where(here[None, :], p, 0.0), axis=1)
        u -= level[:, None] * tl.load(column + i, mask=inner > i, other=0.0)[None, :]
        codes = tl.where(here[None, :], code[:, None], codes)
    return codes, cost, cross


@triton.jit
def round_rows(x, map, head, PLAN: tl.constexpr, PRECISION: tl.constexpr):
    """Words and metadata of rows given as planes `[T, W]`, as `TritonCodec.encode`; zero beyond the head size.

    With M = (1 + F)^T diag(gain) (1 + F) and p = (1 + F) row, what is to be rounded at a dimension is u = p - F z, z the levels so
    far, and d = u - z is left: row M row = sum gain p^2, row M z = sum gain p (p - d), z M z = sum gain (p - d)^2. Rows R = 4 T of a tile
    are those of T at each candidate scale, in units of it."""
    P: tl.constexpr = PLAN.codec.planes
    D: tl.constexpr = PLAN.head_size
    T: tl.constexpr = x[0].shape[0]
    COLUMNS: tl.constexpr = PLAN.width * P
    R: tl.constexpr = 4 * T
    rows = join_planes(x)
    squares = tl.sum(rows * rows, axis=1)
    size = at_least(tl.sqrt(squares / D), TINY)
    unit = rows / size[:, None]
    column = tl.arange(0, COLUMNS)
    inner = tl.arange(0, 16)
    tried = candidates(tl.arange(0, 4))
    codes = tl.zeros([R, COLUMNS], tl.int32)
    cost = tl.zeros([R], tl.float32)
    cross = tl.zeros([R], tl.float32)
    itself = tl.zeros([T], tl.float32)
    for block in range((D + 15) // 16):
        dim = block * 16 + inner
        first = map.feedback + head * map.feedback_head + dim * D
        feedback = tl.load(first[:, None] + column[None, :], mask=(dim < D)[:, None] & (column < D)[None, :], other=0.0)
        gain = tl.load(map.gain + head * map.gain_head + dim, mask=dim < D, other=0.0)
        whole = tl.where(dim[:, None] == column[None, :], 1.0, feedback)
        p = tl.dot(unit, tl.trans(whole), input_precision=PRECISION)
        itself += tl.sum(p * p * gain[None, :], axis=1)
        p = tl.reshape(p[:, None, :] / tried[None, :, None], [R, 16])
        levels = tl.where(column[None, :] < block * 16, level_of(codes, PLAN), 0.0)
        u = p - tl.dot(levels, tl.trans(feedback), input_precision=PRECISION)
        chosen, cost, cross = round_block(u, p, gain, tl.where(dim < D, first + block * 16, map.feedback), cost, cross, PLAN)
        chosen = tl.reshape(tl.broadcast_to(chosen[:, None, :], [R, COLUMNS // 16, 16]), [R, COLUMNS])
        codes = tl.where((column // 16 == block)[None, :], chosen, codes)
    itself = itself[:, None] / (tried * tried)[None, :]
    cost = tl.reshape(cost, [T, 4])
    cross = tl.reshape(cross, [T, 4])
    dot = itself - cross
    positive = tl.maximum(dot, 0.0)
    cosine = positive * positive / (tl.maximum(itself - 2.0 * cross + cost, TINY) * tl.maximum(itself, TINY))
    best = tl.argmax(tl.where(cosine >= 0.0, cosine, -1.0), axis=1)  # of a row that is not finite, any
    chosen = tl.arange(0, 4)[None, :] == best[:, None]
    unbiased = tl.clamp(itself / at_least(dot, TINY), 0.5, 2.0, propagate_nan=tl.PropagateNan.ALL)
    scale = size * tl.sum(tl.where(chosen, tried[None, :] * unbiased, 0.0), axis=1)
    code = tl.sum(tl.where(chosen[:, :, None], tl.reshape(codes, [T, 4, COLUMNS]), 0), axis=1)
    return pack_codes(split_planes(code, P), PLAN.bits), (stored_scale(scale),)
