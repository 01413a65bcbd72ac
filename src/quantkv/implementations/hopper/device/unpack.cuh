// What codecs are read with. A codec is a struct, in formats/*/hopper.cuh or beside any other format:
//   BITS, META_BYTES       of a code, and beside a row: 0, 2 or 4 (one word, as it is stored)
//   scale(meta)            a row reads back as scale * operand + bias
//   BIASED, bias(meta)     the row has a bias that is no multiple of its scale
//   ZERO_POINTS            or one that is: -zero_point(meta) * scale, an integer below 16 in the lowest bits of the
//                          word
//   NORMALISED             keys: scale(meta) is the length of the row, whatever the length of the operand
//   BFLOAT                 operands are bf16, and not fp16
//   GAIN, PER_DIMENSION    bring products of operands as registers hold them to their values: GAIN, times the head size
//                          if PER_DIMENSION
// and of one that serves keys,
//   INTEGERS               operands less ZERO are 8-bit integers times 2^-24: key_bytes(w, j) is four of these
//                          integers, of dimensions byte_dim(j, 0) to byte_dim(j, 3)
//   HALF, ODD_UNIT, ZERO   the distance of the two dimensions of a register; what odd registers are worth more than
//                          even ones, a power of two; what is taken off every operand. Four lanes take 8 HALF
//                          dimensions each: what lies behind a row of fewer is read as codes, times 0, and must not be
//                          read as infinite
//   key_pair(w, j)         register j: dimensions key_dim(j) and key_dim(j) + HALF; w: a lane's quarter of the row
// of one that serves values,
//   CENTRE, unit(j)        what is taken off every operand; what register j is worth more than its operands
//   pair(x, j)             dimension j of a lane's, of two tokens; x[k]: 16 bits of each
// of one that serves rotated dimensions of latents,
//   number_pair<BF16>(w, j)  dimensions 2 j and 2 j + 1 of the words w, as numbers of the queries' type; scale(meta) is
//                          what they are worth
// of keys that are read by a Table: fill(entry), and key_pair(.., j, lane), of TOKENS tokens at once.
//   VALUES_BY_TABLE        so are values: pair(.., j, lane). A table of their own begins at a multiple of 2^16 bytes,
//                          which is in `lane`, and of ENTRIES entries, by which the entries that it is filled in by are
//                          larger
//   OVERLAP                bits of a code that is read with the one before it in its CHAIN of bytes, 0 before the
//                          first: behind w, or x, comes shifted, the same moved up by a code, with the code before in
//                          the lowest bits
// Integer codes stay fp16 *subnormals*: a field masked in place is worth unit * code * 2^-24, the tensor core takes it
// at full speed, and GAIN / unit is multiplied into the query or the output, never into a code.
// Every function is pure and j a constant after unrolling, so the compiler shares what two calls have in common.
#pragma once
#include "instructions.cuh"

constexpr int D = HEAD_SIZE;  // of keys, in a read; of the rows, in a write
constexpr float SUBNORMAL = 16777216.f;  // 2^24
constexpr __device__ u32 twice(u32 h) { return h | h << 16; }

// A table at the start of shared memory: ENTRIES of TOKENS words, SPACING bytes apart, in each a copy for every lane,
// so that no two lanes meet in a bank. It begins at TABLE_ADDRESS, where the kernel checks that shared memory begins:
// an index needs no base but that of a block of a cluster, which is in the highest byte of `lane`.
constexpr u32 TABLE_ADDRESS = 1024, WITHIN_BLOCK = 0xffffff;
template <int ENTRIES_, int TOKENS_, int SPACING_> struct Table {
  static constexpr int ENTRIES = ENTRIES_, TOKENS = TOKENS_, SPACING = SPACING_, TABLE_BYTES = ENTRIES * SPACING;
  static DI u32 lane() { return threadIdx.x % 32 * 4 * TOKENS; }  // bytes from an entry to this lane's copy
  static DI void put(u32 at, u32 x) { ((u32*)(shared + at * SPACING))[threadIdx.x % 32] = x; }
  static DI void put(u32 at, u32 x, u32 y) { ((uint2*)(shared + at * SPACING))[threadIdx.x % 32] = make_uint2(x, y); }
  static DI u32 entry(u32 at) { return load_constant<TABLE_ADDRESS>(at); }
  static DI uint2 entries(u32 at) { return load_constants<TABLE_ADDRESS>(at); }
};

// What a codec is unless it says otherwise.
template <class TABLE> struct ReadBy : TABLE {
  static constexpr int META_BYTES = 0, HALF = 1;
  static constexpr bool BIASED = false, ZERO_POINTS = false, NORMALISED = false, BFLOAT = false,
                        VALUES_BY_TABLE = false, PER_DIMENSION = false;
  static constexpr bool INTEGERS = false;
  static constexpr int OVERLAP = 0, CHAIN = 16;
  static constexpr float GAIN = 1.f, ODD_UNIT = 1.f, ZERO = 0.f, CENTRE = 0.f;
  static constexpr __device__ float unit(int) { return 1.f; }
  // every other of eight, then those between
  static constexpr __device__ int byte_dim(int j, int i) { return j / 2 * 8 + j % 2 + 2 * i; }
  static DI float scale(u32 meta) { return as_float(meta); }
  static DI float bias(u32) { return 0.f; }
  template <class R, class W> static DI u32 encode(const R&, W&) { return 0; }  // rows that write.cu does not write
};
using CodecDefaults = ReadBy<Table<0, 0, 0>>;

