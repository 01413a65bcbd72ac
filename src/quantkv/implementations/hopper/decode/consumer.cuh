// A consumer warpgroup: four warps that share what they unpack, their queries, and a ring of KV tiles, of four tiles
// each.
#pragma once
#include "scores.cuh"
#include "wgmma.cuh"

static_assert(WORKER_WARPS == 4 && WARPS % WORKER_WARPS == 0 && (LATENTS || D <= 256 && DV <= 256),
    "a warpgroup, whose registers have room for such rows");
// tiles of 8 packed query rows; matrices of 64 numbers of a query a row, those of rotated dimensions the last
constexpr int TILES = PACKED_ROWS / 8, SLABS = (DK + 63) / 64, QUERY_SLABS = SLABS + (ROPE_SIZE + 63) / 64;
constexpr int AHEAD = STAGES - 1, KV_TILE_BYTES = WORKER_WARPS * TILE_BYTES;

// Keys that have a zero lose it by one more product, of the zero with the sum of a query's numbers, which is there as
// two fp16 numbers. Both are moved by 16, so that the sum is no larger than a number of the query may be.
constexpr bool SUMMED = !BY_INTEGERS && (KEY::ZERO_POINTS || KEY::ZERO > 0.f);
constexpr float MOVED = 16.f;
static_assert(!SUMMED || KEY::GAIN == SUBNORMAL && KEY::ZERO * MOVED <= 2048.f,
    "zeros are fp16 numbers in the unit of the codes");

// Shared memory of a consumer warpgroup, in bytes: the queries, QUERY_SLABS matrices of a row a packed query row; their
// sums, the first 16 numbers of such a row (whether SUMMED or not); weights of a KV tile's tokens, a row a packed query
// row, of this KV tile and the last; the ring; what warps tell each other; values' zero points, of this KV tile and the
// last; sums of queries in float32; scores of 16 key means. Over the first three, and the ring: what a run ends with.
constexpr int SLAB = PACKED_ROWS * MATRIX_ROW, SUMS_AT = QUERY_SLABS * SLAB, WEIGHTS_AT = SUMS_AT + SLAB;
constexpr int RING_AT = WEIGHTS_AT + 2 * SLAB, TOLD_AT = RING_AT + STAGES * KV_TILE_BYTES;
constexpr int TOLD = 2 * PACKED_ROWS + 4;  // numbers of a warp
constexpr int ZEROS_AT = TOLD_AT + WORKER_WARPS * TOLD * 4, QUERY_SUMS_AT = ZEROS_AT + 2 * 2 * KV_TILE,
              KEY_MEANS_AT = QUERY_SUMS_AT + 4 * PACKED_ROWS;
constexpr int END = KEY_MEANS_AT + (KEY_MEAN ? 16 * PACKED_ROWS * 4 : 0);
static_assert(WORKER_BYTES == (END + 1023) / 1024 * 1024 && TABLES_BYTES % 1024 == 0,
    "shared memory is laid out in another way in Python");
static_assert(PACKED_ROWS * PARTIAL_BYTES <= TOLD_AT, "a partial lies over queries, weights and the ring");

