// The search in a hessian: each of the 16 ways that are kept open feeds back its own errors
// (formats/trellis/search.py). A warp a row, two lanes a state, which share its branches.
//
// With M = (1 + F)^T diag(gain) (1 + F), F strictly lower triangular, what dimension j is aimed at is the row's number
// and the errors before it times F. Inside a BLOCK of 8 dimensions each way adds that up as it goes; what earlier
// blocks of the chain add is a product of the tensor core, of the errors of 16 ways in fp16; what earlier chains add,
// one of what was chosen for 8 rows.
#pragma once
#include "matrix.cuh"
#include "viterbi.cuh"

constexpr int BLOCK = 8, BLOCKS = CHAIN / BLOCK;
// A head's hessian: fp16 tiles of M and of F between chains (matrix.cuh), F inside chains in the order of `fed`, then
// for each block F by the dimension that errs, and gains.
constexpr int MATRIX_BYTES = 2 * D * D, FED_BYTES = BLOCKS * BLOCKS / 4 * 256, BLOCK_FLOATS = BLOCK * (BLOCK + 1);
constexpr int FED_AT = 2 * MATRIX_BYTES, BLOCKS_AT = FED_AT + CHAINS * FED_BYTES,
              HESSIAN_BYTES = BLOCKS_AT + D / BLOCK * BLOCK_FLOATS * 4;
static_assert(HESSIAN_BYTES == HOST_HESSIAN_BYTES, "a hessian is laid out in another way in Python");

struct HessianViterbi {
  // what the next two numbers are aimed at, after each last code, and what it cost
  float4 states[2][STATES];             
  float fed[STATES][BLOCK];               // to a block's numbers, by the chain's blocks before it
  u16 errors[STATES][CHAIN + BLOCK];      // padded: rows of 8 lie in 32 banks
  u32 came[CHAIN / 16][STATES];
  float costs[STATES];

  DI void clear() {  // products with zeros must not be of NaN
    for (int i = threadIdx.x % 32; i < (int)sizeof(errors) / 4; i += 32) ((u32*)errors)[i] = 0;
    __syncwarp();
  }

  // own: the row's 64 numbers; aimed: those and the errors of earlier chains.
  DI uint4 search(const float* own, const float* aimed, const u32* pairs, const uint2* feedback, const float* blocks) {
    const int lane = threadIdx.x % 32, code = lane % STATES, half = lane / STATES, g = lane / 4, c = lane % 4;
    float first[8], second[8], cost = code == 0 ? 0.f : -minus_infinity();
    u32 word = 0;
#pragma unroll
    for (int b = 0; b < 8; b++) {
      const u32 pair = pairs[code * STATES + 8 * half + b];
      first[b] = low(pair), second[b] = high(pair);
    }
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
      float sums[4] = {}, aim[BLOCK], x[BLOCK];
      for (int k = 0; k < (block + 1) / 2; k++) {
        const uint2 f = feedback[(block * block / 4 + k) * 32 + lane];
        const auto a = [&](int row, int at) { return *(const u32*)&errors[row][16 * k + 2 * c + at]; };
        mma(sums, a(g, 0), a(g + 8, 0), a(g, 8), a(g + 8, 8), f.x, f.y);
      }
      for (int i = 0; i < 4; i++) fed[g + i / 2 * 8][2 * c + i % 2] = sums[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < BLOCK; i++) x[i] = own[BLOCK * block + i], aim[i] = aimed[BLOCK * block + i] + fed[code][i];
      const float *f = blocks + block * BLOCK_FLOATS, *gain = f + BLOCK * BLOCK;  // f[8 i + j]: from i to j
      u32 erred[BLOCK / 2], origin = code;
#pragma unroll
      for (int i = 0; i < BLOCK; i += 2) {
        const float across = f[BLOCK * i + i + 1];
        float4* const now = states[i / 2 % 2];
        if (half == 0) now[code] = make_float4(aim[i], aim[i + 1] + across * x[i], cost, 0.f);
        __syncwarp();
        float least = 0.f;
        u32 from = 0;
#pragma unroll
        for (int b = 0; b < 8; b++) {
          const float4 s = now[8 * half + b];
          const float d = s.x - first[b], e = s.y - across * first[b] - second[b],
                      y = fmaf(gain[i + 1] * e, e, fmaf(gain[i] * d, d, s.z));
          if (b == 0 || y < least) least = y, from = 8 * half + b;
        }
        const float other = __shfl_xor_sync(~0u, least, 16);
        const u32 its = __shfl_xor_sync(~0u, from, 16);
        if (other < least || other == least && its < from) least = other, from = its;
        cost = least, word = word >> 4 | from << 28;
        const u32 pair = pairs[code * STATES + from];
        const float d = x[i] - low(pair), e = x[i + 1] - high(pair);
#pragma unroll
        for (int j = i + 2; j < BLOCK; j++)
          aim[j] = __shfl_sync(~0u, aim[j], from) + f[BLOCK * i + j] * d + f[BLOCK * (i + 1) + j] * e;
#pragma unroll
        for (int j = 0; j < i / 2; j++) erred[j] = __shfl_sync(~0u, erred[j], from);
        erred[i / 2] = half2(d, e), origin = __shfl_sync(~0u, origin, from);
      }
      uint4 kept[BLOCKS / 2];
#pragma unroll
      for (int k = 0; k < BLOCKS / 2; k++)
        if (2 * k + half < block) kept[k] = ((const uint4*)errors[origin])[2 * k + half];
      __syncwarp();
#pragma unroll
      for (int k = 0; k < BLOCKS / 2; k++)
        if (2 * k + half < block) ((uint4*)errors[code])[2 * k + half] = kept[k];
      if (half == 0) ((uint4*)errors[code])[block] = make_uint4(erred[0], erred[1], erred[2], erred[3]);
      if (block % 2 && half == 0) came[block / 2][code] = word;
      __syncwarp();
    }
    if (half == 0) costs[code] = cost;
    __syncwarp();
    return trace(came, cheapest(costs));
  }
};

