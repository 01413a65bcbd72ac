// Products of a KV tile of latents, whose rows are keys and, but for their rotated dimensions, values. Registers do not
// hold the operands of such rows: they are unpacked part after part, and while tensor cores multiply one part the next
// is unpacked. wgmma takes codes from registers, as of other rows: unpacked into shared memory, from where each product
// would read them again, a tile takes longer than its bytes do from memory (notebook/2026-11-25-hopper-latents.md).
//
// Keys whose codes are integers are multiplied so (integer_query.cuh): a product takes 32 numbers, not 16, and both
// bytes of a query are columns of their own, those of eight packed query rows after the other.
#pragma once
#include "latent_queries.cuh"

#if ROPE_SIZE > 0
struct LatentProducts {
  // Of so many numbers, or of 64 dimensions of a tile: that are begun together, and whose operands are in registers.
  static constexpr int KEYS_AT_ONCE = LATENT_KEYS_AT_ONCE, VALUES_AT_ONCE = LATENT_VALUES_AT_ONCE;
  // a part: so many times 16 bytes of a lane's codes
  static constexpr int CHUNKS = BY_INTEGERS ? 2 : 1, PARTS = K_WORDS / 4 / CHUNKS;
  static constexpr int STEPS = DK / LatentQueries::NUMBERS / PARTS;
  static constexpr int STEPS_AT_ONCE = STEPS < KEYS_AT_ONCE ? STEPS : KEYS_AT_ONCE;
  static constexpr int CHUNKS_AT_ONCE = 2 * VALUES_AT_ONCE / OWN_RUN;
  static_assert(IN_HALVES && SHARING == 1 && CHUNKS_AT_ONCE * OWN_RUN == 2 * VALUES_AT_ONCE, "whole chunks");
  static_assert(
      K_WORDS % (4 * CHUNKS) == 0 && STEPS % STEPS_AT_ONCE == 0 && OWN_SLABS % VALUES_AT_ONCE == 0, "whole parts");
  static_assert(!SUMMED && !KEY::NORMALISED && !KEY::BIASED && !KEY::OVERLAP && !VALUE::OVERLAP, "codes as they are");
  static_assert(DK % 64 == 0 && DK == D, "rows without padding");

  // Begins products of this warp's keys with the queries, to sums.
  template <class Sums> static DI void multiply_keys(Sums& sums, u32 tile, const WarpgroupLane& at, u64 queries) {
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
          constexpr int i = decltype(step)::value, w = PART * STEPS + FIRST + i;
          add_product<(w > 0)>(
              sums, x[i], queries + (w / 4 * LatentQueries::KEY_SLAB + w % 4 * 32) / 16);
        });
        commit_products();
      });
    });
  }
  template <bool ADD> static DI void add_product(float (&s)[TILES][4], const u32 (&x)[4], u64 b) {
    multiply<KEY, ADD>(s, x[0], x[1], x[2], x[3], b);
  }
  template <bool ADD> static DI void add_product(int (&s)[2 * TILES][4], const u32 (&x)[4], u64 b) {
    IntegerWgmma<2 * TILES>::template multiply<ADD>(s, x[0], x[1], x[2], x[3], b);
  }
  // Product w of a part.
  template <class Key> static DI void operand(u32 (&x)[4], const u32* ka, const u32* kb, int w, u32 table) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint2 y;
      if constexpr (BY_INTEGERS) y = make_uint2(Key::key_bytes(ka, 2 * w + j), Key::key_bytes(kb, 2 * w + j));
      else y = key_pairs<Key>(ka, kb, 2 * w + j, table);
      x[2 * j] = y.x, x[2 * j + 1] = y.y;
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
    if constexpr (BY_INTEGERS) multiply_keys(y, tile, at, queries); else multiply_keys(s, tile, at, queries);
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
struct LatentProducts {
  template <class... A> static DI void score(A&&...) {}
  template <class... A> static DI void add_values(A&&...) {}
};
#endif
