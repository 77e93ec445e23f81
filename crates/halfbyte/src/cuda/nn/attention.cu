// Causal grouped-query attention of rows of one text over the cache: out = softmax(scale * q * keys^T) * values.
//
//   attention: a block owns one key/value head, a tile of queries (a row's heads of the group, row after row) and a
//   part of the positions:
//       for each run of 32 positions: keys and values -> f32 in shared memory, codes times their scales; values
//           once keys are used, where there is no room for both
//           each warp, for its queries: a lane scores one position; shift the running maximum; weights =
//               2^(score - maximum)
//           sums = sums * 2^(old - new maximum) + weights * values, a lane has every 32nd element of the head
//       one part: out = sums / sum of weights; several: sums, maximum and sum of weights are left in `partial`
//   combine: a block owns a query, each row of a text of its own, and adds the parts up in their order, each shifted to
//   the common maximum
//
// Parts have a length of their own and not a number of their own, so that a query's bits depend on its position alone.
// A position that a query does not see takes no part in its sums: NaN there does not reach it.
//
// With a window w the query at position p sees the positions above p - w only. Runs before those of the first query of
// a block are skipped, and parts are counted from the one in which the window begins. Runs and parts still begin at
// multiples of their lengths, and what is skipped would have weights of 0: the bits are those without skipping.
#include "ampere.cuh"
#include "attention.cuh"

// An element of a key or a value; of codes `scales` has that of each position.
[[maybe_unused]] DEV float load_element(const void* from, const float* scales, u64 position, u64 at, FloatType kind) {
  if (scales) return float(static_cast<const signed char*>(from)[at]) * scales[position];
  return load_float(from, at, kind);
}

// HEAD: size of a head, rounded up to 32; QUERIES: of a warp; WINDOW: whether there is one.
template <int HEAD, int QUERIES, bool WINDOW> __global__ void __launch_bounds__(128, 2) attention(const Params p) {
  constexpr int WARPS = 4;
  constexpr int RUN = 32;  // positions
  constexpr int PADDED = HEAD + 4;  // so that 8 lanes read 16 bytes each from all banks
  constexpr int PER_LANE = HEAD / 32;
#if __CUDA_ARCH__ < 800
  constexpr bool APART = HEAD <= 192;  // as `keys_and_values_apart` in attention.rs
#else
  constexpr bool APART = true;
#endif
  extern __shared__ float4 shared[];
  float* keys = reinterpret_cast<float*>(shared);  // [RUN][PADDED]
  float* values = APART ? keys + RUN * PADDED : keys;  // [RUN][HEAD]
  float* queries = APART ? values + RUN * HEAD : keys + RUN * PADDED;  // [WARPS * QUERIES][HEAD]

  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 group = p.heads / p.kv_heads, kv_head = blockIdx.y, part = blockIdx.z;
  const u32 total = p.rows * group, first = blockIdx.x * WARPS * QUERIES;
  const u64 first_position = position_of(p, 0, p.rows);

  for (u32 i = thread; i < WARPS * QUERIES * HEAD; i += 32 * WARPS) {
    const u32 query = first + i / HEAD, d = i % HEAD;
    float value = 0;
    if (query < total && d < p.head_size) {
      const u32 head = kv_head * group + query % group;
      value = p.qkv[u64(query / group) * p.row_length + u64(head) * p.head_size + d];
    }
    queries[i] = value * (p.scale * LOG2_E);
  }

  // Each query sees positions below `seen`, as many of the last as the window has.
  u64 seen[QUERIES];
  u64 least = ~0ull, most = 0;
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    const u32 query = first + warp * QUERIES + q;
    seen[q] = query < total ? first_position + query / group + 1 : 0;
    least = min(least, seen[q]);
    most = max(most, seen[q]);
  }
  const u32 last = min(first + WARPS * QUERIES, total) - 1;
  const u64 from = first_seen<WINDOW>(p, first_position + first / group + 1);  // of the block's first query
  const u64 part_begin = (WINDOW ? from / p.part_length + part : u64(part)) * p.part_length;
  const u64 begin = WINDOW ? max(part_begin, from / RUN * RUN) : part_begin;
  const u64 end = min(part_begin + p.part_length, first_position + last / group + 1);

  float maximum[QUERIES], weight[QUERIES] = {}, sums[QUERIES][PER_LANE] = {};
  const bool changes = p.cap > 0 || p.slopes;
