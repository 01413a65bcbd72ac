// Scores, softmax and the weighted sum of values: what a warp does with a tile.
#include "tiles.cuh"

constexpr int NT = COLUMN_TILES, COLUMNS = 8 * NT;
enum { NO_MAP, HADAMARD, MATRIX };  // what KEY_MAP and VALUE_MAP may be
constexpr int PIECE = D + 4;  // floats of a partial result of one column: D outputs, their base-2 log-sum-exp at D

// Shared memory of a warp: its ring of tiles, the scores of 16 offsets and the rows of the next 16, and, over all these, what a
// run ends with; then mapped queries.
constexpr int RING_BYTES = STAGES * TILE_BYTES, SCORE_BYTES = 16 * COLUMNS * 4, PIECE_BYTES = COLUMNS * PIECE * 4;
constexpr int OFFSET_BYTES = KEY_OFFSET ? SCORE_BYTES + (OFFSETS_AHEAD ? 32 * D : 0) : 0;
constexpr int MAPPED_AT = RING_BYTES + OFFSET_BYTES > PIECE_BYTES ? RING_BYTES + OFFSET_BYTES : PIECE_BYTES;
static_assert(WARP_BYTES == MAPPED_AT + (KEY_MAP == MATRIX ? 2 * D * COLUMNS : 0), "as in decode.py");

constexpr int K_SHARE = K_ROW / 4, V_SHARE = V_ROW / 8;  // bytes of a row that one lane unpacks
constexpr int K_WORDS = K_SHARE / 4, V_WORDS = (V_SHARE + 3) / 4;
constexpr int TABLE_BYTES = KEY::ENTRIES * 128;

DI void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
DI void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DI u32 transpose(u32 x) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x)); return r; }
DI float pow2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float lg2(float x) { float r; asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float inverse(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float as_float(u32 x) { return __uint_as_float(x); }
DI float minus_infinity() { return as_float(0xff800000u); }
DI float max_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, k)); return x; }
DI float sum_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x += __shfl_xor_sync(~0u, x, k); return x; }
DI u32 query_pair(u32 x) { return QUERY_BF16 ? half2(as_float(x << 16), as_float(x & 0xffff0000u)) : x; }
DI u16 query_type(float x) {
  u16 r;
  if (QUERY_BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

template <int BYTES> DI void load_shared(u32 a, u32* w) {
  if constexpr (BYTES == 2) { u16 h; asm volatile("ld.shared.b16 %0, [%1];" : "=h"(h) : "r"(a)); w[0] = h; }
  else if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w[0]) : "r"(a));
  else if constexpr (BYTES == 8) asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(a));
  else asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a));
}

// A lane's share of a row: where it lies in a tile, and its words.
template <int ROW, int SHARE> struct Share {
  static constexpr int PIECE = SHARE % 16 == 0 ? 16 : SHARE % 8 == 0 && SHARE < 16 ? 8 : SHARE == 2 ? 2 : 4;
  static constexpr int PIECES = SHARE < 4 ? 1 : (SHARE + PIECE - 1) / PIECE;
  static constexpr bool ODD = SHARE % 4 == 2 && SHARE > 4;  // 6 bytes: every other share begins in the middle of a word
  static constexpr int ADDRESSES = PIECE == 16 ? PIECES : 1;
  u32 at[ADDRESSES];
  int shift;
  DI Share(int row, int index) {
    int byte = index * SHARE;
    shift = ODD ? byte % 4 * 8 : 0;
    byte -= ODD ? byte % 4 : 0;
#pragma unroll
    for (int i = 0; i < ADDRESSES; i++) {
      at[i] = chunk_address<ROW>(row, byte / 16 + i) + byte % 16;
      keep(at[i]);
    }
  }
  DI void load(u32 tile, u32* w) const {
#pragma unroll
    for (int i = 0; i < PIECES; i++) load_shared<PIECE>(tile + (ADDRESSES > 1 ? at[i] : at[0] + i * PIECE), w + i * PIECE / 4);
    if constexpr (ODD) w[0] = __funnelshift_r(w[0], w[1], shift), w[1] >>= shift;
  }
};

