// Queries over latents: all warps of a consumer warpgroup bring those of one sequence to shared memory together.
#pragma once
#include "consumer.cuh"

#if ROPE_SIZE > 0
// Packed query rows as they were given: each warp has a quarter of the dimensions of all of them, each of its lanes a
// quarter of that. They are asked for before the tiles, as a GivenQuery.
struct GivenLatents {
  static constexpr int WORDS = DK / 8 / WORKER_WARPS;
  u32 words[TILES][WORDS], diagonal[WORDS];  // diagonal: before Hadamard matrices
  uint2 rotated[TILES];
  static_assert(KEY_MAP != MATRIX && !BY_CHUNKS && WORDS % 4 == 0, "maps of which a quarter is one, too");
  static_assert(ROPE_SIZE == 16 * WORKER_WARPS, "a warp has 16 rotated dimensions");
  static DI void take(u32 (&to)[WORDS], const u16* row, int member) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4* from = (const uint4*)(row + threadIdx.x % 4 * (DK / 4) + member * 2 * WORDS) + i;
      const uint4 y = row ? load_at_once(from) : make_uint4(0, 0, 0, 0);
      to[4 * i] = y.x, to[4 * i + 1] = y.y, to[4 * i + 2] = y.z, to[4 * i + 3] = y.w;
    }
  }
  DI void ask(const Queries& q, const AttendArguments& a, const Sequences& sequences, int s, int packed_row0,
      int member) {
    const Queries rest{a.q_rotated, a.q_rotated_token, a.q_rotated_head};
    const int lane = threadIdx.x % 32, first = sequences.first_query(s), count = sequences.queries(s);
#pragma unroll
    for (int nt = 0; nt < TILES; nt++) {
      const int packed_row = packed_row0 + 8 * nt + lane / 4, token = first + packed_row / GROUP;
      const bool used = packed_row < count * GROUP;
      take(words[nt], used ? q.row(token, packed_row % GROUP) : nullptr, member);
      rotated[nt] = make_uint2(0, 0);
      if (used)
        rotated[nt] = load_at_once(
            (const uint2*)(rest.row(token, packed_row % GROUP) + lane % 4 * (ROPE_SIZE / 4)) + member);
    }
    if (KEY_MAP != NO_MAP) take(diagonal, a.key_map, member);
  }
  DI void forget() { *this = {}; }  // as of a GivenQuery
};

