// Attention over a few 16-bit rows of the queries' type, without a map, beside the tokens that the decode kernel reads:
// a part of the kernel that combines, and done while decode blocks still run. All that is read here is older than the
// decode kernel, which waited for it before it let the next kernel start. It is read past L1, which may hold what was
// there before.
#pragma once
#include "arguments.cuh"
#include "query.cuh"

static_assert(
    !EXACT || RANGES && SEGMENTS == 1 && D == DV && D % 64 == 0 && EXACT >= TILE, "what exact tokens go with");
// chunks: of a row of values, of a lane
constexpr int EXACT_PAGE = EXACT ? EXACT : TILE, EXACT_ROW = 2 * D, EXACT_CHUNKS = D / 64;

DI void exact_product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (QUERY_BF16) mma_bfloat(c, a0, a1, a2, a3, b0, b1); else mma(c, a0, a1, a2, a3, b0, b1);
}

// For N packed query rows of a sequence and kv head, from packed_row0 on, tiles index, index + step, .. of what the
// exact segment has of it.
//
// Chunks of 16 bytes are operands as they lie: keys and queries have their dimensions in one order, and values of two
// tokens pair up in registers. A tile's tokens that are not the segment's are read as the nearest that is, and no
// packed query row sees them.
template <int N> struct Exact {
  const AttendArguments& a;
  const Sequences rows;
  // packed_rows: as many as there are
  int s, head, packed_row0, low = 0, high = 0, context, tile = 0, last = 0, packed_rows;
  const u8* keys;  // of a page
  // of packed query rows 2 c and 2 c + 1, base 2; o times sum
  float o[D / 16][4] = {}, top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};

  DI Exact(const AttendArguments& a, int s, int head, int packed_row0, int index)
      : a(a), rows(sequences_of(a, a.exact_start, a.exact_range)), s(s), head(head), packed_row0(packed_row0) {
    if (s >= a.sequences) return;
    const int queries = rows.queries(s);
    const Sequences::Slots slots = rows.all(s);
    low = slots.first, high = slots.past, context = a.seq_lens[s] - rows.start(s) - queries;
    packed_rows = min(N, queries * GROUP - packed_row0);
    tile = slots.first_tile(TILE) + index, last = packed_rows > 0 ? slots.last_tile(TILE) : slots.first_tile(TILE);
    if (tile < last) find();
  }
  DI int tiles() const { return last - low / TILE; }

  DI int slot(int token) const { return min(max(tile * TILE + token, low), high - 1) % EXACT_PAGE; }  // in its page
  DI void find() {  // the page; the tile's rows come as far as L2 while registers have other uses
    const int page = load_past_l1(a.exact_table + (i64)s * a.exact_table_stride + tile * TILE / EXACT_PAGE);
    keys = a.exact_pages + (i64)page * a.exact_page_stride + head * a.exact_head_stride;
    const u8* rows = keys + tile * TILE % EXACT_PAGE * EXACT_ROW;
#pragma unroll
    for (int line = 0; line < TILE * EXACT_ROW; line += 32 * 128) {
      const int at = line + threadIdx.x % 32 * 128;
      if (at < TILE * EXACT_ROW) prefetch_to_l2(rows + at), prefetch_to_l2(rows + EXACT_PAGE * EXACT_ROW + at);
    }
  }

  DI void attend(int step) {
    if (tile >= last) return;
    const int c = threadIdx.x % 4, packed_row = packed_row0 + min(threadIdx.x % 32 / 4, packed_rows - 1);
    const u16* query = Queries{a.q, a.q_token, a.q_head}.row(
                           rows.first_query(s) + packed_row / GROUP, head * GROUP + packed_row % GROUP) +
        c * 8;
    uint4 q[D / 32];
#pragma unroll
    for (int m = 0; m < D / 32; m++) q[m] = load_past_l1((const uint4*)(query + 32 * m));
#pragma unroll 1
    while (true) {
      add(q);
      tile += step;
      if (tile >= last) return;
      find();
    }
  }
  DI void add(const uint4 (&q)[D / 32]) {  // a tile. q: of packed query row g
    const int c = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
    float x[4] = {}, odd[4] = {};
    uint4 k[2][D / 32], v[4][EXACT_CHUNKS];  // of tokens g and g + 8; of 2 c, 2 c + 1 and those 8 further
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u8* row = keys + slot(g + 8 * r) * EXACT_ROW + c * 16;
#pragma unroll
      for (int m = 0; m < D / 32; m++) k[r][m] = load_past_l1((const uint4*)(row + 64 * m));
    }
