// y = clamp(round(sum * M) + zero of y) on sm_90a, where sum = x . W^T of bytes is exact in int32: convolutions of stride 1 on images whose pixels
// lie in shared memory once, for all positions of the kernel.  layout/cuda_int8.rs draws the packed weights; format/int8.rs says what the
// numbers mean, to the bit.
//
// All images together are one row of slots: an image has grid_rows x pitch of them, its pixels with as many columns and rows of padding as
// windows need to their left or right, above or below; the padding between two rows, or two images, belongs to both.  The output at slot s sees
// slots s + ky * dilation * pitch + kx * dilation: the same distances everywhere, so that the pixels under one position are a run of slots.
//
// A block computes WARPGROUPS * NT outputs slots that follow each other (those that are no output pixel are computed and dropped), for some
// strips of 64 outputs:
//   producer (one thread): a ring of atoms of W
//   consumers (WARPGROUPS * 4 warps): write the padding, copy the pixels, then wait for them, 128 channels at a time, and for each strip
//     wgmma m64 nNT k32 with both operands in shared memory: W is A; B is the run of slots under a position
//     v = sum + constant of the output, which takes the zero point of x off;  codes go through shared memory, 64 outputs of a pixel side by side
//
// Slots in shared memory are without swizzle: 16 channels of all slots, one slot behind the other, then the next 16.  Any 8 neighbours are then a
// core matrix, wherever they begin.
// HB_FOLD = channels of x: x has few channels and stride 2.  A slot is a square of 2 x 2 pixels, (row, column, channel), and 16 bytes; the window is
// one of squares, of stride 1.
#include "hopper.cuh"
#include "wgmma_bytes.cuh"
#include "requantize.cuh"

constexpr int NT = HB_NT;                        // slots a warpgroup
constexpr int FOLD = HB_FOLD;                    // channels of x where squares are taken, else 0
constexpr bool UNSIGNED = HB_UNSIGNED;           // x is u8, else i8

constexpr int WARPGROUPS = 2, THREADS = WARPGROUPS * 128 + 32;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int TILE = WARPGROUPS * NT;            // slots of y
constexpr int ATOM = 64 * 128;                   // bytes of a strip x 128 k
constexpr int NONE = -1;                         // pixel of a slot that has none

static_assert(NT == 64 || NT == 96 || NT == 112 || NT == 128, "slots");
static_assert(FOLD <= 4, "a square is 16 bytes");
static_assert(THREADS == HB_THREADS, "the host's sums");

// As `Arguments` in int8_direct_sm90.rs.
struct Arguments {
  const u8* w;                                   // packed weights
  const int* constants;                          // [n]
  const float* multipliers;                      // [n]
  const u8* x;
  u8* y;                                         // [pixels][n]
  int n;
  int steps;                                     // atoms along k
  int strips;                                    // that a block computes
  int channels;                                  // of a slot
  int chunk;                                     // channels that are waited for together: 128, or all
  int kernel_rows, kernel_columns, dilation_down, dilation_across;
  int images, height, width, top, left;          // of x, in slots
  int rows, columns;                             // of an image of y
  int grid_rows, pitch;
  int slots;                                     // of x that a block sees
  int plane;                                     // bytes from 16 channels of the slots to the next
  int stages;                                    // of the ring
  int at_staging, at_x, at_offsets, at_outputs, at_pixels, at_barriers;    // in shared memory; the ring is at 0
  int x_zero, y_zero;
  float low, high;                               // clamp, less the zero point of y
};

// Where a slot lies.
struct Slot {
  int image, row, column;
  DEV Slot of(const Arguments& g, int slot) {
    const int all = g.grid_rows * g.pitch, image = slot / all, rest = slot - image * all, row = rest / g.pitch;
    return {image, row, rest - row * g.pitch};
  }
};

// Atoms of W in the order of the products: where chunks are whole atoms, all positions of a chunk, then the next chunk.
struct Order {
  int step, chunks;                              // atom of the row of W; chunks, where they are whole atoms
  DEV Order of(const Arguments& g) { return {0, g.channels % 128 == 0 ? g.channels / 128 : 1}; }
  __device__ __forceinline__ void advance(const Arguments& g) {
    step += chunks;
    if (step >= g.steps) step = chunks > 1 ? (step + 1) % chunks : 0;
  }
};

DEV void produce(const Arguments& g, u32 base) {
  const u64 policy = policy_evict_normal();
  const u32 full = base + g.at_barriers, empty = full + 8 * g.stages;
  const int all = (g.n + 63) >> 6, first = blockIdx.y * g.strips, strips = all - first < g.strips ? all - first : g.strips;
  const u8* source = g.w + (u64)first * g.steps * ATOM;
  int s = 0, phase = 1;                          // the first round finds empty stages
#pragma unroll 1
  for (int p = 0; p < strips; p++, source += (u64)g.steps * ATOM) {
    Order order = Order::of(g);
#pragma unroll 1
    for (int k = 0; k < g.steps; k++, order.advance(g)) {
      mbarrier_wait(empty + 8 * s, phase);
      mbarrier_expect(full + 8 * s, ATOM);
      copy_bulk(base + s * ATOM, source + (u64)order.step * ATOM, ATOM, full + 8 * s, policy);
      if (++s == g.stages) { s = 0; phase ^= 1; }
    }
  }
}

