// Instructions of a warpgroup: four warps, the first of which is a multiple of four.
#pragma once
#include "instructions.cuh"

// ---- matrices in shared memory that wgmma reads
// Rows of 64 numbers of 16 bits, 128 bytes, one after the other; the 16-byte chunks of a row are permuted by an xor
// with the row's number modulo 8. Each begins at a multiple of 1,024 bytes.
constexpr int MATRIX_ROW = 128;
DI u32 matrix_chunk(int row, int chunk) { return row * MATRIX_ROW + ((chunk ^ row % 8) << 4); }
// What wgmma is told of 16 columns of such a matrix, whose first row has them at this address less its permutation: the
// address, the distance of 8 rows, the permutation. In units of 16 bytes.
DI u64 matrix_descriptor(u32 address) {
  return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | 1 << 16 | address >> 4;
}
// The same of a matrix whose rows are the 16 that are summed over, and whose columns go on, 64 each, `slab` bytes
// further.
DI u64 rows_descriptor(u32 address, int slab) {
  return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | (u64)(slab / 16) << 16 | address >> 4;
}

// Transposed while they are stored: of each 8 x 8 matrix, lanes have the address of a row in this order, which becomes
// a column.
DI void store_transposed(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
DI void store_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}
// What this thread stored in shared memory is there for wgmma, once the threads have met at a barrier.
DI void stores_before_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- barriers of the 128 threads of a warpgroup: `id` from 1 on, 0 is the block's
DI void meet(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
DI bool meet_any(int id, bool p) {  // whether any of them says so
  int any;
  asm volatile("{.reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.b32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"((int)p), "r"(id)
      : "memory");
  return any;
}

// ---- products of a warpgroup
// d [64, 8 N] = a [64, 16] b [16, 8 N], or += where ADD, in float32. Warp w has rows 16 w and on of a and d, as in mma;
// or a is 16 columns of a matrix in shared memory. b^T are 16 columns and 8 N rows of a matrix there; where ROWS, b is
// 16 rows of one. They run on behind the program: none of what they read or add to may be touched from begin_products()
// to wait_for_all_products_but().
DI void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DI void wait_for_all_products_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N> DI void keep_tiles(float (&d)[N][4]) {  // the compiler moves nothing of them across this
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

template <int N> DI void keep_tiles(int (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])::"memory");
}

template <int N, bool BFLOAT> struct Wgmma;
template <int N> struct IntegerWgmma;  // the same of 8-bit integers with signs, a [64, 32]
#define TILE4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define NUMBERS_1 "%0,%1,%2,%3"
#define TILES_1 TILE4(0)
#define NUMBERS_2 NUMBERS_1 ",%4,%5,%6,%7"
#define TILES_2 TILES_1, TILE4(1)
#define NUMBERS_3 NUMBERS_2 ",%8,%9,%10,%11"
#define TILES_3 TILES_2, TILE4(2)
#define NUMBERS_4 NUMBERS_3 ",%12,%13,%14,%15"
#define TILES_4 TILES_3, TILE4(3)
#define NUMBERS_6 NUMBERS_4 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TILES_6 TILES_4, TILE4(4), TILE4(5)
#define NUMBERS_8 NUMBERS_6 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TILES_8 TILES_6, TILE4(6), TILE4(7)
#define NUMBERS_10 NUMBERS_8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TILES_10 TILES_8, TILE4(8), TILE4(9)
#define NUMBERS_12 NUMBERS_10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define TILES_12 TILES_10, TILE4(10), TILE4(11)
#define NUMBERS_14 NUMBERS_12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define TILES_14 TILES_12, TILE4(12), TILE4(13)
#define NUMBERS_16 NUMBERS_14 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define TILES_16 TILES_14, TILE4(14), TILE4(15)
#define NUMBERS_20 NUMBERS_16 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define TILES_20 TILES_16, TILE4(16), TILE4(17), TILE4(18), TILE4(19)
#define NUMBERS_24 NUMBERS_20 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TILES_24 TILES_20, TILE4(20), TILE4(21), TILE4(22), TILE4(23)
#define NUMBERS_28 NUMBERS_24 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NUMBERS_32 NUMBERS_28 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define TILES_32 TILES_24, TILE4(24), TILE4(25), TILE4(26), TILE4(27), TILE4(28), TILE4(29), TILE4(30), TILE4(31)
// A to G: numbers of the operands behind the 4 N of d.
#define WGMMA_OF(N, COLUMNS, ELEMENT, BFLOAT, A, B, C, D, E, F, G) \
  template <> struct Wgmma<N, BFLOAT> { \
    template <bool ADD, bool ROWS = false> \
    static DI void multiply(float (&d)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #F ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k16.f32." ELEMENT "." ELEMENT " {" NUMBERS_##N "},{%" #A ",%" #B ",%" #C ",%" #D "},%" #E \
                                                                   ",p,1,1,%" #G ";}" \
          : TILES_##N \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"((int)ADD), "n"((int)ROWS) \
          : "memory"); \
    } \
    template <bool ADD> static DI void multiply(float (&d)[N][4], u64 a, u64 b) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k16.f32." ELEMENT "." ELEMENT " {" NUMBERS_##N "},%" #A ",%" #B ",p,1,1,0,0;}" \
          : TILES_##N \
          : "l"(a), "l"(b), "n"((int)ADD) \
          : "memory"); \
    } \
  };
