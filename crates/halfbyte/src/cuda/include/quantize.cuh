// How numbers become codes of 8 bits: the rule of quantize/activations.rs, bit for bit. Every operation is f32, rounded
// once, in the same order.
#pragma once
#include "floats.cuh"

constexpr float LEAST_RANGE = 7.8886090522101181e-31f;  // 2^-100

// Least and greatest, and whether all are finite.
struct Range {
  float low, high;
  bool finite;
};

DEV Range range_of_none() { return {__uint_as_float(0x7f800000), __uint_as_float(0xff800000), true}; }
DEV Range range_of_one(float v) { return {v, v, fabsf(v) < __uint_as_float(0x7f800000)}; }
DEV Range joined(Range a, Range b) { return {fminf(a.low, b.low), fmaxf(a.high, b.high), a.finite && b.finite}; }

// Of as many neighbouring lanes, a power of two, of a whole warp.
DEV Range joined_lanes(Range r, u32 lanes) {
  for (u32 apart = lanes / 2; apart > 0; apart /= 2)
    r = joined(r, {__shfl_xor_sync(0xffffffffu, r.low, apart), __shfl_xor_sync(0xffffffffu, r.high, apart),
                   __shfl_xor_sync(0xffffffffu, int(r.finite), apart) != 0});
  return r;
}

// What takes x to its code.
struct Rule {
  float scale, offset, base, inverse;
  int shift;
};

template <bool OFFSET> DEV Rule rule_of(Range r) {
  constexpr float STEPS = OFFSET ? 255.f : 127.f;
  const float range = OFFSET ? __fsub_rn(r.high, r.low) : fmaxf(fmaxf(r.high, -r.low), 0.f);
  if (!r.finite || !(fabsf(range) < __uint_as_float(0x7f800000)))
    return {__uint_as_float(0x7fc00000), 0.f, 0.f, 0.f, 0};
  if (range < LEAST_RANGE) return {0.f, OFFSET ? r.low : 0.f, 0.f, 0.f, 0};
  const float scale = __fdiv_rn(range, STEPS), inverse = __fdiv_rn(STEPS, range);
  if constexpr (OFFSET)
    return {scale, __fadd_rn(r.low, __fmul_rn(128.f, scale)), r.low, inverse, 128};
  else
    return {scale, 0.f, 0.f, inverse, 0};
}

// From -128 to 127 by the choice of scale; NaN, which a rule without shift makes of it, comes to 0.
DEV int code_of(float x, const Rule& rule) {
  return __float2int_rn(__fmul_rn(__fsub_rn(x, rule.base), rule.inverse)) - rule.shift;
}
