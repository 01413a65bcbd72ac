// What the stored codes of each format mean to the tensor core.
//
// A format turns packed words into registers that hold two fp16 numbers each:
//   keys:   pair(w, j)      two dimensions of one token, `dim(j)` and `dim(j) + HALF`
//   values: pair(wa, wb, j) dimension j of two tokens
// Integer codes stay fp16 *subnormals*: a field masked in place is worth unit(j) * code * 2^-24, the tensor core takes it
// at full speed, and GAIN * 1 / unit(j) is multiplied into the query or the output, never into a code.
// Every function is pure and j a constant after unrolling, so the compiler shares what two calls have in common.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
#define DI __device__ __forceinline__
extern __shared__ __align__(128) u8 shared[];  // codebook copies, then the rings of tiles

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

template <int N> struct Constant { static constexpr int value = N; };
constexpr float SUBNORMAL = 16777216.f;  // 2^24

// Beside the codes of a row: what its meta bytes give.
enum class Meta { none, scale, scale_zero, norm, scale_min };
constexpr __device__ int meta_bytes(Meta m) { return m == Meta::none ? 0 : m == Meta::norm ? 2 : 4; }

struct Int8 {
  static constexpr int BITS = 8, HALF = 2;
  static constexpr Meta META = Meta::scale;
  static constexpr float GAIN = SUBNORMAL, ZERO = 128.f, CENTRE = 0.f;  // keys are read as code + 128; sum(q) takes the 128 off again
  static constexpr int ENTRIES = 0;
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return j / 2 * 4 + j % 2; }
  static DI u32 biased(u32 w, int j) { return prmt(w ^ 0x80808080u, 0, j ? 0x4341 : 0x4240); }
  static DI u32 pair(const u32* w, int j, u32) { return biased(w[j / 2], j % 2); }
  static DI u32 pair(const u32* a, const u32* b, int j) {
    return add2(biased(prmt(a[j / 4], b[j / 4], j & 2 ? 0x7632 : 0x5410), j & 1), 0x80808080u);
  }
};

template <Meta M> struct E4M3 {
  static constexpr int BITS = 8, HALF = 1;
  static constexpr Meta META = M;
  static constexpr float GAIN = 1.f, ZERO = 0.f, CENTRE = 0.f;
  static constexpr int ENTRIES = 0;
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return 2 * j; }
  static DI u32 pair(const u32* w, int j, u32) { return fp8x2(w[j / 2] >> 16 * (j % 2)); }
  static DI u32 pair(const u32* a, const u32* b, int j) {
    return fp8x2(prmt(a[j / 4], b[j / 4], j & 2 ? 0x7362 : 0x5140) >> 16 * (j & 1));
  }
};

template <Meta M> struct Int4 {  // scale_zero: per-token-head int4; scale_min: TurboQuant values
  static constexpr int BITS = 4, HALF = 4;
  static constexpr Meta META = M;
  static constexpr float GAIN = SUBNORMAL, ZERO = 0.f, CENTRE = 8.f;
  static constexpr int ENTRIES = 0;
  static constexpr __device__ float unit(int j) { return j & 1 ? 16.f : 1.f; }
  static constexpr __device__ int dim(int j) { return j / 4 * 8 + j % 4; }
  static DI u32 field(u32 w, int j) { return w >> (j & 2) * 4 & (j & 1 ? 0x00f000f0u : 0x000f000fu); }
  static DI u32 pair(const u32* w, int j, u32) { return field(w[j / 4], j % 4); }
  static DI u32 pair(const u32* a, const u32* b, int j) { return field(prmt(a[j / 8], b[j / 8], j & 4 ? 0x7632 : 0x5410), j % 4); }
};

struct Int2 {  // levels -10, -3, 3, 10: as fp16 each is one byte, so a byte permute is the table
  static constexpr int BITS = 2, HALF = 4;
  static constexpr Meta META = Meta::scale;
  static constexpr float GAIN = HEAD_SIZE / 6.62f, ZERO = 0.f, CENTRE = 0.f;  // the stored scale is |y| / D^1.5
  static constexpr int ENTRIES = 0;
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return j / 4 * 8 + j % 4; }
  static DI u32 level(u32 w, int j) {  // j: 16-bit half, nibble of each byte, field of the nibble
    u32 codes = (w >> 2 * (j & 1) & 0x33333333u) >> (j & 4) * 4;
    u32 bytes = prmt(0x4942c2c9u, 0, codes);
    return j & 2 ? bytes & 0xff00ff00u : prmt(bytes, 0, 0x2404);
  }
  static DI u32 pair(const u32* w, int j, u32) { return level(w[j / 8], j % 8); }
  static DI u32 pair(const u32* a, const u32* b, int j) {
    return level(prmt(a[j / 16], b[j / 16], j & 8 ? 0x7362 : 0x5140), j % 8);
  }
};

template <int B> struct Codebook {  // TurboQuant keys: two codes index a table of fp16 pairs, one copy for each lane
  static constexpr int BITS = B, HALF = 1;
  static constexpr Meta META = Meta::norm;
  static constexpr float GAIN = 1.f, ZERO = 0.f, CENTRE = 0.f;
  static constexpr int ENTRIES = 1 << 2 * B;
  static constexpr __device__ float unit(int) { return 1.f; }
  static constexpr __device__ int dim(int j) { return 2 * j; }
  static DI u32 pair(const u32* w, int j, u32 table) {  // table: shared address of this lane's copy; entries lie 128 bytes apart
    int bit = 2 * B * j, word = bit / 32, at = bit % 32;
    u32 x = B == 4 ? prmt(w[word], 0, 0x4440 + at / 8) : (at + 6 > 32 ? __funnelshift_r(w[word], w[word + 1], at) : w[word] >> at) & ENTRIES - 1, r;
    asm("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(x * 128 + table));
    return r;
  }
};

struct Int3 {  // TurboQuant values: 16 codes in three 16-bit windows; codes 5 and 10 lie across two of them
  static constexpr int BITS = 3;
  static constexpr Meta META = Meta::scale_min;
  static constexpr float GAIN = SUBNORMAL, CENTRE = 4.f;
  static constexpr __device__ int at(int j) { return j % 16 * 3 % 16; }  // bit of code j in its window
  static constexpr __device__ bool across(int j) { return at(j) > 13; }
  static constexpr __device__ int shift(int j) { return across(j) || at(j) <= 8 ? 0 : 9; }  // fields end below bit 11: linear as fp16
  static constexpr __device__ float unit(int j) { return across(j) ? 1.f : float(1 << at(j) - shift(j)); }
  static DI u32 pair(const u32* a, const u32* b, int j) {
    int k = j / 16 * 3 + j % 16 * 3 / 16;
    u32 x = prmt(a[k / 2], b[k / 2], k & 1 ? 0x7632 : 0x5410), f;
    if (across(j)) {
      u32 y = prmt(a[(k + 1) / 2], b[(k + 1) / 2], k & 1 ? 0x5410 : 0x7632);
      int n = 16 - at(j);
      u32 lo = (1 << n) - 1;
      f = (x >> at(j) & twice(lo)) | (y << n & twice(7 & ~lo));
    } else {
      f = x >> shift(j) & twice(7u << at(j) - shift(j));
    }
    return f;
  }
};
