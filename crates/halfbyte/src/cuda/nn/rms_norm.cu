// RMSNorm behind a residual sum: stream += update, if there is one; out = stream / sqrt(mean(stream^2) + eps) * weight,
// row by row.
//
//   a block owns a row: each thread adds up the squares of its elements, lanes and warps add in a tree, and the row,
//   which is in the cache by now, is read once more
//
// The order of the sum depends on the row's length only.
//
// rms_norm_quantized makes codes of 8 bits of what rms_norm would have left, so that no other kernel reads it: the same
// numbers, rounded to the same type, by quantize_rows.cuh.
#include "quantize_rows.cuh"

#include "ampere.cuh"

constexpr int THREADS = 256;

// As `Rows` in rms_norm.rs.
struct Rows {
  float* stream;  // [rows][length]
  const float* update;  // [rows][length], or null
  const float* weight;  // [length]
  u64 length;
  float eps;
  FloatType out_type;
};

// As `Params` and `QuantizedParams` in rms_norm.rs.
struct Params {
  Rows rows;
  void* out;  // [rows][length]
};
struct QuantizedParams {
  Rows rows;
  Target to;
};

// Adds the update to a block's row; gives 1 / sqrt(mean(row^2) + eps).
DEV float factor_of_row(const Rows& p) {
  __shared__ float sums[THREADS / 32];
  float* row = p.stream + blockIdx.x * p.length;
  const float* update = p.update ? p.update + blockIdx.x * p.length : nullptr;

  float sum = 0;
  for (u64 i = threadIdx.x; i < p.length; i += THREADS) {
    float value = row[i];
    if (update) row[i] = value += update[i];
    sum = fmaf(value, value, sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; warp++) sum += sums[warp];
  return 1.0f / sqrtf(sum / float(p.length) + p.eps);
}

__global__ void __launch_bounds__(THREADS) rms_norm(const Params p) {
  const Rows& r = p.rows;
  const float factor = factor_of_row(r);
  const float* row = r.stream + blockIdx.x * r.length;
  for (u64 i = threadIdx.x; i < r.length; i += THREADS)
    store_float(p.out, blockIdx.x * r.length + i, row[i] * factor * r.weight[i], r.out_type);
}

// A row of the result.
struct Normed {
  const QuantizedParams& p;
  const float* row;
  float factor;
  // Columns from c on; gives how many there are.
  __device__ __forceinline__ int operator()(u64 c, float (&v)[COLUMNS]) const {
    const int there = columns_there(p.to, c);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
      v[i] = i < there ? rounded(row[c + i] * factor * p.rows.weight[c + i], p.rows.out_type) : 0.f;
    return there;
  }
};

template <int OF_A_GROUP, bool OFFSET>
__global__ void __launch_bounds__(THREADS, 2) rms_norm_quantized(const QuantizedParams p) {
  static_assert(THREADS == BLOCK);
  // As in quantize_activations.cu, and for the same reason not earlier.
  dependency_wait();
  launch_dependents();
  const float factor = factor_of_row(p.rows);
  const Normed columns{p, p.rows.stream + blockIdx.x * p.rows.length, factor};
#pragma unroll 1
  for (u32 block = 0; block < p.to.blocks; block++) {
    quantize_row<OF_A_GROUP, OFFSET>(p.to, blockIdx.x, block, columns);
    if (OF_A_GROUP == WHOLE) __syncthreads();  // what the block shared is about to be another group's
  }
}
