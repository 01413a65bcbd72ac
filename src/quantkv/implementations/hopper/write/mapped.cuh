// A row on its way to its codes: loaded, mapped, less its key mean.
#pragma once
#include "hadamard.cuh"

static_assert(CHUNK == 8, "16-bit numbers of one load");
// the least scales: of a row, and as it is stored
constexpr float TINY = 1.17549435e-38f, SMALLEST_HALF = 1.f / (1 << 24);
DI float at_least(float x, float least) { return x < least ? least : x; }  // NaN stays NaN

// K or V: this token's row, the signs of its map (EVENED: its steps, D numbers of 16 bits), the per-tensor scale, where
// codes and metadata begin in a record.
struct RowSource {
  const u16* row;
  const u32* signs;
  float scale;
  int codes, meta;
#if LESS_MEAN
  const u16* mean;  // what is taken off the row first, D numbers; null: nothing
#endif
};

DI RowSource source_of(const WriteArguments& a, bool is_key, int token, i64 head) {
  const i64 key_steps = KEY_EVENED ? head * (D / 2) : 0, value_steps = VALUE_EVENED ? head * (D / 2) : 0;
  return is_key
      ? RowSource{a.key + token * a.key_token + head * a.key_head, a.key_signs + key_steps, a.key_scale, 0, PAGE_KM}
      : RowSource{a.value + token * a.value_token + head * a.value_head, a.value_signs + value_steps, a.value_scale,
            PAGE_V, PAGE_VM};
}

// The mapped mean of the keys of every 64 positions, of one head; what lies beyond the table has its last row.
struct KeyMeans {
  const float* table;
  const POSITION* positions;
  i64 stride;
  int buckets;
};

#if LESS_MEAN
DI u32 less2(u32 a, u32 b) { return pair_of(first(a) - first(b), second(a) - second(b)); }
#endif

// Whether the row, over its four lanes, is shorter than the row less the key mean, of which a lane's numbers begin at
// `mean`.
DI bool is_shorter(const float (&row)[E], const float* mean) {
  float own = 0.f, rest = 0.f;
#pragma unroll
  for (int e = 0; e < E; e++) {
    const float less = are_there(e) ? row[e] - mean[4 * (e - e % CHUNK) + e % CHUNK] : 0.f;
    own = fmaf(row[e], row[e], own), rest = fmaf(less, less, rest);
  }
  auto add = [](float a, float b) { return a + b; };
  return over_lanes(own, add) < over_lanes(rest, add);
}

// Fills in a lane's part of the row of `token`, which is there if `given`. Whether it is kept without its key mean:
// then it is negated, as SIGNED codecs store what is shorter so.
template <bool MAPPED, bool EVENED, bool ROUND, bool SCALED, bool SHIFTED, bool SIGNED, class R>
DI bool load_row(R& row, const RowSource& side, float factor, const KeyMeans& means, int token, bool given) {
  constexpr int FLIPS = (E + 31) / 32;
  const int c = threadIdx.x % 4;
  u32 flips[FLIPS] = {};
  bool alone = false;
  if (given)
#pragma unroll
    for (int e = 0; e < E; e += CHUNK)
      if (are_there(e)) *(uint4*)(row.pairs + e / 2) = *(const uint4*)(side.row + 4 * e + CHUNK * c);
#if LESS_MEAN
  if (side.mean)
#pragma unroll
    for (int e = 0; e < E; e += CHUNK)
      if (are_there(e)) {
        const uint4 four = *(const uint4*)(side.mean + 4 * e + CHUNK * c);
        u32* pairs = row.pairs + e / 2;
        pairs[0] = less2(pairs[0], four.x), pairs[1] = less2(pairs[1], four.y);
        pairs[2] = less2(pairs[2], four.z), pairs[3] = less2(pairs[3], four.w);
      }
#endif
  if constexpr (MAPPED) {
    if constexpr (EVENED) {
#pragma unroll
      for (int e = 0; e < E; e += CHUNK)
        if (are_there(e)) {
          const uint4 four = *(const uint4*)((const u16*)side.signs + 4 * e + CHUNK * c);
          u32* pairs = row.pairs + e / 2;
          pairs[0] = times2(pairs[0], four.x), pairs[1] = times2(pairs[1], four.y);
          pairs[2] = times2(pairs[2], four.z), pairs[3] = times2(pairs[3], four.w);
        }
    } else if (side.signs) {
#pragma unroll
      for (int i = 0; i < FLIPS; i++) flips[i] = side.signs[c * FLIPS + i];
    }
    hadamard(row, flips, factor);
  }
  if constexpr (SHIFTED) {
    const int bucket = given ? min((int)(means.positions[token] / 64), means.buckets - 1) : 0;
    const float* shift = means.table + bucket * means.stride + CHUNK * c;
    if constexpr (SIGNED) {
      alone = is_shorter(row.x, shift);
      keep(shift);  // what it points to is loaded again: registers could not hold it
    }
#pragma unroll
    for (int e = 0; e < E; e++)
      if (are_there(e)) row.x[e] = alone ? -row.x[e] : row.x[e] - shift[4 * (e - e % CHUNK) + e % CHUNK];
  }
  if constexpr (MAPPED && ROUND)
#pragma unroll
    for (int e = 0; e < E; e += 2) row.pairs[e / 2] = pair_of(row.x[e], row.x[e + 1]);
  if constexpr (!MAPPED || ROUND) row.unpack();
  if constexpr (SCALED) {
    const float inverse = 1.f / side.scale;
#pragma unroll
    for (int e = 0; e < E; e++) row.x[e] = quotient(row.x[e], side.scale, inverse);
  }
  return alone;
}