#pragma unroll
    for (int m = 0; m < D / 32; m++) {
      exact_product(x, k[0][m].x, k[1][m].x, k[0][m].y, k[1][m].y, q[m].x, q[m].y);
      exact_product(odd, k[0][m].z, k[1][m].z, k[0][m].w, k[1][m].w, q[m].z, q[m].w);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u8* row = keys + (EXACT_PAGE + slot(2 * c + r % 2 + r / 2 * 8)) * EXACT_ROW + g * 16;
#pragma unroll
      for (int i = 0; i < EXACT_CHUNKS; i++) v[r][i] = load_past_l1((const uint4*)(row + 128 * i));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = tile * TILE + g + i / 2 * 8, position = context + (packed_row0 + 2 * c + i % 2) / GROUP;
      const bool seen = key >= low && key < high && key <= position &&
          (a.window <= 0 || (CHUNKED ? key >= rows.lowest(position, rows.start(s)) : position - key < a.window));
      float y = (x[i] + odd[i]) * a.exact_scale;
      if (SOFTCAP) y = a.softcap - 2.f * a.softcap * inverse(1.f + pow2(y));
      x[i] = seen ? y : minus_infinity();
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float up = fmaxf(top[e], max_over_tokens(fmaxf(x[e], x[2 + e]))), base = up == minus_infinity() ? 0.f : up;
      const float old = pow2(top[e] - base);
      x[e] = pow2(x[e] - base), x[2 + e] = pow2(x[2 + e] - base);
      top[e] = up, sum[e] = fmaf(sum[e], old, x[e] + x[2 + e]);
#pragma unroll
      for (int i = 0; i < D / 16; i++) o[i][e] *= old, o[i][2 + e] *= old;
    }
    const auto pair = [](float a, float b) { return QUERY_BF16 ? bfloat2(a, b) : half2(a, b); };
    const u32 p0 = transpose(pair(x[0], x[1])), p1 = transpose(pair(x[2], x[3]));
#pragma unroll
    for (int i = 0; i < EXACT_CHUNKS; i++) {
      const auto two = [&](float (&o)[4], u32 a, u32 b, u32 c, u32 d) {  // dimensions: 16 bits of four tokens each
        exact_product(o, prmt(a, b, 0x5410), prmt(a, b, 0x7632), prmt(c, d, 0x5410), prmt(c, d, 0x7632), p0, p1);
      };
      two(o[4 * i], v[0][i].x, v[1][i].x, v[2][i].x, v[3][i].x),
          two(o[4 * i + 1], v[0][i].y, v[1][i].y, v[2][i].y, v[3][i].y);
      two(o[4 * i + 2], v[0][i].z, v[1][i].z, v[2][i].z, v[3][i].z),
          two(o[4 * i + 3], v[0][i].w, v[1][i].w, v[2][i].w, v[3][i].w);
    }
  }

  // Rows to[N]: outputs times sum, and behind them the maximum and the sum.
  DI void write(float (*to)[D + 4]) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const float all[2] = {sum_over_tokens(sum[0]), sum_over_tokens(sum[1])};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (2 * c + e >= N) continue;
      float* row = to[2 * c + e];
      if (g == 0) *(float2*)(row + D) = make_float2(top[e], all[e]);
#pragma unroll
      for (int i = 0; i < D / 16; i += 2)
        *(float4*)(row + (g + i / 4 * 8) * 8 + i % 4 * 2) =
            make_float4(o[i][e], o[i][2 + e], o[i + 1][e], o[i + 1][2 + e]);
    }
  }
};
template <> struct Exact<0> {
  template <class... T> DI Exact(const T&...) {}
};
