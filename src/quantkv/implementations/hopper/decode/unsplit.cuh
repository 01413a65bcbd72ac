// Where every (sequence, kv head) is read by warps of one block, or of the blocks of one cluster: these write its
// results, and no kernel has to combine partials afterwards. Where the cut is INVARIANT warps have whole partials,
// which wait in shared memory for the last.
#pragma once
#include "combine.cuh"

static_assert(!UNSPLIT ||
        WORKER_WARPS == 1 && SEGMENTS == 1 && !EXACT && !SEVERAL_DECODES && KEY_MAP != MATRIX && VALUE_MAP != MATRIX,
    "what is unsplit only");
// Behind what warps have: where blocks of a cluster send each other partials, a packed query row's to the block that
// finishes it, and the counter of their bytes.
constexpr int COUNTER_AT = TABLES_BYTES + (WARPS * (WORKER_BYTES + BARRIER_BYTES) + 15) / 16 * 16,
              INBOX_AT = COUNTER_AT + 16;
// where the cut is INVARIANT, all partials of the packed query rows that a block finishes
constexpr int PARTIALS_AT = COUNTER_AT;
static_assert(INBOX_BYTES == (UNSPLIT && !INVARIANT ? 32 + (PACKED_ROWS + LARGEST_CLUSTER) * PARTIAL_BYTES : 0),
    "room for the packed query rows of a block from each of a cluster");

// x / n of integers below 1,000, in a tenth of the instructions of a division of any.
DI int small_quotient(int x, int n) { return (int)((x + 0.5f) * inverse((float)n)); }

// The (sequence, kv head) of a warp, whose tiles are cut evenly among its warps by no other length than its own: a
// block has several, or one, or a cluster has one.
struct Unsplit {
  int blocks, rank;   // of the cluster, or 1; this block in it
  int warps, first;   // of this block that have it; the first of them
  int s, head;
  int workers;        // with tiles
  bool is_there;      // the last block may have fewer
  DI Unsplit() {}
  DI Unsplit(const AttendArguments& a, int warp) : blocks(a.unsplit_blocks), warps(a.unsplit_warps) {
    const int index = small_quotient(warp, warps), seq_head = own_cluster() * small_quotient(WARPS, warps) + index;
    rank = rank_in_cluster(), first = index * warps;
    is_there = seq_head < a.sequences * KV_HEADS;
    s = is_there ? seq_head / KV_HEADS : 0, head = seq_head % KV_HEADS;  // those of a block are neighbours in a page
  }
  DI void open() const {  // before its tiles, as the blocks of a cluster meet meanwhile
    if (blocks == 1) return;
    if (!INVARIANT && threadIdx.x == 0) open_counter(shared_address(shared) + COUNTER_AT);
    __syncwarp();
    arrive_in_cluster();
  }
  DI void meet() const {  // all blocks of the cluster are there
    if (blocks > 1) wait_for_cluster();
  }
  DI int packed_rows_at_most() const { return (PACKED_ROWS + blocks - 1) / blocks; }  // that a block finishes
  // that this one does, of so many
  DI int own_packed_rows(int packed_rows) const { return max(0, (packed_rows - rank + blocks - 1) / blocks); }
  DI u8* partials(const AttendArguments& a) const {
    return shared + PARTIALS_AT + first / warps * a.partial_slots * packed_rows_at_most() * PARTIAL_BYTES;
  }
  // Where the cut is INVARIANT: of the index-th partial, a packed query row, in the block that finishes it.
  DI u32* place(const AttendArguments& a, int index, int packed_row) const {
    u8* own = partials(a) + (index * packed_rows_at_most() + packed_row / blocks) * PARTIAL_BYTES;
    return (u32*)(blocks > 1 ? in_block(own, packed_row % blocks) : own);
  }
  // Page ids, of which a warp cannot know the first one before the lengths have come: asked for beside these.
  DI void ask_for_pages(const AttendArguments& a, int warp) const {
    constexpr int LINE = 128 / sizeof(int);
    const int at = threadIdx.x % 32 * LINE;
    if (warp == first && is_there && at < a.table_width) prefetch_to_l2(a.block_table + (i64)s * a.table_stride + at);
  }
  DI void take(const Sequences& sequences, int warp, int& tile, int& left) {  // a warp's run
    const int all = is_there ? sequences.tiles(s) : 0, partials = Sequences::partials(all);
    const Cut cut(INVARIANT ? partials : all, blocks * warps);
    // Where partials are fewer than warps, each block has some: what one multiprocessor reads at once is bounded.
    const int worker = INVARIANT ? (warp - first) * blocks + rank : rank * warps + warp - first;
    const auto begin = [&](int i) {
      return INVARIANT ? (int)Sequences::partial_begin(cut.begin(i), all, partials) : cut.begin(i);
    };
    workers = cut.workers, tile = sequences.first_tile(s), left = 0;
    if (worker < workers) tile += begin(worker), left = begin(worker + 1) - begin(worker);
  }
  // The same, with what can be asked for before.
  DI void begin(
      const AttendArguments& a, const Sequences& sequences, int warp, int& head, int& s, int& tile, int& left) {
    *this = Unsplit(a, warp), head = this->head, s = this->s;
    open();
    if (!EITHER) ask_for_pages(a, warp);
    take(sequences, warp, tile, left);
  }
};

