// What codecs are written with.
//
// Four lanes hold a row, E numbers each: its D, and zeros up to whole CHUNKs of all four, which are_there() tells
// apart. `encode(row, words)` of a codec turns a lane's numbers row.x[E] into its codes, word by word, lowest bits
// first, and returns the row's metadata, the same in all four lanes. A `row` also has max(), min(), absmax() and
// sum_of_squares(), over all four. Rounding is the specification's, operation by operation: products and sums that must
// not become one fused operation are written as intrinsics.
#pragma once
#include "unpack.cuh"
#ifndef ROLLED
#define ROLLED 0  // rows are encoded by a loop, where a codec has one: for kernels of few rows
#endif

constexpr int GROUP_OF_CHUNKS = 32, E = (D + GROUP_OF_CHUNKS - 1) / GROUP_OF_CHUNKS * GROUP_OF_CHUNKS / 4;
constexpr bool FILLED = D % GROUP_OF_CHUNKS == 0;  // no zeros: else the last 8 numbers of lanes 2 and 3 are
DI bool are_there(int e) { return FILLED || e < E - 8 || threadIdx.x % 4 < 2; }
constexpr double root_of(int n) {  // of a power of two
  double root = 1.;
  for (; n >= 4; n /= 4) root *= 2.;
  return n == 2 ? root * 1.4142135623730951 : root;
}

// What is stored of finite rows is finite. NaN stays NaN.
constexpr float LARGEST = 3.4028234663852886e38f, LARGEST_HALF = 65504.f;
DI float saturate(float x, float largest) { return x > largest ? largest : x < -largest ? -largest : x; }

// Correctly rounded but for a few in 2^24, where nothing over- or underflows: what surrounds a row is worked out in
// every lane, and the instructions that handle every case take ten times as many. An infinite a gives NaN.
DI float reciprocal(float b) {
  const float r = inverse(b);
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
DI u32 floor_code(float x) { return as_bits(__fadd_rd(x, as_float(FLOOR_BASE))); }

// Registers that a lane's codes take. Codes that fill a register: one after the other. Others: eight at a time, from
// the lowest bit of one register, or of the first of two, on.
template <int BITS> constexpr bool ALIGNED = 32 % BITS == 0;
template <int BITS> constexpr int CODES = ALIGNED<BITS> ? 32 / BITS : 8;
template <int BITS> constexpr int REGISTERS = (CODES<BITS> * BITS + 31) / 32;  // that CODES codes take
template <int BITS> constexpr int WORDS = (E + CODES<BITS> - 1) / CODES<BITS> * REGISTERS<BITS>;

template <int REGISTERS> struct WordOf { using type = u32; };
template <> struct WordOf<2> { using type = u64; };
// Codes, each BASE too large: they are added up where they stand, and the bases' sum is taken off in the end.
template <int BITS, u32 BASE> DI void pack(const u32 (&code)[E], u32 (&words)[WORDS<BITS>]) {
  using Word = typename WordOf<REGISTERS<BITS>>::type;
#pragma unroll
  for (int w = 0; w < WORDS<BITS> / REGISTERS<BITS>; w++) {
    Word word = 0, base = 0;
#pragma unroll
    for (int n = CODES<BITS> - 1; n >= 0; n--)
      if (w * CODES<BITS> + n < E) word = (word << BITS) + code[w * CODES<BITS> + n], base = (base << BITS) + BASE;
    word -= base;
#pragma unroll
    for (int r = 0; r < REGISTERS<BITS>; r++) words[w * REGISTERS<BITS> + r] = word >> 32 * r;
  }
}
