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
// Keys and values of one codec share a table.
template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;
constexpr bool OWN_TABLE = VALUE::VALUES_BY_TABLE && !SAME<KEY, VALUE>;
constexpr int VALUE_TABLE_AT = OWN_TABLE ? (KEY::TABLE_BYTES + 0xffff) & ~0xffff : 0;
static_assert(TABLES_BYTES == (OWN_TABLE ? VALUE_TABLE_AT + VALUE::TABLE_BYTES : KEY::TABLE_BYTES), "tables are of another size in Python");
// The dimension in the low half of register j of lane 0, and what the register is worth.
constexpr __device__ int key_dim(int j) { return j / KEY::HALF * 2 * KEY::HALF + j % KEY::HALF; }
constexpr __device__ float key_unit(int j) { return j & 1 ? KEY::ODD_UNIT : 1.f; }

constexpr int K_SHARE = K_ROW / 4, V_SHARE = V_ROW / 8;  // bytes of a row that one lane unpacks
constexpr int K_WORDS = K_SHARE / 4, V_WORDS = (V_SHARE + 3) / 4, V_PAIRS = V_SHARE / 2;
constexpr int ALL_K_WORDS = K_WORDS * (KEY::OVERLAP ? 2 : 1), ALL_V_PAIRS = V_PAIRS * (VALUE::OVERLAP ? 2 : 1);
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
  u32 table, value_table, pair;       // to its copies in the tables; tokens 2 c and 2 c + 1 of the values' meta
  u32 before_keys, before_values;  // bits of a neighbour's last code that count: none where a chain begins
  Share<K_ROW, K_SHARE> key;
  Values<IN_HALVES> values;
  DI Lane(int g, int c) : token(g), table(KEY::lane()), value_table(VALUE::lane() + VALUE_TABLE_AT), pair(2 * c * V_META), key(g, c), values(g, c) {
    before_keys = c * K_SHARE % KEY::CHAIN ? ~0u : 0, before_values = g ? twice((1u << VALUE::OVERLAP) - 1) : 0;
    keep(token);
    if (KEY::ENTRIES > 0) keep(table);
    if (OWN_TABLE) keep(value_table); else value_table = table;
    if (KEY::OVERLAP) keep(before_keys);
    if (VALUE::OVERLAP) keep(before_values);
  }
  // Adds what is shifted by a code to a row's words; the last code of another lane's by a shuffle.
  template <class Key> DI void overlap_key(u32 (&w)[ALL_K_WORDS]) const {
    if constexpr (Key::OVERLAP > 0) {
      static_assert(Key::CHAIN % K_SHARE == 0 && ALL_K_WORDS == 2 * K_WORDS, "a chain begins with a lane");
      u32 last = K_SHARE == Key::CHAIN ? 0 : __shfl_up_sync(~0u, w[K_WORDS - 1], 1) & before_keys;
#pragma unroll
      for (int i = 0; i < K_WORDS; i++) w[K_WORDS + i] = __funnelshift_r(last, w[i], 32 - Key::OVERLAP), last = w[i];
    }
  }
  template <class Value> DI void overlap_values(u32 (&x)[ALL_V_PAIRS]) const {
    if constexpr (Value::OVERLAP > 0) {
      static_assert(IN_HALVES && Value::CHAIN == 16, "a chain is the 16 bytes of which every lane has two");
      constexpr u32 MOVED = twice(0xffffu << Value::OVERLAP & 0xffff);
#pragma unroll
      for (int k = 0; k < V_PAIRS; k++)
        x[V_PAIRS + k] = x[k] << Value::OVERLAP & MOVED | __shfl_up_sync(~0u, x[k], 4) >> 16 - Value::OVERLAP & before_values;
    }
  }
};

// Registers j of two tokens' keys.
template <class Key> DI uint2 key_pairs(const u32* a, const u32* b, int j, u32 lane) {
  if constexpr (Key::OVERLAP > 0) return make_uint2(Key::key_pair(a, a + K_WORDS, j, lane), Key::key_pair(b, b + K_WORDS, j, lane));
  else if constexpr (Key::TOKENS == 2) return Key::key_pair(a, b, j, lane);
  else if constexpr (Key::TOKENS == 1) return make_uint2(Key::key_pair(a, j, lane), Key::key_pair(b, j, lane));
  else return make_uint2(Key::key_pair(a, j), Key::key_pair(b, j));
}
// Register j of two tokens' values.
template <class Value> DI u32 value_pair(const u32* x, int j, u32 lane) {
  if constexpr (Value::OVERLAP > 0) return Value::pair(x, x + V_PAIRS, j, lane);
  else if constexpr (Value::VALUES_BY_TABLE) return Value::pair(x, j, lane);
  else return Value::pair(x, j);
}
template <class Codec> DI void fill_table(u32 warp, u32 at) {
  if constexpr (Codec::ENTRIES > 0)
    for (u32 e = warp; e < Codec::ENTRIES; e += WARPS) Codec::fill(at / Codec::SPACING + e);
}
DI void fill_tables(u32 warp) {
  if (TABLES_BYTES == 0) return;
  if (shared_address(shared) != TABLE_ADDRESS) __trap();
  fill_table<KEY>(warp, 0);
  if (OWN_TABLE) fill_table<VALUE>(warp, VALUE_TABLE_AT);
  __syncthreads();
}
