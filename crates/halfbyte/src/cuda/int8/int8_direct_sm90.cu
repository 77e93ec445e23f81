// Direct int8 convolution on sm_90a (stride 1): y = clamp(round(sum * M) + zero of y), where sum = x . W^T of bytes is
// exact in int32, on images whose pixels lie in shared memory once, for all positions of the kernel.
// layout/cuda_int8.rs draws the packed weights; format/int8.rs says what the numbers mean, to the bit.
//
// All images together are one row of slots: an image has a grid of them, its pixels with as many columns and rows of
// padding as windows need to their left or right, above or below; the padding between two rows, or two images, belongs
// to both.  The output at slot s sees slots s + (ky * dilation) * columns of the grid + kx * dilation: the same
// distances everywhere, so that the pixels under one position are a run of slots.
//
// A block computes WARPGROUPS * NT slots of outputs that follow each other (those that are no output pixel are computed
// and dropped), for some strips of 64 outputs:
//   producer (one thread): a ring of atoms of W
//   consumers (WARPGROUPS * 4 warps): write the padding, copy the pixels, then wait for them, 128 channels at a time,
//   and for each strip
//     wgmma m64 nNT k32 with both operands in shared memory: W is A; B is the run of slots under a position
//     v = sum + constant of the output, which takes the zero point of x off
//     requantise; codes go through shared memory, 64 outputs of a pixel side by side
//
// Slots in shared memory are without swizzle: 16 channels of all slots, one slot behind the other, then the next 16.
// Any 8 neighbours are then a core matrix, wherever they begin.
// HB_FOLD = channels of x: x has few channels and stride 2.  A slot is a square of 2 x 2 pixels, (row, column,
// channel), and 16 bytes; the window is one of squares, of stride 1.
#include "windows.cuh"
#include "wgmma_bytes.cuh"
#include "requantize.cuh"

constexpr int NT = HB_NT;  // slots a warpgroup
constexpr int FOLD = HB_FOLD;  // channels of x where squares are taken, else 0
constexpr bool UNSIGNED = HB_UNSIGNED;  // x is u8, else i8

constexpr int WARPGROUPS = 2, THREADS = WARPGROUPS * 128 + 32;
constexpr int CONSUMERS = WARPGROUPS * 128;
constexpr int TILE = WARPGROUPS * NT;  // slots of y
constexpr int ATOM = 64 * 128;  // bytes of a strip x 128 k
constexpr u32 NONE = 0xffffffffu;  // place of a slot's pixel that has none

static_assert(NT == 64 || NT == 96 || NT == 112 || NT == 128, "slots");
static_assert(FOLD <= 4, "a square is 16 bytes");
static_assert(THREADS == HB_THREADS, "the host's sums");

// As `Arguments` in int8_direct_sm90.rs.
struct Arguments {
  const u8* w;  // packed weights
  const int* constants;  // [n]
  const float* multipliers;  // [n]
  const u8* x;
  u8* y;  // [pixels][n]
  int n;
  int steps;  // atoms along k
  int strips;  // that a block computes
  int channels;  // of a slot
  int chunk;  // channels that are waited for together: 128, or all
  Pair kernel, dilation;
  int images;
  Pair input, before;  // of x, in slots: sizes of an image; padding above and to the left
  Pair output;  // sizes of an image of y
  Pair grid;  // slots of an image: rows, and from a row to the next
  int slots;  // of x that a block sees
  int plane;  // bytes from 16 channels of the slots to the next
  int stages;  // of the ring
  int at_staging, at_x, at_offsets, at_outputs, at_pixels, at_barriers;  // in shared memory; the ring is at 0
  int x_zero, y_zero;
  float low, high;  // clamp, less the zero point of y
  int padding;  // of this struct
};

