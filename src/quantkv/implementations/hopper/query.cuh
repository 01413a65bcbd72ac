// Queries, mapped, as operands of the tensor core.
#pragma once
#include "linear.cuh"

DI u32 query_pair(u32 x) { return QUERY_BF16 ? half2(as_float(x << 16), as_float(x & 0xffff0000u)) : x; }
DI u16 query_type(float x) { return QUERY_BF16 ? bfloat1(x) : half1(x); }

static_assert(DK % 32 == 0 || DK == D && KEY_MAP != HADAMARD, "quarters of whole loads");
static_assert(KEY_MAP != HADAMARD || permutes_bits(), "key_dim(j)");
using KeyMatrix = MatrixRows<DK>;  // rows and columns in the order of the keys' registers

struct Queries {  // 16-bit floats [T, KV_HEADS * GROUP, D], strides of the first two axes in elements
  const u16* first;
  i64 token, head;
  DI const u16* row(int t, int h) const { return first + t * token + h * head; }
};

// Columns as they were given: each lane has a quarter of one of every eight. They are asked for before the tiles, behind which they would
// queue, and arrive while those are on their way.
struct GivenQuery {
  u32 words[NT][DK / 8], signs[DK / 8];  // signs: of a Hadamard matrix

  // Eight columns.
  static DI void ask(u32 (&words)[DK / 8], const Queries& q, const Sequences& sequences, int s, int head, int column0) {
    const int lane = threadIdx.x % 32, c = lane % 4, column = column0 + lane / 4;
    const bool used = column < sequences.queries(s) * GROUP;
    take(words, q.row(sequences.first_query(s) + column / GROUP, head * GROUP + column % GROUP), used);
  }
  // sign_bits: null where all are positive.
  DI void ask(const Queries& q, const u16* sign_bits, const Sequences& sequences, int s, int head, int column0) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) ask(words[nt], q, sequences, s, head, column0 + nt * 8);
    if (KEY_MAP == HADAMARD) take(signs, sign_bits, sign_bits != nullptr);
  }
  // Where none are asked for: registers that are not waited with.
  DI void forget() {
#pragma unroll
    for (int i = 0; i < DK / 8; i++) {
      signs[i] = 0;
#pragma unroll
      for (int nt = 0; nt < NT; nt++) words[nt][i] = 0;
    }
  }

 private:
  static DI void take(u32 (&to)[DK / 8], const u16* row, bool used) {  // this lane's quarter, zero where it is not used or beyond D
    const int first = threadIdx.x % 4 * (DK / 4);
    if constexpr (DK % 32) {  // quarters begin at multiples of 8 bytes
#pragma unroll
      for (int i = 0; i < DK / 16; i++) {
        const uint2 y = used ? load_at_once((const uint2*)(row + first) + i) : make_uint2(0, 0);
        to[2 * i] = y.x, to[2 * i + 1] = y.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < DK / 32; i++) {
        const uint4 y = used && (DK == D || first + 8 * i < D) ? load_at_once((const uint4*)(row + first) + i) : make_uint4(0, 0, 0, 0);
        to[4 * i] = y.x, to[4 * i + 1] = y.y, to[4 * i + 2] = y.z, to[4 * i + 3] = y.w;
      }
    }
  }
};

// The query columns of one sequence and kv head as B operands, in the order of the keys' registers and divided by their units.
struct Query {
  // Mapped queries are multiplied by NORM, about D^-1/2 where the map is a Hadamard matrix, to stay within fp16.
  static constexpr float NORM = KEY_MAP == HADAMARD ? (D > 256 ? 0.03125f : D > 128 ? 0.0625f : 0.125f) : 1.f;
  u32 b[NT][DK / 8];
  float sum[NT][2];  // of the dimensions, in the unit of the scores, for columns 2 c and 2 c + 1
  u32 parked;        // shared address of b, where it is not kept in registers

