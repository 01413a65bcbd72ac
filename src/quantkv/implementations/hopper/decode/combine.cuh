// One result out of the partials of a sequence.
#pragma once
#include "arguments.cuh"
#include "exact.cuh"
#include "partials.cuh"
#include "query.cuh"


using ValueMatrix = MatrixRows<DV>;

// A product that may be added to something. Of an invariant cut a row is combined by one kernel or the other, as suits
// the batch, and both are to round it alike: a compiler that makes one operation of a product and a sum, which rounds
// once, may do so in one of them and not in the other. So none is left to it: products are these, or fmaf. (Of other
// cuts it may do what it likes.)
DI float times(float a, float b) { return INVARIANT ? __fmul_rn(a, b) : a * b; }

// What some partials of a row come to: outputs x of dimensions lane * E and on, of which those below DV are there and
// others 0, times `sum`; that and the maximum are base 2.
struct Combined {
  // Butterflies take powers of two. AT_ONCE: partials in flight.
  static constexpr int PAIRS = (DV + 63) / 64, E = 2 * (VALUE_MAP == HADAMARD && PAIRS == 3 ? 4 : PAIRS),
                       WIDTH = 32 * E, AT_ONCE = 32 / E;
  static_assert(AT_ONCE == PARTIALS_AT_ONCE, "the host counts other batches of partials");
  float top = minus_infinity(), sum = 0.f, x[E][1] = {};