// Products of a warpgroup: b is what wgmma is told of the matrix.
template <class C, bool ADD = true> DI void multiply(float (&d)[TILES][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  Wgmma<TILES, C::BFLOAT>::template multiply<ADD>(d, a0, a1, a2, a3, b);
}

// Brings this warp's tile of every KV tile of the line, from KV tile `kv_tile` of sequence `seq` and kv head `head` on,
// into slots of a ring, one copy group a KV tile. Tiles beyond a sequence arrive as zero.
struct KvTileLoader {
  const Sequences& sequences;
  const int* block_table;
  const u8* records;
  u32 page_stride;
  int table_width, table_stride, member, seq, left;  // left: KV tiles beyond the run
  int kv_tile, run_end;         // until run_end this warp's tiles are whole, and their page ids at hand
  int ids_from, ids[PAGES];  // lane i holds those of the pages of this warp's tile of KV tile ids_from + i
  TileCopier tiles;

  DI KvTileLoader(
      const Sequences& sequences, const AttendArguments& a, int member, int head, int seq, int kv_tile, int left)
      : sequences(sequences), block_table(a.block_table), page_stride((u32)a.page_stride), table_width(a.table_width),
        table_stride(a.table_stride), member(member), seq(seq), left(left), kv_tile(kv_tile), run_end(kv_tile),
        tiles(records, a.pages, head) {
    keep(tiles.meta_from);  // consumer warpgroups have a register for it
    load_ids();
  }
  DI int tile() const { return kv_tile * WORKER_WARPS + member; }
  DI void load_ids() {
    const int at = (tile() + (int)tiles.lane * WORKER_WARPS) / PER_PAGE * PAGES;
    const int* id = block_table + (i64)seq * table_stride + at;
    ids_from = kv_tile;
#pragma unroll
    for (int i = 0; i < PAGES; i++) ids[i] = at + i < table_width ? id[i] : 0;
    constexpr int LATER = 32 * WORKER_WARPS * PAGES / PER_PAGE;
    if (at + LATER < table_width) prefetch(id + LATER);
  }
  // The next tile, of which the tokens from `from` to `valid` are read; see TileCopier.
  DI void copy(u32 to, int valid, int from) {
    u32 pages[PAGES], read[PAGES];
#pragma unroll
    for (int i = 0; i < PAGES; i++) pages[i] = __shfl_sync(~0u, ids[i], kv_tile - ids_from);
#pragma unroll
    for (int i = 0; i < PAGES; i++) read[i] = valid > 0 ? pages[TileCopier::page_of(i, valid, from)] : 0;
    tiles.copy(records, page_stride, read, tile() % PER_PAGE, to, valid, from);
    kv_tile++;
  }
  // what stands between two runs: the next sequence, the next page ids, or a tile that is not whole
  DI void next_run(u32 to) {
    if (left <= 0) return;
    if (kv_tile == sequences.last_tile(seq)) {
      do {
        const bool next_head = seq + 1 == sequences.count;
        records += next_head ? RECORD_BYTES : 0, seq = next_head ? 0 : seq + 1, kv_tile = sequences.first_tile(seq);
      } while (kv_tile == sequences.last_tile(seq));
      load_ids();
    } else if (kv_tile - ids_from == 32) {
      load_ids();
    }
    const int slots = sequences.slots(seq), from = FOREIGN ? max(sequences.first_slot(seq) - tile() * TILE, 0) : 0;
    const int whole = (slots / TILE - member + WORKER_WARPS - 1) / WORKER_WARPS;  // KV tiles whose tile of this warp is
    const int run = from > 0 ? 0 : max(min(min(left, whole - kv_tile), ids_from + 32 - kv_tile), 0);
    left -= max(run, 1), run_end = kv_tile + run;
    if (run > 0) copy(to, TILE, 0);
    else copy(to, from < TILE ? min(max(slots - tile() * TILE, 0), TILE) : 0, min(from, TILE));
  }
  DI void next(u32 to) {
    if (kv_tile < run_end) copy(to, TILE, 0); else next_run(to);
    commit_copies();
  }
};

// The part of a tile's values that a warp unpacks: about a quarter of the dimensions, of which a lane has OWN_DIMS,
// pairs of which are rows of its products. a: tokens 2 c and 2 c + 1, 16 bits of each in a register; b: those 8
// further. Where four warps do not share a row evenly the last of its lanes have none of it: they read what others
// have, and dim() is beyond the row. of 16 bytes; chunks that hold pairs of dimensions
constexpr int V_CHUNKS = V_ROW / 16, STEP = RUN > 1 ? 1 : 2;                           
// warps that have a part of the 16 bits of a chunk
constexpr int SHARING = IN_HALVES && V_CHUNKS < WORKER_WARPS ? WORKER_WARPS / V_CHUNKS : 1;            
// of a warp
constexpr int OWN_CHUNKS =
    V_CHUNKS < WORKER_WARPS ? 1 : (V_CHUNKS + WORKER_WARPS * STEP - 1) / (WORKER_WARPS * STEP) * STEP;
// successive dimensions of a lane
constexpr int OWN_RUN = IN_HALVES ? RUN / SHARING : DV <= 64 ? 2 : DV <= 128 ? 4 : 8;  
// of a lane; products of 64 dimensions
constexpr int OWN_DIMS = IN_HALVES ? OWN_CHUNKS * OWN_RUN : OWN_RUN, OWN_SLABS = OWN_DIMS / 2;
constexpr int OWN_PAIRS = IN_HALVES ? OWN_CHUNKS : 4, ALL_OWN_PAIRS = OWN_PAIRS * (VALUE::OVERLAP ? 2 : 1);
static_assert(OWN_DIMS % 2 == 0 && 32 * OWN_DIMS >= DV && DV % OWN_RUN == 0, "rows of products, for all dimensions");
static_assert(VALUE::OVERLAP == 0 || OWN_RUN % 4 == 0,
    "codes of two numbers, and of a chain each other one lies in the words as they are");
template <bool IN_HALVES> struct OwnValues {
  u32 at[OWN_CHUNKS];
  int shift;
  DI OwnValues(int member) {
    const int lane = threadIdx.x % 32;
    shift = 16 / SHARING * (member % SHARING);
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; i++) {
      const int chunk = member * OWN_CHUNKS / SHARING + i;
      at[i] = VALUES_AT + lane / 16 * TILE_BYTES +
          chunk_address<V_ROW>(
              lane % 16, OWN_CHUNKS * WORKER_WARPS > V_CHUNKS * SHARING ? min(chunk, V_CHUNKS - 1) : chunk);
      keep(at[i]);
    }
  }
  // Of the tile at `tile`, and of the next.
  DI void load(const KeyLane& lane, u32 tile, u32 (&a)[2][ALL_OWN_PAIRS], u32 (&b)[2][ALL_OWN_PAIRS]) const {
#pragma unroll
    for (int i = 0; i < OWN_CHUNKS; i++) load_transposed(tile + at[i], a[0][i], b[0][i], a[1][i], b[1][i]);
#pragma unroll
    for (int t = 0; t < 2; t++) {
      lane.overlap_values<VALUE, OWN_PAIRS>(a[t]), lane.overlap_values<VALUE, OWN_PAIRS>(b[t]);
      if constexpr (SHARING > 1) {
#pragma unroll
        for (int i = 0; i < ALL_OWN_PAIRS; i++) a[t][i] >>= shift, b[t][i] >>= shift;
      }
    }
  }
  static DI int dim(int member, int g, int j) {
    return ((member * OWN_CHUNKS / SHARING + j / OWN_RUN) * 8 + g) * RUN + member % SHARING * OWN_RUN + j % OWN_RUN;
  }
};
// codes lie across 16-bit boundaries, or rows across chunks: a lane takes one run
template <> struct OwnValues<false> {
  static constexpr int BITS = OWN_RUN * VALUE::BITS, WORDS = (BITS + 31) / 32;
  static_assert(IN_HALVES || WORDS <= 2, "two words");
  using Run = Share<V_ROW, BITS, VALUE::BITS>;
  Run even, odd;
  static DI int index(int member) { return min(member * 8 + (int)threadIdx.x % 32 / 4, DV / OWN_RUN - 1); }
  DI OwnValues(int member) : even(threadIdx.x % 4 * 2, index(member)), odd(threadIdx.x % 4 * 2 + 1, index(member)) {}
  DI void load(const KeyLane&, u32 tile, u32 (&a)[2][ALL_OWN_PAIRS], u32 (&b)[2][ALL_OWN_PAIRS]) const {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const u32 from = tile + VALUES_AT + t * TILE_BYTES;
      two(from, a[t]), two(from + 8 * V_ROW, b[t]);
    }
  }
  DI void two(u32 tile, u32 (&x)[ALL_OWN_PAIRS]) const {
    u32 first[2] = {}, second[2] = {};
    even.load(tile, first), odd.load(tile, second);
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = prmt(first[k / 2], second[k / 2], k & 1 ? 0x7632 : 0x5410);
  }
  static DI int dim(int member, int g, int j) { return (member * 8 + g) * OWN_RUN + j; }
};

