// Images as what their codes of 8 bits stand for: what convolutions with quantised activations see.
//
//   a thread has the channels of one pixel that share a scale:
//       least and greatest -> scale, offset (quantize.cuh);  y[pixel][channel] = scale * code + offset, rounded once
//
// A pixel so has the same codes in every window that sees it. y lies pixel by pixel, in f32.
#include "quantize.cuh"

// As `Params` in quantize_pixels.rs.
struct Params {
  const void* x;
  float* y;  // [pixels][channels]
  u64 pixels, plane;  // plane: pixels of an image
  u32 channels, share;  // share: channels of a scale
  FloatType x_type;
  u32 nhwc;
};

template <bool OFFSET> __global__ void __launch_bounds__(256) quantize_pixels(const Params p) {
  const u32 groups = p.channels / p.share;
  const u64 i = u64(blockIdx.x) * 256 + threadIdx.x, pixel = i / groups;
  if (pixel >= p.pixels) return;
  const u32 first = u32(i % groups) * p.share;
  const u64 step = p.nhwc ? 1 : p.plane;
  const u64 from =
      (p.nhwc ? pixel * p.channels : pixel / p.plane * p.channels * p.plane + pixel % p.plane) + first * step;
  Range range = range_of_none();
  for (u32 c = 0; c < p.share; c++) range = joined(range, range_of_one(load_float(p.x, from + c * step, p.x_type)));
  const Rule rule = rule_of<OFFSET>(range);
  float* to = p.y + pixel * p.channels + first;
  for (u32 c = 0; c < p.share; c++)
    to[c] = __fmaf_rn(rule.scale, float(code_of(load_float(p.x, from + c * step, p.x_type), rule)), rule.offset);
}
