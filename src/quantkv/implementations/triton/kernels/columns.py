"""Tiles down which keys run: queries are the columns of products.

A product takes at least eight columns. Of four queries every second column is empty: columns 2 m and 2 m + 1 lie in one lane, so no
lane has only empty ones, and softmax looks at half as many scores. Nothing is moved for it."""

import triton
import triton.language as tl

LEAST_COLUMNS = tl.constexpr(8)  # of a product


@triton.jit
def transposed(planes):
    """Each transposed."""
    other = ()
    for p in tl.static_range(len(planes)):
        other = other + (tl.trans(planes[p]),)
    return other


@triton.jit
def widen(x, SIZE: tl.constexpr):
    """x `[R, M]`, or `[R, 2 M]` with zeros after each column where SIZE is 2 M. No join: where an operand is one, Triton 3.7 halves what a
    lane holds of a row."""
    if x.shape[1] < SIZE:
        first = tl.arange(0, 2)[None, None, :] == 0
        pairs = tl.broadcast_to(tl.reshape(x, [x.shape[0], x.shape[1], 1]), [x.shape[0], x.shape[1], 2])
        return tl.reshape(tl.where(first, pairs, 0.0).to(x.dtype), [x.shape[0], SIZE])
    else:
        return x


@triton.jit
def narrow(x, SIZE: tl.constexpr):
    """Reverses `widen`: `[R, SIZE]` of `[R, 2 SIZE]`."""
    if x.shape[1] > SIZE:
        return tl.split(tl.reshape(x, [x.shape[0], SIZE, 2]))[0]
    else:
        return x


@triton.jit
def twice(x):
    """`[2 M]`: each number of x `[M]` two times."""
    return tl.reshape(tl.broadcast_to(tl.reshape(x, [x.shape[0], 1]), [x.shape[0], 2]), [2 * x.shape[0]])


@triton.jit
def halve(x, SIZE: tl.constexpr):
    """Every second number of x where SIZE is half as many; else x."""
    if x.shape[0] > SIZE:
        return tl.split(tl.reshape(x, [SIZE, 2]))[0]
    else:
        return x


@triton.jit
def spread(token, head, row_mask, KEYS: tl.constexpr):
    """Rows of queries, `[M]` each, with an empty one after each where keys run down (KEYS is 0) and there would be too few columns."""
    if KEYS == 0 and token.shape[0] < LEAST_COLUMNS:
        return twice(token), twice(head), twice(row_mask) & (tl.arange(0, LEAST_COLUMNS) % 2 == 0)
    else:
        return token, head, row_mask


@triton.jit
def decayed(acc, decay, subtracted, KEYS: tl.constexpr):
    """acc decay - subtracted, both `[M]`; empty columns stay as they are, so that nothing is issued for them."""
    M: tl.constexpr = decay.shape[0]
    if KEYS == 0 and acc.shape[1] > M:
        pairs = tl.reshape(acc, [acc.shape[0], M, 2])
        kept = pairs * tl.reshape(decay, [1, M, 1]) - tl.reshape(subtracted, [1, M, 1])
        return tl.reshape(tl.where(tl.arange(0, 2)[None, None, :] == 0, kept, pairs), acc.shape)
    else:
        return acc * tl.expand_dims(decay, KEYS) - tl.expand_dims(subtracted, KEYS)


@triton.jit
def partial_sum(x, KEYS: tl.constexpr):
    """Sums of x over the keys of a tile, `[M]`; where keys run down `[8, M]`, each of every eighth key, which lie in one lane."""
    if KEYS == 0:
        return tl.sum(tl.reshape(x, [x.shape[0] // 8, 8, x.shape[1]]), axis=0)
    else:
        return tl.sum(x, axis=1)