  // The partials of one packed query row that are this combiner's, one of so many; all: of the segment.
  DI void add(const u32* all, const Partials& partials, int packed_rows, int packed_row, int combiner, int combiners) {
    const auto row = [&](int i) { return all + ((i64)partials.row(i) * packed_rows + packed_row) * PARTIAL; };
    // Most rows have few partials, and what is loaded in place of those that are not there takes as many instructions
    // as a partial does. Not where a matrix follows: one sequence of 2,048 tokens took as long with these loops as
    // without them.
    constexpr bool BY_COUNT = !INVARIANT && VALUE_MAP != MATRIX;
    if (BY_COUNT && AT_ONCE > 2 && partials.count <= 2 * combiners) add<2>(partials.count, combiner, combiners, row);
    else if (BY_COUNT && AT_ONCE > 4 && partials.count <= 4 * combiners)
      add<4>(partials.count, combiner, combiners, row);
    else add<AT_ONCE>(partials.count, combiner, combiners, row);
  }
  // row(i): where the i-th of them is.
  template <int AT_ONCE, class Row> DI void add(int count, int combiner, int combiners, Row row_of) {
    const int lane = threadIdx.x % 32;
    // a fixed order: AT_ONCE neighbours go to one combiner, the next to the next
    const int apart = INVARIANT ? 1 : combiners;
    for (int i0 = INVARIANT ? combiner * AT_ONCE : combiner; i0 < count; i0 += combiners * AT_ONCE) {
      float e[AT_ONCE], f[AT_ONCE], up = top;
      u32 y[AT_ONCE][E / 2];
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const bool any = i0 + k * apart < count;
        const u32* row = row_of(i0 + k * apart);
        e[k] = any ? as_float(row[LSE]) : minus_infinity(), f[k] = any ? as_float(row[FACTOR]) : 0.f;
#pragma unroll
        for (int d = 0; d < E / 2; d++)
          y[k][d] = any && (WIDTH == DV || lane * (E / 2) + d < DV / 2) ? row[lane * (E / 2) + d] : 0;
        up = fmaxf(up, e[k]);
      }
      if (up == minus_infinity()) continue;
      const float old = pow2(top - up);
      top = up, sum = times(sum, old);
#pragma unroll
      for (int d = 0; d < E; d++) x[d][0] = times(x[d][0], old);
#pragma unroll
      for (int k = 0; k < AT_ONCE; k++) {
        const float weight = pow2(e[k] - up);
        sum += weight;
#pragma unroll
        for (int d = 0; d < E; d += 2) {
          x[d][0] = fmaf(times(weight, f[k]), low(y[k][d / 2]), x[d][0]),
          x[d + 1][0] = fmaf(times(weight, f[k]), high(y[k][d / 2]), x[d + 1][0]);
        }
      }
    }
  }

  // As a row of floats: the outputs, the maximum and the sum.
  DI void put(float (&row)[WIDTH + 4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < E; d++) row[lane * E + d] = x[d][0];
    if (lane == 0) row[WIDTH] = top, row[WIDTH + 1] = sum;
  }
  // Behind it what another combiner has: the same, whichever kernel combines.
  DI void append(float other, float other_sum, const float* y) {  // y [E]
    if (other == minus_infinity()) return;
    const float up = fmaxf(top, other), old = pow2(top - up), weight = pow2(other - up);
    top = up, sum = fmaf(other_sum, weight, times(sum, old));
#pragma unroll
    for (int d = 0; d < E; d++) x[d][0] = fmaf(y[d], weight, times(x[d][0], old));
  }
  DI void append(const float (&row)[WIDTH + 4]) { append(row[WIDTH], row[WIDTH + 1], row + threadIdx.x % 32 * E); }
  // that have any of so many partials
  static DI int combiners_of(int count) { return min(COMBINE_WARPS, (count + AT_ONCE - 1) / AT_ONCE); }
  // All partials of one packed query row: what COMBINE_WARPS combiners would have, one after the other.
  DI void add_in_order(const u32* all, const Partials& partials, int packed_rows, int packed_row) {
#pragma unroll 1
    for (int w = 0; w < combiners_of(partials.count); w++) {
      Combined part;
      part.add(all, partials, packed_rows, packed_row, w, COMBINE_WARPS);
      float y[E];
#pragma unroll
      for (int d = 0; d < E; d++) y[d] = part.x[d][0];
      append(part.top, part.sum, y);
    }
  }

  // `count` of MOST rows of a packed query row, `step` apart: outputs times their sum, behind them the maximum and the
  // sum. Before any partial.
  template <int MOST> DI void take(const float (*rows)[WIDTH + 4], int count, int step) {
    const int lane = threadIdx.x % 32;
    float2 about[MOST];
#pragma unroll
    for (int w = 0; w < MOST; w++) {
      about[w] = w < count ? *(const float2*)(rows[w * step] + WIDTH) : make_float2(minus_infinity(), 0.f);
      top = fmaxf(top, about[w].x);
    }
#pragma unroll
    for (int w = 0; w < MOST; w++) {
      if (about[w].x == minus_infinity()) continue;
      const float weight = pow2(about[w].x - top);
      sum = fmaf(weight, about[w].y, sum);
#pragma unroll
      for (int d = 0; d < E; d++) x[d][0] = fmaf(weight, rows[w * step][lane * E + d], x[d][0]);
    }
  }

  // Into combiner 0: what the others, `combiners` with it, have of the same row. combined [COMBINERS * ROWS]: a row of
  // each, its maximum and its sum behind it.
  template <int COMBINERS, int ROWS>
  DI void across(float (*rows)[WIDTH + 4], int r, int combiner, int combiners = COMBINERS) {
    const int lane = threadIdx.x % 32;
    const auto combined = (float(*)[ROWS][WIDTH + 4])rows;
    put(combined[combiner][r]);
    __syncthreads();
    if (INVARIANT && combiner == 0) {
      *this = Combined();
      for (int w = 0; w < COMBINERS; w++) append(combined[w][r]);
    } else if (combiner == 0) {
      const float own = top;
#pragma unroll
      for (int w = 1; w < COMBINERS; w++)
        if (w < combiners) top = fmaxf(top, combined[w][r][WIDTH]);
      float weight = top == minus_infinity() ? 0.f : pow2(own - top);
      sum *= weight;
#pragma unroll
      for (int d = 0; d < E; d++) x[d][0] *= weight;
#pragma unroll
      for (int w = 1; w < COMBINERS; w++) {
        if (w >= combiners) break;
        weight = top == minus_infinity() ? 0.f : pow2(combined[w][r][WIDTH] - top);
        sum += weight * combined[w][r][WIDTH + 1];
#pragma unroll
        for (int d = 0; d < E; d++) x[d][0] += weight * combined[w][r][lane * E + d];
      }
    }
  }
};

