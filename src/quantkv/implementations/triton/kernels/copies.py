"""Which pages have a 16-bit copy: `CopiedPages.advance` in four launches, and `CopiedPages.note` in one. What it does stands there.

state: int64, `now | owner [P + 1] | stamp [P + 1] | copy_of [B + 1]` of P copies and B pages. Numbers that change from step to step are not
compiled for. SGLang puts a function of its own in the place of Triton's `next_power_of_2`, so kernels are told."""

import triton
import triton.language as tl

COUNTS = ("sequences", "tokens", "width", "table_stride", "num_copies", "num_blocks", "num_slots", "watched_blocks")
CHUNK = tl.constexpr(1024)  # pages of interest at a time
COPIES = tl.constexpr(64)  # whose ranks a program finds
OTHERS = tl.constexpr(256)  # that they are compared with at a time


@triton.jit
def pages_of_interest(
    table, table_stride, width, seq_lens, num_blocks, s, n, there, SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr
):
    """Keys of sequence s, the page where the recent ones begin, which page column n is, whether it is held, and its number; num_blocks
    for none."""
    at = s + 0 * n  # of the shape of `there`: Triton 3.4 broadcasts no pointer to its mask
    length = tl.load(seq_lens + at, mask=there, other=0).to(tl.int64)
    base = tl.maximum(length - RECENT, 0) // PAGE if RECENT > 0 else (length + PAGE - 1) // PAGE
    index = tl.where(n < SINK, n, base + n - SINK)
    held = there & (index * PAGE < length)
    page = tl.load(table + s * table_stride + tl.minimum(tl.where(held, index, 0), width - 1), mask=there, other=-1).to(tl.int64)
    return length, base, index, held, tl.where(held & (page >= 0) & (page < num_blocks), page, num_blocks)


@triton.jit
def differ(
    rows, copies, page, copy, stored, strides, width, BYTES: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Whether the first `stored` rows of a page, BYTES of each head, are not those beside its copy, from byte FIRST of `width` on."""
    at = tl.arange(0, TILE)
    row = at // BYTES
    looked = (at < PAGE * BYTES) & (row < stored)
    found = tl.zeros(at.shape, tl.int32)
    for head in range(HEADS):
        own = tl.load(rows + page * strides[0] + head * strides[1] + at, mask=looked, other=0)
        kept = tl.load(copies + ((copy * HEADS + head) * PAGE + row) * width + FIRST + at % BYTES, mask=looked, other=0)
        found |= (own != kept).to(tl.int32)
    return tl.max(found, 0)


@triton.jit(do_not_specialize=COUNTS)
def doubt_kernel(
    table, table_stride, width, seq_lens, ends, state, num_copies, num_blocks, watched_blocks, wrong, rows, copies,
    N: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, N): which pages of interest do not hold what was stored with their copies."""
    s = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1).to(tl.int64)
    length, _, index, _, page = pages_of_interest(table, table_stride, width, seq_lens, num_blocks, s, n, n < N, SINK, RECENT, PAGE)
    new = tl.load(ends + s + 1).to(tl.int64) - tl.load(ends + s).to(tl.int64)
    copy = tl.load(state + 2 * num_copies + 3 + page)
    stored = length - new - index * PAGE
    differs = (page * 0).to(tl.int32)
    if (copy >= 0) & (stored > 0):
        page = tl.minimum(page, watched_blocks - 1)
        differs = differ(rows.codes, copies, page, copy, stored, (rows.page, rows.head), CODES + META, CODES, TILE, 0, HEADS, PAGE)
        if META > 0:
            differs |= differ(rows.meta, copies, page, copy, stored, (rows.page, rows.head), CODES + META, META, TILE, CODES, HEADS, PAGE)
    tl.store(wrong + s * N + n, differs)


