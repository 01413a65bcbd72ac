// A trellis of 2 bits, keys and values alike: a code of 4 bits and the one before it, a byte, index PAIRS, two fp16 numbers as a word.
// 256 bytes apart, with a copy of each entry for every lane, that byte is its entry's address.
struct Trellis : ReadBy<Table<256, 1, 256>> {
  static constexpr int BITS = 2, META_BYTES = 2, JOINED = 2;
  static constexpr int OVERLAP = 4, CHAIN = 16;  // bits of a code that is read with the one before it in its chain of so many bytes
  static constexpr bool VALUES_BY_TABLE = true;
  static constexpr float WIDE = TRELLIS_WIDE;  // of rows whose errors cost by a Hessian
  static DI float scale(u32 meta) { return low(meta); }
  static constexpr u32 PAIRS[] = {TRELLIS_PAIRS};
  static DI void fill(u32 e) { put(e, PAIRS[e % ENTRIES]); }
  static DI u32 at(u32 w, int byte, u32 lane) { return entry(prmt(w, lane, 0x7604 | byte << 4)); }
  static DI u32 key_pair(const u32* w, const u32* shifted, int j, u32 lane) { return at((j & 1 ? w : shifted)[j / 8], j % 8 / 2, lane); }
  // The numbers of two tokens, two dimensions each, transposed.
  static DI u32 pair(const u32* x, const u32* shifted, int j, u32 lane) {
    const u32 w = (j & 2 ? x : shifted)[j / 8];
    return prmt(at(w, j % 8 / 4, lane), at(w, 2 + j % 8 / 4, lane), j & 1 ? 0x7632 : 0x5410);
  }
  // Behind a lane's words: the same moved up by a code, with the code before in the lowest bits, another lane's by a shuffle; 0 before
  // the first of a chain.
  template <int N> static DI u32 key_mask(int c) { return c * N * 4 % CHAIN ? ~0u : 0; }
  template <int N> static DI void join_keys(u32 (&w)[2 * N], u32 mask) {
    constexpr int IN_CHAIN = CHAIN / 4;  // words
    constexpr bool BEGINS = N % IN_CHAIN == 0;  // a chain, with a lane
    u32 last = BEGINS ? 0 : __shfl_up_sync(~0u, w[N - 1], 1);
    if (IN_CHAIN % N == 0) last &= mask;
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (BEGINS ? i % IN_CHAIN == 0 : IN_CHAIN % N && (threadIdx.x % 4 * N + i) % IN_CHAIN == 0) last = 0;
      w[N + i] = __funnelshift_r(last, w[i], 32 - OVERLAP), last = w[i];
    }
  }
  static DI u32 value_mask(int g) { return g ? twice((1u << OVERLAP) - 1) : 0; }
  template <int N> static DI void join_values(u32 (&x)[2 * N], u32 mask) {
    static_assert(CHAIN == 16, "a chain is the 16 bytes of which every lane has two");
    constexpr u32 MOVED = twice(0xffffu << OVERLAP & 0xffff);
#pragma unroll
    for (int k = 0; k < N; k++) x[N + k] = x[k] << OVERLAP & MOVED | __shfl_up_sync(~0u, x[k], 4) >> 16 - OVERLAP & mask;
  }
};
