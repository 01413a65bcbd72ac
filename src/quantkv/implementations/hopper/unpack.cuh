// What the stored codes of each format mean to the tensor core.
//
// A format turns packed words into registers that hold two fp16 numbers each:
//   keys:   key_pair(w, j)  two dimensions of one token, `dim(j)` and `dim(j) + HALF`; w: a lane's quarter of the row
//   values: pair(x, j)      a lane's dimension j of two tokens; x[k]: 16 bits of each
// Keys that read a Table: key_pair(.., j, lane), of TOKENS tokens at once.
// Integer codes stay fp16 *subnormals*: a field masked in place is worth unit(j) * code * 2^-24, the tensor core takes it
// at full speed, and GAIN * 1 / unit(j) is multiplied into the query or the output, never into a code.
// Every function is pure and j a constant after unrolling, so the compiler shares what two calls have in common.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
#define DI __device__ __forceinline__
extern __shared__ __align__(128) u8 shared[];  // a table, then the rings of tiles

template <class T> DI void keep(T& x) {  // in a register: the compiler would compute it anew in the loop
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x)); else asm volatile("" : "+r"(x));
}
DI u32 prmt(u32 a, u32 b, u32 sel) { return __byte_perm(a, b, sel); }
DI u32 add2(u32 a, u32 b) { u32 r; asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
DI u32 half2(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
DI float low(u32 h) { float f; asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(h)); return f; }
DI float high(u32 h) { float f; asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(h)); return f; }
constexpr __device__ u32 twice(u32 h) { return h | h << 16; }
DI u32 fp8x2(u32 bytes) { u32 r; asm("{.reg .b16 x, y; mov.b32 {x, y}, %1; cvt.rn.f16x2.e4m3x2 %0, x;}" : "=r"(r) : "r"(bytes)); return r; }

// A table in shared memory: ENTRIES of TOKENS words, SPACING bytes apart, in each a copy for every lane, so that no two lanes
// meet in a bank. It begins at TABLE_ADDRESS, where the kernel checks that shared memory begins: what is indexed needs no base.
constexpr u32 TABLE_ADDRESS = 1024;
template <int ENTRIES_, int TOKENS_, int SPACING_> struct Table {
  static constexpr int ENTRIES = ENTRIES_, TOKENS = TOKENS_, SPACING = SPACING_, BYTES = ENTRIES * SPACING;
  static DI u32 lane() { return threadIdx.x % 32 * 4 * TOKENS; }  // bytes from an entry to this lane's copy
};
using NoTable = Table<0, 0, 0>;
DI u32 table_word(u32 at) { u32 x; asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(TABLE_ADDRESS)); return x; }
DI uint2 table_words(u32 at) {
  uint2 x;
  asm("ld.shared.v2.b32 {%0,%1}, [%2 + %3];" : "=r"(x.x), "=r"(x.y) : "r"(at), "n"(TABLE_ADDRESS));
  return x;
}

template <int N> struct Constant { static constexpr int value = N; };
constexpr float SUBNORMAL = 16777216.f;  // 2^24

// Beside the codes of a row: what its meta bytes give.
enum class Meta { none, scale, scale_zero, norm, scale_min };
constexpr __device__ int meta_bytes(Meta m) { return m == Meta::none ? 0 : m == Meta::norm ? 2 : 4; }

struct Int8 : NoTable {
  static constexpr int BITS = 8, HALF = 2;
  static constexpr Meta META = Meta::scale;
  static constexpr float GAIN = SUBNORMAL, ZERO = 128.f, CENTRE = 0.f;  // keys are read as code + 128; sum(q) takes the 128 off again
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return j / 2 * 4 + j % 2; }
  static DI u32 biased(u32 w, int j) { return prmt(w ^ 0x80808080u, 0, j ? 0x4341 : 0x4240); }
  static DI u32 key_pair(const u32* w, int j) { return biased(w[j / 2], j % 2); }
  static DI u32 pair(const u32* x, int j) { return add2(biased(x[j / 2], j & 1), 0x80808080u); }
};

template <Meta M> struct E4M3 : NoTable {
  static constexpr int BITS = 8, HALF = 1;
  static constexpr Meta META = M;
  static constexpr float GAIN = 1.f, ZERO = 0.f, CENTRE = 0.f;
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return 2 * j; }
  static DI u32 key_pair(const u32* w, int j) { return fp8x2(w[j / 2] >> 16 * (j % 2)); }
  static DI u32 pair(const u32* x, int j) { return fp8x2(prmt(x[j / 2], 0, 0x3120) >> 16 * (j & 1)); }
};

template <Meta M> struct Int4 : NoTable {  // scale_zero: per-token-head int4; scale_min: TurboQuant values
  static constexpr int BITS = 4, HALF = 4;
  static constexpr Meta META = M;
  static constexpr float GAIN = SUBNORMAL, ZERO = 0.f, CENTRE = 8.f;
  static constexpr __device__ float unit(int j) { return j & 1 ? 16.f : 1.f; }
  static constexpr __device__ int dim(int j) { return j / 4 * 8 + j % 4; }
  static DI u32 field(u32 w, int j) { return w >> (j & 2) * 4 & (j & 1 ? 0x00f000f0u : 0x000f000fu); }
  static DI u32 key_pair(const u32* w, int j) { return field(w[j / 4], j % 4); }
  static DI u32 pair(const u32* x, int j) { return field(x[j / 4], j % 4); }
};

