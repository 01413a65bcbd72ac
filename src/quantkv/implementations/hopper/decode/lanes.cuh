// What the lanes of a warp hold of a tile.
#pragma once
#include "tiles.cuh"

// of a value; of a key as it is unpacked
constexpr int DV = VALUE_SIZE, DK = (D + 8 * KEY::HALF - 1) / (8 * KEY::HALF) * (8 * KEY::HALF);
static_assert(D == KEY_SIZE && D % 16 == 0 && DV % 16 == 0 && DK == KEY_DIMENSIONS, "head sizes are others in Python");
template <class C, int SIZE> constexpr float GAIN_OF = C::GAIN * (C::PER_DIMENSION ? SIZE : 1);
constexpr float KEY_GAIN = GAIN_OF<KEY, D> / (BY_INTEGERS ? SUBNORMAL : 1.f), VALUE_GAIN = GAIN_OF<VALUE, DV>;
// tiles of packed query rows of which a warp holds the queries
constexpr int NT = WORKER_WARPS > 1 ? 1 : (PACKED_ROWS + 7) / 8, EVEN_NT = (NT + 1) / 2 * 2;
// A tile is the eight packed query rows of a product, of which a lane has scores of 2 c and 2 c + 1. A last tile of
// four has these in its even places, so that every lane has one of them, and no lane spends time on scores of an empty
// place.
constexpr int OWN = PACKED_ROWS / 4, PLACES = (PACKED_ROWS + 7) / 8 * 8;
static_assert(PACKED_ROWS % 4 == 0, "every lane has as many packed query rows");
DI bool is_halved(int nt) { return OWN % 2 && nt == NT - 1; }
DI int own_packed_row(int k) { return k / 2 * 8 + threadIdx.x % 4 * (is_halved(k / 2) ? 1 : 2) + k % 2; }
enum { NO_MAP, HADAMARD, MATRIX };  // what KEY_MAP and VALUE_MAP may be

template <int N> struct Constant { static constexpr int value = N; };
template <int N, int I = 0, class F> DI void each_part(F f) {  // f(Constant<0>()) to f(Constant<N - 1>())
  f(Constant<I>{});
  if constexpr (I + 1 < N) each_part<N, I + 1>(f);
}
constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

// the query's operands wait in shared memory: outputs fill the registers
constexpr bool SPILLED = D > 256 || NT > 1 && NT * D > 128;

static_assert(
    KEY::HALF == KEY_HALF && KEY::ODD_UNIT == KEY_ODD_UNIT, "the order of the keys' dimensions is another in Python");
static_assert(BY_INTEGERS <= KEY::INTEGERS &&
        (!BY_INTEGERS || DK % 32 == 0 && (LATENTS ? WORKER_WARPS > 1 : PACKED_ROWS == 4 && WORKER_WARPS == 1)),
    "what is multiplied as integers");
constexpr int KEY_TABLE = BY_INTEGERS ? 0 : KEY::TABLE_BYTES;
static_assert(KEY_TABLE == KEY_TABLE_BYTES, "the keys' table is of another size in Python");
// Keys and values of one codec share a table.
template <class A, class B> constexpr bool SAME = false;
template <class A> constexpr bool SAME<A, A> = true;
constexpr bool OWN_TABLE = VALUE::VALUES_BY_TABLE && !SAME<KEY, VALUE>;
constexpr int VALUE_TABLE_AT = OWN_TABLE ? (KEY_TABLE + 0xffff) & ~0xffff : 0;
static_assert(TABLES_BYTES == (OWN_TABLE ? VALUE_TABLE_AT + VALUE::TABLE_BYTES : KEY_TABLE),
    "tables are of another size in Python");
// The dimension in the low half of register j of lane 0, and what the register is worth.
constexpr __device__ int key_dim(int j) { return j / KEY::HALF * 2 * KEY::HALF + j % KEY::HALF; }
constexpr __device__ float key_unit(int j) { return j & 1 && !BY_INTEGERS ? KEY::ODD_UNIT : 1.f; }

