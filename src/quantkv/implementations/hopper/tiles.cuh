// How tiles get into shared memory.
#pragma once
#include "sequences.cuh"

// A tile in shared memory has the order of a record.
constexpr int TILE_V = TILE * K_ROW, TILE_KM = TILE_V + TILE * V_ROW, TILE_VM = TILE_KM + TILE * K_META;
constexpr int TILE_BYTES = TILE_VM + TILE * V_META;
constexpr int META_PIECES = K_META + V_META;  // of 16 bytes, of a tile
constexpr int UNUSED_BYTES = META_PIECES > 0 ? 32 * 16 : 0;

// 16-byte chunks of a row are permuted by an xor, so that any chunk of 8 successive rows lies in 32 different banks.
template <int ROW> constexpr __device__ int swizzle(int row) {
  return (ROW == 32 ? row >> 2 & 1 : ROW == 64 ? row >> 1 & 3 : ROW >= 128 && ROW <= 512 && ROW % 128 == 0 ? row & 7 : 0) << 4;
}
template <int ROW> DI int chunk_address(int row, int chunk) { return row * ROW + (chunk << 4 ^ swizzle<ROW>(row)); }

// Brings the tiles of the line, from tile `tile` of sequence `seq` and kv head `head` on, into slots of a ring, one copy group a tile.
// A slot of a page that no token was written to arrives as zero: whatever the page holds there cannot reach the output.
struct Loader {
  const Sequences& sequences;
  const int* block_table;
  const u8* records;  // this lane's 16 bytes of the head's record in page 0
  u32 page_stride;
  int table_width, table_stride, seq, left, page0;  // left: tiles beyond the run
  int next_tile, run_end;           // counted from page0's first; until run_end they are whole, and their page ids at hand
  int ids;                          // lane i holds the id of page page0 + i
  u32 lane, piece, k_to, v_to, meta_from, meta_step, meta_to, meta_moves;

  DI Loader(const Sequences& sequences, const int* block_table, int table_width, int table_stride, const u8* pages, u32 page_stride,
            int head, int seq, int tile, int left, u32 unused)
      : sequences(sequences), block_table(block_table), page_stride(page_stride), table_width(table_width), table_stride(table_stride), left(left),
        run_end(0), lane(threadIdx.x % 32) {
    piece = min(lane, max(META_PIECES, 1) - 1);
    const bool key = piece < K_META;
    records = pages + (i64)head * RECORD_BYTES + lane * 16;
    k_to = chunk_address<K_ROW>(lane / (K_ROW / 16), lane % (K_ROW / 16));
    v_to = chunk_address<V_ROW>(lane / (V_ROW / 16), lane % (V_ROW / 16));
    meta_from = (key ? PAGE_KM : PAGE_VM - K_META * 16) + (piece - lane) * 16, meta_step = TILE * (key ? K_META : V_META);
    meta_moves = lane < META_PIECES, meta_to = meta_moves ? TILE_KM + lane * 16 : unused + lane * 16;
    keep(records), keep(lane), keep(piece), keep(k_to), keep(meta_to), keep(meta_moves);
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
    const int* id = block_table + (i64)seq * table_stride + at;
    page0 = page, ids = at < table_width ? *id : 0;
    if (at + 32 < table_width) prefetch(id + 32);
  }
  template <int ROW> DI void rows(const u8* src, u32 dst, u32 to, int valid, int from) const {
#pragma unroll
    for (int i = 0; i < (ROW + 31) / 32; i++) {
      const int row = (lane + 32 * i) / (ROW / 16);  // 16 bytes a lane; whole instructions but for the rows of 3-bit codes
      const u32 at = dst + (to ^ swizzle<ROW>(512 / ROW * i)) + 512 * i;
      copy16_if(ROW % 32 == 0 || lane + 32 * i < ROW, at, src + 512 * i,
                 (valid == TILE || row < valid) && (!RANGES || row >= from) ? 16 : 0);
    }
  }
  // The next tile, of which the first `valid` tokens were written. The rows before `from` arrive as zero too: they may be anybody's.
  DI void copy(u32 slot, int valid, int from = 0) {
    const int sub = next_tile % PER_PAGE;
    const u8* record = records + (u64)(u32)__shfl_sync(~0u, ids, next_tile / PER_PAGE) * page_stride;
    rows<K_ROW>(record + sub * TILE * K_ROW, slot, k_to, valid, from);
    rows<V_ROW>(record + PAGE_V + sub * TILE * V_ROW, slot + TILE_V, v_to, valid, from);
    // lane i: bytes 16 i .. 16 i + 15 of the tile's meta, the keys' first. Those beyond read the last again, to a place of their own,
    // `unused`: no lane writes what another one does, and a branch around them would cost more.
    if constexpr (META_PIECES > 0) {
      const int bytes = valid * (int)meta_step / TILE - (piece < K_META ? piece : piece - K_META) * 16;
      copy16_if(true, slot * meta_moves + meta_to, record + meta_from + sub * meta_step, valid == TILE ? 16 : min(max(bytes, 0), 16));
    }
    next_tile++;
  }
  DI void turn(u32 slot) {  // what stands between two runs: the next sequence, the next page ids, or a last tile that is not full
    if (left == 0) return;
    while (page0 * PER_PAGE + next_tile == sequences.last_tile(seq)) {
      const bool next_head = seq + 1 == sequences.count;
      records += next_head ? RECORD_BYTES : 0;
      open(next_head ? 0 : seq + 1, sequences.first_tile(next_head ? 0 : seq + 1));
    }
    if (next_tile == 32 * PER_PAGE) load_ids(page0 + 32), next_tile = 0;
    const int from = RANGES ? max(0, sequences.first_slot(seq) - (page0 * PER_PAGE + next_tile) * TILE) : 0;
    const int full = sequences.slots(seq) / TILE - page0 * PER_PAGE;
    const int run = from > 0 ? 0 : min(min(left, full - next_tile), 32 * PER_PAGE - next_tile);
    left -= max(run, 1), run_end = next_tile + run;
    copy(slot, run > 0 || RANGES && next_tile < full ? TILE : sequences.slots(seq) % TILE, from);
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
