// Where every sequence and kv head (a pair) is read by warps of one block, or of the blocks of one cluster: these write its results,
// and no kernel has to merge pieces afterwards.
#pragma once
#include "combine.cuh"

static_assert(!WHOLE_PAIRS || TEAM == 1 && SEGMENTS == 1 && !EXACT && !FOLLOWS && !INVARIANT && KEY_MAP != MATRIX && VALUE_MAP != MATRIX,
              "what whole pairs go with");
constexpr int MERGED_AT = TABLES_BYTES + COLUMNS * PIECE_BYTES;  // behind the first warp's piece: what a block's pieces come to

// The pair of a warp, whose tiles are cut evenly among its warps by no other length than its own: a block has several pairs, or one,
// or a cluster has one.
struct OwnPair {
  int blocks, rank;   // of the cluster, or 1; this block in it
  int warps, first;   // of this block that have the pair; the first of them
  int s, head;
  int workers;        // with tiles
  bool is_there;      // the last block may have fewer pairs
  DI OwnPair() {}
  DI OwnPair(const AttendArguments& a, int warp) : blocks(a.pair_blocks), warps(a.pair_warps) {
    rank = blockIdx.x % blocks, first = warp / warps * warps;
    const int pair = blockIdx.x / blocks * (WARPS / warps) + warp / warps;
    is_there = pair < a.sequences * KV_HEADS;
    s = is_there ? pair / KV_HEADS : 0, head = pair % KV_HEADS;  // a block's pairs are neighbours in a page
  }
  // Page ids, of which a warp cannot know the first one before the lengths have come: asked for beside these.
  DI void ask_for_pages(const AttendArguments& a, int warp) const {
    constexpr int LINE = 128 / sizeof(int);
    const int at = threadIdx.x % 32 * LINE;
    if (warp == first && is_there && at < a.table_width) prefetch_to_l2(a.block_table + (i64)s * a.table_stride + at);
  }
  DI void take(const Sequences& sequences, int warp, int& tile, int& left) {  // a warp's run
    const Cut cut(is_there ? sequences.tiles(s) : 0, blocks * warps);
    const int worker = rank * warps + warp - first, begin = worker < cut.workers ? cut.begin(worker) : 0;
    workers = cut.workers;
    tile = sequences.first_tile(s) + begin, left = worker < workers ? cut.begin(worker + 1) - begin : 0;
  }
};

// The results of a pair, out of the pieces with which its warps ended: a warp a column.
DI void finish_pair(const AttendArguments& a, const Sequences& sequences, const OwnPair& pair, int warp, int column0) {
  const int columns = pair.is_there ? min(COLUMNS, sequences.queries(pair.s) * GROUP - column0) : 0;
  const u8* own = shared + TABLES_BYTES + pair.first * WORKER_BYTES;
  const i64 first_row = sequences.first_query(pair.s);  // behind a meeting of blocks it would be far away
  const u16* map = a.value_map ? a.value_map + (i64)pair.head * a.value_map_stride : nullptr;
  const bool is_cluster = pair.blocks > 1;
  __syncthreads();
  if (is_cluster) {
    const int mine = min(pair.workers - pair.rank * WARPS, WARPS);
    if (warp < mine) merge_pieces(own, mine, warp, columns, (u32*)(shared + MERGED_AT));
    meet_cluster();
  }
  for (int column = (warp - pair.first) * pair.blocks + pair.rank; column < columns; column += pair.blocks * pair.warps) {
    Merged all, none;
    const int count = is_cluster ? (pair.workers + WARPS - 1) / WARPS : pair.workers;
    all.template add<4>(count, 0, 1, [&](int i) {
      return (const u32*)(is_cluster ? in_block(shared + MERGED_AT, min(i, count - 1)) : own + i * WORKER_BYTES) + column * PIECE;
    });
    const int query_head = pair.head * GROUP + (column0 + column) % GROUP;
    const i64 out_row = (first_row + (column0 + column) / GROUP) * KV_HEADS * GROUP + query_head;
    conclude<false>(a, all, none, query_head, out_row, map);
    write_outputs(a, all, out_row);
  }
  if (is_cluster) leave_cluster();  // no block's shared memory goes away while another reads it
}
