// Sums and maxima over a warp.
#pragma once

constexpr u32 ALL_LANES = 0xffffffffu;

DEV float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

DEV float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}