// Products of a codec's operands, and what they are multiplied by.
template <class C> DI void product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (C::BFLOAT) mma_bfloat(c, a0, a1, a2, a3, b0, b1); else mma(c, a0, a1, a2, a3, b0, b1);
}
template <class C> DI u32 operand_pair(float x, float y) { return C::BFLOAT ? bfloat2(x, y) : half2(x, y); }

// Unsigned codes of 1 to 7 bits one after the other, lowest bits first: subnormals where they stand.
template <int B> struct Fields : CodecDefaults {
  static constexpr int BITS = B;
  static constexpr u32 MASK = (1u << B) - 1;
  static constexpr float GAIN = SUBNORMAL, CENTRE = 1 << (B - 1);
  // Values: bit of code j in its 16; whether it goes on in the next 16; how far it is moved to end below bit 11, linear
  // as fp16.
  static constexpr __device__ int at(int j) { return j * B % 16; }
  static constexpr __device__ bool across(int j) { return at(j) + B > 16; }
  static constexpr __device__ int shift(int j) { return across(j) || at(j) + B <= 11 ? 0 : 12 - B; }
  static constexpr __device__ float unit(int j) { return across(j) ? 1.f : float(1 << (at(j) - shift(j))); }
  static DI u32 pair(const u32* x, int j) {
    const int k = j * B / 16, n = 16 - at(j);
    if (!across(j)) return x[k] >> shift(j) & twice(MASK << (at(j) - shift(j)));
    const u32 lowest = (1u << n) - 1;
    return x[k] >> at(j) & twice(lowest) | x[k + 1] << n & twice(MASK & ~lowest);
  }
  // Keys: dimensions 2 j and 2 j + 1.
  static DI u32 key_pair(const u32* w, int j) {
    const int bit = 2 * B * j, word = bit / 32, from = bit % 32;
    const u32 x = from + 2 * B > 32 ? __funnelshift_r(w[word], w[word + 1], from) : w[word] >> from;
    return x & MASK | x << (16 - B) & MASK << 16;
  }
};
template <> struct Fields<4> : CodecDefaults {  // fields of a half word that are 4 dimensions apart
  static constexpr int BITS = 4, HALF = 4;
  static constexpr float GAIN = SUBNORMAL, CENTRE = 8.f, ODD_UNIT = 16.f;
  static constexpr bool INTEGERS = true;
  static constexpr __device__ float unit(int j) { return j & 1 ? 16.f : 1.f; }
  static DI u32 key_bytes(const u32* w, int j) { return (j & 1 ? w[j / 2] >> 4 : w[j / 2]) & 0x0f0f0f0fu; }
  static DI u32 field(u32 w, int j) { return w >> (j & 2) * 4 & (j & 1 ? 0x00f000f0u : 0x000f000fu); }
  static DI u32 key_pair(const u32* w, int j) { return field(w[j / 4], j % 4); }
  static DI u32 pair(const u32* x, int j) { return field(x[j / 4], j % 4); }
};
// 2 bits: levels -10, -3, 3, 10, times 2^-24. Values by arithmetic; keys by a table of the 256 bytes, to spare the
// integer pipe.
struct FourLevels : ReadBy<Table<256, 2, 256>> {
  static constexpr int BITS = 2;
  static constexpr bool INTEGERS = true;
  static DI u32 key_bytes(const u32* w, int j) {  // codes pick bytes, four bits to each
    const u32 codes = (j & 1 ? w[j / 4] >> 2 : w[j / 4]) & 0x33333333u;
    return pick(0x0a03fdf6u, j & 2 ? upper(codes) : codes);
  }
  // Field j of both halves. 20/3 code - 10 is -10, -3.33, 3.33, 10: the level, once rounded to an integer, and fp16
  // subnormals are integers. So one multiply-add makes it.
  static DI u32 level(u32 w, int j) {
    const int at = j < 5 ? j : j - 3;
    return fma2((j < 5 ? w : w >> 6) & twice(3u << 2 * at), twice(0x46abu - 0x800u * at), 0x800a800au);
  }
  static DI void fill(u32 e) { put(e, level(e & 3 | (e & 12) << 14, 0), level(e >> 4 & 3 | e >> 6 << 16, 0)); }
  // a byte of the index: two codes of a, two of b
  static DI uint2 key_pair(const u32* a, const u32* b, int j, u32 lane) {
    const u32 x = a[j / 8], y = b[j / 8];
    const u32 index = j & 1 ? x >> 4 & 0x0f0f0f0fu | y & 0xf0f0f0f0u : x & 0x0f0f0f0fu | y << 4 & 0xf0f0f0f0u;
    return entries(prmt(index, lane, 0x7604 | j % 8 / 2 << 4));
  }
  static DI u32 pair(const u32* x, int j) { return level(x[j / 8], j % 8); }
};
