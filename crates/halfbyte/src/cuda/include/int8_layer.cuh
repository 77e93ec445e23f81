// What kernels for layers of bytes are given, whose y may be floats and whose weights may have zero points.
#pragma once
#include "activation.cuh"
#include "floats.cuh"

// As `LayerArguments` in int8/layer.rs.
struct LayerArguments {
  const u8* x;  // images, pixel by pixel
  const u8* w;  // packed weights
  const int* constants;  // [n]
  const int* zeros;  // [n], where weights have zero points
  const float* multipliers;  // [n]
  const float* float_bias;  // [n], or null
  void* y;  // [m][n]
  int x_zero, y_zero;
  float low, high;  // clamp, less the zero point of y; of floats those of CLAMP
  FloatType y_type;  // of floats
  Activation activation;
};
