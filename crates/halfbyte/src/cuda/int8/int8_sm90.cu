// int8 GEMM and implicit GEMM on sm_90a: y = clamp(round(sum * M) + zero of y), where sum = x . W^T of bytes is exact
// in int32; x is a matrix, or windows on images (include/windows.cuh).  layout/cuda_int8.rs draws the packed weights;
// format/int8.rs says what the numbers mean, to the bit.
//
// A block computes one tile of STRIPS * 64 outputs and WARPGROUPS * NT pixels:
//   producer (one thread): a ring of stages of 128 k, by TMA: STRIPS atoms of W, shared by all warpgroups, and two
//       boxes of x for each warpgroup
//   consumers (WARPGROUPS * 4 warps): wgmma m64 nNT k32 with both operands in shared memory; W is the A operand, so
//       that a thread has few outputs
//   v = sum + constant of the output, which takes the zero point of x off:
//       constant = bias - zero * sum of the row of W
//   in the padding x is the zero point, and the copies bring 0: what the constant takes off there is given back,
//       position by position:
//       v += zero * sum of the row's weights at the position
//   epilogue: requantise; codes go through shared memory, 64 outputs of a pixel side by side
// Two blocks fit on a multiprocessor: one computes while the other fills its ring or stores.
// Where tiles are few, the blocks of a cluster share the columns of one (split-K): each adds up an equal share of its
// pixels and outputs. Sums are whole numbers, the same in any order.
#include "wgmma_bytes.cuh"
#include "requantize.cuh"
#include "windows.cuh"

constexpr int NT = HB_NT;  // pixels a warpgroup
constexpr int STRIPS = HB_STRIPS;  // of 64 outputs
constexpr int STAGES = HB_STAGES;  // in the ring
constexpr bool UNSIGNED = HB_UNSIGNED;  // x is u8, else i8

constexpr int WARPGROUPS = 2, THREADS = WARPGROUPS * 128 + 32;
constexpr int ATOM = 64 * 128, BOX = NT * 64;  // bytes of a strip x 128 k; of NT pixels x 64 k
constexpr int STAGE_X = 2 * BOX, STAGE = STRIPS * ATOM + WARPGROUPS * STAGE_X;
constexpr int BARRIERS = STAGES * STAGE;
constexpr int CORNERS = BARRIERS + 16 * STAGES;  // row and column of x where a pixel's window begins, 8 bytes
constexpr int SHARED_BYTES = CORNERS + WARPGROUPS * NT * 8;

static_assert(NT == 32 || NT == 64 || NT == 128, "pixels");
static_assert(STRIPS * NT <= 128, "registers of one of two blocks");
static_assert(STAGES >= 2 && SHARED_BYTES <= 115712, "shared memory of one of two blocks");
// Bytes of what a thread has of 8 pixels and 64 outputs; how many of these. Those that blocks of a cluster leave for
// each other lie where the rings were.
constexpr int PIECE = 4 * 4, PIECES = STRIPS * NT / 8, MOST_PARTS = 8;
static_assert((PIECES > MOST_PARTS ? PIECES : MOST_PARTS) * WARPGROUPS * 128 * PIECE <= BARRIERS, "sums of all parts");
static_assert(SHARED_BYTES == HB_SHARED_BYTES && THREADS == HB_THREADS, "the host's sums");

// As `Arguments` in int8_sm90.rs.
struct Arguments {
  const u8* w;  // packed weights
  const int* constants;  // [n]
  const int* position_sums;  // [positions][n]: sums of the weights of a row at a position
  const float* multipliers;  // [n]
  u8* y;  // [m][n]
  int m, n, outputs;  // outputs: of a group
  int steps;  // atoms along k
  int rows;  // tiles along the outputs of a group
  int parts;  // blocks of a cluster, which share the columns of a tile: 1, 2, 4 or 8
  int height, width;  // of an image of x
  int x_zero, y_zero;
  float low, high;  // clamp, less the zero point of y
  int channels;  // of a group of x
  Windows windows;
  int padding;
};

DEV u64 descriptor_of_w(u32 a) { return WGMMA_DESCRIPTOR_HIGH | wgmma_descriptor_low(a); }
// 64-byte swizzle: 8 rows in 512 bytes.
DEV u64 descriptor_of_x(u32 a) { return (32ull << 32) | (2ull << 62) | wgmma_descriptor_low(a); }

// Columns of a block, in steps.
struct Columns {
  int first, end;
  DEV Columns of(const Arguments& g) {
    const int part = blockIdx.x % g.parts;
    return {part * g.steps / g.parts, (part + 1) * g.steps / g.parts};
  }
};