// Of a sequence and kv head with a capacity of so many, where the cut is INVARIANT.
DI Partials own_partials(const Sequences& sequences, int s, int head, int capacity) {
  const int all = sequences.tiles(s);
  return Partials((head * sequences.count + s) * capacity, all ? min((int)Sequences::partials(all), capacity) : 0);
}

// Outputs of a row whose partials have been combined: with its sink, and under the values' map but where that is a
// matrix. Its lse is written. The result: by what the outputs of `plain`, where they are APART, are to be multiplied.
template <bool APART> DI float conclude(
    const AttendArguments& a, Combined& all, const Combined& plain, int query_head, i64 out_row, const u16* value_map) {
  constexpr int E = Combined::E;
  const int lane = threadIdx.x % 32;
  float (&x)[E][1] = all.x;
  const float top = APART ? fmaxf(all.top, plain.top) : all.top;
  const bool none = top == minus_infinity();  // no key was seen
  const float sink = sink_of(a, query_head), most = fmaxf(top, sink);
  const float best = most == minus_infinity() ? 0.f : most;
  const float weight = pow2(all.top - best), beside = APART ? pow2(plain.top - best) : 0.f;
  const float total =
      (APART ? fmaf(beside, plain.sum, times(weight, all.sum)) : times(weight, all.sum)) + pow2(sink - best);
  if (a.lse && lane == 0) a.lse[out_row] = (best + lg2(total)) * 0.6931471805599453f;
  const float gain = VALUE_MAP == HADAMARD ? a.value_gain : SCALED && VALUE_MAP == NO_MAP ? a.plain_gain : 1.f;
  const float share = none ? 0.f : times(gain, weight) / total;
#pragma unroll
  for (int d = 0; d < E; d++) x[d][0] = times(x[d][0], share);
  if constexpr (VALUE_MAP == HADAMARD) {
    butterfly<E>(x);
#pragma unroll
    for (int d = 0; d < E; d++) {
#pragma unroll
      for (int k = 1; k < VALUE_BLOCK / E; k <<= 1)
        x[d][0] = __shfl_xor_sync(~0u, x[d][0], k) + (lane & k ? -x[d][0] : x[d][0]);
      if (value_map && (Combined::WIDTH == DV || lane * E + d < DV))
        x[d][0] = VALUE_EVENED ? x[d][0] * as_float((u32)value_map[lane * E + d] << 16)
                               : as_float(__float_as_uint(x[d][0]) ^ (u32)value_map[lane * E + d] << 16);
    }
  }
  return none || !APART ? 0.f : times(SCALED ? a.plain_gain : 1.f, beside) / total;
}
// This lane's numbers of what is added to outputs of latents, as they are stored; nothing: zeros.
struct MeanOfOutputs {
  u32 pairs[LATENTS ? Combined::E / 2 : 1] = {};
  DI MeanOfOutputs(const AttendArguments& a) {
    if (LATENTS && a.mean)
#pragma unroll
      for (int i = 0; i < Combined::E / 2; i += 4) {
        const uint4 four = *(const uint4*)(a.mean + threadIdx.x % 32 * Combined::E + 2 * i);
        pairs[i] = four.x, pairs[i + 1] = four.y, pairs[i + 2] = four.z, pairs[i + 3] = four.w;
      }
  }
  DI void add_to(Combined& all) const {
    if (LATENTS)
#pragma unroll
      for (int i = 0; i < Combined::E / 2; i++)
        all.x[2 * i][0] += query_number(pairs[i]), all.x[2 * i + 1][0] += query_number(pairs[i] >> 16);
  }
};
DI void write_outputs(const AttendArguments& a, const Combined& all, i64 out_row) {
#pragma unroll
  for (int d = 0; d < Combined::E; d += 2) {
    const int at = threadIdx.x % 32 * Combined::E + d;
    if (Combined::WIDTH == DV || at < DV)
      *(u32*)(a.out + out_row * DV + at) = query_type(all.x[d][0]) | (u32)query_type(all.x[d + 1][0]) << 16;
  }
}

