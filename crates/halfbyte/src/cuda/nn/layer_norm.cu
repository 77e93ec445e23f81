// LayerNorm behind a residual sum: stream += update, if there is one; out = (stream - mean) / sqrt(variance + eps) *
// weight + bias, row by row.
//
//   a block owns a row, in vectors of four: vector v belongs to thread v % THREADS, which keeps its first KEPT in
//       registers, and reads others three times: for the mean, for the variance about that, for the result
//   threads add up columns in ascending order, lanes and warps in a tree: the order depends on the row's length alone
//
// layer_norm_of_ranks adds the sum of all ranks' updates (ranks.cuh), without leaving it anywhere.
#include "ampere.cuh"

#include "ranks.cuh"

constexpr int KEPT = 4;

template <int N> struct Count {
  static constexpr int value = N;
};

// As `Params` in layer_norm.rs.
struct Params {
  float* stream;  // [rows][length]
  const float* update;  // [rows][length], or null
  const float *weight, *bias;  // [length]
  void* out;  // [rows][length]; may be the stream
  u64 length;
  float eps;
  FloatType out_type;
  u32 aligned;  // all begin at multiples of 16 bytes and have whole vectors
  u32 padding;
};

template <int THREADS> DEV float block_sum(float value) {
  __shared__ float of_warps[32];
  value = warp_sum(value);
  __syncthreads();  // what was left before is read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < THREADS / 32 ? of_warps[threadIdx.x % 32] : 0.f);
}

// f of each of four elements, of which `left` are there.
template <class F> DEV void each_of(float4 v, u64 left, F&& f) {
  f(v.x);
  if (left > 1) f(v.y);
  if (left > 2) f(v.z);
  if (left > 3) f(v.w);
}

// The norm of a block's row; `begin` begins the ranks' call.
template <int THREADS, class Begin> DEV void norm_row(const Params& p, Begin&& begin) {
  constexpr u64 STEP = 4 * THREADS;
  const u64 first = 4 * threadIdx.x, left = first < p.length ? p.length - first : 0;
  float4 row[KEPT];
  // Weights are a model's: no kernel before this one writes them.
  for (u64 c = first; c < p.length; c += STEP) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.weight + c));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.bias + c));
  }
  dependency_wait();
  launch_dependents();
  auto call = begin();
  float* const stream = p.stream + blockIdx.x * p.length;
  const u64 sent = blockIdx.x * ((p.length + 3) / 4 * 4);
  // COUNT vectors from column c on, which the update is added to.
  auto read = [&](auto& v, auto& update, auto count, u64 c) {
    constexpr int COUNT = decltype(count)::value;
    const u64 left = c < p.length ? p.length - c : 0;
    load_fours<COUNT, THREADS>(stream + c, left, p.aligned, v);
    if (!p.update) return;
    const float* const from = p.update + blockIdx.x * p.length + c;
    load_fours<COUNT, THREADS>(from, left, p.aligned, update);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (STEP * i < left) call.send(sent + c + STEP * i, call.sendable(update[i]));
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if (STEP * i >= left) continue;
      float4 own[1] = {update[i]};
      // Registers are short while others are waited for.
      if constexpr (decltype(call)::WAITS) load_fours<1, 1>(from + STEP * i, left - STEP * i, p.aligned, own);
      const float4 sum = call.sum(sent + c + STEP * i, call.sendable(own[0]));
      v[i] = make_float4(v[i].x + sum.x, v[i].y + sum.y, v[i].z + sum.z, v[i].w + sum.w);
      store_four(stream, c + STEP * i, v[i], F32, left - STEP * i, p.aligned);
    }
  };
  // f(vector, elements that are there) of each of this thread's vectors.
  auto each = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (STEP * i < left) f(row[i], left - STEP * i);
#pragma unroll 1
    for (u64 c = first + STEP * KEPT; c < p.length; c += STEP) {
      float4 v[1];
      load_fours<1, 1>(stream + c, p.length - c, p.aligned, v);
      f(v[0], p.length - c);
    }
  };
  {
    float4 update[KEPT];
    read(row, update, Count<KEPT>(), first);
  }
#pragma unroll 1
  for (u64 c = first + STEP * KEPT; p.update && c < p.length; c += STEP) {
    float4 v[1], update[1];
    read(v, update, Count<1>(), c);
  }
  float sum = 0, squares = 0;
  each([&](float4 v, u64 there) { each_of(v, there, [&](float x) { sum += x; }); });
  const float mean = block_sum<THREADS>(sum) / float(p.length);
  each([&](float4 v, u64 there) { each_of(v, there, [&](float x) { squares = fmaf(x - mean, x - mean, squares); }); });
  const float factor = 1.0f / sqrtf(block_sum<THREADS>(squares) / float(p.length) + p.eps);
  auto store = [&](u64 c, float4 v) {
    float4 w[1], b[1];
    load_fours<1, 1>(p.weight + c, p.length - c, p.aligned, w);
    load_fours<1, 1>(p.bias + c, p.length - c, p.aligned, b);
    v = make_float4((v.x - mean) * factor * w[0].x + b[0].x, (v.y - mean) * factor * w[0].y + b[0].y,
                    (v.z - mean) * factor * w[0].z + b[0].z, (v.w - mean) * factor * w[0].w + b[0].w);
    store_four(p.out, blockIdx.x * p.length + c, v, p.out_type, p.length - c, p.aligned);
  };
#pragma unroll
  for (int i = 0; i < KEPT; i++)
    if (STEP * i < left) store(first + STEP * i, row[i]);
#pragma unroll 1
  for (u64 c = first + STEP * KEPT; c < p.length; c += STEP) {
    float4 v[1];
    load_fours<1, 1>(stream + c, p.length - c, p.aligned, v);
    store(c, v[0]);
  }
  call.end();
}

template <int THREADS> __global__ void __launch_bounds__(THREADS) layer_norm(const Params p) {
  norm_row<THREADS>(p, [] { return Alone(); });
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) layer_norm_of_ranks(const Params p, const __grid_constant__ Ranks ranks) {
  norm_row<THREADS>(p, [&] { return Call(ranks); });
}
