// What the kernels of attention of one row of each text have in common: which row and positions a block has, its
// queries in two halves, the weights of scores, and how sums of warps and of parts are joined.
//
// Queries and weights are two halves each, the second what the first leaves, so that products lose next to nothing.
// Where the rows of a tile are not seen, one that is seen is read in their place, with a weight of 0: what a query does
// not see does not reach it.
//
// Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
#pragma once
#include "ampere.cuh"
#include "attention.cuh"

constexpr u32 TILE = 16, COLUMNS = 8;  // positions of a tile; heads of a block
// Types in the products.
template <KvType KV> constexpr bool BF16_KEYS = KV == BFLOATS;
template <KvType KV> constexpr bool BF16_VALUES = KV != HALVES;
// Weights are 2^LIFT times as large: what the second half leaves is small.
template <KvType KV> constexpr float LIFT = BF16_VALUES<KV> ? 0 : 14;

// What is left of two floats by the pair that they became.
template <bool BF16> DEV u32 rest(float low, float high, u32 taken) {
  const FloatType type = BF16 ? FloatType::BF16 : F16;
  return pair<BF16>(low - float_of_bits(u16(taken), type), high - float_of_bits(u16(taken >> 16), type));
}

// What a block has: a text's row, up to 8 heads of a key/value head's group, and a part of the positions.
struct Share {
  u32 row, kv_head, first_head, columns, part, parts;  // parts: those of the row that see something
  u32 end, from, to;  // positions that the row sees at most, and those of the part

  // Positions and pages are older than the kernel before this one.
  __device__ __forceinline__ Share(const Params& p, u32 warps) {
    const u32 blocks = (p.group + COLUMNS - 1) / COLUMNS;
    row = blockIdx.x, kv_head = blocks == 1 ? blockIdx.y : blockIdx.y / blocks, part = blockIdx.z;
    const u32 first = (blockIdx.y - kv_head * blocks) * COLUMNS;
    columns = min(COLUMNS, p.group - first), first_head = kv_head * p.group + first;
    end = u32(position_of(p, row, 1)) + 1;
    const u32 seen_from = u32(first_seen<true>(p, end));
    from = seen_from, to = end, parts = 1;
    if (p.parts == 1) return;
    // Parts of a length that is given, or of one that gives each warp of all parts as many tiles.
    const u32 given = p.part_length, begin = seen_from - seen_from % (given ? given : TILE), round = TILE * warps,
              each = given ? given : (end - begin + p.parts * round - 1) / (p.parts * round) * round;
    const u32 part_begin = begin + part * each;
    from = max(part_begin, seen_from), to = min(part_begin + each, end);
    parts = min(p.parts, (end - begin + each - 1) / each);
  }
  // The tile that a warp begins with.
  __device__ __forceinline__ u32 first_tile(u32 warp) const { return from / TILE * TILE + warp * TILE; }
  // Whether the kernel before this one writes none of a tile.
  __device__ __forceinline__ bool settled(const Params& p, u32 tile) const {
    return u64(min(tile + TILE, to)) + p.fresh <= end;
  }
  // The i-th row of a tile, or one that is seen.
  __device__ __forceinline__ u32 seen(u32 tile, u32 i) const { return min(max(tile + i, from), to - 1) - tile; }
};

