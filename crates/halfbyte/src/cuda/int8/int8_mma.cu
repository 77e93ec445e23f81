// int8 GEMM and implicit GEMM by mma.sync, from sm_75 on: sum = (x - zero of x) . (W - zeros of W)^T + bias of bytes is
// exact in int32; x is a matrix, or windows on images.  y is bytes, clamp(round(sum * M) + zero of y), or floats,
// activation(sum * scale + bias).  layout/cuda_int8.rs draws the packed weights; format/int8.rs says what the numbers
// mean, to the bit.
//
// A block of 8 warps computes one tile of STRIPS * 64 outputs and NT pixels: a warp has 16 outputs of each strip and
// half of the pixels.
//   All threads keep a ring of stages of 128 k full (cp.async; on sm_75 by way of registers): atoms of W as they lie,
//       and of x for each pixel 8 pieces of 16 channels, each of one position.  A piece in the padding is the zero
//       point of x.  Where channels of a group are no multiple of 16, pieces are smaller (int8_narrow.cuh).
//   W is the A operand of mma.sync m16n8k32, pixels its N; ldmatrix gives both.
//   sum = x . W^T + constant of the output, which takes the zero point of x off
//   ZEROS: less zero of the output * sum of (x - zero of x) over the columns.  What is not there is the zero point of x
//       and counts for nothing.  A thread sums the pieces that it brings.
//   epilogue: requantise, or floats; codes, or sums, go through shared memory, 64 outputs of a pixel side by side
#include "int8_layer.cuh"
#include "requantize.cuh"
#include "windows.cuh"

constexpr int NT = HB_NT;  // pixels
constexpr int STRIPS = HB_STRIPS;  // of 64 outputs
constexpr int STAGES = __CUDA_ARCH__ < 800 ? 2 : 3;  // in the ring
constexpr bool UNSIGNED = HB_UNSIGNED;  // x is u8, else i8
constexpr bool ZEROS = HB_ZEROS;  // weights have zero points
constexpr bool FLOATS = HB_FLOATS;  // y is floats, else bytes
constexpr int PIECE = HB_PIECE;  // bytes of x that are brought at once, of one position
constexpr bool NARROW = PIECE < 16;  // where weights may have zero points, or none

constexpr int THREADS = 256;
constexpr int ATOM = 64 * 128, STAGE_W = STRIPS * ATOM, STAGE = STAGE_W + NT * 128;
constexpr int COPIES_W = STAGE_W / 16 / THREADS, COPIES_X = NT * 8 / THREADS;  // a thread's
constexpr int PITCH = 68;  // ints from the staged sums of a pixel to the next: those of a warp lie in all banks

static_assert(NT == 32 || NT == 64 || NT == 128, "pixels");
static_assert(STRIPS == 1 || STRIPS == 2, "strips");
static_assert(STAGES >= 2 && STRIPS * NT * 64 <= STAGES * STAGE, "a ring that has room for the codes of a tile");
static_assert(NT * (PITCH + 1) * 4 <= STAGES * STAGE, "and for the sums of a strip, and of pixels");

// As `Arguments` in int8_mma.rs.
struct Arguments : LayerArguments {
  int m, outputs;  // outputs: of a group
  int steps;  // atoms along k
  int rows;  // tiles along the outputs of a group
  int height, width, pixel;  // of an image of x; bytes of a pixel
  int padding;  // of this struct
  Windows windows;
};

// c += A * B, m16n8k32, A signed; on sm_75 8 rows and 16 columns at a time.
DEV void multiply(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (UNSIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    mma_sync_int8<false>(c, a, b0, b1);
#else
  if constexpr (UNSIGNED) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.u8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
          : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])
          : "r"(a[i]), "r"(i / 2 ? b1 : b0));
  } else {
    mma_sync_int8<false>(c, a, b0, b1);
  }
#endif
}

// What is added to a product: a constant, and what the zero point of the weights takes off. Wraps round.
DEV int whole_sum(int product, int constant, u32 zero, u32 window) {
  return u32(product) + u32(constant) - zero * window;
}

DEV u32 add_bytes(u32 sum, u32 bytes) {
  if constexpr (UNSIGNED) return __dp4a(bytes, 0x01010101u, sum);
  return __dp4a((int)bytes, 0x01010101, (int)sum);
}

