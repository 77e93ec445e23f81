// What ranks on several GPUs tell each other: all_reduce adds up their values, all_gather lays their parts side by
// side.
//
//   one shot, for few values: a thread sends its vectors of four to all others, then takes theirs; every rank forms
//       every sum
//   two shots, for many: each rank gets its part of the values from all others, and sends them the sums of that
//   sums are formed in the order of ranks, and have the same bits either way
//   blocks are few: ranks may share a GPU
#include "ampere.cuh"

#include "ranks.cuh"

constexpr int THREADS = 256;

// As `ReduceParams` in collectives.rs.
struct ReduceParams {
  Ranks ranks;
  float* values;  // [elements], this rank's, then the sums
  float* into;  // [elements], what sums are added to, and values stay as they are; or null
  u64 elements;
  u64 part;  // of shots: elements of a rank's part, a multiple of 4; the last ones have less
  u64 begin, most;  // of each part the elements from here on, so many
  u32 shots;  // a bit for each
  u32 aligned;  // both begin at multiples of 16 bytes, and are whole vectors
};

// Four sums, of which `left` are there.
DEV void put_sums(const ReduceParams& p, u64 at, float4 sum, u64 left) {
  if (!p.into) return store_four(p.values, at, sum, F32, left, p.aligned);
  float4 v[1];
  load_fours<1, 1>(p.into + at, left, p.aligned, v);
  v[0] = make_float4(v[0].x + sum.x, v[0].y + sum.y, v[0].z + sum.z, v[0].w + sum.w);
  store_four(p.into, at, v[0], F32, left, p.aligned);
}

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
  for (u64 at = first; at < p.elements; at += step) put_sums(p, at, call.sum(at, own(at)), p.elements - at);
  call.heard();
  call.end();
}

constexpr int BATCH = 4;  // vectors of four that a thread has on their way
// A thread's batches of `length` words: where each begins, and how many words are left from there on.
template <class Each> DEV void batches(u64 length, Each&& each) {
  constexpr u64 OF_BLOCK = 4 * THREADS * BATCH;
  for (u64 at = OF_BLOCK * blockIdx.x + 4 * threadIdx.x; at < length; at += OF_BLOCK * gridDim.x) each(at, length - at);
}

// The first shot: to each rank its part of the values, where it is added up. The second: a rank's part, or its sums, to
// all others.
__global__ void __launch_bounds__(THREADS) in_shots(const __grid_constant__ ReduceParams p) {
  constexpr u32 FIRST = 1, SECOND = 2;
  // The next kernel starts when this one has heard: where ranks share a GPU it would take the room of what this one
  // waits for.
  dependency_wait();
  Call call(p.ranks);
  const u32 rank = p.ranks.rank, size = p.ranks.size;
  auto first = [&](u32 of) { return min(of * p.part, p.elements) + p.begin; };
  auto length = [&](u32 of) {
    const u64 end = min((of + 1) * p.part, p.elements);
    return first(of) < end ? min(p.most, end - first(of)) : 0;
  };
  const u64 behind = p.shots & FIRST ? p.most : 0;  // where the second shot lies in an inbox
  auto load = [&](u64 at, u64 left, float4(&v)[BATCH]) {
    load_fours<BATCH, THREADS>(p.values + at, left, p.aligned, v);
#pragma unroll
    for (int i = 0; i < BATCH; i++) v[i] = Call::sendable(v[i]);
  };
  auto store = [&](u64 at, u64 left, const float4(&v)[BATCH]) {
#pragma unroll
    for (u64 i = 0; i < BATCH; i++) {
      const u64 further = 4 * THREADS * i;
      if (further < left) put_sums(p, at + further, v[i], left - further);
    }
  };
  for (u32 i = 1; i < size && p.shots & FIRST; i++) {
    const u32 to = (rank + i) % size;
    batches(length(to), [&](u64 at, u64 left) {
      float4 v[BATCH];
      load(first(to) + at, left, v);
      call.send_to<BATCH, THREADS>(to, at, left, v);
    });
  }
  batches(length(rank), [&](u64 at, u64 left) {
    float4 sum[BATCH] = {};
    if (p.shots & FIRST) {
#pragma unroll 1
      for (u32 from = 0; from < size; from++) {
        float4 v[BATCH];
        if (from == rank)
          load(first(rank) + at, left, v);
        else
          call.take<BATCH, THREADS>(from, at, left, v);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          sum[i] = make_float4(sum[i].x + v[i].x, sum[i].y + v[i].y, sum[i].z + v[i].z, sum[i].w + v[i].w);
      }
      store(first(rank) + at, left, sum);
    } else {
      load(first(rank) + at, left, sum);
    }
    if (!(p.shots & SECOND)) return;
#pragma unroll
    for (int i = 0; i < BATCH; i++) sum[i] = Call::sendable(sum[i]);
#pragma unroll 1
    for (u32 i = 1; i < size; i++) call.send_to<BATCH, THREADS>((rank + i) % size, behind + at, left, sum);
  });
  for (u32 i = 1; i < size && p.shots & SECOND; i++) {
    const u32 from = (rank + i) % size;
    batches(length(from), [&](u64 at, u64 left) {
      float4 v[BATCH];
      call.take<BATCH, THREADS>(from, behind + at, left, v);
      store(first(from) + at, left, v);
    });
  }
  call.heard();
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
  call.heard();
  call.end();
}
