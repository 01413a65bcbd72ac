// Stands in for the package's wide_products.cuh, as warpgroup.cuh beside it.
#pragma once
#include "warpgroup.cuh"

DI u64 rows_descriptor(u32 address, int slab) { return (u64)1 << 62 | (u64)(8 * MATRIX_ROW / 16) << 32 | (u64)(slab / 16) << 16 | address >> 4; }

template <int N, bool BFLOAT> struct WideProducts {
  static_assert(N >= 1 && N <= 32);
  template <bool ADD> static void scores(float (&d)[N][4], u64 a, u64 b) {
    cpu_exchange(0);
    Product p{d, N, BFLOAT, ADD, {}, b};
    p.from = a;
    cpu_begin_product(p);
  }
  static void weigh(float (&d)[N][4], const u32 (&a)[4], u64 b) {
    const u64 registers[] = {a[0], a[1], a[2], a[3], b};
    const Lanes lanes = cpu_exchange(registers, 5);
    Product p{d, N, BFLOAT, true, {}, b};
    p.across = true;
    cpu_give_rows(p, lanes);
    cpu_begin_product(p);
  }
};
