// Direct convolution by ordinary threads (SIMT): y = activation(x * W + bias) with any parameters on every processor
// from sm_75 on: the kernel that is right.
//
//   a thread has one output channel and PIXELS output pixels; neighbours have neighbouring channels
//   for each position of the kernel, row by row:
//       for each channel of the group: w = dequant(W[output][k]); sums[p] = fma(x[p][channel], w, sums[p])
//   y = activation(sum + bias), rounded once
//
// Every sum is made by one thread in that order, so that it has the same bits whatever the batch is. x is 0 in the
// padding. Weights are read element by element from each layout: floats [n][k], that of layout/cuda_plain.rs, that of
// layout/cuda_wna16.rs.
#include "floats.cuh"

#include "activation.cuh"
#include "images.cuh"

constexpr int THREADS = 256;
constexpr int PIXELS = 4;  // of a thread

enum Layout : int { DENSE = 0, PLAIN = 1, WNA16 = 2 };
enum ZeroKind : u32 { SYMMETRIC = 0, INTEGER = 1, OFFSET = 2 };

// As `Weight` in conv/simt.rs: some of the groups of a convolution.
struct Weight {
  const void* codes;  // DENSE: floats [n][k];  PLAIN: words [words][n];  WNA16: atoms
  const void* scales;  // PLAIN: [groups][n];  WNA16: the table of rows
  const void* zeros;  // PLAIN: [groups][n]: u16 zero points, or offsets of the scales' type
  u64 n, k;
  u32 group;  // columns that share a scale; WNA16: 0 for all of a row
  u32 middle;  // the code of zero in a symmetric format
  FloatType dtype;  // of the scales, or of the floats
  ZeroKind zero_kind;
};

// As `Params` in conv/simt.rs.
struct Params {
  Images images;
  Weight w;
  const void* x;
  const float* bias;  // [outputs of all groups], or null
  void* y;
  u64 pixels;  // of y
  u64 first;  // output channel that is row 0 of w
  FloatType x_type, y_type;
  Activation activation;
  float low, high;  // of CLAMP
  u32 of_row, of_position;  // columns of w from a row of the kernel to the next, and from a position to the next
  u32 of_group;  // rows of w from a group of the convolution to the next
  u64 outputs;  // that w has
};

// A row of the weight, whose scale is kept from column to column.
template <int LAYOUT, int BITS> struct Row;

template <> struct Row<DENSE, 0> {
  u64 first;
  __device__ __forceinline__ Row(const Weight& w, u64 row) : first(row * w.k) {}
  __device__ __forceinline__ float at(const Weight& w, u64 k) { return load_float(w.codes, first + k, w.dtype); }
};

// BITS: of a code's place in a word.
template <int BITS> struct Row<PLAIN, BITS> {
  u64 row, loaded = ~0ull;
  float scale = 0, offset = 0, zero;
  __device__ __forceinline__ Row(const Weight& w, u64 row) : row(row), zero(float(w.middle)) {}
  __device__ __forceinline__ float at(const Weight& w, u64 k) {
    constexpr u32 PER_WORD = 32 / BITS;
    const u64 param = k / w.group * w.n + row;
    if (param != loaded) {
      loaded = param;
      scale = load_float(w.scales, param, w.dtype);
      if (w.zero_kind == INTEGER) zero = static_cast<const u16*>(w.zeros)[param];
      if (w.zero_kind == OFFSET) offset = load_float(w.zeros, param, w.dtype);
    }
    const u32 word = static_cast<const u32*>(w.codes)[k / PER_WORD * w.n + row];
    const float code = float(word >> (u32(k) % PER_WORD * BITS) & ((1u << BITS) - 1));
    return w.zero_kind == OFFSET ? fmaf(scale, code, offset) : scale * (code - zero);
  }
};