// Where a slot lies.
struct Slot {
  int image, row, column;
};
// The slots from a block's first one on.
struct Slots {
  Slot first;
  float per_pitch, per_rows;
  DEV Slots from(const Arguments& g, int slot) {
    const int all = g.grid.rows * g.grid.columns, image = slot / all, rest = slot - image * all,
              row = rest / g.grid.columns;
    return {{image, row, rest - row * g.grid.columns}, __frcp_rn((float)g.grid.columns), __frcp_rn((float)g.grid.rows)};
  }
  // n / d of numbers below 2^20: half a step from the next quotient, the rounding of the reciprocal does no harm.
  DEV int quotient(int n, float per) { return (int)(((float)n + 0.5f) * per); }
  __device__ __forceinline__ Slot at(const Arguments& g, int i) const {
    const int n = first.column + i, down = quotient(n, per_pitch), row = first.row + down,
              images = quotient(row, per_rows);
    return {first.image + images, row - images * g.grid.rows, n - down * g.grid.columns};
  }
};

// Atoms of W in the order of the products: where chunks are whole atoms, all positions of a chunk, then the next chunk.
struct Order {
  int step, chunks;  // atom of the row of W; chunks, where they are whole atoms
  DEV Order of(const Arguments& g) { return {0, g.channels % 128 == 0 ? g.channels / 128 : 1}; }
  __device__ __forceinline__ void advance(const Arguments& g) {
    step += chunks;
    if (step >= g.steps) step = chunks > 1 ? (step + 1) % chunks : 0;
  }
};

DEV void produce(const Arguments& g, u32 base) {
  const u64 policy = policy_evict_normal();
  const u32 full = base + g.at_barriers, empty = full + 8 * g.stages;
  const int all = (g.n + 63) >> 6, first = blockIdx.y * g.strips,
            strips = all - first < g.strips ? all - first : g.strips;
  const u8* source = g.w + (u64)first * g.steps * ATOM;
  // All of W into the second-level cache, each block a part of it: no ring is as deep as memory is far.
  for (int i = blockIdx.x; i < strips * g.steps; i += gridDim.x) prefetch_bulk(source + (u64)i * ATOM, ATOM);
  int s = 0, phase = 1;  // the first round finds empty stages
#pragma unroll 1
  for (int p = 0; p < strips; p++, source += (u64)g.steps * ATOM) {
    Order order = Order::of(g);
#pragma unroll 1
    for (int k = 0; k < g.steps; k++, order.advance(g)) {
      mbarrier_wait(empty + 8 * s, phase);
      mbarrier_expect(full + 8 * s, ATOM);
      copy_bulk(base + s * ATOM, source + (u64)order.step * ATOM, ATOM, full + 8 * s, policy);
      if (++s == g.stages) {
        s = 0;
        phase ^= 1;
      }
    }
  }
}

// The tables, and what is the same for every image: the padding.
DEV void prepare(const Arguments& g, u32 base, int first) {
  const int t = threadIdx.x, chunks = g.channels / 128;
  // Slots from the first on under the 32 columns of each product, in the order of the products.
  for (int i = t; i < g.steps * 4; i += CONSUMERS) {
    const int atom = i >> 2, positions = g.kernel.rows * g.kernel.columns;
    int column = i * 32;
    if (g.channels % 128 == 0) column = (atom % positions * chunks + atom / positions) * 128 + (i & 3) * 32;
    const int position = column / g.channels, channel = column - position * g.channels,
              ky = position / g.kernel.columns;
    // Past the last position W is zeros.
    const int at = ky * g.dilation.rows * g.grid.columns + (position - ky * g.kernel.columns) * g.dilation.columns;
    store_shared(base + g.at_offsets + 4 * i, position < positions ? at + channel / 16 * (g.plane / 16) : 0);
  }
  const Slots slots = Slots::from(g, first);
  const float zeros = __uint_as_float((u32)(g.x_zero & 255) * 0x01010101u);
  for (int i = t; i < (FOLD ? TILE : g.slots); i += CONSUMERS) {
    const Slot at = slots.at(g, i);
    if (i < TILE) {
      const bool is = at.image < g.images && at.row < g.output.rows && at.column < g.output.columns;
      store_shared(base + g.at_outputs + 4 * i,
                   is ? (at.image * g.output.rows + at.row) * g.output.columns + at.column : NONE);
    }
    if (FOLD) continue;
    const int row = at.row - g.before.rows, column = at.column - g.before.columns;
    const bool is = at.image < g.images && (u32)row < (u32)g.input.rows && (u32)column < (u32)g.input.columns;
    store_shared(base + g.at_pixels + 4 * i,
                 is ? ((at.image * g.input.rows + row) * g.input.columns + column) * (g.channels / 16) : NONE);
    if (!is)
#pragma unroll 1
      for (int to = 0; to < g.channels / 16 * g.plane; to += g.plane)
        store_shared(base + g.at_x + to + 16 * i, zeros, zeros, zeros, zeros);
  }
  if (!FOLD) async_proxy_fence();
}