#pragma unroll
  for (int q = 0; q < QUERIES; q++) maximum[q] = minus_infinity();
  const float* own = queries + warp * QUERIES * HEAD;

  for (u64 run = begin; run < end; run += RUN) {
    __syncthreads();
    const u64 slot = slot_of(p, 0, run);
    const auto element = [&](const void* from, const float* scales, u32 i) {
      const u32 j = i / HEAD, d = i % HEAD;
      const bool within = run + j < end && d < p.head_size;
      const u64 position = u64(kv_head) * p.capacity + slot + j, at = position * p.head_size + d;
      return within ? load_element(from, scales, position, at, p.kind) : 0;
    };
    for (u32 i = thread; i < RUN * HEAD; i += 32 * WARPS) {
      keys[i / HEAD * PADDED + i % HEAD] = element(p.keys, p.key_scales, i);
      if (APART) values[i] = element(p.values, p.value_scales, i);
    }
    __syncthreads();

    float score[QUERIES] = {};
    const float4* key = reinterpret_cast<const float4*>(keys + lane * PADDED);
#pragma unroll 8
    for (int d = 0; d < HEAD / 4; d++) {
      const float4 k = key[d];
#pragma unroll
      for (int q = 0; q < QUERIES; q++) {
        const float4 x = reinterpret_cast<const float4*>(own + q * HEAD)[d];
        score[q] = fmaf(x.x, k.x, fmaf(x.y, k.y, fmaf(x.z, k.z, fmaf(x.w, k.w, score[q]))));
      }
    }
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      if (changes) {
        const u32 head = kv_head * group + (first + warp * QUERIES + q) % group;
        score[q] = changed(score[q], p, slope_of(p, head), int(run + lane) - int(seen[q]) + 1);
      }
      if (run + lane >= seen[q] || (WINDOW && run + lane + p.window < seen[q])) score[q] = minus_infinity();
      const float higher = fmaxf(maximum[q], warp_max(score[q])), base = base_of(higher);
      const float shrink = exp2f(maximum[q] - base);
      maximum[q] = higher;
      score[q] = exp2f(score[q] - base);
      weight[q] = weight[q] * shrink + score[q];
#pragma unroll
      for (int c = 0; c < PER_LANE; c++) sums[q][c] *= shrink;
    }
    if (!APART) {
      __syncthreads();
      for (u32 i = thread; i < RUN * HEAD; i += 32 * WARPS) values[i] = element(p.values, p.value_scales, i);
      __syncthreads();
    }
    const bool all = run + RUN <= least && (!WINDOW || run + p.window >= most);
#pragma unroll 4
    for (int j = 0; j < RUN; j++) {
      float value[PER_LANE];
#pragma unroll
      for (int c = 0; c < PER_LANE; c++) value[c] = values[j * HEAD + c * 32 + lane];
#pragma unroll
      for (int q = 0; q < QUERIES; q++) {
        const float w = __shfl_sync(ALL_LANES, score[q], j);
        if (all || (run + j < seen[q] && (!WINDOW || run + j + p.window >= seen[q]))) {
#pragma unroll
          for (int c = 0; c < PER_LANE; c++) sums[q][c] = fmaf(w, value[c], sums[q][c]);
        }
      }
    }
  }

#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    const u32 query = first + warp * QUERIES + q;
    const float total_weight = warp_sum(weight[q]);
    if (query >= total) continue;
    const u32 head = kv_head * group + query % group;
    const u64 at = u64(query / group) * p.heads + head;
    const float share = p.parts == 1 ? total_of(maximum[q], total_weight, sink_of(p, head)) : 0;
    float* left = p.partial + (at * p.parts + part) * (p.head_size + 2);
#pragma unroll
    for (int c = 0; c < PER_LANE; c++) {
      const u32 d = c * 32 + lane;
      if (d >= p.head_size) continue;
      if (p.parts == 1)
        store_float(p.out, at * p.head_size + d, sums[q][c] / share, p.out_type);
      else
        left[d] = sums[q][c];
    }
    if (p.parts > 1 && lane == 0) {
      left[p.head_size] = maximum[q];
      left[p.head_size + 1] = total_weight;
    }
  }
}

template <int THREADS, bool WINDOW> __global__ void __launch_bounds__(THREADS) combine(const Params p) {
  const u64 query = blockIdx.x, row = query / p.heads;
  dependency_wait();
  launch_dependents();
  const u64 seen = position_of(p, row, 1) + 1;
  const u64 first_part = WINDOW ? first_seen<WINDOW>(p, seen) / p.part_length : 0;
  const u32 parts = min(u64(p.parts), (seen + p.part_length - 1) / p.part_length - first_part);
  const u32 length = p.head_size + 2;
  const float* left = p.partial + query * p.parts * length;
  float maximum = minus_infinity();
  for (u32 part = 0; part < parts; part++) maximum = fmaxf(maximum, left[part * length + p.head_size]);
  const float base = base_of(maximum);
  for (u32 d = threadIdx.x; d < p.head_size; d += THREADS) {
    float sum = 0, weight = 0;
    for (u32 part = 0; part < parts; part++) {
      const float* of_part = left + part * length;
      const float shrink = exp2f(of_part[p.head_size] - base);
      sum = fmaf(of_part[d], shrink, sum);
      weight = fmaf(of_part[p.head_size + 1], shrink, weight);
    }
    const float total = total_of(maximum, weight, sink_of(p, query % p.heads));
    store_float(p.out, query * p.head_size + d, sum / total, p.out_type);
  }
}
