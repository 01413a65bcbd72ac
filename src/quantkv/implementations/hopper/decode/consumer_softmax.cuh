// Scores, softmax and the weighted sum of values: what a consumer warpgroup does with a KV tile.
#pragma once
#include "latents.cuh"

// The running softmax of a consumer warpgroup, base 2: as Softmax in softmax.cuh. m, seen and v_norm are the same in
// all lanes of a packed query row; l and bias are of this lane's tokens; o is of this warp's dimensions.
struct WarpgroupSoftmax {
  float o[OWN_SLABS][TILES][4], m[TILES][2], l[TILES][2], bias[TILES][2], v_norm;
  u32 seen;  // a bit for each packed query row of this lane that has met a key

  DI WarpgroupSoftmax() : v_norm(as_float(0x53800000u)), seen(0) {
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        m[nt][e] = l[nt][e] = bias[nt][e] = 0.f;
#pragma unroll
        for (int i = 0; i < OWN_SLABS; i++) o[i][nt][e] = o[i][nt][2 + e] = 0.f;
      }
  }

  // Moves m up to the scores s (relative to m); v: the largest scale of this lane's values.
  DI void rescale(float (&s)[TILES][4], float v, const WarpgroupLane& at) {
    const int lane = threadIdx.x % 32;
    float* mine = at.told(at.member);
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float top = max_over_tokens(fmaxf(s[nt][e], s[nt][2 + e]));
        if (lane < 4) mine[nt * 8 + 2 * at.c + e] = top;
      }
    v = max_over_tokens(v);
    if (lane == 0) mine[PACKED_ROWS] = v;
    meet(at.barrier);
    for (int w = 0; w < WORKER_WARPS; w++) v = fmaxf(v, at.told(w)[PACKED_ROWS]);
    u32 fit = 0x7f000000u - (as_bits(v) & 0x7f800000u);  // the power of two that brings v to [1, 2)
    fit = min(fit, as_bits(v_norm));
    const float rv = as_float(0x3f800000u + fit - as_bits(v_norm));
    v_norm = as_float(fit);
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32 bit = 1u << (2 * nt + e);
        float top = at.told(0)[nt * 8 + 2 * at.c + e];
        for (int w = 1; w < WORKER_WARPS; w++) top = fmaxf(top, at.told(w)[nt * 8 + 2 * at.c + e]);
        const float up = seen & bit ? fmaxf(top, 0.f) : top == minus_infinity() ? 0.f : top;
        float r = seen & bit ? pow2(-up) : 1.f;
        if (top != minus_infinity()) seen |= bit;
        m[nt][e] += up, l[nt][e] *= r, r *= rv, bias[nt][e] *= r;
