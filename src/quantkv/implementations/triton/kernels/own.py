"""Where a call's own rows stand, and what is read beside them."""

import triton
import triton.language as tl


@triton.jit
def stored_before(ranges, given, seq, several, context, seq_len):
    """Write which positions of a segment are read, ranges `[S, 2]`; given: those of the call, or None."""
    until = tl.where(several, context, seq_len)
    if given is None:
        tl.store(ranges + seq * 2, 0)
        tl.store(ranges + seq * 2 + 1, until)
    else:
        tl.store(ranges + seq * 2, tl.load(given + seq * 2).to(tl.int32))
        tl.store(ranges + seq * 2 + 1, tl.minimum(tl.load(given + seq * 2 + 1).to(tl.int32), until))


@triton.jit(do_not_specialize=["room", "width", "last"])
def own_rows_kernel(
    query_start,
    seq_lens,
    first_given,
    second_given,
    third_given,
    table,
    start,
    ranges,
    slots,
    room,
    width,
    last,
    SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (sequences, blocks of BLOCK pages of the table). table `[S, width]`: pages of SIZE own rows; start `[S]`: the position of the
    first; ranges `[SEGMENTS + 1, room, 2]`: what is read of each segment, and of own rows, room at least S; slots `[T]`, where SIZE is not
    1: of each row."""
    seq = tl.program_id(0)
    first = tl.load(query_start + seq).to(tl.int32)
    count = tl.load(query_start + seq + 1).to(tl.int32) - first
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    context = seq_len - count
    base = first if SIZE == 1 else first // SIZE + seq  # so that all fit
    page = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table + seq.to(tl.int64) * width + page, tl.minimum(base + page, last), mask=page < width)
    if SIZE > 1:
        row = tl.program_id(1) * (BLOCK * SIZE) + tl.arange(0, BLOCK * SIZE)
        tl.store(slots + first + row, base * SIZE + row, mask=row < count)
    if tl.program_id(1) == 0:
        tl.store(start + seq, context)
        several = count > 1
        if SEGMENTS > 0:
            stored_before(ranges, first_given, seq, several, context, seq_len)
        if SEGMENTS > 1:
            stored_before(ranges + 2 * room, second_given, seq, several, context, seq_len)
        if SEGMENTS > 2:
            stored_before(ranges + 4 * room, third_given, seq, several, context, seq_len)
        own = ranges + (SEGMENTS * room + seq) * 2
        tl.store(own, tl.where(several, context, 0))
        tl.store(own + 1, tl.where(several, seq_len, 0))
