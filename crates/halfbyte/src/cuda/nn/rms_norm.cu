// stream += update, if there is one; out = stream / sqrt(mean(stream^2) + eps) * weight, row by row.
//
//   a block owns a row: each thread adds up the squares of its elements, lanes and warps add in a tree, and the row,
//   which is in the cache by now, is read once more
//
// The order of the sum depends on the row's length only.
#include "floats.cuh"

constexpr int THREADS = 256;

// As `Params` in rms_norm.rs.
struct Params {
    float* stream;         // [rows][length]
    const float* update;   // [rows][length], or null
    const float* weight;   // [length]
    void* out;             // [rows][length]
    u64 length;
    float eps;
    FloatType out_type;
};

__global__ void __launch_bounds__(THREADS) rms_norm(const Params p) {
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

    const float factor = 1.0f / sqrtf(sum / float(p.length) + p.eps);
    for (u64 i = threadIdx.x; i < p.length; i += THREADS)
        store_float(p.out, blockIdx.x * p.length + i, row[i] * factor * p.weight[i], p.out_type);
}