// Of each pixel of this lane the sum of x less its zero point. sums: of the pieces of x that this thread brings.
// room: NT ints.
DEV void sums_of_windows(const Arguments& g, u32* room, const u32 (&sums)[COPIES_X], u32 (&windows)[NT / 16][2]) {
  const int t = threadIdx.x;
#pragma unroll
  for (int i = 0; i < COPIES_X; i++) {
    u32 sum = sums[i];
#pragma unroll
    for (int e = 1; e < 8; e *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, e);
    if (t % 8 == 0) room[t / 8 + i * (THREADS / 8)] = sum;
  }
  __syncthreads();
  const u32 zero = (u32)g.x_zero * (u32)g.steps * 128;
  const u32* of_lane = room + t / 128 * (NT / 2) + t % 4 * 2;
#pragma unroll
  for (int i = 0; i < NT / 16; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) windows[i][e] = of_lane[8 * i + e] - zero;
}

// Floats of the staged sums of a strip that begins with output `strip` of the group.
DEV void store_floats(const Arguments& g, const int* staged, int strip, int first) {
  const int t = threadIdx.x, out = strip + t % 16 * 4, left = g.outputs - out, n = blockIdx.y * g.outputs + out;
  if (left <= 0) return;
  const bool aligned = ((g.outputs | g.windows.pitch) & 3) == 0;
  float scales[4], bias[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    scales[e] = e < left ? __ldg(g.multipliers + n + e) : 0.f;
    bias[e] = e < left && g.float_bias ? __ldg(g.float_bias + n + e) : 0.f;
  }
#pragma unroll 1
  for (int pixel = t / 16; pixel < NT && first + pixel < g.m; pixel += THREADS / 16) {
    const int4 sums = *(const int4*)(staged + pixel * PITCH + t % 16 * 4);
    const int each[4] = {sums.x, sums.y, sums.z, sums.w};
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      v[e] = __fmul_rn(__int2float_rn(each[e]), scales[e]);
      if (g.float_bias) v[e] = __fadd_rn(v[e], bias[e]);
      v[e] = activate(v[e], g.activation, g.low, g.high);
    }
    store_four(g.y, (u64)(first + pixel) * g.windows.pitch + n, make_float4(v[0], v[1], v[2], v[3]), g.y_type, left,
               aligned);
  }
}

// Where 16 bytes of a row lie among rows of 128: eight rows of a piece lie in all banks.
DEV u32 place_in_rows(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

#if HB_PIECE < 16
#include "int8_narrow.cuh"
#else
// What a thread brings of x: the same piece of every 32nd pixel.
struct Pixels {
  const u8* at[COPIES_X];  // the pixel under position (0, 0) of the window, which may lie outside of the image
  int row[COPIES_X], column[COPIES_X];
  int ky, kx, channel;  // of the piece
  DEV Pixels of(const Arguments& g, int first) {
    const Windows& v = g.windows;
    Pixels p;
    const int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COPIES_X; i++) {
      const int token = first + t / 8 + i * (THREADS / 8), at = token < g.m ? token : 0;
      const Window window = Window::of(v, at, 0);
      p.row[i] = token < g.m ? window.row : -0x40000000;  // outside of every image
      p.column[i] = window.column;
      const long long pixel = ((long long)window.image * g.height + window.row) * g.width + window.column;
      p.at[i] = g.x + pixel * g.pixel + blockIdx.y * v.channels;
    }
    const int k = t % 8 * 16, position = k / v.channels;
    p.ky = position / v.kernel.columns;
    p.kx = position - p.ky * v.kernel.columns;
    p.channel = k - position * v.channels;
    return p;
  }
  // To the same piece of the next 128 columns.
  __device__ __forceinline__ void advance(const Windows& v) {
    channel += 128;
    while (channel >= v.channels) {
      channel -= v.channels;
      if (++kx == v.kernel.columns) {
        kx = 0;
        ky++;
      }
    }
  }
};

