// Which warp reads which tiles.
#pragma once
#include "arguments.cuh"
#include "record.cuh"

// tiles; pages of a tile
constexpr int PER_PAGE = BLOCK_SIZE < TILE ? 1 : BLOCK_SIZE / TILE, PAGES = BLOCK_SIZE < TILE ? TILE / BLOCK_SIZE : 1;
static_assert(TILE == 16, "rows of an mma");  // a tile: TILE tokens of one kv head
static_assert(PER_PAGE * TILE == PAGES * BLOCK_SIZE && PAGES <= 2, "whole tiles of a page, or two pages of a tile");
// of a block: warps that work alone, or consumer warpgroups that take WORKER_WARPS tiles at a time
constexpr int WORKERS = WARPS / WORKER_WARPS;
constexpr int KV_TILE = WORKER_WARPS * TILE;      // tokens of what the line is cut into

// All tiles of all sequences, of one kv head after the other, form one line that is cut evenly among the workers. Both
// kernels derive the cut from the lengths, so ragged batches balance and a captured graph stays right when lengths
// change. Where workers are consumer warpgroups, its tiles are KV tiles of WORKER_WARPS tiles.
//
// Where the cut is INVARIANT a sequence is cut by its own number of tiles alone: a worker has the partials that begin
// in its part of the line.
//
// Keys are counted by slots: that in slot 0 stands at position start(s). Where RANGES is 0 a segment has all keys of a
// sequence.
struct Sequences {
  const int *lens, *cu_queries, *key_start, *key_range;
  // window: of a chunk, where they are CHUNKED; packed_row0: the first packed query row that is served
  int count, window, lookback, packed_row0;
  DI int queries(int s) const { return cu_queries[s + 1] - cu_queries[s]; }
  DI int first_query(int s) const { return cu_queries[s]; }
  DI int start(int s) const { return RANGES && key_start ? key_start[s] : 0; }
  // The first key in the window of a query: both are counted from position `start` on.
  DI int lowest(int query, int start = 0) const {
    return CHUNKED ? max((query + start) / window - lookback, 0) * window - start : query - window + 1;
  }
  struct Slots {
    int first, past;
    DI int first_tile(int tokens = KV_TILE) const { return first / tokens; }
    DI int last_tile(int tokens = KV_TILE) const {
      return RANGES && past <= first ? first / tokens : (past + tokens - 1) / tokens;
    }
  };
  DI Slots all(int s) const {  // slots that some query may see
    const int len = lens[s], begin = start(s);
    int low = 0, high = len;
    if (window > 0) low = max(0, lowest(len - queries(s)));
    if (RANGES && key_range) low = max(low, key_range[2 * s]), high = min(high, key_range[2 * s + 1]);
    if (INVARIANT && queries(s) * GROUP <= packed_row0) low = high = 0;
    return {RANGES ? max(0, low - begin) : low, high - begin};
  }
  DI int first_slot(int s) const { return all(s).first; }
  DI int slots(int s) const { return all(s).past; }  // to the last
  DI int first_tile(int s) const { return window > 0 || RANGES ? all(s).first_tile() : 0; }
  DI int last_tile(int s) const { return all(s).last_tile(); }
  DI int tiles(int s) const {
    if (s >= count) return 0;
    const Slots slots = all(s);
    return slots.last_tile() - slots.first_tile();
  }
  // Of a sequence of so many tiles (why so many: warps.py). All have as many, to a step.
  static DI u32 partials(u32 all) {
    u32 n = max(1, min(all / PARTIAL_LEAST, PARTIALS_FIRST));
    const auto is_long = [&] {
      return n == PARTIALS_FIRST ? all >= 2 * n * PARTIAL_LEAST
                                 : all > n * PARTIAL_MOST && n * KV_HEADS < PARTIALS_ENOUGH;
    };
    while (n >= PARTIALS_FIRST && (is_long() || all > n * max(MAX_TILES / WORKER_WARPS, 1))) n *= 2;
    return n;
  }
  // x / count, which is a power of two, or three of them, where it is not small
  static DI u32 over_partials(u32 x, u32 count) {
    if (count < PARTIALS_FIRST) return x / count;
    return (PARTIALS_FIRST == 6 ? __umulhi(x, 0xaaaaaaabu) : x) >> (31 - __clz(count));
  }
  static_assert(PARTIALS_FIRST == 6 || PARTIALS_FIRST == 8, "what count is");
  // The first partial that does not begin before, and where the i-th of so many does: at a whole step.
  static DI u32 partial_at(u32 within, u32 all, u32 count) {
    return all ? (whole_steps(within + STEP - 1) * count + all - 1) / all : 0;
  }
  static DI u32 partial_begin(u32 i, u32 all, u32 count) {
    return i < count ? whole_steps(over_partials(i * all, count)) : all;
  }
  // No partial is as short as two steps, so that none is empty; only tests have a MAX_TILES by which one could be.
  static constexpr u32 STEP = PARTIAL_LEAST >= 2 * TILES_PER_STEP && PARTIAL_MOST >= 4 * TILES_PER_STEP &&
              MAX_TILES >= 4 * TILES_PER_STEP * WORKER_WARPS
      ? TILES_PER_STEP : 1;
  static DI u32 whole_steps(u32 tiles) { return tiles / STEP * STEP; }
  // From `within` tiles of a sequence to the first partial that does not begin before, or to the sequence's end.
  DI int to_next_partial(int s, int within) const {
    const u32 all = tiles(s), count = partials(all);
    return partial_begin(partial_at(within, all, count), all, count) - within;
  }
  // Makes a run of `left` tiles from `tile` on the partials that begin in it; past: the place behind it in the line of
  // its head. Only a run that ends in another sequence has to look for the one that is there.
  DI void take_partials(int& head, int& s, int& tile, int& left, int past) const {
    if (left == 0) return;
    const int within = tile - first_tile(s), all = tiles(s), skipped = to_next_partial(s, within);
    int beyond = 0;
    if (within + left < all) {
      beyond = to_next_partial(s, within + left);
    } else if (within + left > all) {
      int start;
      const int last = holding(past, start);
      beyond = to_next_partial(last, past - start);
    }
    left += beyond - skipped, tile += skipped;
    if (left == 0 || within + skipped < all) return;
    if (++s == count) s = 0, head++;
    tile = first_tile(s);
  }
  DI void most_and_total_tiles(int& most, int& all) const {  // of a sequence, of one head; of all of them
    most = all = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const int n = tiles(i);
      most = max(most, n), all += n;
    }
    most = __reduce_max_sync(~0u, most), all = __reduce_add_sync(~0u, all);
  }
  DI int total_tiles(int s, int& before) const {  // of all sequences, one head; before: of those before s
    int all = 0, some = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      int n = tiles(i);
      all += n, some += i < s ? n : 0;
    }
    before = __reduce_add_sync(~0u, some);
    return __reduce_add_sync(~0u, all);
  }
  // the sequence that has a tile of the head's; start: the place of its first one
  DI int holding(int tile, int& start) const {
    int lane = threadIdx.x % 32;
    start = 0;
    for (int s0 = 0;; s0 += 32) {
      int n = tiles(s0 + lane), end = n;
      for (int k = 1; k < 32; k <<= 1) { int up = __shfl_up_sync(~0u, end, k); if (lane >= k) end += up; }
      u32 past = __ballot_sync(~0u, start + end > tile);
      if (past) {
        int hit = __ffs(past) - 1;
        start += __shfl_sync(~0u, end - n, hit);
        return s0 + hit;
      }
      start += __shfl_sync(~0u, end, 31);
    }
  }
};

