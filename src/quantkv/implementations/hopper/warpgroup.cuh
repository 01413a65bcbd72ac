// Instructions of a warpgroup: four warps, the first of which is a multiple of four.
#pragma once
#include "instructions.cuh"

// ---- matrices in shared memory that wgmma reads
// Rows of 64 numbers of 16 bits, 128 bytes, one after the other; the 16-byte chunks of a row are permuted by an xor with the row's number
// modulo 8. Each begins at a multiple of 1,024 bytes.
constexpr int MATRIX_ROW = 128;
DI u32 matrix_chunk(int row, int chunk) { return row * MATRIX_ROW + ((chunk ^ row % 8) << 4); }
// What wgmma is told of 16 columns of such a matrix, whose first row has them at this address less its permutation: the address, the distance
// of 8 rows, the permutation. In units of 16 bytes.
DI u64 matrix_descriptor(u32 address) { return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | 1 << 16 | address >> 4; }

// Transposed while they are stored: of each 8 x 8 matrix, lanes have the address of a row in this order, which becomes a column.
DI void store_transposed(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
DI void store_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// What this thread stored in shared memory is there for wgmma, once the threads have met at a barrier.
DI void stores_before_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- barriers of the 128 threads of a warpgroup: `id` from 1 on, 0 is the block's
DI void meet(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
DI bool meet_any(int id, bool p) {  // whether any of them says so
  int any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.b32 %0, 1, 0, q;}" : "=r"(any) : "r"((int)p), "r"(id) : "memory");
  return any;
}

// ---- products of a warpgroup
// d [64, 8 N] = a [64, 16] b [16, 8 N], or += where ADD, in float32. Warp w has rows 16 w and on of a and d, as in mma; b^T are 16 columns
// and 8 N rows of a matrix in shared memory. They run on behind the program: none of what they read or add to may be touched from
// begin_products() to wait_for_all_products_but().
DI void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DI void wait_for_all_products_but() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> DI void keep_tiles(float (&d)[N][4]) {  // the compiler moves nothing of them across this
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

template <int N, bool BFLOAT> struct Wgmma;
#define TILE4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_OF(N, COLUMNS, ELEMENT, BFLOAT, D, A0, A1, A2, A3, B, SUM, ...) \
  template <> struct Wgmma<N, BFLOAT> { \
    template <bool ADD> static DI void multiply(float (&d)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #SUM ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." ELEMENT "." ELEMENT \
                   " {" D "},{%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "},%" #B ",p,1,1,0;}" \
                   : __VA_ARGS__ : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"((int)ADD) : "memory"); \
    } \
  };
#define WGMMA(N, COLUMNS, D, A0, A1, A2, A3, B, SUM, ...) \
  WGMMA_OF(N, COLUMNS, "f16", false, D, A0, A1, A2, A3, B, SUM, __VA_ARGS__) \
  WGMMA_OF(N, COLUMNS, "bf16", true, D, A0, A1, A2, A3, B, SUM, __VA_ARGS__)
#define D1 "%0,%1,%2,%3"
#define D2 D1 ",%4,%5,%6,%7"
#define D3 D2 ",%8,%9,%10,%11"
#define D4 D3 ",%12,%13,%14,%15"
#define D6 D4 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define D8 D6 ",%24,%25,%26,%27,%28,%29,%30,%31"
WGMMA(1, 8, D1, 4, 5, 6, 7, 8, 9, TILE4(0))
WGMMA(2, 16, D2, 8, 9, 10, 11, 12, 13, TILE4(0), TILE4(1))
WGMMA(3, 24, D3, 12, 13, 14, 15, 16, 17, TILE4(0), TILE4(1), TILE4(2))
WGMMA(4, 32, D4, 16, 17, 18, 19, 20, 21, TILE4(0), TILE4(1), TILE4(2), TILE4(3))
WGMMA(6, 48, D6, 24, 25, 26, 27, 28, 29, TILE4(0), TILE4(1), TILE4(2), TILE4(3), TILE4(4), TILE4(5))
WGMMA(8, 64, D8, 32, 33, 34, 35, 36, 37, TILE4(0), TILE4(1), TILE4(2), TILE4(3), TILE4(4), TILE4(5), TILE4(6), TILE4(7))
#undef D1
#undef D2
#undef D3
#undef D4
#undef D6
#undef D8
#undef WGMMA
#undef WGMMA_OF
#undef TILE4
