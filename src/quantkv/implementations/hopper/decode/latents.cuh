// Products of a KV tile of latents, whose rows are keys and, but for their rotated dimensions, values. Registers do not
// hold the operands of such rows: they are unpacked part after part, and while tensor cores multiply one part the next
// is unpacked. wgmma takes codes from registers, as of other rows: unpacked into shared memory, from where each product
// would read them again, a tile takes longer than its bytes do from memory (notebook/2026-11-25-hopper-latents.md).
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
  // By all warps of the warpgroup. What they have of their quarters waits where weights are to be, and at `scratch`, a
  // slot of the ring.
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
    meet(barrier);
    for (int nt = member; nt < TILES; nt += WORKER_WARPS) {
      if constexpr (BY_INTEGERS) store_units(nt); else add_sums(nt);
    }
  }

 private:
  DI u32 partial(int by, int nt) const {  // a warp's, of eight packed query rows
    return base + WEIGHTS_AT + 4 * (by * PACKED_ROWS + 8 * nt);
  }
  DI void store(int nt, const u32 (&b)[WORDS], int member) const {
#pragma unroll
    for (int j = 0; j < WORDS; j++) store_shared(latent_operand(nt, member * STEPS + j / 2, j % 2), b[j]);
    float sum[2];
    Query::add_up(sum, b);
    const int lane = threadIdx.x % 32;
    if (lane < 4) store_shared(partial(member, nt) + 8 * lane, as_bits(sum[0]), as_bits(sum[1]));
  }
  DI void add_sums(int nt) const {
    const int lane = threadIdx.x % 32;
    float sum[2] = {};
    for (int by = 0; by < WORKER_WARPS && lane < 4; by++) {
      u32 x[2];
      load_shared<8>(partial(by, nt) + 8 * lane, x);
      sum[0] += as_float(x[0]), sum[1] += as_float(x[1]);
    }
    store_sums(nt, sum);
  }
  // The same of integers, which have a unit: largest numbers wait beside sums.
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

struct LatentProducts {
  // Of 16 numbers, or of 64 dimensions of a tile: that are begun together, and whose operands are in registers.
  static constexpr int KEYS_AT_ONCE = LATENT_KEYS_AT_ONCE, VALUES_AT_ONCE = LATENT_VALUES_AT_ONCE;
  static constexpr int NUMBERS = BY_INTEGERS ? 32 : 16;  // of a product with keys
  // a part: so many times 16 bytes of a lane's codes
  static constexpr int CHUNKS = BY_INTEGERS ? 2 : 1, PARTS = K_WORDS / 4 / CHUNKS, STEPS = DK / NUMBERS / PARTS;
  static constexpr int STEPS_AT_ONCE = STEPS < KEYS_AT_ONCE ? STEPS : KEYS_AT_ONCE;
  static constexpr int CHUNKS_AT_ONCE = 2 * VALUES_AT_ONCE / OWN_RUN;
  static_assert(IN_HALVES && SHARING == 1 && CHUNKS_AT_ONCE * OWN_RUN == 2 * VALUES_AT_ONCE, "whole chunks");
  static_assert(K_WORDS % (4 * CHUNKS) == 0 && STEPS % STEPS_AT_ONCE == 0 && OWN_SLABS % VALUES_AT_ONCE == 0, "whole parts");
  static_assert(!KEY::NORMALISED && !KEY::BIASED && !KEY::OVERLAP && !VALUE::OVERLAP && DK % 64 == 0 && DK == D,
      "rows of other codecs");

