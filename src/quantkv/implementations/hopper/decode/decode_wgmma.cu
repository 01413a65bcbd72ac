// Paged decode and verify for many packed query rows, written for sm_90: as decode.cu, but what is unpacked is shared
// by a consumer warpgroup, four warps.
//
// A consumer warpgroup owns a run of KV tiles, of 64 tokens, with its own ring in shared memory and its own running
// softmax. Scores are K Q^T and outputs V^T P^T by wgmma: tokens, then dimensions, fill M = 64, and up to 64 packed
// query rows fill N. Each warp unpacks the keys of 16 tokens, and a quarter of the dimensions of the values of all 64,
// to registers, where wgmma takes them from; queries and weights it takes from shared memory. So a warp meets the
// others once a KV tile: when the weights are there. Partials are as in decode.cu, with consumer warpgroups in the
// place of warps.
//
// Rows of latents (ROPE_SIZE > 0), which are keys and, but for their rotated dimensions, values, are read once: V^T is
// unpacked from the codes that K was (latents.cuh).
//
// Compile-time, from wgmma.py: as decode.cu; from latents.py: ROPE ROPE_SIZE LATENT_KEYS_AT_ONCE
// LATENT_VALUES_AT_ONCE besides.
#include "kernels.cuh"
#include "consumer_softmax.cuh"

static_assert(!UNSPLIT, "consumer warpgroups leave their partials to combine_kernel");
static_assert(!PDL_AFTER_WRITE, "a consumer warpgroup's loader waits for no write");

