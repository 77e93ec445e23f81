// int8 convolution of groups of C channels and C outputs whose columns are neighbours in x: as int8_depthwise.cu, to
// the same bits, but each pixel is loaded and ordered once for all columns of the kernel and rows of a span.
//
//   a thread has 4 neighbouring channels of a span: ROWS rows of PIXELS neighbouring output pixels
//   a block has a tile of channels of spans, one step of spans after the other: neighbouring steps see the same rows of
//       x, which the multiprocessor then has in L1; weights of the tile are made once, to shared memory
//   a band is SEEN rows of x, those that 3 rows of the kernel see, or the next four of a larger one.  A column of it is
//       words of four bytes: C = 1 four rows of a channel, C = 2 two rows of two channels, else 4 channels of a row
//   a term is four bytes of weights of each of the 4 outputs, for dp4a; with zero points the 16 bits of code - zero,
//       two by two, for dp2a.  With C = 1 and 2 both rows of a span multiply the same words, the second one by weights
//       that lie a row further down; a weight is 0 where the kernel has no row
//   for each band, for each column of the kernel, for each term:
//       sums[row][pixel][output] += term[output] . word of the pixel's column
//
// SIDE: 3, a kernel of 3 x 3; 0: of any size, of groups of one channel.  STRIDE: across; of 2 a span has one row.
#include "early_launch.cuh"
#include "int8_layer.cuh"
#include "int8_quads.cuh"
#include "requantize.cuh"
#include "windows.cuh"

constexpr int C = HB_C;  // channels of a group, and outputs
constexpr int SIDE = HB_SIDE, STRIDE = HB_STRIDE;
constexpr bool UNSIGNED = HB_UNSIGNED;  // x is u8, else i8
constexpr bool ZEROS = HB_ZEROS;  // weights have zero points
constexpr bool FLOATS = HB_FLOATS;  // y is floats, else bytes

constexpr int THREADS = 256;
constexpr int BLOCKS = SIDE == 3 && (C == 1 || C == 4) && !ZEROS && !FLOATS ? 3 : 2;  // of a multiprocessor
constexpr int PIXELS = 4, ROWS = STRIDE == 1 ? 2 : 1;  // of a span
constexpr int SEEN = ROWS + 2;
constexpr int GROUP = SIDE > 0 ? SIDE : 4;  // columns of the kernel at a time
constexpr int WIDTH = (PIXELS - 1) * STRIDE + GROUP;  // columns of x that those see
constexpr int KEPT = SIDE > 0 ? 0 : WIDTH - GROUP;  // of them the ones that the next columns of the kernel see too
constexpr int HALVES = C == 8 ? 2 : 1;  // words of four channels that outputs of a thread see in a pixel
constexpr int WORDS = C < 4 ? 4 : SEEN * HALVES;  // of a column
constexpr int TERMS = C < 4 ? C * ROWS : 3 * HALVES;  // of a column of the kernel
constexpr int PARTS = ZEROS ? 2 : 1;  // words of a term of an output

static_assert(C == 1 || C == 2 || C == 4 || C == 8, "channels of a group");
static_assert(C == 1 || (SIDE == 3 && STRIDE == 1), "other kernels and strides are of groups of one channel");
static_assert(STRIDE == 1 || (STRIDE == 2 && SIDE == 3), "a stride of 2 is of 3 x 3");

// Of a span: an image, lines of ROWS rows, columns of PIXELS pixels.
struct Place {
  int image, line, column;
};

// As `Arguments` in int8_depthwise_rows.rs.
struct Arguments : LayerArguments {
  u32 lanes;  // fours of channels of a tile
  int steps;  // of a block
  int spans;  // of all images
  int lines, across;  // of spans, in an image
  Place next;  // how far on the spans of a step are from those of the one before
  int bands;
  int atoms;  // along the columns of an output
  int height, width;  // of an image of x
  Windows windows;
};

// Code of an output at a column, less its zero point.
DEV int weight(const Arguments& g, int output, int column) {
  const int row = output % C, piece = column % 128 / 16 ^ row;
  const u8* atom = g.w + (u64)(u32)(output / C * g.atoms + column / 128) * 8192;
  return (signed char)atom[row * 128 + piece * 16 + column % 16] - (ZEROS ? g.zeros[output] : 0);
}

