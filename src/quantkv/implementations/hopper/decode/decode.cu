// Paged decode and verify over quantized pages, written for sm_90.
//
// A warp owns a run of tiles, with its own ring of tiles in shared memory and its own running softmax: no barrier in
// the loop. Scores are K Q^T and outputs V^T P^T by mma.m16n8k16: tokens, then dimensions, fill M = 16, and up to 8
// packed query rows fill N; a packed query row is one query head of one query. For each sequence and kv head that a
// warp touched it has a normalised partial and its base-2 log-sum-exp. Those in which the runs of a block's warps ended
// are combined in the block; combine_kernel combines the rest. Where UNSPLIT, there is one launch: see unsplit.cuh.
//
// Compile-time, from warps.py: codecs KEY and VALUE; HEAD_SIZE KEY_SIZE VALUE_SIZE GROUP KV_HEADS BLOCK_SIZE
// RECORD_BYTES KEY_MAP KEY_MEAN KEY_SIGNED VALUE_MAP QUERY_BF16 SOFTCAP RANGES SEVERAL_DECODES PDL_AFTER_WRITE
// UNSPLIT SEGMENTS MAPPED_SEGMENTS EXACT; PACKED_ROWS BY_INTEGERS WARPS WORKER_WARPS BLOCKS_PER_SM STAGES
// TILES_PER_STEP MAX_TILES; what it counts with too: TILE WORKER_BYTES BARRIER_BYTES ARGUMENT_BYTES PARTIAL_BYTES
// PARTIALS_AT_ONCE COMBINE_PACKED_ROWS COMBINE_SEQUENCES COMBINE_WARPS, and of the codecs
// KEY_DIMENSIONS KEY_BITS KEY_META_BYTES KEY_HALF KEY_ODD_UNIT KEY_TABLE_BYTES TABLES_BYTES VALUE_BITS
// VALUE_META_BYTES.
#include "kernels.cuh"
#include "query_mapper.cuh"
#include "softmax.cuh"
#include "unsplit.cuh"