// Grid (blocks, packed query row groups).
// In a ring of two KV tiles the next copies begin when a KV tile is there and the warps have met, since no other is on
// its way then. Else they begin where the KV tile's values are multiplied, which spares that barrier.
constexpr bool COPIES_FIRST = LATENTS && STAGES == 2;

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM)
    decode_wgmma_kernel(const __grid_constant__ AttendArguments a) {
  const DependentLaunch dependent_launch(a);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / WORKER_WARPS, member = warp % WORKER_WARPS,
            lane = threadIdx.x % 32;
  const int worker = blockIdx.x * WORKERS + warpgroup, packed_row0 = blockIdx.y * PACKED_ROWS;
  const Sequences sequences = sequences_of(a, a.key_start, a.key_range, INVARIANT ? packed_row0 : 0);
  const Queries queries{a.q, a.q_token, a.q_head};
  const int window = a.window;
  OwnRun run(sequences, a.resident);
  if (!run.is_of(worker - warpgroup)) return;
  run.take(sequences, worker);
  int head = run.head, s = run.s, kv_tile = run.tile, left = run.left;
  u32 base = shared_address(shared) + TABLES_BYTES + warpgroup * WORKER_BYTES;
  if (base % 1024) __trap();
  GivenQuery given;
  if (!LATENTS && left > 0) given.ask(queries, a.key_map, sequences, s, head, packed_row0 + 8 * member);
  KvTileLoader loader(sequences, a, member, head, s, kv_tile, left);
  u32 slot = base + RING_AT, free_slot = slot + AHEAD * KV_TILE_BYTES;  // of the next KV tile, and of the one before
  for (int i = 0; i < AHEAD; i++) loader.next(slot + i * KV_TILE_BYTES + member * TILE_BYTES);
  fill_tables(warp);  // while the first tiles are on their way
  const WarpgroupLane at(member, warpgroup + 1, base, KEY_GAIN / Query::NORM / a.key_mean_gain);
  const WarpgroupQueries query{base};
  const float scale = a.scale * (LATENTS ? a.key_mean_gain : KEY_GAIN / Query::NORM);
  bool is_held = false;  // what a stretch of this sequence came to
  // Of a sequence and kv head, as in decode.cu.
  OwnPartials own;
  // scored: the group of key means whose scores are in shared memory
  int len, context, low, high, all_see, all_in_window, scored;
  bool is_new = true;
  while (left > 0) {
    if (INVARIANT && is_new) own = OwnPartials(sequences, s, kv_tile);
    const int end =
        INVARIANT ? own.end() : min(sequences.last_tile(s), kv_tile + min(left, max(MAX_TILES / WORKER_WARPS, 1)));
    if (!INVARIANT || is_new) len = a.seq_lens[s] - sequences.start(s), context = len - sequences.queries(s);
    left -= end - kv_tile;
    if (end > kv_tile) {
      // what a partial ended with was told behind a barrier, and the next one tells behind another: no need to meet
      if (!INVARIANT || is_new) {
        if constexpr (LATENTS) LatentQueries{base}.load(queries, a, sequences, s, packed_row0, member, at.barrier);
        else query.load(given, queries, a, sequences, s, head, packed_row0, member);
        stores_before_wgmma();
        meet(at.barrier);
        low = sequences.first_slot(s), high = sequences.slots(s);
        all_see = (RANGES ? min(context + 1, high) : context + 1) / KV_TILE;
        all_in_window = window > 0 ? (sequences.lowest(len - 1, sequences.start(s)) + KV_TILE - 1) / KV_TILE : 0;
        if (RANGES) all_in_window = max(all_in_window, (low + KV_TILE - 1) / KV_TILE);
        keep(all_see), keep(all_in_window);
        scored = -1, is_new = false;
      }
      WarpgroupSoftmax softmax;
      for (; kv_tile < end; kv_tile++) {
        if (KEY_MEAN) {
          const int group = min(kv_tile / 16, a.key_mean_groups - 1);
          if (group != scored) {
            query.score_key_means(
                a.key_mean + (i64)head * a.key_mean_stride, group, a.scale / Query::NORM * a.key_mean_gain, member);
            scored = group;
            meet(at.barrier);
          }
        }
        wait_for_all_copies_but<AHEAD - 1>();
        __syncwarp();
        const auto copies = [&] { loader.next(free_slot + member * TILE_BYTES); };
        if (COPIES_FIRST) {
          meet(at.barrier);
          copies();
        }
        const int key = kv_tile * KV_TILE + member * TILE + at.token;  // of this lane, and the one 8 further
        // in between, every packed query row sees every token
        const bool masked = kv_tile < all_in_window || kv_tile >= all_see;
        softmax.add(
            slot, at, kv_tile, scale, a.softcap, masked, [&] { if (!COPIES_FIRST) copies(); },
            [&](int half, int nt, int e) {
              const int k = key + 8 * half, position = context + (packed_row0 + nt * 8 + 2 * (lane % 4) + e) / GROUP;
              return k <= position &&
                  (window <= 0 ||
                      (CHUNKED ? k >= sequences.lowest(position, sequences.start(s)) : position - k < window)) &&
                  (!RANGES || k >= low && k < high);
            },
            [&](int half) { return key + 8 * half >= low; });
        free_slot = slot,
        slot = slot == base + RING_AT + (STAGES - 1) * KV_TILE_BYTES ? base + RING_AT : slot + KV_TILE_BYTES;
      }
      // A run's last partial goes over queries and weights, to be combined; another's sequence is at its end, or goes
      // on.
      const bool goes_on = !INVARIANT && left > 0 && end < sequences.last_tile(s);
      u32* held = a.partials + ((i64)worker * a.all_packed_rows + packed_row0) * PARTIAL;  // nothing else is there yet
      const auto own_end = [&] { return (u32*)(shared + TABLES_BYTES + warpgroup * WORKER_BYTES); };
      u32* to = place_of(a, sequences, own, run.cut, head, s, packed_row0, left, own_end, goes_on, held);
      softmax.write(to, at, min(PACKED_ROWS, (INVARIANT ? len - context : sequences.queries(s)) * GROUP - packed_row0),
          is_held ? held : nullptr);
      is_held = goes_on;
    }
    if (left > 0 && !is_held && (!INVARIANT || end == own.past)) {
      if (++s == a.sequences) s = 0, head++;
      kv_tile = sequences.first_tile(s), is_new = true;
    }
    if (LATENTS) continue;
    if (left > 0 && (!INVARIANT || is_new)) given.ask(queries, a.key_map, sequences, s, head, packed_row0 + 8 * member);
    else given.forget();
  }
  int* ended_in = (int*)(shared + TABLES_BYTES + WORKERS * WORKER_BYTES);
  if (!INVARIANT)
    combine_ends(a, sequences, ended_in, worker, run.is_of(worker) ? head * a.sequences + s : -1, s, packed_row0);
}
