// What the kernels of products with weights as floats are given.
#pragma once
#include "activation.cuh"
#include "floats.cuh"

// As `Params` in dense.rs.
struct Params {
  const void* x;  // [m][k]
  const void* w;  // [n][k]
  const float* bias;  // [n], or null
  void* y;  // [m][n]
  u64 m, n, k;
  FloatType x_type, w_type, y_type;
  u32 by_eight;  // whether rows of x and W begin at 16 bytes
  u32 by_two;  // whether rows of y begin at multiples of two elements
  Activation activation;
  float low, high;  // of a clamp
};

template <bool ACTIVATES> DEV float finished(const Params& p, float sum, float bias) {
  sum += bias;
  if constexpr (ACTIVATES) sum = activate(sum, p.activation, p.low, p.high);
  return sum;
}
