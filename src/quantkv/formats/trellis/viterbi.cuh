// What a warp does to find the codes of a row: dynamic programming over a chain (formats/trellis/search.py), a lane a
// state.
#pragma once
#include "mapped.cuh"

template <int> struct CodecOf { using type = KEY; };
template <> struct CodecOf<2> { using type = VALUE; };
using CODEC = CodecOf<SIDES>::type;  // of both sides, where both are written

constexpr int STATES = 16, CHAIN = 8 * CODEC::CHAIN / CODEC::BITS, CHAINS = D / CHAIN, ROWS = 8;
static_assert(
    CODEC::OVERLAP == 4 && CHAIN == 64 && CODEC::META_BYTES == 2, "chains of 32 codes of 4 bits, and a scale");

// Shared memory of a block. Rows are in units of their size.
struct TrellisRows {
  float rows[ROWS][D], sizes[ROWS];
  u32 pairs[STATES * STATES];        // by the code before, in the low half of the index, and the code
  u32 words[ROWS][D / 16];           // what is found
  bool alone[ROWS];
};

// What codes of this lane's last state stand for, by the state before.
struct Branches {
  float first[STATES], second[STATES];
  DI explicit Branches(const u32* pairs) {
#pragma unroll
    for (int b = 0; b < STATES; b++) {
      const u32 pair = pairs[threadIdx.x % STATES * STATES + b];
      first[b] = low(pair), second[b] = high(pair);
    }
  }
};

// The last codes of each of 16 ways, and where it came from: 8 steps of 4 bits a word. Returns the codes of the way
// that ends in `state`.
DI uint4 trace(const u32 (*came)[STATES], u32 state) {
  u32 words[4];
#pragma unroll
  for (int o = 3; o >= 0; o--) {
    words[o] = 0;
#pragma unroll
    for (int i = 7; i >= 0; i--) words[o] = words[o] << 4 | state, state = came[o][state] >> 4 * i & 15;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The first of the 16 states with the least cost.
DI u32 cheapest(const float* costs) {
  u32 state = 0;
  float least = costs[0];
#pragma unroll
  for (int s = 1; s < STATES; s++)
    if (costs[s] < least) least = costs[s], state = s;
  return state;
}

// What half a warp needs to search a chain in which all errors cost alike.
struct Viterbi {
  float costs[2][STATES];
  u32 came[4][STATES];

  DI uint4 search(const float* row, const Branches& branches) {
    const int code = threadIdx.x % STATES;
    __syncwarp();  // the chain before is traced
    costs[0][code] = code == 0 ? 0.f : -minus_infinity();
    __syncwarp();
#pragma unroll 1
    for (int o = 0; o < 4; o++) {
      u32 word = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float one = row[16 * o + 2 * i], two = row[16 * o + 2 * i + 1];
        float least = 0.f;
        u32 from = 0;
#pragma unroll
        for (int b = 0; b < STATES; b++) {
          const float x = one - branches.first[b], y = two - branches.second[b],
                      cost = (x * x + y * y) + costs[i % 2][b];
          if (b == 0 || cost < least) least = cost, from = b;
        }
        word |= from << 4 * i;
        costs[1 - i % 2][code] = least;
        __syncwarp();
      }
      came[o][code] = word;
    }
    __syncwarp();
    return trace(came, cheapest(costs[0]));
  }
};

// The number of a row's words that a byte of them, and the code before, stand for: dimensions 4 at and on.
DI float4 values_of(const u32* pairs, const u32* words, int at) {
  const u8* bytes = (const u8*)words;
  const u32 byte = bytes[at], before = at % CODEC::CHAIN ? bytes[at - 1] >> 4 : 0;
  const u32 x = pairs[before | (byte & 15) << 4], y = pairs[byte];
  return make_float4(low(x), high(x), low(y), high(y));
}
