// What the stored bytes of each format are made of: the other half of unpack.cuh.
//
// Four lanes hold a row, E = D / 4 numbers each. A codec turns a lane's numbers into its codes, word by word, lowest bits first,
// and returns the row's metadata, the same in all four lanes. Rounding is the reference's, operation by operation: products and
// sums that must not become one fused operation are written as intrinsics.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
#define DI __device__ __forceinline__

constexpr int D = HEAD_SIZE, E = D / 4;

DI u32 half2(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI u32 bfloat2(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI float low_half(u32 h) { float f; asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(h)); return f; }
DI float high_half(u32 h) { float f; asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(h)); return f; }
DI u32 e4m3x2(float lo, float hi) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
DI u32 e5m2x2(float lo, float hi) { u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }

#if ROWS_BF16
#define PAIR "bf16x2"
#else
#define PAIR "f16x2"
#endif
DI u32 max2(u32 a, u32 b) { u32 r; asm("max." PAIR " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 min2(u32 a, u32 b) { u32 r; asm("min." PAIR " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI float first(u32 pair) { return ROWS_BF16 ? __uint_as_float(pair << 16) : low_half(pair); }
DI float second(u32 pair) { return ROWS_BF16 ? __uint_as_float(pair & 0xffff0000u) : high_half(pair); }
DI u32 pair_of(float x, float y) { return ROWS_BF16 ? bfloat2(x, y) : half2(x, y); }

template <class T, class F> DI T over_lanes(T x, F f) {  // the four of a row
  x = f(x, __shfl_xor_sync(~0u, x, 1));
  return f(x, __shfl_xor_sync(~0u, x, 2));
}

// A lane's part of a row. PAIRED: x holds 16-bit numbers, those of `pairs`, and extremes are found two at a time.
template <bool PAIRED> struct Row {
  u32 pairs[E / 2];
  float x[E];

  DI void unpack() {
#pragma unroll
    for (int e = 0; e < E; e += 2) x[e] = first(pairs[e / 2]), x[e + 1] = second(pairs[e / 2]);
  }
  template <class F, class F2> DI float extreme(F f, F2 f2) const {
    if constexpr (PAIRED) {
      u32 m = pairs[0];
#pragma unroll
      for (int i = 1; i < E / 2; i++) m = f2(m, pairs[i]);
      m = over_lanes(m, f2);
      return f(first(m), second(m));
    } else {
      float m = x[0];
#pragma unroll
      for (int e = 1; e < E; e++) m = f(m, x[e]);
      return over_lanes(m, f);
    }
  }
  DI float max() const { return extreme([](float a, float b) { return fmaxf(a, b); }, [](u32 a, u32 b) { return max2(a, b); }); }
  DI float min() const { return extreme([](float a, float b) { return fminf(a, b); }, [](u32 a, u32 b) { return min2(a, b); }); }
  DI float absmax() const {
    float m = 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) m = fmaxf(m, fabsf(x[e]));
    return over_lanes(m, [](float a, float b) { return fmaxf(a, b); });
  }
  DI float sum_of_squares() const {  // in the reference's order: int2's scale is the sum's root
    float plane[4] = {};
#pragma unroll
    for (int p = 0; p < 4; p++) {
      float even = __fmul_rn(x[p], x[p]), odd = __fmul_rn(x[p + 4], x[p + 4]);
#pragma unroll
      for (int e = p + 8; e < E; e += 8) even = __fadd_rn(even, __fmul_rn(x[e], x[e])), odd = __fadd_rn(odd, __fmul_rn(x[e + 4], x[e + 4]));
      plane[p] = over_lanes(even + odd, [](float a, float b) { return a + b; });
    }
    return ((plane[0] + plane[1]) + plane[2]) + plane[3];
  }
};

// Correctly rounded but for a few in 2^24, where nothing over- or underflows: what surrounds a row is worked out in every lane, and
// the instructions that handle every case take ten times as many. An infinite a gives NaN.
DI float reciprocal(float b) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  return fmaf(fmaf(-b, r, 1.f), r, r);
}
DI float quotient(float a, float b, float reciprocal_of_b) {
  const float q = __fmul_rn(a, reciprocal_of_b);
  return fmaf(fmaf(-q, b, a), reciprocal_of_b, q);
}
// range / steps, kept away from zero so that a row of zeros stays finite. NaN stays NaN.
DI float scale_of(float range, float steps, float least) {
  const float scale = quotient(range, steps, 1.f / steps);
  return scale < least ? least : scale;
}