// tiles of the positions that share a row, or 16, of the table of key means
constexpr int BUCKET = 64 / TILE, GROUP_TILES = 16 * BUCKET;
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
    int worker, int head, int s, int packed_row0) {
  const int warp = threadIdx.x / 32;
  int* ended_in = (int*)(shared + TABLES_BYTES + WARPS * WORKER_BYTES) + WARPS;
  if constexpr (UNSPLIT && INVARIANT) finish_unsplit_invariant(a, sequences, unsplit, warp, packed_row0);
  else if constexpr (UNSPLIT) finish_unsplit(a, sequences, unsplit, warp, packed_row0);
  else if (!INVARIANT)
    combine_ends(a, sequences, ended_in, worker, run.is_of(worker) ? head * a.sequences + s : -1, s, packed_row0);
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
  int head, s, tile, left;
  OwnRun run;
  Unsplit unsplit;
  if constexpr (UNSPLIT) unsplit.begin(a, sequences, warp, head, s, tile, left);
  else {
    run = OwnRun(sequences, a.resident);
    if (!run.is_of(worker - warp)) return;
    run.take(sequences, worker);
    head = run.head, s = run.s, tile = run.tile, left = run.left;
  }
  GivenQuery given;
  const auto is_mapper = [&](int nt) { return !SHARED_QUERIES || min(nt, unsplit.warps - 1) == warp - unsplit.first; };
  if (KEY_MAP != MATRIX) given.ask(queries, a.key_map, sequences, s, head, packed_row0, is_mapper);
  u32 ring = shared_address(shared) + TABLES_BYTES + warp * WORKER_BYTES;
  keep(ring);
  Loader loader(sequences, a, head, s, tile, left);
  QueryMapper mapper(queries, a.key_map, a.key_map_stride, sequences, packed_row0);
  if constexpr (KEY_MAP == MATRIX) {
    if (lane == 0) begun_in[warp] = (INVARIANT ? run.is_of(worker) : left > 0) ? head * a.sequences + s : -1;
    __syncthreads();
    mapper.begin(begun_in);
  }
  const float scale = a.scale * (KEY_GAIN / Query::NORM);
  for (int i = 0; i < AHEAD; i++) loader.next({ring + i * TILE_BYTES});
  fill_tables(warp);  // while the first tiles are on their way
  const Lane at(g, c);
  u32 slot = ring;
  bool is_held = false;  // what a stretch of this sequence came to
  OwnQuery query;  // of a (sequence, kv head), as what follows: where INVARIANT its next partial finds it here
  OwnPartials own;
  int len, context, low, high, all_see, all_in_window, scored;  // scored: group of key means, to shared memory
  bool is_new = true;
  if constexpr (UNSPLIT && INVARIANT) unsplit.meet();
  if constexpr (KEY_MAP == MATRIX) {
    mapper.finish(begun_in);
    __syncthreads();
  }
  if constexpr (SHARED_QUERIES)
    query.share(given, ring + MAPPED_AT, ring - (warp - unsplit.first) * WORKER_BYTES + QUERIES_AT, is_mapper);
  while (left > 0) {
    if (INVARIANT && is_new) own = OwnPartials(sequences, s, tile);
    const int end = INVARIANT ? own.end() : min(sequences.last_tile(s), tile + min(left, MAX_TILES));
    if (!INVARIANT || is_new) len = a.seq_lens[s] - sequences.start(s), context = len - sequences.queries(s);
    left -= end - tile;
    if (end > tile) {
      if (!INVARIANT || is_new) {
        if constexpr (!SHARED_QUERIES)
          query.load(given, KEY_MAP == MATRIX ? mapper.mapped(begun_in, head * a.sequences + s) : ring + MAPPED_AT,
              ring + QUERIES_AT);
        low = sequences.first_slot(s), high = sequences.slots(s);
        all_see = (RANGES ? min(context + 1, high) : context + 1) / TILE;
        all_in_window = window > 0 ? (sequences.lowest(len - 1, sequences.start(s)) + TILE - 1) / TILE : 0;
        if (RANGES) all_in_window = max(all_in_window, (low + TILE - 1) / TILE);
        scored = -1, is_new = false;
      }
      Softmax softmax;
      auto step = [&](auto count, auto masked) {
        constexpr int N = decltype(count)::value;
        wait_for_all_copies_but<AHEAD - N>();
        __syncwarp();
        u32 tiles[N], means[N], next[N];
        step_on(ring, slot, tile, tiles, means, next);
        softmax.template add<N, decltype(masked)::value>(
            tiles, means, at, query, scale, a.softcap, [&] { loader.next(next); },
            [&](int n, int half, int k) {
              // An empty packed query row sees what the last query does: `seen` depends on no row that is empty.
              int key = (tile + n) * TILE + at.token + 8 * half,
                  position = min(context + (packed_row0 + own_packed_row(k)) / GROUP, len - 1);
              return key <= position &&
                  (window <= 0 ||
                      (CHUNKED ? key >= sequences.lowest(position, sequences.start(s)) : position - key < window)) &&
                  (!RANGES || key >= low && key < high);
            },
            [&](int n, int half) { return (tile + n) * TILE + at.token + 8 * half >= low; });
        if (CENTRED_LATER && tile % 8 < N) softmax.centre();
        tile += N;
      };
      while (tile < end) {
        // in between, every packed query row sees every token
        const bool masked = tile < all_in_window || tile >= all_see;
        int stop = min(end, tile < all_in_window ? all_in_window : tile < all_see ? all_see : end);
        if (KEY_MEAN) {
          const int group = min(tile / GROUP_TILES, a.key_mean_groups - 1);
          stop = min(stop, (tile / GROUP_TILES + 1) * GROUP_TILES);
          if (group != scored) score_key_means(a, query, head, scored = group, ring + RING_BYTES);
        }
        if (!masked)
          while (tile + TILES_PER_STEP <= stop) step(Constant<TILES_PER_STEP>{}, Constant<false>{});
        while (tile < stop) step(Constant<1>{}, Constant<true>{});
      }
      __syncwarp();  // the ring is free
      const bool goes_on = !INVARIANT && left > 0 && end < sequences.last_tile(s);
      u32* held = a.partials + ((i64)worker * a.all_packed_rows + packed_row0) * PARTIAL;  // nothing else is there yet
      const int index = INVARIANT ? own.place(a) : 0;
      const auto own_end = [&] { return (u32*)(shared + TABLES_BYTES + warp * WORKER_BYTES); };
      u32* to = place_of(a, sequences, own, run.cut, head, s, packed_row0, left, own_end, goes_on, held);
      const auto place = [&](int r) { return UNSPLIT && INVARIANT ? unsplit.place(a, index, r) : to + r * PARTIAL; };
      softmax.write(place, min(PACKED_ROWS, (INVARIANT ? len - context : sequences.queries(s)) * GROUP - packed_row0),
          is_held ? held : nullptr);
      is_held = goes_on;
    }
    if (left > 0 && !is_held && (!INVARIANT || end == own.past)) {
      if (++s == a.sequences) s = 0, head++;
      tile = sequences.first_tile(s), is_new = true;
    }
    if (KEY_MAP != MATRIX && !SHARED_QUERIES && left > 0 && (!INVARIANT || is_new))
      given.ask(queries, a.key_map, sequences, s, head, packed_row0);
    else given.forget();
  }
  finish(a, sequences, run, unsplit, worker, head, s, packed_row0);
}
