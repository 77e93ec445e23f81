// LayerNorm behind a residual sum: stream += update, if there is one; out = (stream - mean) / sqrt(variance + eps) *
// weight + bias, row by row.
//
//   a block or a cluster owns a row (threads_of_row.cuh), in vectors of four, which its threads have in turn. A thread
//       keeps its first KEPT in registers, and reads others three times: for the mean, for the variance about that,
//       for the result
//   threads add up columns in ascending order, lanes and warps in a tree
//
// layer_norm_of_ranks adds the sum of all ranks' updates (ranks.cuh), without leaving it anywhere.
#include "ampere.cuh"
#include "early_launch.cuh"

#include "ranks.cuh"
#include "threads_of_row.cuh"

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

// The sum of a row; each has its own `of_warps`.
template <class Threads> DEV float sum_of_row(float value, float (&of_warps)[32]) {
  Threads::put(of_warps, Threads::thread() / 32, warp_sum(value));
  Threads::wait();
  return warp_sum(threadIdx.x % 32 < Threads::ALL / 32 ? of_warps[threadIdx.x % 32] : 0.f);
}

// What four elements add to a sum, of which `left` are there: themselves less `mean`, or the squares of that.
template <bool SQUARES> DEV void add_up(float4 v, u64 left, float mean, float& sum) {
  const float of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (u64 i = 0; i < 4; i++)
    if (i < left) sum = SQUARES ? fmaf(of[i] - mean, of[i] - mean, sum) : sum + of[i];
}

// A row, as a thread has it.
template <class Threads, class Call> struct Row {
  static constexpr int THREADS = Threads::ALL, KEPT = Threads::KEPT;
  static constexpr u64 STEP = 4 * THREADS;
  const Params& p;
  Call& call;
  float* stream;
  float4 kept[KEPT];

  // COUNT vectors from column c on, which the update is added to.
  template <int COUNT> __device__ __forceinline__ void read(float4 (&v)[COUNT], u64 c) const {
    const u64 left = c < p.length ? p.length - c : 0;
    if (!p.update) return load_fours<COUNT, THREADS>(stream + c, left, p.aligned, v);
    float4 update[COUNT];
    load_fours<COUNT, THREADS>(p.update + Threads::row() * p.length + c, left, p.aligned, update);
    load_fours<COUNT, THREADS>(stream + c, left, p.aligned, v);
    const u64 sent = Threads::row() * ((p.length + 3) / 4 * 4) + c;
    call.template add_to_all<COUNT, THREADS>(sent, left, update, v);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (STEP * i < left) store_four(stream, c + STEP * i, v[i], F32, left - STEP * i, p.aligned);
  }
  // All of it.
  __device__ __forceinline__ void read() {
    read(kept, 4 * Threads::thread());
#pragma unroll 1
    for (u64 c = 4 * Threads::thread() + STEP * KEPT; p.update && c < p.length; c += STEP) {
      float4 v[1];
      read(v, c);
    }
    call.heard();
  }
  // The sum of its elements, or of the squares of them less `mean`.
  template <bool SQUARES> __device__ __forceinline__ float sum(float mean) const {
    __shared__ float of_warps[32];
    float sum = 0;
    const u64 first = 4 * Threads::thread();
#pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (first + STEP * i < p.length) add_up<SQUARES>(kept[i], p.length - first - STEP * i, mean, sum);
#pragma unroll 1
    for (u64 c = first + STEP * KEPT; c < p.length; c += STEP) {
      float4 v[1];
      load_fours<1, 1>(stream + c, p.length - c, p.aligned, v);
      add_up<SQUARES>(v[0], p.length - c, mean, sum);
    }
    return sum_of_row<Threads>(sum, of_warps);
  }
  // The norm of four elements at column c.
  __device__ __forceinline__ void store(u64 c, float4 v, float4 w, float4 b, float mean, float factor) const {
    v = make_float4((v.x - mean) * factor * w.x + b.x, (v.y - mean) * factor * w.y + b.y,
                    (v.z - mean) * factor * w.z + b.z, (v.w - mean) * factor * w.w + b.w);
    store_four(p.out, Threads::row() * p.length + c, v, p.out_type, p.length - c, p.aligned);
  }
};

// The norm of a row; `begin` begins the ranks' call.
template <bool ALONE, class Begin> DEV void norm_row(const Params& p, Begin&& begin) {
  using Threads = ThreadsOfRow<ALONE>;
  constexpr u64 STEP = 4 * Threads::ALL;
  constexpr int KEPT = Threads::KEPT;
  const u64 first = 4 * Threads::thread();
  const u64 there = first < p.length ? p.length - first : 0;
  float4 weight[KEPT], bias[KEPT];
  auto load_weights = [&]() {
    load_fours<KEPT, Threads::ALL>(p.weight + first, there, p.aligned, weight);
    load_fours<KEPT, Threads::ALL>(p.bias + first, there, p.aligned, bias);
  };
  // Weights are a model's: no kernel before this one writes them.
  constexpr bool BEFORE = Threads::BLOCKS > 1;  // where registers have room for them
  if constexpr (BEFORE) load_weights();
  Threads::meet();
  using Call = decltype(begin());
  // As in rms_norm.cu.
  if constexpr (Call::WAITS)
    dependency_wait();
  else
    wait_and_launch((ALONE ? gridDim.y : gridDim.x) > FEW_ROWS);
  auto call = begin();
  Row<Threads, Call> row{p, call, p.stream + Threads::row() * p.length, {}};
  row.read();
  const float mean = row.template sum<false>(0.f) / float(p.length);
  const float factor = 1.0f / sqrtf(row.template sum<true>(mean) / float(p.length) + p.eps);
  if constexpr (!BEFORE) load_weights();
#pragma unroll
  for (int i = 0; i < KEPT; i++)
    if (first + STEP * i < p.length) row.store(first + STEP * i, row.kept[i], weight[i], bias[i], mean, factor);
#pragma unroll 1
  for (u64 c = first + STEP * KEPT; c < p.length; c += STEP) {
    float4 v[1], w[1], b[1];
    load_fours<1, 1>(row.stream + c, p.length - c, p.aligned, v);
    load_fours<1, 1>(p.weight + c, p.length - c, p.aligned, w);
    load_fours<1, 1>(p.bias + c, p.length - c, p.aligned, b);
    row.store(c, v[0], w[0], b[0], mean, factor);
  }
  call.end();
}

template <bool ALONE> __global__ void __launch_bounds__(ThreadsOfRow<ALONE>::BLOCK) layer_norm(const Params p) {
  norm_row<ALONE>(p, [] { return Alone(); });
}

template <bool ALONE>
__global__ void __launch_bounds__(ThreadsOfRow<ALONE>::BLOCK)
    layer_norm_of_ranks(const Params p, const __grid_constant__ Ranks ranks) {
  norm_row<ALONE>(p, [&] { return Call(ranks); });
}
