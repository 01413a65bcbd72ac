// Stands in for the package's instructions.cuh where its kernels run on a CPU: every thread of a block is a fiber, a
// warp's instructions meet at an exchange of 32 lanes, and a warp runs as far as it gets without the others;
// asynchronous copies arrive as late as they may. Shared memory begins full of 0xff, and an address outside it, or one
// that is not aligned, ends the process. What no kernel changes is compiled once, in runtime.cc.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
#define DI inline __attribute__((always_inline))
#ifdef CPU_RUNTIME
#define CPU_FN
#define CPU_VAR
#else
#define CPU_FN extern inline __attribute__((gnu_inline))  // for an optimizer to see: compiled in runtime.cc alone
#define CPU_VAR extern
#endif
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define threadIdx cpu_thread
#define blockIdx cpu_block
#define blockDim cpu_threads
#define gridDim cpu_grid
#define shared cpu_shared

struct Index { int x, y, z; };
struct Copy { u32 to; const u8* from; int bytes; };
struct Fiber {
  ucontext_t context;
  int thread;
  int in_cluster = 0, met = 0;  // how often it came to the cluster, and has waited there
  bool done, begun, waited;  // begun: products of a warpgroup; waited: for the kernel before
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::vector<u32> stored;  // words of shared memory that wgmma may not read yet
};
struct Sent { u32 to, x, y; };  // to another block
struct Warp { int arrived = 0, phase = 0; u64 slot[2][32][8]; };
CPU_VAR Fiber* cpu_fiber;
struct CpuBlock {  // while another of its cluster runs, what the variables below are of it
  std::vector<u8> memory;
  std::vector<char> stacks;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<u16> unfenced;
  u8* shared;
  std::vector<Sent> sent;
  u32 counter = 0;
  int expected = -1, counted = 0;
  Index index;
  int arrived = 0, phase = 0, alive;
};
CPU_VAR std::vector<CpuBlock>* cpu_cluster;
CPU_VAR CpuBlock* cpu_own;
CPU_VAR int cpu_cluster_arrived;  // threads of all its blocks
CPU_VAR Index cpu_thread, cpu_block, cpu_threads, cpu_grid;
CPU_VAR u8* cpu_shared;
CPU_VAR u32 cpu_origin;  // its 32-bit address: in the highest byte the block of a cluster
CPU_VAR size_t cpu_shared_size;
CPU_VAR Warp* cpu_warps;
CPU_VAR ucontext_t cpu_scheduler;
CPU_VAR int cpu_arrived, cpu_phase, cpu_alive;
CPU_VAR long cpu_early;  // copies by threads that have not waited for the kernel before
CPU_VAR std::vector<const u8*> cpu_unwritten;  // bytes of rows that the kernel before this one writes
CPU_VAR std::vector<u16> cpu_unfenced;  // of each word of shared memory: the thread that stored there, from 1 on, or 0

[[noreturn]] CPU_FN void cpu_fail(const char* what, u32 at) { fprintf(stderr, "%s: %u\n", what, at), abort(); }
CPU_FN void cpu_yield() { Fiber* mine = cpu_fiber; swapcontext(&mine->context, &cpu_scheduler); }
CPU_FN int cpu_lane() { return cpu_fiber->thread % 32; }
struct Lanes { const u64 (*slot)[8]; u64 operator()(int lane, int i = 0) const { return slot[lane & 31][i]; } };
CPU_FN Lanes cpu_exchange(const u64* values, int count) {  // what every lane of the warp gave, once all have
  Warp& warp = cpu_warps[cpu_fiber->thread / 32];
  const int phase = warp.phase;
  for (int i = 0; i < count; i++) warp.slot[phase & 1][cpu_lane()][i] = values[i];
  if (++warp.arrived == 32) warp.arrived = 0, warp.phase++;
  while (warp.phase == phase) cpu_yield();
  return {warp.slot[phase & 1]};
}
CPU_FN Lanes cpu_exchange(u64 value) { return cpu_exchange(&value, 1); }
CPU_FN void __syncwarp() { cpu_exchange(0); }
CPU_FN void cpu_leave() { if (cpu_arrived && cpu_arrived >= cpu_alive) cpu_arrived = 0, cpu_phase++; }
CPU_FN void __syncthreads() {
  const int phase = cpu_phase;
  cpu_arrived++, cpu_leave();
  while (cpu_phase == phase) cpu_yield();
}

