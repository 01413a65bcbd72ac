// Stands in for the package's wgmma.cuh, as instructions.cuh beside it. What wgmma reads it finds by its descriptor
// alone, as the PTX ISA has it. Products run as late as they may; what they read or add to must not change until then,
// and a thread's stores that wgmma reads must have been fenced.
#pragma once
#include "instructions.cuh"

constexpr int MATRIX_ROW = 128;
CPU_FN u32 matrix_chunk(int row, int chunk) { return row * MATRIX_ROW + ((chunk ^ row % 8) << 4); }
CPU_FN u64 matrix_descriptor(u32 address) {
  return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | 1 << 16 | address >> 4;
}
CPU_FN u64 rows_descriptor(u32 address, int slab) {
  return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | (u64)(slab / 16) << 16 | address >> 4;
}

// lane 8 m + r: the address of row r of matrix m, its column r
CPU_FN void cpu_store_transposed(const Lanes& lanes, int matrices) {
  const int m = cpu_lane() / 8, column = cpu_lane() % 8;
  if (m >= matrices) return;
  for (int row = 0; row < 8; row++) {
    const u16 x = (u32)lanes(4 * row + column / 2, 1 + m) >> 16 * (column % 2);
    const u32 at = (u32)lanes(cpu_lane());
    cpu_at(at, 16), memcpy(cpu_at(at + 2 * row, 2), &x, 2), cpu_stored(at + 2 * row, 2);
  }
}
CPU_FN void store_transposed(u32 at, u32 a, u32 b) {
  const u64 given[] = {at, a, b};
  cpu_store_transposed(cpu_exchange(given, 3), 2);
}
CPU_FN void store_transposed(u32 at, u32 a, u32 b, u32 c, u32 d) {
  const u64 given[] = {at, a, b, c, d};
  cpu_store_transposed(cpu_exchange(given, 5), 4);
}
CPU_FN void stores_before_wgmma() { cpu_forget_stores(); }

CPU_FN bool meet_any(int id, bool p) { return cpu_meet(id, 128, p); }
CPU_FN void meet(int id) { meet_any(id, false); }