#pragma unroll
        for (int i = 0; i < OWN_SLABS; i++) o[i][nt][e] *= r, o[i][nt][2 + e] *= r;
        s[nt][e] -= up, s[nt][2 + e] -= up;
      }
  }

  // Begins the products of this warp's keys with the queries, of codes less their zero.
  static DI void multiply_keys(
      float (&s)[TILES][4], u32 tile, const WarpgroupLane& at, u32 (&meta)[2], u32 (&squares)[2]) {
    u32 ka[ALL_K_WORDS], kb[ALL_K_WORDS];
    at.key.load(tile, ka), at.key.load(tile + 8 * K_ROW, kb);
    load_metas(tile, at, meta);
    at.overlap_key<KEY>(ka), at.overlap_key<KEY>(kb);
    u32 x[DK / 16][4], zero[2] = {};
#pragma unroll
    for (int w = 0; w < DK / 16; w++) {
      const uint2 a = key_pairs<KEY>(ka, kb, 2 * w, at.table), a8 = key_pairs<KEY>(ka, kb, 2 * w + 1, at.table);
      x[w][0] = a.x, x[w][1] = a.y, x[w][2] = a8.x, x[w][3] = a8.y;
      if constexpr (KEY::NORMALISED) {
        squares[0] = fma2(a.x, a.x, fma2(a8.x, a8.x, squares[0])),
        squares[1] = fma2(a.y, a.y, fma2(a8.y, a8.y, squares[1]));
      }
    }
    if constexpr (SUMMED) moved_zeros(meta, zero);
    begin_products();
    multiply<KEY, false>(s, x[0][0], x[0][1], x[0][2], x[0][3], matrix_descriptor(at.base));
#pragma unroll
    for (int w = 1; w < DK / 16; w++)
      multiply<KEY>(
          s, x[w][0], x[w][1], x[w][2], x[w][3], matrix_descriptor(at.base) + (w / 4 * SLAB + w % 4 * 32) / 16);
    if constexpr (SUMMED) multiply<KEY>(s, zero[0], zero[1], 0, 0, matrix_descriptor(at.base) + SUMS_AT / 16);
    commit_products();
  }

  // The scores of this warp's tile, relative to m. meanwhile() is done while tensor cores multiply.
  template <class Meanwhile> DI void score(float (&s)[TILES][4], u32 tile, int kv_tile, const WarpgroupLane& at,
      float scale, float softcap, Meanwhile meanwhile) {
    u32 meta[2] = {}, squares[2] = {};
    if constexpr (LATENTS) LatentProducts::score(s, tile, at, meta);
    else multiply_keys(s, tile, at, meta, squares);
    float norms[4] = {};
    if constexpr (KEY::NORMALISED) mma(norms, squares[0], squares[1], 0, 0, ONES, 0);
    const KeyScores key(meta, norms[0], norms[2], scale);
    meanwhile();
    wait_for_all_products_but<0>();
    keep_tiles(s);
#pragma unroll
    for (int nt = 0; nt < TILES; nt++) {
      u32 mean[2] = {}, sum[2] = {};  // of both packed query rows
      if (KEY_MEAN)
        load_shared<8>(at.base + KEY_MEANS_AT + (kv_tile % 16 * PACKED_ROWS + nt * 8 + 2 * at.c) * 4, mean);
      if (KEY::BIASED) load_shared<8>(at.base + QUERY_SUMS_AT + (nt * 8 + 2 * at.c) * 4, sum);
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[nt][i] = key(i / 2, s[nt][i], as_float(mean[i & 1]), as_float(sum[i & 1]), softcap, m[nt][i & 1]);
    }
  }

  // Where the zero point of token `row` of a tile's half r is: what lane c reads of a KV tile lies together.
  static DI int zero_place(int tile, int r, int row) { return row / 2 * 32 + tile * 8 + r * 4 + row % 2 * 2; }
  // What a lane's tokens weigh: their values' scales, and biases about CENTRE.
  struct Weigh {
    float scale[2] = {1.f, 1.f}, bias[2] = {};
    template <class Ours> DI void load(u32 tile, const WarpgroupLane& at, u32 zeros, bool masked, Ours ours) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 meta = 0;
        if constexpr (V_META > 0)
          load_shared<V_META>(tile + VALUE_META_AT + (at.token + 8 * r) * V_META, &meta), scale[r] = VALUE::scale(meta);
        if constexpr (VALUE::BIASED) bias[r] = fmaf(scale[r], VALUE::CENTRE, VALUE::bias(meta));
        if (RANGES && V_META > 0 && masked && !ours(r)) scale[r] = 0.f, bias[r] = 0.f;
        if (ZERO_POINTS && at.c == 0)
          *(u16*)(shared + (zeros - shared_address(shared)) + zero_place(at.member, r, at.token)) = meta & 15;
      }
    }
  };

  // Adds the KV tile at `slot`. copies() starts the copies of a later one, where the one before was. valid(half, nt,
  // e): may packed query row 2 c + e of nt see this lane's token (half: + 8)? ours(half): is it of the segment? Both
  // are asked if `masked`.
  template <class Copies, class Valid, class Ours> DI void add(u32 slot, const WarpgroupLane& at, int kv_tile,
      float scale, float softcap, bool masked, Copies copies, Valid valid, Ours ours) {
    const u32 odd = __shfl_sync(~0u, kv_tile & 1, 0);  // by a shuffle: uniform, as the compiler sees it
    const u32 tile = slot + at.member * TILE_BYTES, weights = at.base + WEIGHTS_AT + odd * SLAB,
              zeros = at.base + ZEROS_AT + odd * (2 * KV_TILE);
    Weigh weigh;
    float s[TILES][4];
    score(s, tile, kv_tile, at, scale, softcap, [&] { weigh.load(tile, at, zeros, masked, ours); });
    if (masked) {
#pragma unroll
      for (int nt = 0; nt < TILES; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (!valid(i / 2, nt, i & 1)) s[nt][i] = minus_infinity();
    }
    const float v_top = fmaxf(weigh.scale[0], weigh.scale[1]);
    float sums[TILES][2], biases[TILES][2], limit = 16.f;
    bool unseen = seen != (1u << 2 * TILES) - 1;  // a packed query row has not met a key yet
    for (;;) {  // once more where m has moved
      const float u0 = weigh.scale[0] * v_norm, u1 = weigh.scale[1] * v_norm;
      float top = v_top * v_norm;
#pragma unroll
      for (int nt = 0; nt < TILES; nt += 2) {
        u32 p[4];
#pragma unroll
        for (int k = nt; k < min(nt + 2, TILES); k++) {
          float e[4];
#pragma unroll
          for (int i = 0; i < 4; i++) e[i] = pow2(s[k][i]);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            sums[k][i] = e[i] + e[2 + i];
            if constexpr (VALUE::BIASED)
              biases[k][i] = fmaf(e[i], weigh.bias[0] * v_norm, e[2 + i] * (weigh.bias[1] * v_norm));
          }
          top = fmaxf(top, fmaxf(sums[k][0], sums[k][1]));
          p[2 * (k - nt)] = operand_pair<VALUE>(e[0] * u0, e[1] * u0),
                     p[2 * (k - nt) + 1] = operand_pair<VALUE>(e[2] * u1, e[3] * u1);
        }
        const u32 to = weights + at.weights + nt * 8 * MATRIX_ROW;
        if (nt + 1 < TILES) store_transposed(to, p[0], p[1], p[2], p[3]); else store_transposed(to, p[0], p[1]);
      }
      const bool must_move = unseen || top > limit;  // before the fence, which takes a while
      stores_before_wgmma();
      if (!meet_any(at.barrier, must_move)) break;
      rescale(s, v_top, at);
      limit = -minus_infinity(), unseen = false;
    }
    multiply_values(slot, weights, zeros, at);
    copies();  // no warp reads the KV tile before any more
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        l[nt][e] += sums[nt][e];
        if constexpr (VALUE::BIASED) bias[nt][e] += biases[nt][e];
      }
    // before operands of the next are unpacked: the compiler would wait for each product otherwise
    wait_for_all_products_but<0>();
