// Global average pooling: the mean over the pixels of an image, channel by channel, of images that lie pixel by pixel:
// floats, or codes of 8 bits as format/int8.rs has their mean.
//
//   a thread has a channel of an image; its neighbours have the channels beside it, so that a warp reads whole lines
#include "floats.cuh"

constexpr int THREADS = 64;

// As `Shape` in mean.rs.
struct Shape {
  u64 pixels, channels, means;
};

// As `Params` in mean.rs.
struct Params {
  const void* x;  // [images][pixels][channels]
  void* y;  // [images][channels]
  Shape shape;
  FloatType x_type, y_type;
};

// The first element of a thread's mean.
DEV u64 first_of(const Shape& s, u64 mean) { return mean / s.channels * s.pixels * s.channels + mean % s.channels; }

__global__ void __launch_bounds__(THREADS) mean(const Params p) {
  const u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= p.shape.means) return;
  const u64 first = first_of(p.shape, i);
  float sum = 0.f;
  for (u64 pixel = 0; pixel < p.shape.pixels; pixel++)
    sum += load_float(p.x, first + pixel * p.shape.channels, p.x_type);
  store_float(p.y, i, __fdiv_rn(sum, float(p.shape.pixels)), p.y_type);
}

// As `CodeParams` in mean.rs.
struct CodeParams {
  const u8* x;
  u8* y;
  Shape shape;
  int zeros, zero, least, greatest;
  float scale, y_scale;
  u32 flip;  // 0x80 of signed bytes: with it they are their codes plus 128
  u32 padding;
};

__global__ void __launch_bounds__(THREADS) mean_codes(const CodeParams p) {
  const u64 i = u64(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= p.shape.means) return;
  const u64 first = first_of(p.shape, i);
  int sum = 0;
  for (u64 pixel = 0; pixel < p.shape.pixels; pixel++)
    sum += int(p.x[first + pixel * p.shape.channels] ^ p.flip) - int(p.flip);
  const float steps = __fdiv_rn(__fmul_rn(__int2float_rn(sum - p.zeros), p.scale), p.y_scale);
  const int code = __float2int_rn(fminf(fmaxf(steps, -256.f), 256.f)) + p.zero;
  p.y[i] = u8(min(max(code, p.least), p.greatest));
}
