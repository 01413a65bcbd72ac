// A row on its way into a record: the numbers of one of the four lanes that hold it, and what all four have in common.
#pragma once
#include "record.cuh"

DI u32 max2(u32 a, u32 b) { return ROWS_BF16 ? max_bfloat2(a, b) : max_half2(a, b); }
DI u32 min2(u32 a, u32 b) { return ROWS_BF16 ? min_bfloat2(a, b) : min_half2(a, b); }
DI u32 times2(u32 a, u32 b) { return ROWS_BF16 ? mul_bfloat2(a, b) : mul2(a, b); }
DI float first(u32 pair) { return ROWS_BF16 ? as_float(pair << 16) : low(pair); }
DI float second(u32 pair) { return ROWS_BF16 ? as_float(pair & 0xffff0000u) : high(pair); }
DI u32 pair_of(float x, float y) { return ROWS_BF16 ? bfloat2(x, y) : saturate_half2(half2(x, y)); }

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
      for (int i = 1; i < E / 2; i++) m = f2(m, are_there(2 * i) ? pairs[i] : pairs[0]);
      m = over_lanes(m, f2);
      return f(first(m), second(m));
    } else {
      float m = x[0];
#pragma unroll
      for (int e = 1; e < E; e++) m = f(m, are_there(e) ? x[e] : x[0]);
      return over_lanes(m, f);
    }
  }
  DI float max() const {
    return extreme([](float a, float b) { return fmaxf(a, b); }, [](u32 a, u32 b) { return max2(a, b); });
  }
  DI float min() const {
    return extreme([](float a, float b) { return fminf(a, b); }, [](u32 a, u32 b) { return min2(a, b); });
  }
  DI float absmax() const {
    float m = 0.f;
#pragma unroll
    for (int e = 0; e < E; e++) m = fmaxf(m, fabsf(x[e]));
    return over_lanes(m, [](float a, float b) { return fmaxf(a, b); });
  }
  DI float sum_of_squares() const {  // in the specification's order: int2's scale is the sum's root
    float plane[4] = {};
#pragma unroll
    for (int p = 0; p < 4; p++) {
      float even = __fmul_rn(x[p], x[p]), odd = __fmul_rn(x[p + 4], x[p + 4]);
#pragma unroll
      for (int e = p + 8; e < E; e += 8)
        even = __fadd_rn(even, __fmul_rn(x[e], x[e])), odd = __fadd_rn(odd, __fmul_rn(x[e + 4], x[e + 4]));
      plane[p] = over_lanes(even + odd, [](float a, float b) { return a + b; });
    }
    return ((plane[0] + plane[1]) + plane[2]) + plane[3];
  }
};