#pragma unroll
    for (int i = 0; i < OWN_SLABS; i++) keep_tiles(o[i]);
  }

  DI void multiply_values(u32 slot, u32 weights, u32 zeros, const WarpgroupLane& at) {
    u32 zero[WORKER_WARPS * 2] = {};
    if (ZERO_POINTS)
      load_shared<16>(zeros + zero_place(0, 0, 2 * at.c), zero),
          load_shared<16>(zeros + zero_place(2, 0, 2 * at.c), zero + 4);
    if constexpr (LATENTS) return LatentProducts::add_values(o, slot, weights, zero, at);
    u32 x[WORKER_WARPS][OWN_SLABS][4];
#pragma unroll
    for (int t0 = 0; t0 < WORKER_WARPS; t0 += 2) {
      u32 va[2][ALL_OWN_PAIRS], vb[2][ALL_OWN_PAIRS];
      at.values.load(at, slot + t0 * TILE_BYTES, va, vb);
#pragma unroll
      for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int i = 0; i < OWN_SLABS; i++) {
#pragma unroll
          for (int k = 0; k < 4; k++)
            x[t0 + t][i][k] = value_operand(va[t], vb[t], i, k, zero[2 * (t0 + t) + k / 2], at.value_table);
        }
      }
    }
    begin_products();
#pragma unroll
    for (int t = 0; t < WORKER_WARPS; t++)
