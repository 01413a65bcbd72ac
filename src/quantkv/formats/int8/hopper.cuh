// 8-bit integers, and the row's scale.
struct Int8 : CodecDefaults {
  static constexpr int BITS = 8, META_BYTES = 4, HALF = 2;
  static constexpr float GAIN = SUBNORMAL, ZERO = 128.f;  // keys are read as code + 128; sum(q) takes the 128 off again
  static constexpr bool INTEGERS = true;
  static constexpr __device__ int byte_dim(int j, int i) { return 4 * j + i; }
  static DI u32 key_bytes(const u32* w, int j) { return w[j]; }
  static DI u32 biased(u32 w, int j) { return prmt(w ^ 0x80808080u, 0, j ? 0x4341 : 0x4240); }
  static DI u32 key_pair(const u32* w, int j) { return biased(w[j / 2], j % 2); }
  // 128 and the lower 7 bits, or for halves 1,024 and a byte, are a number as they stand: what is taken off is exact.
  template <bool BF16> static DI u32 number_pair(const u32* w, int j) {
    if constexpr (!BF16) return add2(prmt(w[j / 2] ^ 0x80808080u, 0x64646464u, j % 2 ? 0x4342 : 0x4140), 0xe480e480u);
    const u32 x = prmt(w[j / 2], 0, j % 2 ? 0x4342 : 0x4140);
    return sub_bfloat2(x & 0x007f007fu | 0x43004300u, x & 0x00800080u | 0x43004300u);
  }
  static DI u32 pair(const u32* x, int j) { return add2(biased(x[j / 2], j & 1), 0x80808080u); }

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    const float scale = scale_of(row.absmax(), 127.f, 1e-6f), inverse = reciprocal(scale);
    int code[E];
#pragma unroll
    for (int e = 0; e < E; e++) {  // halves away from zero
      const float t = __fmul_rn(row.x[e], inverse);
      code[e] = __float2int_rz(__fadd_rn(t, copysignf(0.5f, t)));
    }
#pragma unroll
    for (int e = 0; e < E; e += 4)
      words[e / 4] = prmt(prmt(code[e], code[e + 1], 0x0040), prmt(code[e + 2], code[e + 3], 0x0040), 0x5410);
    return as_bits(scale);
  }
};