@triton.jit(do_not_specialize=COUNTS)
def claim_kernel(
    table, table_stride, width, seq_lens, ends, state, num_copies, num_blocks, sequences, slots, tokens, wrong, claims,
    N: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, WATCHED: tl.constexpr,
):  # fmt: skip
    """One program: forgets what is wrong, stamps copies of interest, and lists the pages that claim one: how many, then each."""
    owner = state + 1
    stamp = owner + num_copies + 1
    copy_of = stamp + num_copies + 1
    now = tl.load(state) + 1
    every = tl.arange(0, CHUNK).to(tl.int64)
    if WATCHED:
        for start in range(0, sequences * N, CHUNK):
            at = start + every
            there = at < sequences * N
            _, _, _, _, page = pages_of_interest(
                table, table_stride, width, seq_lens, num_blocks, at // N, at % N, there, SINK, RECENT, PAGE
            )
            copy = tl.load(copy_of + page)
            doubted = there & (copy >= 0) & (tl.load(wrong + at, mask=there, other=0) != 0)
            tl.store(copy_of + page, copy * 0 - 1, mask=doubted)
            tl.store(owner + copy, copy * 0 - 1, mask=doubted)
            tl.store(stamp + copy, copy * 0, mask=doubted)
        tl.debug_barrier()
    count = now * 0
    for start in range(0, sequences * N, CHUNK):
        at = start + every
        there, s, n = at < sequences * N, at // N, at % N
        length, _, index, _, page = pages_of_interest(table, table_stride, width, seq_lens, num_blocks, s, n, there, SINK, RECENT, PAGE)
        copy = tl.load(copy_of + page)
        tl.store(stamp + copy, copy * 0 + now, mask=copy >= 0)
        first = tl.load(ends + s, mask=there, other=0).to(tl.int64)
        new = tl.load(ends + s + 1, mask=there, other=0).to(tl.int64) - first
        own = index * PAGE - (length - new)
        token = tl.minimum(first + own, tokens - 1)
        slot = tl.load(slots + token, mask=there & (own >= 0) & (tokens > 0), other=-1).to(tl.int64)
        once = (n < SINK) | (index >= SINK)
        claim = (page < num_blocks) & (slot == page * PAGE) & once & (copy < 0)
        rank = tl.cumsum(claim.to(tl.int64), 0)
        tl.store(claims + count + rank, page, mask=claim)
        count += tl.sum(claim.to(tl.int64), 0)
    tl.store(claims, count)
    tl.store(state, now)


@triton.jit(do_not_specialize=COUNTS)
def take_kernel(state, num_copies, claims):
    """Grid (copies / COPIES): the n-th oldest copy goes to the n-th page that claims one, unless it is of interest."""
    count, now = tl.load(claims), tl.load(state)
    if count > 0:
        owner = state + 1
        stamp = owner + num_copies + 1
        copy_of = stamp + num_copies + 1
        mine = tl.program_id(0).to(tl.int64) * COPIES + tl.arange(0, COPIES)
        own = tl.load(stamp + mine, mask=mine < num_copies, other=now)
        rank = tl.zeros((COPIES,), tl.int64)
        for start in range(0, num_copies, OTHERS):
            other = start + tl.arange(0, OTHERS).to(tl.int64)
            its = tl.load(stamp + other, mask=other < num_copies, other=now)
            older = (its[None, :] < own[:, None]) | ((its[None, :] == own[:, None]) & (other[None, :] < mine[:, None]))
            rank += tl.sum((older & (other < num_copies)[None, :]).to(tl.int64), 1)
        taken = (own < now) & (rank < count)
        before = tl.load(owner + mine, mask=taken, other=-1)
        page = tl.load(claims + 1 + rank, mask=taken, other=0)
        tl.store(copy_of + before, before * 0 - 1, mask=taken & (before >= 0))
        tl.store(copy_of + page, mine, mask=taken)
        tl.store(owner + mine, page, mask=taken)


