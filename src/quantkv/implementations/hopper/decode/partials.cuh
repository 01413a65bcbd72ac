// Partials of a result: of some of the keys of a sequence, of one kv head. A partial has, for each packed query row, DV
// outputs in fp16, to be multiplied by a power of two, and their base-2 log-sum-exp.
#pragma once
#include "lanes.cuh"

// words of a packed query row, and where in them
constexpr int PARTIAL = DV / 2 + 4, LSE = DV / 2, FACTOR = DV / 2 + 1;
static_assert(FACTOR == LSE + 1 && LSE % 2 == 0, "two words that are put at once");
static_assert(4 * PARTIAL == PARTIAL_BYTES, "partials are of another size in Python");

// The power of two that outputs of at most `largest` are divided by, so that none overflows and all 11 bits of it
// count.
DI float partial_factor(float largest) {
  return as_float(min(max(as_bits(largest) & 0x7f800000u, 0x0d800000u), 0x7e800000u));
}

// What the packed query row of a partial that is held comes to together with later tokens of the same sequence, whose
// base-2 log-sum-exp is `lse`: how much the outputs of each weigh, and the log-sum-exp of both.
struct Joined {
  float both, sum, held, later;
  DI Joined(const u32* packed_row, float of_later) {
    const float before = as_float(packed_row[LSE]);
    both = fmaxf(before, of_later);
    const float base = both == minus_infinity() ? 0.f : both;
    const float x = pow2(before - base), y = pow2(of_later - base);
    sum = x + y;
    const float share = sum > 0.f ? inverse(sum) : 0.f;
    held = x * share, later = y * share;
  }
  DI float lse() const { return both + (sum > 0.f ? lg2(sum) : 0.f); }
};

// One partial out of those of `count` workers, from address `partials` on; this worker, the index-th of so many,
// combines its share. put(packed query row, at, x, y): two words of the partial.
template <class Put>
DI void combine_partials(const u8* partials, int count, int index, int combiners, int packed_rows, Put put) {
  for (int i = index * 32 * WORKER_WARPS + threadIdx.x % (32 * WORKER_WARPS); i < packed_rows * (DV / 4);
      i += combiners * 32 * WORKER_WARPS) {
    const int packed_row = i / (DV / 4), at = i % (DV / 4) * 2;
    auto partial = [&](int w) { return (const u32*)(partials + w * WORKER_BYTES) + packed_row * PARTIAL; };
    float top = minus_infinity(), sum = 0.f, factor = 0.f;
    uint2 about[WORKERS], x[WORKERS];  // all loads are on their way together
#pragma unroll
    for (int w = 0; w < WORKERS; w++) {
      about[w] = w < count ? *(const uint2*)(partial(w) + LSE) : make_uint2(as_bits(minus_infinity()), 0);
      x[w] = w < count ? *(const uint2*)(partial(w) + at) : make_uint2(0, 0);
      top = fmaxf(top, as_float(about[w].x)), factor = fmaxf(factor, as_float(about[w].y));
    }
    const float base = top == minus_infinity() ? 0.f : top, shrink = inverse_power(factor);
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WORKERS; w++) {
      const float weight = pow2(as_float(about[w].x) - base), y = weight * (as_float(about[w].y) * shrink);
      sum += weight, acc.x += y * low(x[w].x), acc.y += y * high(x[w].x), acc.z += y * low(x[w].y),
          acc.w += y * high(x[w].y);
    }
    const float r = sum > 0.f ? inverse(sum) : 0.f;
    put(packed_row, at, half2(acc.x * r, acc.y * r), half2(acc.z * r, acc.w * r));
    if (at == 0) put(packed_row, LSE, as_bits(top + (sum > 0.f ? lg2(sum) : 0.f)), as_bits(factor));
  }
}

// Where the partials of a sequence and kv head lie: one for each block in which the run of some worker ended in it, in
// the row of the first such worker, and one for the worker, if any, that went on to the next sequence, in row `workers
// + seq_head`.
struct Partials {
  int together, first, blocks, count, other;  // together: workers of a block
  DI Partials() {}
  DI Partials(int first, int count) : first(first), count(count) {}
  DI Partials(const Cut& cut, int begin, int tiles, int seq_head, int together = WORKERS)
      : together(together), first(0), blocks(0), count(0), other(cut.workers + seq_head) {
    if (tiles == 0) return;
    first = cut.worker_of(begin);
    const int last = cut.worker_of(begin + tiles - 1);
    const bool went_on = cut.begin(last + 1) > begin + tiles;
    blocks = last - went_on < first ? 0 : (last - went_on) / together - first / together + 1, count = blocks + went_on;
  }
  DI int row(int i) const {
    return INVARIANT ? first + i : i == blocks ? other : i == 0 ? first : (first / together + i) * together;
  }
};
