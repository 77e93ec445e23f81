// x as integers, so that a product with integer codes is exact: mma.sync multiplies bytes, and a number of 32 bits is
// four of them, in four columns of B.
//
//   x of 128 columns (a unit) has one power of two:  x = power * (d0 + 2^8 d1 + 2^16 d2 + 2^24 d3),  -128 <= d <= 127,
//   with |x| / power < 2^30 for the greatest of them. So x is rounded to 2^-30 of that one at worst: an fp16 within
//   2^19 of it is exact. Where an x is infinite or NaN, the power is NaN, and so is each row.
//   A unit in shared memory: digits, as B fragments lie, and the power.
//
// Quantised activations (QUANTIZED) are the same with codes of 8 bits by the rule of quantize.cuh, which are d0 alone,
// and the scale in place of the power. Where a row of weights has one scale, alone or above the factors of its
// groups (ROWS_SCALED), all of x has one such rule (WHOLE), and sums stay integers.
#pragma once
#include "decode_codes.cuh"

constexpr bool QUANTIZED = HB_QUANTIZED, ROWS_SCALED = FACTORS || GROUP == 0, WHOLE = QUANTIZED && ROWS_SCALED;
constexpr u32 POWER = QUANTIZED ? 128 : 512, X_UNIT = POWER + 16;
static_assert(!FACTORS || QUANTIZED, "factors are multiplied with sums of codes");
static_assert(GROUP != 0 || !ZERO, "zero points lie in atoms");

// Words are read four at a time, and a word of a fragment has columns 2c, 2c+8, 2c+1, 2c+9 of 16: these lie together.
DEV u32 place_of(u32 k) { return (k & ~15u) | (k >> 1 & 3) << 2 | (k & 1) << 1 | (k >> 3 & 1); }
DEV u32 column_at(u32 place) { return (place & ~15u) | (place & 1) << 3 | (place >> 2 & 3) << 1 | (place >> 1 & 1); }
// The same for words of two columns, 2i and 2i+1.
DEV u32 place_of_pair(u32 i) { return (i & ~7u) | (i & 3) << 1 | (i >> 2 & 1); }
DEV u32 pair_at(u32 place) { return (place & ~7u) | (place & 1) << 2 | (place >> 1 & 3); }

// What an integer stands for, and what x is multiplied by to become one.
struct Step {
  float power, over;
};
DEV Step step_of(u32 greatest) {  // bits of the greatest |x|
  if constexpr (QUANTIZED) {
    // The symmetric rule of quantize.cuh.
    const float most = __uint_as_float(greatest);
    if (greatest >= 0x7f800000) return {__uint_as_float(0x7fffffff), 0.f};
    if (most < 7.8886090522101181e-31f) return {0.f, 0.f};  // 2^-100
    return {__fdiv_rn(most, 127.f), __fdiv_rn(127.f, most)};
  }
  const u32 e = max(greatest >> 23, 30u), power = e == 255 ? 0x7fffffffu : (e - 29) << 23;
  return {__uint_as_float(power), __uint_as_float(0x7f000000u - power)};
}
// Four columns that lie together: the word of lane c in k16 step `step`.
DEV void put_digits(u32 unit, u32 step, u32 c, const float (&x)[4], float over) {
  if constexpr (QUANTIZED) {
    u32 codes = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) codes |= (u32(__float2int_rn(x[e] * over)) & 255) << (8 * e);
    store_shared(unit + (step >> 2) * 64 + c * 16 + (step & 3) * 4, codes);
  } else {
    u32 y[4];
#pragma unroll
    for (int e = 0; e < 4; e++) y[e] = u32(__float2int_rn(x[e] * over) + 0x00808080) ^ 0x00808080u;
    const u32 a = __byte_perm(y[0], y[1], 0x5140), b = __byte_perm(y[2], y[3], 0x5140),
              d = __byte_perm(y[0], y[1], 0x7362), f = __byte_perm(y[2], y[3], 0x7362);
    const u32 w[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(d, f, 0x5410),
                      __byte_perm(d, f, 0x7632)};
    const u32 at = unit + (step >> 2) * 256 + c * 16 + (step & 3) * 4;
#pragma unroll
    for (u32 n = 0; n < 4; n++) store_shared(at + n * 64, w[n]);
  }
}
// The word of a lane in each of the 8 fragments: those of a digit are one column's.
DEV void load_digits(u32 (&b)[8], u32 unit, u32 lane) {
#pragma unroll
  for (int v = 0; v < 2; v++) {
    u32 w[4] = {};
    if (!QUANTIZED)
      load_shared(w, unit + v * 256 + (lane >> 2 & 3) * 64 + (lane & 3) * 16);
    else if (lane < 4)
      load_shared(w, unit + v * 64 + lane * 16);
    b[4 * v] = w[0], b[4 * v + 1] = w[1], b[4 * v + 2] = w[2], b[4 * v + 3] = w[3];
  }
}
DEV void put_power(u32 unit, float power) { store_shared(unit + POWER, __float_as_uint(power)); }
// Sums start here: an integer from -2^22 to 2^22 added to these bits is that integer added to this float. The greatest
// are those of 128 columns of R+8 in 4 bits, less zero points of up to 16: 16 * 16 * 128 * 128.
constexpr int INTEGER = 0x4b400000;
constexpr float INTEGER_FLOAT = 12582912.0f;
// Codes of 32 columns as bytes: rows R, R+8 in turns. In nibbles those of R+8 are 16 times as great.
constexpr int SHIFT_8 = FIELD == 4 ? 4 : 0, TIMES_8 = 1 << SHIFT_8;
DEV void codes_as_bytes(const Codes& codes, int k32, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u32 words[FIELD / 4];
    words_of_step<8>(codes, 2 * k32 + i, words);
    if constexpr (FIELD == 4) {
      a[2 * i] = words[0] & 0x0f0f0f0f;
      a[2 * i + 1] = words[0] & 0xf0f0f0f0;
    } else {
      a[2 * i] = __byte_perm(words[0], words[FIELD / 8], 0x6240);
      a[2 * i + 1] = __byte_perm(words[0], words[FIELD / 8], 0x7351);
    }
  }
}
