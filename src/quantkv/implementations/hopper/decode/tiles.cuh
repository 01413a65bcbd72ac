// How tiles get into shared memory.
#pragma once
#include "sequences.cuh"

// A tile in shared memory has the order of a record.
constexpr int TILE_V = TILE * K_ROW, TILE_KM = TILE_V + TILE * SECOND_ROW, TILE_VM = TILE_KM + TILE * K_META;
constexpr int TILE_BYTES = TILE_VM + TILE * SECOND_META;
constexpr int META_CHUNKS = K_META + SECOND_META;  // of 16 bytes, of a tile
enum { VALUES_AT = LATENTS ? 0 : TILE_V, VALUE_META_AT = LATENTS ? TILE_KM : TILE_VM };
constexpr int HELD = 32 * PER_PAGE / PAGES;  // tiles of which page ids are held
// a tile may begin with rows that are nobody's, or whose page has been given away
constexpr bool FOREIGN = RANGES || PAGES == 2;
#ifndef SPARE_LANES_COPY
#define SPARE_LANES_COPY true  // benchmarks/small_run.py gives false: a checker of races takes what they copy for one
#endif

// 16-byte chunks of a row are permuted by an xor, so that any chunk of 8 successive rows lies in 32 different banks.
// Rows of no power of two lie as they come: their chunks meet in fewer banks.
template <int ROW> constexpr __device__ int swizzle(int row) {
  constexpr bool EIGHT = ROW == 128 || ROW == 256 || ROW == 512 || ROW == 1024;
  return (ROW == 32 ? row >> 2 & 1 : ROW == 64 ? row >> 1 & 3 : EIGHT ? row & 7 : 0) << 4;
}
template <int ROW> DI int chunk_address(int row, int chunk) { return row * ROW + (chunk << 4 ^ swizzle<ROW>(row)); }
template <int ROW> DI int chunk_place(u32 n) {  // of the n-th chunk of a tile
  if constexpr (ROW % 16) return n * 16; else return chunk_address<ROW>(n / (ROW / 16), n % (ROW / 16));
}

// Copies a tile of a kv head into shared memory, every lane its part. records: this lane's 16 bytes of the head's
// record in page 0.
struct TileCopier {
  u32 lane, chunk, k_to, v_to, meta_from, meta_step, meta_to, second_page;

  DI TileCopier(const u8*& records, const u8* pages, int head) : lane(threadIdx.x % 32) {
    chunk = lane % max(META_CHUNKS, 1);
    const bool key = chunk < K_META;
    records = pages + (i64)head * RECORD_BYTES + lane * 16;
    k_to = chunk_place<K_ROW>(lane), v_to = chunk_place<SECOND_ROW>(lane);
    meta_from = (key ? PAGE_KM : PAGE_VM - K_META * 16) + (chunk - lane) * 16,
    meta_step = TILE * (key ? K_META : SECOND_META);
    if (PAGES == 2) {  // half of them are of the second page
      const u32 half = max((key ? K_META : SECOND_META) / 2, 1);
      second_page = (key ? chunk : chunk - K_META) >= half, meta_from -= second_page * half * 16;
    }
    meta_to = TILE_KM + chunk * 16;
    keep(records), keep(lane), keep(chunk), keep(k_to), keep(meta_to);
    if (K_ROW == SECOND_ROW) v_to = k_to; else keep(v_to);
  }
  // Bytes of the chunk'th 16 of a tile's rows that are copied. Rows before `from` that share it with others come along:
  // codes that no packed query row sees, and nothing but integers.
  template <int ROW> static DI int wanted(u32 chunk, int valid, int from) {
    if constexpr (ROW % 16 == 0) {
      const int row = chunk / (ROW / 16);
      return (valid == TILE || row < valid) && (!FOREIGN || row >= from) ? 16 : 0;
    } else {
      const int begin = chunk * 16;
      return FOREIGN && begin + 15 < from * ROW ? 0 : valid == TILE ? 16 : min(max(valid * ROW - begin, 0), 16);
    }
  }
  // src: of the first page, and of the second less the bytes of the first.
  template <int ROW> DI void rows(const u8* const (&src)[PAGES], u32 dst, u32 to, int valid, int from) const {
#pragma unroll
    for (int i = 0; i < (ROW + 31) / 32; i++) {
      // 16 bytes a lane; whole instructions where rows are whole chunks of even number
      const u32 chunk = lane + 32 * i;
      const u32 at = dst + (to ^ swizzle<ROW>(512 * i / ROW)) + 512 * i;
      const u8* from_page = PAGES == 2 && chunk >= ROW / 2 ? src[PAGES - 1] : src[0];
      copy16_if(ROW % 32 == 0 || chunk < ROW, at, from_page + 512 * i, wanted<ROW>(chunk, valid, from));
    }
  }
  // Which page of a tile stands in for its i-th: one without tokens to read may be any number.
  static DI int page_of(int i, int valid, int from) {
    return PAGES == 1 || (i * BLOCK_SIZE < valid && (i > 0 || from < BLOCK_SIZE)) ? i : 1 - i;
  }
  // Tile `sub` of a page, or that of two, of which the first `valid` tokens were written: a slot that no token was
  // written to arrives as zero, and so do the rows before `from`, which may be anybody's.
  DI void copy(
      const u8* records, u32 page_stride, const u32 (&pages)[PAGES], int sub, u32 slot, int valid, int from) const {
    const u8 *keys[PAGES], *values[PAGES], *metas[PAGES];
#pragma unroll
    for (int i = 0; i < PAGES; i++) {
      const u8* record = records + (u64)pages[i] * page_stride;
      keys[i] = record + sub * TILE * K_ROW - i * BLOCK_SIZE * K_ROW, metas[i] = record;
      values[i] = record + PAGE_V + sub * TILE * SECOND_ROW - i * BLOCK_SIZE * SECOND_ROW;
    }
    rows<K_ROW>(keys, slot, k_to, valid, from);
    rows<SECOND_ROW>(values, slot + TILE_V, v_to, valid, from);
    // lane i: bytes 16 i .. 16 i + 15 of the tile's meta, the keys' first. Spare lanes do what one of these does: a
    // branch around them would cost more, and so did a place of its own for each: 25 accesses to shared memory for one
    // copy.
    if constexpr (META_CHUNKS > 0) {
      const int bytes = valid * (int)meta_step / TILE - (chunk < K_META ? chunk : chunk - K_META) * 16;
      const u8* record = PAGES == 2 && second_page ? metas[PAGES - 1] : metas[0];
      // meta may begin before a lane's 16 bytes
      const i64 from_lane = PAGE_KM >= 31 * 16 ? (i64)meta_from : (i64)(int)meta_from;
      copy16_if(SPARE_LANES_COPY || lane < META_CHUNKS, slot + meta_to, record + from_lane + sub * meta_step,
          valid == TILE ? 16 : min(max(bytes, 0), 16));
    }
  }
};

