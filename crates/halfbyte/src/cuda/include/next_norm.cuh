// What a norm leaves for the next one, where products fold that (folded_norm.cuh).
#pragma once
#include "binned_sum.cuh"

struct NextOperands {
  u64* squares;  // [m][BINS]: zeros, to which the product behind adds
  float* scales;  // [m]: powers of two, by which vectors are scaled before products whose sums a factor divides
};

// By 8 lanes, of a row whose factor is 1 / sqrt(mean of squares + eps). The scale is the factor's power of two, so that
// numbers are near 1, times 2^-6: half floats then have 2^22 left above, and 2^8 until they lose bits.
DEV void begin_norm(const NextOperands& next, int row, int lane, float factor) {
  ((uint4*)(next.squares + (u64)row * BINS))[lane] = make_uint4(0, 0, 0, 0);
  if (lane == 0) next.scales[row] = __uint_as_float(__float_as_uint(factor) & 0x7f800000u) * 0.015625f;
}
