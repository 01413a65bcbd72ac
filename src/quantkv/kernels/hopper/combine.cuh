// One result out of the partials of a sequence.
#include "attend.cuh"

// One partial out of the pieces of `count` warps, from address `pieces` on; this warp, the index-th of them, merges its share.
DI void merge_pieces(const u8* pieces, int count, int index, int columns, float* to) {
  for (int i = index * 32 + threadIdx.x % 32; i < columns * (D / 4); i += count * 32) {
    const int column = i / (D / 4), d = i % (D / 4) * 4;
    auto piece = [&](int w) { return (const float*)(pieces + w * WARP_BYTES) + column * PIECE; };
    float top = minus_infinity(), sum = 0.f;
    for (int w = 0; w < count; w++) top = fmaxf(top, piece(w)[D]);
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int w = 0; w < count && top != minus_infinity(); w++) {
      const float weight = pow2(piece(w)[D] - top);
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

// Merges the partials of N columns (8 / N warps for each) of sequence blockIdx.x and kv head blockIdx.y, adds the sinks,
// applies the values' map: the signs of a Hadamard matrix (null: all positive) or the tiles of any other, times map_gain.
template <int N, int AT_ONCE>
DI void combine(const float* partial, const Batch& batch, const float* sinks, const u16* value_map, float map_gain, u16* out,
                float* lse, int resident, int all_columns) {
  constexpr int MERGERS = 8 / N, VECTORS = (D + 127) / 128;
  __shared__ __align__(16) float rows[8][D];
  __shared__ __align__(16) u32 parts[2][N][D / 2 + 4];  // merged rows as fp16 pairs, and what that rounding left
  __shared__ float tops[8], sums[8];
  const int s = blockIdx.x, head = blockIdx.y, column0 = blockIdx.z * N, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int columns = min(N, batch.queries(s) * GROUP - column0), r = warp / MERGERS;
  int start;
  const int line = batch.total_tiles(s, start);
  const Partials partials(Cut(line * KV_HEADS, resident), head * line + start, batch.tiles(s), head * batch.sequences + s);
  float top = minus_infinity(), sum = 0.f;
  float4 acc[VECTORS] = {};
  wait_for_previous_kernel();  // all that was read so far is older than the decode kernel
  if (columns <= 0) return;
  for (int i0 = warp % MERGERS; i0 < partials.count && r < columns; i0 += MERGERS * AT_ONCE) {
    float e[AT_ONCE], up = top;
    float4 x[AT_ONCE][VECTORS];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const bool there = i0 + k * MERGERS < partials.count;
      const float* row = partial + ((i64)partials.row(i0 + k * MERGERS) * all_columns + column0 + r) * PIECE;
      e[k] = there ? row[D] : minus_infinity();
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        const int d = lane * 4 + 128 * i;
        x[k][i] = there && d < D ? *(const float4*)(row + d) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) up = fmaxf(up, e[k]);
    if (up == minus_infinity()) continue;
    const float old = pow2(top - up);
    top = up, sum *= old;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) acc[i].x *= old, acc[i].y *= old, acc[i].z *= old, acc[i].w *= old;
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const float weight = pow2(e[k] - up);
      sum += weight;
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        acc[i].x += weight * x[k][i].x, acc[i].y += weight * x[k][i].y, acc[i].z += weight * x[k][i].z, acc[i].w += weight * x[k][i].w;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
    if (lane * 4 + 128 * i < D) *(float4*)&rows[warp][lane * 4 + 128 * i] = acc[i];
  if (lane == 0) tops[warp] = top, sums[warp] = sum;
  __syncthreads();
  auto query_head = [&](int r) { return head * GROUP + (column0 + r) % GROUP; };
  auto out_row = [&](int r) { return (i64)(batch.first_query(s) + (column0 + r) / GROUP) * KV_HEADS * GROUP + query_head(r); };
  if (r < columns && warp % MERGERS == 0) {
    constexpr int E = D / 32;  // this lane's dimensions, from lane * E on
    float best = minus_infinity(), total = 0.f, weight[MERGERS], x[E][1] = {};
#pragma unroll
    for (int w = 0; w < MERGERS; w++) best = fmaxf(best, tops[warp + w]);
    const bool none = best == minus_infinity();  // no key was seen
    const float sink = sinks ? sinks[query_head(r)] * 1.4426950408889634f : minus_infinity();
    best = none ? 0.f : fmaxf(best, sink);
#pragma unroll
    for (int w = 0; w < MERGERS; w++) weight[w] = pow2(tops[warp + w] - best), total += weight[w] * sums[warp + w];
    total += pow2(sink - best);
    if (lse && lane == 0) lse[out_row(r)] = none ? minus_infinity() : (best + lg2(total)) * 0.6931471805599453f;
    const float share = none ? 0.f : (VALUE_MAP == HADAMARD ? map_gain : 1.f) / total;
#pragma unroll
    for (int e = 0; e < E; e++) {
#pragma unroll
      for (int w = 0; w < MERGERS; w++) x[e][0] += weight[w] * rows[warp + w][lane * E + e];
      x[e][0] *= share;
    }
    if constexpr (VALUE_MAP == HADAMARD) {
      butterfly(x);
#pragma unroll
      for (int e = 0; e < E; e++) {
#pragma unroll
        for (int k = 1; k < 32; k <<= 1) x[e][0] = __shfl_xor_sync(~0u, x[e][0], k) + (lane & k ? -x[e][0] : x[e][0]);
        if (value_map) x[e][0] = as_float(__float_as_uint(x[e][0]) ^ (u32)value_map[lane * E + e] << 16);
      }
    }
#pragma unroll
    for (int e = 0; e < E; e += 2) {
      const int d = lane * E + e;
      if constexpr (VALUE_MAP == MATRIX) {
        const u32 h = half2(x[e][0], x[e + 1][0]);
        parts[0][r][d / 2] = h, parts[1][r][d / 2] = half2(x[e][0] - low(h), x[e + 1][0] - high(h));
      } else {
        *(u32*)(out + out_row(r) * D + d) = query_type(x[e][0]) | (u32)query_type(x[e + 1][0]) << 16;
      }
    }
  }
  if (VALUE_MAP != MATRIX) return;
  __syncthreads();
  const int g = lane / 4, c = lane % 4;
  for (int t = warp; t < D / 16; t += 8) {
    float y[4] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
      u32 b[D / 8];
#pragma unroll
      for (int m = 0; m < D / 32; m++) *(uint4*)(b + 4 * m) = g < columns ? *(const uint4*)&parts[part][g][16 * m + 4 * c] : make_uint4(0, 0, 0, 0);
      multiply(y, value_map, t, b);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (2 * c + i % 2 < columns) out[out_row(2 * c + i % 2) * D + 16 * t + g + i / 2 * 8] = query_type(y[i] * map_gain);
  }
}
