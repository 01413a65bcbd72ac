// Scores, softmax and the weighted sum of values: what a warp does with a tile.
#pragma once
#include "scores.cuh"

constexpr bool SUBTRACT = VALUE::CENTRE > 0 && NT > 2, CENTRED_LATER = VALUE::CENTRE > 0 && !SUBTRACT;
// The running softmax of a warp, base 2. m and l are per packed query row (of this lane's tokens only: l). o, bias and
// mass carry the factor v_norm, a power of two that keeps p * scale within fp16 whatever the values' scales are.
//
// Codes with a CENTRE are multiplied as they are, which is free, and what they are too large by is taken off o every
// few tiles: mass, which one more product sums, of the zero points (subnormals like the codes) or of ones, to be
// multiplied by CENTRE. Not once at the end: the tensor core truncates as it accumulates, and an uncentred sum would
// drift with the number of tokens. Where 32 packed query rows share a code, taking its zero point or CENTRE off it
// (SUBTRACT) costs less than the registers of their masses.
struct Softmax {
  float o[NT][DV / 16][4], m[OWN], l[OWN], bias[OWN], mass[NT][4], v_norm;
  u32 seen;     // a bit for each packed query row of this lane that has met a key
  float limit;  // scores up to this need no new m; -inf while some packed query row of the warp has not

  DI Softmax() : v_norm(as_float(0x53800000u)), seen(0), limit(minus_infinity()) {
#pragma unroll
    for (int k = 0; k < OWN; k++) m[k] = l[k] = bias[k] = 0.f;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        mass[nt][e] = 0.f;
#pragma unroll
        for (int i = 0; i < DV / 16; i++) o[nt][i][e] = 0.f;
      }
  }
  // of packed query row k, dimension j of a lane's
  DI float& output(int k, int j) { return o[k / 2][j / 2][k % 2 + j % 2 * 2]; }

  DI void centre() {
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      const float x = mass[k / 2][k % 2] * (ZERO_POINTS ? -1.f : -VALUE::CENTRE / VALUE_GAIN);
      mass[k / 2][k % 2] = mass[k / 2][2 + k % 2] = 0.f;
#pragma unroll
      for (int j = 0; j < DV / 8; j++) output(k, j) = fmaf(x, VALUE::unit(j), output(k, j));
    }
  }

  // Moves m up to the scores s (relative to m), whose maxima over this lane's tokens are x; v: their largest value
  // scale.
  template <int N> DI void rescale(float (&s)[N][OWN][2], const float (&x)[OWN], float v) {
    // the power of two that brings v to [1, 2)
    u32 fit = 0x7f000000u - (__float_as_uint(max_over_tokens(v)) & 0x7f800000u);
    fit = min(fit, __float_as_uint(v_norm));
    const float rv = as_float(0x3f800000u + fit - __float_as_uint(v_norm));
    v_norm = as_float(fit);
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      const u32 bit = 1u << k;
      float top = max_over_tokens(x[k]), up = seen & bit ? fmaxf(top, 0.f) : top == minus_infinity() ? 0.f : top;
      float r = seen & bit ? pow2(-up) : 1.f;
      if (top != minus_infinity()) seen |= bit;
      m[k] += up, l[k] *= r, r *= rv, bias[k] *= r, mass[k / 2][k % 2] *= r, mass[k / 2][2 + k % 2] *= r;
#pragma unroll
      for (int j = 0; j < DV / 8; j++) output(k, j) *= r;
#pragma unroll
      for (int n = 0; n < N; n++) s[n][k][0] -= up, s[n][k][1] -= up;
    }
    limit = __any_sync(~0u, seen != (1u << OWN) - 1) ? minus_infinity() : 4.f;  // p <= 16
  }

  // Products of N tiles of keys with the queries, of both rows of a lane. more(part, first, count): loads a later part
  // of the rows of these tiles.
  template <int N, class More> DI void multiply(float (&s)[N][OWN][2], const u32 (&keys)[N][2][ALL_K_WORDS],
      const u32 (&metas)[N][2], u32 (&squares)[N][2], const Lane& at, const Query& q, More more) const {
    // Products depend on each other: with one tile of packed query rows alone, two sums take half the time. Queries
    // that one tile may serve, of an invariant cut, have the same bits with two.
    constexpr int PAIRED = NT == 1 || INVARIANT && GROUP <= 8 ? NT : 0;
    float y[N][NT][4], odd[N][PAIRED + 1][4] = {};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float zero = KEY::ZERO_POINTS ? -zero_point(metas[n][r]) : -KEY::ZERO;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            y[n][nt][2 * r + e] = KEY::ZERO_POINTS || KEY::ZERO > 0.f ? zero * q.sum[nt][e] : 0.f;
      }
    // tiles whose products take turns, which spares registers where outputs have most of them
    constexpr int TOGETHER = NT * D > 384 ? N : 1;
