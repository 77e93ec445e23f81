// Images as what their codes of 8 bits stand for: what convolutions with quantised activations see.
//
//   least and greatest of the channels of a pixel that share a scale -> scale, offset (quantize.cuh)
//   y[pixel][channel] = scale * code + offset, rounded once
//
// A pixel so has the same codes in every window that sees it. y lies pixel by pixel, in f32. Of images in nhwc,
// neighbouring lanes have the channels of a scale in pieces of 8, or a thread has the scales of 8 channels.
#include "quantize.cuh"

#include "ampere.cuh"

constexpr u32 THREADS = 256;
constexpr u32 PIECE = 8;

enum Form : u32 {
  FEW = 0,  // 1, 2 or 4 channels of a scale in nhwc: a thread has a piece
  LANES = 1,  // nhwc
  PLANES = 2,  // nchw: a thread has a scale
};

// As `Params` in conv/quantize_pixels.rs.
struct Params {
  const void* x;
  float* y;  // [pixels][channels]
  u64 runs, plane;  // scales, of FEW pieces; pixels of an image
  u32 channels, share;  // share: channels of a scale
  u32 lanes;  // of a scale: a power of two
  Form form;
  FloatType x_type;
  u32 vectors;  // whether x begins at a multiple of 16 bytes and has whole pieces of each scale
};

DEV float value_of(float v, const Rule& rule) { return __fmaf_rn(rule.scale, float(code_of(v, rule)), rule.offset); }

// Of a piece that begins at a multiple of 16 bytes.
DEV void store_eight(float* to, const float (&v)[PIECE]) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// A piece of several scales, each of SHARE channels.
template <bool OFFSET, int SHARE> DEV void quantize_few(const Params& p, u64 piece) {
  float v[PIECE];
  load_eight(p.x, PIECE * piece, p.x_type, v);
#pragma unroll
  for (int first = 0; first < int(PIECE); first += SHARE) {
    Range range = range_of_none();
#pragma unroll
    for (int c = 0; c < SHARE; c++) range = joined(range, range_of_one(v[first + c]));
    const Rule rule = rule_of<OFFSET>(range);
#pragma unroll
    for (int c = 0; c < SHARE; c++) v[first + c] = value_of(v[first + c], rule);
  }
  store_eight(p.y + PIECE * piece, v);
}

// A piece of a scale from channel `first` on, of which `left` are the scale's.
DEV void load_piece(const Params& p, u64 first, u32 left, float (&v)[PIECE]) {
  if (p.vectors) {
    load_eight(p.x, first, p.x_type, v);
    return;
  }
#pragma unroll
  for (u32 e = 0; e < PIECE; e++) v[e] = e < left ? load_float(p.x, first + e, p.x_type) : 0.f;
}

template <bool OFFSET> DEV void quantize_lanes(const Params& p, u64 run, u32 lane) {
  const bool there = run < p.runs;
  const u64 base = (there ? run : 0) * p.share;
  float v[PIECE];
  Range range = range_of_none();
#pragma unroll 1
  for (u32 first = PIECE * lane; first < p.share; first += PIECE * p.lanes) {
    load_piece(p, base + first, p.share - first, v);
#pragma unroll
    for (u32 e = 0; e < PIECE; e++)
      if (first + e < p.share) range = joined(range, range_of_one(v[e]));
  }
  const Rule rule = rule_of<OFFSET>(joined_lanes(range, p.lanes));
  if (!there) return;
#pragma unroll 1
  for (u32 first = PIECE * lane; first < p.share; first += PIECE * p.lanes) {
    load_piece(p, base + first, p.share - first, v);
#pragma unroll
    for (u32 e = 0; e < PIECE; e++) v[e] = value_of(v[e], rule);
    float* to = p.y + base + first;
    if (p.vectors) {
      store_eight(to, v);
      continue;
    }
#pragma unroll
    for (u32 e = 0; e < PIECE; e++)
      if (first + e < p.share) to[e] = v[e];
  }
}

template <bool OFFSET> DEV void quantize_planes(const Params& p, u64 run) {
  const u32 groups = p.channels / p.share, first = u32(run % groups) * p.share;
  const u64 pixel = run / groups;
  const u64 from = (pixel / p.plane * p.channels + first) * p.plane + pixel % p.plane;
  Range range = range_of_none();
  for (u32 c = 0; c < p.share; c++) range = joined(range, range_of_one(load_float(p.x, from + c * p.plane, p.x_type)));
  const Rule rule = rule_of<OFFSET>(range);
  float* to = p.y + pixel * p.channels + first;
  for (u32 c = 0; c < p.share; c++) to[c] = value_of(load_float(p.x, from + c * p.plane, p.x_type), rule);
}

template <bool OFFSET> __global__ void __launch_bounds__(THREADS) quantize_pixels(const __grid_constant__ Params p) {
  const u64 run = u64(blockIdx.x) * (THREADS / p.lanes) + threadIdx.x / p.lanes;
  launch_dependents();
  dependency_wait();
  if (p.form == LANES) return quantize_lanes<OFFSET>(p, run, threadIdx.x % p.lanes);
  if (run >= p.runs) return;
  if (p.form == PLANES) return quantize_planes<OFFSET>(p, run);
  switch (p.share) {
    case 1: return quantize_few<OFFSET, 1>(p, run);
    case 2: return quantize_few<OFFSET, 2>(p, run);
    default: return quantize_few<OFFSET, 4>(p, run);
  }
}
