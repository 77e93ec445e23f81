// LayerNorm behind a residual sum: stream += update, if there is one; out = (stream - mean) / sqrt(variance + eps) *
// weight + bias, row by row.
//
//   a block owns a row, and reads it three times: for its mean, for its variance about that, for the result
//   threads add up columns in ascending order, lanes and warps in a tree: the order depends on the row's length alone
#include "ampere.cuh"
#include "floats.cuh"

// As `Params` in layer_norm.rs.
struct Params {
  float* stream;  // [rows][length]
  const float* update;  // [rows][length], or null
  const float *weight, *bias;  // [length]
  void* out;  // [rows][length]; may be the stream
  u64 length;
  float eps;
  FloatType out_type;
};

template <int THREADS> DEV float block_sum(float value) {
  __shared__ float of_warps[32];
  value = warp_sum(value);
  __syncthreads();  // what was left before is read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < THREADS / 32 ? of_warps[threadIdx.x % 32] : 0.f);
}

template <int THREADS> __global__ void __launch_bounds__(THREADS) layer_norm(const Params p) {
  dependency_wait();
  launch_dependents();
  float* const row = p.stream + blockIdx.x * p.length;
  float sum = 0;
  for (u64 c = threadIdx.x; c < p.length; c += THREADS) {
    float v = row[c];
    if (p.update) row[c] = v += p.update[blockIdx.x * p.length + c];
    sum += v;
  }
  const float mean = block_sum<THREADS>(sum) / float(p.length);
  float squares = 0;
  for (u64 c = threadIdx.x; c < p.length; c += THREADS) squares = fmaf(row[c] - mean, row[c] - mean, squares);
  const float factor = 1.0f / sqrtf(block_sum<THREADS>(squares) / float(p.length) + p.eps);
  for (u64 c = threadIdx.x; c < p.length; c += THREADS)
    store_float(p.out, blockIdx.x * p.length + c, (row[c] - mean) * factor * p.weight[c] + p.bias[c], p.out_type);
}