// Each of four lanes reads a quarter of a key of latents, a chunk of 16 bytes after the other, whose numbers are xored
// with this one: the chunks that eight lanes read together, of two keys, lie in different banks.
constexpr __device__ int latent_chunk(int c) { return K_ROW / 64 < 8 ? c / 2 * 2 : 2 * c; }
constexpr bool in_different_banks() {
  u32 seen = 0;
  for (int lane = 0; lane < 8; lane++)
    seen |= 1 << ((lane % 4 * (K_ROW / 64) + latent_chunk(lane % 4) ^ lane / 4) % 8);
  return seen == 0xff;
}
static_assert(!LATENTS || in_different_banks(), "eight lanes load 128 bytes at once");

// The queries of one sequence and kv head in shared memory, each warp some of the packed query rows.
struct WarpgroupQueries {
  u32 base;  // the consumer warpgroup's shared memory
  DI u32 operand(int nt, int w, int half) const {  // of this lane: what is b[2 w + half] of its Query
    const int lane = threadIdx.x % 32, row = 8 * nt + lane / 4;
    return base + w / 4 * SLAB + matrix_chunk(row, w % 4 * 2 + half) + lane % 4 * 4;
  }
  DI void store(int nt, const Query& query) const {
#pragma unroll
    for (int j = 0; j < DK / 8; j++) store_shared(operand(nt, j / 2, j % 2), query.b[0][j]);
  }
  DI void recall(int nt, Query& query) const {
#pragma unroll
    for (int j = 0; j < DK / 8; j++) load_shared<4>(operand(nt, j / 2, j % 2), &query.b[0][j]);
  }
  // given: the first packed query rows of this warp, `member` of the warpgroup.
  DI void load(GivenQuery& given, const Queries& q, const AttendArguments& a, const Sequences& sequences, int s,
      int head, int packed_row0, int member) const {
#pragma unroll 1
    for (int nt = member; nt < TILES; nt += WORKER_WARPS) {
      Query query;
      if (nt > member) given.ask(q, diagonal_of(a, head), sequences, s, head, packed_row0 + 8 * nt);
      if constexpr (KEY_MAP == MATRIX) {
        u32 x[DK / 8];
        Query::arrange(x, given.words[0]);
#pragma unroll 1
        for (int t = 0; t < DK / 16; t++) {
          const KeyMatrix rows(a.key_map + (i64)head * a.key_map_stride, t);
          float y[4] = {};
          u32 b0, b1;
          rows.multiply(y, x);
          Query::operands(b0, b1, y, t);
          store_shared(operand(nt, t, 0), b0), store_shared(operand(nt, t, 1), b1);
        }
        recall(nt, query);
      } else if constexpr (BY_CHUNKS) {
        // over their own operands
        const auto place = [&](int d) { return base + d / 64 * SLAB + nt * (8 * MATRIX_ROW) + d % 64 * 16; };
        Query::map_chunks(given.words[0], given.diagonal, place);
        __syncwarp();
        Query::gather(query.b[0], place);
        __syncwarp();
        store(nt, query);
      } else {
        Query::map(query.b[0], given.words[0], given.diagonal);
        store(nt, query);
      }
      Query::add_up(query.sum[0], query.b[0]);
      store_sums(nt, query.sum[0]);
    }
  }
  DI void store_sums(int nt, const float (&sums)[2]) const {
    const int lane = threadIdx.x % 32, row = 8 * nt + 2 * lane;
    if (lane < 4) {  // g = 0: the packed query rows 2 c and 2 c + 1
      if (KEY::BIASED) store_shared(base + QUERY_SUMS_AT + 4 * row, as_bits(sums[0]), as_bits(sums[1]));
      if constexpr (SUMMED) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float sum = sums[e] * (-KEY_GAIN / MOVED);
          const u32 high = half1(sum);
          store_shared(base + SUMS_AT + matrix_chunk(row + e, 0), high | (u32)half1(sum - low(high)) << 16, 0, 0, 0);
          store_shared(base + SUMS_AT + matrix_chunk(row + e, 1), 0, 0, 0, 0);
        }
      }
    }
  }
  DI void score_key_means(const u16* table, int sixteen, float factor, int member) const {
#pragma unroll 1
    for (int nt = member; nt < TILES; nt += WORKER_WARPS) {
      Query query;
      recall(nt, query);
      query.score_key_means(table, sixteen, factor, base + KEY_MEANS_AT + nt * 32);
    }
  }
};

