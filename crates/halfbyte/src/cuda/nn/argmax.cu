// The greatest logit and its index, the first of equals; and the next step of a text that takes it for its next token.
//
//   one block: each thread keeps the best of its elements, in ascending order; the bests are compared in a tree
//
// NaN counts as greater than any number, so that whoever reads the value sees it.
#include "floats.cuh"

constexpr int THREADS = 1024;

// As `Params` in argmax.rs.
struct Params {
  const float* logits;  // [length]
  u32* choice;  // index, then bits of the logit
  u32* token;  // becomes the index
  u32* position;  // grows by `advance`
  u64 length;
  u32 advance;
  u32 padding;  // of this struct
};

// Whether a comes before b.
DEV bool better(float a, u32 i, float b, u32 j) {
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan || b_nan) return a_nan && (!b_nan || i < j);
  return a > b || (a == b && i < j);
}

__global__ void __launch_bounds__(THREADS) argmax(const Params p) {
  __shared__ float values[THREADS / 32];
  __shared__ u32 indices[THREADS / 32];
  const u32 thread = threadIdx.x, lane = thread % 32;
  float value = __int_as_float(0xff800000);
  u32 index = 0xffffffffu;
  for (u64 i = thread; i < p.length; i += THREADS) {
    const float other = p.logits[i];
    if (better(other, u32(i), value, index)) value = other, index = u32(i);
  }
  for (int turn = 0; turn < 2; turn++) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, value, distance);
      const u32 at = __shfl_xor_sync(ALL_LANES, index, distance);
      if (better(other, at, value, index)) value = other, index = at;
    }
    if (turn == 1) break;
    if (lane == 0) values[thread / 32] = value, indices[thread / 32] = index;
    __syncthreads();
    value = values[lane], index = indices[lane];
  }
  if (thread == 0) {
    p.choice[0] = index;
    p.choice[1] = __float_as_uint(value);
    *p.token = index;
    *p.position += p.advance;
  }
}
