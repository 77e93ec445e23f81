// Sums of floats of 0 or more, exact and the same in whatever order they are added: a value goes to one of 16 whole
// numbers, the bin of its exponent, as a multiple of the bin's unit, 2^(16 bin - 150).
//
// A bin has room for 2^24 values. What is not finite is in the last one, as all from 2^113 on.
//
// Source: Demmel and Nguyen, "Parallel reproducible summation", 2015.
#pragma once
#include "ptx.cuh"

constexpr int BINS = 16;  // a line of memory; as in folded_norm.rs

DEV void add_to_bins(u64* bins, float v) {
  const u32 bits = __float_as_uint(v) & 0x7fffffff, exponent = max(bits >> 23, 1u);
  const u64 mantissa = (bits & 0x7fffff) | (bits >> 23 > 0 ? 0x800000 : 0);
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(bins + exponent / 16), "l"(mantissa << exponent % 16)
               : "memory");
}

// Two bins of eight.
struct Bins {
  u64 v[2];
};
DEV Bins load_bins(const u64* bins, int pair) {
  Bins b;
  asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(b.v[0]), "=l"(b.v[1]) : "l"(bins + 2 * pair) : "memory");
  return b;
}
// Their values: the sum of all eight lanes is that of the bins, within 8 units in the last place. Not a number where
// the last bin is not empty.
DEV float value_of_bins(const Bins& b, int pair) {
  if (pair == BINS / 2 - 1 && b.v[1] > 0) return __int_as_float(0x7fffffff);
  const float root = __uint_as_float(u32(16 * pair - 75 + 127) << 23);
  return (float(b.v[0]) + 65536.f * float(b.v[1])) * root * root;
}