// Where a lane finds its parts of a KV tile of latents: chunks further on differ by an xor, which spares registers.
// first_chunk: of a tile, the first that it reads of its quarter of a key; rotated: its quarter of the rotated
// dimensions; own_tile, own: of two tiles, as OwnValues, the tile, and the first of its warp's chunks in a row.
template <bool LATENTS> struct LatentLane {
  static_assert(!LATENTS || ROPE_SIZE == 64 && K_ROW % 256 == 0,
      "four lanes share the rotated dimensions, and chunks of rows are permuted");
  u32 first_chunk, rotated, own_tile, own;
  DI LatentLane(int member) {
    const int lane = threadIdx.x % 32, c = lane % 4;
    first_chunk = chunk_address<K_ROW>(lane / 4, c * (K_ROW / 64) + latent_chunk(c));
    rotated = TILE_V + chunk_address<SECOND_ROW>(lane / 4, lane % 4 * (SECOND_ROW / 64));
    own_tile = lane / 16 * TILE_BYTES, own = chunk_address<K_ROW>(lane % 16, member * OWN_CHUNKS);
    keep(first_chunk), keep(own_tile), keep(own);
  }
};
template <> struct LatentLane<false> {
  DI LatentLane(int) {}
};

// What a lane is in its consumer warpgroup, and where it finds its part of a KV tile.
struct WarpgroupLane : KeyLane, LatentLane<LATENTS> {
  int member, c, barrier;
  // of the consumer warpgroup's shared memory; to where this lane's row of a matrix of weights is, for two tiles of
  // packed query rows
  u32 base, weights;
  OwnValues<IN_HALVES> values;
  float latent_gain;  // of products with latents, to the unit of those with rotated dimensions
  DI WarpgroupLane(int member, int barrier, u32 base, float latent_gain)
      : KeyLane(threadIdx.x % 32 / 4, threadIdx.x % 4), LatentLane<LATENTS>(member), member(member),
        c(threadIdx.x % 4), barrier(barrier), base(base), values(member),
        latent_gain(latent_gain) {
    const int lane = threadIdx.x % 32;
    keep_all(lane / 4, c);
    weights = matrix_chunk(lane / 16 * 8 + lane % 8, 2 * member + lane / 8 % 2);
    keep(weights);
  }
  DI float* told(int by) const { return (float*)(shared + (base - shared_address(shared)) + TOLD_AT) + by * TOLD; }
};

