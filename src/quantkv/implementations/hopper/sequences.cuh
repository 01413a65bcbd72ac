// Which warp reads which tiles.
#pragma once
#include "record.cuh"

constexpr int PER_PAGE = BLOCK_SIZE / TILE;  // a tile: TILE tokens of one kv head
static_assert(TILE == 16, "rows of an mma");

// All tiles of all sequences, of one kv head after the other, form one line that is cut evenly among the workers. Both kernels
// derive the cut from the lengths, so ragged batches balance and a captured graph stays right when lengths change.
//
// Keys are counted by slots: that in slot 0 stands at position start(s). Where RANGES is 0 a segment has all keys of a sequence.
struct Sequences {
  const int *lens, *cu_queries, *key_start, *key_range;
  int count, window;
  DI int queries(int s) const { return cu_queries[s + 1] - cu_queries[s]; }
  DI int first_query(int s) const { return cu_queries[s]; }
  DI int start(int s) const { return RANGES && key_start ? key_start[s] : 0; }
  struct Slots {
    int first, past;
    DI int first_tile() const { return first / TILE; }
    DI int last_tile() const { return RANGES && past <= first ? first / TILE : (past + TILE - 1) / TILE; }
  };
  DI Slots all(int s) const {  // slots that some query may see
    const int len = lens[s], begin = start(s);
    int low = 0, high = len;
    if (window > 0) low = max(0, len - queries(s) - window + 1);
    if (RANGES && key_range) low = max(low, key_range[2 * s]), high = min(high, key_range[2 * s + 1]);
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
  DI int total_tiles(int s, int& before) const {  // of all sequences, one head; before: of those before s
    int all = 0, some = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      int n = tiles(i);
      all += n, some += i < s ? n : 0;
    }
    before = __reduce_add_sync(~0u, some);
    return __reduce_add_sync(~0u, all);
  }
  DI int holding(int tile, int& start) const {  // the sequence that has a tile of the head's; start: the place of its first one
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
  DI Cut(int tiles, int resident) {
    workers = min(resident, tiles);
    quota = workers ? tiles / workers : 0, extra = workers ? tiles % workers : 0;
  }
  DI int begin(int worker) const { return worker * quota + min(worker, extra); }
  DI int worker_of(int tile) const {
    int large = extra * (quota + 1);
    return tile < large ? tile / (quota + 1) : extra + (tile - large) / quota;
  }
};
