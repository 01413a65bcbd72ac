// Rounding of rows by a Hessian (rounding.py): a warp rounds 8 rows of one kv head at four candidate scales.
//
// With M = (1 + F)^T diag(gain) (1 + F), F strictly lower triangular, and p = (1 + F) row: from first to last
// dimension, the nearest level of u = p - F z is taken, z being the levels so far. Of what is left, d = u - z,
//   row M row = sum gain p^2,   row M z = sum gain p (p - d),   z M z = sum gain (p - d)^2.
// A lane holds a row at one candidate scale, u in its units: lane 8 candidate + row. Inside a block of 16 dimensions it
// goes on alone; what the blocks before have fed forward is a product of the tensor core, fp16 with F as fp16
// everywhere (so that M is another by 2^-12, and p, u and d agree), and levels are numbers of fp16. p is such a product
// too, of rows in two fp16 parts: their sum.
//
// Shared memory: F, then for each warp LEVELS, a row of fp16 for each lane, and PRODUCTS, p in float32 for each row,
// which a block's codes replace. 16-byte chunks of a row are permuted by an xor, so that 8 rows at one chunk, and 4
// chunks of 2 rows, lie in 32 banks.
#pragma once
#include "mapped.cuh"

constexpr int BLOCK = 16, BLOCKS = D / BLOCK, COEFFICIENTS = BLOCK * (BLOCK + 1) / 2;
constexpr int STEP_BYTES = 512;  // a product's: 16 x 16 entries, as lanes load them
constexpr int COEFFICIENTS_AT = BLOCKS * (BLOCKS + 1) / 2 * STEP_BYTES,
              FEEDBACK_BYTES = COEFFICIENTS_AT + BLOCKS * COEFFICIENTS * 4;
constexpr int LEVEL_ROW = 2 * D, PRODUCT_ROW = 4 * D, PRODUCTS_AT = 32 * LEVEL_ROW,
              ROUNDING_BYTES = PRODUCTS_AT + 8 * PRODUCT_ROW;
static_assert(FEEDBACK_BYTES == HOST_FEEDBACK_BYTES && ROUNDING_BYTES == HOST_ROUNDING_BYTES,
    "shared memory is laid out in another way in Python");

template <int ROW> DI u32 chunk_at(int row, int chunk) {
  return row * ROW + ((chunk ^ (row & 1) << 2 ^ (row >> 1 & 3)) << 4);
}
constexpr __device__ int before_block(int j) { return j * (j + 1) / 2; }       // products of the blocks before block j
// coefficients of the dimensions before dimension i of a block
constexpr __device__ int before_dim(int i) { return i * (2 * BLOCK + 1 - i) / 2; }

