// What the lanes of a warp hold of a tile, and the instructions that take it.
#include "tiles.cuh"

constexpr int NT = COLUMN_TILES, COLUMNS = 8 * NT;
enum { NO_MAP, HADAMARD, MATRIX };  // what KEY_MAP and VALUE_MAP may be
constexpr int PIECE = D + 4;  // floats of a partial result of one column: D outputs, their base-2 log-sum-exp at D

// Shared memory of a warp: its ring of tiles, the scores of 16 offsets, parked queries, and, over all that, what a run ends with;
// then mapped queries: those that the block's warps share, and the warp's own.
constexpr bool PARKED = NT > 1 && NT * D > 128;  // the query's operands wait in shared memory: outputs fill the registers
constexpr int QUERY_BYTES = 2 * D * COLUMNS;
constexpr int RING_BYTES = STAGES * TILE_BYTES, OFFSET_BYTES = KEY_OFFSET ? 16 * COLUMNS * 4 : 0, PIECE_BYTES = COLUMNS * PIECE * 4;
constexpr int PARKED_AT = RING_BYTES + OFFSET_BYTES, LOOP_BYTES = PARKED_AT + (PARKED ? QUERY_BYTES : 0);
constexpr int MAPPED_AT = LOOP_BYTES > PIECE_BYTES ? LOOP_BYTES : PIECE_BYTES;
static_assert(WARP_BYTES == MAPPED_AT + (KEY_MAP == MATRIX ? 2 * QUERY_BYTES : 0), "as in decode.py");

constexpr int K_SHARE = K_ROW / 4, V_SHARE = V_ROW / 8;  // bytes of a row that one lane unpacks
constexpr int K_WORDS = K_SHARE / 4, V_WORDS = (V_SHARE + 3) / 4, V_PAIRS = V_SHARE / 2;
constexpr int RUN = VALUE::BITS == 3 ? D / 8 : 16 / VALUE::BITS;  // successive dimensions of the output that a lane has
constexpr u32 ONES = 0x3c003c00u;  // in fp16

DI void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
DI void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DI u32 transpose(u32 x) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x)); return r; }
DI float pow2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float lg2(float x) { float r; asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float inverse(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float inverse_root(float x) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float as_float(u32 x) { return __uint_as_float(x); }
DI float minus_infinity() { return as_float(0xff800000u); }
DI float max_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, k)); return x; }
DI float sum_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x += __shfl_xor_sync(~0u, x, k); return x; }

template <int BYTES> DI void load_shared(u32 a, u32* w) {
  if constexpr (BYTES == 2) { u16 h; asm volatile("ld.shared.b16 %0, [%1];" : "=h"(h) : "r"(a)); w[0] = h; }
  else if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w[0]) : "r"(a));
  else if constexpr (BYTES == 8) asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(a));
  else asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a));
}

// A lane's share of a row: where it lies in a tile, and its words.
template <int ROW, int SHARE> struct Share {
  static constexpr int PIECE = SHARE % 16 == 0 ? 16 : SHARE % 8 == 0 && SHARE < 16 ? 8 : SHARE == 2 ? 2 : 4;
  static constexpr int PIECES = SHARE < 4 ? 1 : (SHARE + PIECE - 1) / PIECE;
  static constexpr bool ODD = SHARE % 4 == 2 && SHARE > 4;  // 6 bytes: every other share begins in the middle of a word
  static constexpr int ADDRESSES = PIECE == 16 ? PIECES : 1;
  u32 at[ADDRESSES];
  int shift;
  DI Share(int row, int index) {
    int byte = index * SHARE;
    shift = ODD ? byte % 4 * 8 : 0;
    byte -= ODD ? byte % 4 : 0;
#pragma unroll
    for (int i = 0; i < ADDRESSES; i++) {
      at[i] = chunk_address<ROW>(row, byte / 16 + i) + byte % 16;
      keep(at[i]);
    }
  }
  DI void load(u32 tile, u32* w) const {
#pragma unroll
    for (int i = 0; i < PIECES; i++) load_shared<PIECE>(tile + (ADDRESSES > 1 ? at[i] : at[0] + i * PIECE), w + i * PIECE / 4);
    if constexpr (ODD) w[0] = __funnelshift_r(w[0], w[1], shift), w[1] >>= shift;
  }
};

// The codes of a tile's values: 16 bits of tokens 2 c and 2 c + 1 in each of a[V_PAIRS], of the tokens 8 further in b. ldmatrix
// transposes while it loads, so that a lane's dimensions are runs of RUN in every 16 bytes of a row.
template <bool ALIGNED> struct Values {
  static constexpr int LOADS = (V_PAIRS + 1) / 2;
  u32 at[LOADS];
  DI Values(int, int) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      at[i] = chunk_address<V_ROW>(lane % 16, V_PAIRS > 1 ? 2 * i + lane / 16 : 0);
      keep(at[i]);
    }
  }
  DI void load(u32 tile, u32* a, u32* b) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if constexpr (V_PAIRS == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a[0]), "=r"(b[0]) : "r"(tile + at[i]));
      } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[2 * i]), "=r"(b[2 * i]), "=r"(a[2 * i + 1]), "=r"(b[2 * i + 1]) : "r"(tile + at[i]));
      }
    }
  }
};
template <> struct Values<false> {  // 3-bit codes lie across 16-bit boundaries: a lane takes one run
  Share<V_ROW, V_SHARE> even, odd;
  DI Values(int g, int c) : even(2 * c, g), odd(2 * c + 1, g) {}
  DI void load(u32 tile, u32* x) const {
    u32 a[V_WORDS], b[V_WORDS];
    even.load(tile, a), odd.load(tile, b);
#pragma unroll
    for (int k = 0; k < V_PAIRS; k++) x[k] = prmt(a[k / 2], b[k / 2], k & 1 ? 0x7632 : 0x5410);
  }
  DI void load(u32 tile, u32* a, u32* b) const { load(tile, a), load(tile + 8 * V_ROW, b); }
};

// Where a lane finds its shares of a tile. Rows g and g + 8 of the score tile are its tokens.
struct Lane {
  int token;
  u32 table, pair;  // to its copies in the table; tokens 2 c and 2 c + 1 of the values' meta
  Share<K_ROW, K_SHARE> key;
  Values<VALUE::BITS != 3> values;
  DI Lane(int g, int c) : token(g), table(KEY::lane()), pair(2 * c * V_META), key(g, c), values(g, c) {
    keep(token);
    if (KEY::ENTRIES > 0) keep(table);
  }
};
