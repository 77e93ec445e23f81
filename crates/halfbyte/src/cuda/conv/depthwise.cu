// Direct convolution of groups of 1, 2, 4 or 8 channels and as many outputs (depthwise, ResNeXt's) on the scalar units,
// x and y pixel by pixel: memory is the limit, so that every load and store is a vector of 8 channels.
//
//   a thread has 8 neighbouring channels of a span: of PIXELS neighbouring output pixels in a row
//   a block has a tile of channels of spans, one step of spans after the other
//   weights of the tile are dequantised once, to f32 in shared memory; of large kernels some rows at a time
//   for each position of the kernel, row by row:
//       x = the channels of each pixel, widened
//       for each channel c of a group: sums[pixel][o] = fma(x[pixel][first channel of o's group + c], w[o][c], sums)
//   y = activation(sum + bias), rounded once
//
// Every sum is made by one thread in that order, so that it has the same bits whatever the batch is. x is 0 in the
// padding. Kernels of COLUMNS columns that are neighbours in x load and widen each pixel of a row once for all of them;
// of 3 x 3 positions in groups of one channel, a row is on its way where registers allow it while the one before is
// multiplied. Neighbouring steps of a block see the same rows of the image, which its multiprocessor then has in L1.
#include "activation.cuh"
#include "ampere.cuh"
#include "conv_weights.cuh"

constexpr u32 THREADS = 256;
constexpr int PIXELS = 4;  // of a span
constexpr int VECTOR = 8;  // channels of a thread

// As `Params` in conv/depthwise.rs.
struct Params {
  Weight w;
  const void* x;
  const float* bias;  // [outputs], or null
  void* y;
  u64 image_bytes, row_bytes;  // of x
  u32 pixel_bytes;
  u32 channels;  // of all groups, in x as in y
  u32 height, width;  // of x
  u32 rows, columns;  // of an image of y
  u32 across;  // spans of a row
  u32 spans;  // of all rows
  u32 kernel_rows, kernel_columns;
  u32 stride_down, stride_across, dilation_down, dilation_across, top, left;
  u32 lanes;  // vectors of a tile
  u32 steps;  // of a block
  u32 together;  // rows of the kernel whose weights are in shared memory at a time
  u32 bits;  // of a weight's place in a word; 0: floats
  FloatType y_type;
  Activation activation;
  float low, high;  // of CLAMP
};

// Where a vector has its halves in shared memory, from the first one of its output: so that threads of neighbouring
// lanes read all banks.
DEV u32 half_at(const Params& p, u32 lane, u32 half) { return half * p.lanes + lane; }

// The tile's weights of columns `first` to `end` to shared memory, [column][half][lane]: a thread has some columns of
// an output.
template <int LAYOUT, int BITS> DEV void dequantize(const Params& p, float4* to, u32 first, u32 end) {
  const u32 outputs = p.lanes * VECTOR, output = threadIdx.x % outputs, parts = THREADS / outputs;
  const u32 row = blockIdx.x * outputs + output, part = threadIdx.x / outputs;
  if (part >= parts || row >= p.channels) return;
  Row<LAYOUT, BITS> weights(p.w, row);
  float* own = reinterpret_cast<float*>(to + half_at(p, output / VECTOR, output % VECTOR / 4)) + output % 4;
#pragma unroll 4
  for (u32 k = first + part; k < end; k += parts) own[(k - first) * outputs] = weights.at(p.w, k);
}

DEV void dequantize(const Params& p, float4* to, u32 first, u32 end) {
  switch (p.bits) {
    case 0: return dequantize<DENSE, 0>(p, to, first, end);
    case 2: return dequantize<PLAIN, 2>(p, to, first, end);
    case 4: return dequantize<PLAIN, 4>(p, to, first, end);
    default: return dequantize<PLAIN, 8>(p, to, first, end);
  }
}

