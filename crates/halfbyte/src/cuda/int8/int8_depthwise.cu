// int8 convolution of groups of C channels and C outputs, C = 1, 2, 4 or 8, by ordinary threads, from sm_75 on:
// sum = (x - zero of x) . (W - zeros of W)^T + bias of bytes is exact in int32.  y is bytes, clamp(round(sum * M) +
// zero of y), or floats, activation(sum * scale + bias).  layout/cuda_int8.rs draws the packed weights; format/int8.rs
// says what the numbers mean, to the bit.  Any geometry; int8_depthwise_rows.cu has forms for neighbours.
//
//   a thread has 16 neighbouring channels of PIXELS neighbouring output pixels; neighbours have neighbouring channels
//   a quad is four columns of an output: with C = 1 four positions of a channel, with C = 2 two of two, else four
//       channels of a position.  x comes as 16 channels of a position; bytes are ordered where quads have several.
//   the block keeps the quads of its outputs in shared memory: four bytes for dp4a; with zero points the 16 bits of
//       code - zero, two by two, for dp2a
//   sum = x . (W - zeros)^T + constant; what is not there is the zero point of x, which the constant takes off
#include "early_launch.cuh"
#include "int8_layer.cuh"
#include "int8_quads.cuh"
#include "requantize.cuh"
#include "windows.cuh"

constexpr int C = HB_C;  // channels of a group, and outputs
constexpr bool UNSIGNED = HB_UNSIGNED;  // x is u8, else i8
constexpr bool ZEROS = HB_ZEROS;  // weights have zero points
constexpr bool FLOATS = HB_FLOATS;  // y is floats, else bytes

constexpr int THREADS = 256;
constexpr int PIXELS = 2;  // of a thread
constexpr int SLOTS = 8;  // of 16 channels, that a block has at most
constexpr int POSITIONS = C == 1 ? 4 : 2, QUADS = POSITIONS * C / 4;  // of a step
constexpr int WORDS = C == 1 ? 16 : 8;  // of x that a step's quads are multiplied by
constexpr int PARTS = ZEROS ? 2 : 1;  // words of a quad of W
constexpr int CHUNK = 32;  // quads of an output that shared memory holds
constexpr int CHUNK_STEPS = CHUNK / QUADS;

static_assert(C == 1 || C == 2 || C == 4 || C == 8, "channels of a group");

// As `Arguments` in int8_depthwise.rs.
struct Arguments : LayerArguments {
  int m;  // output pixels
  int slots;  // of a block
  int steps, atoms;  // along the columns of an output
  int height, width;  // of an image of x
  Windows windows;
};

// Of each output of the block the quads of a chunk, in a form for dp4a or dp2a. Sixteen bytes are four outputs; those
// that slots read at once lie side by side.
typedef u32 Weights[CHUNK][PARTS][4][SLOTS][4];

DEV void load_weights(const Arguments& g, Weights& to, int first, int step) {
  const int quads = min(CHUNK_STEPS, g.steps - step) * QUADS, outputs = min(g.slots * 16, g.windows.pitch - first);
  for (int i = threadIdx.x; i < quads * outputs; i += THREADS) {
    const int quad = i % quads, local = i / quads, output = first + local, row = output % C;
    const int column = (step * QUADS + quad) * 4, piece = column % 128 / 16 ^ row;
    const u8* atom = g.w + (u64)(u32)(output / C * g.atoms + column / 128) * 8192;
    const u32 codes = *(const u32*)(atom + row * 128 + piece * 16 + column % 16);
    const int slot = local / 16, four = local % 16 / 4, e = local % 4;
    if constexpr (ZEROS) {
      const int zero = g.zeros[output];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int a = (signed char)(codes >> (16 * part)) - zero, b = (signed char)(codes >> (16 * part + 8)) - zero;
        to[quad][part][four][slot][e] = (u32)(a & 0xffff) | (u32)b << 16;
      }
    } else {
      to[quad][0][four][slot][e] = codes;
    }
  }
}

