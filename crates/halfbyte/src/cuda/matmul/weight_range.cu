// The largest magnitude that a weight may have, from its scales and offsets: |scale| * span + |offset|, span the most
// that a code lies from its zero point. NaN and infinity count as the largest.
#include "floats.cuh"
#include "multiples.cuh"

// As in weight_range.rs.
struct Terms {
  const u8* scales;  // of the first run
  const u8* offsets;  // likewise, or null
  u64 stride, stride_of_four;  // bytes from run to run, of which four lie together, and from four to four
  u64 runs;
  u64 each;  // scales of a run, which lie side by side; of multiples of halves pairs of rows of a unit
  u32* largest;  // the bits of a float that is not negative
  FloatType scale_type;
  float span;
  u32 multiples;  // groups of a unit whose scales (and offsets, if not null) are multiples of halves; else 0
  u32 padding;
};

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) weight_range(const Terms t) {
  u32 largest = 0;
  for (u64 i = u64(blockIdx.x) * THREADS + threadIdx.x; i < t.runs * t.each; i += u64(gridDim.x) * THREADS) {
    const u64 run = i / t.each, at = run / 4 * t.stride_of_four + run % 4 * t.stride, within = i % t.each;
    if (t.multiples) {
      for (u32 group = 0; group < t.multiples; group++) {
        const auto [s, o] = terms_of_pair(t.scales + at, within, group, t.multiples, t.offsets);
        const float most = fabsf(s.r) * t.span + fabsf(o.r), most8 = fabsf(s.r8) * t.span + fabsf(o.r8);
        largest = max(largest, max(__float_as_uint(most), __float_as_uint(most8)));
      }
      continue;
    }
    float most = fabsf(load_float(t.scales + at, within, t.scale_type)) * t.span;
    if (t.offsets) most += fabsf(load_float(t.offsets + at, within, t.scale_type));
    // Bits of floats without a sign are in the order of their values, those of NaN above all.
    largest = max(largest, __float_as_uint(most));
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
  if (threadIdx.x % 32 == 0) atomicMax(t.largest, largest);
}
