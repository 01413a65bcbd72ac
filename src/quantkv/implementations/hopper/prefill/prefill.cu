// Attention of many queries over 16-bit rows, written for sm_90: FlashAttention-3's schedule (arXiv 2407.08608).
//
// A block takes tiles of ROWS query rows, 64 to each of its consumers, which are warpgroups; a row is a token and one
// of the GROUP query heads of a kv head. Another warpgroup fetches: one lane keys and values, by boxes of a tensor, two
// warps queries. Keys go from the last to the first. While tensor cores multiply a tile of weights with values, a
// consumer works out the weights of the next; two consumers take turns at the tensor cores.
//
// EIGHT: queries and keys are 8-bit integers, and a tile of keys has one scale. Sums begin at EIGHT_ZERO, so that their
// bits are a float's, and no sum of theirs is converted.
//
// Compile-time, from prefill/__init__.py: EIGHT, D, DV, GROUP, CONSUMERS, KEYS (of a tile), STAGES, BF16, LEFT (queries
// see no further than a.left), SOFTCAP, TURNS, QUERY_STAGES, CONSUMER_REGISTERS.
#include "arguments.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

static_assert(sizeof(PrefillArguments) == ARGUMENT_BYTES, "arguments are laid out in another way in Python");
constexpr int ROWS = 64 * CONSUMERS, TILES = KEYS / 8, VALUE_TILES = DV / 8;  // tiles: of eight columns
// threads that load queries; work that is known ahead
constexpr int LOADERS = 64, WORKS = 2;                                        
constexpr float LATE = 8.f;  // weights may grow to 2^LATE before what they add up to is rescaled
constexpr int WIDTH = EIGHT ? D / 2 : D;  // of a row of queries or keys, in 16-bit numbers
constexpr u32 EIGHT_ZERO_BITS = 0x4b400000;  // 1.5 * 2^23: where floats are integers, and one apart
constexpr float EIGHT_ZERO = 12582912.f;
static_assert(!EIGHT || 127 * 127 * D < 1 << 22, "sums stay between 2^23 and 2^24");
constexpr int KEY_SLABS = (WIDTH + 63) / 64, VALUE_SLABS = (DV + 63) / 64, SLAB = KEYS * MATRIX_ROW;
constexpr int KEY_BYTES = KEY_SLABS * SLAB, VALUE_BYTES = VALUE_SLABS * SLAB, QUERY_SLAB = 64 * MATRIX_ROW,
              QUERY_BYTES = KEY_SLABS * QUERY_SLAB;
constexpr int KEYS_AT = QUERY_STAGES * CONSUMERS * QUERY_BYTES, VALUES_AT = KEYS_AT + STAGES * KEY_BYTES,
              COUNTERS_AT = VALUES_AT + STAGES * VALUE_BYTES;
constexpr int WORKS_AT = COUNTERS_AT + 16 * (QUERY_STAGES + 2 * STAGES + WORKS), WORK_BYTES = 32;
static_assert(
    SHARED_BYTES == 1024 + WORKS_AT + WORKS * WORK_BYTES, "shared memory is laid out in another way in Python");

// A ring of COUNT things of so many BYTES each in shared memory, with two counters each: that it is there, and that no
// consumer reads it any more.
template <int COUNT, int BYTES, int AT, int FIRST> struct Ring {
  u32 base;
  int i = 0;
  u32 parity = 0;
  DI Ring(u32 base) : base(base) {}
  DI u32 there() const { return base + COUNTERS_AT + 16 * (FIRST + i); }
  DI u32 free() const { return there() + 8; }
  DI u32 at() const { return base + AT + i * BYTES; }
  DI void next() { if (++i == COUNT) i = 0, parity ^= 1; }
  DI void wait_until_there() const { wait_for_phase(there(), parity); }
  DI void wait_until_free() const { wait_for_phase(free(), parity ^ 1); }
  DI void done() { if (threadIdx.x % 32 == 0) arrive(free()); next(); }  // says each warp of each consumer
  DI void open(int sources) {
    for (int n = 0; n < COUNT; n++, next()) open_phases(there(), sources), open_phases(free(), 4 * CONSUMERS);
  }
};
using QueryRing = Ring<QUERY_STAGES, CONSUMERS * QUERY_BYTES, 0, 0>;
using KeyRing = Ring<STAGES, KEY_BYTES, KEYS_AT, QUERY_STAGES>;
using ValueRing = Ring<STAGES, VALUE_BYTES, VALUES_AT, QUERY_STAGES + STAGES>;
using WorkRing = Ring<WORKS, WORK_BYTES, WORKS_AT, QUERY_STAGES + 2 * STAGES>;