// floor(x) + FLOOR_BASE for 0 <= x < 2^23: adding 2^23, rounded down, leaves the integer in the low bits.
constexpr u32 FLOOR_BASE = 0x4b000000u;  // 2^23
DI u32 floor_code(float x) { return __float_as_uint(__fadd_rd(x, __uint_as_float(FLOOR_BASE))); }

// Registers that a lane's codes take: a word each, but for 3 bits eight codes in the low 24.
template <int BITS> constexpr int CODES = BITS == 3 ? 8 : 32 / BITS;
template <int BITS> constexpr int WORDS = E / CODES<BITS>;

// Codes, each BASE too large: they are added up where they stand, and the bases' sum is taken off in the end.
template <int BITS, u32 BASE> DI void pack(const u32 (&code)[E], u32 (&words)[WORDS<BITS>]) {
#pragma unroll
  for (int w = 0; w < WORDS<BITS>; w++) {
    u32 word = 0, base = 0;
#pragma unroll
    for (int n = CODES<BITS> - 1; n >= 0; n--) word = (word << BITS) + code[w * CODES<BITS> + n], base = (base << BITS) + BASE;
    words[w] = word - base;
  }
}

struct Int8 {
  static constexpr int BITS = 8, META_BYTES = 4;
  static constexpr bool ROUND_MAPPED = false;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[E / 4]) {
    const float scale = scale_of(row.absmax(), 127.f, 1e-6f), inverse = reciprocal(scale);
    int code[E];
#pragma unroll
    for (int e = 0; e < E; e++) {  // halves away from zero
      const float t = __fmul_rn(row.x[e], inverse);
      code[e] = __float2int_rz(__fadd_rn(t, copysignf(0.5f, t)));
    }
#pragma unroll
    for (int e = 0; e < E; e += 4)
      words[e / 4] = __byte_perm(__byte_perm(code[e], code[e + 1], 0x0040), __byte_perm(code[e + 2], code[e + 3], 0x0040), 0x5410);
    return __float_as_uint(scale);
  }
};

template <bool E4M3> DI void float8_words(const float (&x)[E], float factor, u32 (&words)[E / 4]) {
#pragma unroll
  for (int w = 0; w < E / 4; w++) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = __fmul_rn(x[4 * w + i], factor);
    words[w] = E4M3 ? e4m3x2(y[0], y[1]) | e4m3x2(y[2], y[3]) << 16 : e5m2x2(y[0], y[1]) | e5m2x2(y[2], y[3]) << 16;
  }
}

struct E4M3Token {
  static constexpr int BITS = 8, META_BYTES = 4;
  static constexpr bool ROUND_MAPPED = false;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[E / 4]) {
    const float scale = scale_of(row.absmax(), 448.f, 1e-6f);
    float8_words<true>(row.x, reciprocal(scale), words);
    return __float_as_uint(scale);
  }
};

template <bool E4M3> struct Float8 {
  static constexpr int BITS = 8, META_BYTES = 0;
  static constexpr bool ROUND_MAPPED = false;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[E / 4]) { return float8_words<E4M3>(row.x, 1.f, words), 0; }
};

