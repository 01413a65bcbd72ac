// Rows -> page records, rounded by a Hessian, for K, V or both in one launch, written for sm_90. What the codes are:
// rounded.cuh.
//
// A warp writes 8 tokens of one kv head: four lanes map a row (mapped.cuh), four round it, each at another candidate
// scale, and the one whose result has the largest cosine to the row, by the Hessian, is stored, with the scale that
// makes it unbiased.
//
// Compile-time, from round.py: what write.cu has, and KEY_LEVEL KEY_PLACE KEY_REFINE, the same of VALUE (of the sides
// that are rounded), SAME_LEVELS (of both), RESIDENT (blocks of an SM that registers must suffice for),
// HOST_FEEDBACK_BYTES HOST_ROUNDING_BYTES.
#include "arguments.cuh"
#include "rounded.cuh"

static_assert(sizeof(RoundArguments) == ARGUMENT_BYTES, "Python fills in another struct");
constexpr float CANDIDATE[4] = {CANDIDATES};

// Where a token's row goes.
struct Target {
  u8 *codes, *meta;  // null: nowhere
};
DI Target target_of(
    const RowSource& side, int row_bytes, const SLOT* slots, bool given, int token, u8* records, i64 page_stride) {
  const i64 slot = given ? slots[token] : -1;
  if (slot < 0) return {};
  const unsigned long long place = slot;  // unsigned: a shift and a mask
  u8* record = records + (i64)(place / BLOCK_SIZE) * page_stride;
  return {record + side.codes + place % BLOCK_SIZE * row_bytes, record + side.meta + place % BLOCK_SIZE * 2};
}

template <int SIDE> DI void round_rows(const float (&x)[E], bool alone, u32 feedback, u32 levels, const Target& to) {
  constexpr int B = Odd<SIDE>::BITS;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, candidate = lane / 8;
  const auto add = [](float a, float b) { return a + b; };
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < E; e++) squares += x[e] * x[e];
  const float size = at_least(__fsqrt_rn(over_lanes(squares, add) / D), TINY);
  put_rows(x, inverse(size), levels);
  const float of_row = put_products(feedback, levels);
  const float inverses[4] = {1.f / CANDIDATE[0], 1.f / CANDIDATE[1], 1.f / CANDIDATE[2], 1.f / CANDIDATE[3]};
  Left left{};
#pragma unroll 1
  for (int j = 0; j < BLOCKS; j++) next_block<SIDE>(j, feedback, levels, inverses, left);

  // this lane's row and candidate
  const float tried =
      candidate < 2 ? (candidate == 0 ? CANDIDATE[0] : CANDIDATE[1]) : candidate == 2 ? CANDIDATE[2] : CANDIDATE[3];
  const float own = 1.f / tried, itself = __shfl_sync(~0u, of_row, lane % 8 * 4) * own * own;
  const float dot = itself - left.cross * own, length = itself - 2.f * left.cross * own + left.cost;
  const float positive = at_least(dot, 0.f);
  float most = positive * positive / (at_least(length, TINY) * at_least(itself, TINY));
  int best = candidate;
#pragma unroll
  for (int k = 8; k < 32; k *= 2) {
    const float other = __shfl_xor_sync(~0u, most, k);
    const int its = __shfl_xor_sync(~0u, best, k);
    if (other > most || other == most && its < best) most = other, best = its;
  }
  const float ratio = itself / at_least(dot, TINY), unbiased = tried * (ratio > 2.f ? 2.f : at_least(ratio, 0.5f));

  // row g, the same in its four lanes
  best = __shfl_sync(~0u, best, g);  // of a row that is not finite too, one
  const float scale = at_least(saturate(size * __shfl_sync(~0u, unbiased, 8 * best + g), LARGEST_HALF), SMALLEST_HALF);
  if (to.codes == nullptr) return;
#pragma unroll 4
  for (int w = c; w < D * B / 32; w += 4) ((u32*)to.codes)[w] = word_of<B>(levels + PRODUCTS_AT, g, best, w);
  if (c == 0) *(u16*)to.meta = half1(alone ? -scale : scale);
}

// Grid (tokens / (8 WARPS) for each of SIDES, kv heads), K and V in turns.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
    round_kernel(const __grid_constant__ RoundArguments arguments) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const WriteArguments& a = arguments.rows;
  const bool is_key = SIDES == 3 ? blockIdx.x % 2 == 0 : SIDES == 1;
  const i64 head = blockIdx.y;
  const u8* feedback = is_key ? arguments.key_feedback + head * arguments.key_head
                              : arguments.value_feedback + head * arguments.value_head;
  for (int at = threadIdx.x * 16; at < FEEDBACK_BYTES; at += 32 * WARPS * 16)
    copy16_if(true, shared_address(shared) + at, feedback + at, 16);
  commit_copies();

  const int token = blockIdx.x / (SIDES == 3 ? 2 : 1) * (8 * WARPS) + threadIdx.x / 4;
  const bool given = token < a.tokens;
  const RowSource side = source_of(a, is_key, token, head);
  const KeyMeans means{a.key_mean + head * a.key_mean_head, (const POSITION*)a.positions, a.key_mean_bucket, a.buckets};
  const Target to = target_of(
      side, is_key ? K_ROW : V_ROW, (const SLOT*)a.slots, given, token, a.pages + head * a.head_stride, a.page_stride);
  Row<false> row = {};
  bool alone = false;
  if (SIDES == 1 || ALIKE || is_key)
    alone = load_row<true, KEY_EVENED, false, KEY_SCALED, KEY_SHIFTED, KEY_SIGNED>(
        row, side, KEY_FACTOR, means, token, given);
  else
    load_row<true, VALUE_EVENED, false, VALUE_SCALED, false, false>(row, side, VALUE_FACTOR, means, token, given);
  wait_for_all_copies_but<0>();
  __syncthreads();
  const u32 first = shared_address(shared), levels = first + FEEDBACK_BYTES + threadIdx.x / 32 * ROUNDING_BYTES;
  constexpr int FIRST = SIDES == VALUES ? VALUES : KEYS,
                SECOND = SIDES == (KEYS | VALUES) && !SAME_LEVELS ? VALUES : FIRST;
  if (FIRST == SECOND || is_key) round_rows<FIRST>(row.x, alone, first, levels, to);
  else round_rows<SECOND>(row.x, alone, first, levels, to);
}
