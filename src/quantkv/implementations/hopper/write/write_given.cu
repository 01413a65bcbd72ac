// Rows -> page records and the 16-bit copies of both, in one launch, where V is stored as given; written for sm_90.
//
// K is written as by write.cu. V may be of another size: it is copied. A copy has K under the same map, and V, in the
// codec that V has in its record. Mapping K twice, in blocks of their own, takes no longer than once.
//
// Compile-time, from write/given.py: as write.cu with the SIDES of keys; COPY_ROUNDED (a mapped row of a copy, to 16
// bits) COPY_SLOT; LESS_MEAN, so that a mean may be taken off K.
#include "arguments.cuh"
#include "encoded.cuh"

static_assert(sizeof(GivenArguments) == ARGUMENT_BYTES, "Python fills in another struct");
static_assert(SIDES == 1 && D == KEY_SIZE && !KEY_SHIFTED, "keys, without a mean by position");
static_assert(VALUE_BITS == 16 && VALUE_META_BYTES == 0 && VALUE_SIZE % CHUNK == 0, "V is 16-bit numbers");
constexpr int COPY_V = BLOCK_SIZE * KEY_SIZE * 2;  // where V begins in the record of a copy

// A lane's share of the row of V, to where it goes: in a record whose V begins at `begin`.
DI void put(const u16* row, u8* records, i64 page_stride, i64 slot, int begin) {
  if (slot < 0) return;
  const unsigned long long place = slot;
  u8* to = records + (i64)(place / BLOCK_SIZE) * page_stride + begin + (int)(place % BLOCK_SIZE) * V_ROW;
  for (int i = threadIdx.x % 4; i < VALUE_SIZE / CHUNK; i += 4) *((uint4*)to + i) = *((const uint4*)row + i);
}

// Grid (tokens / (8 WARPS) for each of K and V, and K of copies where there are any; kv heads), in turns.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    write_given_kernel(const __grid_constant__ GivenArguments arguments) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const WriteArguments& a = arguments.rows;
  const int parts = arguments.copies ? 3 : 2, part = blockIdx.x % parts,
            token = blockIdx.x / parts * (8 * WARPS) + threadIdx.x / 4;
  const i64 head = blockIdx.y;
  const SLOT* slots = (const SLOT*)a.slots;
  const COPY_SLOT* copy_slots = (const COPY_SLOT*)arguments.copy_slots;
  u8 *records = a.pages + head * a.head_stride, *copies = arguments.copies + head * arguments.copy_head_stride;
  RowSource side = source_of(a, part != 1, token, head);
  side.mean = arguments.mean;
  const KeyMeans means{};
  if (part == 0) {
    write_row<KEY, KEY_FACTOR != 0.f, KEY_EVENED, KEY_ROUNDED, KEY_SCALED, false, false>(
        side, KEY_FACTOR, means, slots, token, a.tokens, records, a.page_stride);
  } else if (part == 2) {
    write_row<VALUE, KEY_FACTOR != 0.f, KEY_EVENED, COPY_ROUNDED, KEY_SCALED, false, false>(
        side, KEY_FACTOR, means, copy_slots, token, a.tokens, copies, arguments.copy_page_stride);
  } else if (token < a.tokens) {
    put(side.row, records, a.page_stride, slots[token], PAGE_V);
    if (arguments.copies) put(side.row, copies, arguments.copy_page_stride, copy_slots[token], COPY_V);
  }
}
