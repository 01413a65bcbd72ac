// The record of a page and kv head: K codes | V codes | K meta | V meta. One of latents (ROPE_SIZE > 0) has the rotated
// dimensions of the keys in V's place, codec ROPE, and its values are the rows in K's place.
#pragma once
#include "encode.cuh"
#ifndef ROPE_SIZE
#define ROPE_SIZE 0
#define ROPE VALUE
#endif

static_assert(KEY::BITS == KEY_BITS && KEY::META_BYTES == KEY_META_BYTES, "the keys' row is another in Python");
static_assert(
    VALUE::BITS == VALUE_BITS && VALUE::META_BYTES == VALUE_META_BYTES, "the values' row is another in Python");
constexpr int K_ROW = KEY_SIZE * KEY::BITS / 8, V_ROW = VALUE_SIZE * VALUE::BITS / 8;
constexpr int K_META = KEY::META_BYTES, V_META = VALUE::META_BYTES;
static_assert((K_META & ~6 | V_META & ~6) == 0 && K_META < 6 && V_META < 6, "0, 2 or 4 bytes of metadata");
// SECOND: of what stands behind the keys. Enumerators, as each constant has an address, and more of them would change
// in which registers kernels without latents keep things.
enum {
  LATENTS = ROPE_SIZE > 0,
  SECOND_ROW = LATENTS ? ROPE_SIZE * ROPE::BITS / 8 : V_ROW,
  SECOND_META = LATENTS ? ROPE::META_BYTES : V_META
};
constexpr int PAGE_V = BLOCK_SIZE * K_ROW, PAGE_KM = PAGE_V + BLOCK_SIZE * SECOND_ROW,
              PAGE_VM = PAGE_KM + BLOCK_SIZE * K_META;