CPU_FN int own_cluster() { return cpu_block.x / (int)cpu_cluster->size(); }
CPU_FN int rank_in_cluster() { return cpu_block.x % (int)cpu_cluster->size(); }
CPU_FN void arrive_in_cluster() {
  if (cpu_fiber->in_cluster++ != cpu_fiber->met) cpu_fail("a thread comes to the cluster twice", cpu_fiber->thread);
  cpu_cluster_arrived++;
}
CPU_FN void wait_for_cluster() {
  while (cpu_cluster_arrived < (int)(cpu_cluster->size() * (*cpu_cluster)[0].fibers.size()) * cpu_fiber->in_cluster)
    cpu_yield();
  cpu_fiber->met = cpu_fiber->in_cluster;
}
CPU_FN void meet_in_cluster() { arrive_in_cluster(), wait_for_cluster(); }
CPU_FN u32 in_block(u32 p, int rank) {
  if (rank < 0 || rank >= (int)cpu_cluster->size()) cpu_fail("no such block in the cluster", rank);
  return (p & 0xffffff) | (u32)rank << 24;
}
CPU_FN u8* in_block(u8* p, int rank) {
  if (rank < 0 || rank >= (int)cpu_cluster->size()) cpu_fail("no such block in the cluster", rank);
  if (!cpu_fiber->met) cpu_fail("another block may not be there yet", rank);
  return (*cpu_cluster)[rank].shared + (p - cpu_shared);
}
CPU_FN void open_counter(u32 at) {
  if (at < cpu_origin || at % 8) cpu_fail("address of a counter", at);
  cpu_own->counter = at, cpu_own->expected = -1, cpu_own->counted = 0;
}
CPU_FN void send(u32 to, u32 counter, u32 x, u32 y) {  // it arrives when it is waited for
  CpuBlock& block = (*cpu_cluster)[to >> 24];
  if (cpu_cluster_arrived < (int)(cpu_cluster->size() * block.fibers.size()))
    cpu_fail("sent before all blocks were there", to);
  if (block.alive == 0 || block.counter != counter || to % 8) cpu_fail("nobody counts what is sent", to);
  block.sent.push_back({to & 0xffffff, x, y});
}
CPU_VAR void (*cpu_expected)(u32, int);  // of counters that go from phase to phase, where a kernel has those
CPU_FN void expect(u32 counter, int bytes) {
  if (cpu_expected) return cpu_expected(counter, bytes);
  if (cpu_own->counter != counter || cpu_own->expected >= 0)
    cpu_fail("a counter is told twice, or is not open", counter);
  cpu_own->expected = bytes;
}
CPU_FN void wait_for_bytes(u32 counter) {
  while (cpu_own->expected < 0 || cpu_own->counted < cpu_own->expected) {
    for (const Sent& each : cpu_own->sent) {
      if (each.to < 1024 || each.to + 8 > cpu_shared_size + 1024) cpu_fail("shared address", each.to);
      memcpy(cpu_shared + (each.to - 1024), &each.x, 4), memcpy(cpu_shared + (each.to - 1020), &each.y, 4),
          cpu_own->counted += 8;
    }
    cpu_own->sent.clear();
    if (cpu_own->expected < 0 || cpu_own->counted < cpu_own->expected) cpu_yield();
  }
  if (cpu_own->counted != cpu_own->expected) cpu_fail("more bytes than were expected", cpu_own->counted);
}