// ROWS rows of a sequence and kv head, from `row` on, and the tiles of keys that they see, from key `first` on.
struct Work {
  int s, head, row, begin, queries, used, first, tiles;  // begin: of the sequence's queries
  DI int position(int row) const { return used - queries + min(row / GROUP, queries - 1); }
  DI void store(u32 to) const {
    store_shared(to, s, head, row, begin), store_shared(to + 16, queries, used, first, tiles);
  }
  DI void load(u32 from) { load_shared<16>(from, (u32*)this), load_shared<16>(from + 16, (u32*)this + 4); }
};
static_assert(sizeof(Work) == WORK_BYTES, "as it is handed on");
// Number i of all work: of some sequences and kv heads, whose keys stay in the cache, what takes longest; then of the
// next ones. No tiles: there is none of the number.
DI Work work_of(const PrefillArguments& a, int i) {
  const int seq_heads = a.kv_heads * a.sequences, first = i / (a.together * a.tiles) * a.together,
            width = min(a.together, seq_heads - first), left = i - first * a.tiles;
  const int seq_head = first + left % width;
  Work w;
  w.head = seq_head % a.kv_heads, w.s = seq_head / a.kv_heads, w.row = (a.tiles - 1 - left / width) * ROWS;
  w.begin = a.queries[w.s], w.queries = a.queries[w.s + 1] - w.begin, w.used = a.used[w.s];
  const int end = a.right < 0 ? w.used : min(w.used, w.position(w.row + ROWS - 1) + a.right + 1);
  w.first = LEFT ? min(max(w.position(w.row) - a.left, 0), max(end - 1, 0)) : 0;
  if (EIGHT) w.first -= w.first % KEYS;  // keys were rounded by tiles of the sequence
  w.tiles = w.row < w.queries * GROUP ? max((end - w.first + KEYS - 1) / KEYS, 1) : 0;
  return w;
}

// One lane: boxes of keys and values.
template <class RING> DI void fetch(RING& ring, const TensorMap& map, int slabs, int row, int head) {
  ring.wait_until_free();
  expect(ring.there(), slabs * SLAB);
#pragma unroll
  for (int slab = 0; slab < slabs; slab++) load_box(ring.at() + slab * SLAB, &map, 64 * slab, row, head, ring.there());
  ring.next();
}
DI void fetch_keys_and_values(const PrefillArguments& a, u32 base) {
  KeyRing keys(base);
  ValueRing values(base);
  WorkRing works(base);
  const int all = a.tiles * a.kv_heads * a.sequences;
  for (int i = blockIdx.x;; i = gridDim.x + atomicAdd(a.taken, 1)) {  // whoever is done takes what comes next
    Work w = {};
    if (i < all && (w = work_of(a, i)).tiles == 0) continue;
    works.wait_until_free();
    w.store(works.at()), arrive(works.there()), works.next();
    if (i >= all) return;
    const int row = a.rows[w.s] + w.first;
    fetch(keys, a.keys, KEY_SLABS, row + (w.tiles - 1) * KEYS, w.head);
    for (int tile = w.tiles - 1; tile >= 0; tile--) {  // keys come a tile before values
      if (tile > 0) fetch(keys, a.keys, KEY_SLABS, row + (tile - 1) * KEYS, w.head);
      fetch(values, a.values, VALUE_SLABS, row + tile * KEYS, w.head);
    }
  }
}
// LOADERS threads: rows of queries, permuted as wgmma reads them.
DI void fetch_queries(const PrefillArguments& a, u32 base, int thread) {
  QueryRing ring(base);
  for (WorkRing works(base);; works.next()) {
    works.wait_until_there();
    Work w;
    w.load(works.at());
    if (w.tiles == 0) return;
    ring.wait_until_free();
    for (int i = thread; i < ROWS * KEY_SLABS * 8; i += LOADERS) {
      const int row = i / (KEY_SLABS * 8), chunk = i % (KEY_SLABS * 8), token = (w.row + row) / GROUP,
                head = w.head * GROUP + (w.row + row) % GROUP;
      const u16* from = a.q + (w.begin + min(token, w.queries - 1)) * a.q_token + head * a.q_head + chunk * 8;
      const u32 to = ring.at() + row / 64 * QUERY_BYTES + chunk / 8 * QUERY_SLAB + matrix_chunk(row % 64, chunk % 8);
      copy16_if(true, to, (const u8*)(chunk * 8 < WIDTH ? from : a.q), chunk * 8 < WIDTH ? 16 : 0);
    }
    commit_copies();
    wait_for_all_copies_but<0>();
    stores_before_wgmma();
    arrive(ring.there());
    ring.next();
  }
}