// The pixels, and an arrival at the barrier of each chunk. Lanes side by side copy pieces of one pixel; a lane has
// several copies in hand.
DEV void load(const Arguments& g, u32 base, u32 bars) {
  constexpr int AHEAD = 4;
  const int pieces = g.chunk / 16, wide = pieces % 8 == 0 ? 8 : pieces % 4 == 0 ? 4 : 2, step = CONSUMERS / wide;
  const int t = threadIdx.x, lane = t & (wide - 1), first = t / wide;
  const u32 pixels = base + g.at_pixels;
  const u8* from = g.x + 16 * lane;
  u32 to = base + g.at_x + lane * g.plane;
#pragma unroll 1
  for (int c = 0, bar = 0; c < g.channels; c += g.chunk, bar++) {
#pragma unroll 1
    for (int q = lane; q < pieces; q += wide, from += 16 * wide, to += wide * g.plane)
#pragma unroll 1
      for (int i = first; i < g.slots; i += AHEAD * step) {
        u32 at[AHEAD];
#pragma unroll
        for (int e = 0; e < AHEAD; e++)
          at[e] = i + e * step < g.slots ? load_shared(pixels + 4 * (i + e * step)) : NONE;
#pragma unroll
        for (int e = 0; e < AHEAD; e++) copy_16_if(to + 16 * (i + e * step), from + (u64)at[e] * 16, at[e] != NONE);
      }
    copies_arrive(bars + 8 * bar);
  }
}

// The same where a slot is a square of 2 x 2 pixels: two runs of 2 * FOLD bytes, which begin at multiples of 2.
DEV void load_squares(const Arguments& g, u32 base, int first, u32 bar) {
  const u32 zeros = (u32)(g.x_zero & 255) * 0x0101u;
  const int across = 2 * g.input.columns;  // pixels of a row
  const Slots slots = Slots::from(g, first);
  for (int i = threadIdx.x; i < g.slots; i += CONSUMERS) {
    const Slot at = slots.at(g, i);
    const int row = 2 * (at.row - g.before.rows), column = at.column - g.before.columns;
    const bool is = at.image < g.images && (u32)column < (u32)g.input.columns;
    u32 square[4] = {0, 0, 0, 0};
#pragma unroll
    for (int down = 0; down < 2; down++) {
      const bool there = is && (u32)(row + down) < (u32)g.input.rows;
      const u16* from = (const u16*)(g.x + ((u64)(at.image * g.input.rows + row + down) * across + 2 * column) * FOLD);
#pragma unroll
      for (int e = 0; e < FOLD; e++) {
        const u32 pair = there ? __ldg(from + e) : zeros;
        const int half = down * FOLD + e;
        square[half >> 1] |= pair << (16 * (half & 1));
      }
    }
    store_shared(base + g.at_x + 16 * i, __uint_as_float(square[0]), __uint_as_float(square[1]),
                 __uint_as_float(square[2]), __uint_as_float(square[3]));
  }
  async_proxy_fence();
  mbarrier_arrive(bar);
}

// What is added to sums, and what they are multiplied by, of outputs R and R + 8 of a lane.
struct Terms {
  int c, c8;
  float m, m8;
  DEV Terms of(const Arguments& g, int strip, int warp, int lane) {
    const int n = strip * 64 + warp * 16 + (lane >> 2);
    const bool r = n < g.n, r8 = n + 8 < g.n;
    return {r ? __ldg(g.constants + n) : 0, r8 ? __ldg(g.constants + n + 8) : 0, r ? __ldg(g.multipliers + n) : 0.f,
            r8 ? __ldg(g.multipliers + n + 8) : 0.f};
  }
};

