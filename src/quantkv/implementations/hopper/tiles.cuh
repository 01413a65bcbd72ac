// Which warp reads which tiles, and how they get into shared memory.
#include "unpack.cuh"

constexpr int D = HEAD_SIZE, TILE = 16, PER_PAGE = BLOCK_SIZE / TILE;         // a tile: 16 tokens of one kv head
constexpr int MAX_TILES = 1024;  // of one warp: beyond 16k tokens the tensor core's accumulator drifts

// The record of a page and head is K codes | V codes | K meta | V meta; a tile in shared memory has the same order.
constexpr int K_ROW = D * KEY::BITS / 8, V_ROW = D * VALUE::BITS / 8;
constexpr int K_META = meta_bytes(KEY::META), V_META = meta_bytes(VALUE::META);
constexpr int PAGE_V = BLOCK_SIZE * K_ROW, PAGE_KM = PAGE_V + BLOCK_SIZE * V_ROW, PAGE_VM = PAGE_KM + BLOCK_SIZE * K_META;
constexpr int TILE_V = TILE * K_ROW, TILE_KM = TILE_V + TILE * V_ROW, TILE_VM = TILE_KM + TILE * K_META;
constexpr int TILE_BYTES = TILE_VM + TILE * V_META;

template <class T> DI void prefetch(const T* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
DI u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DI void copy16_if(bool p, u32 dst, const u8* src, int bytes) {  // the rest of the 16 bytes becomes zero
  asm volatile("{.reg .pred p; setp.ne.b32 p, %0, 0; @p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3;}" ::"r"((int)p), "r"(dst), "l"(src), "r"(bytes));
}
DI void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DI void wait_for_all_copies_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// 16-byte chunks of a row are permuted by an xor, so that any chunk of 8 successive rows lies in 32 different banks.
template <int ROW> constexpr __device__ int swizzle(int row) {
  return (ROW == 32 ? row >> 2 & 1 : ROW == 64 ? row >> 1 & 3 : ROW == 128 || ROW == 256 ? row & 7 : 0) << 4;
}
template <int ROW> DI int chunk_address(int row, int chunk) { return row * ROW + (chunk << 4 ^ swizzle<ROW>(row)); }

// All tiles of all sequences, of one kv head after the other, form one line that is cut evenly among the workers. Both kernels
// derive the cut from the lengths, so ragged batches balance and a captured graph stays right when lengths change.
struct Batch {
  const int *lens, *cu_queries;  // cu_queries null: `fixed` queries for each sequence
  int sequences, fixed, window;
  DI int queries(int s) const { return cu_queries ? cu_queries[s + 1] - cu_queries[s] : fixed; }
  DI int first_query(int s) const { return cu_queries ? cu_queries[s] : s * fixed; }
  DI int first_tile(int s) const { return window > 0 ? max(0, lens[s] - queries(s) - window + 1) / TILE : 0; }
  DI int last_tile(int s) const { return (lens[s] + TILE - 1) / TILE; }
  DI int tiles(int s) const { return s < sequences ? last_tile(s) - first_tile(s) : 0; }
  DI int total_tiles(int s, int& before) const {  // of all sequences, one head; before: of those before s
    int all = 0, some = 0;
    for (int i = threadIdx.x % 32; i < sequences; i += 32) {
      int n = tiles(i);
      all += n, some += i < s ? n : 0;
    }
    before = __reduce_add_sync(~0u, some);
    return __reduce_add_sync(~0u, all);
  }
};

struct Cut {
  int workers, quota, extra;
  DI Cut(int tiles, int resident) {
    workers = max(min(resident, tiles), (tiles + MAX_TILES - 1) / MAX_TILES);
    quota = workers ? tiles / workers : 0, extra = workers ? tiles % workers : 0;
  }
  DI int begin(int worker) const { return worker * quota + min(worker, extra); }
  DI int worker_of(int tile) const {
    int large = extra * (quota + 1);
    return tile < large ? tile / (quota + 1) : extra + (tile - large) / quota;
  }
};

DI int sequence_of(const Batch& batch, int tile, int& start) {  // start: the place of the sequence's first tile among the head's
  int lane = threadIdx.x % 32;
  start = 0;
  for (int s0 = 0;; s0 += 32) {
    int n = batch.tiles(s0 + lane), end = n;
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

// Brings the tiles of the line, from tile `tile` of sequence `seq` and kv head `head` on, into slots of a ring, one copy group a tile.
// A slot of a page that no token was written to arrives as zero: whatever the page holds there cannot reach the output.
struct Loader {
  const Batch& batch;
  const int* block_table;
  const u8* records;  // this lane's 16 bytes of the head's record in page 0
  u32 page_stride;
  int max_pages, seq, left, page0;  // left: tiles beyond the run
  int next_tile, run_end;           // counted from page0's first; until run_end they are whole, and their page ids at hand
  int ids;                          // lane i holds the id of page page0 + i
  u32 lane, piece, k_to, v_to, meta_from, meta_step;

  DI Loader(const Batch& batch, const int* block_table, int max_pages, const u8* pages, u32 page_stride, int head, int seq, int tile, int left)
      : batch(batch), block_table(block_table), page_stride(page_stride), max_pages(max_pages), left(left), run_end(0), lane(threadIdx.x % 32) {
    piece = min(lane, K_META + V_META - 1);
    const bool key = piece < K_META;
    records = pages + (i64)head * RECORD_BYTES + lane * 16;
    k_to = chunk_address<K_ROW>(lane / (K_ROW / 16), lane % (K_ROW / 16));
    v_to = chunk_address<V_ROW>(lane / (V_ROW / 16), lane % (V_ROW / 16));
    meta_from = (key ? PAGE_KM : PAGE_VM - K_META * 16) + (piece - lane) * 16, meta_step = TILE * (key ? K_META : V_META);
    keep(records), keep(lane), keep(piece), keep(k_to);
    if (K_ROW == V_ROW) v_to = k_to; else keep(v_to);
    open(seq, tile);
  }
  DI void open(int s, int tile) {
    seq = s, run_end = 0;
    load_ids(tile / PER_PAGE);
    next_tile = tile % PER_PAGE;
  }
  DI void load_ids(int page) {
    const int at = page + lane;
    const int* id = block_table + (i64)seq * max_pages + at;
    page0 = page, ids = at < max_pages ? *id : 0;
    if (at + 32 < max_pages) prefetch(id + 32);
  }
  template <int ROW> DI void rows(const u8* src, u32 dst, u32 to, int valid) const {
#pragma unroll
    for (int i = 0; i < (ROW + 31) / 32; i++) {
      const int row = (lane + 32 * i) / (ROW / 16);  // 16 bytes a lane; whole instructions but for the rows of 3-bit codes
      const u32 at = dst + (to ^ swizzle<ROW>(512 / ROW * i)) + 512 * i;
      copy16_if(ROW % 32 == 0 || lane + 32 * i < ROW, at, src + 512 * i, valid == TILE || row < valid ? 16 : 0);
    }
  }
  DI void copy(u32 slot, int valid) {  // the next tile, of which the first `valid` tokens were written
    const int sub = next_tile % PER_PAGE;
    const u8* record = records + (unsigned long long)(u32)__shfl_sync(~0u, ids, next_tile / PER_PAGE) * page_stride;
    rows<K_ROW>(record + sub * TILE * K_ROW, slot, k_to, valid);
    rows<V_ROW>(record + PAGE_V + sub * TILE * V_ROW, slot + TILE_V, v_to, valid);
    // lane i: bytes 16 i .. 16 i + 15 of the tile's meta, the keys' first; the lanes beyond repeat the last
    const int bytes = valid * (int)meta_step / TILE - (piece < K_META ? piece : piece - K_META) * 16;
    copy16_if(true, slot + TILE_KM + piece * 16, record + meta_from + sub * meta_step, valid == TILE ? 16 : min(max(bytes, 0), 16));
    next_tile++;
  }
  DI void turn(u32 slot) {  // what stands between two runs: the next sequence, the next page ids, or a last tile that is not full
    if (left == 0) return;
    while (page0 * PER_PAGE + next_tile == batch.last_tile(seq)) {
      const bool next_head = seq + 1 == batch.sequences;
      records += next_head ? RECORD_BYTES : 0;
      open(next_head ? 0 : seq + 1, batch.first_tile(next_head ? 0 : seq + 1));
    }
    if (next_tile == 32 * PER_PAGE) load_ids(page0 + 32), next_tile = 0;
    const int full = batch.lens[seq] / TILE - page0 * PER_PAGE, run = min(min(left, full - next_tile), 32 * PER_PAGE - next_tile);
    left -= max(run, 1), run_end = next_tile + run;
    copy(slot, run > 0 ? TILE : batch.lens[seq] % TILE);
  }
  template <int N> DI void next(const u32 (&slots)[N]) {
    if (next_tile + N <= run_end) {
#pragma unroll
      for (int n = 0; n < N; n++) copy(slots[n], TILE), commit_copies();
    } else {
#pragma unroll
      for (int n = 0; n < N; n++) {
        if (next_tile < run_end) copy(slots[n], TILE); else turn(slots[n]);
        commit_copies();
      }
    }
  }
};
