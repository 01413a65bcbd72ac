// Rows -> page records, K and V in one launch, written for sm_90.
//
// A warp encodes 8 tokens of one kv head, four lanes a row. Lane c of a row holds E dimensions, CHUNK neighbours at a
// time: number e is dimension 4 (e - e % CHUNK) + CHUNK c + e % CHUNK, zero beyond D. The bits of a dimension are then
// the bits of e and of c, and a Hadamard matrix is a product of one 2 x 2 butterfly for each of them: mma.m16n8k16
// takes those of c and the lowest of e (16-bit numbers times +-1, added in float32), registers the others, and nothing
// is shuffled.
//
// Compile-time, from write/__init__.py: codecs KEY and VALUE, and KEY_BITS KEY_META_BYTES VALUE_BITS VALUE_META_BYTES
// of them; HEAD_SIZE (of the rows that are written) KEY_SIZE VALUE_SIZE // BLOCK_SIZE KEY_FACTOR VALUE_FACTOR (of the
// maps; 0: none) KEY_ROUNDED VALUE_ROUNDED (a mapped row, to 16 bits) KEY_SCALED VALUE_SCALED KEY_SHIFTED KEY_SIGNED
// SIDES ALIKE ROWS_BF16 SLOT POSITION WARPS CHUNK ARGUMENT_BYTES.
#include "arguments.cuh"
#include "encoded.cuh"

static_assert(sizeof(WriteArguments) == ARGUMENT_BYTES, "Python fills in another struct");
static_assert(SIDES == 1 ? D == KEY_SIZE : D == VALUE_SIZE && (SIDES == 2 || D == KEY_SIZE),
    "rows of both sides at once have one size");

// Grid (tokens / (8 WARPS) for each of SIDES, kv heads), K and V in turns: one may wait for memory while the other
// computes.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    write_kernel(const __grid_constant__ WriteArguments a) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const int token = blockIdx.x / (SIDES == 3 ? 2 : 1) * (8 * WARPS) + threadIdx.x / 4;
  const i64 head = blockIdx.y;
  const SLOT* slots = (const SLOT*)a.slots;
  u8* records = a.pages + head * a.head_stride;
  const bool is_key = SIDES == 3 ? blockIdx.x % 2 == 0 : SIDES == 1;
  const RowSource side = source_of(a, is_key, token, head);
  const KeyMeans means{a.key_mean + head * a.key_mean_head, (const POSITION*)a.positions, a.key_mean_bucket, a.buckets};
  if (SIDES == 1 || ALIKE || is_key)  // one copy of the code where K and V are treated alike
    write_row<KEY, KEY_FACTOR != 0.f, KEY_EVENED, KEY_ROUNDED, KEY_SCALED, KEY_SHIFTED, KEY_SIGNED>(
        side, KEY_FACTOR, means, slots, token, a.tokens, records, a.page_stride);
  else
    write_row<VALUE, VALUE_FACTOR != 0.f, VALUE_EVENED, VALUE_ROUNDED, VALUE_SCALED, false, false>(
        side, VALUE_FACTOR, means, slots, token, a.tokens, records, a.page_stride);
}