struct Int4 {  // the scale's low four mantissa bits carry the zero point
  static constexpr int BITS = 4, META_BYTES = 4;
  static constexpr bool ROUND_MAPPED = true;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    const float low = row.min(), high = row.max(), scale = scale_of(high - low, 15.f, 1e-6f), inverse = reciprocal(scale);
    const u32 zero_point = floor_code(fminf(fmaxf(0.5f - quotient(low, scale, inverse), 0.f), 15.f)) - FLOOR_BASE;
    // code = floor(clamp(x / scale + zero_point + 0.5)), all of it times 2^-4: saturation to 0 .. 1 is then part of the addition,
    // and adding BASE, rounded down, leaves the code.
    constexpr u32 BASE = 0x49000000u;  // 2^19
    const float step = inverse / 16.f, shift = (zero_point + 0.5f) / 16.f;
    auto place = [&](float x) { return __saturatef(__fadd_rn(__fmul_rn(x, step), shift)); };
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++) code[e] = __float_as_uint(__fadd_rd(place(row.x[e]), __uint_as_float(BASE)));
    if (__any_sync(~0u, place(high) == 1.f)) {  // rarely: rows above zero, and exact halves
#pragma unroll
      for (int e = 0; e < E; e++) code[e] = min(code[e], BASE + 15);
    }
    pack<BITS, BASE>(code, words);
    return __float_as_uint(scale) & ~15u | zero_point;
  }
};

struct Int2 {
  static constexpr int BITS = 2, META_BYTES = 4;
  static constexpr bool ROUND_MAPPED = true;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    const float norm = __fsqrt_rn(row.sum_of_squares() + 1e-12f), factor = quotient(ROOT_D, norm, reciprocal(norm));
    // The boundaries are -0.9816, 0 and 0.9816: code = floor(clamp(x factor / 0.9816 + 2)), times 2^-2 as above.
    constexpr u32 BASE = 0x4a000000u;  // 2^21
    const float step = factor * float(1 / (4 * 0.9816));
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      const float place = fminf(__saturatef(__fmaf_rd(row.x[e], step, 0.5f)), 0.75f);
      code[e] = __float_as_uint(__fadd_rd(place, __uint_as_float(BASE)));
    }
    pack<BITS, BASE>(code, words);
    return __float_as_uint(quotient(norm, D * ROOT_D, 1. / (D * ROOT_D)));
  }
};

template <int B> struct Codebook {  // TurboQuant keys: how many midpoints of the codebook the unit vector reaches, and its length
  static constexpr int BITS = B, META_BYTES = 2, HALF = 1 << B - 1;
  static constexpr bool ROUND_MAPPED = false;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    constexpr float MIDPOINTS[] = {MIDPOINT_LIST};  // those above zero; the codebook is symmetric
    constexpr float SHARP = 1 << 25;                // so steep is a ramp from 0 to 1 that it is a step
    const float norm = __fsqrt_rn(row.sum_of_squares()), inverse = reciprocal(norm + 1e-8f);
    float slope[HALF - 1];
#pragma unroll
    for (int i = 0; i < HALF - 1; i++) slope[i] = SHARP / MIDPOINTS[i] * inverse;
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      float reached = 0.5f;  // counted by multiplications and additions: comparisons have half their rate
#pragma unroll
      for (int i = 0; i < HALF - 1; i++) reached += __saturatef(fmaf(fabsf(row.x[e]), slope[i], -SHARP));
      code[e] = __float_as_uint(__fadd_rd(copysignf(reached, row.x[e]), 8388608.f + HALF));  // a half is lost on both sides
    }
    pack<BITS, FLOOR_BASE>(code, words);
    return half2(norm, 0.f);
  }
};

template <int B> struct Uniform {  // TurboQuant values: between the row's minimum and maximum
  static constexpr int BITS = B, META_BYTES = 4;
  static constexpr bool ROUND_MAPPED = false;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    constexpr float TOP = (1 << B) - 1;
    const float low = row.min(), scale = scale_of(row.max() - low, TOP, 1e-8f), inverse = reciprocal(scale);
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++)  // halves are common where 16-bit rows have few mantissa bits: the quotient must be exact
      code[e] = floor_code(fminf(__fadd_rn(quotient(row.x[e] - low, scale, inverse), 0.5f), TOP));
    pack<BITS, FLOOR_BASE>(code, words);
    return half2(scale, low);
  }
};

template <bool BF16> struct Plain16 {
  static constexpr int BITS = 16, META_BYTES = 0;
  static constexpr bool ROUND_MAPPED = false;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
#pragma unroll
    for (int w = 0; w < E / 2; w++) words[w] = BF16 ? bfloat2(row.x[2 * w], row.x[2 * w + 1]) : half2(row.x[2 * w], row.x[2 * w + 1]);
    return 0;
  }
};