// The results of a packed query row, of queries from row `first_query` on.
DI void write_packed_row(
    const AttendArguments& a, const Unsplit& unsplit, Combined& all, i64 first_query, int packed_row) {
  const u16* map = a.value_map ? a.value_map + (i64)unsplit.head * a.value_map_stride : nullptr;
  const int query_head = unsplit.head * GROUP + packed_row % GROUP;
  const i64 out_row = (first_query + packed_row / GROUP) * KV_HEADS * GROUP + query_head;
  conclude<false>(a, all, Combined(), query_head, out_row, map);
  write_outputs(a, all, out_row);
}

// The results of a (sequence, kv head), out of the partials with which its warps ended: a warp a packed query row.
// Blocks of a cluster have a packed query row each in turn, and send each other what their warps come to.
DI void finish_unsplit(
    const AttendArguments& a, const Sequences& sequences, const Unsplit& unsplit, int warp, int packed_row0) {
  const int packed_rows = unsplit.is_there ? min(PACKED_ROWS, sequences.queries(unsplit.s) * GROUP - packed_row0) : 0;
  const u8* own = shared + TABLES_BYTES + unsplit.first * WORKER_BYTES;
  const i64 first_query = sequences.first_query(unsplit.s);
  const int blocks = unsplit.blocks, capacity = unsplit.packed_rows_at_most();
  const bool is_cluster = blocks > 1;
  int count = unsplit.workers, step = WORKER_BYTES;  // partials of a packed query row, and from one to the next
  __syncthreads();
  if (is_cluster) {
    const u32 inbox = shared_address(shared) + INBOX_AT, counter = shared_address(shared) + COUNTER_AT;
    const int mine = max(0, min(unsplit.workers - unsplit.rank * WARPS, WARPS));
    count = (unsplit.workers + WARPS - 1) / WARPS, step = capacity * PARTIAL_BYTES;
    if (threadIdx.x == 0) expect(counter, count * unsplit.own_packed_rows(packed_rows) * (DV * 2 + 8));
    wait_for_cluster();  // all counters are open
    if (mine > 0) {
      combine_partials(own, mine, warp, WARPS, packed_rows, [&](int packed_row, int at, u32 x, u32 y) {
        const int to = packed_row % blocks;
        send(in_block(inbox, to) + (unsplit.rank * capacity + packed_row / blocks) * PARTIAL_BYTES + at * 4,
            in_block(counter, to), x, y);
      });
    }
    wait_for_bytes(counter);
    own = shared + INBOX_AT;
  }
  for (int packed_row = (warp - unsplit.first) * blocks + unsplit.rank; packed_row < packed_rows;
      packed_row += blocks * unsplit.warps) {
    Combined all;
    const u8* partials = own + (is_cluster ? packed_row / blocks : packed_row) * PARTIAL_BYTES;
    all.template add<4>(count, 0, 1, [&](int i) { return (const u32*)(partials + i * step); });
    write_packed_row(a, unsplit, all, first_query, packed_row0 + packed_row);
  }
}

static_assert(Combined::WIDTH <= 1024 / PARTIALS_AT_ONCE, "rows of combiners are larger than Python counts");
// The same where the cut is INVARIANT, to the bit what combine_kernel makes of the same partials: each combiner's share
// of a packed query row by another warp.
DI void finish_unsplit_invariant(
    const AttendArguments& a, const Sequences& sequences, const Unsplit& unsplit, int warp, int packed_row0) {
  const int packed_rows = unsplit.is_there ? min(PACKED_ROWS, sequences.queries(unsplit.s) * GROUP - packed_row0) : 0,
            index = warp - unsplit.first;
  const Partials partials(0, packed_rows > 0 ? own_partials(sequences, unsplit.s, 0, a.partial_slots).count : 0);
  const int mine = unsplit.own_packed_rows(packed_rows), combiners = Combined::combiners_of(partials.count);
  const i64 first_query = sequences.first_query(unsplit.s);
  // as unsplit.py sees to, they fit
  const auto rows = (float(*)[Combined::WIDTH + 4])(shared + TABLES_BYTES + unsplit.first * WORKER_BYTES);
  if (unsplit.blocks > 1) meet_in_cluster(); else __syncthreads();
  for (int i = index; i < mine * combiners; i += unsplit.warps) {
    Combined part;
    part.add((const u32*)unsplit.partials(a), partials, unsplit.packed_rows_at_most(), i / combiners, i % combiners,
        COMBINE_WARPS);
    part.put(rows[i]);
  }
  __syncthreads();
  for (int i = index; i < mine; i += unsplit.warps) {
    Combined all;
    for (int w = 0; w < combiners; w++) all.append(rows[i * combiners + w]);
    write_packed_row(a, unsplit, all, first_query, packed_row0 + unsplit.rank + i * unsplit.blocks);
  }
}
