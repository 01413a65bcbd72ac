// Products of a warpgroup with wide matrices: as in warpgroup.cuh, of both kinds that attention over dense rows has.
#pragma once
#include "warpgroup.cuh"

// As matrix_descriptor, of a matrix whose rows are the 16 that are summed over, and whose columns go on, 64 each, `slab` bytes further.
DI u64 rows_descriptor(u32 address, int slab) { return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | (u64)(slab / 16) << 16 | address >> 4; }

// d [64, 8 N] = a [64, 16] b [16, 8 N], or += where ADD.
template <int N, bool BFLOAT> struct WideProducts;
#define TILE4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define D8 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define O8 TILE4(0), TILE4(1), TILE4(2), TILE4(3), TILE4(4), TILE4(5), TILE4(6), TILE4(7)
#define D10 D8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define O10 O8, TILE4(8), TILE4(9)
#define D12 D10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define O12 O10, TILE4(10), TILE4(11)
#define D14 D12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define O14 O12, TILE4(12), TILE4(13)
#define D16 D14 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define O16 O14, TILE4(14), TILE4(15)
#define D20 D16 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define O20 O16, TILE4(16), TILE4(17), TILE4(18), TILE4(19)
#define D24 D20 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define O24 O20, TILE4(20), TILE4(21), TILE4(22), TILE4(23)
#define D32 D24 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define O32 O24, TILE4(24), TILE4(25), TILE4(26), TILE4(27), TILE4(28), TILE4(29), TILE4(30), TILE4(31)
#define WIDE_OF(N, COLUMNS, ELEMENT, BFLOAT, A, B, C, E, F) \
  template <> struct WideProducts<N, BFLOAT> { \
    /* a: rows of a matrix in shared memory, b^T: too */ \
    template <bool ADD> static DI void scores(float (&d)[N][4], u64 a, u64 b) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #C ", 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." ELEMENT "." ELEMENT " {" D##N "},%" #A ",%" #B ",p,1,1,0,0;}" \
                   : O##N : "l"(a), "l"(b), "n"((int)ADD) : "memory"); \
    } \
    /* a: in registers, b: rows of a matrix in shared memory */ \
    static DI void weigh(float (&d)[N][4], const u32 (&a)[4], u64 b) { \
      asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." ELEMENT "." ELEMENT " {" D##N "},{%" #A ",%" #B ",%" #C ",%" #E "},%" #F ",p,1,1,1;}" \
                   : O##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory"); \
    } \
  };
#define WIDE(N, COLUMNS, A, B, C, E, F) \
  WIDE_OF(N, COLUMNS, "f16", false, A, B, C, E, F) \
  WIDE_OF(N, COLUMNS, "bf16", true, A, B, C, E, F)
WIDE(8, 64, 32, 33, 34, 35, 36)
WIDE(10, 80, 40, 41, 42, 43, 44)
WIDE(12, 96, 48, 49, 50, 51, 52)
WIDE(14, 112, 56, 57, 58, 59, 60)
WIDE(16, 128, 64, 65, 66, 67, 68)
WIDE(20, 160, 80, 81, 82, 83, 84)
WIDE(24, 192, 96, 97, 98, 99, 100)
WIDE(32, 256, 128, 129, 130, 131, 132)
#undef WIDE
#undef WIDE_OF
#undef TILE4
#undef D8
#undef O8
#undef D10
#undef O10
#undef D12
#undef O12
#undef D14
#undef O14
#undef D16
#undef O16
#undef D20
#undef O20
#undef D24
#undef O24
#undef D32
#undef O32
