// Floats as halfs that tensor cores multiply: runs of x (of images, the channels of a group of a pixel), each filled up
// by zeros to whole pieces of 8.
//
//   out [part][runs][filled up]; of x in a half type one part; of f32, and of what codes of 8 bits stand for, three in
//   bf16 whose sum it is: its last 8 bits, those before, and the first 8, so that sums over parts grow. What is not
//   finite is all in the last part.
//   halfs: a thread writes a piece of each part.
//   quantized_halfs: neighbouring lanes have the numbers of a run that share a scale (quantize.cuh), piece by piece:
//   least and greatest of all, then the values.
#include "quantize.cuh"

#include "ampere.cuh"

constexpr u32 PIECE = 8;

// As `Params` in halfs.rs. Elements of x and of a part are below 2^31.
struct Params {
  const void* x;  // [runs][length]
  uint4* out;
  u32 pieces, of_run;  // of a part, and of a run
  u32 length;
  u32 share, lanes, scales;  // quantised: numbers of a scale, lanes for them, scales of all
  FloatType x_type;
  u32 padding;
};

[[maybe_unused]] DEV u32 upper_half(float v) { return v == v ? __float_as_uint(v) & 0xffff0000u : 0x7fff0000u; }
[[maybe_unused]] DEV float rest_of(float v, u32 upper) {
  return fabsf(v) < __uint_as_float(0x7f800000) ? v - __uint_as_float(upper) : 0.f;
}

// Eight elements of each part.
template <int PARTS> struct Piece {
  u32 words[PARTS][4] = {};
  __device__ __forceinline__ void set(int e, float v) {
#pragma unroll
    for (int part = PARTS - 1; part >= 0; part--) {
      const u32 upper = upper_half(v);
      words[part][e / 2] |= e % 2 ? upper : upper >> 16;
      v = rest_of(v, upper);
    }
  }
  __device__ __forceinline__ void set(int e, u16 v) { words[0][e / 2] |= (u32)v << (16 * (e % 2)); }
  __device__ __forceinline__ void store(const Params& p, u32 at) const {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      p.out[(u64)part * p.pieces + at] = make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
  }
};

template <class T, int PARTS> __global__ void __launch_bounds__(256) halfs(const __grid_constant__ Params p) {
  const u32 i = blockIdx.x * 256 + threadIdx.x, run = i / p.of_run, first = PIECE * (i - run * p.of_run);
  launch_dependents();
  dependency_wait();
  if (i >= p.pieces) return;
  const T* from = static_cast<const T*>(p.x) + (u64)run * p.length;
  Piece<PARTS> piece;
#pragma unroll
  for (int e = 0; e < (int)PIECE; e++)
    if (first + e < p.length) piece.set(e, from[first + e]);
  piece.store(p, i);
}

template <bool OFFSET> __global__ void __launch_bounds__(256) quantized_halfs(const __grid_constant__ Params p) {
  const u32 i = blockIdx.x * 256 + threadIdx.x, lane = i % p.lanes;
  const bool there = i / p.lanes < p.scales;
  const u32 run = there ? i / p.lanes : 0, of_run = p.length / p.share, whole = run / of_run,
            to = whole * p.of_run + (run - whole * of_run) * (p.share / PIECE);
  launch_dependents();
  dependency_wait();
  Range range = range_of_none();
#pragma unroll 1
  for (u32 first = PIECE * lane; first < p.share; first += PIECE * p.lanes)
#pragma unroll
    for (u32 c = first; c < first + PIECE; c++)
      if (c < p.share) range = joined(range, range_of_one(load_float(p.x, (u64)run * p.share + c, p.x_type)));
  const Rule rule = rule_of<OFFSET>(joined_lanes(range, p.lanes));
  if (!there) return;
#pragma unroll 1
  for (u32 first = PIECE * lane; first < p.share; first += PIECE * p.lanes) {
    Piece<3> piece;
#pragma unroll
    for (int e = 0; e < (int)PIECE; e++) {
      if (first + e >= p.share) continue;
      const float v = load_float(p.x, (u64)run * p.share + first + e, p.x_type);
      piece.set(e, __fmaf_rn(rule.scale, float(code_of(v, rule)), rule.offset));
    }
    piece.store(p, to + first / PIECE);
  }
}
