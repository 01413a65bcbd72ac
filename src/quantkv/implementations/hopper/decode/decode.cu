// Paged decode and verify over quantized pages, written for sm_90.
//
// A warp owns a run of tiles, with its own ring of tiles in shared memory and its own running softmax: no barrier in
// the loop. Scores are K Q^T and outputs V^T P^T by mma.m16n8k16: tokens, then dimensions, fill M = 16, and up to 8
// packed query rows fill N; a packed query row is one query head of one query. For each sequence and kv head that a
// warp touched it has a normalised partial and its base-2 log-sum-exp. Those in which the runs of a block's warps ended
// are combined in the block; combine_kernel combines the rest. Where UNSPLIT, there is one launch: see unsplit.cuh.
// Where that is EITHER, the host says so, or the lengths when they are read: combine_kernel has nothing to do then.
//
// Compile-time, from warps.py: codecs KEY and VALUE; HEAD_SIZE KEY_SIZE VALUE_SIZE GROUP KV_HEADS BLOCK_SIZE
// RECORD_BYTES KEY_MAP KEY_MEAN KEY_SIGNED VALUE_MAP QUERY_BF16 SOFTCAP RANGES SEVERAL_DECODES PDL_AFTER_WRITE
// UNSPLIT EITHER SEGMENTS MAPPED_SEGMENTS EXACT; PACKED_ROWS BY_INTEGERS WARPS WORKER_WARPS BLOCKS_PER_SM STAGES
// TILES_PER_STEP MAX_TILES; what it counts with too: TILE WORKER_BYTES BARRIER_BYTES ARGUMENT_BYTES PARTIAL_BYTES
// PARTIALS_AT_ONCE COMBINE_PACKED_ROWS COMBINE_SEQUENCES COMBINE_WARPS COMBINERS_VARY, and of the codecs
// KEY_DIMENSIONS KEY_BITS KEY_META_BYTES KEY_HALF KEY_ODD_UNIT KEY_TABLE_BYTES TABLES_BYTES VALUE_BITS
// VALUE_META_BYTES.
#include "query_mapper.cuh"
#include "softmax.cuh"
#include "unsplit.cuh"
#include "work.cuh"

constexpr int AHEAD = STAGES - TILES_PER_STEP;  // tiles that are on their way

// The N tiles of a step, from `slot` of the ring on; copies go into the slots `next`, of the step before.
template <int N> DI void step_on(u32 ring, u32& slot, int tile, u32 (&tiles)[N], u32 (&means)[N], u32 (&next)[N]) {
#pragma unroll
  for (int n = 0; n < N; n++) {
    tiles[n] = slot, means[n] = ring + RING_BYTES + (u32)(tile + n) / BUCKET % 16 * (PLACES * 4);
    next[n] = slot >= ring + TILES_PER_STEP * TILE_BYTES ? slot - TILES_PER_STEP * TILE_BYTES
                                                         : slot + AHEAD * TILE_BYTES;
    slot = slot == ring + (STAGES - 1) * TILE_BYTES ? ring : slot + TILE_BYTES;
  }
}

// The scores of a group of key means, to shared memory.
DI void score_key_means(const AttendArguments& a, const OwnQuery& query, int head, int group, u32 to) {
  query.score_key_means(a.key_mean + (i64)head * a.key_mean_stride, group, a.scale / Query::NORM * a.key_mean_gain, to);
}

// What warps ended with, combined.
DI void finish(const AttendArguments& a, const Sequences& sequences, const OwnRun& run, const Unsplit& unsplit,
    bool runs_unsplit, int worker, const Work& work, int packed_row0) {
  const int warp = threadIdx.x / 32;
  int* ended_in = (int*)(shared + TABLES_BYTES + WARPS * WORKER_BYTES) + WARPS;
  if constexpr (UNSPLIT && INVARIANT) finish_unsplit_invariant(a, sequences, unsplit, warp, packed_row0);
  else if (runs_unsplit) finish_unsplit(a, sequences, unsplit, warp, packed_row0);
  else if (!INVARIANT)
    combine_ends(
        a, sequences, ended_in, worker, run.is_of(worker) ? work.seq_head(a) : -1, work.sequence, packed_row0);
}

