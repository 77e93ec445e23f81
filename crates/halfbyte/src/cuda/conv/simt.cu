// Direct convolution by ordinary threads (SIMT): y = activation(x * W + bias) with any parameters on every processor
// from sm_75 on: the kernel that is right.
//
//   a thread has one output channel and PIXELS output pixels; neighbours have neighbouring channels
//   for each position of the kernel, row by row:
//       for each channel of the group: w = dequant(W[output][k]); sums[p] = fma(x[p][channel], w, sums[p])
//   y = activation(sum + bias), rounded once
//
// Every sum is made by one thread in that order, so that it has the same bits whatever the batch is. x is 0 in the
// padding.
#include "activation.cuh"
#include "conv_weights.cuh"
#include "images.cuh"

constexpr int THREADS = 256;
constexpr int PIXELS = 4;  // of a thread

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