// Levels -10, -3, 3, 10, times 2^-24. Values by arithmetic; keys by a table of the 256 bytes, to spare the integer pipe.
struct Int2 : Table<256, 2, 256> {
  static constexpr int BITS = 2, HALF = 1;
  static constexpr Meta META = Meta::scale;
  static constexpr float GAIN = SUBNORMAL * HEAD_SIZE / 6.62f, ZERO = 0.f, CENTRE = 0.f;  // the stored scale is |y| / D^1.5
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return 2 * j; }
  // Field j of both halves. 20/3 code - 10 is -10, -3.33, 3.33, 10: the level, once rounded to an integer, and fp16 subnormals are
  // integers. So one multiply-add makes it.
  static DI u32 level(u32 w, int j) {
    const int at = j < 5 ? j : j - 3;
    return fma2((j < 5 ? w : w >> 6) & twice(3u << 2 * at), twice(0x46abu - 0x800u * at), 0x800a800au);
  }
  static DI void fill(u32 e, float) {
    ((uint2*)shared)[e * 32 + threadIdx.x % 32] = make_uint2(level(e & 3 | (e & 12) << 14, 0), level(e >> 4 & 3 | e >> 6 << 16, 0));
  }
  static DI uint2 key_pair(const u32* a, const u32* b, int j, u32 lane) {  // a byte of the index: two codes of a, two of b
    const u32 x = a[j / 8], y = b[j / 8];
    const u32 index = j & 1 ? x >> 4 & 0x0f0f0f0fu | y & 0xf0f0f0f0u : x & 0x0f0f0f0fu | y << 4 & 0xf0f0f0f0u;
    return table_words(prmt(index, lane, 0x5504 | j % 8 / 2 << 4));
  }
  static DI u32 pair(const u32* x, int j) { return level(x[j / 8], j % 8); }
};

// TurboQuant keys: two codes index a table of fp16 pairs. 256 bytes apart, a byte of codes is its entry's address.
template <int B> struct Codebook : Table<1 << 2 * B, 1, B == 4 ? 256 : 128> {
  static constexpr int BITS = B, HALF = 1;
  static constexpr Meta META = Meta::norm;
  static constexpr float GAIN = 1.f, ZERO = 0.f, CENTRE = 0.f;
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return 2 * j; }
  static DI void fill(u32 e, float centroid) {
    const float x = __shfl_sync(~0u, centroid, e % (1 << B)), y = __shfl_sync(~0u, centroid, e >> B);
    ((u32*)shared)[e * (B == 4 ? 64 : 32) + threadIdx.x % 32] = half2(x, y);
  }
  static DI u32 key_pair(const u32* w, int j, u32 lane) {
    const int bit = 2 * B * j, word = bit / 32, at = bit % 32;
    if (B == 4) return table_word(prmt(w[word], lane, 0x5504 | at / 8 << 4));
    const u32 x = at + 6 > 32 ? __funnelshift_r(w[word], w[word + 1], at - 7) : at < 7 ? w[word] << 7 - at : w[word] >> at - 7;
    return table_word(x & 63 * 128 | lane);
  }
};

// Registers j of two tokens' keys.
template <class Key> DI uint2 key_pairs(const u32* a, const u32* b, int j, u32 lane) {
  if constexpr (Key::TOKENS == 2) return Key::key_pair(a, b, j, lane);
  else if constexpr (Key::TOKENS == 1) return make_uint2(Key::key_pair(a, j, lane), Key::key_pair(b, j, lane));
  else return make_uint2(Key::key_pair(a, j), Key::key_pair(b, j));
}
template <class Key> DI void fill_table(u32 warp, int warps, const float* codebook) {
  if constexpr (Key::ENTRIES > 0) {
    if (__cvta_generic_to_shared(shared) != TABLE_ADDRESS) __trap();
    const float centroid = codebook ? codebook[threadIdx.x % (1 << Key::BITS)] : 0.f;
    for (u32 e = warp; e < Key::ENTRIES; e += warps) Key::fill(e, centroid);
    __syncthreads();
  }
}

struct Int3 {  // TurboQuant values: 16 codes in three times 16 bits; codes 5 and 10 lie across two of them
  static constexpr int BITS = 3;
  static constexpr Meta META = Meta::scale_min;
  static constexpr float GAIN = SUBNORMAL, CENTRE = 4.f;
  static constexpr __device__ int at(int j) { return j % 16 * 3 % 16; }  // bit of code j in its 16
  static constexpr __device__ bool across(int j) { return at(j) > 13; }
  static constexpr __device__ int shift(int j) { return across(j) || at(j) <= 8 ? 0 : 9; }  // fields end below bit 11: linear as fp16
  static constexpr __device__ float unit(int j) { return across(j) ? 1.f : float(1 << at(j) - shift(j)); }
  static DI u32 pair(const u32* x, int j) {
    const int k = j / 16 * 3 + j % 16 * 3 / 16, n = 16 - at(j);
    if (!across(j)) return x[k] >> shift(j) & twice(7u << at(j) - shift(j));
    const u32 lo = (1 << n) - 1;
    return x[k] >> at(j) & twice(lo) | x[k + 1] << n & twice(7 & ~lo);
  }
};
