// x = limit * tanh(x / limit), where it lies: caps of logits.
//
//   a thread has one number
#include "floats.cuh"

constexpr int THREADS = 256;

// As `Params` in soft_cap.rs.
struct Params {
  float* x;
  u64 elements;
  float limit;
  u32 padding;  // of this struct
};

__global__ void __launch_bounds__(THREADS) soft_cap(const Params p) {
  const u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
  if (i < p.elements) p.x[i] = p.limit * tanhf(p.x[i] / p.limit);
}
