// GEMM of few rows: y = activation(x * W^T + bias) with weights as floats of 16 bits, W and x of one type, on Hopper.
//
//   a block owns outputs that follow each other, 16 more or less than any other, in tiles of 128; a warp has 16 of them
//   a producer asks the copy engine for 64 columns of a tile and of x at a time, through a ring; as much of W as that
//       holds is asked for before the kernel ahead has ended
//   warps multiply by m16n8k16; tensor cores do not round sums to nearest: those of 256 columns are added to sums that
//       are
//
// So x is read from memory once for 128 outputs. What an output is added up from, and in which order, depends on k
// only, not on how many rows there are.
#include "dense.cuh"
#include "hopper.cuh"

// As in dense_rows_sm90.rs. TOKENS: rows of x, at most.
template <int TOKENS> struct Ring {
  static constexpr u32 STRIPS = 8, STRIP = 16 * 128;  // warps; 16 outputs x 64 columns
  static constexpr u32 X = STRIPS * STRIP, STAGE = X + TOKENS * 128;  // W, then x
  static constexpr u32 STAGES = 11;
  static constexpr u32 FULL = STAGES * STAGE, EMPTY = FULL + 8 * STAGES;
};
constexpr u32 COLUMNS = 64;
extern __shared__ __align__(1024) u8 shared[];

// The strips of 16 outputs of a block.
struct Strips {
  u32 first, count;
  __device__ __forceinline__ Strips(const Params& p) {
    const u32 all = u32((p.n + 15) / 16), each = all / gridDim.x, more = all % gridDim.x;
    first = blockIdx.x * each + min(blockIdx.x, more), count = each + (blockIdx.x < more);
  }
};

// Units of 64 columns of a tile, one after the other.
template <int TOKENS> struct Feed {
  typedef Ring<TOKENS> R;
  u32 strip, end, steps, step = 0;
  __device__ __forceinline__ Feed(const Strips& of, u32 steps)
      : strip(of.first), end(of.first + of.count), steps(steps) {}
  __device__ __forceinline__ bool more() const { return strip < end; }
  __device__ __forceinline__ void next() {
    if (++step == steps) step = 0, strip += R::STRIPS;
  }
  __device__ __forceinline__ void ask_w(const TensorMap* tiles, const TensorMap* strips, u32 x_bytes, u32 to,
                                        u32 full) const {
    const u32 here = min(end - strip, R::STRIPS);
    mbarrier_expect(full, here * R::STRIP + x_bytes);
    if (here == R::STRIPS) return copy_box(to, tiles, int(COLUMNS * step), int(16 * strip), full);
#pragma unroll 1
    for (u32 i = 0; i < here; i++)
      copy_box(to + i * R::STRIP, strips, int(COLUMNS * step), int(16 * (strip + i)), full);
  }
  __device__ __forceinline__ void ask_x(const TensorMap* x, u32 to, u32 full) const {
    copy_box(to + R::X, x, int(COLUMNS * step), 0, full);
  }
};
template <int TOKENS>
DEV void produce(const Params& p, const Strips& of, u32 steps, const TensorMap* tiles, const TensorMap* strips,
                 const TensorMap* x) {
  typedef Ring<TOKENS> R;
  const u32 base = shared_address(shared), x_bytes = u32(p.m) * 128;
  Feed<TOKENS> w(of, steps), rows = w;
  u32 asked = 0;
#pragma unroll 1
  for (; w.more() && asked < R::STAGES; asked++, w.next())
    w.ask_w(tiles, strips, x_bytes, base + asked * R::STAGE, base + R::FULL + 8 * asked);
  dependency_wait();
#pragma unroll 1
  for (u32 stage = 0; stage < asked; stage++, rows.next())
    rows.ask_x(x, base + stage * R::STAGE, base + R::FULL + 8 * stage);
  u32 stage = 0, phase = 0;
#pragma unroll 1
  for (; w.more(); w.next()) {
    const u32 to = base + stage * R::STAGE, full = base + R::FULL + 8 * stage;
    mbarrier_wait(base + R::EMPTY + 8 * stage, phase);
    w.ask_w(tiles, strips, x_bytes, to, full);
    w.ask_x(x, to, full);
    if (++stage == R::STAGES) stage = 0, phase ^= 1;
  }
}