// A thread's copies to a stage.
struct Stage : PendingCopies<COPIES_W + COPIES_X> {
  // 16 bytes, or a byte 16 times.
  __device__ __forceinline__ void start_or_fill(int i, u32 dst, const void* src, bool there, u32 word) {
#if __CUDA_ARCH__ >= 800
    if (there)
      copy_16(dst, src);
    else
      store_shared(dst, make_uint4(word, word, word, word));
#else
    start_or_zero(i, dst, src, there);
    if (!there) v[i] = make_uint4(word, word, word, word);
#endif
  }
  __device__ __forceinline__ void start(const Arguments& g, u32 to, const u8* w, int strips, const Pixels& p) {
    const Windows& v = g.windows;
    const int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COPIES_W; i++) {
      const int strip = i / (ATOM / 16 / THREADS), at = i * THREADS + t;
      start_if(i, to + at * 16, w + (u64)strip * g.steps * ATOM + (at * 16 - strip * ATOM), strip < strips);
    }
    const int down = p.ky * v.dilation.rows, across = p.kx * v.dilation.columns;
    const long long offset = ((long long)down * g.width + across) * g.pixel + p.channel;
    const u32 zeros = (u32)(g.x_zero & 255) * 0x01010101u;
#pragma unroll
    for (int i = 0; i < COPIES_X; i++) {
      const bool inside = (u32)(p.row[i] + down) < (u32)g.height && (u32)(p.column[i] + across) < (u32)g.width;
      start_or_fill(COPIES_W + i, to + STAGE_W + place_in_rows(t / 8 + i * (THREADS / 8), t % 8), p.at[i] + offset,
                    inside && p.ky < v.kernel.rows, zeros);
    }
  }
  __device__ __forceinline__ void skip_all() {
#pragma unroll
    for (int i = 0; i < COPIES_W + COPIES_X; i++) skip(i);
  }
};
#endif

// Blocks of a multiprocessor that registers leave room for. NARROW: more, as k is short and blocks wait for memory.
constexpr int TILE = STRIPS * NT, TWO_BLOCKS = __CUDA_ARCH__ < 800 ? 64 : 128;
constexpr int BLOCKS = NARROW && __CUDA_ARCH__ >= 800 && TILE <= 64 ? (TILE <= 32 ? 4 : 3) : TILE <= TWO_BLOCKS ? 2 : 1;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int8_mma(const __grid_constant__ Arguments g) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  // NARROW: the two halves' warps of the same outputs lie on different quarters of the multiprocessor.
  const int t = threadIdx.x, lane = t & 31, warp = __shfl_sync(0xffffffffu, t >> 5, 0),
            rows = (NARROW ? warp + (warp >> 2) * 2 : warp) & 3, half = warp >> 2;
  const int all = (g.outputs + 63) >> 6, strip = blockIdx.x % g.rows * STRIPS, first = blockIdx.x / g.rows * NT;
  const u8* w = g.w + (u64)(blockIdx.y * all + strip) * g.steps * ATOM;
  const bool offset = NARROW ? g.zeros != nullptr : ZEROS;
  launch_dependents();
  dependency_wait();
  Pixels p = Pixels::of(g, first);
  Stage copies;
  int next = 0;  // step that is copied next
  auto start = [&](int stage) {
    if (next < g.steps)
      copies.start(g, base + stage * STAGE, w + (u64)next * ATOM, NARROW ? g.outputs - strip * 64 : all - strip, p);
    else
      copies.skip_all();
    next++;
    p.advance(g.windows);
  };
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; stage++) {
    start(stage);
    copies.finish();
  }
  int acc[STRIPS][NT / 16][4] = {};
  u32 of_x[COPIES_X] = {};  // of weights with zero points: sums of the pieces that this thread brings
  // NARROW: strips with outputs of this warp, and columns that there are.
  const int mine = NARROW ? (g.outputs - strip * 64 - rows * 16 + 63) >> 6 : STRIPS;
  const int columns = NARROW ? g.windows.kernel.rows * g.windows.kernel.columns * g.windows.channels : 0;
  // This lane's rows of W and of x for ldmatrix: of 16 outputs two pieces, of two eights of pixels two pieces.
  const int output = rows * 16 + lane % 16, token = half * (NT / 2) + (lane & 7) + (lane >> 4) * 8;
#pragma unroll 1
  for (int k = 0, stage = 0; k < g.steps; k++) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    start(stage ? stage - 1 : STAGES - 1);
    const u32 at = base + stage * STAGE;
    if (offset)
