// Linear maps: any matrix by the tensor core, Hadamard's in registers.
#pragma once
#include "lanes.cuh"

// 16 rows of an fp16 matrix with D columns, which lies in the order of these loads (operands.py): 512 bytes in a row each.
struct MatrixRows {
  uint4 x[D / 32], y[D / 32];
  DI MatrixRows() {}
  DI MatrixRows(const u16* matrix, int tile) {
#pragma unroll
    for (int m = 0; m < D / 32; m++) {
      const uint4* at = (const uint4*)(matrix + 16 * D * tile + 512 * m) + threadIdx.x % 32;
      x[m] = at[0], y[m] = at[32];
    }
  }
  // Adds their products with eight columns, of which register b[4 m + i] holds, in lane c, dimensions 8 (4 m + c) + 2 i and the next.
  DI void multiply(float (&acc)[4], const u32* b) const {
#pragma unroll
    for (int m = 0; m < D / 32; m++) {
      mma(acc, x[m].x, y[m].x, x[m].y, y[m].y, b[4 * m], b[4 * m + 1]);
      mma(acc, x[m].z, y[m].z, x[m].w, y[m].w, b[4 * m + 2], b[4 * m + 3]);
    }
  }
};

template <int N, int M> DI void butterfly(float (&x)[N][M]) {  // x becomes H_N x, along the first axis
#pragma unroll
  for (int k = 1; k < N; k <<= 1)
#pragma unroll
    for (int n = 0; n < N; n++)
      if (!(n & k))
#pragma unroll
        for (int i = 0; i < M; i++) {
          const float a = x[n][i], b = x[n | k][i];
          x[n][i] = a + b, x[n | k][i] = a - b;
        }
}

constexpr bool permutes_bits() {  // of j: then a Hadamard matrix over dimensions is one over (lane, j, half of the register)
  for (int j = 0; j < D / 8; j++) {
    int together = 0;
    for (int k = 1; k < D / 8; k <<= 1) {
      const int bit = key_dim(k);
      if (bit & bit - 1 || bit == KEY::HALF) return false;
      together |= j & k ? bit : 0;
    }
    if (key_dim(j) != together) return false;
  }
  return true;
}
constexpr u32 half_pair(float x) { u32 e = 15; while (x > 1.f) x /= 2.f, e++; return twice(e << 10); }  // of a power of two
constexpr u32 key_ones(int j) { return KEY::BFLOAT ? twice(0x3f80) : half_pair(key_unit(j)); }            // what register j is worth
