// Levels of a Gaussian, and an fp16 scale. CUBIC_2, CUBIC_3, .. are root, gain, a, b: the level of code t, counted from
// the middle, is t (a + b t^2), and near gain u (root + u^2) in fp16, u in units of 2^bits codes.
template <int B> struct Cubic;
template <> struct Cubic<2> { static constexpr float OF[] = {CUBIC_2}; };
template <> struct Cubic<3> { static constexpr float OF[] = {CUBIC_3}; };
template <> struct Cubic<4> { static constexpr float OF[] = {CUBIC_4}; };
template <> struct Cubic<5> { static constexpr float OF[] = {CUBIC_5}; };
template <> struct Cubic<6> { static constexpr float OF[] = {CUBIC_6}; };
template <> struct Cubic<8> { static constexpr float OF[] = {CUBIC_8}; };

constexpr __device__ u32 twice_half(float x) {  // a positive normal number, twice, in fp16
  u32 e = 15;
  for (; x >= 2.f; x /= 2.f) e++;
  for (; x < 1.f; x *= 2.f) e--;
  return twice((e << 10) + u32((x - 1.f) * 1024.f + 0.5f));
}

// By the cubic. A code that is masked in place in both halves of a register is an fp16 subnormal, which one
// multiply-add brings to t, exactly, in units of 2^STEPS.
template <int B> struct CubicLevels : CodecDefaults {
  static constexpr u32 MASK = (1u << B) - 1;
  // A code may begin at bits LOWEST to HIGHEST: higher it were not linear as fp16, lower the products would be
  // subnormals.
  static constexpr int LOWEST = B < 5 ? 3 : B == 5 ? 1 : 0, HIGHEST = 11 - B, STEPS = 9 - LOWEST;
  static constexpr float UNIT = float(1 << B) / (1 << STEPS);  // of the cubic
  static constexpr float ROOT = Cubic<B>::OF[0] * UNIT * UNIT, GAIN = Cubic<B>::OF[1] / (UNIT * UNIT * UNIT);
  static DI u32 level(u32 x, int at) {  // of the code at this bit of both halves
    constexpr u32 MIDDLE = twice_half(float(MASK) / 2 / (1 << STEPS)) ^ 0x80008000u, CENTRE = twice_half(ROOT);
    const u32 t = fma2(x & twice(MASK << at), twice(39 - at - STEPS << 10), MIDDLE);
    return mul2(t, fma2(t, t, CENTRE));
  }
  // The code at bit `at` of 16, of two rows. One that ends beyond them, or high, is taken from the 16 bits that begin 8
  // later.
  static DI u32 level(u32 x, u32 next, bool has_next, int at) {
    constexpr int DOWN = B == 6 ? 6 : 5;
    if (B == 8) return level(prmt(x, 0, at ? 0x4341 : 0x4240), 0);
    if (at < LOWEST) return level(x << LOWEST, at + LOWEST);
    if (at <= HIGHEST) return level(x, at);
    if (!has_next || at < 8 + LOWEST) return level(x >> DOWN, at - DOWN);
    const u32 later = prmt(x, next, 0x6341);
    return at - 8 <= HIGHEST ? level(later, at - 8) : level(later >> 5, at - 13);
  }
  static DI u32 pair(const u32* x, int j) {
    const int k = j * B / 16, has_next = 16 * (k + 1) % B != 0;
    return level(x[k], has_next ? x[k + 1] : 0, has_next, j * B % 16);
  }

  // Keys: a code and that of 16 later, or that of the other half of a word.
  static constexpr int HALF = 16 % B ? 16 : 16 / B;
  static DI u32 halves(const u32* w, int k) {  // 16 bits of 16 codes, and of the next 16
    const int first = k / B * 2 * B + k % B, second = first + B;
    return prmt(w[first / 2], w[second / 2], (first % 2 ? 0x32 : 0x10) | (second % 2 ? 0x7600 : 0x5400));
  }
  static DI u32 key_pair(const u32* w, int j) {
    if (HALF < 16) return pair(w, j);
    const int k = j * B / 16, has_next = 16 * (k + 1) % B != 0;
    return level(halves(w, k), has_next ? halves(w, k + 1) : 0, has_next, j * B % 16);
  }
};
template <> struct CubicLevels<2> : FourLevels {
  static constexpr float GAIN = SUBNORMAL / 6.62f;  // 10 / 6.62 = 1.5106, and 3 / 6.62 = 0.4532
};

// Keys of two codes at a time, by a table of pairs. 256 bytes apart, a byte of codes is its entry's address.
template <int B> struct LevelsByTable : CubicLevels<B> {
  using Pairs = Table<1 << 2 * B, 1, B == 4 ? 256 : 128>;
  static constexpr int ENTRIES = Pairs::ENTRIES, TOKENS = 1, SPACING = Pairs::SPACING, TABLE_BYTES = Pairs::TABLE_BYTES,
                       HALF = 1;
  static DI u32 lane() { return Pairs::lane(); }
  static DI void fill(u32 e) {
    const u32 a = e & CubicLevels<B>::MASK, b = e >> B;
    Pairs::put(e, CubicLevels<B>::level((a | b << 16) << CubicLevels<B>::LOWEST, CubicLevels<B>::LOWEST));
  }
  static DI u32 key_pair(const u32* w, int j, u32 lane) {
    const int bit = 2 * B * j, at = bit % 32, i = bit / 32;
    if (B == 4) return Pairs::entry(prmt(w[i], lane, 0x7604 | at / 8 << 4));
    const u32 x = at + 6 > 32 ? __funnelshift_r(w[i], w[i + 1], at - 7) : at < 7 ? w[i] << 7 - at : w[i] >> at - 7;
    return Pairs::entry(x & 63 * 128 | lane);
  }
};

