// Types, and every instruction of the machine that C++ has no name for.
#pragma once
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
#define DI __device__ __forceinline__
extern __shared__ __align__(128) u8 shared[];

template <class T> DI void keep(T& x) {  // in a register: the compiler would compute it anew in a loop
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x)); else asm volatile("" : "+r"(x));
}
DI float as_float(u32 x) { return __uint_as_float(x); }
DI u32 as_bits(float x) { return __float_as_uint(x); }
DI float minus_infinity() { return as_float(0xff800000u); }
DI u32 prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
// of four numbers of 4 bits, which prmt() would mask: all are below 4
DI u32 pick(u32 bytes, u32 four) { u32 r; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(bytes), "r"(four)); return r; }
// x >> 16; a mask before it stays one, where the compiler would mask each half behind the shift
DI u32 upper(u32 x) { u32 r; asm("shr.u32 %0, %1, 16;" : "=r"(r) : "r"(x)); return r; }

// Pairs of 16-bit floats in a register, the first in its low half.
DI u32 add2(u32 a, u32 b) { u32 r; asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 mul2(u32 a, u32 b) { u32 r; asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 mul_bfloat2(u32 a, u32 b) { u32 r; asm("mul.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 sub_bfloat2(u32 a, u32 b) { u32 r; asm("sub.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 fma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DI u32 half2(float x, float y) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x)); return r; }
DI u32 bfloat2(float x, float y) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(y), "f"(x)); return r; }
DI float low(u32 h) {
  float f;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(f) : "r"(h));
  return f;
}
DI float high(u32 h) {
  float f;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(f) : "r"(h));
  return f;
}
DI u16 half1(float x) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DI u16 bfloat1(float x) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x)); return r; }
DI u32 max_half2(u32 a, u32 b) { u32 r; asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 min_half2(u32 a, u32 b) { u32 r; asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 max_size_half2(u32 a, u32 b) {  // of a, which is not negative, and |b|; NaN where one is
  u32 r;
  asm("{.reg .b32 y; abs.f16x2 y, %2; max.NaN.f16x2 %0, %1, y;}" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DI u32 saturate_half2(u32 x) {  // infinities become the largest numbers; NaN stays NaN
  asm("{.reg .b32 y; min.NaN.f16x2 y, %0, %1; max.NaN.f16x2 %0, y, %2;}"
      : "+r"(x)
      : "r"(0x7bff7bffu), "r"(0xfbfffbffu));
  return x;
}
DI u32 max_bfloat2(u32 a, u32 b) { u32 r; asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 min_bfloat2(u32 a, u32 b) { u32 r; asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }

// 8-bit floats: two, in the low half of a register.
DI u32 half2_of_e4m3(u32 x) {
  u32 r;
  asm("{.reg .b16 x, y; mov.b32 {x, y}, %1; cvt.rn.f16x2.e4m3x2 %0, x;}" : "=r"(r) : "r"(x));
  return r;
}
DI u32 e4m3x2(float x, float y) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
  return r;
}
DI u32 e5m2x2(float x, float y) {
  u16 r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(y), "f"(x));
  return r;
}

// Approximations of float32 functions.
DI float pow2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float lg2(float x) { float r; asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float inverse(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DI float inverse_root(float x) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

// c [16, 8] += a [16, 16] b [16, 8], in float32. Of lane 4 g + c: rows g and g + 8, columns 2 c and 2 c + 1.
#define MMA(NAME, ELEMENT) \
  DI void NAME(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT \
        ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
  }
MMA(mma, "f16")
MMA(mma_bfloat, "bf16")
#undef MMA
// The same of 8-bit integers, with signs, exactly: a [16, 32], b [32, 8].
DI void mma_integers(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DI u32 transpose(u32 x) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x)); return r; }

// Shared memory, by its 32-bit addresses.
DI u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
template <int BYTES> DI void load_shared(u32 a, u32* w) {
  if constexpr (BYTES == 2) { u16 h; asm volatile("ld.shared.b16 %0, [%1];" : "=h"(h) : "r"(a)); w[0] = h; }
  else if constexpr (BYTES == 4) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w[0]) : "r"(a));
  else if constexpr (BYTES == 8) asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(a));
  else asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(a));
}
DI void store_shared(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
DI void store_shared(u32 a, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
DI void store_shared(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
template <u32 BASE> DI u32 load_constant(u32 at) {  // of what does not change any more, at BASE + at
  u32 x;
  asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(BASE));
  return x;
}
template <u32 BASE> DI uint2 load_constants(u32 at) {
  uint2 x;
  asm("ld.shared.v2.b32 {%0,%1}, [%2 + %3];" : "=r"(x.x), "=r"(x.y) : "r"(at), "n"(BASE));
  return x;
}
// 8 x 8 matrices of 16-bit numbers as mma takes them: rows 0 to 7, 8 to 15, then both of the next 8 columns. Of each,
// lanes have the address of a row in this order.
DI void load_matrices(u32 at, u32 (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
      : "r"(at)
      : "memory");
}
// 8 x 8 matrices of 16-bit numbers, transposed while they are loaded; lane i of each eight has the address of a row.
DI void load_transposed(u32 at, u32& a, u32& b) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(at));
}
DI void load_transposed(u32 at, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
      : "r"(at));
}

// Global memory: 16 bytes to shared memory, of which the first `bytes` are copied and the rest become zero.
DI const u8* advance(const u8* p, u32 n, u32 step) {  // p + n step, as one instruction
  const u8* r;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(n), "r"(step), "l"(p));
  return r;
}
template <class T> DI void prefetch(const T* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
DI void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DI void copy16_if(bool p, u32 to, const u8* from, int bytes) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %0, 0; @p cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3;}" ::"r"((int)p),
      "r"(to), "l"(from), "r"(bytes));
}
// At once: none is sunk to where it is used.
DI uint2 load_at_once(const uint2* from) {
  uint2 x;
  asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
  return x;
}
DI uint4 load_at_once(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
// And from L2.
DI int load_past_l1(const int* from) {
  int x;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
DI uint4 load_past_l1(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
  return x;
}
DI void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DI void wait_for_all_copies_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Which cluster of the grid this block is of, and which of its blocks it is; one without others is a cluster.
DI int own_cluster() { int x; asm("mov.u32 %0, %%clusterid.x;" : "=r"(x)); return x; }
DI int rank_in_cluster() { int x; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x)); return x; }
// Blocks of a cluster, whole warps of them: a warp says that it came here, and waits for all to have said so. Where
// address p of shared memory is in another block. What one block sends another, eight bytes at a time, a counter there
// counts: it is opened by one thread before anybody comes here, told once how many bytes are to come, and waited for.
DI void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DI void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// All of them come here before any goes on, and what each wrote before, also to another's shared memory, is seen by all
// behind.
DI void meet_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DI u32 in_block(u32 p, int rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(p), "r"(rank));
  return r;
}
DI u8* in_block(u8* p, int rank) {
  u64 r;
  asm("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(rank));
  return (u8*)r;
}
DI void open_counter(u32 at) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(at) : "memory");
}
DI void send(u32 to, u32 counter, u32 x, u32 y) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(to),
      "r"(counter), "r"(x), "r"(y)
      : "memory");
}
DI void expect(u32 counter, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes)
      : "memory");
}
DI void wait_for_bytes(u32 counter) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @!p bra again;}" ::
          "r"(counter)
      : "memory");
}

// Kernels of one stream that overlap.
DI void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
// and lies in a cache that sees no writes
DI void forget_what_was_read() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