// Two elements in each 64 of a query, which a lane has: d(i) and the next one; beside codes, in the order of their
// words, d(i) and the next but one.
template <int HEAD, KvType KV> struct QueryOfLane {
  float x[HEAD / 64][2];
  static __device__ __forceinline__ u32 element(u32 i) {
    const u32 lane = threadIdx.x % 32;
    return 64 * i + (KV == CODES ? 4 * (lane / 2) + lane % 2 : 2 * lane);
  }
  // Zeros where there is none.
  __device__ __forceinline__ void load(const float* query, bool given, u32 head_size) {
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) {
      const u32 d = element(i);
      const bool there = given && d < head_size;
      x[i][0] = there ? query[d] : 0;
      x[i][1] = there ? query[d + (KV == CODES ? 2 : 1)] : 0;
    }
  }
  // To the queries of a block, [2][COLUMNS][PITCH] in two halves, and what scores are multiplied by, [COLUMNS].
  template <u32 PITCH>
  __device__ __forceinline__ void put(u16 (&queries)[2][COLUMNS][PITCH], float* factors, u32 h, float scale) const {
    const u32 lane = threadIdx.x % 32;
    float most = 0;
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) most = fmaxf(most, fmaxf(fabsf(x[i][0]), fabsf(x[i][1])));
    // The power of two that brings the largest element between 2^14 and 2^15, and its inverse.
    const u32 exponent = min(max(268 - int(__float_as_uint(warp_max(most)) >> 23), 1), 253);
    const float up = BF16_KEYS<KV> ? 1 : __uint_as_float(exponent << 23),
                down = BF16_KEYS<KV> ? 1 : __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) {
      const float a = x[i][0] * up, b = x[i][1] * up;
      const u32 high = pair<BF16_KEYS<KV>>(a, b), d = 64 * i + 2 * lane;
      *reinterpret_cast<u32*>(&queries[0][h][d]) = high;
      *reinterpret_cast<u32*>(&queries[1][h][d]) = rest<BF16_KEYS<KV>>(a, b, high);
    }
    if (lane == 0) factors[h] = scale * LOG2_E * down;
  }
};
// All queries of a block, which are there behind the next barrier.
template <int HEAD, KvType KV, u32 PITCH>
DEV void put_queries(const Params& p, const Share& of, u32 warps, u16 (&queries)[2][COLUMNS][PITCH], float* factors) {
  constexpr u32 AT_ONCE = 2;  // heads of a warp
#pragma unroll 1
  for (u32 h0 = threadIdx.x / 32; h0 < COLUMNS; h0 += AT_ONCE * warps) {
    QueryOfLane<HEAD, KV> query[AT_ONCE];
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; n++) {
      const u32 h = h0 + n * warps;
      query[n].load(p.qkv + of.row * p.row_length + u64(of.first_head + h) * p.head_size, h < of.columns, p.head_size);
    }
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; n++)
      if (h0 + n * warps < COLUMNS) query[n].put(queries, factors, h0 + n * warps, p.scale);
  }
}

// The weights of a warp's tiles so far, of heads 2c and 2c + 1: their sums and the greatest scores.
struct Weights {
  float sum[2], greatest[2];
  __device__ __forceinline__ Weights() {
    sum[0] = sum[1] = 0;
    greatest[0] = greatest[1] = minus_infinity();
  }
};
// What values of a tile are multiplied by, as B operands: weights in two halves; and what sums so far shrink by.
struct WeightsOfTile {
  u32 high[2], low[2];
  float shrink[2];
};
// From scores of rows lane / 4 and + 8 of a tile to weights. Of codes keys have scales, which scores are multiplied by,
// and values, which weights are multiplied by.
template <KvType KV>
DEV WeightsOfTile weigh(const Params& p, const Share& of, const float* factors, Weights& w, u32 tile, float (&s)[4],
                        const float (&key_scales)[2], const float (&value_scales)[2]) {
  const u32 lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const bool changes = p.cap > 0 || p.slopes;
  WeightsOfTile t;
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
    const float factor = factors[2 * c + h];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const u32 position = tile + g + 8 * r;
      float& score = s[2 * r + h];
      score *= KV == CODES ? factor * key_scales[r] : factor;
      if (changes) {
        const float slope = slope_of(p, of.first_head + min(2 * c + h, of.columns - 1));
        score = changed(score, p, slope, int(position) - int(of.end) + 1);
      }
      if (position < of.from || position >= of.to) score = minus_infinity();
    }
    float higher = fmaxf(s[h], s[2 + h]);
#pragma unroll
    for (int d = 4; d < 32; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL_LANES, higher, d));
    higher = fmaxf(higher, w.greatest[h]);
    const float base = base_of(higher);
    t.shrink[h] = power_of_two(w.greatest[h] - base);
    w.greatest[h] = higher;
    s[h] = power_of_two(s[h] - base + LIFT<KV>), s[2 + h] = power_of_two(s[2 + h] - base + LIFT<KV>);
    w.sum[h] = w.sum[h] * t.shrink[h] + (s[h] + s[2 + h]);
  }
#pragma unroll
  for (u32 r = 0; r < 2; r++) {
    if (KV == CODES) s[2 * r] *= value_scales[r], s[2 * r + 1] *= value_scales[r];
    const u32 taken = pair<BF16_VALUES<KV>>(s[2 * r], s[2 * r + 1]);
    t.high[r] = transpose_8x8(taken);
    t.low[r] = transpose_8x8(rest<BF16_VALUES<KV>>(s[2 * r], s[2 * r + 1], taken));
  }
  return t;
}
// sum, of 16 elements, shrinks, and weights times values are added.
template <KvType KV> DEV void add_values(float (&sum)[4], const u32 (&values)[4], const WeightsOfTile& t) {
  sum[0] *= t.shrink[0], sum[1] *= t.shrink[1], sum[2] *= t.shrink[0], sum[3] *= t.shrink[1];
  mma_sync<BF16_VALUES<KV>>(sum, values, t.high[0], t.high[1]);
  mma_sync<BF16_VALUES<KV>>(sum, values, t.low[0], t.low[1]);
}

