// What ranks on several GPUs tell each other: all_reduce adds up their values, all_gather lays their parts side by
// side.
//
//   a thread sends its vectors of four to all others, then takes theirs: every rank forms every sum, in the order of
//       ranks
//   blocks are few: ranks may share a GPU
#include "ampere.cuh"

#include "ranks.cuh"

constexpr int THREADS = 256;

// As `ReduceParams` in collectives.rs.
struct ReduceParams {
  Ranks ranks;
  float* values;  // [elements], this rank's, then the sums
  u64 elements;
  u32 aligned;  // values begin at a multiple of 16 bytes, and are whole vectors
  u32 padding;
};

__global__ void __launch_bounds__(THREADS) all_reduce(const __grid_constant__ ReduceParams p) {
  dependency_wait();
  launch_dependents();
  Call call(p.ranks);
  const u64 first = 4 * (u64(blockIdx.x) * THREADS + threadIdx.x), step = u64(4) * THREADS * gridDim.x;
  auto own = [&](u64 at) {
    float4 v[1];
    load_fours<1, 1>(p.values + at, p.elements - at, p.aligned, v);
    return Call::sendable(v[0]);
  };
  for (u64 at = first; at < p.elements; at += step) call.send(at, own(at));
  for (u64 at = first; at < p.elements; at += step)
    store_four(p.values, at, call.sum(at, own(at)), F32, p.elements - at, p.aligned);
  call.end();
}

// As `GatherParams` in collectives.rs.
struct GatherParams {
  Ranks ranks;
  const float* own;  // [rows][width of this rank]
  float* all;  // [rows][width of all]
  u64 rows;
  u32 firsts[MOST_RANKS + 1];  // the column of `all` where each rank's part begins, and the width of all
  u32 padding;
};

__global__ void __launch_bounds__(THREADS) all_gather(const __grid_constant__ GatherParams p) {
  dependency_wait();
  launch_dependents();
  Call call(p.ranks);
  // A launch has few elements of a rank.
  const u32 first = 4 * (blockIdx.x * THREADS + threadIdx.x), step = 4 * THREADS * gridDim.x, rows = u32(p.rows);
  const u32 rank = p.ranks.rank, row = p.firsts[p.ranks.size];
  auto of_part = [&](u32 from) { return rows * (p.firsts[from + 1] - p.firsts[from]); };
  // Four elements of a rank's part, row by row, to their columns.
  auto put = [&](u32 from, u32 at, float4 v) {
    const u32 width = p.firsts[from + 1] - p.firsts[from];
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++)
      if (at + i < rows * width) p.all[u64((at + i) / width) * row + p.firsts[from] + (at + i) % width] = values[i];
  };
  for (u32 at = first; at < of_part(rank); at += step) {
    float4 v[1];
    load_fours<1, 1>(p.own + at, of_part(rank) - at, false, v);
    v[0] = Call::sendable(v[0]);
    call.send(at, v[0]);
    put(rank, at, v[0]);
  }
  for (u32 from = 0; from < p.ranks.size; from++)
    for (u32 at = first; from != rank && !call.failed && at < of_part(from); at += step)
      put(from, at, call.take(from, at));
  call.end();
}
