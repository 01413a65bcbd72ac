// 4 bits, asymmetric: the scale's low four mantissa bits carry the zero point.
struct Int4 : Fields<4> {
  static constexpr int META_BYTES = 4;
  static constexpr bool ZERO_POINTS = true;

  template <class R> static DI u32 encode(const R& row, u32 (&words)[WORDS<BITS>]) {
    const float low = row.min(), high = row.max(), scale = scale_of(high - low, 15.f, 1e-6f),
                inverse = reciprocal(scale);
    const u32 zero_point = floor_code(fminf(fmaxf(0.5f - quotient(low, scale, inverse), 0.f), 15.f)) - FLOOR_BASE;
    // code = floor(clamp(x / scale + zero_point + 0.5)), all of it times 2^-4: saturation to 0 .. 1 is then part of the
    // addition, and adding BASE, rounded down, leaves the code.
    constexpr u32 BASE = 0x49000000u;  // 2^19
    const float step = inverse / 16.f, shift = (zero_point + 0.5f) / 16.f;
    auto place = [&](float x) { return __saturatef(__fadd_rn(__fmul_rn(x, step), shift)); };
    u32 code[E];
#pragma unroll
    for (int e = 0; e < E; e++) code[e] = as_bits(__fadd_rd(place(row.x[e]), as_float(BASE)));
    if (__any_sync(~0u, place(high) == 1.f)) {  // rarely: rows above zero, and exact halves
#pragma unroll
      for (int e = 0; e < E; e++) code[e] = min(code[e], BASE + 15);
    }
    pack<BITS, BASE>(code, words);
    return as_bits(scale) & ~15u | zero_point;
  }
};
