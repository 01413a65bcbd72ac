"""Rows -> pages."""

import triton
import triton.language as tl

from .codes import LARGEST, LARGEST_HALF, saturate
from .tiles import load_rows, meta_pointers, word_pointers


@triton.jit
def write_rows(
    rows, pages, map, token, head, page, slot, position, given, mask, factor, scale, PLAN: tl.constexpr, PRECISION: tl.constexpr
):
    """Encode rows of one kv head and store them at (page, slot), each `[R]`. given: a row is there; mask: it has a slot. What is given
    is loaded before the slots have arrived."""
    CODEC: tl.constexpr = PLAN.codec
    P: tl.constexpr = PLAN.codec.planes
    NUM_META: tl.constexpr = PLAN.codec.num_meta
    DTYPE: tl.constexpr = rows.ptr.dtype.element_ty
    at = rows.ptr + token * rows.stride_token + head * rows.stride_head
    loaded = load_rows(at, given, map, head, position, PLAN, PLAN.offset, PRECISION)
    x = ()
    for p in tl.static_range(P):
        plane = loaded[p].to(tl.float32)
        if PLAN.mapped:
            plane = saturate(plane * factor, LARGEST_HALF if PLAN.rounded and tl.float16 == DTYPE else LARGEST)
            if PLAN.rounded:
                plane = plane.to(DTYPE).to(tl.float32)
        if PLAN.scaled:
            plane = tl.div_rn(plane, tl.zeros(plane.shape, tl.float32) + scale)
        x = x + (plane,)
    real = tl.arange(0, PLAN.width) < PLAN.columns
    words, meta = CODEC.encode(x, real, pages.table, PLAN)
    at = word_pointers(pages, page, slot, head, PLAN)
    stored = mask[:, None] & real[None, :]
    tl.store(at, words, mask=stored)
    if PLAN.codec.bytewise:
        BYTES: tl.constexpr = PLAN.codec.word_bytes
        for i in tl.static_range(1, BYTES):
            tl.store(at + i, words >> 8 * i, mask=stored)
    if NUM_META > 0:
        at = meta_pointers(pages, page, slot, head)
        for i in tl.static_range(NUM_META):
            tl.store(at + i, meta[i], mask=mask)


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
        position = tl.load(positions + token, mask=given, other=0).to(tl.int64) if K.offset else token
        write_rows(key, k_pages, k_map, token, head, page, slot, position, given, mask, k_factor, k_scale, K, PRECISION)
    else:
        write_rows(value, v_pages, v_map, token, head, page, slot, token, given, mask, v_factor, v_scale, V, PRECISION)