// The terms of a tile, [band][column of the kernel][term][part][lane]: of a lane 4 outputs.
DEV void load_weights(const Arguments& g, u32* to, int first) {
  const int outputs = g.lanes * 4, across = g.windows.kernel.columns;
  const int terms = g.bands * across * TERMS, end = min(outputs, g.windows.pitch - first);
#pragma unroll 3  // turns of 3 x 3 are mostly a multiple
  for (int i = threadIdx.x; i < terms * end; i += THREADS) {
    const int local = i / terms, at = i - local * terms, column = at / TERMS, term = at % TERMS;
    const int band = SIDE > 0 ? 0 : column / across, kx = column - band * across;
    int codes[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int ky = C == 1 ? 4 * band + e - term : C == 2 ? term % 2 * 2 + e / 2 - term / 2 : term / HALVES;
      const int channel = C < 4 ? e % C : term % HALVES * 4 + e;
      const bool there = (u32)ky < (u32)g.windows.kernel.rows;
      const int code = weight(g, first + local, there ? (ky * across + kx) * C + channel : 0);  // loaded in any case
      codes[e] = there ? code : 0;
    }
    if constexpr (ZEROS) {
      to[at * 2 * outputs + local] = (u32)(codes[0] & 0xffff) | (u32)codes[1] << 16;
      to[(at * 2 + 1) * outputs + local] = (u32)(codes[2] & 0xffff) | (u32)codes[3] << 16;
    } else {
      to[at * outputs + local] = word_of_bytes(codes);
    }
  }
}

// The four channels of a thread in a pixel, of groups of 8 all 8.
struct Channels {
  u32 words[HALVES];
  __device__ __forceinline__ void load(const u8* from) {
    if constexpr (HALVES == 2) {
      const uint2 v = *(const uint2*)from;
      words[0] = v.x, words[HALVES - 1] = v.y;
    } else {
      words[0] = *(const u32*)from;
    }
  }
  // Or `fill` where there is no pixel.
  __device__ __forceinline__ void load_or(const u8* from, bool there, u32 fill) {
#pragma unroll
    for (int i = 0; i < HALVES; i++)
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n mov.b32 %0, %3;\n @p ld.global.u32 %0, [%1];\n}"
                   : "=&r"(words[i])
                   : "l"(from + 4 * i), "r"(int(there)), "r"(fill));
  }
};

// Words of a column of x.
DEV void order(const Channels (&x)[SEEN], u32 (&words)[WORDS]) {
  if constexpr (C == 1) {
    const u32 a = x[0].words[0], b = x[1].words[0], c = x[2].words[0], d = x[SEEN - 1].words[0];
    const u32 top = __byte_perm(a, b, 0x5140), top2 = __byte_perm(a, b, 0x7362);
    if constexpr (SEEN == 3) {  // the fourth byte is multiplied by 0
      words[0] = __byte_perm(top, c, 0x4410), words[1] = __byte_perm(top, c, 0x5532);
      words[2] = __byte_perm(top2, c, 0x6610), words[3] = __byte_perm(top2, c, 0x7732);
    } else {
      const u32 low = __byte_perm(c, d, 0x5140), low2 = __byte_perm(c, d, 0x7362);
      words[0] = __byte_perm(top, low, 0x5410), words[1] = __byte_perm(top, low, 0x7632);
      words[2] = __byte_perm(top2, low2, 0x5410), words[3] = __byte_perm(top2, low2, 0x7632);
    }
  } else if constexpr (C == 2) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = __byte_perm(x[i % 2 * 2].words[0], x[i % 2 * 2 + 1].words[0], i < 2 ? 0x5410 : 0x7632);
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = x[i / HALVES].words[i % HALVES];
  }
}

// Which of them a term of an output in a row of the span is multiplied by.
DEV constexpr int word_of(int term, int row, int output) {
  return C == 1 ? output : C == 2 ? output / 2 * 2 + term % 2 : (term / HALVES + row) * HALVES + term % HALVES;
}

typedef int Sums[ROWS][PIXELS][4];

