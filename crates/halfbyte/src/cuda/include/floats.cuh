// Floats whose type is known when a kernel runs, one by one and eight at a time, and sums over a warp and over a block.
#pragma once
#include "ptx.cuh"
#include "warp.cuh"

// As `float_type` in nn/floats.rs.
enum FloatType : u32 { F16 = 0, BF16 = 1, F32 = 2 };

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

// Two, the first at an even place.
DEV void store_two(void* to, u64 at, float a, float b, FloatType type) {
  if (u64(to) % 8 != 0) {
    store_float(to, at, a, type);
    store_float(to, at + 1, b, type);
  } else if (type == F32) {
    *reinterpret_cast<float2*>(static_cast<float*>(to) + at) = make_float2(a, b);
  } else {
    const u32 low = type == F16 ? half_of_float(a) : bfloat_of_float(a),
              high = type == F16 ? half_of_float(b) : bfloat_of_float(b);
    *reinterpret_cast<u32*>(static_cast<u16*>(to) + at) = low | high << 16;
  }
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

// COUNT vectors of four floats, each STEP vectors behind the one before; zeros where the row, of which `left` floats
// are left from `from` on, has ended.  `aligned`: it begins at a multiple of 16 bytes and has whole vectors.
template <int COUNT, int STEP> DEV void load_fours(const float* from, u64 left, bool aligned, float4 (&out)[COUNT]) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (u64(4 * STEP) * i < left) out[i] = reinterpret_cast<const float4*>(from)[STEP * i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const u64 at = u64(4 * STEP) * i;
      out[i].x = at < left ? from[at] : 0.f;
      out[i].y = at + 1 < left ? from[at + 1] : 0.f;
      out[i].z = at + 2 < left ? from[at + 2] : 0.f;
      out[i].w = at + 3 < left ? from[at + 3] : 0.f;
    }
  }
}

// One of a thread's, known when the kernel is compiled.
template <int COUNT> DEV float element(const float4 (&fours)[COUNT], int i) {
  const float4 v = fours[i / 4];
  return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

// Four floats to `at`; fewer where not as many are `left`.  `aligned`: as they were loaded, and `to` at 16 bytes.
DEV void store_four(void* to, u64 at, float4 v, FloatType type, u64 left, bool aligned) {
  if (aligned && type == F32) {
    *reinterpret_cast<float4*>(static_cast<float*>(to) + at) = v;
  } else if (aligned) {
    const u32 x = type == F16 ? half_of_float(v.x) : bfloat_of_float(v.x),
              y = type == F16 ? half_of_float(v.y) : bfloat_of_float(v.y),
              z = type == F16 ? half_of_float(v.z) : bfloat_of_float(v.z),
              w = type == F16 ? half_of_float(v.w) : bfloat_of_float(v.w);
    *reinterpret_cast<uint2*>(static_cast<u16*>(to) + at) = make_uint2(x | y << 16, z | w << 16);
  } else {
    store_float(to, at, v.x, type);
    if (left > 1) store_float(to, at + 1, v.y, type);
    if (left > 2) store_float(to, at + 2, v.z, type);
    if (left > 3) store_float(to, at + 3, v.w, type);
  }
}