// no code of V lies across 16 bits, and no row across 16 bytes
constexpr bool IN_HALVES = 16 % VALUE::BITS == 0 && V_ROW % 16 == 0;
constexpr int K_BITS = DK / 4 * KEY::BITS, V_BITS = DV / 8 * VALUE::BITS;  // of a row that one lane unpacks
constexpr int K_WORDS = (K_BITS + 31) / 32, V_WORDS = (V_BITS + 31) / 32, V_PAIRS = (V_BITS + 15) / 16;
// Wide rows are loaded and multiplied part after part: outputs leave few registers.
constexpr int K_PARTS = D > 256 && K_WORDS >= 32 ? K_WORDS / 16 : 1,
              V_PARTS = DV > 256 && V_PAIRS >= 32 ? V_PAIRS / 16 : 1;
constexpr int PART_K_WORDS = K_WORDS / K_PARTS, PART_V_PAIRS = V_PAIRS / V_PARTS;
static_assert(IN_HALVES || V_PARTS == 1, "only rows of whole chunks have parts");
constexpr bool V_ENDS = !IN_HALVES && V_BITS % 16 != 0;  // a lane's last 16 bits are not full: zero stands behind them
constexpr int ALL_K_WORDS = PART_K_WORDS * (KEY::OVERLAP ? 2 : 1),
              ALL_V_PAIRS = PART_V_PAIRS * (VALUE::OVERLAP ? 2 : 1) + V_ENDS;
constexpr int RUN = IN_HALVES ? 16 / VALUE::BITS : DV / 8;  // successive dimensions of the output that a lane has
constexpr u32 ONES = 0x3c003c00u;  // in fp16
static_assert(QUERY_BF16 || !KEY::BFLOAT && !VALUE::BFLOAT, "queries of another type");

DI float inverse_power(float x) { return as_float(0x7f000000u - as_bits(x)); }  // of a power of two
DI float max_over_tokens(float x) {
  for (int k = 4; k < 32; k <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, k));
  return x;
}
DI float sum_over_tokens(float x) { for (int k = 4; k < 32; k <<= 1) x += __shfl_xor_sync(~0u, x, k); return x; }

// A lane's share of a row, SHARE bits: where it lies in a tile, and its words. Rows of whole chunks are permuted,
// others lie as in a page.
template <int ROW, int SHARE, int BITS> struct Share {
  // shares begin at multiples of so many bits
  static constexpr int STEP = gcd(gcd(8 * ROW, SHARE), 32), BYTES = SHARE / 8;
  static constexpr bool ODD = STEP < 32;  // of a word
  static constexpr bool BY_8 = ROW % 8 == 0 && BYTES % 8 == 0 && (BYTES < 16 || 16 % BITS == 0);
  static constexpr int LOAD = ODD ? 4 : ROW % 16 == 0 && BYTES % 16 == 0 ? 16 : BY_8 ? 8 : 4;
  static constexpr int LOADS = (SHARE + 32 - STEP + 8 * LOAD - 1) / (8 * LOAD), WORDS = (SHARE + 31) / 32;
  // the permutation has a period of 128 bytes
  static constexpr int PERIOD = 8, ADDRESSES = LOAD == 16 ? LOADS < PERIOD ? LOADS : PERIOD : 1;
  u32 at[ADDRESSES];
  int shift;
  DI Share(int row, int index) {
    const int begin = (ROW % 16 ? row * 8 * ROW : 0) + index * SHARE;
    shift = ODD ? begin % 32 : 0;
    const int byte = ODD ? begin / 32 * 4 : begin / 8;
#pragma unroll
    for (int i = 0; i < ADDRESSES; i++) {
      at[i] = ROW % 16 ? byte : chunk_address<ROW>(row, byte / 16 + i) + byte % 16;
      keep(at[i]);
    }
  }
  template <int PART = 0, int PARTS = 1> DI void load(u32 tile, u32* w) const {
    static_assert(LOADS % PARTS == 0 && (PARTS == 1 || !ODD), "parts of whole words");
    constexpr int FIRST = PART * (LOADS / PARTS);
    u32 words[LOADS / PARTS * LOAD / 4];
#pragma unroll
    for (int i = 0; i < LOADS / PARTS; i++) {
      const int k = FIRST + i;
      load_shared<LOAD>(
          tile + (ADDRESSES > 1 ? at[k % PERIOD] + k / PERIOD * 128 : at[0] + k * LOAD), words + i * LOAD / 4);
    }
#pragma unroll
    for (int i = 0; i < WORDS / PARTS; i++)
      w[i] = !ODD ? words[i] : i + 1 < LOADS ? __funnelshift_r(words[i], words[i + 1], shift) : words[i] >> shift;
  }
};

