// Units of weights whose scales and offsets are multiples of halves (weight_atom.cuh), with x as digits: for a group of
// columns an integer sum of codes and digits, times the factor of its scale; for an offset the sum of digits, times its
// factor. So a row has one integer sum of scales and one of offsets for 128 columns, each of which the halves multiply.
//
//   The greatest that these sums can be: 16 * 15 * 128 * 32 (codes of 4 bits, 16 times as great) * 63 * 4 groups with
//   offsets, 128 * 128 * 16 * 128 * 8 without; 257 * 128 * 32 * 63 * 4 of offsets. All are below 2^31.
#pragma once
#include "fixed_point.cuh"
#include "multiples.cuh"
#include "persistent_plan.cuh"

template <u32 FORM> struct UnitForm {
  static constexpr bool OFFSETS = FORM & 1;
  static constexpr int BITS_OF_CODE = bits_of(FORM);
  // How many times too great the codes of rows R and R + 8 are.
  static constexpr float TIMES = FORM == 0 ? 16 : FORM == 2 ? 4 : 1, TIMES_OF_8 = FORM < 2 ? 16 : FORM == 2 ? 4 : 1;
};

// Sums of a lane's two digits d0 + 256 d1 over the columns of each group of 32.
struct SumsOfDigits {
  int v[4];
  DEV SumsOfDigits of(const u32 (&b)[8]) {
    SumsOfDigits sums;
    const u32 ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
#pragma unroll
    for (int g = 0; g < 4; g++) {
      int c[4] = {0, 0, 0, 0};
      if (FORMS & 0b1010) mma_sync_int8<true>(c, ones, b[2 * g], b[2 * g + 1]);
      sums.v[g] = c[0] + 256 * c[1];
    }
    return sums;
  }
};

