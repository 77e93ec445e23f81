// int8 GEMM and convolution with any parameters on every processor from sm_75 on, by ordinary threads (SIMT): the
// kernel that is right. y = finish(sum), sum = sum of (x - zero)(w - zero) + bias.
//
//   a thread has one output and PIXELS pixels; neighbours have neighbouring outputs
//   sum += (x - x_zero) * (w - zero of the row), position by position, channel by channel; the padding counts for
//       nothing
//   bytes:   y = round(clamp(sum * M)) + zero of y, half to even (requantise)
//   floats:  y = activation(sum * scale + bias)
//
// Integers are exact. layout/cuda_int8.rs draws the packed weights, format/int8.rs says what the numbers mean.
#include "floats.cuh"

#include "activation.cuh"
#include "images.cuh"

constexpr int THREADS = 256;
constexpr int PIXELS = 4;  // of a thread

// As `Params` in int8_simt.rs.
struct Params {
  Images images;
  const u8* x;
  const signed char* w;  // packed
  const int* zeros;  // [n], or null: all 0
  const int* bias;  // [n], or null
  const float* scales;  // [n]: what the sums are multiplied by
  const float* float_bias;  // [n], or null
  void* y;
  u64 pixels, n;  // of y
  u32 steps;  // atoms along k
  u32 x_unsigned;
  int x_zero, y_zero;
  float low, high;  // of codes, less the zero point; of CLAMP
  u32 bytes;  // y is codes, else floats
  FloatType y_type;
  Activation activation;
  u32 unused;
};

__global__ void __launch_bounds__(THREADS) int8_plain(const __grid_constant__ Params p) {
  const Images& v = p.images;
  const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x, output = at % p.n, first = at / p.n * PIXELS;
  if (first >= p.pixels) return;
  const u64 group = output / v.outputs, row = output % v.outputs, step = channel_step(v),
            strips = (u64(v.outputs) + 63) / 64;
  // Of the row's strip; of the row in it.
  const signed char* strip = p.w + (group * strips + row / 64) * p.steps * 8192 + row % 64 * 128;
  Pixel pixels[PIXELS];
  int sums[PIXELS] = {};
#pragma unroll
  for (int i = 0; i < PIXELS; i++) pixels[i] = pixel_of(v, first + i);
  const int zero = p.zeros ? p.zeros[output] : 0;
  u64 k = 0;
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
#pragma unroll 1
      for (u32 c = 0; c < v.channels; c++, k++) {
        const u32 column = u32(k) % 128, piece = column / 16 ^ u32(row) % 8;
        const int w = strip[k / 128 * 8192 + piece * 16 + column % 16] - zero;
#pragma unroll
        for (int i = 0; i < PIXELS; i++) {
          if (places[i].inside) {
            const u8 code = p.x[places[i].at];
            sums[i] += ((p.x_unsigned ? int(code) : int((signed char)code)) - p.x_zero) * w;
          }
          places[i].at += step;
        }
      }
    }
  const int bias = p.bias ? p.bias[output] : 0;
  const float scale = p.scales[output];
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    if (first + i >= p.pixels) continue;
    const u64 to = output_at(v, first + i, pixels[i], output);
    float value = __fmul_rn(__int2float_rn(sums[i] + bias), scale);
    if (p.bytes) {
      value = value > p.low ? value : p.low;
      value = value < p.high ? value : p.high;
      static_cast<u8*>(p.y)[to] = u8(__float2int_rn(value) + p.y_zero);
    } else {
      if (p.float_bias) value = __fadd_rn(value, p.float_bias[output]);
      store_float(p.y, to, activate(value, p.activation, p.low, p.high), p.y_type);
    }
  }
}
