"""Which keys a tile of queries looks at, and what is added to their scores."""

import triton
import triton.language as tl


@triton.jit
def find_sequence(query_start, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that owns tile `block`: sequence s begins at tile query_start[s] // BLOCK_Q + s, so that all fit."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle).to(tl.int32) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def load_range(ranges, index):
    """Start and end of range `index`."""
    return tl.load(ranges + index * 2).to(tl.int32), tl.load(ranges + index * 2 + 1).to(tl.int32)


@triton.jit
def key_bounds(first, last, seq_len, seq, extras, F: tl.constexpr):
    """Positions from low to before high outside of which no query at positions first .. last sees a key."""
    low = 0
    high = seq_len
    if F.causal == 1:
        high = tl.minimum(last + 1, seq_len)
    if F.chunk > 0:
        low = tl.maximum(first // F.chunk - F.chunk_lookback, 0) * F.chunk
    elif F.window > 0:
        low = tl.maximum(first - F.window + 1, 0)
        high = tl.minimum(high, last + F.window)
    if F.causal == 2:
        causal = tl.load(extras.causal + seq) != 0
        high = tl.where(causal, tl.minimum(high, last + 1), high)
    if F.prefix:
        for r in range(extras.num_ranges):
            start, end = load_range(extras.prefix_ranges, seq * extras.num_ranges + r)
            touched = (start < end) & (start <= last) & (first <= end)
            high = tl.where(touched, tl.maximum(high, end + 1), high)
            if F.prefix_window > 0:
                start = tl.maximum(start, first - F.prefix_window + 1)
            low = tl.where(touched, tl.minimum(low, start), low)
        high = tl.minimum(high, seq_len)
    if F.key_range:
        start, end = load_range(extras.key_range, seq)
        low = tl.maximum(low, start)
        high = tl.minimum(high, end)
    return low, high


@triton.jit
def used_slots(slot, low, high, F: tl.constexpr):
    """Which slots lie from low to before high. low is 0 where nothing bounds the keys from below."""
    used = slot < high
    if F.window > 0 or F.chunk > 0 or F.prefix or F.key_range:
        used = used & (slot >= low)
    return used


@triton.jit
def split_bounds(low, high, split, BLOCK_N: tl.constexpr, F: tl.constexpr):
    """Tiles of slots, from begin to before end, that this split of slots low .. high reads. Of no slot no tile: the table may hold anything
    for the pages around."""
    begin = low // BLOCK_N
    end = tl.where(low < high, tl.cdiv(high, BLOCK_N), begin)
    if F.split_tiles > 0:
        return tl.maximum(begin, split * F.split_tiles), tl.minimum(end, (split + 1) * F.split_tiles)
    else:
        share = tl.cdiv(end - begin, tl.num_programs(1))
        begin += split * share
        return begin, tl.minimum(end, begin + share)


@triton.jit
def whole_tiles(begin, end, first, BLOCK_N: tl.constexpr, F: tl.constexpr):
    """Where the tiles end that all queries see, but for what lies outside of a range: those up to slot `first`, the first query's own. None
    does where all tiles are to be masked."""
    if F.causal == 1 and F.window == 0 and F.chunk == 0 and not F.prefix and not F.one_loop:
        return tl.minimum(tl.maximum((first + 1) // BLOCK_N, begin), end)
    else:
        return begin


@triton.jit
def visible(query, key, key_mask, seq, extras, F: tl.constexpr):
    """Which keys each query sees, by position: query `[M, 1]`, key `[1, N]` -> bool `[M, N]`."""
    distance = query - key
    if F.causal == 1:
        seen = distance >= 0
    elif F.causal == 2:
        seen = (distance >= 0) | (tl.load(extras.causal + seq) == 0)
    else:
        seen = distance == distance
    if F.chunk > 0:
        seen = seen & (query // F.chunk - key // F.chunk <= F.chunk_lookback)
    elif F.window > 0:
        seen = seen & (distance < F.window) & (distance > -F.window)
    if F.prefix:
        both = distance != distance
        for r in range(extras.num_ranges):
            start, end = load_range(extras.prefix_ranges, seq * extras.num_ranges + r)
            both = both | ((start < end) & (start <= query) & (query <= end) & (start <= key) & (key <= end))
        if F.prefix_window > 0:
            both = both & (distance < F.prefix_window)
        seen = seen | both
    return seen & key_mask


@triton.jit
def seen_by_all(key, first, last, F: tl.constexpr):
    """Which keys `[N]` all queries at positions first .. last see; False also where that is not so easily said."""
    if F.causal == 1 and F.chunk == 0 and not F.prefix:
        seen = key <= first
        if F.window > 0:
            seen = seen & (last - key < F.window)
        return seen
    else:
        return key != key


@triton.jit
def bias_score(score, query, key, context, slope, row_mask, extras, F: tl.constexpr):
    """ALiBi and the bias between queries. query `[M, 1]`, key `[1, N]` positions."""
    if F.alibi == 1:
        score += slope * (key - context).to(tl.float32)
    if F.alibi == 2:
        score += slope * -tl.sqrt(tl.maximum(query - key, 0).to(tl.float32))
    if F.qq_bias:
        column = key - context
        row = tl.minimum(query - context, extras.qq_rows - 1)
        inside = (column >= 0) & (column < extras.qq_cols) & row_mask
        # Triton 3.4 broadcasts no pointer to its mask.
        at = tl.broadcast_to(extras.qq_bias + row * extras.qq_stride + column, score.shape)
        score += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return score
