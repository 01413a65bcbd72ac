// Rows as given, in 16 bits: operands as they are.
template <bool BF16> struct Plain16 : CodecDefaults {
  static constexpr int BITS = 16;
  static constexpr bool BFLOAT = BF16;
  static DI u32 key_pair(const u32* w, int j) { return w[j]; }
  static DI u32 pair(const u32* x, int j) { return x[j]; }
  template <bool> static DI u32 number_pair(const u32* w, int j) { return w[j]; }
  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
#pragma unroll
    for (int w = 0; w < E / 2; w++)
      words[w] = BF16 ? bfloat2(row.x[2 * w], row.x[2 * w + 1]) : half2(row.x[2 * w], row.x[2 * w + 1]);
    return 0;
  }
};
