// Copies a matrix into some columns of a wider one: products that could not be joined come to lie side by side.
#include "floats.cuh"

constexpr int THREADS = 256;

// As `Params` in columns.rs.
struct Params {
  const float* from;  // [rows][width]
  float* to;  // [rows][row_length]
  u64 width, row_length, first, elements;
};

__global__ void __launch_bounds__(THREADS) columns(const Params p) {
  const u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
  if (i < p.elements) p.to[i / p.width * p.row_length + p.first + i % p.width] = p.from[i];
}