// No more workers than warps that are resident: one more would wait for another to end, and double the time.
struct Cut {
  int workers, quota, extra;
  DI Cut() {}
  DI Cut(int tiles, int resident) {
    workers = min(resident, tiles);
    quota = workers ? tiles / workers : 0, extra = tiles - quota * workers;
  }
  DI int begin(int worker) const { return worker * quota + min(worker, extra); }
  DI int worker_of(int tile) const {
    int large = extra * (quota + 1);
    return tile < large ? tile / (quota + 1) : extra + (tile - large) / quota;
  }
};

// What a worker has of the line: `left` tiles, from tile `tile` of sequence s and kv head `head` on.
struct OwnRun {
  Cut cut;
  int line, head, s, tile, left;  // line: tiles of a kv head
  DI OwnRun() {}
  DI OwnRun(const Sequences& sequences, int resident) {
    int before;
    line = sequences.total_tiles(0, before), cut = Cut(line * KV_HEADS, resident);
  }
  DI bool is_of(int worker) const { return worker < cut.workers; }
  // of a block in which some worker has one: another's may be of no tiles
  DI void take(const Sequences& sequences, int worker) {
    const int begin = is_of(worker) ? cut.begin(worker) : 0;
    int start;
    left = is_of(worker) ? cut.begin(worker + 1) - begin : 0, head = begin / line;
    s = sequences.holding(begin - head * line, start), tile = sequences.first_tile(s) + begin - head * line - start;
    if (INVARIANT) sequences.take_partials(head, s, tile, left, (begin + left) % line);
  }
};

DI Sequences sequences_of(const AttendArguments& a, const int* key_start, const int* key_range, int packed_row0 = 0) {
  return {a.seq_lens, a.cu_queries, key_start, key_range, a.sequences, a.window, a.chunk_lookback, packed_row0};
}

// Whether each (sequence, kv head) is read by its own warps. Where that is EITHER, as the lengths have it: if the
// longest run of a warp then has few tiles more than an even share of all. All warps of a call come to the same.
DI bool is_unsplit(const AttendArguments& a, const Sequences& sequences) {
  if (!EITHER) return UNSPLIT;
  if (a.unsplit_spare < 0) return false;  // as the host knows
  int most, all;
  sequences.most_and_total_tiles(most, all);
  const int warps = a.unsplit_blocks * a.unsplit_warps, run = (most + warps - 1) / warps;
  return (i64)(run - a.unsplit_spare) * a.resident <= (i64)all * KV_HEADS;
}
