// Rows -> page records, K and V in one launch, written for sm_90.
//
// A warp encodes 8 tokens of one kv head, four lanes a row. Lane c of a row holds E = D / 4 dimensions, CHUNK neighbours at a
// time: number e is dimension 4 (e - e % CHUNK) + CHUNK c + e % CHUNK. The bits of a dimension are then the bits of e and of c,
// and a Hadamard matrix is a product of one 2 x 2 butterfly for each of them: mma.m16n8k16 takes those of c and the lowest of e
// (16-bit numbers times +-1, added in float32), registers the others, and nothing is shuffled.
//
// Compile-time: HEAD_SIZE BLOCK_SIZE KEY VALUE (codecs of encode.cuh) KEY_FACTOR VALUE_FACTOR (of the maps; 0: none) KEY_SCALED
// VALUE_SCALED KEY_SHIFTED ALIKE ROWS_BF16 SLOT POSITION WARPS ROOT_D MIDPOINT_LIST.
#include "encode.cuh"

constexpr int CHUNK = 8;                     // of 16-bit numbers: one load
constexpr int RESIDENT = D > 128 ? 16 : 32;  // warps of an SM that registers must suffice for

// The record of a page and head is K codes | V codes | K meta | V meta.
constexpr int K_ROW = D * KEY::BITS / 8, V_ROW = D * VALUE::BITS / 8;
constexpr int PAGE_V = BLOCK_SIZE * K_ROW, PAGE_KM = PAGE_V + BLOCK_SIZE * V_ROW, PAGE_VM = PAGE_KM + BLOCK_SIZE * KEY::META_BYTES;

DI void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }

#if ROWS_BF16
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif
DI void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// row = factor * H (signs * row). signs: of pair i at bit 15 - i % 16 (the even dimension) and 31 - i % 16 of word i / 16.
//
// A product takes 16 dimensions, the lowest two bits of e and those of c, of two blocks of a row: rows g and g + 8 of A are blocks
// i and i + BLOCKS / 2. The 16 x 16 matrix needs two registers in all, b and -b. Sums over IN_MMA blocks are products too, added
// where the tensor core adds, and butterflies in registers do the rest.
template <class R> DI void hadamard(R& row, const u32 (&signs)[(E + 31) / 32], float factor) {
  constexpr int BLOCKS = E / 4, IN_MMA = BLOCKS < 8 ? BLOCKS / 2 : 4;
  constexpr u32 MINUS = 0x80008000u;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 odd = g & 1, minus = __popc(g / 2 & c) & 1;  // column n of a tile is output dimension n % 2 of lane n / 2
  const u32 b = (ROWS_BF16 ? 0x3f803f80u : 0x3c003c00u) ^ odd << 31 ^ (minus ? MINUS : 0);
#pragma unroll
  for (int i = 0; i < E / 2; i++) row.pairs[i] ^= signs[i / 16] << i % 16 & MINUS;
#pragma unroll
  for (int block = 0; block < BLOCKS / 2; block += IN_MMA)
#pragma unroll
    for (int out = 0; out < IN_MMA; out++)
#pragma unroll
      for (int t = 0; t < 2; t++) {  // dimensions 2 t and 2 t + 1 of the block
        float sum[4] = {};
#pragma unroll
        for (int in = 0; in < IN_MMA; in++) {
          const u32* low = row.pairs + 2 * (block + in);
          const u32* high = low + BLOCKS;
          const bool flip = (in & out) == 1 || (in & out) == 2;  // of two bits, one: an odd number
          mma(sum, low[0], high[0], low[1], high[1], flip ? b ^ MINUS : b, flip != (t == 1) ? b ^ MINUS : b);
        }
        const int e = 4 * (block + out) + 2 * t;
        row.x[e] = sum[0], row.x[e + 1] = sum[1], row.x[E / 2 + e] = sum[2], row.x[E / 2 + e + 1] = sum[3];
      }
#pragma unroll
  for (int step = 4 * IN_MMA; step < E; step *= 2)
#pragma unroll
    for (int e = 0; e < E; e++)
      if (!(e & step)) {
        const float up = row.x[e], down = row.x[e + step];
        row.x[e] = up + down, row.x[e + step] = up - down;
      }
#pragma unroll
  for (int e = 0; e < E; e++) row.x[e] *= factor;
}

// A lane's part of a row of codes: CHUNK * BITS / 8 bytes, four lanes after each other, for each of its chunks.
template <int BITS> DI void store(u8* row, int c, const u32 (&words)[WORDS<BITS>]) {
  constexpr int BYTES = CHUNK * BITS / 8;
#pragma unroll
  for (int k = 0; k < E / CHUNK; k++) {
    u8* to = row + 4 * k * BYTES + c * (BITS == 3 ? 4 : BYTES);
    const u32* from = words + k * CHUNK / CODES<BITS>;
    if (BITS == 3 && c < 3) *(u32*)to = *from;
    if (BYTES == 2) *(u16*)to = *from >> k % 2 * 16;
    if (BYTES == 4) *(u32*)to = *from;
    if constexpr (BYTES == 8) *(uint2*)to = make_uint2(from[0], from[1]);
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) ((uint4*)to)[i] = make_uint4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
  }
}

