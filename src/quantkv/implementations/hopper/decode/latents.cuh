// Products of a KV tile of latents, whose rows are keys and, but for their rotated dimensions, values. Registers do not
// hold the operands of such rows: they are unpacked part after part, and while tensor cores multiply one part the next
// is unpacked. wgmma takes codes from registers, as of other rows: unpacked into shared memory, from where each product
// would read them again, a tile takes longer than its bytes do from memory (notebook/2026-11-25-hopper-latents.md).
#pragma once
#include "consumer.cuh"

#if ROPE_SIZE > 0
// The queries of one sequence in shared memory: of all packed query rows each warp maps a quarter of the dimensions.
struct LatentQueries : WarpgroupQueries {
  static constexpr int WORDS = DK / 8 / WORKER_WARPS, STEPS = WORDS / 2;  // of a quarter of a lane's quarter
  static_assert(KEY_MAP != MATRIX && !BY_CHUNKS && WORDS % 4 == 0, "maps of which a quarter is one, too");
  static DI void take(u32 (&to)[WORDS], const u16* row, int part) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
      const uint4* from = (const uint4*)(row + threadIdx.x % 4 * (DK / 4) + part * 2 * WORDS) + i;
      const uint4 y = row ? load_at_once(from) : make_uint4(0, 0, 0, 0);
      to[4 * i] = y.x, to[4 * i + 1] = y.y, to[4 * i + 2] = y.z, to[4 * i + 3] = y.w;
    }
  }
  // The part `own` of a packed query row's operands; null: of none.
  static DI void map(u32 (&b)[WORDS], const u16* row, const u16* diagonal_row, int own) {
    u32 words[WORDS], x[WORDS];
    if constexpr (KEY_MAP == NO_MAP) {
      take(words, row, own), Query::arrange(x, words);
#pragma unroll
      for (int w = 0; w < STEPS; w++) Query::operands(b[2 * w], b[2 * w + 1], x[2 * w], x[2 * w + 1], w);
    } else {
      // as Query::map; a function for both would change in which registers other kernels keep things
      const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
      const u32 h_16 = 0x3c003c00u ^ (__popc(g & 2 * c) & 1) << 15 ^ (u32)(__popc(g & 2 * c + 1) & 1) << 31;
      float y[STEPS][4] = {};
#pragma unroll
      for (int part = 0; part < WORKER_WARPS; part++) {
        u32 diagonal[WORDS];
        take(words, row, part), take(diagonal, diagonal_row, part);
#pragma unroll
        for (int j = 0; j < WORDS; j++) words[j] = by_diagonal(words[j], diagonal[j]);
        Query::arrange(x, words);
        const u32 h = h_16 ^ (__popc(part & own) & 1 ? 0x80008000u : 0);
#pragma unroll
        for (int w = 0; w < STEPS; w++) mma(y[w], h, h, h, h ^ 0x80008000u, x[2 * w], x[2 * w + 1]);
      }
      butterfly<STEPS>(y);
#pragma unroll
      for (int w = 0; w < STEPS; w++) Query::operands(b[2 * w], b[2 * w + 1], y[w], w);
    }
  }
  // By all warps of the warpgroup. Sums of the quarters wait where weights are to be.
  DI void load(const Queries& q, const AttendArguments& a, const Sequences& sequences, int s, int packed_row0,
      int member, int barrier) const {
    const int lane = threadIdx.x % 32;
    const auto partial = [&](int by, int nt) { return base + WEIGHTS_AT + 4 * (by * PACKED_ROWS + 8 * nt + 2 * lane); };
#pragma unroll 1
    for (int nt = 0; nt < TILES; nt++) {
      const int packed_row = packed_row0 + 8 * nt + lane / 4;
      const bool used = packed_row < sequences.queries(s) * GROUP;
      const int token = used ? sequences.first_query(s) + packed_row / GROUP : 0;
      const u16* row = used ? q.row(token, packed_row % GROUP) : nullptr;
      const u16* rotated = Queries{a.q_rotated, a.q_rotated_token, a.q_rotated_head}.row(token, packed_row % GROUP);
      for (int w = member; w < ROPE_SIZE / 16; w += WORKER_WARPS) {
        const uint2* from = (const uint2*)(rotated + lane % 4 * (ROPE_SIZE / 4)) + w;
        const uint2 y = row ? load_at_once(from) : make_uint2(0, 0);
        store_shared(operand(nt, 4 * SLABS + w, 0), y.x), store_shared(operand(nt, 4 * SLABS + w, 1), y.y);
      }
      u32 b[WORDS];
      map(b, row, a.key_map, member);
#pragma unroll
      for (int j = 0; j < WORDS; j++) store_shared(latent_operand(nt, member * STEPS + j / 2, j % 2), b[j]);
      float sum[2];
      Query::add_up(sum, b);
      if (lane < 4) store_shared(partial(member, nt), as_bits(sum[0]), as_bits(sum[1]));
    }
    meet(barrier);
    for (int nt = member; nt < TILES; nt += WORKER_WARPS) {
      float sum[2] = {};
      for (int by = 0; by < WORKER_WARPS && lane < 4; by++) {
        u32 x[2];
        load_shared<8>(partial(by, nt), x);
        sum[0] += as_float(x[0]), sum[1] += as_float(x[1]);
      }
      store_sums(nt, sum);
    }
  }
};