// The tables, and what is the same for every image: the padding.
DEV void prepare(const Arguments& g, u32 base, int first) {
  const int t = threadIdx.x, chunks = g.channels / 128;
  // Slots from the first on under the 32 columns of each product, in the order of the products.
  for (int i = t; i < g.steps * 4; i += CONSUMERS) {
    const int atom = i >> 2, positions = g.kernel_rows * g.kernel_columns;
    int column = i * 32;
    if (g.channels % 128 == 0) column = (atom % positions * chunks + atom / positions) * 128 + (i & 3) * 32;
    const int position = column / g.channels, channel = column - position * g.channels, ky = position / g.kernel_columns;
    // Past the last position W is zeros.
    const int at = ky * g.dilation_down * g.pitch + (position - ky * g.kernel_columns) * g.dilation_across;
    store_shared(base + g.at_offsets + 4 * i, position < positions ? at + channel / 16 * (g.plane / 16) : 0);
  }
  for (int i = t; i < TILE; i += CONSUMERS) {
    const Slot at = Slot::of(g, first + i);
    const bool is = at.image < g.images && at.row < g.rows && at.column < g.columns;
    store_shared(base + g.at_outputs + 4 * i, is ? (at.image * g.rows + at.row) * g.columns + at.column : NONE);
  }
  if constexpr (FOLD == 0) {
    const float zeros = __uint_as_float((u32)(g.x_zero & 255) * 0x01010101u);
    for (int i = t; i < g.slots; i += CONSUMERS) {
      const Slot at = Slot::of(g, first + i);
      const int row = at.row - g.top, column = at.column - g.left;
      const bool is = at.image < g.images && (u32)row < (u32)g.height && (u32)column < (u32)g.width;
      store_shared(base + g.at_pixels + 4 * i, is ? (at.image * g.height + row) * g.width + column : NONE);
      if (!is)
#pragma unroll 1
        for (int to = 0; to < g.channels / 16 * g.plane; to += g.plane) store_shared(base + g.at_x + to + 16 * i, zeros, zeros, zeros, zeros);
    }
    async_proxy_fence();
  }
}

// The pixels, and an arrival at the barrier of each chunk.
DEV void load(const Arguments& g, u32 base, u32 bars) {
  const int t = threadIdx.x, pieces = g.chunk / 16, wide = pieces % 8 == 0 ? 8 : pieces % 4 == 0 ? 4 : pieces % 2 == 0 ? 2 : 1;
  const int lane = t & (wide - 1), slots = CONSUMERS / wide, first = t / wide;
#pragma unroll 1
  for (int c = 0, bar = 0; c < g.channels; c += g.chunk, bar++) {
    const u8* from = g.x + c;
    const u32 to = base + g.at_x + c / 16 * g.plane;
#pragma unroll 4
    for (int i = first; i < g.slots; i += slots) {
      const int pixel = (int)load_shared(base + g.at_pixels + 4 * i);
      if (pixel == NONE) continue;
#pragma unroll 1
      for (int q = lane; q < pieces; q += wide) copy_16(to + q * g.plane + 16 * i, from + (u64)pixel * g.channels + 16 * q);
    }
    copies_arrive(bars + 8 * bar);
  }
}

