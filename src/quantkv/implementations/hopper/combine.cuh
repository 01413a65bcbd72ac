// One result out of the partials of a sequence.
#include "attend.cuh"

// One partial out of the pieces of `count` warps, from address `pieces` on; this warp, the index-th of them, merges its share.
DI void merge_pieces(const u8* pieces, int count, int index, int columns, float* to) {
  for (int i = index * 32 + threadIdx.x % 32; i < columns * (D / 4); i += count * 32) {
    const int column = i / (D / 4), d = i % (D / 4) * 4;
    auto piece = [&](int w) { return (const float*)(pieces + w * WARP_BYTES) + column * PIECE; };
    float top = minus_infinity(), sum = 0.f;
#pragma unroll 4
    for (int w = 0; w < count; w++) top = fmaxf(top, piece(w)[D]);
    const float base = top == minus_infinity() ? 0.f : top;
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int w = 0; w < count; w++) {
      const float weight = pow2(piece(w)[D] - base);
      const float4 x = *(const float4*)(piece(w) + d);
      sum += weight, acc.x += weight * x.x, acc.y += weight * x.y, acc.z += weight * x.z, acc.w += weight * x.w;
    }
    const float r = sum > 0.f ? inverse(sum) : 0.f;
    *(float4*)(to + column * PIECE + d) = make_float4(acc.x * r, acc.y * r, acc.z * r, acc.w * r);
    if (d == 0) to[column * PIECE + D] = top + (sum > 0.f ? lg2(sum) : 0.f);
  }
}

// Where the partials of a sequence and kv head lie: one for each block in which the run of some warp ended in it, in the row of
// the first such warp, and one for the warp, if any, that went on to the next sequence, in row `workers + pair`.
struct Partials {
  int first, blocks, count, other;
  DI Partials(const Cut& cut, int begin, int tiles, int pair) : first(0), blocks(0), count(0), other(cut.workers + pair) {
    if (tiles == 0) return;
    first = cut.worker_of(begin);
    const int last = cut.worker_of(begin + tiles - 1);
    const bool went_on = cut.begin(last + 1) > begin + tiles;
    blocks = last - went_on < first ? 0 : (last - went_on) / WARPS - first / WARPS + 1, count = blocks + went_on;
  }
  DI int row(int i) const { return i == blocks ? other : i == 0 ? first : (first / WARPS + i) * WARPS; }
};

constexpr int SEQUENCES = VALUE_MAP == MATRIX ? 4 : 1;  // of a block of combine_kernel, which share a matrix