DEV void load_eight(const Params& p, const float4* from, float (&v)[VECTOR]) {
  const float4 a = from[0], b = from[half_at(p, 0, 1)];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// 16 bytes, or zeros. As one instruction, which the compiler does not make four of when registers are few.
DEV uint4 load_or_zero(const u8* from, bool there) {
  uint4 v;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(int(there)));
  return v;
}
DEV void store_16(void* to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// The channels of a thread in a pixel, as they lie in memory.
template <int TYPE> struct Channels {
  static constexpr int EACH = TYPE == F32 ? 1 : 2;  // of a word
  uint4 words[2 / EACH];
  // Those of a vector in memory, or all; zeros where the pixel is not inside of its image.
  __device__ __forceinline__ void load_part(const u8* from, bool inside, int part) {
    words[part] = load_or_zero(from + 16 * part, inside);
  }
  __device__ __forceinline__ void load(const u8* from, bool inside) {
#pragma unroll
    for (int i = 0; i < 2 / EACH; i++) load_part(from, inside, i);
  }
  // COUNT of them, from `first` on.
  template <int COUNT> __device__ __forceinline__ void widen(float (&x)[COUNT], int first = 0) const {
#pragma unroll
    for (int o = 0; o < COUNT; o++) {
      const int i = first + o, at = i / EACH % 4;
      const uint4 v = words[i / (4 * EACH)];
      const u32 word = at == 0 ? v.x : at == 1 ? v.y : at == 2 ? v.z : v.w;
      x[o] = TYPE == F32 ? __uint_as_float(word) : float_of_bits(u16(word >> (16 * (i % EACH))), FloatType(TYPE));
    }
  }
};

typedef float Sums[PIXELS][VECTOR];

// A span: the position in x under the first position of the kernel at its first pixel, which may lie outside.
struct Span {
  const u8* image;  // with the thread's channels
  int row, column;
  __device__ __forceinline__ Span(const Params& p, u32 at, u32 channel, u32 element) {
    const u32 line = at / p.across, image_at = line / p.rows;
    row = int(line % p.rows * p.stride_down) - int(p.top);
    column = int(at % p.across * PIXELS * p.stride_across) - int(p.left);
    image = static_cast<const u8*>(p.x) + image_at * p.image_bytes + channel * element;
  }
  // The first pixel at a row of the kernel.
  __device__ __forceinline__ const u8* pixel(const Params& p, u32 ky) const {
    return image + (long long)(row + int(ky * p.dilation_down)) * (long long)p.row_bytes +
           (long long)column * p.pixel_bytes;
  }
  __device__ __forceinline__ bool is_inside(const Params& p, u32 ky) const {
    return u32(row + int(ky * p.dilation_down)) < p.height;
  }
};

// Adds the products of all positions of a depthwise kernel of 3 x 3, whose columns are neighbours in x.
template <int STRIDE, int TYPE> DEV void multiply_3x3(const Params& p, const Span& span, const float4* w, Sums& sums) {
  constexpr int WIDTH = (PIXELS - 1) * STRIDE + 3;  // pixels of a row that the span sees
  bool inside[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; j++) inside[j] = u32(span.column + j) < p.width;
  constexpr bool EARLY = WIDTH * sizeof(Channels<TYPE>) <= 96;
  Channels<TYPE> next[WIDTH];
  auto load = [&](u32 ky) {
    const u8* from = span.pixel(p, ky);
    const bool there = span.is_inside(p, ky);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) next[j].load(from + j * p.pixel_bytes, there && inside[j]);
  };
  if (EARLY) load(0);
#pragma unroll(EARLY ? 3 : 1)
  for (u32 ky = 0; ky < 3; ky++) {
    if (!EARLY) load(ky);
    Channels<TYPE> here[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH; j++) here[j] = next[j];
    if (EARLY && ky < 2) load(ky + 1);
    float weights[3][VECTOR];
#pragma unroll
    for (int kx = 0; kx < 3; kx++) load_eight(p, w + (ky * 3 + kx) * 2 * p.lanes, weights[kx]);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) {
      float x[VECTOR];
      here[j].widen(x);
#pragma unroll
      for (int i = 0; i < PIXELS; i++) {
        const int kx = j - i * STRIDE;
        if (kx < 0 || kx > 2) continue;
#pragma unroll
        for (int o = 0; o < VECTOR; o++) sums[i][o] = fmaf(x[o], weights[kx][o], sums[i][o]);
      }
    }
  }
}

