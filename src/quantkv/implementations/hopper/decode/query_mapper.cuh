// Queries mapped by a matrix.
#pragma once
#include "query.cuh"
#include "ring.cuh"

// A block's warps together map by a matrix the queries with which each of them begins, `begun_in` ((sequence, kv
// head)s, -1: none): each warp some tiles of all of them. What begin() reads is asked for before the tiles, behind
// which it would queue.
struct QueryMapper {
  static constexpr int EARLY = 2;  // distinct ones that begin() reads
  const Queries& q;
  const u16* matrices;
  int stride;
  const Sequences& sequences;
  int packed_row0;
  KeyMatrix rows;
  u32 words[EARLY][NT][DK / 8];

  DI QueryMapper(const Queries& q, const u16* matrices, int stride, const Sequences& sequences, int packed_row0)
      : q(q), matrices(matrices), stride(stride), sequences(sequences), packed_row0(packed_row0) {}
  static DI u32 slot(int warp) { return shared_address(shared) + TABLES_BYTES + warp * WORKER_BYTES + MAPPED_AT; }
  // the next warp that begins with another (sequence, kv head) than warp w
  static DI int next(const int* begun_in, int w) {
    const int seq_head = begun_in[w];
    while (++w < WARPS && begun_in[w] == seq_head) {}
    return w < WARPS && begun_in[w] >= 0 ? w : WARPS;
  }
  DI int head(int seq_head) const { return seq_head / sequences.count; }
  DI KeyMatrix tile(int seq_head, int t) const { return KeyMatrix(matrices + (i64)head(seq_head) * stride, t); }
  DI void read(u32 (&words)[NT][DK / 8], int seq_head) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
      GivenQuery::ask(words[nt], q, sequences, seq_head % sequences.count, head(seq_head), packed_row0, nt);
  }
  DI void map(const u32 (&words)[NT][DK / 8], int t, u32 to) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      u32 x[DK / 8], b0, b1;
      float y[4] = {};
      Query::arrange(x, words[nt]);
      rows.multiply(y, x);
      Query::operands(b0, b1, y, t);
      store_shared(to + threadIdx.x % 32 * Query::SPILLED_LANE + Query::spilled_place(nt, t), b0, b1);
    }
  }

  DI void begin(const int* begun_in) {
    const int warp = threadIdx.x / 32;
    if (warp >= DK / 16) return;
    rows = tile(begun_in[0], warp);
    int w = 0;
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      if (w < WARPS) read(words[i], begun_in[w]), w = next(begun_in, w);
    }
  }
  DI void finish(const int* begun_in) {
    for (int t = threadIdx.x / 32, first = t; t < DK / 16; t += WARPS) {
      int held = head(begun_in[0]), i = 0;
      if (t > first) rows = tile(begun_in[0], t);
      for (int w = 0; w < WARPS; w = next(begun_in, w), i++) {
        if (head(begun_in[w]) != held) rows = tile(begun_in[w], t), held = head(begun_in[w]);
        if (t > first || i >= EARLY) read(words[EARLY - 1], begun_in[w]);
        if (t == first && i == 0) map(words[0], t, slot(w)); else map(words[EARLY - 1], t, slot(w));
      }
    }
  }
  // Where the mapped query of a (sequence, kv head) is: one with which none of the warps begins, this one maps alone.
  DI u32 mapped(const int* begun_in, int seq_head) {
    for (int w = 0; w < WARPS; w++)
      if (begun_in[w] == seq_head) return slot(w);
    const u32 own = slot(threadIdx.x / 32) + QUERY_BYTES;
    read(words[0], seq_head);
    __syncwarp();
#pragma unroll 1
    for (int t = 0; t < DK / 16; t++) rows = tile(seq_head, t), map(words[0], t, own);
    __syncwarp();
    return own;
  }
};
