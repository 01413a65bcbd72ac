// The record of a page and kv head: K codes | V codes | K meta | V meta.
#pragma once
#include "encode.cuh"

static_assert(KEY::BITS == KEY_BITS && KEY::META_BYTES == KEY_META_BYTES, "the keys' row is another in Python");
static_assert(
    VALUE::BITS == VALUE_BITS && VALUE::META_BYTES == VALUE_META_BYTES, "the values' row is another in Python");
constexpr int K_ROW = KEY_SIZE * KEY::BITS / 8, V_ROW = VALUE_SIZE * VALUE::BITS / 8;
constexpr int K_META = KEY::META_BYTES, V_META = VALUE::META_BYTES;
static_assert((K_META & ~6 | V_META & ~6) == 0 && K_META < 6 && V_META < 6, "0, 2 or 4 bytes of metadata");
constexpr int PAGE_V = BLOCK_SIZE * K_ROW, PAGE_KM = PAGE_V + BLOCK_SIZE * V_ROW,
              PAGE_VM = PAGE_KM + BLOCK_SIZE * K_META;