  // Begins products of this warp's keys with the queries: multiply_step(number of the product, its operand).
  template <class Multiply> static DI void multiply_keys(u32 tile, const WarpgroupLane& at, Multiply multiply_step) {
    each_part<PARTS>([&](auto part) {
      constexpr int PART = decltype(part)::value;
      u32 ka[4 * CHUNKS], kb[4 * CHUNKS];
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const u32 from = tile + (at.first_chunk ^ (PART * CHUNKS + i) << 4);
        load_shared<16>(from, ka + 4 * i), load_shared<16>(from + 8 * K_ROW, kb + 4 * i);
      }
      each_part<STEPS / STEPS_AT_ONCE>([&](auto group) {
        constexpr int FIRST = decltype(group)::value * STEPS_AT_ONCE;
        wait_for_all_products_but<1>();
        u32 x[STEPS_AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE; i++) operand<KEY>(x[i], ka, kb, FIRST + i, at.table);
        begin_products();
        each_part<STEPS_AT_ONCE>([&](auto step) {
          constexpr int i = decltype(step)::value;
          multiply_step(Constant<PART * STEPS + FIRST + i>{}, x[i]);
        });
        commit_products();
      });
    });
  }
  // Product w of a part.
  template <class Key>
  static DI void operand(u32 (&x)[4], const u32* ka, const u32* kb, int w, u32 table) {
    if constexpr (BY_INTEGERS) {
#pragma unroll
      for (int j = 0; j < 2; j++)
        x[2 * j] = Key::key_bytes(ka, 2 * w + j), x[2 * j + 1] = Key::key_bytes(kb, 2 * w + j);
    } else {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint2 y = key_pairs<Key>(ka, kb, 2 * w + j, table);
        x[2 * j] = y.x, x[2 * j + 1] = y.y;
      }
    }
  }
  // Of a lane's two keys, in the queries' units. Both parts of a packed query row are in one lane.
  static DI void scores_of(float (&s)[TILES][4], const int (&y)[2 * TILES][4], const WarpgroupLane& at,
      const u32 (&meta)[2], const float (&gain)[2]) {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++) {
      u32 row[4];  // of two packed query rows: the sum of numbers, the unit
      load_shared<16>(at.base + SUMS_AT + 8 * (8 * nt + 2 * at.c), row);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int sum = whole_integer(y[2 * nt][i], y[2 * nt + 1][i]);
        if constexpr (KEY::ZERO_POINTS) sum -= (int)zero_code(meta[i / 2]) * (int)row[i % 2 * 2];
        s[nt][i] = (float)sum * (gain[i / 2] * as_float(row[i % 2 * 2 + 1]));
      }
    }
  }

  // Begins the last products of this warp's tile with the queries, in the unit of those with rotated dimensions: what
  // comes of the latents is brought to it before these are added. meta: of a lane's rotated dimensions.
  static DI void score(float (&s)[TILES][4], u32 tile, const WarpgroupLane& at, u32 (&meta)[2]) {
    constexpr float SMALLEST_UNIT = 1e-30f;  // a slot that no token was written to has none
    const u64 queries = matrix_descriptor(at.base);
    load_metas(tile, at, meta);
    int y[2 * TILES][4];
    if constexpr (BY_INTEGERS) {
      multiply_keys(tile, at, [&](auto w, const u32 (&x)[4]) {
        constexpr int W = decltype(w)::value;
        IntegerWgmma<2 * TILES>::template multiply<(W > 0)>(
            y, x[0], x[1], x[2], x[3], queries + (W / 4 * 2 * SLAB + W % 4 * 32) / 16);
      });
    } else {
      if constexpr (SUMMED) {
        u32 zero[2];
        moved_zeros(meta, zero);
        begin_products();
        multiply<KEY, false>(s, zero[0], zero[1], 0, 0, queries + SUMS_AT / 16);
        commit_products();
      }
      multiply_keys(tile, at, [&](auto w, const u32 (&x)[4]) {
        constexpr int W = decltype(w)::value;
        multiply<KEY, (SUMMED || W > 0)>(s, x[0], x[1], x[2], x[3], queries + (W / 4 * SLAB + W % 4 * 32) / 16);
      });
    }
    u32 a[SECOND_ROW / 16], b[SECOND_ROW / 16];
#pragma unroll
    for (int i = 0; i < SECOND_ROW / 64; i++) {
      const u32 from = tile + (at.rotated ^ i << 4);
      load_shared<16>(from, a + 4 * i), load_shared<16>(from + 8 * SECOND_ROW, b + 4 * i);
    }
    const u32 latent_meta[2] = {meta[0], meta[1]};
    float gain[2] = {key_scale(meta[0], 1.f) * at.latent_gain, key_scale(meta[1], 1.f) * at.latent_gain};
    if constexpr (SECOND_META > 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        load_shared<SECOND_META>(tile + TILE_VM + (at.token + 8 * r) * SECOND_META, &meta[r]);
        gain[r] *= inverse(fmaxf(ROPE::scale(meta[r]), SMALLEST_UNIT));
      }
    }
    wait_for_all_products_but<0>();
    if constexpr (BY_INTEGERS) {
      keep_tiles(y), scores_of(s, y, at, latent_meta, gain);
    } else {
      keep_tiles(s);
#pragma unroll
      for (int nt = 0; nt < TILES; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[nt][i] *= gain[i / 2];
    }
    u32 x[ROPE_SIZE / 16][4];
#pragma unroll
    for (int w = 0; w < ROPE_SIZE / 16; w++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        x[w][2 * i] = ROPE::template number_pair<QUERY_BF16>(a, 2 * w + i),
        x[w][2 * i + 1] = ROPE::template number_pair<QUERY_BF16>(b, 2 * w + i);
    begin_products();
#pragma unroll
    for (int w = 0; w < ROPE_SIZE / 16; w++)
      Wgmma<TILES, QUERY_BF16>::template multiply<true>(
          s, x[w][0], x[w][1], x[w][2], x[w][3], queries + (SLABS * SLAB + w * 32) / 16);
    commit_products();
  }

  // Begins the products of the KV tile at `slot`, of this warp's dimensions, with weights; zero: of its tokens.
  static DI void add_values(float (&o)[OWN_SLABS][TILES][4], u32 slot, u32 weights, const u32 (&zero)[8],
      const WarpgroupLane& at) {
#pragma unroll
    for (int t0 = 0; t0 < WORKER_WARPS; t0 += 2)
#pragma unroll
      for (int i0 = 0; i0 < OWN_SLABS; i0 += VALUES_AT_ONCE) {
        u32 va[2][CHUNKS_AT_ONCE], vb[2][CHUNKS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < CHUNKS_AT_ONCE; i++)
          load_transposed(slot + t0 * TILE_BYTES + at.own_tile + (at.own ^ (2 * i0 / OWN_RUN + i) << 4), va[0][i],
              vb[0][i], va[1][i], vb[1][i]);
#pragma unroll
        for (int t = 0; t < 2; t++) {
          if (t0 + t + i0 > 0) wait_for_all_products_but<1>();
          u32 x[VALUES_AT_ONCE][4];
#pragma unroll
          for (int i = 0; i < VALUES_AT_ONCE; i++)
#pragma unroll
            for (int k = 0; k < 4; k++)
              x[i][k] = value_operand(va[t], vb[t], i, k, zero[2 * (t0 + t) + k / 2], at.value_table);
          begin_products();
#pragma unroll
          for (int i = 0; i < VALUES_AT_ONCE; i++)
            multiply<VALUE>(
                o[i0 + i], x[i][0], x[i][1], x[i][2], x[i][3], matrix_descriptor(weights) + 2 * (t0 + t));
          commit_products();
        }
      }
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
struct LatentProducts {
  template <class... A> static DI void score(A&&...) {}
  template <class... A> static DI void add_values(A&&...) {}
};
#endif
