// Rows -> page records of trellis codes, for K, V or both in one launch, written for sm_90.
//
// A block writes 8 tokens of one kv head: one warp maps the rows (mapped.cuh), then each of 8 finds the codes of one by
// the Viterbi algorithm.
//
// Compile-time, from hopper.py: what write.cu has, and HESSIAN: whether errors cost by a Hessian;
// HOST_HESSIAN_BYTES, of a head.
#include "arguments.cuh"
#include "viterbi_hessian.cuh"

static_assert(sizeof(RoundArguments) == ARGUMENT_BYTES, "Python fills in another struct");
constexpr float WIDE = HESSIAN ? CODEC::WIDE : 1.f;
static_assert(WARPS == ROWS, "a warp a row");
DI float sum_over_warp(float x) { for (int k = 1; k < 32; k <<= 1) x += __shfl_xor_sync(~0u, x, k); return x; }

// By the first warp, four lanes a row.
template <bool MAPPED, bool EVENED, bool SCALED, bool SHIFTED, bool SIGNED>
DI void map_rows(TrellisRows& s, const RowSource& side, float factor, const KeyMeans& means, int token, bool given) {
  Row<!MAPPED && !SCALED> row = {};
  const int g = threadIdx.x / 4, c = threadIdx.x % 4;
  const bool alone = load_row<MAPPED, EVENED, false, SCALED, SHIFTED, SIGNED>(row, side, factor, means, token, given);
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < E; e++) squares += row.x[e] * row.x[e];
  const float size = at_least(__fsqrt_rn(over_lanes(squares, [](float a, float b) { return a + b; }) / D), TINY) * WIDE,
              unit = inverse(size);
#pragma unroll
  for (int e = 0; e < E; e++) s.rows[g][4 * (e - e % CHUNK) + CHUNK * c + e % CHUNK] = row.x[e] * unit;
  if (c == 0) s.sizes[g] = size, s.alone[g] = alone;
}

// Grid (tokens / 8 for each of SIDES, kv heads), K and V in turns.
template <bool> struct Scratch { Viterbi plain[2 * ROWS]; };
template <> struct Scratch<true> {
  HessianRows rows;
  HessianViterbi viterbi_hessian[ROWS];
};
struct Block {
  TrellisRows rows;
  Scratch<HESSIAN> scratch;
};
static_assert(sizeof(Block) <= SHARED_BYTES, "shared memory is larger than Python takes");

DI void encode_rows(TrellisRows& s, Scratch<false>& scratch, const u8*) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = lane / STATES;
  const Branches branches(s.pairs);
#pragma unroll 1
  for (int chain = half; chain < CHAINS + half; chain += 2) {  // of an odd number, the other half does the last one too
    const int mine = min(chain, CHAINS - 1);
    const uint4 found = scratch.plain[threadIdx.x / STATES].search(s.rows[warp] + CHAIN * mine, branches);
    if (lane % STATES == 0) ((uint4*)s.words[warp])[mine] = found;
  }
}
DI void encode_rows(TrellisRows& s, Scratch<true>& scratch, const u8* hessian) {
  encode_rows(s, scratch.rows, scratch.viterbi_hessian[threadIdx.x / 32], hessian);
}
DI const float* products(const TrellisRows& s, const Scratch<false>&, int row) { return s.rows[row]; }
DI const float* products(const TrellisRows&, const Scratch<true>& scratch, int row) {
  return scratch.rows.products[row];
}

// Grid (tokens / 8 for each of SIDES, kv heads), K and V in turns.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    trellis_kernel(const __grid_constant__ RoundArguments arguments) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const WriteArguments& a = arguments.rows;
  Block& block = *(Block*)shared;
  TrellisRows& s = block.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x / (SIDES == 3 ? 2 : 1) * ROWS;
  const bool is_key = SIDES == 3 ? blockIdx.x % 2 == 0 : SIDES == 1;
  const i64 head = blockIdx.y;
  for (int e = threadIdx.x; e < STATES * STATES; e += 32 * WARPS) s.pairs[e] = CODEC::PAIRS[e];
  if (warp == 0) {
    const int token = first + lane / 4;
    const RowSource side = source_of(a, is_key, token, head);
    const float* table = a.key_mean + head * a.key_mean_head;
    const KeyMeans means{table, (const POSITION*)a.positions, a.key_mean_bucket, a.buckets};
    if (SIDES == 1 || ALIKE || is_key)
      map_rows<KEY_FACTOR != 0.f, KEY_EVENED, KEY_SCALED, KEY_SHIFTED, KEY_SIGNED>(
          s, side, KEY_FACTOR, means, token, token < a.tokens);
    else
      map_rows<VALUE_FACTOR != 0.f, VALUE_EVENED, VALUE_SCALED, false, false>(
          s, side, VALUE_FACTOR, means, token, token < a.tokens);
  }
  __syncthreads();
  encode_rows(s, block.scratch,
      is_key ? arguments.key_feedback + head * arguments.key_head
             : arguments.value_feedback + head * arguments.value_head);
  __syncwarp();
  float itself = 0.f, dot = 0.f;
  for (int at = lane; at < D / 4; at += 32) {
    const float4 y = values_of(s.pairs, s.words[warp], at), x = ((const float4*)s.rows[warp])[at];
    const float4 z = ((const float4*)products(s, block.scratch, warp))[at];
    itself += x.x * z.x + x.y * z.y + (x.z * z.z + x.w * z.w), dot += z.x * y.x + z.y * y.y + (z.z * y.z + z.w * y.w);
  }
  itself = sum_over_warp(itself), dot = sum_over_warp(dot);
  const float ratio = itself / at_least(dot, TINY), unbiased = ratio > 2.f ? 2.f : at_least(ratio, 0.5f);
  const float scale = at_least(saturate(s.sizes[warp] * unbiased, LARGEST_HALF), SMALLEST_HALF);
  const i64 slot = first + warp < a.tokens ? ((const SLOT*)a.slots)[first + warp] : -1;
  if (slot < 0) return;
  const unsigned long long place = slot;  // unsigned: a shift and a mask
  u8* record = a.pages + head * a.head_stride + (i64)(place / BLOCK_SIZE) * a.page_stride;
  const int at = place % BLOCK_SIZE, row_bytes = D * CODEC::BITS / 8;
  if (lane < CHAINS)
    ((uint4*)(record + (is_key ? 0 : PAGE_V) + at * row_bytes))[lane] = ((const uint4*)s.words[warp])[lane];
  if (lane == 0) *(u16*)(record + (is_key ? PAGE_KM : PAGE_VM) + at * 2) = half1(s.alone[warp] ? -scale : scale);
}