// Quads of x of 16 channels, from those of each position.
DEV void order(const u32 (&x)[POSITIONS][4], u32 (&quads)[WORDS]) {
#pragma unroll
  for (int v = 0; v < 4; v++) {
    if constexpr (C == 1) {
      const u32 left = __byte_perm(x[0][v], x[1][v], 0x5140), right = __byte_perm(x[2][v], x[3][v], 0x5140);
      const u32 left2 = __byte_perm(x[0][v], x[1][v], 0x7362), right2 = __byte_perm(x[2][v], x[3][v], 0x7362);
      quads[4 * v] = __byte_perm(left, right, 0x5410);
      quads[4 * v + 1] = __byte_perm(left, right, 0x7632);
      quads[4 * v + 2] = __byte_perm(left2, right2, 0x5410);
      quads[4 * v + 3] = __byte_perm(left2, right2, 0x7632);
    } else if constexpr (C == 2) {
      quads[2 * v] = __byte_perm(x[0][v], x[1][v], 0x5410);
      quads[2 * v + 1] = __byte_perm(x[0][v], x[1][v], 0x7632);
    } else {
      quads[v] = x[0][v];
      quads[4 + v] = x[1][v];
    }
  }
}

// Which of them a quad of an output of the 16 is multiplied by.
DEV constexpr int word_of(int quad, int output) {
  constexpr int OF_POSITION = C < 4 ? 1 : C / 4;
  return C < 4 ? output / C : quad / OF_POSITION * 4 + output / C * OF_POSITION + quad % OF_POSITION;
}

// Eight floats to `at`, a multiple of 16 bytes.
DEV void store_eight(void* to, u64 at, const float (&v)[8], FloatType type) {
  if (type == F32) {
    float4* quads = (float4*)((float*)to + at);
    quads[0] = make_float4(v[0], v[1], v[2], v[3]);
    quads[1] = make_float4(v[4], v[5], v[6], v[7]);
    return;
  }
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float a = v[2 * i], b = v[2 * i + 1];
    const u32 low = type == F16 ? half_of_float(a) : bfloat_of_float(a);
    words[i] = low | (u32)(type == F16 ? half_of_float(b) : bfloat_of_float(b)) << 16;
  }
  *(uint4*)((u16*)to + at) = make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) int8_depthwise(const __grid_constant__ Arguments g) {
  __shared__ __align__(16) Weights weights;
  const Windows& v = g.windows;
  const int t = threadIdx.x, slot = t % g.slots, strips = THREADS / g.slots;
  const int outputs = blockIdx.y * g.slots * 16, channel = outputs + slot * 16;
  const int first = ((int)blockIdx.x * strips + t / g.slots) * PIXELS;
  const int left = t / g.slots < strips && channel < v.pitch ? g.m - first : 0;  // pixels from the first on
  launch_dependents();
  dependency_wait();

  int row[PIXELS], column[PIXELS];  // of x, under position (0, 0)
  u32 at[PIXELS];  // where that lies in x, or would: wraps round
  const int from = left > 0 ? first : 0, plane = v.output.rows * v.output.columns;
  int image = from / plane, r = (from - image * plane) / v.output.columns,
      c = from - image * plane - r * v.output.columns;
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    const int y = r * v.stride.rows - v.padding.rows;
    row[i] = i < left ? y : -0x40000000;  // outside of every image
    column[i] = c * v.stride.columns - v.padding.columns;
    at[i] = (((u32)image * g.height + y) * g.width + column[i]) * v.pitch + channel;
    if (++c == v.output.columns) {
      c = 0;
      if (++r == v.output.rows) {
        r = 0;
        image++;
      }
    }
  }
  const u32 fill = (u32)(g.x_zero & 255) * 0x01010101u;
  int sums[PIXELS][16] = {};
  int ky = 0, kx = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < g.steps; chunk += CHUNK_STEPS) {
    if (chunk) __syncthreads();  // the one before has been read
    load_weights(g, weights, outputs, chunk);
    __syncthreads();
    const int steps = min(CHUNK_STEPS, g.steps - chunk);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      u32 x[PIXELS][POSITIONS][4];
#pragma unroll
      for (int p = 0; p < POSITIONS; p++) {
        const int down = ky * v.dilation.rows, across = kx * v.dilation.columns;
        const u32 offset = ((u32)down * g.width + across) * v.pitch;
#pragma unroll
        for (int i = 0; i < PIXELS; i++) {
          const bool inside =
              ky < v.kernel.rows && (u32)(row[i] + down) < (u32)g.height && (u32)(column[i] + across) < (u32)g.width;
          uint4 words = make_uint4(fill, fill, fill, fill);
          if (inside) words = *(const uint4*)(g.x + (u32)(at[i] + offset));
          x[i][p][0] = words.x, x[i][p][1] = words.y, x[i][p][2] = words.z, x[i][p][3] = words.w;
        }
        if (++kx == v.kernel.columns) {
          kx = 0;
          ky++;
        }
      }
      u32 quads[PIXELS][WORDS];
#pragma unroll
      for (int i = 0; i < PIXELS; i++) order(x[i], quads[i]);
#pragma unroll
      for (int q = 0; q < QUADS; q++)
#pragma unroll
        for (int four = 0; four < 4; four++) {
          uint4 w[PARTS];
#pragma unroll
          for (int part = 0; part < PARTS; part++) w[part] = *(const uint4*)weights[step * QUADS + q][part][four][slot];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            u32 quad[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
              quad[part] = e == 0 ? w[part].x : e == 1 ? w[part].y : e == 2 ? w[part].z : w[part].w;
#pragma unroll
            for (int i = 0; i < PIXELS; i++)
              sums[i][4 * four + e] =
                  multiply_quad<UNSIGNED, PARTS>(sums[i][4 * four + e], quad, quads[i][word_of(q, 4 * four + e)]);
          }
        }
    }
  }
  if (left <= 0) return;

  // Columns, those past the last among them, of which x held the zero point.
  const u32 zero = (u32)g.x_zero * (u32)g.steps * (QUADS * 4);
  const u32 y_zero = (u32)(g.y_zero & 255) * 0x01010101u;
  u32 codes[PIXELS][4];
