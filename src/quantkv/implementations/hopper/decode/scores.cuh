// What products come to, for whoever unpacks tiles: keys' to scores, values' codes about their zero.
#pragma once
#include "partials.cuh"
#include "integer_query.cuh"

constexpr bool ZERO_POINTS = VALUE::ZERO_POINTS;
// an output is of any size, not weights times codes of a known one, and is looked for
constexpr bool WIDE = VALUE::BIASED || V_META == 0;
constexpr bool ADDED = KEY_MEAN || KEY::BIASED;  // a score is more than a product
static_assert(!ZERO_POINTS || V_META == 4, "where zero points are");
DI u32 zero_code(u32 meta) { return meta & 15u; }
DI float zero_point(u32 meta) { return (float)zero_code(meta); }
DI float key_scale(u32 meta, float squares) {
  return K_META == 0 ? 1.f : KEY::NORMALISED ? KEY::scale(meta) * inverse_root(squares) : KEY::scale(meta);
}

// What a key's product is multiplied by. Products with latents are in the unit of the rotated dimensions, whose
// metadata it is then.
DI float product_scale(u32 meta, float squares) {
  if (LATENTS) return SECOND_META > 0 ? ROPE::scale(meta) : 1.f;
  return key_scale(meta, squares);
}

// The scores of a lane's two keys, by their metadata.
// squares: the sum of an operand's squares, of keys that are NORMALISED.
struct KeyScores {
  float f[2], z[2], shifted[2];
  DI KeyScores(const u32 (&meta)[2], float squares0, float squares1, float scale)
      : f{product_scale(meta[0], squares0) * scale, product_scale(meta[1], squares1) * scale},
        z{KEY::bias(meta[0]) * scale, KEY::bias(meta[1]) * scale},
        // A negative scale says that the key was stored without its key mean.
        shifted{
            KEY_SIGNED && KEY::scale(meta[0]) < 0.f ? 0.f : 1.f, KEY_SIGNED && KEY::scale(meta[1]) < 0.f ? 0.f : 1.f} {}
  // Of key r, less m: its product y with a query, o of the query with the key's mean, the sum of the query's numbers.
  DI float operator()(int r, float y, float o, float sum, float softcap, float m) const {
    if (KEY_SIGNED && KEY_MEAN) o *= shifted[r];
    if (KEY::BIASED) o = fmaf(z[r], sum, KEY_MEAN ? o : 0.f);
    if (SOFTCAP) {  // scale brings the score to 2 log2(e) / softcap, so y = softcap log2(e) tanh(score / softcap)
      return softcap - 2.f * softcap * inverse(1.f + pow2(ADDED ? fmaf(y, f[r], o) : y * f[r])) - m;
    }
    return fmaf(y, f[r], ADDED ? o - m : -m);
  }
};

DI u32 centred(u32 code, u32 zero, float unit) {  // codes of two tokens, less what they have for zero
  if (ZERO_POINTS) return fma2(zero, half_pair(unit) ^ 0x80008000u, code);
  return add2(code, twice(u32(VALUE::CENTRE * unit)) | 0x80008000u);  // a subnormal
}