// Combines the partials of N packed query rows of S sequences (COMBINERS warps for each; of one row, fewer where
// COMBINERS_VARY), from blockIdx.x * S on, and kv head blockIdx.y, and where packed query rows are many (IN_TURNS)
// those gridDim.z * N further, and so on: what is counted of a (sequence, kv head) is counted once. Adds the sinks,
// applies the values' map: the diagonal behind Hadamard matrices (null: no sign) or the rows of any other, times
// a.value_gain. Segments whose values have no map beside those that share one are combined apart, and added behind it;
// so are exact tokens, which are attended to here.
template <int N, int S, int COMBINERS>
DI void combine(const AttendArguments& a, const Sequences& sequences, const u16* value_map) {
  constexpr int E = Combined::E, WIDTH = Combined::WIDTH, OTHERS = SEGMENTS > 1 ? SEGMENTS - 1 : 1;
  constexpr bool APART = EXACT ? VALUE_MAP != NO_MAP : MAPPED_SEGMENTS < SEGMENTS;
  constexpr bool IN_TURNS = COMBINERS == 1 && S == 1 && VALUE_MAP != MATRIX && !EXACT;
  constexpr int ATTENDING = N * COMBINERS;  // warps of a sequence, between which exact tokens are divided
  // Rows, their maxima and sums: of exact tokens, a warp's after the other; of combiners; what is added behind a
  // matrix.
  __shared__ __align__(16) float combined[(EXACT ? ATTENDING : COMBINERS) * N * S][WIDTH + 4];
  // combined rows as fp16 pairs, and what that rounding left
  __shared__ __align__(16) u32 parts[2][N * S][WIDTH / 2 + 4];
  constexpr bool VARY = COMBINERS_VARY && N * S == 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, combiners = VARY ? blockDim.x / 32 : COMBINERS,
            r = VARY ? 0 : warp / COMBINERS, combiner = VARY ? warp : warp % COMBINERS, head = blockIdx.y;
  int packed_row0 = blockIdx.z * N;
  auto sequence = [&](int r) { return (int)blockIdx.x * S + r / N; };
  auto packed_row = [&](int r) { return packed_row0 + r % N; };
  auto there = [&](int r) {
    return sequence(r) < sequences.count && packed_row(r) < sequences.queries(sequence(r)) * GROUP;
  };
  auto query_head = [&](int r) { return head * GROUP + packed_row(r) % GROUP; };
  auto out_row = [&](int r) {
    return (i64)(sequences.first_query(sequence(r)) + packed_row(r) / GROUP) * KV_HEADS * GROUP + query_head(r);
  };
  const int s = sequence(r);
  bool mine = there(r);
  [[maybe_unused]] Exact<EXACT ? N : 0> exact(a, s, head, blockIdx.z * N, warp % ATTENDING);
  const auto partials_of = [&](const Sequences& sequences, int resident, int together, int most) {
    if (INVARIANT) return own_partials(sequences, s, head, most);
    int start;
    const int line = sequences.total_tiles(s, start);
    return Partials(
        Cut(line * KV_HEADS, resident), head * line + start, sequences.tiles(s), head * sequences.count + s, together);
  };
  const Partials partials = partials_of(sequences, a.resident, WORKERS, a.partial_slots);
  Partials others[OTHERS];
  if constexpr (SEGMENTS > 1) {
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
      others[i] = partials_of(sequences_of(a, a.other_starts[i], a.other_ranges[i]), a.other_resident[i],
          a.other_workers[i], a.other_partial_slots[i]);
    }
  }
  Combined all, plain;
  float (&x)[E][1] = all.x;
  if constexpr (EXACT > 0) {
    float(*rows)[WIDTH + 4] = combined + warp / ATTENDING * ATTENDING * N;
    const int busy = min(exact.tiles(), ATTENDING);
    exact.attend(ATTENDING);
    if (warp % ATTENDING < busy) exact.write(rows + warp % ATTENDING * N);
    __syncthreads();
    if (combiner == 0) (APART ? plain : all).template take<ATTENDING>(rows + r % N, busy, N);
    if (COMBINERS > 1 || VALUE_MAP == MATRIX) __syncthreads();
  }
  ValueMatrix map_rows;
  if (VALUE_MAP == MATRIX) map_rows = ValueMatrix(value_map, warp % (DV / 16));
  const MeanOfOutputs mean(a);
  wait_for_previous_kernel();  // all that was read so far is older than the decode kernels
  const auto add = [&](Combined& to, const u32* all, const Partials& partials) {
    if (INVARIANT && COMBINERS == 1) to.add_in_order(all, partials, a.all_packed_rows, packed_row(r));
    else to.add(all, partials, a.all_packed_rows, packed_row(r), combiner, combiners);
  };
  while (true) {
    if (mine) add(all, a.partials, partials);
    if constexpr (SEGMENTS > 1) {
#pragma unroll
      for (int i = 0; i < OTHERS; i++) {
        if (mine) add(i + 1 < MAPPED_SEGMENTS ? all : plain, a.other_partials[i], others[i]);
      }
    }
    if constexpr (COMBINERS > 1) {
      all.template across<COMBINERS, N * S>(combined, r, combiner, combiners);
      if constexpr (APART && !EXACT) __syncthreads(), plain.template across<COMBINERS, N * S>(combined, r, combiner);
    }
    if (mine && combiner == 0) {
      const float beside = conclude<APART>(a, all, plain, query_head(r), out_row(r), value_map);
      if constexpr (APART) {
#pragma unroll
        for (int d = 0; d < E; d++) {
          const float y = times(plain.x[d][0], beside);
          if (VALUE_MAP == MATRIX) combined[r][lane * E + d] = y; else x[d][0] += y;
        }
      }
      mean.add_to(all);
      if constexpr (VALUE_MAP != MATRIX) write_outputs(a, all, out_row(r));
      else
#pragma unroll
        for (int d = 0; d < E; d += 2) {
          const int at = lane * E + d;
          const u32 h = half2(x[d][0], x[d + 1][0]);
          parts[0][r][at / 2] = h, parts[1][r][at / 2] = half2(x[d][0] - low(h), x[d + 1][0] - high(h));
        }
    }
    if (!IN_TURNS || (packed_row0 += gridDim.z * N) >= a.all_packed_rows) break;
    mine = there(r), all = plain = Combined();
  }
  if constexpr (VALUE_MAP == MATRIX) {
    __syncthreads();
    const int g = lane / 4, c = lane % 4;
    for (int i = warp; i < DV / 16 * ((N * S + 7) / 8); i += N * S * COMBINERS) {
      const int t = i % (DV / 16), r0 = i / (DV / 16) * 8;
      float y[4] = {};
      if (t != warp % (DV / 16)) map_rows = ValueMatrix(value_map, t);
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 b[4 * ValueMatrix::PARTS];
#pragma unroll
        for (int m = 0; m < ValueMatrix::PARTS; m++) {
          *(uint4*)(b + 4 * m) =
              r0 + g < N * S ? *(const uint4*)&parts[part][r0 + g][16 * m + 4 * c] : make_uint4(0, 0, 0, 0);
        }
        map_rows.multiply(y, b);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int to = r0 + 2 * c + k % 2;
        const int d = 16 * t + g + k / 2 * 8;
        if (to < N * S && there(to))
          a.out[out_row(to) * DV + d] = query_type(times(y[k], a.value_gain) + (APART ? combined[to][d] : 0.f));
      }
    }
  }
}