// ---- what CUDA C++ has
template <class T> T cpu_from(Lanes lanes, int lane) {
  T x;
  const u64 bits = lanes(lane);
  memcpy(&x, &bits, sizeof(T));
  return x;
}
template <class T> Lanes cpu_give(T x) { u64 bits = 0; memcpy(&bits, &x, sizeof(T)); return cpu_exchange(bits); }
template <class T> T __shfl_sync(u32, T x, int lane) { return cpu_from<T>(cpu_give(x), lane); }
template <class T> T __shfl_xor_sync(u32, T x, int k) { return cpu_from<T>(cpu_give(x), cpu_lane() ^ k); }
template <class T> T __shfl_up_sync(u32, T x, int k) {
  return cpu_from<T>(cpu_give(x), cpu_lane() < k ? cpu_lane() : cpu_lane() - k);
}
template <class T> T __shfl_down_sync(u32, T x, int k) {
  return cpu_from<T>(cpu_give(x), cpu_lane() + k > 31 ? cpu_lane() : cpu_lane() + k);
}
CPU_FN u32 __ballot_sync(u32, bool p) {
  const Lanes lanes = cpu_exchange(p);
  u32 all = 0;
  for (int i = 0; i < 32; i++) all |= (u32)lanes(i) << i;
  return all;
}
CPU_FN bool __any_sync(u32 mask, bool p) { return __ballot_sync(mask, p) != 0; }
CPU_FN int __reduce_add_sync(u32, int x) {
  const Lanes lanes = cpu_exchange((u32)x);
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += (int)lanes(i);
  return sum;
}
CPU_FN int __reduce_max_sync(u32, int x) {
  const Lanes lanes = cpu_exchange((u32)x);
  int most = (int)lanes(0);
  for (int i = 1; i < 32; i++) most = (int)lanes(i) > most ? (int)lanes(i) : most;
  return most;
}
CPU_FN int __ffs(int x) { return __builtin_ffs(x); }
CPU_FN int __popc(u32 x) { return __builtin_popcount(x); }
CPU_FN int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
CPU_FN u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
CPU_FN u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 x = a | (u64)b << 32;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(x >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
CPU_FN u32 __funnelshift_r(u32 low, u32 high, u32 n) { return (u32)((low | (u64)high << 32) >> (n & 31)); }
CPU_FN u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
CPU_FN float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
CPU_FN float __saturatef(float x) { return x >= 1.f ? 1.f : x > 0.f ? x : 0.f; }
CPU_FN float __fmul_rn(float a, float b) { return a * b; }
CPU_FN float __fadd_rn(float a, float b) { return a + b; }
CPU_FN float cpu_round_down(double x) {
  const float f = (float)x;
  return (double)f > x ? std::nextafterf(f, -INFINITY) : f;
}
CPU_FN float __fadd_rd(float a, float b) { return cpu_round_down((double)a + b); }
CPU_FN float __fmaf_rd(float a, float b, float c) { return cpu_round_down((double)a * b + c); }
CPU_FN float __fsqrt_rn(float x) { return std::sqrt(x); }
CPU_FN int __float2int_rz(float x) { return (int)x; }
CPU_FN int atomicAdd(int* p, int n) { const int before = *p; *p += n; return before; }
CPU_FN void __trap() { cpu_fail("trap", 0); }
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
CPU_FN uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
CPU_FN uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
CPU_FN float2 make_float2(float x, float y) { return {x, y}; }
CPU_FN float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class A, class B, class T = std::common_type_t<A, B>> constexpr T min(A a, B b) {
  return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B, class T = std::common_type_t<A, B>> constexpr T max(A a, B b) {
  return (T)a > (T)b ? (T)a : (T)b;
}

// ---- what instructions.cuh has
template <class T> DI void keep(T&) {}
CPU_FN float as_float(u32 x) { return __uint_as_float(x); }
CPU_FN u32 as_bits(float x) { return __float_as_uint(x); }
CPU_FN float minus_infinity() { return as_float(0xff800000u); }
CPU_FN u32 prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
CPU_FN u32 pick(u32 bytes, u32 four) {
  if (four & 0xcccc) cpu_fail("no byte has this number", four);
  return __byte_perm(bytes, 0, four);
}
CPU_FN u32 upper(u32 x) { return x >> 16; }
CPU_FN float cpu_of_half(u16 bits) { _Float16 x; memcpy(&x, &bits, 2); return (float)x; }
CPU_FN u16 cpu_half(double x) { const _Float16 h = (_Float16)x; u16 bits; memcpy(&bits, &h, 2); return bits; }
CPU_FN float cpu_of_bfloat(u16 bits) { return as_float((u32)bits << 16); }
CPU_FN u16 half1(float x) { return cpu_half(x); }
CPU_FN u16 bfloat1(float x) {
  const u32 u = as_bits(x);
  return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
CPU_FN u32 half2(float x, float y) { return half1(x) | (u32)half1(y) << 16; }
CPU_FN u32 bfloat2(float x, float y) { return bfloat1(x) | (u32)bfloat1(y) << 16; }
CPU_FN float low(u32 h) { return cpu_of_half(h & 0xffff); }
CPU_FN float high(u32 h) { return cpu_of_half(h >> 16); }
CPU_FN u32 add2(u32 a, u32 b) { return half2(low(a) + low(b), high(a) + high(b)); }
CPU_FN u32 mul2(u32 a, u32 b) { return half2(low(a) * low(b), high(a) * high(b)); }
CPU_FN u32 fma2(u32 a, u32 b, u32 c) {
  return cpu_half((double)low(a) * low(b) + low(c)) | (u32)cpu_half((double)high(a) * high(b) + high(c)) << 16;
}
CPU_FN u32 max_half2(u32 a, u32 b) { return half2(fmaxf(low(a), low(b)), fmaxf(high(a), high(b))); }
CPU_FN u32 min_half2(u32 a, u32 b) { return half2(fminf(low(a), low(b)), fminf(high(a), high(b))); }
CPU_FN u16 cpu_max_size(u16 a, u16 b) { return (b & 0x7fff) > a ? b & 0x7fff : a; }  // NaN is above all
CPU_FN u32 max_size_half2(u32 a, u32 b) { return cpu_max_size(a, b) | (u32)cpu_max_size(a >> 16, b >> 16) << 16; }
CPU_FN u32 cpu_saturate(u32 h) { return (h & 0x7fff) == 0x7c00 ? (h & 0x8000) | 0x7bff : h; }
CPU_FN u32 saturate_half2(u32 x) { return cpu_saturate(x & 0xffff) | cpu_saturate(x >> 16) << 16; }
CPU_FN u32 mul_bfloat2(u32 a, u32 b) {
  return bfloat2(as_float(a << 16) * as_float(b << 16), as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u));
}
CPU_FN u32 sub_bfloat2(u32 a, u32 b) {
  return bfloat2(as_float(a << 16) - as_float(b << 16), as_float(a & 0xffff0000u) - as_float(b & 0xffff0000u));
}
CPU_FN u32 max_bfloat2(u32 a, u32 b) {
  return bfloat2(fmaxf(cpu_of_bfloat(a), cpu_of_bfloat(b)), fmaxf(cpu_of_bfloat(a >> 16), cpu_of_bfloat(b >> 16)));
}
CPU_FN u32 min_bfloat2(u32 a, u32 b) {
  return bfloat2(fminf(cpu_of_bfloat(a), cpu_of_bfloat(b)), fminf(cpu_of_bfloat(a >> 16), cpu_of_bfloat(b >> 16)));
}
CPU_FN float cpu_of_e4m3(u8 x) {
  const int e = x >> 3 & 15, m = x & 7;
  const float size = (x & 127) == 127 ? NAN : e ? std::ldexp(1.f + m / 8.f, e - 7) : std::ldexp(m / 8.f, -6);
  return x & 128 ? -size : size;
}
CPU_FN u8 cpu_float8(float x, int mantissa, int bias, float largest) {
  if (x != x) return 0x7f;
  const u8 sign = std::signbit(x) ? 128 : 0;
  const float size = std::fmin(std::fabs(x), largest);
  if (size == 0) return sign;
  int e;
  std::frexp(size, &e);
  e = max(e - 1, 1 - bias);
  return sign | ((int)std::nearbyint(std::ldexp(size, mantissa - e)) + ((e + bias - 1) << mantissa));
}
CPU_FN u32 half2_of_e4m3(u32 x) { return half2(cpu_of_e4m3(x & 255), cpu_of_e4m3(x >> 8 & 255)); }
CPU_FN u32 e4m3x2(float x, float y) { return cpu_float8(x, 3, 7, 448) | (u32)cpu_float8(y, 3, 7, 448) << 8; }
CPU_FN u32 e5m2x2(float x, float y) { return cpu_float8(x, 2, 15, 57344) | (u32)cpu_float8(y, 2, 15, 57344) << 8; }
CPU_FN float pow2(float x) { return exp2f(x); }
CPU_FN float lg2(float x) { return log2f(x); }
// as far off as a GPU's may be
CPU_FN float inverse(float x) {
  const float y = 1.f / x;
  return y != 0.f && std::isfinite(y) ? std::nextafterf(y, 0.f) : y;
}
CPU_FN float inverse_root(float x) { return 1.f / std::sqrt(x); }

template <class F> inline void cpu_mma(float (&c)[4], const u64 (&registers)[6], F number) {
  const Lanes lanes = cpu_exchange(registers, 6);
  const int g = cpu_lane() / 4, column0 = cpu_lane() % 4 * 2;
  for (int i = 0; i < 4; i++) {
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      const int column = column0 + i % 2, quarter = k % 8 / 2, shift = k % 2 * 16;
      sum += (double)number(lanes(g * 4 + quarter, k / 8 * 2 + i / 2) >> shift) *
          number(lanes(column * 4 + quarter, 4 + k / 8) >> shift);
    }
    c[i] = (float)(c[i] + sum);
  }
}
CPU_FN void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpu_mma(c, {a0, a1, a2, a3, b0, b1}, cpu_of_half);
}
CPU_FN void mma_bfloat(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  cpu_mma(c, {a0, a1, a2, a3, b0, b1}, cpu_of_bfloat);
}
CPU_FN void mma_integers(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const Lanes lanes = cpu_exchange(std::vector<u64>{a0, a1, a2, a3, b0, b1}.data(), 6);
  const int g = cpu_lane() / 4, column0 = cpu_lane() % 4 * 2;
  for (int i = 0; i < 4; i++) {
    for (int k = 0; k < 32; k++) {
      const int quarter = k % 16 / 4, shift = k % 4 * 8;
      c[i] += (signed char)(lanes(g * 4 + quarter, k / 16 * 2 + i / 2) >> shift) *
          (signed char)(lanes((column0 + i % 2) * 4 + quarter, 4 + k / 16) >> shift);
    }
  }
}
CPU_FN u32 transpose(u32 x) {
  const Lanes lanes = cpu_exchange(x);
  const int row = cpu_lane() / 4, column = cpu_lane() % 4 * 2;
  const auto element = [&](int r) { return (u32)lanes(r * 4 + row / 2) >> row % 2 * 16 & 0xffff; };
  return element(column) | element(column + 1) << 16;
}

