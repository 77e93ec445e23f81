// RMSNorm behind a residual sum: stream += update, if there is one; out = stream / sqrt(mean(stream^2) + eps) * weight,
// row by row.
//
//   a block or a cluster owns a row (threads_of_row.cuh), in vectors of four: vector v belongs to place v % 1024. A
//       place adds up the squares of its vectors in ascending order; lanes, then warps of places add in a tree
//   of a row alone a thread has one place, of many rows, or short ones, four
//   what a thread has of the row is requested at once and stays in registers, up to its first KEPT vectors
//
// The order of the sum depends on the row's length only, not on the block's size.
//
// rms_norm_of_ranks adds the sum of all ranks' updates (ranks.cuh), without leaving it anywhere.
//
// rms_norm_quantized makes codes of 8 bits of what rms_norm would have left, so that no other kernel reads it: the same
// numbers, rounded to the same type, by quantize_rows.cuh.
#include "quantize_rows.cuh"

#include "ampere.cuh"
#include "next_norm.cuh"
#include "ranks.cuh"
#include "threads_of_row.cuh"

constexpr int PLACES = 1024;

// As `Rows` in rms_norm.rs.
struct Rows {
  float* stream;  // [rows][length]
  const float* update;  // [rows][length], or null
  const float* weight;  // [length]
  u64 length;
  float eps;
  FloatType out_type;
  u32 aligned;  // rows of all matrices begin at multiples of 16 bytes and have whole vectors
  u32 padding;  // of this struct
};

// As `Params` and `QuantizedParams` in rms_norm.rs.
struct Params {
  Rows rows;
  void* out;  // [rows][length]
  float* exact;  // the same before it is rounded to the type of out, or null
  NextOperands next;  // if products fold it, or nulls
};
struct QuantizedParams {
  Rows rows;
  Target to;
};

// COUNT vectors of a thread's from column c on: the update is added to them, that of all ranks in a call of theirs, and
// they are read.
template <class Threads, int COUNT, class Call>
DEV void read_row(const Rows& p, u64 c, float4 (&v)[COUNT], Call& call) {
  constexpr int THREADS = Threads::ALL;
  const u64 at = Threads::row() * p.length + c, left = c < p.length ? p.length - c : 0;
  if (!p.update) return load_fours<COUNT, THREADS>(p.stream + at, left, p.aligned, v);
  float4 update[COUNT];
  load_fours<COUNT, THREADS>(p.update + at, left, p.aligned, update);
  load_fours<COUNT, THREADS>(p.stream + at, left, p.aligned, v);
  const u64 sent = Threads::row() * ((p.length + 3) / 4 * 4) + c;
  call.template add_to_all<COUNT, THREADS>(sent, left, update, v);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const u64 next = u64(4 * THREADS) * i;
    if (next < left) store_four(p.stream, at + next, v[i], F32, left - next, p.aligned);
  }
}

// Adds the update to a row; gives 1 / sqrt(mean(row^2) + eps), and the first vectors of this thread.
template <class Threads, class Call> DEV float factor_of_row(const Rows& p, float4 (&kept)[Threads::KEPT], Call& call) {
  constexpr int THREADS = Threads::ALL, KEPT = Threads::KEPT;
  constexpr int EACH = PLACES / THREADS;  // places of a thread
  static_assert(PLACES % THREADS == 0 && KEPT % EACH == 0, "vectors behind the kept ones begin with the first place");
  __shared__ float of_warps[PLACES / 32];
  float sums[EACH] = {};
  auto add = [&](float4 v, float& sum) {
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
    sum = fmaf(v.z, v.z, sum);
    sum = fmaf(v.w, v.w, sum);
  };
  read_row<Threads>(p, 4 * Threads::thread(), kept, call);
#pragma unroll
  for (int i = 0; i < KEPT; i++) add(kept[i], sums[i % EACH]);
#pragma unroll 1
  for (u64 c = 4 * (Threads::thread() + KEPT * THREADS); !Threads::SHORT && c < p.length; c += 4 * PLACES) {
    float4 more[EACH];
    read_row<Threads>(p, c, more, call);
#pragma unroll
    for (int i = 0; i < EACH; i++) add(more[i], sums[i]);
  }
  call.heard();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    Threads::put(of_warps, (Threads::thread() + i * THREADS) / 32, warp_sum(sums[i]));
  }
  Threads::wait();
  static_assert(PLACES / 32 == 32, "one to a lane");
  return 1.0f / sqrtf(warp_sum(of_warps[threadIdx.x % 32]) / float(p.length) + p.eps);
}