// Of a lane's two keys in the tile at `tile`: their metadata; what they have for zero, moved, of lanes with c > 0 times
// 0.
DI void load_metas(u32 tile, const KeyLane& at, u32 (&meta)[2]) {
  if constexpr (K_META > 0) {
    load_shared<K_META>(tile + TILE_KM + at.token * K_META, &meta[0]),
        load_shared<K_META>(tile + TILE_KM + (at.token + 8) * K_META, &meta[1]);
  }
}
DI void moved_zeros(const u32 (&meta)[2], u32 (&zero)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) zero[r] = (KEY::ZERO_POINTS ? meta[r] & 15 : (u32)KEY::ZERO) * twice((u32)MOVED);
}

constexpr bool SUBTRACT = VALUE::CENTRE > 0;  // codes are taken about their zero: many packed query rows share them
// Register k of a lane's product of slab i with a tile, of which it loaded va and vb: dimensions 2 i and 2 i + 1, then
// of the tokens 8 further, whose zero points are `zero`.
template <int N>
DI u32 value_operand(const u32 (&va)[N], const u32 (&vb)[N], int i, int k, u32 zero, u32 table) {
  const int j = 2 * i + k % 2;
  const u32 code = value_pair<VALUE, OWN_PAIRS>(k < 2 ? va : vb, j, table);
  return SUBTRACT ? centred(code, zero, VALUE::unit(j)) : code;
}