// What warps leave to be joined: sums of elements, [warps][COLUMNS][HEAD + 4]; greatest scores and sums of weights,
// [warps][COLUMNS].
template <int HEAD> struct Left {
  float (*sums)[COLUMNS][HEAD + 4];
  float (*greatest)[COLUMNS];
  float (*weights)[COLUMNS];
};
template <int HEAD> DEV void leave_weights(const Left<HEAD>& left, Weights& w) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) w.sum[h] += __shfl_xor_sync(ALL_LANES, w.sum[h], d);
    if (lane / 4 == 0)
      left.greatest[warp][2 * (lane % 4) + h] = w.greatest[h], left.weights[warp][2 * (lane % 4) + h] = w.sum[h];
  }
}
// The sums of all warps, up to MOST, each shifted to the greatest score of all; where a row has several parts the block
// that comes last adds theirs, in their order.
template <int HEAD, KvType KV, int MOST>
DEV void join(const Params& p, const Share& of, u32 warps, const Left<HEAD>& left) {
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  __syncthreads();
#pragma unroll 1
  for (u32 i = thread; i < of.columns * (HEAD / 2); i += blockDim.x) {
    const u32 h = i / (HEAD / 2), d = i % (HEAD / 2) * 2;
    if (d >= p.head_size) continue;
    float greatest[MOST];
#pragma unroll
    for (int w = 0; w < MOST; w++) greatest[w] = w < int(warps) ? left.greatest[w][h] : minus_infinity();
    float higher = greatest[0];
#pragma unroll
    for (int w = 1; w < MOST; w++) higher = fmaxf(higher, greatest[w]);
    const float base = base_of(higher);
    float2 sum = make_float2(0, 0);
    float all = 0;
#pragma unroll
    for (int w = 0; w < MOST; w++) {
      if (w >= int(warps)) continue;
      const float shrink = power_of_two(greatest[w] - base);
      const float2 v = *reinterpret_cast<const float2*>(&left.sums[w][h][d]);
      sum.x = fmaf(v.x, shrink, sum.x), sum.y = fmaf(v.y, shrink, sum.y);
      all = fmaf(left.weights[w][h], shrink, all);
    }
    // What 1 stands for.
    const float one = higher - LIFT<KV>;
    const u64 at = u64(of.row) * p.heads + of.first_head + h;
    if (of.parts == 1) {
      const float share = 1.f / total_of(one, all, sink_of(p, of.first_head + h));
      store_two(p.out, at * p.head_size + d, sum.x * share, sum.y * share, p.out_type);
    } else {
      float* const of_part = p.partial + (at * p.parts + of.part) * (p.head_size + 2);
      of_part[d] = sum.x, of_part[d + 1] = sum.y;
      if (d == 0) of_part[p.head_size] = one, of_part[p.head_size + 1] = all;
    }
  }
  if (of.parts == 1) return;

  __shared__ u32 before;
  __syncthreads();
  if (thread == 0) {
    u32* const counter = p.counters + of.row * gridDim.y + blockIdx.y;
    before = count_up(counter);
    if (before + 1 == of.parts) *counter = 0;
  }
  __syncthreads();
  if (before + 1 < of.parts) return;
  const u32 length = p.head_size + 2;
  const float* const of_row = p.partial + (u64(of.row) * p.heads + of.first_head) * p.parts * length;
  for (u32 h = warp; h < of.columns; h += warps) {
    const float* const of_head = of_row + u64(h) * p.parts * length + p.head_size;
    float higher = minus_infinity(), all = 0;
    for (u32 i = lane; i < of.parts; i += 32) higher = fmaxf(higher, load_l2(of_head + i * length));
    higher = warp_max(higher);
    const float base = base_of(higher);
    for (u32 i = lane; i < of.parts; i += 32)
      all = fmaf(load_l2(of_head + i * length + 1), power_of_two(load_l2(of_head + i * length) - base), all);
    all = warp_sum(all);
    if (lane == 0)
      left.greatest[0][h] = base, left.weights[0][h] = total_of(higher, all, sink_of(p, of.first_head + h));
  }
  __syncthreads();
  for (u32 i = thread; i < of.columns * HEAD; i += blockDim.x) {
    const u32 h = i / HEAD, d = i % HEAD;
    if (d >= p.head_size) continue;
    const float* const of_head = of_row + u64(h) * p.parts * length;
    const float base = left.greatest[0][h];
    float sum = 0;
#pragma unroll 4
    for (u32 j = 0; j < of.parts; j++)
      sum = fmaf(load_l2(of_head + j * length + d), power_of_two(load_l2(of_head + j * length + p.head_size) - base),
                 sum);
    const u64 at = u64(of.row) * p.heads + of.first_head + h;
    store_float(p.out, at * p.head_size + d, sum / left.weights[0][h], p.out_type);
  }
}