DEV void consume(const Arguments& g, u32 base, int warp, int lane, int first) {
  const u32 full = base + g.at_barriers, empty = full + 8 * g.stages, x_full = empty + 8 * g.stages;
  dependency_wait();  // for x, and for what an earlier kernel reads of y
  if constexpr (FOLD == 0)
    load(g, base, x_full);
  else
    load_squares(g, base, first, x_full);

  const int wg = warp >> 2, t = threadIdx.x & 127,
            per_chunk = g.channels % 128 == 0 ? g.kernel.rows * g.kernel.columns : g.steps;
  const u32 staging = base + g.at_staging + wg * NT * 64, outputs = base + g.at_outputs + 4 * wg * NT;
  // B without swizzle: from 16 columns to the next a plane, or the next square; from 8 slots to the next 128 bytes.
  const u64 w0 = WGMMA_DESCRIPTOR_HIGH | wgmma_descriptor_low(base);
  const u64 x0 = (8ull << 32) | ((u64)(FOLD ? 1 : g.plane >> 4) << 16) | (((base + g.at_x) >> 4) + wg * NT);
  const int strips = (g.n + 63) >> 6, end = (blockIdx.y + 1) * g.strips < strips ? (blockIdx.y + 1) * g.strips : strips;
  const int at_once = codes_of_store(g.n, g.n);
  const u32 zeros = (u32)(g.y_zero & 255) * 0x01010101u;
  // Pieces of 16 outputs that the thread stores.
  constexpr int PIECES = (NT * 4 + 127) / 128;
  const int piece = t & 3;
  u32 pixels[PIECES];
#pragma unroll
  for (int e = 0; e < PIECES; e++)
    pixels[e] = (t >> 2) + 32 * e < NT ? load_shared(outputs + 4 * ((t >> 2) + 32 * e)) : NONE;
  Terms terms = Terms::of(g, blockIdx.y * g.strips, warp & 3, lane);
  int s = 0, phase = 0;
#pragma unroll 1
  for (int strip = blockIdx.y * g.strips; strip < end; strip++) {
    int acc[NT / 2];
    int until = 0, chunk = 0;
#pragma unroll 1
    for (int k = 0; k < g.steps; k++) {
      if (k == until) {
        mbarrier_wait(x_full + 8 * chunk++, 0);
        async_proxy_fence();
        until += per_chunk;
      }
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
      if (++s == g.stages) {
        s = 0;
        phase ^= 1;
      }
    }
    wgmma_wait<0>();
    pin(acc);
    if (lane == 0) mbarrier_arrive(empty + 8 * (s ? s - 1 : g.stages - 1));
    const Terms now = terms;
    terms = Terms::of(g, strip + 1, warp & 3, lane);
    barrier_sync(1 + wg, 128);  // the strip before is stored
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      const int sums[4] = {acc[4 * i] + now.c, acc[4 * i + 1] + now.c, acc[4 * i + 2] + now.c8,
                           acc[4 * i + 3] + now.c8};
      stage_codes(staging, i, warp & 3, lane, requantize_8x16(sums, now.m, now.m8, g.low, g.high));
    }
    barrier_sync(1 + wg, 128);
    const int out = strip * 64 + 16 * piece;
    if (out < g.n)
#pragma unroll
      for (int e = 0; e < PIECES; e++)
        if (pixels[e] != NONE)
          store_codes(g.y + (u64)pixels[e] * g.n + out, staging, (t >> 2) + 32 * e, piece, out, g.n, at_once, zeros);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) int8_direct_sm90(const __grid_constant__ Arguments g) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, first = blockIdx.x * TILE;
  const bool producer = warp == WARPGROUPS * 4;
  if (producer && lane == 0) {
    const u32 full = base + g.at_barriers, empty = full + 8 * g.stages, x_full = empty + 8 * g.stages;
    for (int s = 0; s < g.stages; s++) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, WARPGROUPS * 4);
    }
    for (int c = 0; c * g.chunk < g.channels; c++) mbarrier_init(x_full + 8 * c, CONSUMERS);
    mbarrier_init_fence();
    async_proxy_fence();
  }
  __syncwarp();
  if (!producer) prepare(g, base, first);
  // The producer waits for no one.
  if (producer)
    barrier_arrive(0, THREADS);
  else
    barrier_sync(0, THREADS);
  launch_dependents();
  if (producer) {
    if (lane == 0) produce(g, base);
    __syncwarp();
  } else {
    consume(g, base, warp, lane, first);
  }
}
