// RMS norms between products of few rows, without kernels of their own. A product that ends in the residual stream adds
// to it, and leaves what the next product reads; that one divides its sums.
//
//   HB_FOLDED_NORM 1: stream = stream + sums                       y, f32
//                     scaled = stream * weight * scale             in the type of x
//                     squares = squares + those of the stream
//   HB_FOLDED_NORM 2: sums / (scale * sqrt(mean of the squares + eps))
//
// A row's scale is a power of two that keeps scaled within the range of half floats, from the norm before. Squares are
// added up in bins (binned_sum.cuh), so that blocks may come in any order. The product that divides begins the next
// norm (next_norm.cuh).
// After the header of a kernel's configuration.
#pragma once
#include "ampere.cuh"
#include "next_norm.cuh"
#include "warp.cuh"

// What sums are multiplied by, row by row.
DEV float* factors_of_rows() {
  extern __shared__ __align__(1024) u8 all_shared[];
  return (float*)(all_shared + FACTORS_OF_ROWS);
}
// The warps that multiply find it while x is on its way, 8 lanes that of a row; the first block begins the next norm.
DEV void factors_of_norm(const NormOperands& p, int rows, int thread) {
#pragma unroll 1
  for (int first = 0; first < rows; first += WARPGROUPS * 16) {
    const int row = first + thread / 8, pair = thread % 8;
    const bool there = row < rows;
    float sum = 0.f, scale = 1.f;
    if (there) {
      scale = load_l2(p.scales + row);
      sum = value_of_bins(load_bins(p.squares + row * BINS, pair), pair);
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (!there) continue;
    const float factor = 1.f / sqrtf(sum / float(p.width) + p.eps);
    if (pair == 0) factors_of_rows()[row] = factor / scale;
    if (blockIdx.x == 0) begin_norm(p.next, row, pair, factor);
  }
  barrier_sync(7, WARPGROUPS * 128);
}

// Sums of 8 tokens from m0 on, divided.
DEV float4 divided(float4 v, int m0, int lane) {
  const int token = m0 + 2 * (lane & 3);
  const float first = factors_of_rows()[token & (FOLDED_ROWS - 1)],
              second = factors_of_rows()[(token + 1) & (FOLDED_ROWS - 1)];
  return make_float4(v.x * first, v.y * second, v.z * first, v.w * second);
}

// What a lane has of 16 columns of the stream x 8 tokens, as store_block has sums, and what they are multiplied by.
struct OfStream {
  float v[4], weight[2], scale[2];
};
DEV OfStream of_stream(const Given& g, int n0, int m0, int end, int lane) {
  const NormOperands& p = g.norm;
  const int token = m0 + 2 * (lane & 3), n = n0 + (lane >> 2);
  const float* at = (const float*)g.y + (u64)token * p.width + n;
  OfStream of = {{}, {__ldg(p.weight + n), __ldg(p.weight + n + 8)}, {}};
#pragma unroll
  for (int e = 0; e < 2; e++) {
    if (token + e >= end) continue;
    of.v[e] = at[e * p.width];
    of.v[e + 2] = at[e * p.width + 8];
    of.scale[e] = load_l2(p.scales + token + e);
  }
  return of;
}
// Adds sums to them.
DEV void add_to_stream(float4 v, const RowTerms& r, const OfStream& of, const Given& g, int n0, int m0, int end,
                       int lane) {
  static_assert(HB_FOLDED_NORM != 1 || (OUT == 2 && !GATES && ACTIVATION == 0), "sums are added as they are");
  const NormOperands& p = g.norm;
  const int token = m0 + 2 * (lane & 3);
  float* at = (float*)g.y + (u64)token * p.width + n0 + (lane >> 2);
  const float o[4] = {of.v[0] + fmaf(v.x, r.s, r.b), of.v[1] + fmaf(v.y, r.s, r.b), of.v[2] + fmaf(v.z, r.s8, r.b8),
                      of.v[3] + fmaf(v.w, r.s8, r.b8)};
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float square = o[e] * o[e] + o[e + 2] * o[e + 2];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) square += __shfl_xor_sync(ALL_LANES, square, distance);
    if (token + e >= end) continue;
    at[e * p.width] = o[e];
    at[e * p.width + 8] = o[e + 2];
    if (lane < 4) add_to_bins(p.squares + (token + e) * BINS, square);
  }
  const float w = of.weight[0], w8 = of.weight[1], s = of.scale[0], s1 = of.scale[1];
  const u32 lo = transpose_8x8(pair(o[0] * w * s, o[1] * w * s1)),
            hi = transpose_8x8(pair(o[2] * w8 * s, o[3] * w8 * s1));
  const int m = m0 + (lane >> 2), column = n0 + 2 * (lane & 3);
  if (m >= end) return;
  u16* to = (u16*)p.scaled + (u64)m * p.width + column;
  *(u32*)to = lo;
  *(u32*)(to + 8) = hi;
}