#pragma unroll
      for (int i = 0; i < OWN_SLABS; i++)
        multiply<VALUE>(o[i], x[t][i][0], x[t][i][1], x[t][i][2], x[t][i][3], matrix_descriptor(weights) + 2 * t);
    commit_products();
  }

  // The result so far to `to` [packed_rows, PARTIAL], in shared or global memory; packed query rows beyond
  // `packed_rows` are not written. held: what earlier KV tiles of the same sequence came to, in the same form and
  // possibly at the same place, or null.
  DI void write(u32* to, const WarpgroupLane& at, int packed_rows, const u32* held) {
    const int lane = threadIdx.x % 32, g = lane / 4, c = at.c;
    const auto value = [&](int nt, int e, int j) -> float& { return o[j / 2][nt][e + j % 2 * 2]; };
    const auto place = [&](int j) {
      return OwnValues<IN_HALVES>::dim(at.member, OWN_RUN == 1 ? g & ~1 : g, j + (OWN_RUN == 1 ? g % 2 : 0)) / 2;
    };
    const auto is_there = [&](int j) { return 32 * OWN_DIMS == DV || place(j) < DV / 2; };
    float lse[TILES][2], factor[TILES][2];
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float sum = sum_over_tokens(l[nt][e]), b = VALUE::BIASED ? sum_over_tokens(bias[nt][e]) : 0.f;
        if (g == 0)
          at.told(at.member)[nt * 8 + 2 * c + e] = sum, at.told(at.member)[PACKED_ROWS + nt * 8 + 2 * c + e] = b;
      }
    meet(at.barrier);  // all products with queries and weights have ended
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int packed_row = nt * 8 + 2 * c + e;
        float sum = 0.f, z = 0.f;
        for (int w = 0; w < WORKER_WARPS; w++)
          sum += at.told(w)[packed_row], z += VALUE::BIASED ? at.told(w)[PACKED_ROWS + packed_row] : 0.f;
        const float r = sum > 0.f ? inverse(sum * v_norm) : 0.f;
        z *= r, lse[nt][e] = sum > 0.f ? m[nt][e] + lg2(sum) : minus_infinity();
#pragma unroll
        for (int j = 0; j < OWN_DIMS; j++) value(nt, e, j) = fmaf(value(nt, e, j), VALUE_GAIN / VALUE::unit(j) * r, z);
        if constexpr (OWN_RUN == 1) {  // pairs of lanes exchange one of each two dimensions
#pragma unroll
          for (int j = 0; j < OWN_DIMS; j += 2) {
            const float other = __shfl_xor_sync(~0u, g % 2 ? value(nt, e, j) : value(nt, e, j + 1), 4);
            (g % 2 ? value(nt, e, j) : value(nt, e, j + 1)) = other;
          }
        }
        // No output is larger than weights, of at most 16 / v_norm, times a code; of WIDE values the largest output is
        // looked for.
        factor[nt][e] = partial_factor(32.f * inverse_power(v_norm));
        if (held && packed_row < packed_rows) {
          const u32* old = held + packed_row * PARTIAL;
          const Joined all(old, lse[nt][e]);
          const float u = all.held * as_float(old[FACTOR]), w = all.later;
#pragma unroll
          for (int j = 0; j < OWN_DIMS; j += 2) {
            const u32 pair = is_there(j) ? old[place(j)] : 0;
            value(nt, e, j) = fmaf(low(pair), u, value(nt, e, j) * w),
                         value(nt, e, j + 1) = fmaf(high(pair), u, value(nt, e, j + 1) * w);
          }
          lse[nt][e] = all.lse(), factor[nt][e] = fmaxf(factor[nt][e], as_float(old[FACTOR]));
        }
      }
    if (WIDE || held) meet(at.barrier);  // what is held, and was told, has been read
    if constexpr (WIDE) {
#pragma unroll
      for (int nt = 0; nt < TILES; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float top = 0.f;
#pragma unroll
          for (int j = 0; j < OWN_DIMS; j++) top = fmaxf(top, fabsf(value(nt, e, j)));
          top = max_over_tokens(top);
          if (g == 0) at.told(at.member)[nt * 8 + 2 * c + e] = top;
        }
      meet(at.barrier);
    }
#pragma unroll
    for (int nt = 0; nt < TILES; nt++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int packed_row = nt * 8 + 2 * c + e;
        if (WIDE) {
          float top = 0.f;
          for (int w = 0; w < WORKER_WARPS; w++) top = fmaxf(top, at.told(w)[packed_row]);
          factor[nt][e] = partial_factor(top);
        }
        if (packed_row >= packed_rows) continue;
        const float shrink = inverse_power(factor[nt][e]);
        if (at.member == 0 && g == 0)
          to[packed_row * PARTIAL + LSE] = as_bits(lse[nt][e]),
                                    to[packed_row * PARTIAL + FACTOR] = as_bits(factor[nt][e]);
#pragma unroll
        for (int j = 0; j < OWN_DIMS; j += 2)
          if (is_there(j))
            to[packed_row * PARTIAL + place(j)] = half2(value(nt, e, j) * shrink, value(nt, e, j + 1) * shrink);
      }
  }
};