#pragma unroll
  for (int eight = 0; eight < 2; eight++) {
    float v8[PIXELS][8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const int output = channel + 8 * eight + e;
      const u32 constant = (u32)g.constants[output] + (ZEROS ? (u32)g.zeros[output] * zero : 0);
      const float scale = g.multipliers[output];
#pragma unroll
      for (int i = 0; i < PIXELS; i++) {
        const int sum = (int)((u32)sums[i][8 * eight + e] + constant);
        if constexpr (FLOATS) {
          v8[i][e] = __fmul_rn(__int2float_rn(sum), scale);
          if (g.float_bias) v8[i][e] = __fadd_rn(v8[i][e], g.float_bias[output]);
          v8[i][e] = activate(v8[i][e], g.activation, g.low, g.high);
        } else {
          const u32 code = requantize(sum, scale, g.low, g.high) & 255;
          u32& word = codes[i][2 * eight + e / 4];
          word = e % 4 == 0 ? code : word | code << (e % 4 * 8);
        }
      }
    }
    if constexpr (FLOATS)
#pragma unroll
      for (int i = 0; i < PIXELS; i++)
        if (i < left) store_eight(g.y, (u64)(first + i) * v.pitch + channel + 8 * eight, v8[i], g.y_type);
  }
  if constexpr (!FLOATS)
#pragma unroll
    for (int i = 0; i < PIXELS; i++)
      if (i < left)
        *(uint4*)((u8*)g.y + (u64)(first + i) * v.pitch + channel) =
            make_uint4(__vadd4(codes[i][0], y_zero), __vadd4(codes[i][1], y_zero), __vadd4(codes[i][2], y_zero),
                       __vadd4(codes[i][3], y_zero));
}