// Adds the products of a row of a kernel whose columns are neighbours in x, of 4 channels from 4 * half on: weights of
// all columns are in registers.
template <int C, int COLUMNS, int STRIDE, class Pixels>
DEV void multiply_half(const Params& p, const Pixels& pixels, const float4* w, int half, Sums& sums) {
  constexpr int WIDTH = (PIXELS - 1) * STRIDE + COLUMNS;
  float4 weights[COLUMNS * C];
#pragma unroll
  for (int k = 0; k < COLUMNS * C; k++) weights[k] = w[half_at(p, 0, 2 * k + half)];
#pragma unroll
  for (int j = 0; j < WIDTH; j++) {
    float x[VECTOR / 2];
    pixels[j].widen(x, half * (VECTOR / 2));
#pragma unroll
    for (int i = 0; i < PIXELS; i++) {
      const int kx = j - i * STRIDE;
      if (kx < 0 || kx >= COLUMNS) continue;
      float* own = sums[i] + half * (VECTOR / 2);
#pragma unroll
      for (int c = 0; c < C; c++) {
        const float4 v = weights[kx * C + c];
        own[0] = fmaf(x[c], v.x, own[0]);
        own[1] = fmaf(x[1 / C * C + c], v.y, own[1]);
        own[2] = fmaf(x[2 / C * C + c], v.z, own[2]);
        own[3] = fmaf(x[3 / C * C + c], v.w, own[3]);
      }
    }
  }
}

// Adds the products of rows `first` to `end` of such a kernel. Of f32 and of wide rows, of which registers do not hold
// all channels, all rows of a half come in one turn and of the other in the next.
template <int C, int COLUMNS, int STRIDE, int TYPE>
DEV void multiply_rows(const Params& p, const Span& span, const float4* w, u32 first, u32 end, Sums& sums) {
  constexpr int WIDTH = (PIXELS - 1) * STRIDE + COLUMNS, TURNS = TYPE == F32 || WIDTH > 10 ? 2 : 1;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    const float4* of_row = w;
#pragma unroll 1
    for (u32 ky = first; ky < end; ky++, of_row += half_at(p, 0, 2 * COLUMNS * C)) {
      const u8* from = span.pixel(p, ky);
      const u32 width = span.is_inside(p, ky) ? p.width : 0;
      Channels<TYPE> pixels[WIDTH];
#pragma unroll
      for (int j = 0; j < WIDTH; j++)
        pixels[j].load_part(from + j * p.pixel_bytes, u32(span.column + j) < width, TYPE == F32 ? turn : 0);
#pragma unroll
      for (int half = turn; half < 2; half += TURNS) multiply_half<C, COLUMNS, STRIDE>(p, pixels, of_row, half, sums);
    }
  }
}

// Adds the products of rows `first` to `end` of any kernel.
template <int C, int TYPE>
DEV void multiply(const Params& p, const Span& span, const float4* w, u32 first, u32 end, Sums& sums) {
  const long long from_pixel = (long long)p.stride_across * p.pixel_bytes,
                  from_position = (long long)p.dilation_across * p.pixel_bytes;
#pragma unroll 1
  for (u32 ky = first; ky < end; ky++) {
    const u8* from = span.pixel(p, ky);
    const bool there = span.is_inside(p, ky);
    int column = span.column;
#pragma unroll 1
    for (u32 kx = 0; kx < p.kernel_columns; kx++) {
      Channels<TYPE> pixels[PIXELS];
#pragma unroll
      for (int i = 0; i < PIXELS; i++)
        pixels[i].load(from + i * from_pixel, there && u32(column + i * int(p.stride_across)) < p.width);
      float x[PIXELS][VECTOR];
#pragma unroll
      for (int i = 0; i < PIXELS; i++) pixels[i].widen(x[i]);
#pragma unroll
      for (int c = 0; c < C; c++, w += 2 * p.lanes) {
        float weights[VECTOR];
        load_eight(p, w, weights);
#pragma unroll
        for (int i = 0; i < PIXELS; i++)
#pragma unroll
          for (int o = 0; o < VECTOR; o++) sums[i][o] = fmaf(x[i][o / C * C + c], weights[o], sums[i][o]);
      }
      from += from_position, column += int(p.dilation_across);
    }
  }
}