// 16 rows of an fp16 matrix with D columns, which lies in the order of these loads (decode.py): 512 bytes in a row each.
struct Rows {
  uint4 x[D / 32], y[D / 32];
  DI Rows() {}
  DI Rows(const u16* matrix, int tile) {
#pragma unroll
    for (int m = 0; m < D / 32; m++) {
      const uint4* at = (const uint4*)(matrix + 16 * D * tile + 512 * m) + threadIdx.x % 32;
      x[m] = at[0], y[m] = at[32];
    }
  }
  // Adds their products with eight columns, of which register b[4 m + i] holds, in lane c, dimensions 8 (4 m + c) + 2 i and the next.
  DI void multiply(float (&acc)[4], const u32* b) const {
#pragma unroll
    for (int m = 0; m < D / 32; m++) {
      mma(acc, x[m].x, y[m].x, x[m].y, y[m].y, b[4 * m], b[4 * m + 1]);
      mma(acc, x[m].z, y[m].z, x[m].w, y[m].w, b[4 * m + 2], b[4 * m + 3]);
    }
  }
};

template <int N, int M> DI void butterfly(float (&x)[N][M]) {  // x becomes H_N x, along the first axis
#pragma unroll
  for (int k = 1; k < N; k <<= 1)
#pragma unroll
    for (int n = 0; n < N; n++)
      if (!(n & k))
#pragma unroll
        for (int i = 0; i < M; i++) {
          const float a = x[n][i], b = x[n | k][i];
          x[n][i] = a + b, x[n | k][i] = a - b;
        }
}

constexpr bool permutes_bits() {  // of j: then a Hadamard matrix over dimensions is one over (lane, j, half of the register)
  for (int j = 0; j < D / 8; j++) {
    int together = 0;
    for (int k = 1; k < D / 8; k <<= 1) {
      const int bit = KEY::dim(k);
      if (bit & bit - 1 || bit == KEY::HALF) return false;
      together |= j & k ? bit : 0;
    }
    if (KEY::dim(j) != together) return false;
  }
  return true;
}
constexpr u32 half_pair(float x) { u32 e = 15; while (x > 1.f) x /= 2.f, e++; return twice(e << 10); }  // of a power of two

// The query columns of one sequence and kv head as B operands, in the order of the keys' registers and divided by their units.
struct Query {
  // Mapped queries are multiplied by NORM, about D^-1/2 where the map is a Hadamard matrix, to stay within fp16.
  static constexpr float NORM = KEY_MAP == HADAMARD ? (D > 128 ? 0.0625f : 0.125f) : 1.f;
  u32 b[NT][D / 8];
  float sum[NT][2];  // of the dimensions, in the unit of the scores, for columns 2 c and 2 c + 1