DEV void produce(const Arguments& g, const TensorMap* map, u32 base, int strip, int strips, int token, int channel) {
  const Columns columns = Columns::of(g);
  const u64 policy = policy_evict_normal();
  const int here = strips - strip < STRIPS ? strips - strip : STRIPS;
  const u8* source = g.w + ((u64)(blockIdx.y * strips + strip) * g.steps) * ATOM;
  const Windows& v = g.windows;
  Window windows[WARPGROUPS];
#pragma unroll
  for (int i = 0; i < WARPGROUPS; i++) windows[i] = Window::of(v, token + i * NT, columns.first * 128);
  const int there = g.m - token > NT ? WARPGROUPS : 1;  // warpgroups with pixels
  auto load_w = [&](int s, int k) {
    const u32 full = base + BARRIERS + 8 * s, to = base + s * STAGE;
    mbarrier_expect(full, here * ATOM + there * STAGE_X);
    for (int p = 0; p < here; p++) copy_bulk(to + p * ATOM, source + ((u64)p * g.steps + k) * ATOM, ATOM, full, policy);
  };
  auto load_x = [&](int s) {
    const u32 full = base + BARRIERS + 8 * s, to = base + s * STAGE + STRIPS * ATOM;
#pragma unroll
    for (int i = 0; i < WARPGROUPS; i++)
#pragma unroll
      for (int box = 0; box < 2; box++) {
        if (i < there) windows[i].copy(v, to + i * STAGE_X + box * BOX, map, full, channel);
        windows[i].advance(v, 64);
      }
  };
  int k = columns.first;
  for (int s = 0; s < STAGES && k < columns.end; s++) load_w(s, k++);
  dependency_wait();
  for (int s = 0; s < k - columns.first; s++) load_x(s);
#pragma unroll 1
  for (int s = 0, phase = 0; k < columns.end; k++) {
    mbarrier_wait(base + BARRIERS + 8 * (STAGES + s), phase);
    load_w(s, k);
    load_x(s);
    if (++s == STAGES) {
      s = 0;
      phase ^= 1;
    }
  }
}

constexpr u32 INSIDE = 0x80000000u;  // for the row of a window that lies inside of its image
// Adds what the constants take off for positions outside of the image, of the window that begins at (row, column), to
// outputs n and n + 8.
DEV void give_back(const Arguments& g, int row, int column, int n, bool r, bool r8, int& sum, int& sum8) {
  const Windows& v = g.windows;
  const int* sums = g.position_sums + n;
#pragma unroll 1
  for (int ky = 0; ky < v.kernel.rows; ky++)
#pragma unroll 1
    for (int kx = 0; kx < v.kernel.columns; kx++, sums += g.n) {
      const int y = row + ky * v.dilation.rows, x = column + kx * v.dilation.columns;
      if (y >= 0 && x >= 0 && y < g.height && x < g.width) continue;
      if (r) sum += g.x_zero * __ldg(sums);
      if (r8) sum8 += g.x_zero * __ldg(sums + 8);
    }
}

// A piece to the shared memory of a block of the cluster; it is there after the next cluster_sync.
DEV void store_cluster(u32 a, const int* v) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
// Whether a piece is this block's to store.
DEV bool is_own(const Arguments& g, int piece) { return g.parts == 1 || (piece & (g.parts - 1)) == cluster_rank(); }
// Leaves pieces of the sums for those blocks of the cluster that store them, and adds up what the others leave.
DEV void share_pieces(int parts, u32 base, int (&acc)[STRIPS][NT / 2]) {
  const u32 rank = cluster_rank(), each = PIECES > parts ? PIECES / parts : 1;
  auto at = [&](u32 part, u32 piece) {
    return base + ((part * each + piece / parts) * WARPGROUPS * 128 + threadIdx.x) * PIECE;
  };
  cluster_sync();  // all rings have been read
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      const u32 piece = p * (NT / 8) + i;
      store_cluster(cluster_address(at(rank, piece), piece & (parts - 1)), acc[p] + 4 * i);
    }
  cluster_sync();
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      const u32 piece = p * (NT / 8) + i;
      if ((piece & (parts - 1)) != rank) continue;
      int sum[4] = {};
#pragma unroll 1
      for (int part = 0; part < parts; part++) {
        u32 v[4];
        load_shared(v, at(part, piece));
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] += (int)v[e];
      }