// A span: an image, two of its rows and some columns of y, and the position in x under the first position of the kernel
// at its first pixel, which may lie outside.
struct Span {
  int image, y_row, y_column;
  int row, column;
  u32 at;  // where that lies in x, or would: wraps round
  __device__ __forceinline__ Span(const Arguments& g, const Place& place, u32 channel) {
    const Windows& v = g.windows;
    image = place.image, y_row = place.line * ROWS, y_column = place.column * PIXELS;
    row = y_row * v.stride.rows - v.padding.rows, column = y_column * STRIDE - v.padding.columns;
    at = (((u32)image * g.height + row) * g.width + column) * v.pitch + channel;
  }
};

// Adds the products of a band, whose weights are at `w`.
DEV void multiply_band(const Arguments& g, const Span& span, int band, const uint4* w, Sums& sums) {
  const Windows& v = g.windows;
  const int across = SIDE > 0 ? SIDE : v.kernel.columns, reach = (PIXELS - 1) * STRIDE + across;
  const u32 fill = (u32)(g.x_zero & 255) * 0x01010101u;
  u32 at[SEEN];  // of a pixel in each row
  bool inside[SEEN], all = span.column >= 0 && span.column <= g.width - reach;
#pragma unroll
  for (int s = 0; s < SEEN; s++) {
    const int down = (4 * band + s) * v.dilation.rows;
    inside[s] = (u32)(span.row + down) < (u32)g.height;
    all = all && inside[s];
    at[s] = span.at + (u32)down * g.width * v.pitch;
  }
  u32 x[WIDTH][WORDS];
  // Of the columns from `first` on, of which some were kept.
  auto load = [&](int first, int kept) {
    Channels raw[WIDTH][SEEN];
    if (all) {
#pragma unroll
      for (int j = 0; j < WIDTH; j++)
        if (j >= kept)
#pragma unroll
          for (int s = 0; s < SEEN; s++) raw[j][s].load(g.x + (u32)(at[s] + (u32)min(first + j, reach - 1) * v.pitch));
    } else {
#pragma unroll
      for (int j = 0; j < WIDTH; j++)
        if (j >= kept)
#pragma unroll
          for (int s = 0; s < SEEN; s++)
            raw[j][s].load_or(g.x + (u32)(at[s] + (u32)(first + j) * v.pitch),
                              inside[s] && first + j < reach && (u32)(span.column + first + j) < (u32)g.width, fill);
    }
#pragma unroll
    for (int j = 0; j < WIDTH; j++)
      if (j >= kept) order(raw[j], x[j]);
  };
  auto multiply_columns = [&](int first) {
#pragma unroll
    for (int k = 0; k < GROUP; k++) {
      if (first + k >= across) break;
#pragma unroll
      for (int term = 0; term < TERMS; term++) {
        uint4 four[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++, w += g.lanes) four[part] = *w;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
          if (C < 4 && term / C != i) continue;
#pragma unroll
          for (int o = 0; o < 4; o++) {
            u32 quad[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
              quad[part] = o == 0 ? four[part].x : o == 1 ? four[part].y : o == 2 ? four[part].z : four[part].w;
#pragma unroll
            for (int p = 0; p < PIXELS; p++)
              sums[i][p][o] =
                  multiply_quad<UNSIGNED, PARTS>(sums[i][p][o], quad, x[p * STRIDE + k][word_of(term, i, o)]);
          }
        }
      }
    }
  };
  load(0, 0);
  multiply_columns(0);
  if constexpr (KEPT > 0)
#pragma unroll 1
    for (int first = GROUP; first < across; first += GROUP) {
#pragma unroll
      for (int j = 0; j < KEPT; j++)
#pragma unroll
        for (int i = 0; i < WORDS; i++) x[j][i] = x[j + GROUP][i];
      load(first, KEPT);
      multiply_columns(first);
    }
}

// What the four outputs of a thread have in common in all pixels.
struct Outputs {
  int constants[4];
  float scales[4];  // of bytes
};

