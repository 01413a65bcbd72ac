// A Hadamard matrix times a row, by the tensor core and in registers.
#pragma once
#include "rows.cuh"

DI void row_mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (ROWS_BF16) mma_bfloat(c, a0, a1, a2, a3, b0, b1); else mma(c, a0, a1, a2, a3, b0, b1);
}

// Of each 2^n dimensions that D is a multiple of, in a row of its own. 16 have those of two lanes; a lane's numbers of
// 32 and more are neighbours, OF_MATRIX of them.
constexpr int MATRIX_SIZE = D & -D, OF_MATRIX = MATRIX_SIZE < 32 ? 8 : MATRIX_SIZE / 4;

// row = factor * H (signs * row). signs: of pair i at bit 15 - i % 16 (the even dimension) and 31 - i % 16 of word i /
// 16.
//
// A product takes 16 dimensions, the lowest two bits of e and those of c, of two blocks of a row: rows g and g + 8 of A
// are blocks i and i + BLOCKS / 2 of a matrix. The 16 x 16 matrix needs two registers in all, b and -b. Sums over
// IN_MMA blocks are products too, added where the tensor core adds, and butterflies in registers do the rest.
template <class R> DI void hadamard(R& row, const u32 (&signs)[(E + 31) / 32], float factor) {
  constexpr int BLOCKS = OF_MATRIX / 4, IN_MMA = BLOCKS < 8 ? BLOCKS / 2 : 4;
  constexpr u32 MINUS = 0x80008000u;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  // column n of a tile is output dimension n % 2 of lane n / 2
  const u32 odd = g & 1, minus = __popc(g / 2 & c & (MATRIX_SIZE < 32 ? 1 : 3)) & 1;
  u32 b = (ROWS_BF16 ? 0x3f803f80u : 0x3c003c00u) ^ odd << 31 ^ (minus ? MINUS : 0);
  if (MATRIX_SIZE < 32 && (g / 2 ^ c) & 2) b = 0;  // of another matrix
#pragma unroll
  for (int i = 0; i < E / 2; i++) row.pairs[i] ^= signs[i / 16] << i % 16 & MINUS;
#pragma unroll
  for (int first = 0; first < E / 4; first += BLOCKS)
#pragma unroll
    for (int block = first; block < first + BLOCKS / 2; block += IN_MMA)
#pragma unroll
      for (int out = 0; out < IN_MMA; out++)
#pragma unroll
        for (int t = 0; t < 2; t++) {  // dimensions 2 t and 2 t + 1 of the block
          float sum[4] = {};
#pragma unroll
          for (int in = 0; in < IN_MMA; in++) {
            const u32* low = row.pairs + 2 * (block + in);
            const u32* high = low + BLOCKS;
            const bool flip = (in & out) == 1 || (in & out) == 2;  // of two bits, one: an odd number
            row_mma(sum, low[0], high[0], low[1], high[1], flip ? b ^ MINUS : b, flip != (t == 1) ? b ^ MINUS : b);
          }
          const int e = 4 * (block + out) + 2 * t;
          row.x[e] = sum[0], row.x[e + 1] = sum[1], row.x[OF_MATRIX / 2 + e] = sum[2],
          row.x[OF_MATRIX / 2 + e + 1] = sum[3];
        }
#pragma unroll
  for (int step = 4 * IN_MMA; step < OF_MATRIX; step *= 2)
#pragma unroll
    for (int e = 0; e < E; e++)
      if (!(e & step)) {
        const float up = row.x[e], down = row.x[e + step];
        row.x[e] = up + down, row.x[e + step] = up - down;
      }
#pragma unroll
  for (int e = 0; e < E; e++) row.x[e] *= factor;
}