// Brings the tiles of the line, from tile `tile` of sequence `seq` and kv head `head` on, into slots of a ring, one
// copy group a tile. A slot of a page that no token was written to arrives as zero: whatever the page holds there
// cannot reach the output.
struct Loader {
  const Sequences& sequences;
  const int* block_table;
  const u8* records;
  u32 page_stride;
  int table_width, table_stride, seq, left, page0;  // left: tiles beyond the run
  // counted from page0's first; until run_end they are whole, and their page ids at hand
  int next_tile, run_end;         
  int ids;                          // lane i holds the id of page page0 + i
  TileCopier tiles;                 // last: the order of what a lane holds decides in which registers

  DI Loader(const Sequences& sequences, const AttendArguments& a, int head, int seq, int tile, int left)
      : sequences(sequences), block_table(a.block_table), page_stride((u32)a.page_stride), table_width(a.table_width),
        table_stride(a.table_stride), left(left), run_end(0), tiles(records, a.pages, head) {
    open(seq, tile);
  }
  DI void open(int s, int tile) {
    seq = s, run_end = 0;
    load_ids(tile / PER_PAGE * PAGES);
    next_tile = tile % PER_PAGE;
  }
  DI int first() const { return page0 * PER_PAGE / PAGES; }  // tile of page0
  DI void load_ids(int page) {
    const int at = page + tiles.lane;
    const int* id = block_table + (i64)seq * table_stride + at;
    page0 = page, ids = at < table_width ? *id : 0;
    if (at + 32 < table_width) prefetch(id + 32);
  }
  // The next tile, of which the first `valid` tokens were written; see TileCopier.
  DI void copy(u32 slot, int valid, int from = 0) {
    const int sub = next_tile % PER_PAGE;
    u32 pages[PAGES];
#pragma unroll
    for (int i = 0; i < PAGES; i++)
      pages[i] = __shfl_sync(~0u, ids, next_tile / PER_PAGE * PAGES + TileCopier::page_of(i, valid, from));
    tiles.copy(records, page_stride, pages, sub, slot, valid, from);
    next_tile++;
  }
  // what stands between two runs: the next sequence, the next page ids, or a last tile that is not full
  DI void next_run(u32 slot) {
    if (left == 0) return;
    while (first() + next_tile == sequences.last_tile(seq)) {
      const bool next_head = seq + 1 == sequences.count;
      records += next_head ? RECORD_BYTES : 0;
      open(next_head ? 0 : seq + 1, sequences.first_tile(next_head ? 0 : seq + 1));
    }
    if (next_tile == HELD) load_ids(page0 + 32), next_tile = 0;
    const int from = FOREIGN ? max(0, sequences.first_slot(seq) - (first() + next_tile) * TILE) : 0;
    const int full = sequences.slots(seq) / TILE - first();
    int run = from > 0 ? 0 : min(min(left, full - next_tile), HELD - next_tile);
    if constexpr (PDL_AFTER_WRITE) {
      const int old =
          (sequences.lens[seq] - sequences.queries(seq) - sequences.start(seq)) / TILE - first() - next_tile;
      if (old > 0) run = min(run, old); else wait_for_previous_kernel();
    }
    left -= max(run, 1), run_end = next_tile + run;
    copy(slot, run > 0 || FOREIGN && next_tile < full ? TILE : sequences.slots(seq) % TILE, from);
  }
  template <int N> DI void next(const u32 (&slots)[N]) {
    if (next_tile + N <= run_end) {
#pragma unroll
      for (int n = 0; n < N; n++) copy(slots[n], TILE), commit_copies();
    } else {
#pragma unroll
      for (int n = 0; n < N; n++) {
        if (next_tile < run_end) copy(slots[n], TILE); else next_run(slots[n]);
        commit_copies();
      }
    }
  }
};