// ---- products
struct Product {  // of this lane: rows g and g + 8 of a, its numbers of d
  float (*d)[4];
  int tiles;
  bool bfloat, add;
  u16 a[2][16];  // where it is in registers
  u64 b;
  std::vector<u32> given, read;  // d, and what it reads of shared memory, as they were
  bool across = false;           // b's rows are summed over, and not those of b^T
  u64 from = 0;                  // of a, where it is in shared memory
  bool integers = false;         // numbers are pairs of 8 bits with signs, and d has 32 bits
};
CPU_VAR std::vector<std::vector<Product>> cpu_products;  // of each thread: what has not run
CPU_VAR std::vector<std::vector<int>> cpu_groups;        // of each thread: products in each group that was committed
CPU_VAR std::vector<int> cpu_begun;
CPU_FN float cpu_number(const Product& p, u16 x) { return p.bfloat ? cpu_of_bfloat(x) : cpu_of_half(x); }
// The address of number k of row n of b^T, or of number n of row k of b: bits 4 to 6 of an address by those of bits 7
// to 9.
CPU_FN u32 cpu_matrix_address(u64 b, int n, int k, bool across = false) {
  const u32 start = (b & 0x3fff) << 4, stride = (b >> 32 & 0x3fff) << 4;
  if (b >> 62 != 1 || (b >> 49 & 7) || start >> 7 & 7)
    cpu_fail("descriptor: neither permuted by 128 bytes nor from a multiple of 1024 on", start);
  const u32 slab = (b >> 16 & 0x3fff) << 4;
  const u32 linear = across ? start + n / 64 * slab + k / 8 * stride + k % 8 * 128 + n % 64 * 2
                            : start + n / 8 * stride + n % 8 * 128 + 2 * k;
  return linear ^ (linear >> 7 & 7) << 4;
}
CPU_FN std::vector<u32> cpu_bits(const Product& p) {
  std::vector<u32> bits;
  for (int n = 0; n < p.tiles; n++)
    for (int i = 0; i < 4; i++) bits.push_back(as_bits(((volatile float(*)[4])p.d)[n][i]));
  return bits;
}
CPU_FN std::vector<u32> cpu_read(const Product& p) {
  std::vector<u32> numbers;
  for (int n = 0; n < p.tiles; n++)
    for (int e = 0; e < 2; e++)
      for (int k = 0; k < 16; k++) {
        const u32 at = cpu_matrix_address(p.b, 8 * n + cpu_lane() % 4 * 2 + e, k, p.across);
        u16 x;
        memcpy(&x, cpu_at(at, 2), 2), cpu_must_be_fenced(at);
        numbers.push_back(x);
      }
  for (int i = 0; p.from && i < 32; i++) {  // of a, this lane's rows
    const u32 at = cpu_matrix_address(p.from, cpu_fiber->thread / 32 % 4 * 16 + cpu_lane() / 4 + i / 16 * 8, i % 16);
    u16 x;
    memcpy(&x, cpu_at(at, 2), 2), cpu_must_be_fenced(at);
    numbers.push_back(x);
  }
  return numbers;
}
template <class T> inline std::vector<T>& cpu_mine(std::vector<std::vector<T>>& all) {
  if ((int)all.size() <= cpu_fiber->thread) all.resize(cpu_fiber->thread + 1);
  return all[cpu_fiber->thread];
}
CPU_FN int cpu_of_integers(u16 x, u16 y) {
  return (signed char)x * (signed char)y + (signed char)(x >> 8) * (signed char)(y >> 8);
}
CPU_FN u16 cpu_of_a(const Product& p, int i, int k) {  // number k of the row of this lane's number i of a tile of d
  return p.from ? p.read[p.tiles * 32 + i / 2 * 16 + k] : p.a[i / 2][k];
}
CPU_FN void cpu_run_product(Product& p) {
  for (int n = 0; p.integers && n < p.tiles; n++)
    for (int i = 0; i < 4; i++) {
      int& sum = ((int(*)[4])p.d)[n][i];
      if (!p.add) sum = 0;
      for (int k = 0; k < 16; k++) sum += cpu_of_integers(cpu_of_a(p, i, k), p.read[(2 * n + i % 2) * 16 + k]);
    }
  if (p.integers) return;
  for (int n = 0; n < p.tiles; n++)
    for (int i = 0; i < 4; i++) {
      double sum = 0;
      for (int k = 0; k < 16; k++)
        sum += (double)cpu_number(p, cpu_of_a(p, i, k)) * cpu_number(p, p.read[(2 * n + i % 2) * 16 + k]);
      p.d[n][i] = (float)((p.add ? p.d[n][i] : 0.0) + sum);
    }
}
CPU_FN void cpu_give_rows(Product& p, const Lanes& lanes) {  // of a, in registers
  for (int r = 0; r < 2; r++)
    for (int k = 0; k < 16; k++) p.a[r][k] = lanes(cpu_lane() / 4 * 4 + k % 8 / 2, k / 8 * 2 + r) >> k % 2 * 16;
}
CPU_FN void cpu_begin_product(Product& p) {
  if (!cpu_mine(cpu_products).size() || cpu_fiber->begun) p.given = cpu_bits(p), p.read = cpu_read(p);
  else cpu_fail("products after others were committed, not begun", 0);
  cpu_mine(cpu_products).push_back(p);
}
// As it stands but for d and what is read of a, which is in registers.
CPU_FN void cpu_multiply(Product p, u32 a0, u32 a1, u32 a2, u32 a3) {
  const u64 registers[] = {a0, a1, a2, a3, p.b, p.add};
  const Lanes lanes = cpu_exchange(registers, 6);
  for (int lane = 0; lane < 32; lane++)
    if (lanes(lane, 4) != p.b || lanes(lane, 5) != (u64)p.add)
      cpu_fail("lanes that multiply by different matrices", lane);
  cpu_give_rows(p, lanes);
  cpu_begin_product(p);
}
template <int N, bool BFLOAT> struct Wgmma {
  template <bool ADD, bool ROWS = false> static void multiply(float (&d)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    static_assert(N >= 1 && N <= 32);
    Product p{d, N, BFLOAT, ADD, {}, b};
    p.across = ROWS;
    cpu_multiply(p, a0, a1, a2, a3);
  }
  template <bool ADD> static void multiply(float (&d)[N][4], u64 a, u64 b) {
    cpu_exchange(0);
    Product p{d, N, BFLOAT, ADD, {}, b};
    p.from = a;
    cpu_begin_product(p);
  }
};
template <int N> struct IntegerWgmma {
  template <bool ADD> static void multiply(int (&d)[N][4], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    Product p{(float(*)[4])d, N, false, ADD, {}, b};
    p.integers = true;
    cpu_multiply(p, a0, a1, a2, a3);
  }
  static void multiply(int (&d)[N][4], u64 a, u64 b) {
    cpu_exchange(0);
    Product p{(float(*)[4])d, N, false, true, {}, b};
    p.from = a, p.integers = true;
    cpu_begin_product(p);
  }
};
CPU_FN void begin_products() { cpu_exchange(0), cpu_fiber->begun = true; }
CPU_FN void commit_products() {
  cpu_exchange(0), cpu_fiber->begun = false;
  int before = 0;
  for (int n : cpu_mine(cpu_groups)) before += n;
  cpu_mine(cpu_groups).push_back((int)cpu_mine(cpu_products).size() - before);
}
template <int N> inline void wait_for_all_products_but() {
  cpu_exchange(0);
  auto& groups = cpu_mine(cpu_groups);
  auto& products = cpu_mine(cpu_products);
  for (const Product& p : products)
    if (cpu_bits(p) != p.given || cpu_read(p) != p.read) cpu_fail("touched while products ran", 0);
  for (; groups.size() > N; groups.erase(groups.begin())) {
    for (int i = 0; i < groups[0]; i++) cpu_run_product(products[i]);
    products.erase(products.begin(), products.begin() + groups[0]);
    for (Product& p : products) p.given = cpu_bits(p);
  }
}
template <int N, class T> DI void keep_tiles(T (&)[N][4]) {}
