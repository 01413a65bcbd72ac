// 8-bit floats.
template <bool E4M3> DI void float8_words(const float (&x)[E], float factor, u32 (&words)[E / 4]) {
#pragma unroll
  for (int w = 0; w < E / 4; w++) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = __fmul_rn(x[4 * w + i], factor);
    words[w] = E4M3 ? e4m3x2(y[0], y[1]) | e4m3x2(y[2], y[3]) << 16 : e5m2x2(y[0], y[1]) | e5m2x2(y[2], y[3]) << 16;
  }
}

struct E4M3 : CodecDefaults {
  static constexpr int BITS = 8;
  static DI u32 key_pair(const u32* w, int j) { return half2_of_e4m3(w[j / 2] >> 16 * (j % 2)); }
  static DI u32 pair(const u32* x, int j) { return half2_of_e4m3(prmt(x[j / 2], 0, 0x3120) >> 16 * (j & 1)); }
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    return float8_words<true>(row.x, 1.f, words), 0;
  }
};

struct E4M3Token : E4M3 {  // and the row's scale
  static constexpr int META_BYTES = 4;
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    const float scale = scale_of(row.absmax(), 448.f, 1e-6f);
    float8_words<true>(row.x, reciprocal(scale), words);
    return as_bits(scale);
  }
};

struct E5M2 : CodecDefaults {  // the upper half of an fp16 number
  static constexpr int BITS = 8;
  static DI u32 key_pair(const u32* w, int j) { return prmt(w[j / 2], 0, j & 1 ? 0x3424 : 0x1404); }
  static DI u32 pair(const u32* x, int j) { return prmt(x[j / 2], 0, j & 1 ? 0x3414 : 0x2404); }
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    return float8_words<false>(row.x, 1.f, words), 0;
  }
};