#pragma unroll
      for (int i = 0; i < COPIES_X; i++) {
        u32 piece[4];
        load_shared(piece, at + STAGE_W + place_in_rows(t / 8 + i * (THREADS / 8), t % 8));
#pragma unroll
        for (int e = 0; e < 4; e++) of_x[i] = add_bytes(of_x[i], piece[e]);
      }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (NARROW && (mine <= 0 || k * 128 + j * 32 >= columns)) break;
      u32 a[STRIPS][4];
#pragma unroll
      for (int s = 0; s < STRIPS; s++)
        if (s < mine) load_matrices(a[s], at + s * ATOM + place_in_rows(output, 2 * j + lane / 16));
#pragma unroll
      for (int n = 0; n < NT / 32; n++) {
        u32 b[4];
        load_matrices(b, at + STAGE_W + place_in_rows(token + 16 * n, 2 * j + (lane >> 3 & 1)));
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
          if (s >= mine) continue;
          multiply(acc[s][2 * n], a[s], b[0], b[1]);
          multiply(acc[s][2 * n + 1], a[s], b[2], b[3]);
        }
      }
    }
    copies.finish();
    if (++stage == STAGES) stage = 0;
  }
  copy_wait<0>();
  __syncthreads();  // what follows lies where the ring was
  u32 of_windows[NT / 16][2] = {};
  if (offset) sums_of_windows(g, (u32*)(shared + STAGES * STAGE) - NT, of_x, of_windows);

  int* staged = (int*)shared;
#pragma unroll
  for (int s = 0; s < STRIPS; s++) {
    const int in_group = (strip + s) * 64 + rows * 16 + (lane >> 2), n = blockIdx.y * g.outputs + in_group;
    const bool r = in_group < g.outputs, r8 = in_group + 8 < g.outputs;
    const int c = r ? __ldg(g.constants + n) : 0, c8 = r8 ? __ldg(g.constants + n + 8) : 0;
    const u32 z = offset && r ? __ldg(g.zeros + n) : 0, z8 = offset && r8 ? __ldg(g.zeros + n + 8) : 0;
    const float m = !FLOATS && r ? __ldg(g.multipliers + n) : 0.f,
                m8 = !FLOATS && r8 ? __ldg(g.multipliers + n + 8) : 0.f;
    if (FLOATS && s) __syncthreads();  // the strip before has been read
#pragma unroll
    for (int i = 0; i < NT / 16; i++) {
      const int* v = acc[s][i];
      const u32* x = of_windows[i];
      const int sums[4] = {whole_sum(v[0], c, z, x[0]), whole_sum(v[1], c, z, x[1]), whole_sum(v[2], c8, z8, x[0]),
                           whole_sum(v[3], c8, z8, x[1])};
      if constexpr (FLOATS) {
        int* to = staged + (half * (NT / 2) + 8 * i + lane % 4 * 2) * PITCH + rows * 16 + lane / 4;
        to[0] = sums[0];
        to[PITCH] = sums[1];
        to[8] = sums[2];
        to[PITCH + 8] = sums[3];
      } else {
        stage_codes(base + s * (NT * 64), half * (NT / 16) + i, rows, lane,
                    requantize_8x16(sums, m, m8, g.low, g.high));
      }
    }
    if constexpr (FLOATS) {
      __syncthreads();
      store_floats(g, staged, (strip + s) * 64, first);
    }
  }
  if constexpr (FLOATS) return;
  __syncthreads();
  const u32 zeros = (u32)(g.y_zero & 255) * 0x01010101u;
  const int at_once = codes_of_store(g.outputs, g.windows.pitch);
#pragma unroll 1
  for (int i = t; i < STRIPS * NT * 4; i += THREADS) {
    const int s = i / (NT * 4), pixel = i / 4 % NT, chunk = i & 3, at = first + pixel,
              out = (strip + s) * 64 + 16 * chunk;
    if (at >= g.m || out >= g.outputs) continue;
    u8* y = (u8*)g.y + (u64)at * g.windows.pitch + blockIdx.y * g.outputs + out;
    store_codes(y, base + s * (NT * 64), pixel, chunk, out, g.outputs, at_once, zeros);
  }
}
