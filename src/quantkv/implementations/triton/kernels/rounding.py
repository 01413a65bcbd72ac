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
def block_of(x, block):
    """Columns of a block, `[N, 16]`, of x `[N, COLUMNS]`."""
    BLOCKS: tl.constexpr = x.shape[1] // 16
    here = (tl.arange(0, BLOCKS) == block)[None, :, None]
    return tl.sum(tl.where(here, tl.reshape(x, [x.shape[0], BLOCKS, 16]), 0.0), axis=1)


@triton.jit
def with_block(x, columns, block):
    """The matrix x `[N, COLUMNS]` with other columns `[N, 16]` of a block."""
    BLOCKS: tl.constexpr = x.shape[1] // 16
    wide = tl.reshape(tl.broadcast_to(columns[:, None, :], [x.shape[0], BLOCKS, 16]), x.shape)
    return tl.where((tl.arange(0, x.shape[1]) // 16 == block)[None, :], wide, x)


@triton.jit
def fed_forward(map, head, dim, column, D: tl.constexpr):
    """Feedback `[16, COLUMNS]` of dimensions `dim [16]` to columns."""
    at = map.feedback + head * map.feedback_head + dim[:, None] + column[None, :] * D
    return tl.load(at, mask=(dim < D)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def round_forward(unit, tried, map, head, PLAN: tl.constexpr, PRECISION: tl.constexpr):
    """What `round_backward` returns, by products of 16 dimensions, which long rows leave registers and shared memory for: the levels of a
    block are fed to all columns at once. `rest` holds u of columns that are not rounded yet, and codes of those that are."""
    D: tl.constexpr = PLAN.head_size
    COLUMNS: tl.constexpr = unit.shape[1]
    R: tl.constexpr = 4 * unit.shape[0]
    column = tl.arange(0, COLUMNS)
    inner = tl.arange(0, 16)
    products = tl.zeros(unit.shape, tl.float32)
    for block in tl.range((D + 15) // 16, num_stages=1):
        dim = block * 16 + inner
        whole = tl.where(dim[:, None] == column[None, :], 1.0, fed_forward(map, head, dim, column, D))
        products = tl.dot(block_of(unit, block), whole, products, input_precision=PRECISION)
    rest = tl.reshape(products[:, None, :] / tried[None, :, None], [R, COLUMNS])
    cost = tl.zeros([R], tl.float32)
    cross = tl.zeros([R], tl.float32)
    itself = tl.zeros([unit.shape[0]], tl.float32)
    for block in tl.range((D + 15) // 16, num_stages=1):
        dim = block * 16 + inner
        gain = tl.load(map.gain + head * map.gain_head + dim, mask=dim < D, other=0.0)
        p = block_of(products, block)
        itself += tl.sum(p * p * gain[None, :], axis=1)
        p = tl.reshape(p[:, None, :] / tried[None, :, None], [R, 16])
        own = map.feedback + head * map.feedback_head + tl.where(dim < D, dim * D + block * 16, 0)
        chosen, cost, cross = round_block(block_of(rest, block), p, gain, own, cost, cross, PLAN)
        rest -= tl.dot(level_of(chosen, PLAN), fed_forward(map, head, dim, column, D), input_precision=PRECISION)
        rest = with_block(rest, chosen.to(tl.float32), block)
    return rest.to(tl.int32), cost, cross, itself


@triton.jit
def round_backward(unit, tried, map, head, PLAN: tl.constexpr, PRECISION: tl.constexpr):
    """Codes `[R, COLUMNS]` of rows `unit [T, COLUMNS]` at the scales `tried [4]`, and in the terms of `round_rows` sums of gain d^2 and of
    gain p d, `[R]`, and of gain p^2, `[T]`. What all blocks before it feed to a block is one product."""
    D: tl.constexpr = PLAN.head_size
    COLUMNS: tl.constexpr = unit.shape[1]
    R: tl.constexpr = 4 * unit.shape[0]
    column = tl.arange(0, COLUMNS)
    inner = tl.arange(0, 16)
    codes = tl.zeros([R, COLUMNS], tl.int32)
    cost = tl.zeros([R], tl.float32)
    cross = tl.zeros([R], tl.float32)
    itself = tl.zeros([unit.shape[0]], tl.float32)
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
        own = map.feedback + head * map.feedback_head + tl.where(dim < D, dim * D + block * 16, 0)
        chosen, cost, cross = round_block(u, p, gain, own, cost, cross, PLAN)
        codes = with_block(codes, chosen, block)
    return codes, cost, cross, itself


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
    rows = join_planes(x)
    squares = tl.sum(rows * rows, axis=1)
    size = at_least(tl.sqrt(squares / D), TINY)
    unit = rows / size[:, None]
    tried = candidates(tl.arange(0, 4))
    if COLUMNS < 256:  # fewer instructions, where rows fit registers
        codes, cost, cross, itself = round_backward(unit, tried, map, head, PLAN, PRECISION)
    else:
        codes, cost, cross, itself = round_forward(unit, tried, map, head, PLAN, PRECISION)
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
