// Queries, mapped, as operands of the tensor core.
#pragma once
#include "linear.cuh"

DI u32 query_pair(u32 x) { return QUERY_BF16 ? half2(as_float(x << 16), as_float(x & 0xffff0000u)) : x; }
// A pair of a query's numbers by what a Hadamard matrix's diagonal has of them: signs, or where KEY_EVENED, powers of
// two up to 1 with signs, as bfloat16.
DI u32 by_diagonal(u32 x, u32 diagonal) {
  if (!KEY_EVENED) return x ^ diagonal;
  return QUERY_BF16 ? mul_bfloat2(x, diagonal)
                    : mul2(x, half2(as_float(diagonal << 16), as_float(diagonal & 0xffff0000u)));
}
// The diagonal of a kv head's Hadamard matrices.
DI const u16* diagonal_of(const AttendArguments& a, int head) {
  return KEY_EVENED ? a.key_map + (i64)head * a.key_map_stride : a.key_map;
}
DI float query_number(u32 x) { return QUERY_BF16 ? as_float(x << 16) : low(x); }  // the lower 16 bits
DI u16 query_type(float x) { return QUERY_BF16 ? bfloat1(x) : half1(x); }

static_assert(DK % 32 == 0 || DK == D && (KEY_MAP != HADAMARD || BY_CHUNKS), "quarters of whole loads");
static_assert(KEY_MAP != HADAMARD || BY_CHUNKS || permutes_bits(), "key_dim(j)");
using KeyMatrix = MatrixRows<DK>;  // rows and columns in the order of the keys' registers

struct Queries {  // 16-bit floats [T, KV_HEADS * GROUP, D], strides of the first two axes in elements
  const u16* first;
  i64 token, head;
  DI const u16* row(int t, int h) const { return first + t * token + h * head; }
};

struct EveryTile {  // of packed query rows is this warp's
  DI bool operator()(int) const { return true; }
};

// Packed query rows as they were given: each lane has a quarter of one of every eight, or of each of its chunks of 16.
// They are asked for before the tiles, behind which they would queue, and arrive while those are on their way.
struct GivenQuery {
  u32 words[NT][DK / 8], diagonal[DK / 8];  // diagonal: before Hadamard matrices

  // A tile of packed query rows, to their places.
  static DI void ask(
      u32 (&words)[DK / 8], const Queries& q, const Sequences& sequences, int s, int head, int packed_row0, int nt) {
    const bool halved = is_halved(nt) && !BY_INTEGERS;  // integers are moved once they are two to a packed query row
    const int place = threadIdx.x % 32 / 4, packed_row = packed_row0 + nt * 8 + (halved ? place / 2 : place);
    const bool used = packed_row < sequences.queries(s) * GROUP;  // what lies in odd places is not looked at
    take(words, q.row(sequences.first_query(s) + packed_row / GROUP, head * GROUP + packed_row % GROUP), used);
  }
  // diagonal_row: null where all signs are positive. mine(nt): whether this warp maps that tile.
  template <class Mine = EveryTile> DI void ask(const Queries& q, const u16* diagonal_row, const Sequences& sequences,
      int s, int head, int packed_row0, Mine mine = {}) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      if (mine(nt)) ask(words[nt], q, sequences, s, head, packed_row0, nt);
    if (KEY_MAP == HADAMARD) take(diagonal, diagonal_row, diagonal_row != nullptr);
  }
  // Where none are asked for: registers that are not waited with.
  DI void forget() {
#pragma unroll
    for (int i = 0; i < DK / 8; i++) {
      diagonal[i] = 0;
#pragma unroll
      for (int nt = 0; nt < NT; nt++) words[nt][i] = 0;
    }
  }

 private:
  // this lane's quarter, zero where it is not used or beyond D
  static DI void take(u32 (&to)[DK / 8], const u16* row, bool used) {
    const int first = threadIdx.x % 4 * (BY_CHUNKS ? 4 : DK / 4);
    if constexpr (BY_CHUNKS) {
#pragma unroll
      for (int i = 0; i < DK / 16; i++) {
        const uint2 y = used && 16 * i < D ? load_at_once((const uint2*)(row + first) + 4 * i) : make_uint2(0, 0);
        to[2 * i] = y.x, to[2 * i + 1] = y.y;
      }
    } else if constexpr (DK % 32) {  // quarters begin at multiples of 8 bytes
#pragma unroll
      for (int i = 0; i < DK / 16; i++) {
        const uint2 y = used ? load_at_once((const uint2*)(row + first) + i) : make_uint2(0, 0);
        to[2 * i] = y.x, to[2 * i + 1] = y.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < DK / 32; i++) {
        const uint4 y = used && (DK == D || first + 8 * i < D) ? load_at_once((const uint4*)(row + first) + i)
                                                               : make_uint4(0, 0, 0, 0);
        to[4 * i] = y.x, to[4 * i + 1] = y.y, to[4 * i + 2] = y.z, to[4 * i + 3] = y.w;
      }
    }
  }
};