  // Eight columns as they were given: each lane a quarter of one. signs: of a Hadamard matrix, null where all are positive.
  static DI void fetch(u32 (&words)[D / 8], const u16* q, const u16* signs, const Batch& batch, int s, int head, int column0) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, column = column0 + g;
    const bool used = column < batch.queries(s) * GROUP;
    const u16* row = q + ((i64)(batch.first_query(s) + column / GROUP) * KV_HEADS * GROUP + head * GROUP + column % GROUP) * D;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      uint4 y = make_uint4(0, 0, 0, 0);
      if (used) y = ((const uint4*)(row + c * (D / 4)))[i];
      if (KEY_MAP == HADAMARD && signs) {
        const uint4 sign = ((const uint4*)(signs + c * (D / 4)))[i];
        y.x ^= sign.x, y.y ^= sign.y, y.z ^= sign.z, y.w ^= sign.w;
      }
      words[4 * i] = y.x, words[4 * i + 1] = y.y, words[4 * i + 2] = y.z, words[4 * i + 3] = y.w;
    }
  }
  static DI void arrange(u32 (&x)[D / 8], const u32 (&words)[D / 8]) {  // as fp16, in the order of the keys' registers
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
      const int d = KEY::dim(j);
      x[j] = query_pair(KEY::HALF == 1 ? words[d / 2] : prmt(words[d / 2], words[(d + KEY::HALF) / 2], d & 1 ? 0x7632 : 0x5410));
    }
  }

  // Tile w of the operands, out of rows 16 w and following of the mapped columns.
  static DI void operands(u32& b0, u32& b1, const float (&y)[4], int w) {
    const float u0 = NORM / KEY::unit(2 * w), u1 = NORM / KEY::unit(2 * w + 1);
    b0 = transpose(half2(y[0] * u0, y[1] * u0)), b1 = transpose(half2(y[2] * u1, y[3] * u1));
  }

  // map: of KEY_MAP MATRIX, its tiles; of HADAMARD, its signs. mapped: where QueryMapper put them, or 0.
  DI void load(const u16* q, const u16* map, u32 mapped, const Batch& batch, int s, int head, int column0) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 words[D / 8], x[D / 8];
      float total[4] = {}, y[D / 16][4] = {};
      if (KEY_MAP == MATRIX && mapped) {
#pragma unroll
        for (int w = 0; w < D / 16; w++) load_shared<8>(mapped + ((nt * (D / 16) + w) * 32 + threadIdx.x % 32) * 8, &b[nt][2 * w]);
      } else {
        fetch(words, q, map, batch, s, head, column0 + nt * 8);
        arrange(x, words);
        if constexpr (KEY_MAP == HADAMARD) {  // 16 dimensions of each w by mma, then along w
          static_assert(permutes_bits(), "dim(j)");
          const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
          const u32 h = 0x3c003c00u ^ (__popc(g & 2 * c) & 1) << 15 ^ (u32)(__popc(g & 2 * c + 1) & 1) << 31;
#pragma unroll
          for (int w = 0; w < D / 16; w++) mma(y[w], h, h, h, h ^ 0x80008000u, x[2 * w], x[2 * w + 1]);
          butterfly(y);
        }
#pragma unroll
        for (int w = 0; w < D / 16; w++) {
          if constexpr (KEY_MAP == NO_MAP) {
            const float u0 = 1.f / KEY::unit(2 * w), u1 = 1.f / KEY::unit(2 * w + 1);
            b[nt][2 * w] = half2(low(x[2 * w]) * u0, high(x[2 * w]) * u0);
            b[nt][2 * w + 1] = half2(low(x[2 * w + 1]) * u1, high(x[2 * w + 1]) * u1);
          } else {
            if (KEY_MAP == MATRIX) Rows(map, w).multiply(y[w], x);
            operands(b[nt][2 * w], b[nt][2 * w + 1], y[w], w);
          }
        }
      }
#pragma unroll
      for (int w = 0; w < D / 16; w++) {
        const u32 a0 = half_pair(KEY::unit(2 * w)), a1 = half_pair(KEY::unit(2 * w + 1));
        mma(total, a0, a0, a1, a1, b[nt][2 * w], b[nt][2 * w + 1]);
      }
      sum[nt][0] = total[0] / KEY::GAIN, sum[nt][1] = total[1] / KEY::GAIN;
    }
  }

  // The scores of 16 rows of an offset table, in any memory, times factor, into shared memory at `to` [16, COLUMNS] float32.
  DI void score_offsets(const u16* offsets, float factor, u32 to) const {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const Rows rows(offsets, 0);
    __syncwarp();  // the scores before these may still be read
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float y[4] = {};
      rows.multiply(y, b[nt]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 at = to + ((g + 8 * i) * COLUMNS + nt * 8 + 2 * c) * 4;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(y[2 * i] * factor), "f"(y[2 * i + 1] * factor) : "memory");
      }
    }
    __syncwarp();
  }
};

// A block's warps together map by a matrix the queries with which each of them begins, `begun_in` (pairs, -1: none): each
// warp some tiles of all of them. What begin() reads is asked for before the tiles, behind which it would queue.
struct QueryMapper {
  static constexpr int EARLY = 2;  // distinct pairs that begin() reads
  const u16 *q, *matrices;
  int stride;
  const Batch& batch;
  int column0;
  Rows rows;
  u32 words[EARLY][NT][D / 8];