#pragma unroll
    for (int first = 0; first < N; first += TOGETHER) {
      each_part<K_PARTS>([&](auto part) {
        constexpr int PART = decltype(part)::value, STEPS = DK / 16 / K_PARTS;
        more(part, first, TOGETHER);
#pragma unroll
        for (int w = 0; w < STEPS; w++) {
          u32 b[2 * EVEN_NT];
          q.step(PART * STEPS + w, b);
#pragma unroll
          for (int n = first; n < first + TOGETHER; n++) {
            const uint2 a = key_pairs<KEY>(keys[n][0], keys[n][1], 2 * w, at.table),
                        a8 = key_pairs<KEY>(keys[n][0], keys[n][1], 2 * w + 1, at.table);
            if constexpr (KEY::NORMALISED) {
              squares[n][0] = fma2(a.x, a.x, fma2(a8.x, a8.x, squares[n][0])),
              squares[n][1] = fma2(a.y, a.y, fma2(a8.y, a8.y, squares[n][1]));
            }
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
              product<KEY>(PAIRED && w % 2 ? odd[n][nt] : y[n][nt], a.x, a.y, a8.x, a8.y, b[2 * nt], b[2 * nt + 1]);
          }
        }
      });
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int k = 0; k < OWN; k++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          s[n][k][r] = y[n][k / 2][2 * r + k % 2];
          if (PAIRED) s[n][k][r] += odd[n][k / 2][2 * r + k % 2];
        }
  }
  // The same where keys are multiplied BY_INTEGERS.
  template <int N, class Key, class More> DI void multiply(float (&s)[N][OWN][2], const u32 (&keys)[N][2][ALL_K_WORDS],
      const u32 (&metas)[N][2], u32 (&)[N][2], const Lane&, const IntegerQuery<Key>& q, More more) const {
#pragma unroll
    for (int n = 0; n < N; n++) {
      int y[4] = {};  // one sum, exact in any order: a second would not be worth its additions
      each_part<K_PARTS>([&](auto part) {
        constexpr int PART = decltype(part)::value, STEPS = DK / 32 / K_PARTS;
        more(part, n, 1);
#pragma unroll
        for (int w = 0; w < STEPS; w++) {
          u32 b[2];
          q.step(PART * STEPS + w, b);
          const auto a = [&](int r, int j) { return Key::key_bytes(keys[n][r], 2 * w + j); };
          mma_integers(y, a(0, 0), a(1, 0), a(0, 1), a(1, 1), b[0], b[1]);
        }
      });
#pragma unroll
      for (int r = 0; r < 2; r++) {
        int x = whole_integer(y[2 * r], y[2 * r + 1]);
        if constexpr (Key::ZERO_POINTS) x -= (int)zero_code(metas[n][r]) * q.sum;
        s[n][0][r] = (float)x;  // in the packed query row's unit
      }
    }
  }

  // The scores of N tiles, relative to m. copies() starts the copies of later tiles, once the loads of these keys are
  // on their way. means: where the scores of each tile's row of the table of key means are, in shared memory.
  template <int N, class Copies> DI void score(float (&s)[N][OWN][2], const u32 (&tile)[N], const u32 (&means)[N],
      const Lane& at, const OwnQuery& q, float scale, float softcap, Copies copies) const {
    u32 keys[N][2][ALL_K_WORDS], metas[N][2] = {};
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        at.key.template load<0, K_PARTS>(tile[n] + 8 * r * K_ROW, keys[n][r]);
        if constexpr (K_META > 0) load_shared<K_META>(tile[n] + TILE_KM + (at.token + 8 * r) * K_META, &metas[n][r]);
      }
    }
    copies();
