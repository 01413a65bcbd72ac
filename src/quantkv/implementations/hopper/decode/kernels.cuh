// What the kernels that read tiles have in common: programmatic dependent launch (PDL), and the combine kernels.
#pragma once
#include "combine.cuh"

static_assert(sizeof(AttendArguments) == ARGUMENT_BYTES, "Python fills in another struct");
static_assert(BARRIER_BYTES == 2 * sizeof(int), "begun_in and ended_in");

// The kernels of several segments overlap. The first waits for all that came before, and only then lets the next one
// start: that one need not wait to begin. It does before it ends (after_decode), so that whoever waits for the last
// of them waits for all. No kernel reads what another of these wrote before it has waited; combine reads exact tokens
// before, which is right as no decode block lets it start before that block has waited.
//
// PDL_AFTER_WRITE: the kernel before this one writes the rows of the queries' own tokens, and let this one start when
// it had itself waited. So all else that is read here is there; a loader waits before the first tile with a new row
// (tiles.cuh), and every thread before it ends.
struct DependentLaunch {
  const bool overlaps;
  DI DependentLaunch(const AttendArguments& a) : overlaps(PDL_AFTER_WRITE || SEVERAL_DECODES && a.after_decode) {
    if (overlaps) forget_what_was_read(); else wait_for_previous_kernel();
    launch_next_kernel();
  }
  DI ~DependentLaunch() {
    if (overlaps) wait_for_previous_kernel();
  }
};

// What the runs of a block's workers ended with, combined where they ended in one (sequence, kv head) (-1: a worker
// without a run), of sequence s.
DI void combine_ends(const AttendArguments& a, const Sequences& sequences, int* ended_in, int worker, int seq_head,
    int s, int packed_row0) {
  const int index = threadIdx.x / (32 * WORKER_WARPS);
  if (threadIdx.x % (32 * WORKER_WARPS) == 0) ended_in[index] = seq_head;
  __syncthreads();
  if (seq_head < 0) return;
  int first = index, past = index + 1;
  while (first > 0 && ended_in[first - 1] == seq_head) first--;
  while (past < WORKERS && ended_in[past] == seq_head) past++;
  u32* to = a.partials + ((i64)(worker - index + first) * a.all_packed_rows + packed_row0) * PARTIAL;
  combine_partials(shared + TABLES_BYTES + first * WORKER_BYTES, past - first, index - first, past - first,
      min(PACKED_ROWS, sequences.queries(s) * GROUP - packed_row0),
      [&](int packed_row, int at, u32 x, u32 y) { *(uint2*)(to + packed_row * PARTIAL + at) = make_uint2(x, y); });
}

// combine_kernel: a warp a packed query row; combine_one_kernel: a block, for few sequences, which have many partials.
#define COMBINE(NAME, N, S, COMBINERS, BLOCKS) \
  extern "C" __global__ void __launch_bounds__(32 * N * S * COMBINERS, BLOCKS) \
      NAME(const __grid_constant__ AttendArguments a) { \
    launch_next_kernel(); \
    const u16* map = a.value_map ? a.value_map + (i64)blockIdx.y * a.value_map_stride : nullptr; \
    const Sequences sequences = sequences_of(a, a.key_start, a.key_range); \
    if (EITHER && is_unsplit(a, sequences)) wait_for_previous_kernel(); /* for who waits for this one alone */ \
    else combine<N, S, COMBINERS>(a, sequences, map); \
  }
COMBINE(combine_kernel, COMBINE_PACKED_ROWS, COMBINE_SEQUENCES, 1,
    COMBINE_SEQUENCES > 1 ? 1 : DV > 256 ? 3 : EXACT ? (D > 128 ? 2 : 4) : SEGMENTS > 1 ? 5 : 8)
COMBINE(combine_one_kernel, 1, 1, COMBINE_WARPS, EXACT && D > 128 ? 1 : 2)