  DI QueryMapper(const u16* q, const u16* matrices, int stride, const Batch& batch, int column0)
      : q(q), matrices(matrices), stride(stride), batch(batch), column0(column0) {}
  static DI u32 slot(int warp) { return shared_address(shared) + TABLE_BYTES + warp * WARP_BYTES + MAPPED_AT; }
  static DI int next(const int* begun_in, int w) {  // the next warp that begins with another pair than warp w
    const int pair = begun_in[w];
    while (++w < WARPS && begun_in[w] == pair) {}
    return w < WARPS && begun_in[w] >= 0 ? w : WARPS;
  }
  DI int head(int pair) const { return pair / batch.sequences; }
  DI Rows tile(int pair, int t) const { return Rows(matrices + (i64)head(pair) * stride, t); }
  DI void read(u32 (&words)[NT][D / 8], int pair) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) Query::fetch(words[nt], q, nullptr, batch, pair % batch.sequences, head(pair), column0 + nt * 8);
  }
  DI void map(const u32 (&words)[NT][D / 8], int t, int w) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 x[D / 8], b0, b1;
      float y[4] = {};
      Query::arrange(x, words[nt]);
      rows.multiply(y, x);
      Query::operands(b0, b1, y, t);
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(slot(w) + ((nt * (D / 16) + t) * 32 + threadIdx.x % 32) * 8), "r"(b0), "r"(b1) : "memory");
    }
  }

  DI void begin(const int* begun_in) {
    const int warp = threadIdx.x / 32;
    if (warp >= D / 16) return;
    rows = tile(begun_in[0], warp);
    int w = 0;
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      if (w < WARPS) read(words[i], begun_in[w]), w = next(begun_in, w);
    }
  }
  DI void finish(const int* begun_in) {
    for (int t = threadIdx.x / 32, first = t; t < D / 16; t += WARPS) {
      int held = head(begun_in[0]), i = 0;
      if (t > first) rows = tile(begun_in[0], t);
      for (int w = 0; w < WARPS; w = next(begun_in, w), i++) {
        if (head(begun_in[w]) != held) rows = tile(begun_in[w], t), held = head(begun_in[w]);
        if (t > first || i >= EARLY) read(words[EARLY - 1], begun_in[w]);
        if (t == first && i == 0) map(words[0], t, w); else map(words[EARLY - 1], t, w);
      }
    }
  }
};

// Where a lane finds its shares of a tile. Row r (and r + 8) of the score tile is token(r) (and token(r) + 8): with the xor of
// chunk_address, the order in which neither the loads of keys nor those of values conflict.
DI int token(int r) { return 0x76452310 >> 4 * r & 7; }
struct Lane {
  int ta;
  u32 table;  // shared address of this lane's copy of the codebook
  Share<K_ROW, K_SHARE> key;
  Share<V_ROW, V_SHARE> value0, value1;
  DI Lane(int g, int c)
      : ta(token(g)), table(shared_address(shared) + threadIdx.x % 32 * 4), key(token(g), c), value0(token(2 * c), g),
        value1(token(2 * c + 1), g) {
    keep(ta);
    if (KEY::ENTRIES) keep(table);
  }
};

