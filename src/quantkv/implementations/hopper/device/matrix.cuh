// Products with a matrix by the tensor core.
#pragma once
#include "unpack.cuh"

// 16 rows of an fp16 matrix with N columns, which lies in the order of these loads (operands.py): 512 bytes in a row
// each, the last half empty where N is no multiple of 32. Of a wide one only the address is kept: registers could not
// hold it.
template <int N> struct MatrixRows {
  static constexpr int PARTS = (N + 31) / 32;
  static constexpr bool HELD = N <= 256;
  uint4 x[HELD ? PARTS : 1], y[HELD ? PARTS : 1];
  const uint4* rows;
  DI MatrixRows() {}
  DI MatrixRows(const u16* matrix, int tile) {
    if constexpr (!HELD) rows = (const uint4*)(matrix + 512 * PARTS * tile) + threadIdx.x % 32;
    if constexpr (HELD)
#pragma unroll
      for (int m = 0; m < PARTS; m++) {
        const uint4* at = (const uint4*)(matrix + 512 * PARTS * tile + 512 * m) + threadIdx.x % 32;
        x[m] = at[0], y[m] = at[32];
      }
  }
  // Adds their products with eight columns, of which register b[4 m + i] holds, in lane c, dimensions 8 (4 m + c) + 2 i
  // and the next.
  template <int REGISTERS> DI void multiply(float (&acc)[4], const u32 (&b)[REGISTERS]) const {
#pragma unroll
    for (int m = 0; m < PARTS; m++) {
      const uint4 low = HELD ? x[m] : rows[64 * m], high = HELD ? y[m] : rows[64 * m + 32];
      mma(acc, low.x, high.x, low.y, high.y, b[4 * m], b[4 * m + 1]);
      if (4 * m + 2 < REGISTERS) mma(acc, low.z, high.z, low.w, high.w, b[4 * m + 2], b[4 * m + 3]);
    }
  }
};
