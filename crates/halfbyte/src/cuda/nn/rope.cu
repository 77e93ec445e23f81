// Rotary position embedding (RoPE): rotates queries and keys by their positions; queries stay in their rows, keys and
// values go to the cache.
//
//   a block takes one row, and a warp of it each of up to 4 heads, which its lanes request at once:
//       cosine and sine of each pair's angle, once for the block
//       with norms: a query or key head becomes head / sqrt(mean(head^2) + eps) * weight as it is read
//       a query head: rotated in place;  a key head: rotated into the cache;  a value head: copied into the cache
//       a cache of codes of 8 bits: scale = max |element| / 127, codes = element / scale, rounded to the nearest
//
// Element i is paired with element i + pairs; a model without rotations has 0 pairs. Angles are in turns and in double
// precision, so that far positions lose nothing and the reduction to one turn is exact.
#include "ampere.cuh"
#include "early_launch.cuh"
#include "floats.cuh"

constexpr int WARPS = 4, BLOCKS = 7;  // of a block, and blocks that a multiprocessor holds at once
constexpr int MOST_PAIRS = 128, LARGEST_HEAD = 256;
static_assert(MOST_PAIRS == 32 * WARPS, "a thread has the angle of one pair");

// As `Params` in rope.rs.
struct Params {
  float* qkv;  // [rows][heads + 2 kv_heads][head_size]
  void* keys;  // of one layer: [kv_heads][capacity][head_size]
  void* values;  // likewise
  float* key_scales;  // of codes of 8 bits, [kv_heads][capacity]; null: keys and values are floats
  float* value_scales;  // likewise
  const double* turns;  // [pairs]: of a position
  const u32* positions;  // [rows], each in its text
  const u32* slots;  // [rows], where each lies in the cache
  u64 capacity;
  u32 heads, kv_heads, head_size, pairs;
  FloatType kind;  // of a cache of floats
  float eps;  // of the norms
  const float *query_norm, *key_norm;  // weights [head_size], with norms
  u32 at_once;  // whether all blocks run at once
  u32 padding;
};

// What a lane has of a head: both elements of pairs lane, lane + 32, ..., and of those that are in no pair as many.
struct Head {
  float first[MOST_PAIRS / 32], second[MOST_PAIRS / 32], alone[LARGEST_HEAD / 32];

  __device__ __forceinline__ void load(const float* from, u32 pairs, u32 size) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 j = 0; j < MOST_PAIRS / 32; j++) {
      const u32 i = lane + 32 * j;
      first[j] = i < pairs ? from[i] : 0.f;
      second[j] = i < pairs ? from[i + pairs] : 0.f;
    }
#pragma unroll
    for (u32 j = 0; j < LARGEST_HEAD / 32; j++) {
      const u32 i = 2 * pairs + lane + 32 * j;
      alone[j] = i < size ? from[i] : 0.f;
    }
  }

  // All lanes of the warp together.
  __device__ __forceinline__ void norm(const Head& weight, u32 size, float eps) {
    float sum = 0;
#pragma unroll
    for (u32 j = 0; j < MOST_PAIRS / 32; j++) sum = fmaf(second[j], second[j], fmaf(first[j], first[j], sum));
#pragma unroll
    for (u32 j = 0; j < LARGEST_HEAD / 32; j++) sum = fmaf(alone[j], alone[j], sum);
    const float factor = 1.0f / sqrtf(warp_sum(sum) / float(size) + eps);
#pragma unroll
    for (u32 j = 0; j < MOST_PAIRS / 32; j++) {
      first[j] *= factor * weight.first[j];
      second[j] *= factor * weight.second[j];
    }
#pragma unroll
    for (u32 j = 0; j < LARGEST_HEAD / 32; j++) alone[j] *= factor * weight.alone[j];
  }

  // Rotates the pairs by their angles.
  __device__ __forceinline__ void rotate(const float2 (&angles)[MOST_PAIRS], u32 pairs) {
#pragma unroll
    for (u32 j = 0; j < MOST_PAIRS / 32; j++) {
      const u32 i = threadIdx.x % 32 + 32 * j;
      if (i >= pairs) break;
      const float a = first[j], b = second[j], cosine = angles[i].x, sine = angles[i].y;
      first[j] = a * cosine - b * sine;
      second[j] = fmaf(b, cosine, a * sine);
    }
  }

  // The scale of codes for it, as the caches of CPUs have it; NaN where an element is none or infinite. All lanes of
  // the warp together.
  __device__ __forceinline__ float scale() const {
    float greatest = 0;
    bool finite = true;
    const auto add = [&](float v) {
      greatest = fmaxf(greatest, fabsf(v));
      finite &= fabsf(v) < __uint_as_float(0x7f800000);
    };
#pragma unroll
    for (u32 j = 0; j < MOST_PAIRS / 32; j++) add(first[j]), add(second[j]);
#pragma unroll
    for (u32 j = 0; j < LARGEST_HEAD / 32; j++) add(alone[j]);
    if (!__all_sync(ALL_LANES, finite)) return __uint_as_float(0x7fc00000);
    return fmaxf(__fdiv_rn(warp_max(greatest), 127.f), 0x1p-126f);
  }
};