// The packed query rows of one sequence and kv head as B operands, in the order of the keys' registers and divided by
// their units.
struct Query {
  // Mapped queries are multiplied by NORM, about KEY_BLOCK^-1/2 where the map is a Hadamard matrix, to stay within
  // fp16.
  static constexpr float NORM =
      KEY_MAP != HADAMARD ? 1.f : KEY_BLOCK > 256 ? 0.03125f : KEY_BLOCK > 128 ? 0.0625f : 0.125f;
  u32 b[NT][DK / 8];
  float sum[NT][2];  // of the dimensions, in the unit of the scores, for packed query rows 2 c and 2 c + 1
  u32 spilled;        // shared address of b, where it is not kept in registers

  // Every lane keeps what only it reads: two tiles of packed query rows beside each other, or the only one.
  static constexpr int SPILLED_LANE = NT > 1 ? 16 : 8;
  static DI u32 spilled_place(int nt, int w) { return NT > 1 ? (nt / 2 * (DK / 16) + w) * 512 + nt % 2 * 8 : w * 256; }
  DI void spill(int nt) const {
#pragma unroll
    for (int w = 0; w < DK / 16; w++) store_shared(spilled + spilled_place(nt, w), b[nt][2 * w], b[nt][2 * w + 1]);
  }
  // b[nt][2 w], b[nt][2 w + 1] for all nt; beside the last of an odd number lies nothing
  DI void step(int w, u32 (&x)[2 * EVEN_NT]) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (!SPILLED) x[2 * nt] = b[nt][2 * w], x[2 * nt + 1] = b[nt][2 * w + 1];
      else if (NT == 1) load_shared<8>(spilled + spilled_place(0, w), x);
      else if (nt % 2 == 0) load_shared<16>(spilled + spilled_place(nt, w), x + 2 * nt);
    }
  }

  // in the order of the keys' registers; to be mapped, as fp16
  template <int N> static DI void arrange(u32 (&x)[N], const u32 (&words)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) {
      const int d = key_dim(j);
      const u32 pair =
          KEY::HALF == 1 ? words[d / 2] : prmt(words[d / 2], words[(d + KEY::HALF) / 2], d & 1 ? 0x7632 : 0x5410);
      x[j] = KEY::BFLOAT && KEY_MAP == NO_MAP ? pair : query_pair(pair);
    }
  }

  // Tile w of the operands, out of rows 16 w and following of the mapped packed query rows.
  static DI void operands(u32& b0, u32& b1, const float (&y)[4], int w) {
    const float u0 = NORM / key_unit(2 * w), u1 = NORM / key_unit(2 * w + 1);
    b0 = transpose(operand_pair<KEY>(y[0] * u0, y[1] * u0)), b1 = transpose(operand_pair<KEY>(y[2] * u1, y[3] * u1));
  }

  // The same out of arranged words, where there is no map.
  static DI void operands(u32& b0, u32& b1, u32 x0, u32 x1, int w) {
    const float u0 = 1.f / key_unit(2 * w), u1 = 1.f / key_unit(2 * w + 1);
    b0 = half2(low(x0) * u0, high(x0) * u0), b1 = half2(low(x1) * u1, high(x1) * u1);
  }

  // Eight packed query rows as GivenQuery has them, mapped BY_CHUNKS, to shared memory: the eight numbers of dimension
  // d at place(d), 16 bytes.
  template <class Place>
  static DI void map_chunks(const u32 (&words)[DK / 8], const u32 (&diagonal)[DK / 8], Place place) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float y[D / 16][4] = {};
    u32 h[4];  // rows g and g + 8 of H_16, with columns 4 c and the next, then the two behind them
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = g + i % 2 * 8, column = 4 * c + i / 2 * 2;
      h[i] = 0x3c003c00u ^ (__popc(row & column) & 1) << 15 ^ (u32)(__popc(row & column + 1) & 1) << 31;
    }