DI float key_scale(u32 meta, float squares) {
  return KEY::META == Meta::none ? 1.f : KEY::META == Meta::norm ? low(meta) * rsqrtf(squares) : as_float(meta);
}
DI float zero_point(u32 meta) { return (float)(meta & 15u); }
DI float sum_squares(u32 h) {  // of one row, of which four lanes hold a quarter each
  float x = low(h) + high(h);
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The running softmax of a warp, base 2. m and l are per column (of this lane's tokens only: l). o, bias and mass carry the
// factor v_norm, a power of two that keeps p * scale within fp16 whatever the values' scales are. Codes with a CENTRE are
// multiplied as they are, which is free, and CENTRE * mass is taken off o every few tiles: the tensor core truncates as it
// accumulates, and an uncentred sum would drift with the number of tokens.
struct Softmax {
  float o[NT][D / 16][4], m[NT][2], l[NT][2], bias[NT][2], mass[NT][4], v_norm;
  u32 seen;    // a bit for each column of this lane that has met a key
  bool fresh;  // some column of the warp has not

  DI Softmax() : v_norm(as_float(0x53800000u)), seen(0), fresh(true) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        m[nt][e] = l[nt][e] = bias[nt][e] = mass[nt][e] = mass[nt][2 + e] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) o[nt][i][e] = o[nt][i][2 + e] = 0.f;
      }
  }

  DI void centre() {
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float x = mass[nt][e] * (-VALUE::CENTRE / VALUE::GAIN);
        mass[nt][e] = mass[nt][2 + e] = 0.f;
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
          o[nt][i][e] = fmaf(x, VALUE::unit(2 * i), o[nt][i][e]), o[nt][i][2 + e] = fmaf(x, VALUE::unit(2 * i + 1), o[nt][i][2 + e]);
        }
      }
  }

  // Moves m up to the scores s (relative to m), whose maxima over this lane's tokens are x; v: their largest value scale.
  template <int N> DI void rescale(float (&s)[N][NT][4], const float (&x)[NT][2], float v) {
    u32 fit = 0x7f000000u - (__float_as_uint(max_over_tokens(v)) & 0x7f800000u);  // the power of two that brings v to [1, 2)
    fit = min(fit, __float_as_uint(v_norm));
    const float rv = as_float(0x3f800000u + fit - __float_as_uint(v_norm));
    v_norm = as_float(fit);
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32 bit = 1u << (2 * nt + e);
        float top = max_over_tokens(x[nt][e]), up = seen & bit ? fmaxf(top, 0.f) : top == minus_infinity() ? 0.f : top;
        float r = seen & bit ? pow2(-up) : 1.f;
        if (top != minus_infinity()) seen |= bit;
        m[nt][e] += up, l[nt][e] *= r, r *= rv, bias[nt][e] *= r, mass[nt][e] *= r, mass[nt][2 + e] *= r;
#pragma unroll
        for (int i = 0; i < D / 16; i++) o[nt][i][e] *= r, o[nt][i][2 + e] *= r;
#pragma unroll
        for (int n = 0; n < N; n++) s[n][nt][e] -= up, s[n][nt][2 + e] -= up;
      }
    fresh = __any_sync(~0u, seen != (1u << 2 * NT) - 1);
  }

  // Adds N tiles. offsets: where the scores of each tile's row of the offset table are, in shared memory.
  // valid(n, half, nt, e): may column 2 c + e of nt see this lane's token (half: + 8) of tile n?
  template <int N, class Valid>
  DI void add(const u32 (&tile)[N], const u32 (&offsets)[N], const Lane& at, const Query& q, float scale, float softcap, bool masked, Valid valid) {
    float s[N][NT][4], x[NT][2], v_top;
#pragma unroll
    for (int n = 0; n < N; n++) {
      u32 ka[K_WORDS], kb[K_WORDS], meta[2] = {}, squares[2] = {};
      at.key.load(tile[n], ka), at.key.load(tile[n] + 8 * K_ROW, kb);
      if constexpr (K_META > 0) {
        load_shared<K_META>(tile[n] + TILE_KM + at.ta * K_META, meta), load_shared<K_META>(tile[n] + TILE_KM + (at.ta + 8) * K_META, meta + 1);
      }
      const float z0 = KEY::META == Meta::scale_zero ? -zero_point(meta[0]) : -KEY::ZERO;
      const float z1 = KEY::META == Meta::scale_zero ? -zero_point(meta[1]) : -KEY::ZERO;
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) s[n][nt][e] = z0 * q.sum[nt][e], s[n][nt][2 + e] = z1 * q.sum[nt][e];
#pragma unroll
      for (int w = 0; w < D / 16; w++) {
        u32 a0 = KEY::pair(ka, 2 * w, at.table), a1 = KEY::pair(kb, 2 * w, at.table);
        u32 a2 = KEY::pair(ka, 2 * w + 1, at.table), a3 = KEY::pair(kb, 2 * w + 1, at.table);
        if constexpr (KEY::META == Meta::norm) {
          squares[0] = fma2(a0, a0, fma2(a2, a2, squares[0])), squares[1] = fma2(a1, a1, fma2(a3, a3, squares[1]));
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma(s[n][nt], a0, a1, a2, a3, q.b[nt][2 * w], q.b[nt][2 * w + 1]);
      }
      const float f[2] = {key_scale(meta[0], sum_squares(squares[0])) * scale, key_scale(meta[1], sum_squares(squares[1])) * scale};
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        u32 offset[2] = {};
        if (KEY_OFFSET) load_shared<8>(offsets[n] + (nt * 8 + threadIdx.x % 4 * 2) * 4, offset);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float y = s[n][nt][i], o = as_float(offset[i & 1]);
          if (SOFTCAP) {  // scale brings the score to 2 log2(e) / softcap, so y = softcap log2(e) tanh(score / softcap)
            y = softcap - 2.f * softcap * inverse(1.f + pow2(KEY_OFFSET ? fmaf(y, f[i / 2], o) : y * f[i / 2])) - m[nt][i & 1];
          } else {
            y = fmaf(y, f[i / 2], KEY_OFFSET ? o - m[nt][i & 1] : -m[nt][i & 1]);
          }
          s[n][nt][i] = y;
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (!valid(n, i / 2, nt, i & 1)) s[n][nt][i] = minus_infinity();
    }
    u32 va[N][V_WORDS], vb[N][V_WORDS], vc[N][V_WORDS], vd[N][V_WORDS];
    float v_scale[N][2], v_bias[N][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 meta = 0x3f800000u;
        if constexpr (V_META > 0) load_shared<V_META>(tile[n] + TILE_VM + (at.ta + 8 * r) * V_META, &meta);
        if constexpr (VALUE::META == Meta::scale_min) {
          v_scale[n][r] = low(meta), v_bias[n][r] = fmaf(v_scale[n][r], VALUE::CENTRE, high(meta));
        } else {
          v_scale[n][r] = as_float(meta), v_bias[n][r] = VALUE::META == Meta::scale_zero ? v_scale[n][r] * (8.f - zero_point(meta)) : 0.f;
        }
        v_top = n + r == 0 ? v_scale[n][r] : fmaxf(v_top, v_scale[n][r]);
      }
      at.value0.load(tile[n] + TILE_V, va[n]), at.value1.load(tile[n] + TILE_V, vb[n]);
      at.value0.load(tile[n] + TILE_V + 8 * V_ROW, vc[n]), at.value1.load(tile[n] + TILE_V + 8 * V_ROW, vd[n]);
    }
    float top;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        x[nt][e] = fmaxf(s[0][nt][e], s[0][nt][2 + e]);
