// Lloyd-Max levels of the rotated row, and its length.
struct Int2 : FourLevels {
  static constexpr int META_BYTES = 4;
  static constexpr float GAIN = SUBNORMAL / 6.62f;
  static constexpr bool PER_DIMENSION = true;  // the stored scale is |y| / D^1.5

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    constexpr double ROOT = root_of(D);
    constexpr float SHRUNK = 1.f / (1ull << 62);  // the reciprocal of the largest number is no normal number
    const float norm = saturate(__fsqrt_rn(row.sum_of_squares() + 1e-12f), LARGEST);
    const float factor = quotient(ROOT * SHRUNK, norm * SHRUNK, reciprocal(norm * SHRUNK));
    // The boundaries are -0.9816, 0 and 0.9816: code = floor(clamp(x factor / 0.9816 + 2)), times 2^-2 so that
    // saturation to 0 .. 1 is part of the addition.
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