// Of four lanes, x[i] of lane c becomes x[c] of lane i.
DI void transpose4(u32 (&x)[4], int c) {
#pragma unroll
  for (int bit = 1; bit < 4; bit <<= 1)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!(i & bit)) {
        const u32 other = __shfl_xor_sync(~0u, c & bit ? x[i] : x[i | bit], bit);
        (c & bit ? x[i] : x[i | bit]) = other;
      }
}
DI i64 query_of(const PrefillArguments& a, const Work& w, int at) {  // a packed query row's number in [tokens, heads]
  return (i64)(w.begin + min(at / GROUP, w.queries - 1)) * (a.kv_heads * GROUP) + w.head * GROUP + at % GROUP;
}
// What a consumer has of 64 rows; a lane has two, 8 apart.
struct Rows {
  float s[TILES][4], o[VALUE_TILES][4], m[2], l[2];
  u32 p[KEYS / 16][4];
  int sums[TILES][4];  // where EIGHT: in place of s until they are there
  float scales[2], means[2], key_scale;

  DI void begin(const PrefillArguments& a, const Work& w, int row) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scales[r] = a.query_scales[query_of(a, w, row + 8 * r)] * a.scale;
      if (SOFTCAP) means[r] = a.query_means[query_of(a, w, row + 8 * r)] * a.scale;
    }
  }

  // Scores to weights, relative to the largest so far; by what o is to be multiplied.
  template <bool MASKED>
  DI void weigh(const PrefillArguments& a, int key, const int (&low)[2], const int (&high)[2], float (&factor)[2]) {
    constexpr bool SHIFTED = EIGHT && !SOFTCAP;  // by EIGHT_ZERO, and not scaled yet
    const float scale = SOFTCAP || EIGHT ? 1.f : a.scale;  // of m
    float steps[2] = {scale, scale};                       // of s
    if (EIGHT)
#pragma unroll
      for (int r = 0; r < 2; r++) steps[r] = scales[r] * key_scale;
    // two chains of each row
    float top[2][2] = {{minus_infinity(), minus_infinity()}, {minus_infinity(), minus_infinity()}}, sum[2][2] = {},
          above[2];
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = s[nt][e];
        if (EIGHT) x = as_float(sums[nt][e]);
        if (EIGHT && SOFTCAP) x = fmaf(x - EIGHT_ZERO, steps[e / 2], means[e / 2]);
        if (SOFTCAP) x = a.softcap - 2.f * a.softcap * inverse(1.f + pow2(EIGHT ? x : x * a.scale));
        if (MASKED) {
          const int k = key + nt * 8 + e % 2;
          if (k >= high[e / 2] || LEFT && k < low[e / 2]) x = minus_infinity();
        }
        top[e / 2][e % 2] = fmaxf(top[e / 2][e % 2], x);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = fmaxf(top[r][0], top[r][1]);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1)), most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (SHIFTED) most = (most - EIGHT_ZERO) * steps[r];
      const bool moves = most * scale > m[r] * scale + LATE;
      factor[r] = moves ? pow2((m[r] - most) * scale) : 1.f, m[r] = moves ? most : m[r];
      above[r] = MASKED && m[r] == minus_infinity() ? 0.f : m[r] * scale;
      if (SHIFTED) above[r] = fmaf(EIGHT_ZERO, steps[r], above[r]);
      else steps[r] = scale;
    }
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        s[nt][e] = pow2(fmaf(s[nt][e], steps[e / 2], -above[e / 2])), sum[e / 2][e % 2] += s[nt][e];
#pragma unroll
    for (int r = 0; r < 2; r++) l[r] = fmaf(l[r], factor[r], sum[r][0] + sum[r][1]);
  }
  DI void round() {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* x = s[2 * k + i / 2] + i % 2 * 2;
        p[k][i] = BF16 ? bfloat2(x[0], x[1]) : half2(x[0], x[1]);
      }
  }
  DI void rescale(const float (&factor)[2]) {
    if (!__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) return;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] *= factor[e / 2];
  }
  DI void clear_sums() {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
      sums[nt][0] = sums[nt][1] = sums[nt][2] = sums[nt][3] = EIGHT_ZERO_BITS;
  }
  DI void keep_scores() { if constexpr (EIGHT) keep_tiles(sums); else keep_tiles(s); }
  DI void score(u32 queries, u32 keys) {
    const u64 q = matrix_descriptor(queries), k = matrix_descriptor(keys);
    if constexpr (EIGHT) {
#pragma unroll
      for (int w = 0; w < (WIDTH + 15) / 16; w++)
        IntegerWgmma<TILES>::multiply(
            sums, q + (w / 4 * QUERY_SLAB + w % 4 * 32) / 16, k + (w / 4 * SLAB + w % 4 * 32) / 16);
      return;
    }
    Wgmma<TILES, BF16>::multiply<false>(s, q, k);
#pragma unroll
    for (int w = 1; w < (D + 15) / 16; w++)
      Wgmma<TILES, BF16>::multiply<true>(
          s, q + (w / 4 * QUERY_SLAB + w % 4 * 32) / 16, k + (w / 4 * SLAB + w % 4 * 32) / 16);
  }
  DI void add_values(u32 values) {
    const u64 v = rows_descriptor(values, SLAB);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
      Wgmma<VALUE_TILES, BF16>::multiply<true, true>(
          o, p[k][0], p[k][1], p[k][2], p[k][3], v + k * (16 * MATRIX_ROW / 16));
  }
  // To tokens and heads, and log-sum-exps.
  DI void write(const PrefillArguments& a, const Work& w, int row) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = l[r];
      sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
      const int at = row + 8 * r, token = at / GROUP, head = w.head * GROUP + at % GROUP;
      float top = m[r] * (SOFTCAP || EIGHT ? 1.f : a.scale);
      if (EIGHT && !SOFTCAP) top = fmaf(a.query_means[query_of(a, w, at)], a.scale, top);
      const float sink = sink_of(a, head), best = fmaxf(top, sink);
      const float own = sum == 0.f ? 0.f : pow2(top - best),
                  all = fmaf(sum, own, best == minus_infinity() ? 0.f : pow2(sink - best));
      const float share = all == 0.f ? 0.f : own * inverse(all);  // what is no number stays none
      u16* to = a.out + (w.begin + token) * a.out_token + head * a.out_head;
      if (token < w.queries && c == 0)
        a.lse[(i64)(w.begin + token) * (a.kv_heads * GROUP) + head] =
            all == 0.f ? minus_infinity() : 0.6931471805599453f * (best + lg2(all));
      u32 pairs[VALUE_TILES];