// What a block shares: of 8 rows.
struct HessianRows {
  float aimed[ROWS][D];        // the rows, and the errors of the chains that are done fed forward
  float products[ROWS][D];     // rows M
  u16 numbers[2][ROWS][D];     // the rows in two fp16 parts, then errors, 0 where a chain is not done
};

// 16 rows of a matrix times the 8 rows of `numbers`; of this lane: rows g and g + 8 of the tile, for rows 2 c and 2 c +
// 1.
DI void multiply_rows(float (&sums)[4], const u8* matrix, int tile, const u16 (*numbers)[ROWS][D], int parts) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  const MatrixRows<D> of_tile((const u16*)matrix, tile);
#pragma unroll
  for (int part = 0; part < 2; part++) {
    if (part == parts) break;
    u32 b[D / 8];
#pragma unroll
    for (int m = 0; m < D / 32; m++) *(uint4*)(b + 4 * m) = *(const uint4*)&numbers[part][g][32 * m + 8 * c];
    of_tile.multiply(sums, b);
  }
}

// The codes of 8 rows, a warp a row, and their products.
DI void encode_rows(TrellisRows& s, HessianRows& w, HessianViterbi& own, const u8* hessian) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const float* row = s.rows[warp];
  for (int d = lane; d < D; d += 32) {
    const u16 high_part = half1(row[d]);
    w.aimed[warp][d] = row[d], w.numbers[0][warp][d] = high_part,
    w.numbers[1][warp][d] = half1(row[d] - low(high_part));
  }
  own.clear();
  __syncthreads();
  for (int tile = warp; tile < D / 16; tile += WARPS) {
    float sums[4] = {};
    multiply_rows(sums, hessian, tile, w.numbers, 2);
    for (int i = 0; i < 4; i++) w.products[2 * c + i % 2][16 * tile + g + i / 2 * 8] = sums[i];
  }
  __syncthreads();
  for (int d = lane; d < D; d += 32) w.numbers[0][warp][d] = 0;
#pragma unroll 1
  for (int chain = 0; chain < CHAINS; chain++) {
    if (chain > 0) {
      __syncthreads();  // the errors of all rows are there
      if (warp < CHAIN / 16) {
        float sums[4] = {};
        multiply_rows(sums, hessian + MATRIX_BYTES, chain * (CHAIN / 16) + warp, w.numbers, 1);
        for (int i = 0; i < 4; i++) w.aimed[2 * c + i % 2][chain * CHAIN + 16 * warp + g + i / 2 * 8] += sums[i];
      }
      __syncthreads();
    }
    const uint2* fed = (const uint2*)(hessian + FED_AT + chain * FED_BYTES);
    const float* blocks = (const float*)(hessian + BLOCKS_AT) + chain * BLOCKS * BLOCK_FLOATS;
    const uint4 found = own.search(row + chain * CHAIN, w.aimed[warp] + chain * CHAIN, s.pairs, fed, blocks);
    if (lane == 0) ((uint4*)s.words[warp])[chain] = found;
    __syncwarp();
    if (lane < CODEC::CHAIN) {
      const int at = chain * CODEC::CHAIN + lane;
      const float4 y = values_of(s.pairs, s.words[warp], at), x = ((const float4*)row)[at];
      *(uint2*)&w.numbers[0][warp][4 * at] = make_uint2(half2(x.x - y.x, x.y - y.y), half2(x.z - y.z, x.w - y.w));
    }
  }
}