CPU_FN u32 shared_address(const void* p) { return (u32)((const u8*)p - cpu_shared) + cpu_origin; }
CPU_FN u8* cpu_at(u32 a, int bytes) {
  if (a < cpu_origin || a % bytes || a + bytes > cpu_shared_size + cpu_origin) cpu_fail("shared address", a);
  return cpu_shared + (a - cpu_origin);
}
template <int BYTES> DI void load_shared(u32 a, u32* w) {
  if (BYTES == 2) w[0] = 0;
  memcpy(w, cpu_at(a, BYTES), BYTES);
}
CPU_FN void cpu_stored(u32 a, int bytes) {
  for (u32 word = (a - cpu_origin) / 4; word <= (a - cpu_origin + bytes - 1) / 4; word++)
    cpu_unfenced[word] = cpu_fiber->thread + 1, cpu_fiber->stored.push_back(word);
}
CPU_FN void cpu_forget_stores() {
  for (u32 word : cpu_fiber->stored) if (cpu_unfenced[word] == cpu_fiber->thread + 1) cpu_unfenced[word] = 0;
  cpu_fiber->stored.clear();
}
CPU_FN void cpu_must_be_fenced(u32 a) {
  if (cpu_unfenced[(a - cpu_origin) / 4]) cpu_fail("stored without a fence before wgmma", a);
}
CPU_FN void store_shared(u32 a, u32 x) { memcpy(cpu_at(a, 4), &x, 4), cpu_stored(a, 4); }
CPU_FN void store_shared(u32 a, u32 x, u32 y) {
  const u32 words[] = {x, y};
  memcpy(cpu_at(a, 8), words, 8), cpu_stored(a, 8);
}
CPU_FN void store_shared(u32 a, u32 x, u32 y, u32 z, u32 w) {
  const u32 words[] = {x, y, z, w};
  memcpy(cpu_at(a, 16), words, 16), cpu_stored(a, 16);
}
template <u32 BASE> DI u32 load_constant(u32 at) { u32 x; memcpy(&x, cpu_at(at + BASE, 4), 4); return x; }
template <u32 BASE> DI uint2 load_constants(u32 at) { uint2 x; memcpy(&x, cpu_at(at + BASE, 8), 8); return x; }
CPU_FN u32 cpu_load_transposed(const Lanes& lanes, int matrix) {
  const int row = cpu_lane() / 4, column = cpu_lane() % 4 * 2;
  const auto element = [&](int r) {
    u16 x;
    memcpy(&x, cpu_at((u32)lanes(8 * matrix + r), 16) + 2 * row, 2);
    return (u32)x;
  };
  return element(column) | element(column + 1) << 16;
}
CPU_FN void load_transposed(u32 at, u32& a, u32& b) {
  const Lanes lanes = cpu_exchange(at);
  a = cpu_load_transposed(lanes, 0), b = cpu_load_transposed(lanes, 1);
}
CPU_FN void load_transposed(u32 at, u32& a, u32& b, u32& c, u32& d) {
  const Lanes lanes = cpu_exchange(at);
  a = cpu_load_transposed(lanes, 0), b = cpu_load_transposed(lanes, 1), c = cpu_load_transposed(lanes, 2),
  d = cpu_load_transposed(lanes, 3);
}
CPU_FN void load_matrices(u32 at, u32 (&a)[4]) {
  const Lanes lanes = cpu_exchange(at);
  for (int m = 0; m < 4; m++) memcpy(&a[m], cpu_at((u32)lanes(8 * m + cpu_lane() / 4), 16) + cpu_lane() % 4 * 4, 4);
}