  DI void park(u32 at) {  // every lane keeps what only it reads
    parked = at + threadIdx.x % 32 * (NT > 1 ? 16 : 8);
#pragma unroll
    for (int nt = 0; nt < NT; nt += 2) {
      const int other = nt + 1 < NT ? nt + 1 : nt;  // the last of an odd number is there twice
#pragma unroll
      for (int w = 0; w < DK / 16; w++) {
        if (NT > 1) store_shared(parked + (nt / 2 * (DK / 16) + w) * 512, b[nt][2 * w], b[nt][2 * w + 1], b[other][2 * w], b[other][2 * w + 1]);
        else store_shared(parked + w * 256, b[nt][2 * w], b[nt][2 * w + 1]);
      }
    }
  }
  DI void step(int w, u32 (&x)[2 * EVEN_NT]) const {  // b[nt][2 w], b[nt][2 w + 1] for all nt
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (!PARKED) x[2 * nt] = b[nt][2 * w], x[2 * nt + 1] = b[nt][2 * w + 1];
      else if (NT == 1) load_shared<8>(parked + w * 256, x);
      else if (nt % 2 == 0) load_shared<16>(parked + (nt / 2 * (DK / 16) + w) * 512, x + 2 * nt);
    }
  }

  static DI void arrange(u32 (&x)[DK / 8], const u32 (&words)[DK / 8]) {  // in the order of the keys' registers; to be mapped, as fp16
#pragma unroll
    for (int j = 0; j < DK / 8; j++) {
      const int d = key_dim(j);
      const u32 pair = KEY::HALF == 1 ? words[d / 2] : prmt(words[d / 2], words[(d + KEY::HALF) / 2], d & 1 ? 0x7632 : 0x5410);
      x[j] = KEY::BFLOAT && KEY_MAP == NO_MAP ? pair : query_pair(pair);
    }
  }

  // Tile w of the operands, out of rows 16 w and following of the mapped columns.
  static DI void operands(u32& b0, u32& b1, const float (&y)[4], int w) {
    const float u0 = NORM / key_unit(2 * w), u1 = NORM / key_unit(2 * w + 1);
    b0 = transpose(operand_pair<KEY>(y[0] * u0, y[1] * u0)), b1 = transpose(operand_pair<KEY>(y[2] * u1, y[3] * u1));
  }

  // mapped: where QueryMapper put the operands, of KEY_MAP MATRIX.
  DI void load(const GivenQuery& given, u32 mapped = 0) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 words[DK / 8], x[DK / 8];
      float y[DK / 16][4] = {};
      if constexpr (KEY_MAP == MATRIX) {
#pragma unroll
        for (int w = 0; w < DK / 16; w++) load_shared<8>(mapped + ((nt * (DK / 16) + w) * 32 + threadIdx.x % 32) * 8, &b[nt][2 * w]);
      } else {
#pragma unroll
        for (int j = 0; j < DK / 8; j++) words[j] = given.words[nt][j] ^ (KEY_MAP == HADAMARD ? given.signs[j] : 0);
        arrange(x, words);
      }
      if constexpr (KEY_MAP == HADAMARD) {  // 16 dimensions of each w by mma, then along w
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        const u32 h = 0x3c003c00u ^ (__popc(g & 2 * c) & 1) << 15 ^ (u32)(__popc(g & 2 * c + 1) & 1) << 31;
#pragma unroll
        for (int w = 0; w < DK / 16; w++) mma(y[w], h, h, h, h ^ 0x80008000u, x[2 * w], x[2 * w + 1]);
        butterfly(y);
      }
#pragma unroll
      for (int w = 0; w < DK / 16; w++) {
        if constexpr (KEY_MAP == NO_MAP && KEY::BFLOAT) {
          b[nt][2 * w] = x[2 * w], b[nt][2 * w + 1] = x[2 * w + 1];
        } else if constexpr (KEY_MAP == NO_MAP) {
          const float u0 = 1.f / key_unit(2 * w), u1 = 1.f / key_unit(2 * w + 1);
          b[nt][2 * w] = half2(low(x[2 * w]) * u0, high(x[2 * w]) * u0);
          b[nt][2 * w + 1] = half2(low(x[2 * w + 1]) * u1, high(x[2 * w + 1]) * u1);
        } else if constexpr (KEY_MAP == HADAMARD) {
          operands(b[nt][2 * w], b[nt][2 * w + 1], y[w], w);
        }
      }
      add_up(nt);
    }
  }
  DI void add_up(int nt) {
    float total[4] = {};
#pragma unroll
    for (int w = 0; w < DK / 16; w++) {
      const u32 a0 = key_ones(2 * w), a1 = key_ones(2 * w + 1);
      product<KEY>(total, a0, a0, a1, a1, b[nt][2 * w], b[nt][2 * w + 1]);
    }
    sum[nt][0] = total[0] / KEY_GAIN, sum[nt][1] = total[1] / KEY_GAIN;
  }

  // The scores of 16 rows of an offset table, times factor, into shared memory at `to` [16, COLUMNS] float32.
  DI void score_offsets(const u16* table, int sixteen, float factor, u32 to) const {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const KeyMatrix rows(table, sixteen);
    __syncwarp();  // the scores before these may still be read
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float y[4] = {};
      u32 x[DK / 8];
#pragma unroll
      for (int w = 0; w < DK / 16; w++) {
        if (PARKED) load_shared<8>(parked + (NT > 1 ? (nt / 2 * (DK / 16) + w) * 512 + nt % 2 * 8 : w * 256), x + 2 * w);
        else x[2 * w] = b[nt][2 * w], x[2 * w + 1] = b[nt][2 * w + 1];
        if (KEY::BFLOAT) x[2 * w] = query_pair(x[2 * w]), x[2 * w + 1] = query_pair(x[2 * w + 1]);
      }
      rows.multiply(y, x);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        store_shared(to + ((g + 8 * i) * COLUMNS + nt * 8 + 2 * c) * 4, as_bits(y[2 * i] * factor), as_bits(y[2 * i + 1] * factor));
      }
    }
    __syncwarp();
  }
};
