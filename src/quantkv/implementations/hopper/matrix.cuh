// Products with a matrix by the tensor core.
#pragma once
#include "unpack.cuh"

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