template <int BITS> struct Row<WNA16, BITS> {
  const u8 *codes, *params;  // of the first unit of the row
  u64 step, loaded = ~0ull;
  u32 warp, of_warp, upper;  // rows of a strip: 16 a warp, 8 below them
  float scale = 0, zero;  // zero: or the offset
  __device__ __forceinline__ Row(const Weight& w, u64 row) : zero(float(w.middle)) {
    const u64 strips = (w.n + 63) / 64, strip = row / 64, super = strip / 4, steps = (w.k + 127) / 128;
    const u64 in = strips - 4 * super < 4 ? strips - 4 * super : 4;
    const u32 groups = w.group ? 128 / w.group : 0, each = scales_bytes(w) + zeros_bytes(w);
    const u64 atom = 4 * (256 * BITS + groups * each);
    warp = u32(row) % 64 / 16, of_warp = u32(row) % 8, upper = u32(row) % 16 / 8;
    const u8* first = static_cast<const u8*>(w.codes) + (super * 4 * steps + strip % 4) * atom;
    codes = first + warp * (256 * BITS), params = first + 1024 * BITS + warp * (groups * each);
    step = in * atom;
    // Of rows, four times those of 16.
    const u8* table = static_cast<const u8*>(w.scales) + strip * (4 * each);
    if (!w.group) load_params(w, table + warp * scales_bytes(w), table + 4 * scales_bytes(w) + warp * zeros_bytes(w));
  }
  // Of 16 rows and a group.
  DEV u32 scales_bytes(const Weight& w) { return w.dtype == F32 ? 64 : 32; }
  DEV u32 zeros_bytes(const Weight& w) {
    return w.zero_kind == INTEGER ? 16 : w.zero_kind == OFFSET ? scales_bytes(w) : 0;
  }
  __device__ __forceinline__ void load_params(const Weight& w, const u8* scales, const u8* zeros) {
    const u32 at = of_warp * 2 + upper;
    scale = load_float(scales, at, w.dtype);
    if (w.zero_kind == INTEGER) zero = zeros[at];
    if (w.zero_kind == OFFSET) zero = load_float(zeros, at, w.dtype);
  }
  __device__ __forceinline__ float at(const Weight& w, u64 k) {
    const u8* unit = codes + k / 128 * step;
    const u32 c = u32(k) % 128, lane = of_warp * 4 + c % 8 / 2, high = c % 16 / 8, odd = c % 2;
    if (w.group && k / w.group != loaded) {
      loaded = k / w.group;
      const u8* own = params + k / 128 * step;
      load_params(w, own + c / w.group * scales_bytes(w),
                  own + 128 / w.group * scales_bytes(w) + c / w.group * zeros_bytes(w));
    }
    u32 code;
    if (BITS < 4) {
      const u8* half = unit + c / 64 * (128 * BITS);
      const u32 step = c % 64 / 16, at = 4 * upper + 8 * high + 16 * odd;
      code = reinterpret_cast<const u32*>(half)[2 * lane + step / 2] >> (at + step % 2 * 2) & 3;
      if (BITS == 3) code |= (reinterpret_cast<const u32*>(half + 256)[lane] >> (at + step) & 1) << 2;
    } else if (BITS == 4) {
      const u32 word = reinterpret_cast<const u32*>(unit)[(c / 64 * 32 + lane) * 4 + c % 64 / 16];
      code = word >> (4 * upper + 8 * high + 16 * odd) & 15;
    } else {
      code = unit[((c / 32 * 32 + lane) * 4 + c % 32 / 16 * 2 + high) * 4 + 2 * odd + upper];
    }
    return w.zero_kind == OFFSET ? fmaf(scale, float(code), zero) : scale * (float(code) - zero);
  }
};

template <int LAYOUT, int BITS>
__global__ void __launch_bounds__(THREADS, 2) conv_plain(const __grid_constant__ Params p) {
  const Images& v = p.images;
  const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x, own = at % p.outputs, first = at / p.outputs * PIXELS;
  if (first >= p.pixels) return;
  const u64 output = p.first + own, group = output / v.outputs, step = channel_step(v);
  const u64 row = own / v.outputs * p.of_group + own % v.outputs;
  Pixel pixels[PIXELS];
  float sums[PIXELS] = {};
#pragma unroll
  for (int i = 0; i < PIXELS; i++) pixels[i] = pixel_of(v, first + i);
  Row<LAYOUT, BITS> weights(p.w, row);
#pragma unroll 1
  for (u32 ky = 0; ky < v.kernel_rows; ky++)
#pragma unroll 1
    for (u32 kx = 0; kx < v.kernel_columns; kx++) {
      Place places[PIXELS];
#pragma unroll
      for (int i = 0; i < PIXELS; i++) {
        places[i] = place_of(v, pixels[i], ky, kx);
        places[i].at += group * v.channels * step;
        places[i].inside = places[i].inside && first + i < p.pixels;
      }
      u64 k = u64(ky) * p.of_row + kx * p.of_position;
#pragma unroll 1
      for (u32 c = 0; c < v.channels; c++, k++) {
        const float w = weights.at(p.w, k);
#pragma unroll
        for (int i = 0; i < PIXELS; i++) {
          if (places[i].inside) sums[i] = fmaf(load_float(p.x, places[i].at, p.x_type), w, sums[i]);
          places[i].at += step;
        }
      }
    }
  const float bias = p.bias ? p.bias[output] : 0.f;
#pragma unroll
  for (int i = 0; i < PIXELS; i++)
    if (first + i < p.pixels)
      store_float(p.y, output_at(v, first + i, pixels[i], output),
                  activate(sums[i] + bias, p.activation, p.low, p.high), p.y_type);
}
