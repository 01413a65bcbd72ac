// Tiles of a matrix from global to shared memory, and who may use them: what one thread asks for, and counters that
// others wait at.
#pragma once
#include "instructions.cuh"

// A counter goes from phase to phase: `arrivals` threads have come, expect() among them, and all bytes that were
// expected are there. Who waits for a phase's parity goes on when that phase has ended.
DI void open_phases(u32 counter, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(counter), "r"(arrivals) : "memory");
}
DI void phases_are_open() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DI void arrive(u32 counter) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(counter) : "memory");
}
DI void wait_for_phase(u32 counter, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1; @p bra done; bra again; "
      "done: }" ::"r"(counter),
      "r"(parity)
      : "memory");
}
// A box of a tensor, from element x of row y of matrix z on, as `map` says, to shared memory; `counter` counts its
// bytes. What is beyond reads as 0.
DI void load_box(u32 to, const void* map, int x, int y, int z, u32 counter) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(counter)
      : "memory");
}

// Registers of a thread, of all warps of its warpgroup.
template <int N> DI void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DI void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
// Turns of two warpgroups: one waits at `id` until the other has passed there.
DI void wait_for_turn(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
DI void give_turn(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }
