// Heads on their way to attention: their norms, and rotations by positions (RoPE).
//
// Element i is paired with element i + pairs; a model without rotations has 0 pairs. Angles are in turns and in double
// precision, so that far positions lose nothing and the reduction to one turn is exact.
#pragma once
#include "ptx.cuh"
#include "warp.cuh"

constexpr int MOST_PAIRS = 128, LARGEST_HEAD = 256;

// Cosine and sine of a pair's angle at a position.
DEV float2 angle_at(u64 position, double turns_of_position) {
  double turns = double(position) * turns_of_position, sine, cosine;
  turns -= rint(turns);
  sincospi(2 * turns, &sine, &cosine);
  return make_float2(float(cosine), float(sine));
}

// What a lane has of a head of up to SIZE elements, a multiple of 64: both elements of pairs lane, lane + 32, ..., and
// of those that are in no pair as many.
template <int SIZE> struct Head {
  float first[SIZE / 64], second[SIZE / 64], alone[SIZE / 32];

  __device__ __forceinline__ void load(const float* from, u32 pairs, u32 size) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 j = 0; j < SIZE / 64; j++) {
      const u32 i = lane + 32 * j;
      first[j] = i < pairs ? from[i] : 0.f;
      second[j] = i < pairs ? from[i + pairs] : 0.f;
    }
#pragma unroll
    for (u32 j = 0; j < SIZE / 32; j++) {
      const u32 i = 2 * pairs + lane + 32 * j;
      alone[j] = i < size ? from[i] : 0.f;
    }
  }

  // All lanes of the warp together.
  __device__ __forceinline__ void norm(const Head& weight, u32 size, float eps) {
    float sum = 0;
#pragma unroll
    for (u32 j = 0; j < SIZE / 64; j++) sum = fmaf(second[j], second[j], fmaf(first[j], first[j], sum));
#pragma unroll
    for (u32 j = 0; j < SIZE / 32; j++) sum = fmaf(alone[j], alone[j], sum);
    const float factor = 1.0f / sqrtf(warp_sum(sum) / float(size) + eps);
#pragma unroll
    for (u32 j = 0; j < SIZE / 64; j++) {
      first[j] *= factor * weight.first[j];
      second[j] *= factor * weight.second[j];
    }
#pragma unroll
    for (u32 j = 0; j < SIZE / 32; j++) alone[j] *= factor * weight.alone[j];
  }

  // Rotates the pairs by their angles.
  __device__ __forceinline__ void rotate(const float2* angles, u32 pairs) {
#pragma unroll
    for (u32 j = 0; j < SIZE / 64; j++) {
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
    for (u32 j = 0; j < SIZE / 64; j++) add(first[j]), add(second[j]);
#pragma unroll
    for (u32 j = 0; j < SIZE / 32; j++) add(alone[j]);
    if (!__all_sync(ALL_LANES, finite)) return __uint_as_float(0x7fc00000);
    return fmaxf(__fdiv_rn(warp_max(greatest), 127.f), 0x1p-126f);
  }

  // Gives each element to a function of its number and its value; those of pairs, or all.
  template <class Store>
  __device__ __forceinline__ void store(u32 pairs, u32 size, bool all, const Store& store) const {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 j = 0; j < SIZE / 64; j++) {
      const u32 i = lane + 32 * j;
      if (i >= pairs) break;
      store(i, first[j]);
      store(i + pairs, second[j]);
    }
    if (!all) return;
#pragma unroll
    for (u32 j = 0; j < SIZE / 32; j++) {
      const u32 i = 2 * pairs + lane + 32 * j;
      if (i < size) store(i, alone[j]);
    }
  }
};