// Merges the partials of N columns of S sequences (MERGERS warps for each), from blockIdx.x * S on, and kv head blockIdx.y, adds
// the sinks, applies the values' map: the signs of a Hadamard matrix (null: all positive) or the rows of any other, times map_gain.
template <int N, int S, int MERGERS>
DI void combine(const float* partial, const Batch& batch, const float* sinks, const u16* value_map, float map_gain, u16* out,
                float* lse, int resident, int all_columns) {
  constexpr int E = D / 32, AT_ONCE = 32 / E;                     // a lane has dimensions lane * E and on; partials in flight
  __shared__ __align__(16) float merged[MERGERS][N * S][D + 4];  // rows, their maxima and sums
  __shared__ __align__(16) u32 parts[2][N * S][D / 2 + 4];       // merged rows as fp16 pairs, and what that rounding left
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = warp / MERGERS, merger = warp % MERGERS, head = blockIdx.y;
  auto sequence = [&](int r) { return (int)blockIdx.x * S + r / N; };
  auto column = [&](int r) { return (int)blockIdx.z * N + r % N; };
  auto there = [&](int r) { return sequence(r) < batch.sequences && column(r) < batch.queries(sequence(r)) * GROUP; };
  auto query_head = [&](int r) { return head * GROUP + column(r) % GROUP; };
  auto out_row = [&](int r) { return (i64)(batch.first_query(sequence(r)) + column(r) / GROUP) * KV_HEADS * GROUP + query_head(r); };
  const int s = sequence(r);
  const bool mine = there(r);
  int start;
  const int line = batch.total_tiles(s, start);
  const Partials partials(Cut(line * KV_HEADS, resident), head * line + start, batch.tiles(s), head * batch.sequences + s);
  Rows map_rows;
  if (VALUE_MAP == MATRIX) map_rows = Rows(value_map, warp % (D / 16));
  float top = minus_infinity(), sum = 0.f, x[E][1] = {};
  wait_for_previous_kernel();  // all that was read so far is older than the decode kernel
  for (int i0 = merger; i0 < partials.count && mine; i0 += MERGERS * AT_ONCE) {
    float e[AT_ONCE], y[AT_ONCE][E], up = top;
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const bool any = i0 + k * MERGERS < partials.count;
      const float* row = partial + ((i64)partials.row(i0 + k * MERGERS) * all_columns + column(r)) * PIECE;
      e[k] = any ? row[D] : minus_infinity();
#pragma unroll
      for (int d = 0; d < E; d += 2) {
        const float2 pair = any ? *(const float2*)(row + lane * E + d) : make_float2(0.f, 0.f);
        y[k][d] = pair.x, y[k][d + 1] = pair.y;
      }
      up = fmaxf(up, e[k]);
    }
    if (up == minus_infinity()) continue;
    const float old = pow2(top - up);
    top = up, sum *= old;
#pragma unroll
    for (int d = 0; d < E; d++) x[d][0] *= old;
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const float weight = pow2(e[k] - up);
      sum += weight;
#pragma unroll
      for (int d = 0; d < E; d++) x[d][0] += weight * y[k][d];
    }
  }
  if constexpr (MERGERS > 1) {
#pragma unroll
    for (int d = 0; d < E; d++) merged[merger][r][lane * E + d] = x[d][0];
    if (lane == 0) merged[merger][r][D] = top, merged[merger][r][D + 1] = sum;
    __syncthreads();
    if (merger == 0) {
      const float own = top;
#pragma unroll
      for (int w = 1; w < MERGERS; w++) top = fmaxf(top, merged[w][r][D]);
      float weight = top == minus_infinity() ? 0.f : pow2(own - top);
      sum *= weight;
#pragma unroll
      for (int d = 0; d < E; d++) x[d][0] *= weight;
#pragma unroll
      for (int w = 1; w < MERGERS; w++) {
        weight = top == minus_infinity() ? 0.f : pow2(merged[w][r][D] - top);
        sum += weight * merged[w][r][D + 1];
#pragma unroll
        for (int d = 0; d < E; d++) x[d][0] += weight * merged[w][r][lane * E + d];
      }
    }
  }
  if (mine && merger == 0) {
    const bool none = top == minus_infinity();  // no key was seen
    const float sink = sinks ? sinks[query_head(r)] * 1.4426950408889634f : minus_infinity(), best = none ? 0.f : fmaxf(top, sink);
    const float weight = pow2(top - best), total = weight * sum + pow2(sink - best);
    if (lse && lane == 0) lse[out_row(r)] = none ? minus_infinity() : (best + lg2(total)) * 0.6931471805599453f;
    const float share = none ? 0.f : (VALUE_MAP == HADAMARD ? map_gain : 1.f) * weight / total;
#pragma unroll
    for (int d = 0; d < E; d++) x[d][0] *= share;
    if constexpr (VALUE_MAP == HADAMARD) {
      butterfly(x);
#pragma unroll
      for (int d = 0; d < E; d++) {
#pragma unroll
        for (int k = 1; k < 32; k <<= 1) x[d][0] = __shfl_xor_sync(~0u, x[d][0], k) + (lane & k ? -x[d][0] : x[d][0]);
        if (value_map) x[d][0] = as_float(__float_as_uint(x[d][0]) ^ (u32)value_map[lane * E + d] << 16);
      }
    }
#pragma unroll
    for (int d = 0; d < E; d += 2) {
      const int at = lane * E + d;
      if constexpr (VALUE_MAP == MATRIX) {
        const u32 h = half2(x[d][0], x[d + 1][0]);
        parts[0][r][at / 2] = h, parts[1][r][at / 2] = half2(x[d][0] - low(h), x[d + 1][0] - high(h));
      } else {
        *(u32*)(out + out_row(r) * D + at) = query_type(x[d][0]) | (u32)query_type(x[d + 1][0]) << 16;
      }
    }
  }
  if constexpr (VALUE_MAP == MATRIX) {
    __syncthreads();
    const int g = lane / 4, c = lane % 4;
    for (int i = warp; i < D / 16 * ((N * S + 7) / 8); i += N * S * MERGERS) {
      const int t = i % (D / 16), r0 = i / (D / 16) * 8;
      float y[4] = {};
      if (t != warp % (D / 16)) map_rows = Rows(value_map, t);
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 b[D / 8];
#pragma unroll
        for (int m = 0; m < D / 32; m++) {
          *(uint4*)(b + 4 * m) = r0 + g < N * S ? *(const uint4*)&parts[part][r0 + g][16 * m + 4 * c] : make_uint4(0, 0, 0, 0);
        }
        map_rows.multiply(y, b);
      }
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int to = r0 + 2 * c + k % 2;
        if (to < N * S && there(to)) out[out_row(to) * D + 16 * t + g + k / 2 * 8] = query_type(y[k] * map_gain);
      }
    }
  }
}