// Grid (blocks, packed query row groups).
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    decode_kernel(const __grid_constant__ AttendArguments a) {
  const DependentLaunch dependent_launch(a);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  int* begun_in = (int*)(shared + TABLES_BYTES + WARPS * WORKER_BYTES);
  const int worker = blockIdx.x * WARPS + warp, packed_row0 = blockIdx.y * PACKED_ROWS;
  const Sequences sequences = sequences_of(a, a.key_start, a.key_range, INVARIANT ? packed_row0 : 0);
  const Queries queries{a.q, a.q_token, a.q_head};
  const int window = a.window;
  Work work;
  OwnRun run;
  Unsplit unsplit;
  if (EITHER && a.unsplit_spare >= 0) Unsplit(a, warp).ask_for_pages(a, warp);  // beside the lengths
  const bool runs_unsplit = is_unsplit(a, sequences), shares_queries = SHARED_QUERIES && runs_unsplit;
  if (runs_unsplit) unsplit.begin(a, sequences, warp, work.kv_head, work.sequence, work.tile, work.left);
  else {
    run = OwnRun(sequences, a.resident);
    if (!run.is_of(worker - warp)) return;
    run.take(sequences, worker);
    work.take(run);
  }
  GivenQuery given;
  const auto is_mapper = [&](int nt) { return !shares_queries || min(nt, unsplit.warps - 1) == warp - unsplit.first; };
  if (KEY_MAP != MATRIX)
    given.ask(queries, diagonal_of(a, work.kv_head), sequences, work.sequence, work.kv_head, packed_row0, is_mapper);
  u32 ring = shared_address(shared) + TABLES_BYTES + warp * WORKER_BYTES;
  keep(ring);
  Loader loader(sequences, a, work.kv_head, work.sequence, work.tile, work.left);
  QueryMapper mapper(queries, a.key_map, a.key_map_stride, sequences, packed_row0);
  if constexpr (KEY_MAP == MATRIX) {
    if (lane == 0) begun_in[warp] = (INVARIANT ? run.is_of(worker) : work.left > 0) ? work.seq_head(a) : -1;
    __syncthreads();
    mapper.begin(begun_in);
  }
  const float scale = a.scale * (KEY_GAIN / Query::NORM);
  for (int i = 0; i < AHEAD; i++) loader.next({ring + i * TILE_BYTES});
  fill_tables(warp);  // while the first tiles are on their way
  const Lane at(g, c);
  u32 slot = ring;
  OwnQuery query;  // of a (sequence, kv head): where INVARIANT its next partial finds it here
  if constexpr (UNSPLIT && INVARIANT) unsplit.meet();
  if constexpr (KEY_MAP == MATRIX) {
    mapper.finish(begun_in);
    __syncthreads();
  }
  if constexpr (SHARED_QUERIES) {
    if (shares_queries)
      query.share(given, ring + MAPPED_AT, ring - (warp - unsplit.first) * WORKER_BYTES + QUERIES_AT, is_mapper);
  }
  while (work.left > 0) {
    work.begin_stretch(a, sequences);
    if (work.end > work.tile) {
      if (work.needs_queries()) {
        if (!shares_queries)
          query.load(given, KEY_MAP == MATRIX ? mapper.mapped(begun_in, work.seq_head(a)) : ring + MAPPED_AT,
              ring + QUERIES_AT);
        work.begin_sequence(sequences, window);
      }
      Softmax softmax;
      auto step = [&](auto count, auto masked) {
        constexpr int N = decltype(count)::value;
        wait_for_all_copies_but<AHEAD - N>();
        __syncwarp();
        u32 tiles[N], means[N], next[N];
        step_on(ring, slot, work.tile, tiles, means, next);
        softmax.template add<N, decltype(masked)::value>(
            tiles, means, at, query, scale, a.softcap, [&] { loader.next(next); },
            [&](int n, int half, int k) {
              // An empty packed query row sees what the last query does: `seen` depends on no row that is empty.
              const int position = min(work.context + (packed_row0 + own_packed_row(k)) / GROUP, work.len - 1);
              return work.sees(sequences, window, position, (work.tile + n) * TILE + at.token + 8 * half);
            },
            [&](int n, int half) { return (work.tile + n) * TILE + at.token + 8 * half >= work.low; });
        if (CENTRED_LATER && work.tile % 8 < N) softmax.centre();
        work.tile += N;
      };
      while (work.tile < work.end) {
        const bool masked = work.is_masked();
        int stop = min(work.end, work.tile < work.all_in_window ? work.all_in_window
                : work.tile < work.all_see                      ? work.all_see
                                                                : work.end);
        if (KEY_MEAN) {
          const int group = work.key_mean_group(a);
          stop = min(stop, (work.tile / GROUP_TILES + 1) * GROUP_TILES);
          if (group != work.scored)
            score_key_means(a, query, work.kv_head, work.scored = group, ring + RING_BYTES);
        }
        if (!masked)
          while (work.tile + TILES_PER_STEP <= stop) step(Constant<TILES_PER_STEP>{}, Constant<false>{});
        while (work.tile < stop) step(Constant<1>{}, Constant<true>{});
      }
      __syncwarp();  // the ring is free
      const bool goes_on = !INVARIANT && work.left > 0 && work.end < sequences.last_tile(work.sequence);
      u32* held = Work::held(a, worker, packed_row0);
      const int index = INVARIANT ? work.own.place(a) : 0;
      const auto own_end = [&] { return (u32*)(shared + TABLES_BYTES + warp * WORKER_BYTES); };
      u32* to = work.place(a, sequences, run.cut, packed_row0, own_end, goes_on, held);
      const auto place = [&](int r) { return UNSPLIT && INVARIANT ? unsplit.place(a, index, r) : to + r * PARTIAL; };
      softmax.write(place, work.packed_rows(sequences, packed_row0), work.is_held ? held : nullptr);
      work.is_held = goes_on;
    }
    work.end_stretch(a, sequences);
    if (KEY_MAP != MATRIX && !shares_queries && work.left > 0 && work.needs_queries())
      given.ask(queries, diagonal_of(a, work.kv_head), sequences, work.sequence, work.kv_head, packed_row0);
    else given.forget();
  }
  finish(a, sequences, run, unsplit, runs_unsplit, worker, work, packed_row0);
}