// The codes of a tile's values: 16 bits of tokens 2 c and 2 c + 1 in each of a[V_PAIRS], of the tokens 8 further in b.
// ldmatrix transposes while it loads, so that a lane's dimensions are runs of RUN in every 16 bytes of a row.
template <bool IN_HALVES> struct Values {
  static constexpr int LOADS = (V_PAIRS + 1) / 2, PART_LOADS = (PART_V_PAIRS + 1) / 2;
  static constexpr int PERIOD = DV > 256 ? 4 : LOADS, ADDRESSES = LOADS < PERIOD ? LOADS : PERIOD;  // as of a share
  u32 at[ADDRESSES];
  DI Values(int, int) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ADDRESSES; i++) {
      at[i] = chunk_address<V_ROW>(lane % 16, V_PAIRS > 1 ? 2 * i + lane / 16 : 0);
      keep(at[i]);
    }
  }
  template <int PART> DI void load(u32 tile, u32* a, u32* b) const {
#pragma unroll
    for (int i = 0; i < PART_LOADS; i++) {
      const int k = PART * PART_LOADS + i;
      const u32 from = tile + at[k % PERIOD] + k / PERIOD * 128;
      if (2 * i + 1 < PART_V_PAIRS) load_transposed(from, a[2 * i], b[2 * i], a[2 * i + 1], b[2 * i + 1]);
      else load_transposed(from, a[2 * i], b[2 * i]);
    }
  }
};
template <> struct Values<false> {  // codes lie across 16-bit boundaries, or rows across chunks: a lane takes one run
  using Run = Share<V_ROW, V_BITS, VALUE::BITS>;
  Run even, odd;
  DI Values(int g, int c) : even(2 * c, g), odd(2 * c + 1, g) {}
  DI void load(u32 tile, u32* x) const {
    u32 a[V_WORDS], b[V_WORDS];
    even.load(tile, a), odd.load(tile, b);
#pragma unroll
    for (int k = 0; k < V_PAIRS; k++) x[k] = prmt(a[k / 2], b[k / 2], k & 1 ? 0x7632 : 0x5410);
    if (V_ENDS) x[V_PAIRS] = 0;
  }
  template <int PART> DI void load(u32 tile, u32* a, u32* b) const {
    load(tile, a), load(tile + 8 * V_ROW, b);
  }
};