#pragma unroll
    for (int n = 0; n < N; n++) at.overlap_key<KEY>(keys[n][0]), at.overlap_key<KEY>(keys[n][1]);
    u32 squares[N][2] = {};
    multiply(s, keys, metas, squares, at, q, [&](auto part, int first, int count) {
      constexpr int PART = decltype(part)::value;
      if constexpr (PART > 0) {
#pragma unroll
        for (int n = first; n < first + count; n++)
#pragma unroll
          for (int r = 0; r < 2; r++) at.key.template load<PART, K_PARTS>(tile[n] + 8 * r * K_ROW, keys[n][r]);
      }
    });
#pragma unroll
    for (int n = 0; n < N; n++) {
      float norms[4] = {};  // squared: of the row in 0 and 1, of the row 8 further in 2 and 3
      if constexpr (KEY::NORMALISED) mma(norms, squares[n][0], squares[n][1], 0, 0, ONES, 0);
      const KeyScores key(metas[n], norms[0], norms[2], q.in_unit(scale));
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        u32 mean[2] = {};  // what is added to the scores of packed query rows 2 nt and 2 nt + 1, of both rows
        if (KEY_MEAN) load_shared<8>(means[n] + (nt * 8 + threadIdx.x % 4 * 2) * 4, mean);
#pragma unroll
        for (int k = 2 * nt; k < min(2 * nt + 2, OWN); k++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            s[n][k][r] = key(r, s[n][k][r], as_float(mean[k % 2]), q.total(k), softcap, m[k]);
      }
    }
  }

  // Adds N tiles: their scores, as above, and values.
  // valid(n, half, k): may packed query row k of this lane see its token (half: + 8) of tile n? ours(n, half): is it of
  // the segment?
  template <int N, bool MASKED, class Copies, class Valid, class Ours> DI void add(const u32 (&tile)[N],
      const u32 (&means)[N], const Lane& at, const OwnQuery& q, float scale, float softcap, Copies copies,
      Valid valid, Ours ours) {
    float s[N][OWN][2], x[OWN], v_top;
    score(s, tile, means, at, q, scale, softcap, copies);
    if constexpr (MASKED) {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < OWN; k++)
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (!valid(n, r, k)) s[n][k][r] = minus_infinity();
    }
    u32 va[N][ALL_V_PAIRS], vb[N][ALL_V_PAIRS];
    u32 zeros[N][2];
    float v_scale[N][2], v_bias[N][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 meta = 0;
        if constexpr (V_META > 0) load_shared<V_META>(tile[n] + TILE_VM + (at.token + 8 * r) * V_META, &meta);
        v_scale[n][r] = V_META > 0 ? VALUE::scale(meta) : 1.f;
        if constexpr (VALUE::BIASED) v_bias[n][r] = fmaf(v_scale[n][r], VALUE::CENTRE, VALUE::bias(meta));
        if (MASKED && FOREIGN && V_META > 0 && !ours(n, r)) {
          v_scale[n][r] = 0.f;
          if constexpr (VALUE::BIASED) v_bias[n][r] = 0.f;
        }
        if constexpr (ZERO_POINTS) {
          u32 two[2];
          load_shared<8>(tile[n] + TILE_VM + at.pair + 8 * r * V_META, two);
          zeros[n][r] = prmt(two[0], two[1], 0x5410) & 0x000f000fu;
        }
        v_top = n + r == 0 ? v_scale[n][r] : fmaxf(v_top, v_scale[n][r]);
      }
      if constexpr (V_PARTS == 1) at.values.template load<0>(tile[n] + TILE_V, va[n], vb[n]);
      at.overlap_values<VALUE>(va[n]), at.overlap_values<VALUE>(vb[n]);
    }
    float top;
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      x[k] = fmaxf(s[0][k][0], s[0][k][1]);
#pragma unroll
      for (int n = 1; n < N; n++) x[k] = fmaxf(x[k], fmaxf(s[n][k][0], s[n][k][1]));
      top = k == 0 ? x[k] : fmaxf(top, x[k]);
    }
    constexpr bool EARLY = N * OWN <= 4;  // exponentials while the warp votes, where registers allow
    float e[N][OWN][2];
    auto exponentials = [&] {
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < OWN; k++) e[n][k][0] = pow2(s[n][k][0]), e[n][k][1] = pow2(s[n][k][1]);
    };
    if (EARLY) exponentials();
    if (__any_sync(~0u, top > limit || v_top * v_norm > 16.f)) {
      rescale(s, x, v_top);
      if (EARLY) exponentials();
    }
    if (!EARLY) exponentials();
