// Paged decode and verify over quantized pages, written for sm_90.
//
// A warp owns a run of tiles, with its own ring of tiles in shared memory and its own running softmax: no barrier in the loop.
// Scores are K Q^T and outputs V^T P^T by mma.m16n8k16: tokens, then dimensions, fill M = 16, and up to 8 query columns fill N;
// a column is one query head of one query. For each sequence and kv head that a warp touched it has a normalised partial and its
// base-2 log-sum-exp. Those in which the runs of a block's warps ended are merged in the block; combine_kernel merges the rest.
//
// Compile-time: HEAD_SIZE GROUP KV_HEADS BLOCK_SIZE RECORD_BYTES KEY VALUE KEY_MAP KEY_OFFSET VALUE_MAP QUERY_BF16 COLUMN_TILES WARPS
// BLOCKS_PER_SM STAGES WARP_BYTES TILES_PER_STEP SOFTCAP.
#include "combine.cuh"

constexpr int BUCKET = 64 / TILE, GROUP_TILES = 16 * BUCKET;  // tiles of the positions that share a row, or 16, of the offset table

// Grid (blocks, column groups). partial [workers + KV_HEADS * sequences, all_columns, PIECE]: see Partials.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) decode_kernel(
    const u16* __restrict__ q, const u8* __restrict__ pages, const int* __restrict__ block_table, const int* __restrict__ seq_lens,
    const int* __restrict__ cu_queries, const u16* __restrict__ key_map, int map_stride, const u16* __restrict__ key_offset,
    int offset_stride, int offset_groups, float offset_factor, const float* __restrict__ codebook,
    float* __restrict__ partial, u32 page_stride, int max_pages, int sequences, int queries, int window,
    int resident, int all_columns, float scale, float softcap) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  int *begun_in = (int*)(shared + KEY::BYTES + WARPS * WARP_BYTES), *ended_in = begun_in + WARPS;
  const int worker = blockIdx.x * WARPS + warp, column0 = blockIdx.y * COLUMNS;
  const Batch batch{seq_lens, cu_queries, sequences, queries, window};
  int start;
  const int line = batch.total_tiles(0, start);
  const Cut cut(line * KV_HEADS, resident);
  if (worker - warp >= cut.workers) return;
  const int begin = worker < cut.workers ? cut.begin(worker) : 0;  // beyond the last worker: a run of no tiles
  int left = worker < cut.workers ? cut.begin(worker + 1) - begin : 0, head = begin / line;
  int s = sequence_of(batch, begin - head * line, start), tile = batch.first_tile(s) + begin - head * line - start;
  u32 ring = shared_address(shared) + KEY::BYTES + warp * WARP_BYTES;
  keep(ring);
  Loader loader(batch, block_table, max_pages, pages, page_stride, head, s, tile, left);
  QueryMapper mapper(q, key_map, map_stride, batch, column0);
  if constexpr (KEY_MAP == MATRIX) {
    if (lane == 0) begun_in[warp] = left > 0 ? head * sequences + s : -1;
    __syncthreads();
    mapper.begin(begun_in);
  } else if (lane * 64 < GROUP * D) {
    prefetch(q + ((i64)batch.first_query(s) * KV_HEADS + head) * GROUP * D + lane * 64);
  }
  constexpr int AHEAD = STAGES - TILES_PER_STEP;
  for (int i = 0; i < AHEAD; i++) loader.next({ring + i * TILE_BYTES});
  fill_table<KEY>(warp, WARPS, codebook);  // while the first tiles are on their way
  const Lane at(g, c);
  u32 slot = ring;
  if constexpr (KEY_MAP == MATRIX) {
    mapper.finish(begun_in);
    __syncthreads();
  }
  while (left > 0) {
    const int end = min(batch.last_tile(s), tile + left), len = seq_lens[s], context = len - batch.queries(s);
    left -= end - tile;
    if (end > tile) {
      Query query;
      query.load(q, key_map, KEY_MAP == MATRIX ? mapper.mapped(begun_in, head * sequences + s) : 0, batch, s, head, column0);
      if (PARKED) query.park(ring + PARKED_AT);
      Softmax softmax;
      const int all_see = (context + 1) / TILE, all_in_window = window > 0 ? (len - window + TILE - 1) / TILE : 0;
      int scored = -1;  // the group of offsets whose scores are in shared memory
      auto step = [&](auto count, auto masked) {
        constexpr int N = decltype(count)::value;
        wait_for_all_copies_but<AHEAD - N>();
        __syncwarp();
        u32 tiles[N], offsets[N], next[N];
#pragma unroll
        for (int n = 0; n < N; n++) {  // copies go into the slots of the step before
          tiles[n] = slot, offsets[n] = ring + RING_BYTES + (u32)(tile + n) / BUCKET % 16 * (COLUMNS * 4);
          next[n] = slot >= ring + TILES_PER_STEP * TILE_BYTES ? slot - TILES_PER_STEP * TILE_BYTES : slot + AHEAD * TILE_BYTES;
          slot = slot == ring + (STAGES - 1) * TILE_BYTES ? ring : slot + TILE_BYTES;
        }
        softmax.template add<N, decltype(masked)::value>(
            tiles, offsets, at, query, scale / Query::NORM, softcap, [&] { loader.next(next); },
            [&](int n, int half, int nt, int e) {
              int key = (tile + n) * TILE + at.token + 8 * half, position = context + (column0 + nt * 8 + 2 * c + e) / GROUP;
              return key <= position && (window <= 0 || position - key < window);
            });
        if (CENTRED_LATER && tile % 8 < N) softmax.centre();
        tile += N;
      };
      while (tile < end) {
        const bool masked = tile < all_in_window || tile >= all_see;  // in between, every column sees every token
        int stop = min(end, tile < all_in_window ? all_in_window : tile < all_see ? all_see : end);
        if (KEY_OFFSET) {
          const int group = min(tile / GROUP_TILES, offset_groups - 1);
          stop = min(stop, (tile / GROUP_TILES + 1) * GROUP_TILES);
          if (group != scored) {
            query.score_offsets(key_offset + (i64)head * offset_stride, group, scale / Query::NORM * offset_factor, ring + RING_BYTES);
            scored = group;
          }
        }
        if (!masked)
          while (tile + TILES_PER_STEP <= stop) step(Constant<TILES_PER_STEP>{}, Constant<false>{});
        while (tile < stop) step(Constant<1>{}, Constant<true>{});
      }
      __syncwarp();  // the ring is free: a run's last piece goes there, to be merged; another's sequence is at its end
      float* to = left > 0 ? partial + ((i64)(cut.workers + head * sequences + s) * all_columns + column0) * PIECE
                           : (float*)(shared + KEY::BYTES + warp * WARP_BYTES);
      softmax.write(to, min(COLUMNS, batch.queries(s) * GROUP - column0), VALUE::GAIN);
    }
    if (left > 0) {
      if (++s == sequences) s = 0, head++;
      tile = batch.first_tile(s);
    }
  }
  const int pair = worker < cut.workers ? head * sequences + s : -1;
  if (lane == 0) ended_in[warp] = pair;
  __syncthreads();
  if (pair < 0) return;
  int first = warp, past = warp + 1;
  while (first > 0 && ended_in[first - 1] == pair) first--;
  while (past < WARPS && ended_in[past] == pair) past++;
  merge_pieces(shared + KEY::BYTES + first * WARP_BYTES, past - first, warp - first, min(COLUMNS, batch.queries(s) * GROUP - column0),
               partial + ((i64)(worker - warp + first) * all_columns + column0) * PIECE);
}

// combine_kernel: a warp a column; combine_one_kernel: a block, for few sequences, which have many partials.
#define COMBINE(NAME, N, S, MERGERS, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * N * S * MERGERS, BLOCKS) NAME( \
      const float* __restrict__ partial, const int* __restrict__ seq_lens, const int* __restrict__ cu_queries, \
      const float* __restrict__ sinks, const u16* __restrict__ value_map, int map_stride, float map_gain, u16* __restrict__ out, \
      float* __restrict__ lse, int sequences, int queries, int window, int resident, int all_columns) { \
    launch_next_kernel(); \
    const u16* map = value_map ? value_map + (i64)blockIdx.y * map_stride : nullptr; \
    combine<N, S, MERGERS>(partial, Batch{seq_lens, cu_queries, sequences, queries, window}, sinks, map, map_gain, out, lse, \
                           resident, all_columns); \
  }
COMBINE(combine_kernel, 4, SEQUENCES, 1, SEQUENCES == 1 ? 8 : 1)
COMBINE(combine_one_kernel, 1, 1, 8, 2)