// Where a lane finds its keys of a tile, and its copies in the tables. Rows g and g + 8 of the score tile are its
// tokens.
struct KeyLane {
  int token;
  u32 table, value_table, pair;       // to its copies in the tables; tokens 2 c and 2 c + 1 of the values' meta
  u32 before_keys, before_values;  // bits of a neighbour's last code that count: none where a chain begins
  Share<K_ROW, K_BITS, KEY::BITS> key;
  DI KeyLane(int g, int c) : token(g), pair(2 * c * V_META), key(g, c) {
    const u32 block = UNSPLIT ? shared_address(shared) & ~WITHIN_BLOCK : 0;
    table = block + KEY::lane(), value_table = block + VALUE::lane() + VALUE_TABLE_AT;
  }
  DI void keep_all(int g, int c) {  // once all that a lane holds is there: the order decides in which registers
    before_keys = c * K_WORDS * 4 % KEY::CHAIN ? ~0u : 0, before_values = g ? twice((1u << VALUE::OVERLAP) - 1) : 0;
    keep(token);
    if (KEY_TABLE > 0) keep(table);
    if (OWN_TABLE) keep(value_table); else value_table = table;
    if (KEY::OVERLAP) keep(before_keys);
    if (VALUE::OVERLAP) keep(before_values);
  }
  // Adds what is shifted by a code to a row's words; the last code of another lane's by a shuffle.
  template <class Key> DI void overlap_key(u32 (&w)[ALL_K_WORDS]) const {
    if constexpr (Key::OVERLAP > 0) {
      static_assert(Key::CHAIN % 4 == 0 && K_BITS % 32 == 0 && K_PARTS == 1 && ALL_K_WORDS == 2 * K_WORDS,
          "a lane has whole words");
      constexpr int IN_CHAIN = Key::CHAIN / 4;  // words
      constexpr bool BEGINS = K_WORDS % IN_CHAIN == 0;  // a chain, with a lane
      u32 last = BEGINS ? 0 : __shfl_up_sync(~0u, w[K_WORDS - 1], 1);
      if (IN_CHAIN % K_WORDS == 0) last &= before_keys;
#pragma unroll
      for (int i = 0; i < K_WORDS; i++) {
        if (BEGINS ? i % IN_CHAIN == 0 : IN_CHAIN % K_WORDS && (threadIdx.x % 4 * K_WORDS + i) % IN_CHAIN == 0)
          last = 0;
        w[K_WORDS + i] = __funnelshift_r(last, w[i], 32 - Key::OVERLAP), last = w[i];
      }
    }
  }
  template <class Value, int PAIRS = V_PAIRS, int N> DI void overlap_values(u32 (&x)[N]) const {
    if constexpr (Value::OVERLAP > 0) {
      static_assert(
          IN_HALVES && V_PARTS == 1 && Value::CHAIN == 16, "a chain is the 16 bytes of which every lane has two");
      constexpr u32 MOVED = twice(0xffffu << Value::OVERLAP & 0xffff);
#pragma unroll
      for (int k = 0; k < PAIRS; k++)
        x[PAIRS + k] =
            x[k] << Value::OVERLAP & MOVED | __shfl_up_sync(~0u, x[k], 4) >> 16 - Value::OVERLAP & before_values;
    }
  }
};
struct Lane : KeyLane {  // and its values, where a warp unpacks all of a tile
  Values<IN_HALVES> values;
  DI Lane(int g, int c) : KeyLane(g, c), values(g, c) { keep_all(g, c); }
};

// Registers j of two tokens' keys.
template <class Key> DI uint2 key_pairs(const u32* a, const u32* b, int j, u32 lane) {
  if constexpr (Key::OVERLAP > 0)
    return make_uint2(Key::key_pair(a, a + K_WORDS, j, lane), Key::key_pair(b, b + K_WORDS, j, lane));
  else if constexpr (Key::TOKENS == 2) return Key::key_pair(a, b, j, lane);
  else if constexpr (Key::TOKENS == 1) return make_uint2(Key::key_pair(a, j, lane), Key::key_pair(b, j, lane));
  else return make_uint2(Key::key_pair(a, j), Key::key_pair(b, j));
}
// Register j of two tokens' values.
template <class Value, int PAIRS = V_PAIRS> DI u32 value_pair(const u32* x, int j, u32 lane) {
  if constexpr (Value::OVERLAP > 0) return Value::pair(x, x + PAIRS, j, lane);
  else if constexpr (Value::VALUES_BY_TABLE) return Value::pair(x, j, lane);
  else return Value::pair(x, j);
}
template <class Codec> DI void fill_table(u32 warp, u32 at) {
  if constexpr (Codec::ENTRIES > 0)
    for (u32 e = warp; e < Codec::ENTRIES; e += WARPS) Codec::fill(at / Codec::SPACING + e);
}
DI void fill_tables(u32 warp) {
  if (TABLES_BYTES == 0) return;
  if ((shared_address(shared) & WITHIN_BLOCK) != TABLE_ADDRESS) __trap();
  if (KEY_TABLE > 0) fill_table<KEY>(warp, 0);
  if (OWN_TABLE) fill_table<VALUE>(warp, VALUE_TABLE_AT);
  __syncthreads();
}
