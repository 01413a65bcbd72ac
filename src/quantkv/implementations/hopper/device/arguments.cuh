// What the kernels are launched with: one struct each, which Python reads here (launch.py) and fills in.
#pragma once
#include "instructions.cuh"

enum { FLOAT32, BFLOAT16, FLOAT16 };  // what sinks may be

// Strides of q and sinks in elements, of pages in bytes, of the others in their elements. Null: there is none.
struct AttendArguments {
  const u16* q;
  u16* out;
  float* lse;
  const u8* pages;
  const int* block_table;
  const int* seq_lens;
  const int* cu_queries;
  const u16* key_map;     // signs beside Hadamard matrices, steps of each head, or the tiles of each head's matrix
  const u16* value_map;
  const u16* key_mean;  // tiles of 16 rows
  const u8* sinks;
  u32* partials;            // [resident + KV_HEADS * sequences, all_packed_rows, PARTIAL]
  i64 q_token;
  i64 q_head;
  i64 page_stride;
  int table_width;
  int table_stride;
  int key_map_stride;
  int value_map_stride;
  int key_mean_stride;
  int key_mean_groups;
  int sinks_stride;
  int sinks_type;
  int sequences;
  int window;
  int resident;
  int all_packed_rows;
  float scale;            // of scores, base 2; over softcap / 2 where there is one
  float softcap;          // base 2
  float key_mean_gain;    // of latents: of rotated dimensions, over what `scale` has for latents
  float value_gain;
  const int* key_start;   // [sequences]: position of the key in a segment's first slot
  const int* key_range;   // [sequences, 2]: positions that are read
  const u32* other_partials[3];  // of the segments that combine_kernel takes besides, those under the values' map first
  const int* other_starts[3];
  const int* other_ranges[3];
  int other_resident[3];
  int other_workers[3];  // of a block
  const u8* exact_pages;       // of the segment that combine attends to itself, with its table and positions
  const int* exact_table;
  const int* exact_start;
  const int* exact_range;
  i64 exact_page_stride;
  i64 exact_head_stride;
  int exact_table_stride;
  float exact_scale;      // as scale
  int chunk_lookback;     // where windows are CHUNKED, and window the size of a chunk
  int partial_slots;        // rows of `partials` that a sequence and kv head has, where the cut is INVARIANT
  int other_partial_slots[3];
  float plain_gain;       // of values without a map, where they are SCALED: their per-tensor scale
  int unsplit_blocks;        // where UNSPLIT: blocks of a cluster, which have a (sequence, kv head) together, or 1
  int unsplit_warps;         // and warps of a block that have one
  const u16* q_rotated;      // of latents: queries to rotated dimensions, and their strides
  i64 q_rotated_token;
  i64 q_rotated_head;
  const u16* mean;           // of latents: [DV], added to outputs
  int after_decode;          // where SEVERAL_DECODES: whether this kernel is not the first of them
  int unsplit_spare;         // where EITHER: tiles that the longest run may have beyond an even share; negative: split
};

// A row is divided by the per-tensor scale; a negative slot skips its token. Strides of rows in elements, of pages and
// heads in bytes.
struct WriteArguments {
  const u16* key;
  const u16* value;
  u8* pages;
  const u8* slots;
  const u32* key_signs;  // where KEY_EVENED: steps of each head
  const u32* value_signs;
  const float* key_mean;
  const u8* positions;
  i64 key_token;
  i64 key_head;
  i64 value_token;
  i64 value_head;
  i64 page_stride;
  i64 head_stride;
  i64 key_mean_bucket;
  i64 key_mean_head;
  int buckets;
  int tokens;
  float key_scale;
  float value_scale;
};

// What rounds rows by a Hessian: F of each head as round.py lays it out, heads so many bytes apart (0: one for all).
struct RoundArguments {
  WriteArguments rows;
  const u8* key_feedback;
  const u8* value_feedback;
  i64 key_head;
  i64 value_head;
};

// Rows whose V is stored as given, with the 16-bit copies of K and V. Null: there are none, or no mean.
struct GivenArguments {
  WriteArguments rows;
  u8* copies;
  const u8* copy_slots;
  const u16* mean;        // taken off K
  i64 copy_page_stride;
  i64 copy_head_stride;
};

// A tensor of three axes, as the driver describes it to what loads boxes of it.
struct __align__(64) TensorMap {
  i64 low[8];
  i64 high[8];
};

// Attention of prompts over 16-bit rows. Strides in elements.
struct PrefillArguments {
  TensorMap keys;     // [kv heads, rows, D]
  TensorMap values;   // [kv heads, rows, DV]
  const u16* q;
  u16* out;
  float* lse;         // [tokens, query heads], natural
  const int* queries; // [sequences + 1]: where those of each begin
  const int* rows;    // [sequences + 1]: the same of keys and values
  const int* used;    // [sequences]: keys and values
  int* taken;         // of the work, beside what each block begins with; 0 before
  i64 q_token;
  i64 q_head;
  i64 out_token;
  i64 out_head;
  int kv_heads;
  int sequences;
  int tiles;          // of the longest sequence
  int together;       // sequences and kv heads that are worked on at a time
  int left;           // keys that a query sees before its own, and behind; negative: all
  int right;
  float scale;        // of scores, base 2; over softcap / 2 where there is one
  float softcap;      // base 2
  const u8* sinks;    // [query heads]
  int sinks_stride;
  int sinks_type;
  const float* query_scales;  // of 8-bit rows, [tokens, query heads]
  const float* query_means;   // what the mean that was taken off the keys adds to a query's scores
  const float* key_scales;    // [kv heads, rows of keys]: of a tile of keys, where its first one is
  i64 key_scale_head;
  i64 padding[3];     // to a multiple of 64 bytes
};

template <class A> DI float sink_of(const A& a, int head) {  // base 2; none: minus infinity
  if (!a.sinks) return minus_infinity();
  const i64 at = (i64)head * a.sinks_stride;
  const u16 x = a.sinks_type == FLOAT32 ? 0 : ((const u16*)a.sinks)[at];
  const float sink = a.sinks_type == FLOAT32 ? ((const float*)a.sinks)[at]
      : a.sinks_type == BFLOAT16             ? as_float((u32)x << 16)
                                             : low(x);
  return 1.4426950408889634f * sink;
}
