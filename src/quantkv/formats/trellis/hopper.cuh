// A trellis of 2 bits, keys and values alike: a code of 4 bits and the one before it, a byte, index PAIRS, two fp16
// numbers as a word. 256 bytes apart, with a copy of each entry for every lane, that byte is its entry's address.
struct Trellis : ReadBy<Table<256, 1, 256>> {
  static constexpr int BITS = 2, META_BYTES = 2, OVERLAP = 4;
  static constexpr bool VALUES_BY_TABLE = true;
  static constexpr float WIDE = TRELLIS_WIDE;  // of rows whose errors cost by a Hessian
  static DI float scale(u32 meta) { return low(meta); }
  static constexpr u32 PAIRS[] = {TRELLIS_PAIRS};
  static DI void fill(u32 e) { put(e, PAIRS[e % ENTRIES]); }
  static DI u32 at(u32 w, int byte, u32 lane) { return entry(prmt(w, lane, 0x7604 | byte << 4)); }
  static DI u32 key_pair(const u32* w, const u32* shifted, int j, u32 lane) {
    return at((j & 1 ? w : shifted)[j / 8], j % 8 / 2, lane);
  }
  // The numbers of two tokens, two dimensions each, transposed.
  static DI u32 pair(const u32* x, const u32* shifted, int j, u32 lane) {
    const u32 w = (j & 2 ? x : shifted)[j / 8];
    return prmt(at(w, j % 8 / 4, lane), at(w, 2 + j % 8 / 4, lane), j & 1 ? 0x7632 : 0x5410);
  }
};