#pragma unroll
      for (int n = 0; n < VALUE_TILES; n++) {
        const float x = o[n][2 * r] * share, y = o[n][2 * r + 1] * share;
        pairs[n] = BF16 ? bfloat2(x, y) : half2(x, y);
      }
#pragma unroll
      for (int n = 0; n < VALUE_TILES; n += 4) {  // four lanes exchange, so that each has eight neighbours
        u32 (&x)[4] = *(u32(*)[4])(pairs + n);
        if (n + 4 > VALUE_TILES) {
#pragma unroll
          for (int i = n; i < VALUE_TILES; i++)
            if (token < w.queries) *(u32*)(to + 8 * i + 2 * c) = pairs[i];
        } else {
          transpose4(x, c);
          if (token < w.queries) *(uint4*)(to + 8 * (n + c)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }
};

DI void consume(const PrefillArguments& a, u32 base, int own) {
  QueryRing queries(base);
  KeyRing keys(base);
  ValueRing values(base);
  WorkRing works(base);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (TURNS && own == 1) give_turn(1);
  for (;;) {
    works.wait_until_there();
    Work w;
    w.load(works.at());
    if (w.tiles == 0) return;
    queries.wait_until_there();  // whose loaders have read what is to be done, too
    works.done();
    Rows x;
    const int row = w.row + 64 * own + 16 * warp + lane / 4;
    int low[2], high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int position = w.position(row + 8 * r);
      low[r] = LEFT ? position - a.left : 0, high[r] = a.right < 0 ? w.used : min(w.used, position + a.right + 1);
      x.m[r] = minus_infinity(), x.l[r] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) x.o[n][0] = x.o[n][1] = x.o[n][2] = x.o[n][3] = 0.f;
    const int all_see = (a.right < 0 ? w.used : min(w.used, w.position(w.row) + a.right + 1)) - w.first;
    const int all_in_window = LEFT ? w.position(w.row + ROWS - 1) - a.left - w.first : 0;
    float factor[2];
    const auto weigh = [&](int tile) {
      const int key = w.first + tile * KEYS + 2 * (lane % 4);
      if ((tile + 1) * KEYS > all_see || LEFT && tile * KEYS < all_in_window) x.weigh<true>(a, key, low, high, factor);
      else x.weigh<false>(a, key, low, high, factor);
    };
    const float* scales = EIGHT ? a.key_scales + w.head * a.key_scale_head + a.rows[w.s] + w.first : nullptr;
    if (EIGHT) x.begin(a, w, row);
    const auto score = [&](int tile) {
      if (EIGHT) x.key_scale = scales[tile * KEYS], x.clear_sums();
      keys.wait_until_there();
      if (TURNS) wait_for_turn(1 + own);
      __syncwarp();  // lanes may have left the loop that waits one after the other, and tensor cores want all of them
      begin_products();
      x.score(queries.at() + own * QUERY_BYTES, keys.at());
      commit_products();
    };
    const auto add_values = [&] {
      values.wait_until_there();
      __syncwarp();
      begin_products();
      x.add_values(values.at());
      commit_products();
    };
    score(w.tiles - 1);
    if (TURNS) give_turn(2 - own);
    wait_for_all_products_but<0>();
    x.keep_scores(), keys.done();
    weigh(w.tiles - 1);
    x.round();
    for (int tile = w.tiles - 2; tile >= 0; tile--) {
      score(tile);
      add_values();
      if (TURNS) give_turn(2 - own);
      wait_for_all_products_but<1>();
      x.keep_scores(), keys.done();
      weigh(tile);
      wait_for_all_products_but<0>();
      keep_tiles(x.o), values.done();
      x.rescale(factor);
      x.round();
    }
    queries.done();
    add_values();
    wait_for_all_products_but<0>();
    keep_tiles(x.o), values.done();
    x.write(a, w, row);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    prefill_kernel(const __grid_constant__ PrefillArguments a) {
  const u32 base = (shared_address(shared) + 1023) / 1024 * 1024;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    QueryRing(base).open(LOADERS), KeyRing(base).open(1), ValueRing(base).open(1), WorkRing(base).open(1);
    phases_are_open();
  }
  wait_for_previous_kernel();
  __syncthreads();
  if (group == 0) {
    give_registers<CONSUMERS == 2 ? 40 : 32>();
    const int warp = threadIdx.x / 32;
    if (warp == 0 && threadIdx.x == 0) fetch_keys_and_values(a, base);
    if (warp == 1 || warp == 2) fetch_queries(a, base, threadIdx.x - 32);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume(a, base, group - 1);
  }
}