#pragma unroll
        for (int n = 1; n < N; n++) x[nt][e] = fmaxf(x[nt][e], fmaxf(s[n][nt][e], s[n][nt][2 + e]));
        top = nt + e == 0 ? x[nt][e] : fmaxf(top, x[nt][e]);
      }
    if (fresh || __any_sync(~0u, top > 4.f || v_top * v_norm > 16.f)) rescale(s, x, v_top);  // p <= 16 needs no new m
#pragma unroll
    for (int n = 0; n < N; n++) {
      u32 p[NT][2];
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float p0 = pow2(s[n][nt][2 * r]), p1 = pow2(s[n][nt][2 * r + 1]), u = v_scale[n][r] * v_norm;
          l[nt][0] += p0, l[nt][1] += p1;
          if constexpr (VALUE::META == Meta::scale_zero || VALUE::META == Meta::scale_min) {
            bias[nt][0] = fmaf(p0, v_bias[n][r] * v_norm, bias[nt][0]), bias[nt][1] = fmaf(p1, v_bias[n][r] * v_norm, bias[nt][1]);
          }
          p[nt][r] = transpose(half2(p0 * u, p1 * u));
        }
      if constexpr (VALUE::CENTRE > 0) {
        constexpr u32 ONES = 0x3c003c00u;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma(mass[nt], ONES, ONES, ONES, ONES, p[nt][0], p[nt][1]);
      }
#pragma unroll
      for (int i = 0; i < D / 16; i++) {
        u32 a0 = VALUE::pair(va[n], vb[n], 2 * i), a1 = VALUE::pair(va[n], vb[n], 2 * i + 1);
        u32 a2 = VALUE::pair(vc[n], vd[n], 2 * i), a3 = VALUE::pair(vc[n], vd[n], 2 * i + 1);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma(o[nt][i], a0, a1, a2, a3, p[nt][0], p[nt][1]);
      }
    }
  }

  // to [columns, PIECE], in shared or global memory; columns beyond `columns` are not written.
  DI void write(float* to, int columns, float gain) {
    if (VALUE::CENTRE > 0) centre();
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = sum_over_tokens(l[nt][e]), r = sum > 0.f ? inverse(sum * v_norm) : 0.f, z = sum_over_tokens(bias[nt][e]) * r;
        int column = nt * 8 + 2 * c + e;
        if (column >= columns) continue;
        if (g == 0) to[column * PIECE + D] = sum > 0.f ? m[nt][e] + lg2(sum) : minus_infinity();
        float4* row = (float4*)(to + column * PIECE + g * (D / 8));
#pragma unroll
        for (int i = 0; i < D / 16; i += 2) {
          auto value = [&](int k) { return fmaf(o[nt][i + k / 2][e + k % 2 * 2], gain / VALUE::unit(2 * i + k) * r, z); };
          row[i / 2] = make_float4(value(0), value(1), value(2), value(3));
        }
      }
  }
};
