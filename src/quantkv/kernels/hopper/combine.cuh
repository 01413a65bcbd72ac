// One result out of the partials of a sequence.
#include "attend.cuh"

// Merges the partials of N columns (8 / N warps for each) of sequence blockIdx.x and kv head blockIdx.y, adds the sinks,
// applies the values' map.
template <int N, int AT_ONCE>
DI void combine(const float* partial, const float* partial_lse, const Batch& batch, const float* sinks, const u16* value_map,
                float map_gain, u16* out, float* lse, int resident, int all_columns) {
  constexpr int MERGERS = 8 / N, VECTORS = (D + 127) / 128;
  __shared__ __align__(16) float rows[8][D];
  __shared__ __align__(16) u32 parts[2][N][D / 2 + 4];  // merged rows as fp16 pairs, and what that rounding left
  __shared__ float tops[8], sums[8];
  const int s = blockIdx.x, head = blockIdx.y, column0 = blockIdx.z * N, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int columns = min(N, batch.queries(s) * GROUP - column0), tiles = batch.tiles(s), r = warp / MERGERS;
  int start;
  const Cut cut(batch.total_tiles(s, start), resident);
  const int first = tiles ? cut.worker_of(start) : 0, last = tiles && r < columns ? cut.worker_of(start + tiles - 1) : -1;
  float top = minus_infinity(), sum = 0.f;
  float4 acc[VECTORS] = {};
  wait_for_previous_kernel();  // all that was read so far is older than the decode kernel
  if (columns <= 0) return;
  for (int w0 = first + warp % MERGERS; w0 <= last; w0 += MERGERS * AT_ONCE) {
    float e[AT_ONCE], up = top;
    float4 x[AT_ONCE][VECTORS];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int w = w0 + k * MERGERS;
      const i64 row = ((i64)(w == first ? cut.workers + s : w) * KV_HEADS + head) * all_columns + column0 + r;
      e[k] = w <= last ? partial_lse[row] : minus_infinity();
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        const int d = lane * 4 + 128 * i;
        x[k][i] = w <= last && d < D ? *(const float4*)(partial + row * D + d) : make_float4(0.f, 0.f, 0.f, 0.f);
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
  if (r < columns) {
    const int w0 = r * MERGERS;
    float best = minus_infinity(), total = 0.f, weight[MERGERS];
#pragma unroll
    for (int w = 0; w < MERGERS; w++) best = fmaxf(best, tops[w0 + w]);
    const bool none = best == minus_infinity();  // no key was seen
    const float sink = sinks ? sinks[query_head(r)] * 1.4426950408889634f : minus_infinity();
    best = none ? 0.f : fmaxf(best, sink);
#pragma unroll
    for (int w = 0; w < MERGERS; w++) weight[w] = pow2(tops[w0 + w] - best), total += weight[w] * sums[w0 + w];
    total += pow2(sink - best);
    if (lse && warp == w0 && lane == 0) lse[out_row(r)] = none ? minus_infinity() : (best + lg2(total)) * 0.6931471805599453f;
    const float share = none ? 0.f : 1.f / total;
    for (int d = 2 * (lane + warp % MERGERS * 32); d < D; d += 64 * MERGERS) {
      float x = 0.f, y = 0.f;
#pragma unroll
      for (int w = 0; w < MERGERS; w++) x += weight[w] * rows[w0 + w][d], y += weight[w] * rows[w0 + w][d + 1];
      x *= share, y *= share;
      if (value_map) {
        const u32 h = half2(x, y);
        parts[0][r][d / 2] = h, parts[1][r][d / 2] = half2(x - low(h), y - high(h));
      } else {
        *(u32*)(out + out_row(r) * D + d) = query_type(x) | (u32)query_type(y) << 16;
      }
    }
  }
  if (!value_map) return;
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
