// What a mixture of experts does beside its products: the choice of experts, rows put together for each, and the sum of
// what the experts of a row have left.
#include "ampere.cuh"
#include "floats.cuh"

constexpr int THREADS = 256, WARPS = 4;

// As `RouteParams` in experts.rs.
struct RouteParams {
  const float* logits;  // [rows][experts]
  u32* ids;  // [rows][top_k]
  float* shares;  // [rows][top_k]
  u32 rows, experts, top_k;
  u32 of_chosen;  // softmax over the chosen, else over all
};

// The greatest and the least that lanes have.
DEV u32 greatest_of_warp(u32 v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(ALL_LANES, v);
#else
  for (int d = 16; d > 0; d /= 2) v = max(v, __shfl_xor_sync(ALL_LANES, v, d));
  return v;
#endif
}
DEV u32 least_of_warp(u32 v) { return ~greatest_of_warp(~v); }

// Is greater where a logit is; above 0 where it is finite.
DEV u32 rank(float logit) {
  const u32 bits = __float_as_uint(logit + 0.f);  // -0 + 0 is 0
  return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

// A warp has a row, a lane each 32nd expert, of which it knows the first that is not chosen yet. Each round takes the
// first of all lanes.
__global__ void __launch_bounds__(32 * WARPS) route(const RouteParams p) {
  const u32 row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  dependency_wait();
  launch_dependents();
  if (row >= p.rows) return;
  const float* const logits = p.logits + u64(row) * p.experts;
  bool finite = true;
  float greatest = __int_as_float(0xff800000);
  u32 own_rank = 0, own_id = 0;
#pragma unroll 4
  for (u32 i = lane; i < p.experts; i += 32) {
    const float logit = logits[i];
    finite &= fabsf(logit) < __int_as_float(0x7f800000);
    greatest = fmaxf(greatest, logit);
    if (rank(logit) > own_rank) own_rank = rank(logit), own_id = i;
  }
  // Where a logit is not finite all shares are NaN, of experts that there are.
  finite = __all_sync(ALL_LANES, finite);
  greatest = finite ? warp_max(greatest) : __int_as_float(0x7fffffff);
  float sum = 0;
  if (!p.of_chosen) {
    for (u32 i = lane; i < p.experts; i += 32) sum += expf(logits[i] - greatest);
    sum = warp_sum(sum);
  }
  const u32 last = (p.top_k - 1) / 32 * 32;  // the choices from there on end the row
#pragma unroll 1
  for (u32 first = 0; first < p.top_k; first += 32) {
    const u32 count = min(32u, p.top_k - first);
    u32 chosen = 0;  // choice `first + lane`
#pragma unroll 1
    for (u32 k = 0; k < count; k++) {
      const u32 best = greatest_of_warp(own_rank), id = least_of_warp(own_rank == best ? own_id : 0xffffffffu);
      if (lane == k) chosen = finite ? id : first + k;
      if (own_id != id) continue;
      own_rank = 0;
#pragma unroll 4
      for (u32 i = lane; i < p.experts; i += 32) {
        const u32 of = rank(logits[i]);
        if ((of < best || (of == best && i > id)) && of > own_rank) own_rank = of, own_id = i;
      }
    }
    const bool there = lane < count;
    const float share = there ? expf(logits[chosen] - greatest) : 0;
    if (p.of_chosen) sum += warp_sum(share);
    const u64 to = u64(row) * p.top_k + first + lane;
    if (there) p.ids[to] = chosen, p.shares[to] = first == last ? share / sum : share;
  }
  for (u32 k = lane; k < last; k += 32) p.shares[u64(row) * p.top_k + k] /= sum;
}

// As `GatherParams` in experts.rs.
struct GatherParams {
  const u16* from;  // [rows_of_from][width]
  const u32* rows;  // [gridDim.x]
  u16* to;  // [gridDim.x][width]
  u64 width;  // in halves
  u32 rows_of_from;
  u32 vectors;  // rows begin at multiples of 16 bytes, and have whole ones
};

// A block copies a row.
__global__ void __launch_bounds__(THREADS) gather(const GatherParams p) {
  dependency_wait();
  launch_dependents();
  const u64 row = min(p.rows[blockIdx.x], p.rows_of_from - 1);  // the limit guards memory
  const u16* const from = p.from + row * p.width;
  u16* const to = p.to + blockIdx.x * p.width;
  if (p.vectors) {
#pragma unroll 1
    for (u64 i = threadIdx.x; i < p.width / 8; i += THREADS)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
#pragma unroll 1
    for (u64 i = threadIdx.x; i < p.width; i += THREADS) to[i] = from[i];
  }
}

// As `CombineParams` in experts.rs.
struct CombineParams {
  const float* from;  // [rows_of_from][width]
  const u32* places;  // [rows][top_k]: rows of from
  const float* shares;  // [rows][top_k]
  float* out;  // [rows][width]
  u64 width;
  u32 rows_of_from, top_k;
  u32 vectors;  // rows begin at multiples of 16 bytes, and have whole ones
  u32 padding;  // of this struct
};

// out = sum of shares * from, in the order of the choice: a row's bits do not depend on others.
// A thread has four columns.
__global__ void __launch_bounds__(THREADS) combine_experts(const CombineParams p) {
  const u64 column = 4 * (u64(blockIdx.y) * THREADS + threadIdx.x), row = blockIdx.x;
  dependency_wait();
  launch_dependents();
  if (column >= p.width) return;
  const u64 left = p.width - column;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (u32 k = 0; k < p.top_k; k++) {
    const u64 place = min(p.places[row * p.top_k + k], p.rows_of_from - 1);  // the limit guards memory
    const float share = p.shares[row * p.top_k + k];
    float4 v[1];
    load_fours<1, 1>(p.from + place * p.width + column, left, p.vectors, v);
    sum = make_float4(fmaf(share, v[0].x, sum.x), fmaf(share, v[0].y, sum.y), fmaf(share, v[0].z, sum.z),
                      fmaf(share, v[0].w, sum.w));
  }
  store_four(p.out, row * p.width + column, sum, F32, left, p.vectors);
}
