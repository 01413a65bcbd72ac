// A row into its record: loaded, mapped, encoded, stored.
#pragma once
#include "mapped.cuh"

static_assert(!KEY_SIGNED || KEY_META_BYTES == 2, "the scale's sign is that of 16 bits");
constexpr int RESIDENT = D > 256 ? 8 : D > 128 ? 16 : 32;  // warps of an SM that registers must suffice for

// A lane's part of a row of codes: CHUNK * BITS / 8 bytes, four lanes after each other, for each of its chunks.
template <int BITS> DI void store(u8* row, int c, const u32 (&words)[WORDS<BITS>]) {
  constexpr int BYTES = CHUNK * BITS / 8;
  constexpr bool SHIFTED_LANES = BITS == 3;  // see share_words
#pragma unroll
  for (int k = 0; k < E / CHUNK; k++) {
    u8* to = row + 4 * k * BYTES + c * (SHIFTED_LANES ? 4 : BYTES);
    const u32* from = words + k * CHUNK / CODES<BITS> * REGISTERS<BITS>;
    const bool all = FILLED || k + 1 < E / CHUNK;  // or half of the last
    if constexpr (SHIFTED_LANES && FILLED) {
      if (c < 3) *(u32*)to = *from;
    } else if constexpr (SHIFTED_LANES) {  // rows begin anywhere in a word
      if (all ? c < 3 : c < 2) ((u16*)to)[0] = *from;
      if (all ? c < 3 : c < 1) ((u16*)to)[1] = *from >> 16;
    } else if (!all && c >= 2) {
      continue;
    } else if constexpr (BYTES == 2) {
      *(u16*)to = *from >> k % 2 * 16;
    } else if constexpr (BYTES == 4) {
      *(u32*)to = *from;
    } else if constexpr (BYTES == 8) {
      *(uint2*)to = make_uint2(from[0], from[1]);
    } else if constexpr (BYTES == 16) {
      *(uint4*)to = make_uint4(from[0], from[1], from[2], from[3]);
    } else {
#pragma unroll
      for (int i = 0; i < BYTES; i++) to[i] = from[i / 4] >> i % 4 * 8;
    }
  }
}
// Four times 24 bits are three words: a lane's upper bytes, and the lower ones of the next.
template <int BITS> DI void share_words(int c, u32 (&words)[WORDS<BITS>]) {
  if constexpr (BITS == 3)
#pragma unroll
    for (u32& word : words) word = word >> 8 * c | __shfl_down_sync(~0u, word, 1) << 24 - 8 * c;
}

struct Nothing {
  template <class R> DI void operator()(const R&) const {}
};
// The row of `token` through its codec, into the record of its slot; before, also(row).
template <class CODEC, bool MAPPED, bool EVENED, bool ROUND, bool SCALED, bool SHIFTED, bool SIGNED,
    class Also = Nothing>
DI void write_row(const RowSource& side, float factor, const KeyMeans& means, const SLOT* slots, int token, int tokens,
    u8* records, i64 page_stride, Also also = {}) {
  const int c = threadIdx.x % 4;
  const bool given = token < tokens;
  const i64 slot = given ? slots[token] : -1;
  Row<(!MAPPED || ROUND) && !SCALED> row = {};
  const bool alone = load_row<MAPPED, EVENED, ROUND, SCALED, SHIFTED, SIGNED>(row, side, factor, means, token, given);
  also(row);
  u32 words[WORDS<CODEC::BITS>];
  // the sign of an fp16 scale
  const u32 meta = CODEC::encode(row, words) ^ (SHIFTED && SIGNED && alone ? 0x8000u : 0u);
  share_words<CODEC::BITS>(c, words);
  if (slot < 0) return;
  const unsigned long long place = slot;  // unsigned: a shift and a mask
  u8* record = records + (i64)(place / BLOCK_SIZE) * page_stride;
  const int at = place % BLOCK_SIZE;
  store<CODEC::BITS>(record + side.codes + at * (D * CODEC::BITS / 8), c, words);
  if (CODEC::META_BYTES == 4 && c == 0) *(u32*)(record + side.meta + at * 4) = meta;
  if (CODEC::META_BYTES == 2 && c == 0) *(u16*)(record + side.meta + at * 2) = meta;
}
