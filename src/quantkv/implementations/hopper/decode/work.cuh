// How a worker goes through its run of tiles: by stretches, each of one sequence and kv head, with a softmax and a
// partial of its own. Both kernels do so; each has its own ring of tiles, queries and products.
#pragma once
#include "kernels.cuh"

// tiles of the positions that share a row, or 16, of the table of key means
constexpr int BUCKET = 64 / KV_TILE, GROUP_TILES = 16 * BUCKET;

// The partials of a sequence and kv head that a worker has one after the other, from that with tile `tile` on, of a cut
// that is INVARIANT.
struct OwnPartials {
  // tiles: the sequence's first, their number, that behind the last; partials, and which is next
  int first, all, past, count, index;
  DI OwnPartials() {}
  DI OwnPartials(const Sequences& sequences, int s, int tile)
      : first(sequences.first_tile(s)), all(sequences.tiles(s)), past(first + all), count(Sequences::partials(all)),
        index(Sequences::partial_at(tile - first, all, count)) {}
  DI int end() const { return first + Sequences::partial_begin(index + 1, all, count); }
  // lengths may be beyond their bound
  DI int place(const AttendArguments& a) const { return min(index, a.partial_slots - 1); }
  DI u32* next(const AttendArguments& a, const Sequences& sequences, int head, int s) {  // where it goes
    const int row = place(a);
    index++;
    return a.partials + (((i64)head * a.sequences + s) * a.partial_slots + row) * a.all_packed_rows * PARTIAL +
        (i64)sequences.packed_row0 * PARTIAL;
  }
};

// Where a worker is in its run, and what it knows of the sequence there. Tiles are those that the line is cut into, of
// KV_TILE tokens: TILE where a warp works alone.
//
// What is small comes by reference: of values, the compiler would fold branches before it puts these functions into a
// kernel, and the order of its instructions would be another.
struct Work {
  int kv_head, sequence, tile, left;  // tile: the next one; left: tiles of the run behind this stretch
  bool is_held;  // what a stretch of this sequence came to
  // Of a (sequence, kv head), as what follows: where INVARIANT its next partial finds it here.
  OwnPartials own;
  int len, context, low, high, all_see, all_in_window;
  int scored;  // the group of key means whose scores are in shared memory
  bool is_new;  // the (sequence, kv head): nothing of it has been read
  int end;  // of the stretch
  DI Work() : is_held(false), is_new(true) {}
  DI void take(const OwnRun& run) { kv_head = run.head, sequence = run.s, tile = run.tile, left = run.left; }
  DI int seq_head(const AttendArguments& a) const { return kv_head * a.sequences + sequence; }
  DI bool needs_queries() const { return !INVARIANT || is_new; }
  DI void begin_stretch(const AttendArguments& a, const Sequences& sequences) {
    if (INVARIANT && is_new) own = OwnPartials(sequences, sequence, tile);
    end = INVARIANT ? own.end()
                    : min(sequences.last_tile(sequence), tile + min(left, max(MAX_TILES / WORKER_WARPS, 1)));
    if (!INVARIANT || is_new)
      len = a.seq_lens[sequence] - sequences.start(sequence), context = len - sequences.queries(sequence);
    left -= end - tile;
  }
  // Which keys some packed query row does not see.
  DI void begin_sequence(const Sequences& sequences, const int& window) {
    low = sequences.first_slot(sequence), high = sequences.slots(sequence);
    all_see = (RANGES ? min(context + 1, high) : context + 1) / KV_TILE;
    all_in_window = window > 0 ? (sequences.lowest(len - 1, sequences.start(sequence)) + KV_TILE - 1) / KV_TILE : 0;
    if (RANGES) all_in_window = max(all_in_window, (low + KV_TILE - 1) / KV_TILE);
    scored = -1, is_new = false;
  }
  // in between, every packed query row sees every token
  DI bool is_masked() const { return tile < all_in_window || tile >= all_see; }
  DI bool sees(const Sequences& sequences, const int& window, const int& position, const int& key) const {
    return key <= position &&
        (window <= 0 ||
            (CHUNKED ? key >= sequences.lowest(position, sequences.start(sequence)) : position - key < window)) &&
        (!RANGES || key >= low && key < high);
  }
  DI int key_mean_group(const AttendArguments& a) const { return min(tile / GROUP_TILES, a.key_mean_groups - 1); }
  // Packed query rows of a block that the sequence has.
  DI int packed_rows(const Sequences& sequences, const int& packed_row0) const {
    return min(PACKED_ROWS, (INVARIANT || LATENTS ? len - context : sequences.queries(sequence)) * GROUP - packed_row0);
  }
  // Where the worker's partial is held while its sequence goes on: nothing else is there yet.
  DI static u32* held(const AttendArguments& a, const int& worker, const int& packed_row0) {
    return a.partials + ((i64)worker * a.all_packed_rows + packed_row0) * PARTIAL;
  }
  // Where the stretch's partial goes. The last of a run goes to own_end(), in shared memory, to be combined; another's
  // sequence is at its end, or goes on: it is `held` for what is to come of it.
  template <class OwnEnd> DI u32* place(const AttendArguments& a, const Sequences& sequences, const Cut& cut,
      const int& packed_row0, OwnEnd own_end, const bool& goes_on, u32* held) {
    if (INVARIANT) return own.next(a, sequences, kv_head, sequence);
    if (left == 0) return own_end();
    if (goes_on || UNSPLIT && !EITHER) return held;
    return a.partials + ((i64)(cut.workers + seq_head(a)) * a.all_packed_rows + packed_row0) * PARTIAL;
  }
  // To the next sequence, where this one is at its end.
  DI void end_stretch(const AttendArguments& a, const Sequences& sequences) {
    if (left > 0 && !is_held && (!INVARIANT || end == own.past)) {
      if (++sequence == a.sequences) sequence = 0, kv_head++;
      tile = sequences.first_tile(sequence), is_new = true;
    }
  }
};