// Levels t (a + b t^2), t = code - (2^BITS - 1) / 2, as a polynomial of the code; and of a number, in odd powers, where
// among the codes it lies, 0 .. 1 from the first to the last. REFINE, of 5 bits and more: for one step of Newton's
// method. round.py has the numbers.
template <int SIDE> struct Odd;  // KEYS or VALUES
enum { KEYS = 1, VALUES = 2 };
#define ODD_CUBIC(SIDE, NAME) \
  template <> struct Odd<SIDE> { \
    static constexpr int BITS = NAME##_BITS; \
    static constexpr float LEVEL[] = {NAME##_LEVEL}, PLACE[] = {NAME##_PLACE}, REFINE[] = {NAME##_REFINE}; \
  };
#ifdef KEY_LEVEL
ODD_CUBIC(KEYS, KEY)
#endif
#ifdef VALUE_LEVEL
ODD_CUBIC(VALUES, VALUE)
#endif

// 2^23 + the code of the level nearest to u. NaN: code 0.
template <int SIDE> DI float nearest_code(float u) {
  constexpr int B = Odd<SIDE>::BITS;
  constexpr auto& P = Odd<SIDE>::PLACE;
  constexpr auto& R = Odd<SIDE>::REFINE;  // edge, p, b, 1 / steps
  constexpr float STEPS = (1 << B) - 1, BASE = 8388608.f;
  if constexpr (B >= 5) u = fminf(fmaxf(u, -R[0]), R[0]);
  const float w = u * u;
  float place;
  if constexpr (B == 2) {
    place = __saturatef(fmaf(P[0], u, 0.5f));
  } else {
    const float tail = B == 3 ? fmaf(P[2], w, P[1]) : fmaf(fmaf(P[4], w, P[3]), w * w, fmaf(P[2], w, P[1]));
    if constexpr (B < 5) {
      place = __saturatef(fmaf(w * u, tail, fmaf(P[0], u, 0.5f)));
    } else {  // in steps from the middle; then nearer to where boundary(s) = s (p + b s^2) is u
      const float s = fmaf(w * u, tail, P[0] * u), t = s * s;
      const float miss = fmaf(s, fmaf(R[2], t, R[1]), -u), slope = fmaf(3.f * R[2], t, R[1]);
      place = __saturatef(fmaf(fmaf(-miss, inverse(slope), s), R[3], 0.5f));
    }
  }
  return fmaf(place, STEPS, BASE);
}
template <int SIDE> DI float level_of(float code) {
  constexpr auto& L = Odd<SIDE>::LEVEL;
  const float z = fmaf(fmaf(L[3], code, L[2]), code * code, fmaf(L[1], code, L[0]));
  // as it is read: what is left of a row is no longer large beside that
  return Odd<SIDE>::BITS < 5 ? z : low(half2(z, 0.f));
}

// What is left of a rounded row, by the Hessian: sum gain d^2, and sum gain p d with p of the row's own units.
struct Left {
  float cost, cross;
};

// Rounds a lane's next 16 dimensions: u[16] with everything fed forward but among themselves, p their products. words:
// their codes, one after the other; halves: their levels, in pairs.
template <int SIDE> DI void round_block(
    float (&u)[BLOCK], const float (&p)[BLOCK], u32 coefficients, Left& left, u32 (&words)[4], u32 (&halves)[8]) {
  constexpr int B = Odd<SIDE>::BITS;
  u32 loaded[4];
  float even = 0.f;
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    // in the order in which they lie: the gain of dimension i, then its feedback to dimension k
    const auto coefficient = [&](int k) {
      const int at = before_dim(i) + k - i;
      if (at % 4 == 0) load_shared<16>(coefficients + 4 * at, loaded);
      return as_float(loaded[at % 4]);
    };
    const float code = nearest_code<SIDE>(u[i]), z = level_of<SIDE>(code - 8388608.f), d = u[i] - z,
                weighted = coefficient(i) * d;
    left.cost = fmaf(weighted, d, left.cost), left.cross = fmaf(weighted, p[i], left.cross);
#pragma unroll
    for (int k = i + 1; k < BLOCK; k++) u[k] = fmaf(coefficient(k), z, u[k]);
    const u32 bits = as_bits(code) - 0x4b000000u;
    const int at = i * B % 32, word = i * B / 32;
    words[word] = at == 0 ? bits : words[word] | bits << at;
    if (at + B > 32) words[word + 1] = bits >> 32 - at;
    if (i % 2) halves[i / 2] = half2(even, z);
    even = z;
  }
}

// acc -= what steps `from` to before `to` of F, or of 1 + F, make of the first 16 rows of LEVELS, and of all 32 if
// TILES is 2. Of lane 4 g + c: rows g and g + 8 of each, dimensions 4 c, 4 c + 1 (first) and 4 c + 2, 4 c + 3 of the
// block.
template <int TILES> DI void feed(float (&acc)[TILES][2][4], u32 levels, u32 steps, int count) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int i = 0; i < count; i++) {
    u32 a[4], b[4];
    load_shared<16>(steps + i * STEP_BYTES + lane * 16, b);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      load_matrices(levels + chunk_at<LEVEL_ROW>(16 * t + lane % 16, 2 * i + lane / 16), a);
      mma(acc[t][0], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma(acc[t][1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}

// A lane's part of a row, E numbers as load_row leaves them, into two fp16 parts: rows g and g + 8 of LEVELS.
DI void put_rows(const float (&x)[E], float unit, u32 levels) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < E / CHUNK; m++) {
    u32 high_part[4], low_part[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = x[CHUNK * m + 2 * i] * unit, b = x[CHUNK * m + 2 * i + 1] * unit;
      high_part[i] = half2(a, b), low_part[i] = half2(a - low(high_part[i]), b - high(high_part[i]));
    }
    store_shared(levels + chunk_at<LEVEL_ROW>(g, 4 * m + c), high_part[0], high_part[1], high_part[2], high_part[3]);
    store_shared(levels + chunk_at<LEVEL_ROW>(g + 8, 4 * m + c), low_part[0], low_part[1], low_part[2], low_part[3]);
  }
  __syncwarp();
}

// p of the rows in LEVELS, into PRODUCTS; row M row of row g, the same in its four lanes.
DI float put_products(u32 feedback, u32 levels) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  float itself = 0.f;
#pragma unroll 1
  for (int j = 0; j < BLOCKS; j++) {
    float acc[1][2][4] = {};
    feed(acc, levels, feedback + before_block(j) * STEP_BYTES, j + 1);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      p[i] = -(acc[0][i / 2][i % 2] + acc[0][i / 2][i % 2 + 2]);
      u32 gain;
      load_shared<4>(feedback + COEFFICIENTS_AT + (j * COEFFICIENTS + before_dim(4 * c + i)) * 4, &gain);
      itself = fmaf(as_float(gain) * p[i], p[i], itself);
    }
    store_shared(levels + PRODUCTS_AT + chunk_at<PRODUCT_ROW>(g, 4 * j + c), as_bits(p[0]), as_bits(p[1]),
        as_bits(p[2]), as_bits(p[3]));
  }
  __syncwarp();
  return over_lanes(itself, [](float a, float b) { return a + b; });
}

