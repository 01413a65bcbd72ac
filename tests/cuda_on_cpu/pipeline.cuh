// Stands in for the package's pipeline.cuh, as instructions.cuh beside it. Boxes arrive as late as they may, and what
// was there before is lost at once; a counter to which more come than it was opened for ends the process. A test
// describes a tensor by seven numbers.
#pragma once
#include <map>

#include "instructions.cuh"

// map: address, heads, rows, size, bytes of a head and a row, rows of a box
struct Box { u32 to; const i64* map; int x, y, z; };
struct Counter { int arrivals, left; i64 bytes; int phase; std::vector<Box> boxes; };
CPU_VAR std::map<u32, Counter> cpu_counters;

CPU_FN Counter& cpu_counter(u32 at) {
  const auto found = cpu_counters.find(at);
  if (found == cpu_counters.end()) cpu_fail("no counter was opened", at);
  return found->second;
}
CPU_FN void cpu_end_phase(Counter& c) { if (c.left == 0 && c.bytes == 0) c.left = c.arrivals, c.phase++; }
CPU_FN void cpu_expect_box(u32 at, int bytes);
CPU_FN void open_phases(u32 at, int arrivals) {
  cpu_at(at, 8), cpu_expected = cpu_expect_box, cpu_counters[at] = {arrivals, arrivals, 0, 0, {}};
}
CPU_FN void phases_are_open() {}
CPU_FN void arrive(u32 at) {
  Counter& c = cpu_counter(at);
  if (c.left == 0) cpu_fail("more threads come than a counter was opened for", at);
  c.left--, cpu_end_phase(c);
}
CPU_FN void cpu_expect_box(u32 at, int bytes) { cpu_counter(at).bytes += bytes, arrive(at); }
// Bytes of row r, column by column: bits 4 to 6 of an address by those of bits 7 to 9.
CPU_FN u16* cpu_of_box(u32 to, int r, int column) {
  const u32 linear = to + 128 * r + 2 * column;
  return (u16*)cpu_at(linear ^ (linear >> 7 & 7) << 4, 2);
}
CPU_FN void load_box(u32 to, const void* map, int x, int y, int z, u32 counter) {
  const Box box{to, (const i64*)map, x, y, z};
  if (to % 1024) cpu_fail("a box does not begin at a multiple of 1024", to);
  for (int r = 0; r < box.map[6]; r++)
    for (int column = 0; column < 64; column++) *cpu_of_box(to, r, column) = 0xffff;
  cpu_counter(counter).boxes.push_back(box);
}
CPU_FN void cpu_arrive(Counter& c, const Box& box) {
  const auto [address, heads, rows, size, head, row, count] = *(const i64(*)[7])box.map;
  for (int r = 0; r < count; r++)
    for (int column = 0; column < 64; column++) {
      const bool there = box.z >= 0 && box.z < heads && box.y + r >= 0 && box.y + r < rows && box.x + column < size;
      *cpu_of_box(box.to, r, column) =
          there ? ((const u16*)(address + box.z * head + (box.y + r) * row))[box.x + column] : 0;
    }
  c.bytes -= count * 128;
}
CPU_FN void wait_for_phase(u32 at, u32 parity) {
  for (Counter& c = cpu_counter(at); (u32)(c.phase & 1) == parity; cpu_yield()) {
    for (const Box& box : c.boxes) cpu_arrive(c, box);
    if (c.boxes.size()) c.boxes.clear(), cpu_end_phase(c);
    if ((u32)(c.phase & 1) != parity) break;
  }
}

template <int N> DI void take_registers() {}
template <int N> DI void give_registers() {}
CPU_FN void wait_for_turn(int id) { cpu_meet(id, 256); }
CPU_FN void give_turn(int id) { cpu_come(id, 256); }
