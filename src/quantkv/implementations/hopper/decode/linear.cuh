// Linear maps: any matrix by the tensor core, Hadamard's in registers.
#pragma once
#include "lanes.cuh"
#include "matrix.cuh"

// each SIZE numbers along the first axis become H_SIZE times them
template <int SIZE, int N, int M> DI void butterfly(float (&x)[N][M]) {
  static_assert(N % SIZE == 0, "whole blocks");
#pragma unroll
  for (int k = 1; k < SIZE; k <<= 1)
#pragma unroll
    for (int n = 0; n < N; n++)
      if (!(n & k))
#pragma unroll
        for (int i = 0; i < M; i++) {
          const float a = x[n][i], b = x[n | k][i];
          x[n][i] = a + b, x[n | k][i] = a - b;
        }
}

// of j: then a Hadamard matrix over dimensions is one over (lane, j, half of the register)
constexpr bool permutes_bits() {
  for (int j = 0; j < DK / 8; j++) {
    int together = 0;
    for (int k = 1; k < DK / 8; k <<= 1) {
      const int bit = key_dim(k);
      if (bit & bit - 1 || bit == KEY::HALF) return false;
      together |= j & k ? bit : 0;
    }
    if (key_dim(j) != together) return false;
  }
  return DK == D;
}
// A Hadamard map has a matrix for each of these dimensions. Where they are fewer than the head size, or than a key as
// it is unpacked, they lie across the quarters of a key that lanes have: a query is mapped by chunks of 16 then, in the
// order in which it was given, and put together in shared memory.
constexpr int KEY_BLOCK = D & -D, VALUE_BLOCK = DV & -DV;
constexpr bool BY_CHUNKS = KEY_MAP == HADAMARD && (KEY_BLOCK < D || DK > D), ASSEMBLED = BY_CHUNKS || KEY_MAP == MATRIX;
// of a power of two
constexpr u32 half_pair(float x) { u32 e = 15; while (x > 1.f) x /= 2.f, e++; return twice(e << 10); }
// what register j is worth
constexpr u32 key_ones(int j) { return KEY::BFLOAT ? twice(0x3f80) : half_pair(key_unit(j)); }          
