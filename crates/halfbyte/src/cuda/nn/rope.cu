// Rotary position embedding (RoPE): rotates queries and keys by their positions; queries stay in their rows, keys and
// values go to the cache.
//
//   a block takes one row, and a warp of it each of up to 4 heads, which its lanes request at once:
//       cosine and sine of each pair's angle, once for the block
//       with norms: a query or key head becomes head / sqrt(mean(head^2) + eps) * weight as it is read
//       a query head: rotated in place;  a key head: rotated into the cache;  a value head: copied into the cache
//       a cache of codes of 8 bits: scale = max |element| / 127, codes = element / scale, rounded to the nearest
#include "ampere.cuh"
#include "early_launch.cuh"
#include "floats.cuh"
#include "rope.cuh"

constexpr int WARPS = 4, BLOCKS = 7;  // of a block, and blocks that a multiprocessor holds at once
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
  Head<LARGEST_HEAD> own, weight;
  if (there) own.load(from, pairs, p.head_size);
  if (NORMS && there && !is_value) weight.load(is_query ? p.query_norm : p.key_norm, pairs, p.head_size);
  if (pair < p.pairs) angles[pair] = angle_at(position, of_position);
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
  own.store(pairs, p.head_size, NORMS || !is_query, store);
}
