// TurboQuant. LEVELS_3, LEVELS_4: those of the quantizer, lowest first.
template <int B> struct Levels;
template <> struct Levels<3> { static constexpr float AT[] = {LEVELS_3}; };
template <> struct Levels<4> { static constexpr float AT[] = {LEVELS_4}; };

// Keys: codes of the unit vector, and its length. Two codes index a table of fp16 pairs. 256 bytes apart, a byte of
// codes is its entry's address.
template <int B> struct Codebook : ReadBy<Table<1 << 2 * B, 1, B == 4 ? 256 : 128>> {
  using Pairs = Table<1 << 2 * B, 1, B == 4 ? 256 : 128>;
  static constexpr int BITS = B, META_BYTES = 2, HALVES = 1 << (B - 1);
  static constexpr bool NORMALISED = true;
  static DI float scale(u32 meta) { return low(meta); }
  static DI void fill(u32 e) {
    constexpr auto& LEVEL = Levels<B>::AT;
    Pairs::put(e, half2(LEVEL[e % (1 << B)], LEVEL[e >> B]));
  }
  static DI u32 key_pair(const u32* w, int j, u32 lane) {
    const int bit = 2 * B * j, at = bit % 32, i = bit / 32;
    if (B == 4) return Pairs::entry(prmt(w[i], lane, 0x7604 | at / 8 << 4));
    const u32 x = at + 6 > 32 ? __funnelshift_r(w[i], w[i + 1], at - 7) : at < 7 ? w[i] << 7 - at : w[i] >> at - 7;
    return Pairs::entry(x & 63 * 128 | lane);
  }

  // how many boundaries a number reaches
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    constexpr auto& LEVEL = Levels<B>::AT;
    constexpr float SHARP = 1 << 25;  // so steep is a ramp from 0 to 1 that it is a step
    const float norm = __fsqrt_rn(row.sum_of_squares()), inverse = reciprocal(norm + 1e-8f);
    float slope[HALVES - 1];
#pragma unroll
    for (int i = 0; i < HALVES - 1; i++) {  // those above zero; the codebook is symmetric
      const float boundary = (LEVEL[HALVES + i] + LEVEL[HALVES + i + 1]) / 2.f;
      slope[i] = SHARP / boundary * inverse;
    }
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      float reached = 0.5f;  // counted by multiplications and additions: comparisons have half their rate
#pragma unroll
      for (int i = 0; i < HALVES - 1; i++) reached += __saturatef(fmaf(fabsf(row.x[e]), slope[i], -SHARP));
      code[e] = as_bits(__fadd_rd(copysignf(reached, row.x[e]), 8388608.f + HALVES));  // a half is lost on both sides
    }
    pack<BITS, FLOOR_BASE>(code, words);
    return half2(saturate(norm, LARGEST_HALF), 0.f);
  }
};

// Values: between the row's minimum and maximum.
template <int B> struct Uniform : Fields<B> {
  static constexpr int BITS = B, META_BYTES = 4;
  static constexpr bool BIASED = true;
  static DI float scale(u32 meta) { return low(meta); }
  static DI float bias(u32 meta) { return high(meta); }

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    constexpr float TOP = (1 << B) - 1;
    const float least = row.min(), scale = scale_of(row.max() - least, TOP, 1e-8f), inverse = reciprocal(scale);
    u32 code[E];
    // halves are common where 16-bit rows have few mantissa bits: the quotient must be exact
#pragma unroll
    for (int e = 0; e < E; e++)
      code[e] = floor_code(fminf(__fadd_rn(quotient(row.x[e] - least, scale, inverse), 0.5f), TOP));
    pack<BITS, FLOOR_BASE>(code, words);
    return half2(saturate(scale, LARGEST_HALF), saturate(least, LARGEST_HALF));
  }
};