// One block for the 32 lanes: what the blocks before feed forward, then dimension after dimension. `inverse`: of each
// candidate scale.
template <int SIDE> DI void next_block(int j, u32 feedback, u32 levels, const float (&inverse)[4], Left& left) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, row = lane % 8;
  const u32 products = levels + PRODUCTS_AT;
  // 64 bytes of a lane's levels that are not taken yet, or not needed any more
  const int room = 2 * min(j, BLOCKS - 2);
  u32 x[4], words[4] = {}, halves[8];
  float acc[2][2][4], u[BLOCK], p[BLOCK];
  load_shared<16>(products + chunk_at<PRODUCT_ROW>(g, 4 * j + c), x);
#pragma unroll
  for (int i = 0; i < 16; i++)
    acc[i / 8][i / 4 % 2][i % 4] = as_float(x[i / 4 % 2 * 2 + i % 2]) * inverse[i / 8 * 2 + i % 4 / 2];
  feed(acc, levels, feedback + before_block(j) * STEP_BYTES, j);
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const auto& tile = acc[n / 2];
    const int at = n % 2 * 2;
    store_shared(levels + chunk_at<LEVEL_ROW>(8 * n + g, room + c), as_bits(tile[0][at]), as_bits(tile[0][at + 1]),
        as_bits(tile[1][at]), as_bits(tile[1][at + 1]));
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < 4; n++) {
    load_shared<16>(levels + chunk_at<LEVEL_ROW>(lane, room + n), x);
#pragma unroll
    for (int i = 0; i < 4; i++) u[4 * n + i] = as_float(x[i]);
    load_shared<16>(products + chunk_at<PRODUCT_ROW>(row, 4 * j + n), x);
#pragma unroll
    for (int i = 0; i < 4; i++) p[4 * n + i] = as_float(x[i]);
  }
  round_block<SIDE>(u, p, feedback + COEFFICIENTS_AT + j * COEFFICIENTS * 4, left, words, halves);
  __syncwarp();  // all four lanes of a row have read its products
  store_shared(products + chunk_at<PRODUCT_ROW>(row, 4 * j + lane / 8), words[0], words[1], words[2], words[3]);
  store_shared(levels + chunk_at<LEVEL_ROW>(lane, 2 * j), halves[0], halves[1], halves[2], halves[3]);
  store_shared(levels + chunk_at<LEVEL_ROW>(lane, 2 * j + 1), halves[4], halves[5], halves[6], halves[7]);
  __syncwarp();
}

// Word `w` of the codes of row g at a candidate scale.
template <int B> DI u32 word_of(u32 products, int g, int candidate, int w) {
  u32 x;
  if constexpr (B % 2 == 0) {
    load_shared<4>(products + chunk_at<PRODUCT_ROW>(g, 4 * (w / (B / 2)) + candidate) + w % (B / 2) * 4, &x);
  } else {  // a block's codes are so many half words
    u32 y;
    load_shared<2>(products + chunk_at<PRODUCT_ROW>(g, 4 * (2 * w / B) + candidate) + 2 * w % B * 2, &x);
    load_shared<2>(products + chunk_at<PRODUCT_ROW>(g, 4 * ((2 * w + 1) / B) + candidate) + (2 * w + 1) % B * 2, &y);
    x |= y << 16;
  }
  return x;
}
