"""Rows -> pages."""

import triton
import triton.language as tl

from .codes import LARGEST, LARGEST_HALF, saturate, sum_of_squares
from .rounding import round_rows
from .tiles import load_rows, meta_pointers, word_pointers


@triton.jit
def mapped_rows(at, given, map, head, position, factor, PLAN: tl.constexpr, KEY_MEAN: tl.constexpr, PRECISION: tl.constexpr):
    """The rows at the pointers `at [R]` as planes in float32: less their key mean, mapped, rounded as the codec wants them."""
    DTYPE: tl.constexpr = at.dtype.element_ty
    loaded = load_rows(at, given, map, head, position, PLAN, KEY_MEAN, PRECISION)
    x = ()
    for p in tl.static_range(len(loaded)):
        plane = loaded[p].to(tl.float32)
        if PLAN.mapped:
            plane = saturate(plane * factor, LARGEST_HALF if PLAN.rounded and tl.float16 == DTYPE else LARGEST)
            if PLAN.rounded:
                plane = plane.to(DTYPE).to(tl.float32)
        x = x + (plane,)
    return x


@triton.jit
def choose_rows(x, alone):
    """x, or the negative of what `alone` has of a row where that is shorter; which rows those are `[R]`."""
    shorter = tl.sum(sum_of_squares(alone), axis=1) < tl.sum(sum_of_squares(x), axis=1)
    chosen = ()
    for p in tl.static_range(len(x)):
        chosen = chosen + (tl.where(shorter[:, None], -alone[p], x[p]),)
    return chosen, shorter


@triton.jit
def write_rows(
    rows, pages, map, token, head, page, slot, position, given, mask, factor, scale, PLAN: tl.constexpr, PRECISION: tl.constexpr
):
    """Encode rows of one kv head and store them at (page, slot), each `[R]`. given: a row is there; mask: it has a slot. What is given
    is loaded before the slots have arrived."""
    CODEC: tl.constexpr = PLAN.codec
    P: tl.constexpr = PLAN.codec.planes
    NUM_META: tl.constexpr = PLAN.codec.num_meta
    at = rows.ptr + token * rows.stride_token + head * rows.stride_head
    x = mapped_rows(at, given, map, head, position, factor, PLAN, PLAN.key_mean, PRECISION)
    if PLAN.signed:
        x, alone = choose_rows(x, mapped_rows(at, given, map, head, position, factor, PLAN, False, PRECISION))
    if PLAN.scaled:
        scaled = ()
        for p in tl.static_range(P):
            scaled = scaled + (tl.div_rn(x[p], tl.zeros(x[p].shape, tl.float32) + scale),)
        x = scaled
    real = tl.arange(0, PLAN.width) < PLAN.columns
    if PLAN.cubic is None:
        words, meta = CODEC.encode(x, real, pages.table, PLAN)
    else:
        words, meta = round_rows(x, map, head, PLAN, PRECISION)
    at = word_pointers(pages, page, slot, head, PLAN)
    stored = mask[:, None] & real[None, :]
    tl.store(at, words, mask=stored)
    if PLAN.codec.bytewise:
        BYTES: tl.constexpr = PLAN.codec.word_bytes
        for i in tl.static_range(1, BYTES):
            tl.store(at + i, words >> 8 * i, mask=stored)
    if NUM_META > 0:
        at = meta_pointers(pages, page, slot, head, PLAN)
        for i in tl.static_range(NUM_META):
            field = meta[i]
            if PLAN.signed and i == 0:
                field = tl.where(alone, -field, field)
            tl.store(at + i, field, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def write_kernel(
    key,
    value,
    k_pages,
    v_pages,
    k_map,
    v_map,
    slot_mapping,
    positions,
    num_tokens,
    k_factor,
    v_factor,
    k_scale,
    v_scale,
    PAGE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (token blocks, kv heads, 2: K and V). A negative slot skips its token; mapped rows are multiplied by the factor, and
    divided by the per-tensor scale."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    given = token < num_tokens
    index = tl.load(slot_mapping + token, mask=given, other=-1).to(tl.int64)
    mask = index >= 0
    page = index // PAGE
    slot = index % PAGE
    if tl.program_id(2) == 0:
        position = tl.load(positions + token, mask=given, other=0).to(tl.int64) if K.key_mean else token
        write_rows(key, k_pages, k_map, token, head, page, slot, position, given, mask, k_factor, k_scale, K, PRECISION)
    else:
        write_rows(value, v_pages, v_map, token, head, page, slot, token, given, mask, v_factor, v_scale, V, PRECISION)
