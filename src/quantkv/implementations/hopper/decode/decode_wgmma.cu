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
#include "work.cuh"
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
  Work work;
  work.take(run);
  u32 base = shared_address(shared) + TABLES_BYTES + warpgroup * WORKER_BYTES;
  if (base % 1024) __trap();
  GivenQuery given;
  GivenLatents latents;
  bool goes_on = work.left > 0;
  const int tiles = work.left;  // of the run: ask() begins a stretch
  const auto ask = [&] {  // of memory, what would queue behind copies
    if constexpr (LATENTS) {
      work.begin_stretch(a, sequences), work.begin_sequence(sequences, window);
      latents.ask(queries, a, sequences, work.sequence, packed_row0, member);
    } else {
      given.ask(
          queries, diagonal_of(a, work.kv_head), sequences, work.sequence, work.kv_head, packed_row0 + 8 * member);
    }
  };
  if (goes_on) ask();
  KvTileLoader loader(sequences, a, member, work.kv_head, work.sequence, work.tile, tiles);
  u32 slot = base + RING_AT, free_slot = slot + AHEAD * KV_TILE_BYTES;  // of the next KV tile, and of the one before
  for (int i = 0; i < AHEAD; i++) loader.next(slot + i * KV_TILE_BYTES + member * TILE_BYTES);
  fill_tables(warp);  // while the first tiles are on their way
  const WarpgroupLane at(member, warpgroup + 1, base, KEY_GAIN / Query::NORM / a.key_mean_gain);
  const WarpgroupQueries query{base};
  const float scale = a.scale * (LATENTS ? a.key_mean_gain : KEY_GAIN / Query::NORM);
  while (goes_on) {
    if (!LATENTS) work.begin_stretch(a, sequences);
    if (work.end > work.tile) {
      // what a partial ended with was told behind a barrier, and the next one tells behind another: no need to meet
      if (work.needs_queries()) {
        if constexpr (LATENTS)
          LatentQueries{base}.load(latents, free_slot, member, at.barrier);
        else query.load(given, queries, a, sequences, work.sequence, work.kv_head, packed_row0, member);
        stores_before_wgmma();
        meet(at.barrier);
        if (!LATENTS) work.begin_sequence(sequences, window);
        keep(work.all_see), keep(work.all_in_window);
      }
      WarpgroupSoftmax softmax;
      for (; work.tile < work.end; work.tile++) {
        if (KEY_MEAN) {
          const int group = work.key_mean_group(a);
          if (group != work.scored) {
            query.score_key_means(a.key_mean + (i64)work.kv_head * a.key_mean_stride, group,
                a.scale / Query::NORM * a.key_mean_gain, member);
            work.scored = group;
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
        const int key = work.tile * KV_TILE + member * TILE + at.token;  // of this lane, and the one 8 further
        const bool masked = work.is_masked();
        softmax.add(
            slot, at, work.tile, scale, a.softcap, masked, [&] { if (!COPIES_FIRST) copies(); },
            [&](int half, int nt, int e) {
              const int position = work.context + (packed_row0 + nt * 8 + 2 * (lane % 4) + e) / GROUP;
              return work.sees(sequences, window, position, key + 8 * half);
            },
            [&](int half) { return key + 8 * half >= work.low; });
        free_slot = slot,
        slot = slot == base + RING_AT + (STAGES - 1) * KV_TILE_BYTES ? base + RING_AT : slot + KV_TILE_BYTES;
      }
      const int last = LATENTS ? Sequences::Slots{work.low, work.high}.last_tile() : sequences.last_tile(work.sequence);
      const bool is_cut = !INVARIANT && work.left > 0 && work.end < last;
      u32* held = Work::held(a, worker, packed_row0);
      // over queries and weights
      const auto own_end = [&] { return (u32*)(shared + TABLES_BYTES + warpgroup * WORKER_BYTES); };
      u32* to = work.place(a, sequences, run.cut, packed_row0, own_end, is_cut, held);
      softmax.write(to, at, work.packed_rows(sequences, packed_row0), work.is_held ? held : nullptr);
      work.is_held = is_cut;
    }
    work.end_stretch(a, sequences);
    goes_on = work.left > 0;
    if (goes_on && work.needs_queries()) ask();
    else given.forget(), latents.forget();
  }
  int* ended_in = (int*)(shared + TABLES_BYTES + WORKERS * WORKER_BYTES);
  if (!INVARIANT)
    combine_ends(a, sequences, ended_in, worker, run.is_of(worker) ? work.seq_head(a) : -1, work.sequence, packed_row0);
}
