// Rows -> page records and the 16-bit copies of both, in one launch, where V is stored as given; written for sm_90.
//
// K is written as by write.cu. V may be of another size: it is copied. A copy has K under the same map, and V, in the
// codec that V has in its record. Who encodes a row of K stores its copy too: blocks with code of their own for copies
// took as long again as all others, as a kernel that runs once waits for its instructions.
//
// Compile-time, from write/given.py: as write.cu with the SIDES of keys; COPY_SLOT; LESS_MEAN, so that a mean may be
// taken off K.
#include "arguments.cuh"
#include "encoded.cuh"

static_assert(sizeof(GivenArguments) == ARGUMENT_BYTES, "Python fills in another struct");
static_assert(SIDES == 1 && D == KEY_SIZE && !KEY_SHIFTED, "keys, without a mean by position");
static_assert(VALUE_BITS == 16 && VALUE_META_BYTES == 0 && VALUE_SIZE % CHUNK == 0, "V is 16-bit numbers");
constexpr int COPY_ROW = KEY_SIZE * 2;  // bytes of K in a copy
constexpr int COPY_V = BLOCK_SIZE * COPY_ROW;  // where V begins in the record of a copy

// Where row `slot` of a side is whose rows of so many bytes begin at `begin` of a record; null: nowhere.
DI u8* place_of(u8* records, i64 page_stride, i64 slot, int begin, int bytes) {
  const unsigned long long place = slot;
  if (slot < 0) return nullptr;
  return records + (i64)(place / BLOCK_SIZE) * page_stride + begin + (int)(place % BLOCK_SIZE) * bytes;
}
// A lane's share of the row of V.
DI void put(const u16* row, u8* to) {
  if (to)
    for (int i = threadIdx.x % 4; i < VALUE_SIZE / CHUNK; i += 4) *((uint4*)to + i) = *((const uint4*)row + i);
}

// A lane's part of K in a copy: 16-bit numbers, which a row may hold already.
DI void store_copy(const Row<true>& row, u8* to) { store<16>(to, threadIdx.x % 4, row.pairs); }
DI void store_copy(const Row<false>& row, u8* to) {
  u32 words[WORDS<16>];
  VALUE::encode(row, words);
  store<16>(to, threadIdx.x % 4, words);
}

// Grid (tokens / (8 WARPS) for each of K and V, kv heads), in turns.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    write_given_kernel(const __grid_constant__ GivenArguments arguments) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const WriteArguments& a = arguments.rows;
  const bool is_key = blockIdx.x % 2 == 0;
  const int token = blockIdx.x / 2 * (8 * WARPS) + threadIdx.x / 4;
  const i64 head = blockIdx.y;
  const SLOT* slots = (const SLOT*)a.slots;
  u8 *records = a.pages + head * a.head_stride, *copies = arguments.copies + head * arguments.copy_head_stride;
  const i64 copy = arguments.copies && token < a.tokens ? ((const COPY_SLOT*)arguments.copy_slots)[token] : -1;
  RowSource side = source_of(a, is_key, token, head);
  side.mean = arguments.mean;
  if (is_key) {
    write_row<KEY, KEY_FACTOR != 0.f, KEY_EVENED, KEY_ROUNDED, KEY_SCALED, false, false>(
        side, KEY_FACTOR, KeyMeans{}, slots, token, a.tokens, records, a.page_stride, [&](const auto& row) {
          u8* to = place_of(copies, arguments.copy_page_stride, copy, 0, COPY_ROW);
          if (to) store_copy(row, to);
        });
  } else if (token < a.tokens) {
    put(side.row, place_of(records, a.page_stride, slots[token], PAGE_V, V_ROW));
    put(side.row, place_of(copies, arguments.copy_page_stride, copy, COPY_V, V_ROW));
  }
}
