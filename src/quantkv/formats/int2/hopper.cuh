// Levels -10, -3, 3, 10, times 2^-24. Values by arithmetic; keys by a table of the 256 bytes, to spare the integer pipe.
struct Int2 : ReadBy<Table<256, 2, 256>> {
  static constexpr int BITS = 2, META_BYTES = 4;
  static constexpr float GAIN = SUBNORMAL * D / 6.62f;  // the stored scale is |y| / D^1.5
  // Field j of both halves. 20/3 code - 10 is -10, -3.33, 3.33, 10: the level, once rounded to an integer, and fp16 subnormals are
  // integers. So one multiply-add makes it.
  static DI u32 level(u32 w, int j) {
    const int at = j < 5 ? j : j - 3;
    return fma2((j < 5 ? w : w >> 6) & twice(3u << 2 * at), twice(0x46abu - 0x800u * at), 0x800a800au);
  }
  static DI void fill(u32 e, u8* table) { put(table, e, level(e & 3 | (e & 12) << 14, 0), level(e >> 4 & 3 | e >> 6 << 16, 0)); }
  static DI uint2 key_pair(const u32* a, const u32* b, int j, u32 lane) {  // a byte of the index: two codes of a, two of b
    const u32 x = a[j / 8], y = b[j / 8];
    const u32 index = j & 1 ? x >> 4 & 0x0f0f0f0fu | y & 0xf0f0f0f0u : x & 0x0f0f0f0fu | y << 4 & 0xf0f0f0f0u;
    return entries(prmt(index, lane, 0x5504 | j % 8 / 2 << 4));
  }
  static DI u32 pair(const u32* x, int j) { return level(x[j / 8], j % 8); }

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    constexpr double ROOT = root_of(D);
    constexpr float SHRUNK = 1.f / (1ull << 62);  // the reciprocal of the largest number is no normal number
    const float norm = saturate(__fsqrt_rn(row.sum_of_squares() + 1e-12f), LARGEST);
    const float factor = quotient(ROOT * SHRUNK, norm * SHRUNK, reciprocal(norm * SHRUNK));
    // The boundaries are -0.9816, 0 and 0.9816: code = floor(clamp(x factor / 0.9816 + 2)), times 2^-2 so that saturation to 0 .. 1
    // is part of the addition.
    constexpr u32 BASE = 0x4a000000u;  // 2^21
    const float step = factor * float(1 / (4 * 0.9816));
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
      const float place = fminf(__saturatef(__fmaf_rd(row.x[e], step, 0.5f)), 0.75f);
      code[e] = as_bits(__fadd_rd(place, as_float(BASE)));
    }
    pack<BITS, BASE>(code, words);
    return as_bits(quotient(norm, D * ROOT, 1. / (D * ROOT)));
  }
};