// K or V: this token's row, the signs of its map, the per-tensor scale, where codes and metadata begin in a record.
struct Side {
  const u16* row;
  const u32* signs;
  float scale;
  int codes, meta;
};

// The mapped offset of the keys of every 64 positions, of one head; what lies beyond the table has its last row.
struct Offset {
  const float* table;
  const POSITION* positions;
  i64 stride;
  int buckets;
};

template <class CODEC, bool MAPPED, bool SCALED, bool SHIFTED>
DI void write_row(const Side& side, float factor, const Offset& offset, const SLOT* slots, int token, int tokens, u8* records, i64 page_stride) {
  constexpr bool ROUNDED = MAPPED && CODEC::ROUND_MAPPED;
  constexpr int FLIPS = (E + 31) / 32;
  const int c = threadIdx.x % 4;
  i64 slot = -1;
  u32 flips[FLIPS] = {};
  Row<(!MAPPED || ROUNDED) && !SCALED> row = {};
  if (token < tokens) {
    slot = slots[token];
#pragma unroll
    for (int e = 0; e < E; e += CHUNK) *(uint4*)(row.pairs + e / 2) = *(const uint4*)(side.row + 4 * e + CHUNK * c);
  }
  if constexpr (MAPPED) {
    if (side.signs)
#pragma unroll
      for (int i = 0; i < FLIPS; i++) flips[i] = side.signs[c * FLIPS + i];
    hadamard(row, flips, factor);
  }
  if constexpr (SHIFTED)
    if (token < tokens) {
      const float* shift = offset.table + min((int)(offset.positions[token] / 64), offset.buckets - 1) * offset.stride + CHUNK * c;
#pragma unroll
      for (int e = 0; e < E; e++) row.x[e] -= shift[4 * (e - e % CHUNK) + e % CHUNK];
    }
  if constexpr (ROUNDED)
#pragma unroll
    for (int e = 0; e < E; e += 2) row.pairs[e / 2] = pair_of(row.x[e], row.x[e + 1]);
  if constexpr (!MAPPED || ROUNDED) row.unpack();
  if constexpr (SCALED) {
    const float inverse = 1.f / side.scale;
#pragma unroll
    for (int e = 0; e < E; e++) row.x[e] = quotient(row.x[e], side.scale, inverse);
  }
  u32 words[WORDS<CODEC::BITS>];
  const u32 meta = CODEC::encode(row, words);
  if constexpr (CODEC::BITS == 3)  // four times 24 bits are three words: a lane's upper bytes, and the lower ones of the next
#pragma unroll
    for (u32& word : words) word = word >> 8 * c | __shfl_down_sync(~0u, word, 1) << 24 - 8 * c;
  if (slot < 0) return;
  const unsigned long long place = slot;  // unsigned: a shift and a mask
  u8* record = records + (i64)(place / BLOCK_SIZE) * page_stride;
  const int at = place % BLOCK_SIZE;
  store<CODEC::BITS>(record + side.codes + at * (D * CODEC::BITS / 8), c, words);
  if (CODEC::META_BYTES == 4 && c == 0) *(u32*)(record + side.meta + at * 4) = meta;
  if (CODEC::META_BYTES == 2 && c == 0) *(u16*)(record + side.meta + at * 2) = meta;
}

// Grid (2 tokens / (8 WARPS), kv heads), K and V in turns: one may wait for memory while the other computes. Strides of rows in
// elements, of pages and heads in bytes. A row is divided by the per-tensor scale; a negative slot skips its token.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS) write_kernel(
    const u16* key, const u16* value, u8* pages, const SLOT* slots, const u32* key_signs, const u32* value_signs, const float* key_offset,
    const POSITION* positions, i64 key_token, i64 key_head, i64 value_token, i64 value_head, i64 page_stride, i64 head_stride,
    i64 offset_bucket, i64 offset_head, int buckets, int tokens, float key_scale, float value_scale) {
  wait_for_previous_kernel();
  launch_next_kernel();
  const int token = blockIdx.x / 2 * (8 * WARPS) + threadIdx.x / 4;
  const i64 head = blockIdx.y;
  u8* records = pages + head * head_stride;
  const bool is_key = blockIdx.x % 2 == 0;
  const Side side = is_key ? Side{key + token * key_token + head * key_head, key_signs, key_scale, 0, PAGE_KM}
                           : Side{value + token * value_token + head * value_head, value_signs, value_scale, PAGE_V, PAGE_VM};
  const Offset offset{key_offset + head * offset_head, positions, offset_bucket, buckets};
  if (ALIKE || is_key)  // one copy of the code where K and V are treated alike
    write_row<KEY, KEY_FACTOR != 0.f, KEY_SCALED, KEY_SHIFTED>(side, KEY_FACTOR, offset, slots, token, tokens, records, page_stride);
  else
    write_row<VALUE, VALUE_FACTOR != 0.f, VALUE_SCALED, false>(side, VALUE_FACTOR, offset, slots, token, tokens, records, page_stride);
}