#pragma unroll
      for (int e = 0; e < 4; e++) acc[p][4 * i + e] = sum[e];
    }
  barrier_sync(1 + WARPGROUPS, WARPGROUPS * 128);  // before codes lie there
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    int8_sm90(const __grid_constant__ Arguments g, const __grid_constant__ TensorMap x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), full = base + BARRIERS, empty = full + 8 * STAGES;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int strips = (g.outputs + 63) >> 6, tile = blockIdx.x / g.parts, strip = tile % g.rows * STRIPS,
            token = tile / g.rows * (WARPGROUPS * NT);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, WARPGROUPS * 4);
    }
    mbarrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    prefetch_map(&x_map);
  }
  __syncthreads();
  launch_dependents();
  if (warp == WARPGROUPS * 4) {
    if (lane == 0) produce(g, &x_map, base, strip, strips, token, blockIdx.y * g.channels);
    return;
  }
  const int wg = warp >> 2, t = threadIdx.x & 127, first = token + wg * NT;  // first pixel of the warpgroup
  const Windows& v = g.windows;
  const bool padded = g.x_zero != 0;
  const u32 corners = base + CORNERS + wg * NT * 8;
  if (padded && t < NT) {  // meanwhile the ring fills
    const Window at = Window::of(v, first + t, 0);
    const int last_row = at.row + (v.kernel.rows - 1) * v.dilation.rows,
              last_column = at.column + (v.kernel.columns - 1) * v.dilation.columns;
    const bool inside = at.row >= 0 && at.column >= 0 && last_row < g.height && last_column < g.width;
    store_shared(corners + 8 * t, inside ? INSIDE : (u32)at.row);
    store_shared(corners + 8 * t + 4, (u32)at.column);
  }
  const Columns columns = Columns::of(g);
  int acc[STRIPS][NT / 2] = {};
  const u64 w0 = descriptor_of_w(base), x0 = descriptor_of_x(base + STRIPS * ATOM + wg * STAGE_X);
#pragma unroll 1
  for (int k = 0, s = 0, phase = 0; k < columns.end - columns.first; k++) {
    mbarrier_wait(full + 8 * s, phase);
    const u64 w = w0 + (u32)__shfl_sync(0xffffffffu, s * (STAGE / 16), 0), x = x0 + (w - w0);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
        WgmmaBytes<NT, UNSIGNED>::run(acc[p], w + p * (ATOM / 16) + 2 * j, x + j / 2 * (BOX / 16) + 2 * (j & 1),
                                      k + j ? 1 : 0);
    wgmma_commit();
    // The stage before is free when only this one's products are under way.
    wgmma_wait<1>();
    if (k > 0 && lane == 0) mbarrier_arrive(empty + 8 * (s ? s - 1 : STAGES - 1));
    if (++s == STAGES) {
      s = 0;
      phase ^= 1;
    }
  }
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) pin(acc[p]);
  if (g.parts > 1) share_pieces(g.parts, base, acc);
  dependency_wait();  // what an earlier kernel reads of y

  // Codes of 8 pixels x 16 outputs a warp: transposed in registers, then side by side in the warpgroup's boxes of the
  // first stage, which are read.
  const u32 staging = base + STRIPS * ATOM + wg * STAGE_X;
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    if ((strip + p) * 64 >= g.outputs) break;
    const int in_group = (strip + p) * 64 + (warp & 3) * 16 + (lane >> 2);  // output R of the lane
    const int n = blockIdx.y * g.outputs + in_group;
    const bool r = in_group < g.outputs, r8 = in_group + 8 < g.outputs;
    const int c = r ? __ldg(g.constants + n) : 0, c8 = r8 ? __ldg(g.constants + n + 8) : 0;
    const float m = r ? __ldg(g.multipliers + n) : 0.f, m8 = r8 ? __ldg(g.multipliers + n + 8) : 0.f;
    barrier_sync(1 + wg, 128);  // all warps have read the first stage, or the strip before is stored
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      if (!is_own(g, p * (NT / 8) + i)) continue;
      int sum[2] = {c, c}, sum8[2] = {c8, c8};
      if (padded) {
        u32 at[4];
        load_shared(at, corners + 64 * i + 16 * (lane & 3));
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (at[2 * e] != INSIDE) give_back(g, (int)at[2 * e], (int)at[2 * e + 1], n, r, r8, sum[e], sum8[e]);
      }
      const int* a = acc[p] + 4 * i;
      const int sums[4] = {a[0] + sum[0], a[1] + sum[1], a[2] + sum8[0], a[3] + sum8[1]};
      stage_codes(staging, i, warp & 3, lane, requantize_8x16(sums, m, m8, g.low, g.high));
    }
    barrier_sync(1 + wg, 128);
    const u32 zeros = (u32)(g.y_zero & 255) * 0x01010101u;
    const int at_once = codes_of_store(g.outputs, v.pitch);
#pragma unroll 1
    for (int i = t; i < NT * 4; i += 128) {
      const int pixel = i >> 2, chunk = i & 3, at = first + pixel, out = (strip + p) * 64 + 16 * chunk;
      if (at >= g.m || out >= g.outputs || !is_own(g, p * (NT / 8) + pixel / 8)) continue;
      store_codes(g.y + (u64)at * v.pitch + blockIdx.y * g.outputs + out, staging, pixel, chunk, out, g.outputs,
                  at_once, zeros);
    }
  }
}
