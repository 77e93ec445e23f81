// Rotary position embedding (RoPE): rotates queries and keys by their positions; queries stay in their rows, keys and
// values go to the cache.
//
//   a block takes one row, and a warp of it each of up to 8 heads:
//       cosine and sine of each pair's angle, once for the block
//       with norms: a query or key head becomes head / sqrt(mean(head^2) + eps) * weight as it is read
//       a query head: rotated in place;  a key head: rotated into the cache;  a value head: copied into the cache
//
// Element i is paired with element i + pairs; a model without rotations has 0 pairs. Angles are in turns and in double
// precision, so that far positions lose nothing and the reduction to one turn is exact.
#include "floats.cuh"

constexpr int WARPS = 8;
constexpr int MOST_PAIRS = 128;

// As `Params` in rope.rs.
struct Params {
  float* qkv;  // [rows][heads + 2 kv_heads][head_size]
  void* keys;  // of one layer: [kv_heads][capacity][head_size]
  void* values;  // likewise
  const double* turns;  // [pairs]: of a position
  const u32* position;  // of the first row
  u64 capacity;
  u32 heads, kv_heads, head_size, pairs;
  FloatType kind;  // of the cache
  float eps;  // of the norms
  const float *query_norm, *key_norm;  // weights [head_size], with norms
};

// A head as it is read. The lanes of a warp make one together.
template <bool NORMED> struct Head {
  const float *from, *weight;
  float factor;

  __device__ __forceinline__ Head(const float* from, const float* weight, u32 size, float eps)
      : from(from), weight(weight) {
    if (!NORMED) return;
    float sum = 0;
    for (u32 i = threadIdx.x % 32; i < size; i += 32) sum = fmaf(from[i], from[i], sum);
    factor = 1.0f / sqrtf(warp_sum(sum) / float(size) + eps);
  }

  __device__ __forceinline__ float operator[](u32 i) const { return NORMED ? from[i] * factor * weight[i] : from[i]; }
};

template <bool NORMS> __global__ void __launch_bounds__(32 * WARPS) rope(const Params p) {
  __shared__ float2 angles[MOST_PAIRS];
  const u32 row = blockIdx.x, lane = threadIdx.x % 32;
  const u64 position = u64(*p.position) + row;
  for (u32 i = threadIdx.x; i < p.pairs; i += 32 * WARPS) {
    double turns = double(position) * p.turns[i], sine, cosine;
    turns -= rint(turns);
    sincospi(2 * turns, &sine, &cosine);
    angles[i] = make_float2(float(cosine), float(sine));
  }
  __syncthreads();

  const u32 head = blockIdx.y * WARPS + threadIdx.x / 32, rotated = p.heads + p.kv_heads;
  // The host knows how long the text is; the limit guards memory.
  if (head >= rotated + p.kv_heads || position >= p.capacity) return;
  float* from = p.qkv + (u64(row) * (rotated + p.kv_heads) + head) * p.head_size;
  const bool is_query = head < p.heads, is_value = head >= rotated;
  const u32 kv_head = is_value ? head - rotated : head - p.heads;
  void* cache = is_value ? p.values : p.keys;
  const u64 place = (u64(kv_head) * p.capacity + position) * p.head_size;

  const Head<NORMS> own(from, is_query ? p.query_norm : p.key_norm, p.head_size, p.eps);
  const u32 pairs = is_value ? 0 : p.pairs;
  for (u32 i = lane; i < pairs; i += 32) {
    const float a = own[i], b = own[i + pairs], cosine = angles[i].x, sine = angles[i].y;
    const float first = a * cosine - b * sine, second = fmaf(b, cosine, a * sine);
    if (is_query) {
      from[i] = first;
      from[i + pairs] = second;
    } else {
      store_float(cache, place + i, first, p.kind);
      store_float(cache, place + i + pairs, second, p.kind);
    }
  }
  if (is_query && !NORMS) return;
  for (u32 i = 2 * pairs + lane; i < p.head_size; i += 32) {
    if (is_query)
      from[i] = own[i];
    else
      store_float(cache, place + i, is_value ? from[i] : own[i], p.kind);
  }
}