#pragma unroll
    for (int w = 0; w < D / 16; w++)
      mma(y[w], h[0], h[1], h[2], h[3], query_pair(by_diagonal(words[2 * w], diagonal[2 * w])),
          query_pair(by_diagonal(words[2 * w + 1], diagonal[2 * w + 1])));
    butterfly<KEY_BLOCK / 16>(y);
#pragma unroll
    for (int w = 0; w < DK / 16; w++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int d = 16 * w + 8 * r + g,
                  j = DK / 4 % 8 ? register_of(d) : register_of(16 * w + 8 * r) + register_of(g);
        const float unit = NORM * inverse_power(key_unit(j));
        const float* x = y[min(w, D / 16 - 1)] + 2 * r;
        store_shared(place(d) + 4 * c, 16 * w < D ? operand_pair<KEY>(x[0] * unit, x[1] * unit) : 0);
      }
  }
  static DI int register_of(int d) {  // of the lane that has dimension d
    const int own = d % (DK / 4);
    return own / (2 * KEY::HALF) * KEY::HALF + own % KEY::HALF;
  }
  // A tile of the operands, out of what a warp has put there.
  template <class Place> static DI void gather(u32 (&b)[DK / 8], Place place) {
    const int lane = threadIdx.x % 32, c = lane % 8 / 2, upper = lane % 2;
    // a lane says where a row is, of register j + lane / 8: what lane c has of it, its lower or upper half
#pragma unroll
    for (int j = 0; j < DK / 8; j += 4) {
      const u32 row = place(c * (DK / 4) + key_dim(min(j + lane / 8, DK / 8 - 1)) + upper * KEY::HALF);
      u32 x[4];
      load_transposed(row, x[0], x[1], x[2], x[3]);
#pragma unroll
      for (int i = 0; i < 4 && j + i < DK / 8; i++) b[j + i] = x[i];
    }
  }

  // A tile of packed query rows as they were given.
  static DI void map(u32 (&b)[DK / 8], const u32 (&given)[DK / 8], const u32 (&diagonal)[DK / 8]) {
    u32 words[DK / 8], x[DK / 8];
    float y[DK / 16][4] = {};
#pragma unroll
    for (int j = 0; j < DK / 8; j++) words[j] = KEY_MAP == HADAMARD ? by_diagonal(given[j], diagonal[j]) : given[j];
    arrange(x, words);
    if constexpr (KEY_MAP == HADAMARD) {  // 16 dimensions of each w by mma, then along w
      const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
      const u32 h = 0x3c003c00u ^ (__popc(g & 2 * c) & 1) << 15 ^ (u32)(__popc(g & 2 * c + 1) & 1) << 31;
#pragma unroll
      for (int w = 0; w < DK / 16; w++) mma(y[w], h, h, h, h ^ 0x80008000u, x[2 * w], x[2 * w + 1]);
      butterfly<DK / 16>(y);
    }
#pragma unroll
    for (int w = 0; w < DK / 16; w++) {
      if constexpr (KEY_MAP == NO_MAP && KEY::BFLOAT) {
        b[2 * w] = x[2 * w], b[2 * w + 1] = x[2 * w + 1];
      } else if constexpr (KEY_MAP == NO_MAP) {
        operands(b[2 * w], b[2 * w + 1], x[2 * w], x[2 * w + 1], w);
      } else {
        operands(b[2 * w], b[2 * w + 1], y[w], w);
      }
    }
  }

  // The tiles of packed query rows that are mine(nt), in registers. assembled: where they are put together in shared
  // memory, or were, by QueryMapper.
  template <class Mine> DI void map_tiles(const GivenQuery& given, u32 assembled, Mine mine) {
    const auto place = [&](int nt) { return [=](int d) { return assembled + nt * (16 * DK) + d * 16; }; };
    if constexpr (BY_CHUNKS) {
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
        if (mine(nt)) map_chunks(given.words[nt], given.diagonal, place(nt));
      __syncwarp();
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (!mine(nt)) continue;
      if constexpr (BY_CHUNKS) {
        gather(b[nt], place(nt));
      } else if constexpr (KEY_MAP == MATRIX) {
#pragma unroll
        for (int w = 0; w < DK / 16; w++) load_shared<8>(spilled + spilled_place(nt, w), &b[nt][2 * w]);
      } else {
        map(b[nt], given.words[nt], given.diagonal);
      }
    }
  }
  // All of them, to registers or, where they SPILL, to shared memory at `at`.
  template <bool SPILL = SPILLED> DI void load(const GivenQuery& given, u32 assembled, u32 at) {
    spilled = (KEY_MAP == MATRIX ? assembled : at) + threadIdx.x % 32 * SPILLED_LANE;
    map_tiles(given, assembled, EveryTile{});
#pragma unroll
    for (int nt = 0; nt < NT; nt++) add_up(sum[nt], b[nt]);
    if constexpr (BY_CHUNKS && SPILLED) __syncwarp();  // what is spilled goes over what it was put together from
    if constexpr (SPILL && KEY_MAP != MATRIX)
#pragma unroll
      for (int nt = 0; nt < NT; nt++) spill(nt);
  }
  // The same by all warps of a block together: those that have one (sequence, kv head) give the same `at`, where each
  // spills its own tiles for all of them.
  template <class Mine> DI void share(const GivenQuery& given, u32 assembled, u32 at, Mine mine) {
    spilled = at + threadIdx.x % 32 * SPILLED_LANE;
    map_tiles(given, assembled, mine);
    if constexpr (BY_CHUNKS) __syncthreads();  // as above, of another warp
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      if (mine(nt)) spill(nt);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < DK / 16; w++) {
      u32 x[2 * EVEN_NT];
      step(w, x);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) b[nt][2 * w] = x[2 * nt], b[nt][2 * w + 1] = x[2 * nt + 1];
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) add_up(sum[nt], b[nt]);
  }
  DI float in_unit(float scale) const { return scale; }  // what products are multiplied by
  DI float total(int k) const { return sum[k / 2][k % 2]; }
  template <int N> static DI void add_up(float (&sum)[2], const u32 (&b)[N]) {
    float total[2][4] = {};  // products depend on each other: two sums take half the time
#pragma unroll
    for (int w = 0; w < N / 2; w++) {
      const u32 a0 = key_ones(2 * w), a1 = key_ones(2 * w + 1);
      product<KEY>(total[w % 2], a0, a0, a1, a1, b[2 * w], b[2 * w + 1]);
    }
    sum[0] = (total[0][0] + total[1][0]) / KEY_GAIN, sum[1] = (total[0][1] + total[1][1]) / KEY_GAIN;
  }

  // The scores of 16 rows of a table of key means, times factor, into shared memory at `to` [16, PLACES] float32.
  DI void score_key_means(const u16* table, int sixteen, float factor, u32 to) const {
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const KeyMatrix rows(table, sixteen);
    __syncwarp();  // the scores before these may still be read
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float y[4] = {};
      u32 x[DK / 8];
#pragma unroll
      for (int w = 0; w < DK / 16; w++) {
        if (SPILLED) load_shared<8>(spilled + spilled_place(nt, w), x + 2 * w);
        else x[2 * w] = b[nt][2 * w], x[2 * w + 1] = b[nt][2 * w + 1];
        if (KEY::BFLOAT) x[2 * w] = query_pair(x[2 * w]), x[2 * w + 1] = query_pair(x[2 * w + 1]);
      }
      rows.multiply(y, x);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        store_shared(to + ((g + 8 * i) * PLACES + nt * 8 + 2 * c) * 4, as_bits(y[2 * i] * factor),
            as_bits(y[2 * i + 1] * factor));
      }
    }
    __syncwarp();
  }
};