@triton.jit
def copy_of_column(
    table, table_stride, width, seq_lens, state, num_copies, num_blocks, s, n, there,
    SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Copy of column n of sequence s: its place, -1 for none, and whether a page is held there."""
    _, _, _, held, page = pages_of_interest(table, table_stride, width, seq_lens, num_blocks, s, n, there, SINK, RECENT, PAGE)
    return tl.load(state + 2 * num_copies + 3 + page), held


@triton.jit(do_not_specialize=COUNTS)
def lay_out_kernel(
    table, table_stride, width, seq_lens, ends, state, num_copies, num_blocks, sequences, slots, tokens, num_slots, step,
    N: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, PAGE: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences / ROWS, or slots / CHUNK if that is more): what the step reads, and where the copies of its tokens go."""
    now = tl.load(state)
    s = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    real = s < sequences
    there = real[:, None] & (n < N)
    copy, held = copy_of_column(
        table, table_stride, width, seq_lens, state, num_copies, num_blocks, s[:, None], n, there, SINK, RECENT, PAGE
    )
    tl.store(state + num_copies + 2 + copy, copy * 0 + now, mask=there & (copy >= 0))
    length = tl.load(seq_lens + s, mask=real, other=0).to(tl.int64)
    new = tl.load(ends + s + 1, mask=real, other=0).to(tl.int64) - tl.load(ends + s, mask=real, other=0).to(tl.int64)
    base = tl.maximum(length - RECENT, 0) // PAGE if RECENT > 0 else (length + PAGE - 1) // PAGE
    pages = (length + PAGE - 1) // PAGE
    begin = tl.min(tl.where((n < SINK) & (copy < 0), n, SINK), 1)
    missing = there & (n >= SINK) & held & (copy < 0)
    end = tl.maximum(base + tl.max(tl.where(missing, n - SINK + 1, 0), 1), begin)
    exact_from = tl.where((end < pages) | (begin == pages), end * PAGE, length)

    n = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    recent = tl.minimum((end - base)[:, None] + n, N - SINK - 1) + SINK
    there = real[:, None] & (n < N - SINK)
    copy, _ = copy_of_column(
        table, table_stride, width, seq_lens, state, num_copies, num_blocks, s[:, None], recent, there, SINK, RECENT, PAGE
    )
    tl.store(step.recent + s[:, None] * (N - SINK) + n, tl.maximum(copy, 0), mask=there)
    tl.store(step.recent_start + s, exact_from, mask=real)
    tl.store(step.between + 2 * s, begin * PAGE, mask=real)
    tl.store(step.between + 2 * s + 1, exact_from, mask=real)
    if SINK > 0:
        there = real[:, None] & (n < SINK)
        copy, _ = copy_of_column(
            table, table_stride, width, seq_lens, state, num_copies, num_blocks, s[:, None], n, there, SINK, RECENT, PAGE
        )
        tl.store(step.sink + s[:, None] * SINK + n, tl.maximum(copy, 0), mask=there)
        tl.store(step.sink_range + 2 * s, begin * 0, mask=real)
        tl.store(step.sink_range + 2 * s + 1, begin * PAGE, mask=real)
    if FEW:
        begin = tl.where((exact_from <= length - new + 1) | (end == begin), begin, 0)
        column = tl.minimum((end - base - begin)[:, None] + n, N - SINK - 1) + SINK
        column = tl.where(n < begin[:, None], n, column)
        there = real[:, None] & (n < N)
        copy, _ = copy_of_column(
            table, table_stride, width, seq_lens, state, num_copies, num_blocks, s[:, None], column, there, SINK, RECENT, PAGE
        )
        tl.store(step.joined + s[:, None] * N + n, tl.maximum(copy, 0), mask=there)
        tl.store(step.joined_start + s, exact_from - begin * PAGE, mask=real)
        tl.store(step.joined_between + 2 * s, begin * PAGE, mask=real)
        tl.store(step.joined_between + 2 * s + 1, exact_from, mask=real)

    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    slot = tl.load(slots + at, mask=at < tokens, other=-1).to(tl.int64)
    page = tl.minimum(tl.where(slot >= 0, slot // PAGE, num_blocks), num_blocks)
    copy = tl.load(state + 2 * num_copies + 3 + page)
    tl.store(step.slots + at, tl.where(copy >= 0, copy * PAGE + slot % PAGE, -1), mask=at < num_slots)


@triton.jit(do_not_specialize=COUNTS)
def note_kernel(
    slots,
    copy_slots,
    tokens,
    num_copies,
    rows,
    copies,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    CODES: tl.constexpr,
    META: tl.constexpr,
    CODES_TILE: tl.constexpr,
    META_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (tokens / TOKENS, heads): keep the K rows that were stored of tokens whose page has a copy."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    target = tl.load(copy_slots + token, mask=(token < tokens) & (slot >= 0), other=-1).to(tl.int64)
    kept = copies + (((target // PAGE) * HEADS + head) * PAGE + target % PAGE)[:, None] * (CODES + META)
    page = (slot // PAGE) * rows.page + head * rows.head
    column = tl.arange(0, CODES_TILE)[None, :]
    mask = (target >= 0)[:, None] & (column < CODES)
    tl.store(kept + column, tl.load(rows.codes + (page + slot % PAGE * CODES)[:, None] + column, mask=mask), mask=mask)
    if META > 0:
        column = tl.arange(0, META_TILE)[None, :]
        mask = (target >= 0)[:, None] & (column < META)
        tl.store(kept + CODES + column, tl.load(rows.meta + (page + slot % PAGE * META)[:, None] + column, mask=mask), mask=mask)
