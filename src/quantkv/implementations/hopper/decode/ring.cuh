// Shared memory of a warp that works alone.
#pragma once
#include "partials.cuh"

// Shared memory of a warp: its ring of tiles, the scores of 16 key means, spilled queries, and, over that, what a run
// ends with; then queries that are put together there and stay: under a matrix, those that the block's warps share, and
// the warp's own.
constexpr int SPILLED_NT = NT > 1 ? EVEN_NT : 1;  // tiles are spilled in pairs
constexpr int QUERY_BYTES = 2 * DK * PLACES, SPILLED_BYTES = SPILLED && !ASSEMBLED ? 2 * DK * 8 * SPILLED_NT : 0;
constexpr int RING_BYTES = STAGES * TILE_BYTES, KEY_MEAN_BYTES = KEY_MEAN ? 16 * PLACES * 4 : 0;
constexpr int SPILLED_AT = RING_BYTES + KEY_MEAN_BYTES, LOOP_BYTES = SPILLED_AT + SPILLED_BYTES;
constexpr int MAPPED_AT = LOOP_BYTES > PACKED_ROWS * PARTIAL_BYTES ? LOOP_BYTES : PACKED_ROWS * PARTIAL_BYTES;
constexpr int MAPPED_BYTES = KEY_MAP == MATRIX ? 2 * QUERY_BYTES : BY_CHUNKS ? 2 * DK * 8 * SPILLED_NT : 0;
static_assert(WORKER_BYTES == MAPPED_AT + MAPPED_BYTES, "shared memory is laid out in another way in Python");
// Where spilled queries are. Warps of a block that have one (sequence, kv head) map these together; but not integers,
// which each makes for itself, and not where what one of them ends with would go over them.
constexpr int QUERIES_AT = ASSEMBLED ? MAPPED_AT : SPILLED_AT;
constexpr bool SHARED_QUERIES = UNSPLIT && SPILLED && !BY_INTEGERS && KEY_MAP != MATRIX &&
    (INVARIANT || QUERIES_AT >= PACKED_ROWS * PARTIAL_BYTES);
