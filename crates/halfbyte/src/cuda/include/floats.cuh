// Floats whose type is known when a kernel runs, one by one and eight at a time, and sums over a warp and over a block.
#pragma once
#include "ptx.cuh"

// As `float_type` in nn/floats.rs.
enum FloatType : u32 { F16 = 0, BF16 = 1, F32 = 2 };

constexpr u32 ALL_LANES = 0xffffffffu;

DEV float float_of_bits(u16 bits, FloatType type) { return type == F16 ? float_of_half(bits) : float_of_bfloat(bits); }

DEV float load_float(const void* from, u64 at, FloatType type) {
  if (type == F32) return static_cast<const float*>(from)[at];
  return float_of_bits(static_cast<const u16*>(from)[at], type);
}

DEV void store_float(void* to, u64 at, float value, FloatType type) {
  if (type == F32)
    static_cast<float*>(to)[at] = value;
  else
    static_cast<u16*>(to)[at] = type == F16 ? half_of_float(value) : bfloat_of_float(value);
}

// As it comes back from where it was stored.
DEV float rounded(float value, FloatType type) {
  if (type == F32) return value;
  return float_of_bits(type == F16 ? half_of_float(value) : bfloat_of_float(value), type);
}

// Eight floats from `at` on, which begin at a multiple of 16 bytes.
DEV void load_eight(const void* from, u64 at, FloatType type, float (&out)[8]) {
  if (type == F32) {
    const float4* quads = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    const float4 a = quads[0], b = quads[1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
    return;
  }
  const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const u16*>(from) + at);
  const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 8; i++) out[i] = float_of_bits(u16(each[i / 2] >> (16 * (i % 2))), type);
}

DEV float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

DEV float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
  return value;
}