#define WGMMA(N, COLUMNS, A, B, C, D, E, F, G) \
  WGMMA_OF(N, COLUMNS, "f16", false, A, B, C, D, E, F, G) \
  WGMMA_OF(N, COLUMNS, "bf16", true, A, B, C, D, E, F, G)
WGMMA(1, 8, 4, 5, 6, 7, 8, 9, 10)
WGMMA(2, 16, 8, 9, 10, 11, 12, 13, 14)
WGMMA(3, 24, 12, 13, 14, 15, 16, 17, 18)
WGMMA(4, 32, 16, 17, 18, 19, 20, 21, 22)
WGMMA(6, 48, 24, 25, 26, 27, 28, 29, 30)
WGMMA(8, 64, 32, 33, 34, 35, 36, 37, 38)
WGMMA(10, 80, 40, 41, 42, 43, 44, 45, 46)
WGMMA(12, 96, 48, 49, 50, 51, 52, 53, 54)
WGMMA(14, 112, 56, 57, 58, 59, 60, 61, 62)
WGMMA(16, 128, 64, 65, 66, 67, 68, 69, 70)
WGMMA(20, 160, 80, 81, 82, 83, 84, 85, 86)
WGMMA(24, 192, 96, 97, 98, 99, 100, 101, 102)
WGMMA(32, 256, 128, 129, 130, 131, 132, 133, 134)
#undef WGMMA
#undef WGMMA_OF
#undef TILE4
#define TILE4(n) "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])
// A to F: as above.
#define WGMMA(N, COLUMNS, A, B, C, D, E, F) \
  template <> struct IntegerWgmma<N> { \
    template <bool ADD> static DI void multiply(int (&d)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #F ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k32.s32.s8.s8 {" NUMBERS_##N "},{%" #A ",%" #B ",%" #C ",%" #D "},%" #E ",p;}" \
          : TILES_##N \
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"((int)ADD) \
          : "memory"); \
    } \
    static DI void multiply(int (&d)[N][4], u64 a, u64 b) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS \
                   "k32.s32.s8.s8 {" NUMBERS_##N "},%" #A ",%" #B ",p;}" \
          : TILES_##N \
          : "l"(a), "l"(b) \
          : "memory"); \
    } \
  };
WGMMA(2, 16, 8, 9, 10, 11, 12, 13)
WGMMA(4, 32, 16, 17, 18, 19, 20, 21)
WGMMA(6, 48, 24, 25, 26, 27, 28, 29)
WGMMA(8, 64, 32, 33, 34, 35, 36, 37)
WGMMA(10, 80, 40, 41, 42, 43, 44, 45)
WGMMA(12, 96, 48, 49, 50, 51, 52, 53)
WGMMA(16, 128, 64, 65, 66, 67, 68, 69)
WGMMA(20, 160, 80, 81, 82, 83, 84, 85)
#undef WGMMA
#undef TILE4