// The same where a slot is a square of 2 x 2 pixels: two runs of 2 * FOLD bytes, which begin at multiples of 2.
DEV void load_squares(const Arguments& g, u32 base, int first, u32 bar) {
  const u32 zeros = (u32)(g.x_zero & 255) * 0x0101u;
  const int across = 2 * g.width;                // pixels of a row
  for (int i = threadIdx.x; i < g.slots; i += CONSUMERS) {
    const Slot at = Slot::of(g, first + i);
    const int row = 2 * (at.row - g.top), column = at.column - g.left;
    const bool is = at.image < g.images && (u32)column < (u32)g.width;
    u32 square[4] = {0, 0, 0, 0};
#pragma unroll
    for (int down = 0; down < 2; down++) {
      const bool there = is && (u32)(row + down) < (u32)g.height;
      const u16* from = (const u16*)(g.x + ((u64)(at.image * g.height + row + down) * across + 2 * column) * FOLD);
#pragma unroll
      for (int e = 0; e < FOLD; e++) {
        const u32 pair = there ? __ldg(from + e) : zeros;
        const int half = down * FOLD + e;
        square[half >> 1] |= pair << (16 * (half & 1));
      }
    }
    store_shared(base + g.at_x + 16 * i, __uint_as_float(square[0]), __uint_as_float(square[1]), __uint_as_float(square[2]), __uint_as_float(square[3]));
  }
  async_proxy_fence();
  mbarrier_arrive(bar);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) int8_direct_sm90(const __grid_constant__ Arguments g) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), full = base + g.at_barriers, empty = full + 8 * g.stages, x_full = empty + 8 * g.stages;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, first = blockIdx.x * TILE;
  if (threadIdx.x == CONSUMERS) {
    for (int s = 0; s < g.stages; s++) { mbarrier_init(full + 8 * s, 1); mbarrier_init(empty + 8 * s, WARPGROUPS * 4); }
    for (int c = 0; c * g.chunk < g.channels; c++) mbarrier_init(x_full + 8 * c, CONSUMERS);
    mbarrier_init_fence();
    async_proxy_fence();
  }
  if (warp < WARPGROUPS * 4) prepare(g, base, first);
  __syncthreads();
  launch_dependents();
  if (warp == WARPGROUPS * 4) {
    if (lane == 0) produce(g, base);
    return;
  }
  dependency_wait();                             // for x, and for what an earlier kernel reads of y
  if constexpr (FOLD == 0) load(g, base, x_full);
  else load_squares(g, base, first, x_full);

  const int wg = warp >> 2, t = threadIdx.x & 127, per_chunk = g.channels % 128 == 0 ? g.kernel_rows * g.kernel_columns : g.steps;
  const u32 staging = base + g.at_staging + wg * NT * 64, outputs = base + g.at_outputs + 4 * wg * NT;
  // B without swizzle: from 16 columns to the next a plane, or the next square; from 8 slots to the next 128 bytes.
  const u64 w0 = WGMMA_DESCRIPTOR_HIGH | wgmma_descriptor_low(base);
  const u64 x0 = (8ull << 32) | ((u64)(FOLD ? 1 : g.plane >> 4) << 16) | (((base + g.at_x) >> 4) + wg * NT);
  const int strips = (g.n + 63) >> 6, end = (blockIdx.y + 1) * g.strips < strips ? (blockIdx.y + 1) * g.strips : strips;
  const bool aligned = (g.n & 15) == 0;
  const u32 zeros = (u32)(g.y_zero & 255) * 0x01010101u;
  int s = 0, phase = 0;
#pragma unroll 1
  for (int strip = blockIdx.y * g.strips; strip < end; strip++) {
    const int n = strip * 64 + (warp & 3) * 16 + (lane >> 2);                 // output R of the lane
    const bool r = n < g.n, r8 = n + 8 < g.n;
    const int c = r ? __ldg(g.constants + n) : 0, c8 = r8 ? __ldg(g.constants + n + 8) : 0;
    const float m = r ? __ldg(g.multipliers + n) : 0.f, m8 = r8 ? __ldg(g.multipliers + n + 8) : 0.f;
    int acc[NT / 2];
    int until = 0, chunk = 0;
#pragma unroll 1
    for (int k = 0; k < g.steps; k++) {
      if (k == until) { mbarrier_wait(x_full + 8 * chunk++, 0); async_proxy_fence(); until += per_chunk; }
      u32 at[4];
      load_shared(at, base + g.at_offsets + 16 * k);
      mbarrier_wait(full + 8 * s, phase);
      const u64 w = w0 + s * (ATOM / 16);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) WgmmaBytes<NT, UNSIGNED>::run(acc, w + 2 * j, x0 + at[j], k + j ? 1 : 0);
      wgmma_commit();
      // The stage before is free when only this one's products are under way.
      wgmma_wait<1>();
      if (k > 0 && lane == 0) mbarrier_arrive(empty + 8 * (s ? s - 1 : g.stages - 1));
      if (++s == g.stages) { s = 0; phase ^= 1; }
    }
    wgmma_wait<0>();
    pin(acc);
    if (lane == 0) mbarrier_arrive(empty + 8 * (s ? s - 1 : g.stages - 1));
    barrier_sync(1 + wg, 128);                   // the strip before is stored
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      const int sums[4] = {acc[4 * i] + c, acc[4 * i + 1] + c, acc[4 * i + 2] + c8, acc[4 * i + 3] + c8};
      stage_codes(staging, i, warp & 3, lane, requantize_8x16(sums, m, m8, g.low, g.high));
    }
    barrier_sync(1 + wg, 128);
#pragma unroll 1
    for (int i = t; i < NT * 4; i += 128) {
      const int slot = i >> 2, piece = i & 3, pixel = (int)load_shared(outputs + 4 * slot), out = strip * 64 + 16 * piece;
      if (pixel != NONE && out < g.n) store_codes(g.y + (u64)pixel * g.n + out, staging, slot, piece, out, g.n, aligned, zeros);
    }
  }
}
