// Queries as integers, for keys whose codes are: products of 8-bit integers are half as many, and what is unpacked is
// four to a register.
#pragma once
#include "query.cuh"

// A packed query row is in fixed point, of 16 bits in two parts, 256 high + low. Its unit is its own, so that what is
// not finite stays there.
static_assert(!BY_INTEGERS || !KEY::BIASED && !KEY::NORMALISED && !KEY_MEAN,
    "scores are products of codes, less zero points");
// To sums of columns 2 c and 2 c + 1 of an operand.
DI void add_integers(int (&sums)[4], u32 b0, u32 b1) {
  constexpr u32 ONES = 0x01010101u;
  mma_integers(sums, ONES, ONES, ONES, ONES, b0, b1);
}
constexpr float LARGEST_INTEGER = 127.f * 256.f;
DI int whole_integer(int high, int low) { return high * 256 + low; }
// The unit of a packed query row whose largest number is `top`; NaN where that is not finite.
DI float unit_of_integers(float top) { return top * (1.f / LARGEST_INTEGER) + (top - top); }
// The largest size of a packed query row's numbers, over its four lanes, in the lower 16 bits; NaN where one is.
template <int N> DI u32 largest_number(const u32 (&x)[N]) {
  u32 top = 0;
#pragma unroll
  for (int j = 0; j < N; j++) top = max_size_half2(top, x[j]);
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes <<= 1) top = max_size_half2(top, __shfl_xor_sync(~0u, top, lanes));
  return max_size_half2(top, top >> 16);
}
// This lane's quarter of a packed query row, or whole groups of it, as integers n, by their bytes. What is added
// rounds, and leaves n + 128 in the lowest 16 bits.
template <class Key, int N>
DI void split_integers(const u32 (&x)[N], float factor, u32 (&high)[N / 2], u32 (&low)[N / 2]) {
  constexpr float TO_INTEGERS = 12582912.f + 128.f;  // 1.5 * 2^23
  const auto number = [&](int j, int i) {
    const int d = Key::byte_dim(j, i), own = d / (2 * Key::HALF) * Key::HALF + d % Key::HALF;
    return as_bits(fmaf(d / Key::HALF % 2 ? ::high(x[own]) : ::low(x[own]), factor, TO_INTEGERS));
  };
#pragma unroll
  for (int j = 0; j < N / 2; j++) {
    const u32 a = prmt(number(j, 0), number(j, 1), 0x5140), b = prmt(number(j, 2), number(j, 3), 0x5140);
    low[j] = prmt(a, b, 0x5410) ^ 0x80808080u, high[j] = prmt(a, b, 0x7632);
  }
}

// Both parts of a packed query row are neighbours among the eight packed query rows of a product: four packed query
// rows fill it, and the lane that has both parts of a score puts them together, exactly. Each lane has its quarter of
// one part of one packed query row.
template <class Key> struct IntegerQuery : Query {
  static constexpr int STEPS = DK / 32;  // products of 32 dimensions
  u32 bytes[2 * STEPS];
  float unit;  // of this lane's own packed query row
  int sum;     // of its numbers, where keys have zero points
  DI float in_unit(float scale) const { return scale * unit; }
  DI float total(int) const { return 0.f; }  // what a bias would be multiplied by

  DI void step(int w, u32 (&x)[2]) const {
    if (SPILLED) load_shared<8>(spilled + spilled_place(0, w), x); else x[0] = bytes[2 * w], x[1] = bytes[2 * w + 1];
  }
  // at: where what does not fit in registers is spilled.
  DI void load(const GivenQuery& given, u32 assembled, u32 at) {
    Query::load<false>(given, assembled, at);
    u32 high[2 * STEPS], low[2 * STEPS];
    const float top = ::low(largest_number(b[0]));
    split_integers<Key>(b[0], LARGEST_INTEGER * inverse(top), high, low);
    // a lane of the packed query row of which this one has a part
    const int lane = threadIdx.x % 32, from = lane / 8 * 4 + lane % 4;
#pragma unroll
    for (int j = 0; j < 2 * STEPS; j++) {
      const u32 x = __shfl_sync(~0u, high[j], from), y = __shfl_sync(~0u, low[j], from);
      bytes[j] = lane & 4 ? y : x;
    }
    unit = __shfl_sync(~0u, unit_of_integers(top), lane % 4 * 4);
    int sums[4] = {};
    if constexpr (Key::ZERO_POINTS) {
#pragma unroll
      for (int w = 0; w < STEPS; w++) add_integers(sums, bytes[2 * w], bytes[2 * w + 1]);
    }
    sum = whole_integer(sums[0], sums[1]);
    if constexpr (SPILLED) {
      spilled = at + lane * SPILLED_LANE;
#pragma unroll
      for (int w = 0; w < STEPS; w++) store_shared(spilled + spilled_place(0, w), bytes[2 * w], bytes[2 * w + 1]);
    }
  }
};
template <bool> struct QueryOf { using Type = Query; };
template <> struct QueryOf<true> { using Type = IntegerQuery<KEY>; };
using OwnQuery = QueryOf<BY_INTEGERS>::Type;