template <int B> struct ReadLevels : CubicLevels<B> {};
template <> struct ReadLevels<3> : LevelsByTable<3> {};
template <> struct ReadLevels<4> : LevelsByTable<4> {};

template <int B> struct Levels : ReadLevels<B> {
  static constexpr int BITS = B, META_BYTES = 2, HALVES = 1 << (B - 1);
  static constexpr float A = Cubic<B>::OF[2], B3 = Cubic<B>::OF[3];
  static DI float scale(u32 meta) { return low(meta); }

  static DI u32 levels_of(float t, float u) { return half2(t * (A + B3 * (t * t)), u * (A + B3 * (u * u))); }
  // How many boundaries above zero are below size, in units of the row's root mean square; magnitude: the level there.
  // Few boundaries are counted. Of many, that between the levels of n - 1/2 and n + 1/2 is near n (a + 3/4 b + b n^2):
  // Newton's method, from above, finds the nearest n, and then both levels, which are rounded, say on which side of it
  // the number is.
  static constexpr bool COUNTED = B < 5;
  struct Boundaries {
    float at[COUNTED ? HALVES - 1 : 1];  // times STEEP: so steep is a ramp from 0 to 1 that it is a step
    static constexpr float STEEP = 1 << 30;
    DI Boundaries() {
#pragma unroll
      for (int i = 1; COUNTED && i < HALVES; i++) {
        const u32 both = levels_of(i - 0.5f, i + 0.5f);
        at[i - 1] = (low(both) + high(both)) * (-STEEP / 2.f);
      }
    }
    DI float reached(float size, float& magnitude) const {
      float count = 0.f;
#pragma unroll
      for (int i = 0; i < HALVES - 1; i++) count += __saturatef(fmaf(size, STEEP, at[i]));
      magnitude = low(levels_of(count + 0.5f, 0.f));
      return count;
    }
  };
  static DI float reached(float size, float& magnitude) {
    constexpr float LINEAR = A + 0.75f * B3, FAR = 0.6f * HALVES, SLOPE = LINEAR + 3.f * B3 * FAR * FAR;
    constexpr float LATER = FAR - FAR * (LINEAR + B3 * FAR * FAR) / SLOPE;
    float n = fminf(size * (1.f / LINEAR), fmaf(size, 1.f / SLOPE, LATER));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float square = n * n;
      n = fmaf(2.f * B3 * square, n, size) * inverse(fmaf(3.f * B3, square, LINEAR));
    }
    constexpr float TO_INTEGER = 12582912.f;  // 3 2^22
    n = fminf(__fadd_rn(__fadd_rn(n, TO_INTEGER), -TO_INTEGER), HALVES - 1.f);
    const u32 both = levels_of(n - 0.5f, n + 0.5f);
    const bool beyond = size > (low(both) + high(both)) / 2.f;
    magnitude = fabsf(beyond ? high(both) : low(both));
    return fmaxf(beyond ? n : n - 1.f, 0.f);
  }

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<B>]) {
    constexpr float TINY = 1.1754944e-38f, LEAST = 1.f / (1 << 24);  // the smallest normal float32; the smallest fp16
    const float root = __fsqrt_rn(row.sum_of_squares() / D), size = root < TINY ? TINY : root,
                inverse = reciprocal(size);
    const Boundaries boundaries;
    float itself = 0.f, dot = 0.f;
    const auto code_of = [&](float x) {
      const float unit = fabsf(x) * inverse;
      float magnitude;
      float place;
      if constexpr (COUNTED) place = boundaries.reached(unit, magnitude) + 0.5f;
      else place = reached(unit, magnitude) + 0.5f;
      itself = fmaf(unit, unit, itself), dot = fmaf(unit, magnitude, dot);
      const u32 sign = ~as_bits(0.f - x) & 0x80000000u;  // zero is below the boundary at zero
      return as_bits(__fadd_rd(as_float(as_bits(place) | sign), 8388608.f + HALVES));
    };
    constexpr bool LOOP = ROLLED && REGISTERS<B> == 1;  // code that runs once arrives later than it runs
    u32 code[LOOP ? CODES<B> : E];
    if constexpr (LOOP) {
      float x[E];
#pragma unroll
      for (int e = 0; e < E; e++) x[e] = row.x[e];
#pragma unroll 1
      for (int w = 0; w < WORDS<B>; w++) {
        u32 word = 0, base = 0;
#pragma unroll
        for (int n = 0; n < CODES<B>; n++) code[n] = code_of(x[w * CODES<B> + n]);
#pragma unroll
        for (int n = CODES<B> - 1; n >= 0; n--) word = (word << B) + code[n], base = (base << B) + FLOOR_BASE;
        words[w] = word - base;
      }
    } else {
#pragma unroll
      for (int e = 0; e < E; e++) code[e] = code_of(row.x[e]);
    }
    auto add = [](float a, float b) { return a + b; };
    itself = over_lanes(itself, add), dot = fmaxf(over_lanes(dot, add), TINY);
    if constexpr (!LOOP) pack<B, FLOOR_BASE>(code, words);
    const float unbiased = size * fminf(fmaxf(quotient(itself, dot, reciprocal(dot)), 0.5f), 2.f);
    return half2(saturate(unbiased < LEAST ? LEAST : unbiased, LARGEST_HALF), 0.f);
  }
};