// Byte i of a word as a signed number.
DEV int signed_byte(u32 word, int i) {
  int v;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(v) : "r"(word), "r"(0x8880 | 0x1111 * i));
  return v;
}
// A lane's codes of half a unit, four k16 steps, as bytes of rows R and of R + 8; those without offsets less their
// middle.
template <u32 FORM> DEV void load_bytes(u32 at, u32 lane, u32 (&r)[4], u32 (&r8)[4]) {
  constexpr int BITS_OF_CODE = UnitForm<FORM>::BITS_OF_CODE;
  if constexpr (BITS_OF_CODE == 3) {  // nibbles, whose zero 8 comes off
    u32 low[2];
    load_shared(low, at + lane * 8);
    const u32 high = load_shared(at + 256 + lane * 4);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const u32 upper = s < 2 ? high << (2 - s) : high >> (s - 2),
                word = and_or(upper, 0x44444444, low[s / 2] >> (s % 2 * 2) & 0x33333333) + 0x44444444;
      r[s] = and_xor(word << 4, 0xf0f0f0f0, 0x80808080), r8[s] = and_xor(word, 0xf0f0f0f0, 0x80808080);
    }
    return;
  }
  u32 low[4];
  load_shared(low, at + lane * 16);
  if constexpr (BITS_OF_CODE == 4) {
#pragma unroll
    for (int s = 0; s < 4; s++) r[s] = low[s] & 0x0f0f0f0f, r8[s] = low[s] & 0xf0f0f0f0;
  } else if constexpr (BITS_OF_CODE == 5) {
    const u32 high = load_shared(at + 512 + lane * 4);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 words[2];  // of codes of 8 bits
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int up = 4 - 2 * s - i;
        words[i] = and_or(up > 0 ? high << up : high >> -up, 0x10101010, (i ? low[s] >> 4 : low[s]) & 0x0f0f0f0f);
      }
      r[s] = __byte_perm(words[0], words[1], 0x6240), r8[s] = __byte_perm(words[0], words[1], 0x7351);
    }
  } else {
    u32 high[2];
    load_shared(high, at + 512 + lane * 8);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 words[2];  // of codes of 8 bits
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 upper = high[s / 2] << (6 - 4 * (s % 2) - 2 * i);
        words[i] = and_or(i ? low[s] >> 2 : low[s] << 2, 0x3c3c3c3c, and_xor(upper, 0xc0c0c0c0, 0x80808080));
      }
      r[s] = __byte_perm(words[0], words[1], 0x6240), r8[s] = __byte_perm(words[0], words[1], 0x7351);
    }
  }
}
// A row block's unit times x, added to the sums of rows R and R + 8. `weight`: what the lane's digits stand for.
template <u32 FORM>
DEV void multiply_unit(u32 at, u32 lane, const u32 (&b)[8], const SumsOfDigits& digits, float weight, Sums& sum) {
  typedef UnitForm<FORM> Form;
  const u32 scales = at + codes_of(FORM), pair = lane >> 2;
  u32 words[4];
  load_shared(words, scales + words_of_pair(pair));
  const u32 last = load_shared(scales + last_of_pair<false>(pair));
  int of_scales[4] = {0, 0, 0, 0}, of_offsets[2] = {0, 0};  // rows R, R + 8 of both digits; of both together
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 r[4], r8[4];
    load_bytes<FORM>(at + half * (codes_of(FORM) / 2), lane, r, r8);
#pragma unroll
    for (int i = 0; i < (Form::OFFSETS ? 2 : 4); i++) {
      int c[4] = {0, 0, 0, 0}, factor, factor8;
      if constexpr (Form::OFFSETS) {
        const int g = 2 * half + i;
        const u32 a[4] = {r[2 * i], r8[2 * i], r[2 * i + 1], r8[2 * i + 1]}, word = words[g];
        mma_sync_int8<true>(c, a, b[2 * g], b[2 * g + 1]);
        factor = word & 63, factor8 = word >> 16 & 63;
        of_offsets[0] += int(word >> 6 & 63) * digits.v[g], of_offsets[1] += int(word >> 22 & 63) * digits.v[g];
      } else {
        const int g = 4 * half + i;
        mma_sync_int8_k16<false>(c, r[i], r8[i], b[g]);
        const u32 word = words[g / 2] ^ 0x80808080;
        factor = signed_byte(word, g % 2 * 2), factor8 = signed_byte(word, g % 2 * 2 + 1);
      }
      of_scales[0] += factor * c[0], of_scales[1] += factor * c[1];
      of_scales[2] += factor8 * c[2], of_scales[3] += factor8 * c[3];
    }
  }
  const u32 halves = Form::OFFSETS ? scale_halves(words) : last;
  const float one = fmaf(float(of_scales[1]), 256.0f, float(of_scales[0])) * (weight * (1 / Form::TIMES)),
              other = fmaf(float(of_scales[3]), 256.0f, float(of_scales[2])) * (weight * (1 / Form::TIMES_OF_8));
  sum.x = fmaf(one, half_low(halves), sum.x), sum.y = fmaf(other, half_high(halves), sum.y);
  if constexpr (Form::OFFSETS) {
    sum.x = fmaf(float(of_offsets[0]) * weight, half_low(last), sum.x);
    sum.y = fmaf(float(of_offsets[1]) * weight, half_high(last), sum.y);
  }
}
// Those of all steps of a stage.
template <u32 FORM>
DEV void multiply_units(u32 at, u32 lane, const u32 (&b)[STEPS][8], const SumsOfDigits (&digits)[STEPS],
                        const float (&weight)[STEPS], Sums& sum) {
#pragma unroll
  for (u32 k = 0; k < STEPS; k++) multiply_unit<FORM>(at + k * UNIT, lane, b[k], digits[k], weight[k], sum);
}
// The same for a form that the kernel knows when it runs, one of those that the model has.
DEV void multiply_units(u32 form, u32 at, u32 lane, const u32 (&b)[STEPS][8], const SumsOfDigits (&digits)[STEPS],
                        const float (&weight)[STEPS], Sums& sum) {
  constexpr u32 LAST = FORMS >> 3 ? 3 : FORMS >> 2 ? 2 : FORMS >> 1 ? 1 : 0;
  if ((FORMS & 1) && LAST != 0 && form == 0)
    multiply_units<0>(at, lane, b, digits, weight, sum);
  else if ((FORMS & 2) && LAST != 1 && form == 1)
    multiply_units<1>(at, lane, b, digits, weight, sum);
  else if ((FORMS & 4) && LAST != 2 && form == 2)
    multiply_units<2>(at, lane, b, digits, weight, sum);
  else
    multiply_units<LAST>(at, lane, b, digits, weight, sum);
}