struct LatentProducts {
  // Of 16 numbers, or of 64 dimensions of a tile: that are begun together, and whose operands are in registers.
  static constexpr int KEYS_AT_ONCE = LATENT_KEYS_AT_ONCE, VALUES_AT_ONCE = LATENT_VALUES_AT_ONCE;
  static constexpr int PARTS = K_WORDS / 4, STEPS = DK / 16 / PARTS;  // a part: 16 bytes of a lane's codes
  static constexpr int STEPS_AT_ONCE = STEPS < KEYS_AT_ONCE ? STEPS : KEYS_AT_ONCE;
  static constexpr int CHUNKS_AT_ONCE = 2 * VALUES_AT_ONCE / OWN_RUN;
  static_assert(IN_HALVES && SHARING == 1 && CHUNKS_AT_ONCE * OWN_RUN == 2 * VALUES_AT_ONCE, "whole chunks");
  static_assert(K_WORDS % 4 == 0 && STEPS % STEPS_AT_ONCE == 0 && OWN_SLABS % VALUES_AT_ONCE == 0, "whole parts");
  static_assert(!KEY::NORMALISED && !KEY::BIASED && !KEY::OVERLAP && !VALUE::OVERLAP && DK % 64 == 0 && DK == D,
      "rows of other codecs");

  // Begins the last products of this warp's tile with the queries, in the unit of those with rotated dimensions: what
  // comes of the latents is brought to it before these are added. meta: of a lane's rotated dimensions.
  static DI void score(float (&s)[TILES][4], u32 tile, const WarpgroupLane& at, u32 (&meta)[2]) {
    constexpr float SMALLEST_UNIT = 1e-30f;  // a slot that no token was written to has none
    const u64 queries = matrix_descriptor(at.base);
    load_metas(tile, at, meta);
    if constexpr (SUMMED) {
      u32 zero[2];
      moved_zeros(meta, zero);
      begin_products();
      multiply<KEY, false>(s, zero[0], zero[1], 0, 0, queries + SUMS_AT / 16);
      commit_products();
    }
    each_part<PARTS>([&](auto part) {
      constexpr int PART = decltype(part)::value;
      u32 ka[4], kb[4];
      const u32 from = tile + (at.first_chunk ^ PART << 4);
      load_shared<16>(from, ka), load_shared<16>(from + 8 * K_ROW, kb);
      each_part<STEPS / STEPS_AT_ONCE>([&](auto group) {
        constexpr int FIRST = decltype(group)::value * STEPS_AT_ONCE;
        wait_for_all_products_but<1>();
        u32 x[STEPS_AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < STEPS_AT_ONCE; i++) {
          const uint2 y = key_pairs<KEY>(ka, kb, 2 * (FIRST + i), at.table),
                      y8 = key_pairs<KEY>(ka, kb, 2 * (FIRST + i) + 1, at.table);
          x[i][0] = y.x, x[i][1] = y.y, x[i][2] = y8.x, x[i][3] = y8.y;
        }
        begin_products();
        each_part<STEPS_AT_ONCE>([&](auto step) {
          constexpr int i = decltype(step)::value, w = PART * STEPS + FIRST + i;
          multiply<KEY, (SUMMED || w > 0)>(
              s, x[i][0], x[i][1], x[i][2], x[i][3], queries + (w / 4 * SLAB + w % 4 * 32) / 16);
        });
        commit_products();
      });
    });
    u32 a[SECOND_ROW / 16], b[SECOND_ROW / 16];
#pragma unroll
    for (int i = 0; i < SECOND_ROW / 64; i++) {
      const u32 from = tile + (at.rotated ^ i << 4);
      load_shared<16>(from, a + 4 * i), load_shared<16>(from + 8 * SECOND_ROW, b + 4 * i);
    }
    float gain[2] = {key_scale(meta[0], 1.f) * at.latent_gain, key_scale(meta[1], 1.f) * at.latent_gain};
    if constexpr (SECOND_META > 0) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        load_shared<SECOND_META>(tile + TILE_VM + (at.token + 8 * r) * SECOND_META, &meta[r]);
        gain[r] *= inverse(fmaxf(ROPE::scale(meta[r]), SMALLEST_UNIT));
      }
    }
    wait_for_all_products_but<0>();
    keep_tiles(s);
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[nt][i] *= gain[i / 2];
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
struct LatentQueries {  // of other rows there are none
  u32 base;
  template <class... A> DI void load(A&&...) const {}
};
struct LatentProducts {
  template <class... A> static DI void score(A&&...) {}
  template <class... A> static DI void add_values(A&&...) {}
};
#endif