// The queries of one sequence in shared memory.
struct LatentQueries : WarpgroupQueries {
  static constexpr int WORDS = GivenLatents::WORDS, STEPS = WORDS / 2;
  // Numbers of a product with keys; bytes of a matrix of 128 bytes a column: integers have two columns, of a byte each.
  static constexpr int NUMBERS = BY_INTEGERS ? 32 : 16, KEY_SLAB = BY_INTEGERS ? 2 * SLAB : SLAB;
  // As operand(), in the order in which keys are read.
  DI u32 latent_operand(int nt, int w, int half) const {
    return operand(nt, w ^ latent_chunk(threadIdx.x % 4) * (DK / 16 / (K_ROW / 64)), half);
  }
  // Of integers: a part of packed query rows, the first or the second, eight rows of a matrix after the other.
  DI u32 integer_operand(int nt, int part, int w, int half) const {
    const int c = threadIdx.x % 4, row = 16 * nt + 8 * part + threadIdx.x % 32 / 4;
    w ^= latent_chunk(c) * (DK / 32 / (K_ROW / 64));
    return base + w / 4 * KEY_SLAB + matrix_chunk(row, w % 4 * 2 + half) + c * 4;
  }
  // Eight packed query rows where warps exchange their quarters of them, those of two tiles in turn: word i of a lane,
  // and those behind it.
  static DI u32 exchanged(u32 scratch, int nt, int member, int i) {
    return scratch + nt % 2 * (8 * DK * 2) + ((i / 4 * WORKER_WARPS + member) * 32 + threadIdx.x % 32) * 16;
  }
  static_assert(2 * 8 * DK * 2 <= KV_TILE_BYTES, "they fit in a slot of the ring");
  // The quarter `member` of packed query rows' operands, out of arranged words of which each warp has a quarter.
  static DI void map(u32 (&b)[WORDS], const u32 (&given)[WORDS], u32 scratch, int nt, int member, int barrier) {
    if constexpr (KEY_MAP == NO_MAP) {
#pragma unroll
      for (int w = 0; w < STEPS; w++) Query::operands(b[2 * w], b[2 * w + 1], given[2 * w], given[2 * w + 1], w);
    } else {
      // as Query::map; a function for both would change in which registers other kernels keep things
      const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
      const u32 h_16 = 0x3c003c00u ^ (__popc(g & 2 * c) & 1) << 15 ^ (u32)(__popc(g & 2 * c + 1) & 1) << 31;
      float y[STEPS][4] = {};
#pragma unroll
      for (int i = 0; i < WORDS; i += 4)
        store_shared(exchanged(scratch, nt, member, i), given[i], given[i + 1], given[i + 2], given[i + 3]);
      meet(barrier);
#pragma unroll
      for (int part = 0; part < WORKER_WARPS; part++) {
        u32 x[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) load_shared<16>(exchanged(scratch, nt, part, i), x + i);
        const u32 h = h_16 ^ (__popc(part & member) & 1 ? 0x80008000u : 0);
#pragma unroll
        for (int w = 0; w < STEPS; w++) mma(y[w], h, h, h, h ^ 0x80008000u, x[2 * w], x[2 * w + 1]);
      }
      butterfly<STEPS>(y);
#pragma unroll
      for (int w = 0; w < STEPS; w++) Query::operands(b[2 * w], b[2 * w + 1], y[w], w);
    }
  }
  // By all warps of the warpgroup. What they tell each other of their quarters is where weights are to be, and at
  // `scratch`, a slot of the ring.
  DI void load(const GivenLatents& given, u32 scratch, int member, int barrier) const {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++) {
      store_shared(operand(nt, 4 * SLABS + member, 0), given.rotated[nt].x),
          store_shared(operand(nt, 4 * SLABS + member, 1), given.rotated[nt].y);
      u32 words[WORDS], x[WORDS], b[WORDS];
#pragma unroll
      for (int j = 0; j < WORDS; j++)
        words[j] = KEY_MAP == NO_MAP ? given.words[nt][j] : by_diagonal(given.words[nt][j], given.diagonal[j]);
      Query::arrange(x, words);
      map(b, x, scratch, nt, member, barrier);
      if constexpr (BY_INTEGERS) store_integers(nt, b, member, barrier);
      else store(nt, b, member);
    }
    if constexpr (BY_INTEGERS) {
      meet(barrier);
      for (int nt = member; nt < TILES; nt += WORKER_WARPS) store_units(nt);
    }
  }

 private:
  DI u32 partial(int by, int nt) const {  // a warp's, of eight packed query rows
    return base + WEIGHTS_AT + 4 * (by * PACKED_ROWS + 8 * nt);
  }
  DI void store(int nt, const u32 (&b)[WORDS], int member) const {
#pragma unroll
    for (int j = 0; j < WORDS; j++) store_shared(latent_operand(nt, member * STEPS + j / 2, j % 2), b[j]);
  }
  // The same of integers, which have a unit: largest numbers wait beside their sums.
  DI float largest(int nt, int row) const {  // of eight packed query rows, of all warps
    u32 top = 0;
    for (int by = 0; by < WORKER_WARPS; by++) {
      u32 x;
      load_shared<4>(partial(by, nt) + SLAB + 4 * row, &x), top = max_size_half2(top, x);
    }
    return low(top);
  }
  DI void store_integers(int nt, const u32 (&b)[WORDS], int member, int barrier) const {
    const int lane = threadIdx.x % 32;
    const u32 top = largest_number(b);
    if (lane % 4 == 0) store_shared(partial(member, nt) + SLAB + lane, top);
    meet(barrier);
    u32 high[STEPS], low[STEPS];
    split_integers<KEY>(b, LARGEST_INTEGER * inverse(largest(nt, lane / 4)), high, low);
    int high_sums[4] = {}, low_sums[4] = {};
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int w = member * (STEPS / 2) + j / 2;
      store_shared(integer_operand(nt, 0, w, j % 2), high[j]), store_shared(integer_operand(nt, 1, w, j % 2), low[j]);
      if (KEY::ZERO_POINTS && j % 2)
        add_integers(high_sums, high[j - 1], high[j]), add_integers(low_sums, low[j - 1], low[j]);
    }
    if (lane < 4)
      store_shared(partial(member, nt) + 8 * lane, whole_integer(high_sums[0], low_sums[0]),
          whole_integer(high_sums[1], low_sums[1]));
  }
  DI void store_units(int nt) const {
    const int row = threadIdx.x % 32;
    int sum = 0;
    for (int by = 0; by < WORKER_WARPS && row < 8; by++) {
      u32 x;
      load_shared<4>(partial(by, nt) + 4 * row, &x), sum += (int)x;
    }
    if (row < 8)
      store_shared(base + SUMS_AT + 8 * (8 * nt + row), sum, as_bits(unit_of_integers(largest(nt, row))));
  }
};
#else
struct GivenLatents {  // of other rows there are none
  template <class... A> DI void ask(A&&...) {}
  DI void forget() {}
};
struct LatentQueries {
  u32 base;
  template <class... A> DI void load(A&&...) const {}
};
#endif
