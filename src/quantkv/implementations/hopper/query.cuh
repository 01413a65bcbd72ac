// Queries, mapped, as operands of the tensor core.
#include "lanes.cuh"

DI u32 query_pair(u32 x) { return QUERY_BF16 ? half2(as_float(x << 16), as_float(x & 0xffff0000u)) : x; }
DI u16 query_type(float x) {
  u16 r;
  if (QUERY_BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

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
  u32 parked;        // shared address of b, where it is not kept in registers

  DI void park(u32 at) {  // every lane keeps what only it reads
    parked = at + threadIdx.x % 32 * 16;
#pragma unroll
    for (int nt = 0; nt + 1 < NT; nt += 2)
#pragma unroll
      for (int w = 0; w < D / 16; w++)
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(parked + (nt / 2 * (D / 16) + w) * 512), "r"(b[nt][2 * w]),
                     "r"(b[nt][2 * w + 1]), "r"(b[nt + 1][2 * w]), "r"(b[nt + 1][2 * w + 1]) : "memory");
  }
  DI void step(int w, u32 (&x)[2 * NT]) const {  // b[nt][2 w], b[nt][2 w + 1] for all nt
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (!PARKED) x[2 * nt] = b[nt][2 * w], x[2 * nt + 1] = b[nt][2 * w + 1];
      else if (nt % 2 == 0) load_shared<16>(parked + (nt / 2 * (D / 16) + w) * 512, x + 2 * nt);
    }
  }

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

  // mapped: where QueryMapper put the operands, of KEY_MAP MATRIX.
  DI void load(const u16* q, const u16* signs, u32 mapped, const Batch& batch, int s, int head, int column0) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 words[D / 8], x[D / 8];
      float total[4] = {}, y[D / 16][4] = {};
      if constexpr (KEY_MAP == MATRIX) {
#pragma unroll
        for (int w = 0; w < D / 16; w++) load_shared<8>(mapped + ((nt * (D / 16) + w) * 32 + threadIdx.x % 32) * 8, &b[nt][2 * w]);
      } else {
        fetch(words, q, signs, batch, s, head, column0 + nt * 8);
        arrange(x, words);
      }
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
        } else if constexpr (KEY_MAP == HADAMARD) {
          operands(b[nt][2 * w], b[nt][2 * w + 1], y[w], w);
        }
        const u32 a0 = half_pair(KEY::unit(2 * w)), a1 = half_pair(KEY::unit(2 * w + 1));
        mma(total, a0, a0, a1, a1, b[nt][2 * w], b[nt][2 * w + 1]);
      }
      sum[nt][0] = total[0] / KEY::GAIN, sum[nt][1] = total[1] / KEY::GAIN;
    }
  }

  // The scores of 16 rows of an offset table, times factor, into shared memory at `to` [16, COLUMNS] float32.
  DI void score_offsets(const u16* table, int sixteen, float factor, u32 to) const {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const Rows rows(table, sixteen);
    __syncwarp();  // the scores before these may still be read
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float y[4] = {};
      u32 x[D / 8];
#pragma unroll
      for (int w = 0; w < D / 16; w++) {
        if (PARKED) load_shared<8>(parked + (nt / 2 * (D / 16) + w) * 512 + nt % 2 * 8, x + 2 * w);
        else x[2 * w] = b[nt][2 * w], x[2 * w + 1] = b[nt][2 * w + 1];
      }
      rows.multiply(y, x);
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
  static DI u32 slot(int warp) { return shared_address(shared) + KEY::BYTES + warp * WARP_BYTES + MAPPED_AT; }
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
  DI void map(const u32 (&words)[NT][D / 8], int t, u32 to) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 x[D / 8], b0, b1;
      float y[4] = {};
      Query::arrange(x, words[nt]);
      rows.multiply(y, x);
      Query::operands(b0, b1, y, t);
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + ((nt * (D / 16) + t) * 32 + threadIdx.x % 32) * 8), "r"(b0), "r"(b1) : "memory");
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
        if (t == first && i == 0) map(words[0], t, slot(w)); else map(words[EARLY - 1], t, slot(w));
      }
    }
  }
  // Where the mapped query of a pair is: a pair with which none of the warps begins, this one maps alone.
  DI u32 mapped(const int* begun_in, int pair) {
    for (int w = 0; w < WARPS; w++)
      if (begun_in[w] == pair) return slot(w);
    const u32 own = slot(threadIdx.x / 32) + QUERY_BYTES;
    read(words[0], pair);
    __syncwarp();
#pragma unroll 1
    for (int t = 0; t < D / 16; t++) rows = tile(pair, t), map(words[0], t, own);
    __syncwarp();
    return own;
  }
};