template <bool BF16, int TOKENS, bool ACTIVATES>
__global__ void __launch_bounds__(32 * (Ring<TOKENS>::STRIPS + 1), 1)
    dense_rows_sm90(const __grid_constant__ Params p, const __grid_constant__ TensorMap tiles,
                    const __grid_constant__ TensorMap strips, const __grid_constant__ TensorMap x) {
  typedef Ring<TOKENS> R;
  constexpr int BLOCKS_OF_8 = TOKENS / 8;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = shared_address(shared);
  const u32 steps = u32((p.k + COLUMNS - 1) / COLUMNS);
  const Strips of(p);
  if (threadIdx.x == 32 * R::STRIPS) {
    for (u32 stage = 0; stage < R::STAGES; stage++) {
      mbarrier_init(base + R::FULL + 8 * stage, 1);
      mbarrier_init(base + R::EMPTY + 8 * stage, R::STRIPS);
    }
    mbarrier_init_fence();
    prefetch_map(&tiles), prefetch_map(&x);
  }
  __syncthreads();
  launch_dependents();
  if (warp == R::STRIPS) {
    if (lane == 0) produce<TOKENS>(p, of, steps, &tiles, &strips, &x);
    return;
  }
  // y may be read by the kernel ahead until that ends.
  dependency_wait();

  // Rows of a lane's matrices: of W 16 outputs, two pieces of 8 columns; of x 8 tokens, four pieces, or 16 and two.
  const u32 of_w = base + warp * R::STRIP + lane % 16 * 128;
  const u32 of_x = base + R::X + (lane % 8 + (lane / 16) * 8) * 128;
  u32 stage = 0, phase = 0;
#pragma unroll 1
  for (u32 tile = 0; tile < of.count; tile += R::STRIPS) {
    const bool has_outputs = tile + warp < of.count;
    float sums[BLOCKS_OF_8][4] = {}, of_run[BLOCKS_OF_8][4] = {};
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
      mbarrier_wait(base + R::FULL + 8 * stage, phase);
      // The stage before is free: what was loaded of it has been multiplied in the last turn of this loop.
      __syncwarp();
      if (lane == 0 && (tile || step)) mbarrier_arrive(base + R::EMPTY + 8 * (stage ? stage - 1 : R::STAGES - 1));
#pragma unroll
      for (u32 i = 0; has_outputs && i < COLUMNS / 16; i++) {
        u32 a[4];
        load_matrices(a, of_w + stage * R::STAGE + (((2 * i + lane / 16) ^ (lane % 8)) << 4));
#pragma unroll
        for (int b = 0; b < BLOCKS_OF_8; b += 2) {
          u32 v[4];
          load_matrices(v, of_x + stage * R::STAGE + b * 1024 + (((2 * i + lane / 8 % 2) ^ (lane % 8)) << 4));
          mma_sync<BF16>(of_run[b], a, v[0], v[1]);
          mma_sync<BF16>(of_run[b + 1], a, v[2], v[3]);
        }
      }
      if (++stage == R::STAGES) stage = 0, phase ^= 1;
      if (step % 4 < 3 && step + 1 < steps) continue;
#pragma unroll
      for (int b = 0; b < BLOCKS_OF_8; b++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[b][e] += of_run[b][e], of_run[b][e] = 0;
      }
    }
    if (!has_outputs) continue;
    // Sums 0 and 1 are of output lane / 4 and two tokens, 2 and 3 of output + 8.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u64 output = u64(16) * (of.first + tile + warp) + lane / 4 + 8 * h;
      if (output >= p.n) continue;
      const float bias = p.bias ? p.bias[output] : 0.f;
#pragma unroll
      for (int b = 0; b < BLOCKS_OF_8; b++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const u64 token = 8 * b + 2 * (lane % 4) + e;
          if (token < p.m)
            store_float(p.y, token * p.n + output, finished<ACTIVATES>(p, sums[b][2 * h + e], bias), p.y_type);
        }
      }
    }
  }
}