template <bool NORMS> __global__ void __launch_bounds__(32 * WARPS, BLOCKS) rope(const Params p) {
  __shared__ float2 angles[MOST_PAIRS];
  const u32 row = blockIdx.x, lane = threadIdx.x % 32, pair = threadIdx.x;
  const u32 head = blockIdx.y * WARPS + threadIdx.x / 32, rotated = p.heads + p.kv_heads;
  const bool is_query = head < p.heads, is_value = head >= rotated;
  const u32 pairs = is_value ? 0 : p.pairs;
  const double of_position = pair < p.pairs ? p.turns[pair] : 0;
  // Blocks of attention that find room between the last of these would lie unevenly over the multiprocessors.
  if (p.at_once)
    wait_and_launch(true);
  else
    dependency_wait();
  const u64 position = p.positions[row], slot = p.slots[row];
  // The host knows how long texts are; the limit guards memory.
  const bool stays = !NORMS && is_query && p.pairs == 0;
  const bool there = head < rotated + p.kv_heads && slot < p.capacity && !stays;
  float* from = p.qkv + (u64(row) * (rotated + p.kv_heads) + head) * p.head_size;
  Head own, weight;
  if (there) own.load(from, pairs, p.head_size);
  if (NORMS && there && !is_value) weight.load(is_query ? p.query_norm : p.key_norm, pairs, p.head_size);
  if (pair < p.pairs) {
    double turns = double(position) * of_position, sine, cosine;
    turns -= rint(turns);
    sincospi(2 * turns, &sine, &cosine);
    angles[pair] = make_float2(float(cosine), float(sine));
  }
  __syncthreads();

  if (!there) return;
  if (NORMS && !is_value) own.norm(weight, p.head_size, p.eps);
  const u32 kv_head = is_value ? head - rotated : head - p.heads;
  if (!is_value) own.rotate(angles, pairs);
  const u64 vector = u64(kv_head) * p.capacity + slot;
  void* const cache = is_value ? p.values : p.keys;
  float* const scales = is_value ? p.value_scales : p.key_scales;
  const bool codes = !is_query && scales;
  const float scale = codes ? own.scale() : 0;
  if (codes && lane == 0) scales[vector] = scale;
  const auto store = [&](u32 i, float value) {
    if (is_query)
      from[i] = value;
    else if (codes)  // of a scale that is NaN the code is 0
      static_cast<signed char*>(cache)[vector * p.head_size + i] = __float2int_rn(__fdiv_rn(value, scale));
    else
      store_float(cache, vector * p.head_size + i, value, p.kind);
  };
#pragma unroll
  for (u32 j = 0; j < MOST_PAIRS / 32; j++) {
    const u32 i = lane + 32 * j;
    if (i >= pairs) break;
    store(i, own.first[j]);
    store(i + pairs, own.second[j]);
  }
  if (is_query && !NORMS) return;
#pragma unroll
  for (u32 j = 0; j < LARGEST_HEAD / 32; j++) {
    const u32 i = 2 * pairs + lane + 32 * j;
    if (i < p.head_size) store(i, own.alone[j]);
  }
}
