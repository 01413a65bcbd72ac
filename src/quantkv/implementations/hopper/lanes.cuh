// What the lanes of a warp hold of a tile.
#pragma once
#include "tiles.cuh"

constexpr int NT = COLUMN_TILES, COLUMNS = 8 * NT, EVEN_NT = (NT + 1) / 2 * 2;
enum { NO_MAP, HADAMARD, MATRIX };  // what KEY_MAP and VALUE_MAP may be

// Shared memory of a warp: its ring of tiles, the scores of 16 offsets, what the loader does not use, parked
// queries, and, over all that, what a run ends with;
// then mapped queries: those that the block's warps share, and the warp's own.
constexpr bool PARKED = NT > 1 && NT * D > 128;  // the query's operands wait in shared memory: outputs fill the registers
constexpr int QUERY_BYTES = 2 * D * COLUMNS, PARKED_BYTES = PARKED ? 2 * D * 8 * EVEN_NT : 0;  // they are parked in pairs
constexpr int RING_BYTES = STAGES * TILE_BYTES, OFFSET_BYTES = KEY_OFFSET ? 16 * COLUMNS * 4 : 0;
constexpr int UNUSED_AT = RING_BYTES + OFFSET_BYTES, PARKED_AT = UNUSED_AT + UNUSED_BYTES, LOOP_BYTES = PARKED_AT + PARKED_BYTES;
constexpr int MAPPED_AT = LOOP_BYTES > COLUMNS * PIECE_BYTES ? LOOP_BYTES : COLUMNS * PIECE_BYTES;
static_assert(WARP_BYTES == MAPPED_AT + (KEY_MAP == MATRIX ? 2 * QUERY_BYTES : 0), "shared memory is laid out in another way in Python");

static_assert(KEY::HALF == KEY_HALF && KEY::ODD_UNIT == KEY_ODD_UNIT, "the order of the keys' dimensions is another in Python");
static_assert(KEY::TABLE_BYTES == KEY_TABLE_BYTES, "the keys' table is of another size in Python");
// The dimension in the low half of register j of lane 0, and what the register is worth.
constexpr __device__ int key_dim(int j) { return j / KEY::HALF * 2 * KEY::HALF + j % KEY::HALF; }
constexpr __device__ float key_unit(int j) { return j & 1 ? KEY::ODD_UNIT : 1.f; }

constexpr int K_SHARE = K_ROW / 4, V_SHARE = V_ROW / 8;  // bytes of a row that one lane unpacks
constexpr int K_WORDS = K_SHARE / 4, V_WORDS = (V_SHARE + 3) / 4, V_PAIRS = V_SHARE / 2;
constexpr bool IN_HALVES = 16 % VALUE::BITS == 0;  // no code of V lies across a 16-bit boundary
constexpr int RUN = IN_HALVES ? 16 / VALUE::BITS : D / 8;  // successive dimensions of the output that a lane has
constexpr u32 ONES = 0x3c003c00u;  // in fp16
static_assert(QUERY_BF16 || !KEY::BFLOAT && !VALUE::BFLOAT, "queries of another type");

DI float max_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, k)); return x; }
DI float sum_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x += __shfl_xor_sync(~0u, x, k); return x; }

// A lane's share of a row: where it lies in a tile, and its words.
template <int ROW, int SHARE> struct Share {
  static constexpr int LOAD = SHARE % 16 == 0 ? 16 : SHARE % 8 == 0 && SHARE < 16 ? 8 : SHARE == 2 ? 2 : 4;
  static constexpr int LOADS = SHARE < 4 ? 1 : (SHARE + LOAD - 1) / LOAD;
  static constexpr bool ODD = SHARE % 4 == 2 && SHARE > 4;  // 6 or 10 bytes: every other share begins in the middle of a word
  static constexpr int ADDRESSES = LOAD == 16 ? LOADS : 1;
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
    for (int i = 0; i < LOADS; i++) load_shared<LOAD>(tile + (ADDRESSES > 1 ? at[i] : at[0] + i * LOAD), w + i * LOAD / 4);
    if constexpr (ODD) {
#pragma unroll
      for (int i = 0; i + 1 < LOADS; i++) w[i] = __funnelshift_r(w[i], w[i + 1], shift);
      w[LOADS - 1] >>= shift;
    }
  }
};

// The codes of a tile's values: 16 bits of tokens 2 c and 2 c + 1 in each of a[V_PAIRS], of the tokens 8 further in b. ldmatrix
// transposes while it loads, so that a lane's dimensions are runs of RUN in every 16 bytes of a row.
template <bool IN_HALVES> struct Values {
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
      if constexpr (V_PAIRS == 1) load_transposed(tile + at[i], a[0], b[0]);
      else load_transposed(tile + at[i], a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]);
    }
  }
};
template <> struct Values<false> {  // codes lie across 16-bit boundaries: a lane takes one run
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
  Values<IN_HALVES> values;
  DI Lane(int g, int c) : token(g), table(KEY::lane()), pair(2 * c * V_META), key(g, c), values(g, c) {
    keep(token);
    if (KEY::ENTRIES > 0) keep(table);
  }
};

// Registers j of two tokens' keys.
template <class Key> DI uint2 key_pairs(const u32* a, const u32* b, int j, u32 lane) {
  if constexpr (Key::TOKENS == 2) return Key::key_pair(a, b, j, lane);
  else if constexpr (Key::TOKENS == 1) return make_uint2(Key::key_pair(a, j, lane), Key::key_pair(b, j, lane));
  else return make_uint2(Key::key_pair(a, j), Key::key_pair(b, j));
}
template <class Key> DI void fill_table(u32 warp) {
  if constexpr (Key::ENTRIES > 0) {
    if (shared_address(shared) != TABLE_ADDRESS) __trap();
    for (u32 e = warp; e < Key::ENTRIES; e += WARPS) Key::fill(e);
    __syncthreads();
  }
}