CPU_FN const u8* advance(const u8* p, u32 n, u32 step) { return p + (u64)n * step; }
template <class T> DI void prefetch(const T*) {}
CPU_FN void prefetch_to_l2(const void*) {}
CPU_FN void copy16_if(bool p, u32 to, const u8* from, int bytes) {
  if (!p) return;
  cpu_early += bytes > 0 && !cpu_fiber->waited;
  for (const u8* row : cpu_unwritten)
    if (!cpu_fiber->waited && row >= from && row < from + bytes) cpu_fail("a row was read before it was written", to);
  cpu_at(to, 16), cpu_fiber->open.push_back({to, from, bytes});
}
CPU_FN int load_past_l1(const int* from) { return *from; }
CPU_FN uint4 load_past_l1(const uint4* from) {
  if ((uintptr_t)from % 16) cpu_fail("source of a load", 0);
  return *from;
}
template <class T> DI T load_at_once(const T* from) {
  if ((uintptr_t)from % sizeof(T)) cpu_fail("source of a load", 0);
  return *from;
}
CPU_FN void commit_copies() { cpu_fiber->groups.push_back(cpu_fiber->open), cpu_fiber->open.clear(); }
template <int N> inline void wait_for_all_copies_but() {
  auto& groups = cpu_fiber->groups;
  for (; groups.size() > N; groups.erase(groups.begin()))
    for (const Copy& copy : groups[0]) {
      if ((uintptr_t)copy.from % 16) cpu_fail("source of a copy", copy.to);
      memset(cpu_at(copy.to, 16), 0, 16), memcpy(cpu_at(copy.to, 16), copy.from, copy.bytes), cpu_stored(copy.to, 16);
    }
}
CPU_FN void wait_for_previous_kernel() { cpu_fiber->waited = true; }
CPU_FN void launch_next_kernel() {}
CPU_FN void forget_what_was_read() {}