DEV void store_bytes(const Arguments& g, const Span& span, u32 channel, const Outputs& four, const Sums& sums) {
  const Pair size = g.windows.output;
  const u32 pitch = g.windows.pitch;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    if (span.y_row + i >= size.rows) break;
    const u32 pixel = ((u32)span.image * size.rows + span.y_row + i) * size.columns + span.y_column;
    u8* to = (u8*)g.y + (u32)(pixel * pitch + channel);
#pragma unroll
    for (int p = 0; p < PIXELS; p++)
      if (span.y_column + p < size.columns)
        *(u32*)(to + p * pitch) = requantize_four(sums[i][p], four.scales, g.low, g.high, g.y_zero);
  }
}

// Pixels one after the other in the place of the first: functions are long.
DEV void store_floats(const Arguments& g, const Span& span, u32 channel, Sums& sums) {
  const Pair size = g.windows.output;
#pragma unroll 1
  for (int turn = 0; turn < ROWS * PIXELS; turn++) {
    float v[4];
#pragma unroll
    for (int o = 0; o < 4; o++) {
      v[o] = __fmul_rn(__int2float_rn(sums[0][0][o]), g.multipliers[channel + o]);
      if (g.float_bias) v[o] = __fadd_rn(v[o], g.float_bias[channel + o]);
      v[o] = activate(v[o], g.activation, g.low, g.high);
#pragma unroll
      for (int i = 0; i + 1 < ROWS * PIXELS; i++)
        sums[i / PIXELS][i % PIXELS][o] = sums[(i + 1) / PIXELS][(i + 1) % PIXELS][o];
    }
    const int row = span.y_row + turn / PIXELS, column = span.y_column + turn % PIXELS;
    if (row >= size.rows || column >= size.columns) continue;
    const u64 pixel = ((u32)span.image * size.rows + row) * size.columns + column;
    store_four(g.y, pixel * g.windows.pitch + channel, make_float4(v[0], v[1], v[2], v[3]), g.y_type, 4, true);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int8_depthwise_rows(const __grid_constant__ Arguments g) {
  extern __shared__ uint4 weights[];
  launch_dependents();
  const u32 lane = threadIdx.x % g.lanes, slot = threadIdx.x / g.lanes, slots = THREADS / g.lanes;
  const u32 channel = (blockIdx.x * g.lanes + lane) * 4;
  const bool there = slot < slots && channel < (u32)g.windows.pitch;
  load_weights(g, (u32*)weights, blockIdx.x * g.lanes * 4);
  Outputs four = {};
  if (there) {
#pragma unroll
    for (int o = 0; o < 4; o++) {
      const u32 columns = (u32)g.windows.kernel.rows * g.windows.kernel.columns * C, output = channel + o;
      four.constants[o] = g.constants[output];
      if constexpr (ZEROS) four.constants[o] += g.zeros[output] * (u32)g.x_zero * columns;
      if constexpr (!FLOATS) four.scales[o] = g.multipliers[output];
    }
  }
  dependency_wait();
  __syncthreads();
  if (!there) return;
  const u32 band_weights = g.windows.kernel.columns * TERMS * PARTS * g.lanes;
  int at = blockIdx.y * g.steps * slots + slot;
  Place place = {0, at / g.across, at % g.across};
  place.image = place.line / g.lines, place.line %= g.lines;
#pragma unroll 1
  for (int step = 0; step < g.steps && at < g.spans; step++, at += slots) {
    const Span span(g, place, C == 8 ? channel / 8 * 8 : channel);
    Sums sums;
#pragma unroll
    for (int i = 0; i < ROWS * PIXELS * 4; i++) sums[i / 4 / PIXELS][i / 4 % PIXELS][i % 4] = four.constants[i % 4];
#pragma unroll 1
    for (int band = 0; band < (SIDE > 0 ? 1 : g.bands); band++)
      multiply_band(g, span, band, weights + lane + band * band_weights, sums);
    if constexpr (FLOATS)
      store_floats(g, span, channel, sums);
    else
      store_bytes(g, span, channel, four, sums);
    place.image += g.next.image, place.line += g.next.line, place.column += g.next.column;
    if (place.column >= g.across) {
      place.column -= g.across;
      place.line++;
    }
    if (place.line >= g.lines) {
      place.line -= g.lines;
      place.image++;
    }
  }
}