// The norm of a row; `begin` begins the ranks' call. early: whether the next kernel may start before that is heard.
template <bool ALONE, bool SHORT, class Begin> DEV void norm_row(const Params& p, bool early, Begin&& begin) {
  using Threads = ThreadsOfRow<ALONE, SHORT>;
  constexpr int THREADS = Threads::ALL, KEPT = Threads::KEPT;
  const Rows& r = p.rows;
  const u64 row = Threads::row(), first = 4 * Threads::thread();
  float4 weight[KEPT], kept[KEPT];
  auto load_weight = [&]() {
    load_fours<KEPT, THREADS>(r.weight + first, first < r.length ? r.length - first : 0, r.aligned, weight);
  };
  // The weight is a model's: no kernel before this one writes it.
  if constexpr (ALONE) load_weight();
  Threads::meet();
  if (early) launch_dependents();
  dependency_wait();
  auto call = begin();
  const float factor = factor_of_row<Threads>(r, kept, call);
  if (p.next.squares && Threads::thread() < 8) begin_norm(p.next, row, Threads::thread(), factor);
  if constexpr (!ALONE) load_weight();
  auto store = [&](u64 c, float4 v, float4 w) {
    v = make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
    store_four(p.out, row * r.length + c, v, r.out_type, r.length - c, r.aligned);
    if (p.exact) store_four(p.exact, row * r.length + c, v, F32, r.length - c, r.aligned);
  };
#pragma unroll
  for (int i = 0; i < KEPT; i++) {
    const u64 c = first + u64(4 * THREADS) * i;
    if (c < r.length) store(c, kept[i], weight[i]);
  }
#pragma unroll 1
  for (u64 c = first + 4 * KEPT * THREADS; !SHORT && c < r.length; c += 4 * THREADS) {
    float4 v[1], w[1];
    load_fours<1, 1>(r.stream + row * r.length + c, r.length - c, r.aligned, v);
    load_fours<1, 1>(r.weight + c, r.length - c, r.aligned, w);
    store(c, v[0], w[0]);
  }
  call.end();
}

template <bool ALONE, bool SHORT>
__global__ void __launch_bounds__(ThreadsOfRow<ALONE, SHORT>::BLOCK, ThreadsOfRow<ALONE, SHORT>::BLOCKS_AT_LEAST)
    rms_norm(const Params p) {
  norm_row<ALONE, SHORT>(p, true, [] { return Alone(); });
}

template <bool ALONE>
__global__ void __launch_bounds__(ThreadsOfRow<ALONE>::BLOCK)
    rms_norm_of_ranks(const Params p, const __grid_constant__ Ranks ranks) {
  // Where ranks share a GPU, the next kernel must leave room for the others' kernels that this one waits for: it may
  // start when this one has heard.
  norm_row<ALONE, false>(p, ranks.own_gpu, [&] { return Call(ranks); });
}

// A row of the result.
struct Normed {
  const QuantizedParams& p;
  const float* row;
  float factor;
  // Columns from c on; gives how many there are.
  __device__ __forceinline__ int operator()(u64 c, float (&v)[COLUMNS]) const {
    const int there = columns_there(p.to, c);
    float4 of_row[COLUMNS / 4], weight[COLUMNS / 4];
    load_fours<COLUMNS / 4, 1>(row + c, there, p.rows.aligned, of_row);
    load_fours<COLUMNS / 4, 1>(p.rows.weight + c, there, p.rows.aligned, weight);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
      v[i] = i < there ? rounded(element(of_row, i) * factor * element(weight, i), p.rows.out_type) : 0.f;
    return there;
  }
};

template <int OF_A_GROUP, bool OFFSET>
__global__ void __launch_bounds__(BLOCK, 2) rms_norm_quantized(const QuantizedParams p) {
  // As in quantize_activations.cu, and for the same reason not earlier.
  dependency_wait();
  launch_dependents();
  float4 kept[ThreadsOfRow<false>::KEPT];
  Alone alone;
  static_assert(BLOCK == ThreadsOfRow<false>::BLOCK, "a block owns a row");
  const float factor = factor_of_row<ThreadsOfRow<false>>(p.rows, kept, alone);
  const Normed columns{p, p.rows.stream + blockIdx.x * p.rows.length, factor};
#pragma unroll 1
  for (u32 block = 0; block < p.to.blocks; block++) {
    quantize_row<OF_A_GROUP, OFFSET>(p.to, blockIdx.x, block, columns);
    if (OF_A_GROUP == WHOLE) __syncthreads();  // what the block shared is about to be another group's
  }
}