// ---- barriers that some of the threads of a block have
// threads: that meet there, always as many; of one warpgroup: which
struct Meeting { int threads = 0, group = -1, arrived = 0, phase = 0; bool any[2] = {}; };
CPU_VAR Meeting cpu_meetings[16];
CPU_FN Meeting& cpu_come(int id, int threads, bool p = false) {
  if (id < 1 || id > 15) cpu_fail("barrier", id);
  Meeting& meeting = cpu_meetings[id];
  const int group = threads == 128 ? cpu_fiber->thread / 128 : 0;
  if (meeting.threads && (meeting.threads != threads || meeting.group != group))
    cpu_fail("a barrier of other threads", id);
  meeting.threads = threads, meeting.group = group, meeting.any[meeting.phase & 1] |= p;
  if (++meeting.arrived == threads) meeting.arrived = 0, meeting.any[~meeting.phase & 1] = false, meeting.phase++;
  return meeting;
}
CPU_FN bool cpu_meet(int id, int threads, bool p = false) {
  const int phase = cpu_meetings[id & 15].phase;
  Meeting& meeting = cpu_come(id, threads, p);
  while (meeting.phase == phase) cpu_yield();
  return meeting.any[phase & 1];
}

// ---- a launch: one cluster after the other
CPU_VAR void (*cpu_kernel)();
CPU_FN void cpu_enter() {
  cpu_kernel();
  if (!cpu_fiber->waited) cpu_fail("a thread ended before the kernel that it may overlap", cpu_fiber->thread);
  cpu_fiber->done = true, cpu_alive--, cpu_leave();
  swapcontext(&cpu_fiber->context, &cpu_scheduler);
}
CPU_FN void cpu_begin(CpuBlock& block, int threads) {
  constexpr size_t STACK = 192 * 1024;
  block.memory.resize(cpu_shared_size + 128), block.stacks.resize(STACK * threads), block.fibers.resize(threads);
  block.warps.assign((threads + 31) / 32, Warp());
  block.shared = (u8*)(((uintptr_t)block.memory.data() + 127) / 128 * 128), block.alive = threads,
  block.arrived = block.phase = 0;
  block.sent.clear(), block.counter = 0, block.expected = -1, block.counted = 0;
  for (Meeting& meeting : cpu_meetings) meeting = {};
  memset(block.shared, 0xff, cpu_shared_size), block.unfenced.assign(cpu_shared_size / 4 + 1, 0);
  for (int t = 0; t < threads; t++) {
    Fiber& fiber = block.fibers[t];
    fiber.thread = t, fiber.in_cluster = fiber.met = 0, fiber.done = fiber.begun = fiber.waited = false,
    fiber.groups.clear(), fiber.open.clear(), fiber.stored.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = block.stacks.data() + STACK * t, fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, cpu_enter, 0);
  }
}
CPU_FN void cpu_run(CpuBlock& block) {  // every warp as far as it gets without the others
  cpu_warps = block.warps.data(), cpu_shared = block.shared, cpu_block = block.index;
  cpu_own = &block, cpu_origin = 1024 + ((u32)(&block - cpu_cluster->data()) << 24);
  cpu_arrived = block.arrived, cpu_phase = block.phase, cpu_alive = block.alive, cpu_unfenced.swap(block.unfenced);
  for (size_t w = 0; w < block.warps.size(); w++)
    for (int before = ~block.warps[w].phase; before != block.warps[w].phase;) {
      before = block.warps[w].phase;
      for (int t = 32 * w; t < min(32 * (int)w + 32, (int)block.fibers.size()); t++)
        if (!block.fibers[t].done)
          cpu_fiber = &block.fibers[t], cpu_thread = {t, 0, 0}, swapcontext(&cpu_scheduler, &cpu_fiber->context);
    }
  block.arrived = cpu_arrived, block.phase = cpu_phase, block.alive = cpu_alive, cpu_unfenced.swap(block.unfenced);
}
CPU_FN void cpu_launch(
    void (*kernel)(), int grid_x, int grid_y, int grid_z, int threads, size_t shared_bytes, int cluster = 1) {
  std::vector<CpuBlock> blocks(cluster);
  if (grid_x % cluster) cpu_fail("blocks are no whole clusters", grid_x);
  cpu_kernel = kernel, cpu_shared_size = shared_bytes, cpu_cluster = &blocks,
  cpu_threads = {threads, 1, 1}, cpu_grid = {grid_x, grid_y, grid_z};
  for (int i = 0; i < grid_x * grid_y * grid_z; i += cluster) {
    cpu_cluster_arrived = 0;
    for (int b = 0; b < cluster; b++)
      blocks[b].index = {(i + b) % grid_x, (i + b) / grid_x % grid_y, (i + b) / grid_x / grid_y},
      cpu_begin(blocks[b], threads);
    for (bool alive = true; alive;) {
      alive = false;
      for (CpuBlock& block : blocks) {
        if (block.alive > 0) cpu_run(block);
        alive |= block.alive > 0;
      }
    }
  }
}