#pragma unroll
    for (int n = 0; n < N; n++) {
      u32 p[NT][2];
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float u = v_scale[n][r] * v_norm;
          float pair[2] = {};  // of packed query rows 2 nt and 2 nt + 1, of which there may be no second
#pragma unroll
          for (int k = 2 * nt; k < min(2 * nt + 2, OWN); k++) {
            l[k] += e[n][k][r], pair[k % 2] = e[n][k][r] * u;
            if constexpr (VALUE::BIASED) bias[k] = fmaf(e[n][k][r], v_bias[n][r] * v_norm, bias[k]);
          }
          p[nt][r] = transpose(operand_pair<VALUE>(pair[0], pair[1]));
        }
      if constexpr (CENTRED_LATER) {
        const u32 a = ZERO_POINTS ? zeros[n][0] : ONES, b = ZERO_POINTS ? zeros[n][1] : ONES;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma(mass[nt], a, a, b, b, p[nt][0], p[nt][1]);
      }
      each_part<V_PARTS>([&](auto part) {
        constexpr int PART = decltype(part)::value, ROWS = DV / 16 / V_PARTS;
        if constexpr (V_PARTS > 1) at.values.template load<PART>(tile[n] + TILE_V, va[n], vb[n]);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
          u32 a0 = value_pair<VALUE>(va[n], 2 * i, at.value_table),
              a1 = value_pair<VALUE>(va[n], 2 * i + 1, at.value_table);
          u32 a2 = value_pair<VALUE>(vb[n], 2 * i, at.value_table),
              a3 = value_pair<VALUE>(vb[n], 2 * i + 1, at.value_table);
          if (SUBTRACT) {
            a0 = centred(a0, zeros[n][0], VALUE::unit(2 * i)), a1 = centred(a1, zeros[n][0], VALUE::unit(2 * i + 1));
            a2 = centred(a2, zeros[n][1], VALUE::unit(2 * i)), a3 = centred(a3, zeros[n][1], VALUE::unit(2 * i + 1));
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) product<VALUE>(o[nt][PART * ROWS + i], a0, a1, a2, a3, p[nt][0], p[nt][1]);
        }
      });
    }
  }

  // The result so far, each packed query row to to(packed_row) [PARTIAL], in shared or global memory; packed query rows
  // beyond `packed_rows` are not written. held: what earlier tiles of the same sequence came to [packed_rows, PARTIAL],
  // possibly at the same place, or null.
  template <class To> DI void write(To to, int packed_rows, const u32* held) {
    if (CENTRED_LATER) centre();
    const int g = threadIdx.x % 32 / 4;
    // Of dimension j of this lane and the next. Where they are no neighbours, pairs of lanes exchange one of each two.
    const auto place = [&](int j) {
      return RUN == 1 ? (j + g % 2) * 4 + g / 2 : (j / RUN * RUN * 8 + g * RUN + j % RUN) / 2;
    };
    const auto old = [&](int k) { return held + own_packed_row(k) * PARTIAL; };
    const auto is_old = [&](int k) { return held && own_packed_row(k) < packed_rows; };
    // What branches by packed query row has a loop of its own: the compiler moves nothing of another packed query row
    // across a branch.
    float lse[OWN], factor[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      // No output is larger than weights, of at most 16 / v_norm, times a code; of WIDE values the largest output is
      // looked for.
      factor[k] = partial_factor(32.f * inverse_power(v_norm));
      if (!WIDE && is_old(k)) factor[k] = fmaxf(factor[k], as_float(old(k)[FACTOR]));
    }
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      const float sum = sum_over_tokens(l[k]), r = sum > 0.f ? inverse(sum * v_norm) : 0.f;
      const float z = VALUE::BIASED ? sum_over_tokens(bias[k]) * r : 0.f,
                  shrink = WIDE ? 1.f : inverse_power(factor[k]);
      lse[k] = sum > 0.f ? m[k] + lg2(sum) : minus_infinity();
#pragma unroll
      for (int j = 0; j < DV / 8; j++) output(k, j) = fmaf(output(k, j), VALUE_GAIN / VALUE::unit(j) * (r * shrink), z);
      if constexpr (RUN == 1) {
#pragma unroll
        for (int j = 0; j < DV / 8; j += 2) {
          const float other = __shfl_xor_sync(~0u, g % 2 ? output(k, j) : output(k, j + 1), 4);
          (g % 2 ? output(k, j) : output(k, j + 1)) = other;
        }
      }
    }
    if (held) {
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        if (!is_old(k)) continue;
        const Joined all(old(k), lse[k]);
        const float u = all.held * (as_float(old(k)[FACTOR]) * (WIDE ? 1.f : inverse_power(factor[k]))), w = all.later;
#pragma unroll
        for (int j = 0; j < DV / 8; j += 2) {
          const u32 pair = old(k)[place(j)];
          output(k, j) = fmaf(low(pair), u, output(k, j) * w),
                    output(k, j + 1) = fmaf(high(pair), u, output(k, j + 1) * w);
        }
        lse[k] = all.lse();
      }
      __syncwarp();  // what is held has been read
    }
    if constexpr (WIDE) {
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        float top = 0.f;
#pragma unroll
        for (int j = 0; j < DV / 8; j++) top = fmaxf(top, fabsf(output(k, j)));
        factor[k] = partial_factor(max_over_tokens(top));
#pragma unroll
        for (int j = 0; j < DV / 8; j++) output(k, j) *= inverse_power(factor[k]);
      }
    }
    static_assert(RUN % 4 || DV / 8 % 4 == 0, "two words of a run at once");
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      if (own_packed_row(k) >= packed_rows) continue;
      u32* partial = to(own_packed_row(k));
      if (g == 0) partial[LSE] = as_bits(lse[k]), partial[FACTOR] = as_bits(factor[k]);
      const auto pair = [&](int j) { return half2(output(k, j), output(k, j + 1)); };
#pragma unroll
      for (int j = 0; j < DV / 8; j += RUN % 4 ? 2 : 4) {
        u32* here = partial + place(j);
        if (RUN % 4) *here = pair(j); else *(uint2*)here = make_uint2(pair(j), pair(j + 2));
      }
    }
  }
};