DEV void store_eight(u8* to, const float (&v)[VECTOR], FloatType type) {
  if (type == F32) {
    u32 bits[VECTOR];
#pragma unroll
    for (int o = 0; o < VECTOR; o++) bits[o] = __float_as_uint(v[o]);
    store_16(to, bits[0], bits[1], bits[2], bits[3]);
    store_16(to + 16, bits[4], bits[5], bits[6], bits[7]);
    return;
  }
  u32 pairs[VECTOR / 2];
#pragma unroll
  for (int o = 0; o < VECTOR / 2; o++)
    pairs[o] = type == F16 ? half_pair(v[2 * o], v[2 * o + 1]) : bf16_pair(v[2 * o], v[2 * o + 1]);
  store_16(to, pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Bias, activation and the store of a span.
DEV void store(const Params& p, u32 at, u32 channel, const float4* bias, Sums& sums) {
  float added[VECTOR];
  load_eight(p, bias, added);
#pragma unroll
  for (int i = 0; i < PIXELS; i++)
#pragma unroll
    for (int o = 0; o < VECTOR; o++) sums[i][o] += added[o];
  if (p.activation == CLAMP) {
#pragma unroll
    for (int i = 0; i < PIXELS; i++)
#pragma unroll
      for (int o = 0; o < VECTOR; o++) sums[i][o] = activate(sums[i][o], CLAMP, p.low, p.high);
  } else if (p.activation != NONE) {
    // One pixel after the other in the place of the first: functions are long.
#pragma unroll 1
    for (int turn = 0; turn < PIXELS; turn++) {
#pragma unroll
      for (int o = 0; o < VECTOR; o++) {
        const float v = activate(sums[0][o], p.activation, p.low, p.high);
#pragma unroll
        for (int i = 0; i + 1 < PIXELS; i++) sums[i][o] = sums[i + 1][o];
        sums[PIXELS - 1][o] = v;
      }
    }
  }
  const u32 column = at % p.across * PIXELS;
  const u32 element = p.y_type == F32 ? 4 : 2;
  const u64 first = (u64(at / p.across) * p.columns + column) * p.channels + channel;
  u8* to = static_cast<u8*>(p.y) + first * element;
#pragma unroll
  for (int i = 0; i < PIXELS; i++)
    if (column + i < p.columns) store_eight(to + i * p.channels * element, sums[i], p.y_type);
}

// C: channels of a group.  COLUMNS, STRIDE: of a kernel across, whose columns are neighbours in x, with C = 1 and 3
// columns also its rows; 0: any.  TYPE: of x.
template <int C, int COLUMNS, int STRIDE, int TYPE>
__global__ void __launch_bounds__(THREADS, 2) depthwise(const __grid_constant__ Params p) {
  static_assert(VECTOR % C == 0 && (COLUMNS == 0 || 2 * C <= VECTOR), "whole groups, of half of the channels too");
  // All its rows are unrolled; of f32 with stride 2, they are more than registers hold.
  constexpr bool IS_3X3 = C == 1 && COLUMNS == 3 && (STRIDE == 1 || TYPE != F32);
  extern __shared__ float4 shared[];  // the bias [half][lane], then weights
  launch_dependents();
  const u32 lane = threadIdx.x % p.lanes, slot = threadIdx.x / p.lanes, slots = THREADS / p.lanes;
  const u32 vector = blockIdx.x * p.lanes + lane, channel = vector * VECTOR;
  const u32 row_columns = p.kernel_columns * C;  // columns of w that a row of the kernel has
  float4* weights = shared + half_at(p, 0, 2);
  dequantize(p, weights, 0, p.together * row_columns);
  dependency_wait();
  if (threadIdx.x < p.lanes * VECTOR) {
    const u32 output = blockIdx.x * p.lanes * VECTOR + threadIdx.x;
    float* to = reinterpret_cast<float*>(shared + half_at(p, threadIdx.x / VECTOR, threadIdx.x % VECTOR / 4));
    to[threadIdx.x % 4] = p.bias && output < p.channels ? p.bias[output] : 0.f;
  }
  __syncthreads();
#pragma unroll 1
  for (u32 step = 0; step < p.steps; step++) {
    const u32 at = (blockIdx.y * p.steps + step) * slots + slot;
    const bool there = slot < slots && at < p.spans && channel < p.channels;
    const Span span(p, at, channel, TYPE == F32 ? 4 : 2);
    Sums sums = {};
    if constexpr (IS_3X3) {
      if (there) multiply_3x3<STRIDE, TYPE>(p, span, weights + lane, sums);
    } else {
#pragma unroll 1
      for (u32 first = 0; first < p.kernel_rows; first += p.together) {
        const u32 end = min(first + p.together, p.kernel_rows);
        if (p.together < p.kernel_rows && step + first > 0) {
          __syncthreads();  // the rows before have been read by all
          dequantize(p, weights, first * row_columns, end * row_columns);
          __syncthreads();
        }
        if (!there) continue;
        if constexpr (COLUMNS > 0)
          multiply_rows<C, COLUMNS, STRIDE, TYPE>(p, span, weights + lane, first, end, sums);
        else
          multiply<C, TYPE>(p, span, weights + lane, first, end, sums);
      }
    }
    if (there) store(p, at, channel, shared + lane, sums);
  }
}
