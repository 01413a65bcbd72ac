// 5 bits between the row's minimum and maximum, for K and for V: an fp16 scale and the minimum beside each row.
struct FiveBits : Fields<5> {
  static constexpr int META_BYTES = 4;
  static constexpr bool BIASED = true;
  static DI float scale(u32 meta) { return low(meta); }
  static DI float bias(u32 meta) { return high(meta); }

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    const float least = row.min(), scale = scale_of(row.max() - least, 31.f, 1e-8f), inverse = reciprocal(scale);
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++)
      code[e] = floor_code(fminf(__fadd_rn(quotient(row.x[e] - least, scale, inverse), 0.5f), 31.f));
    pack<BITS, FLOOR_BASE>(code, words);
    return half2(saturate(scale, LARGEST_HALF), saturate(least, LARGEST_HALF));
  }
};
