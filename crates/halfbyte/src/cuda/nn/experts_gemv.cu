// Products of a few rows with the weights of the experts that they have chosen:
//   y[i] = W[ids[i]] . x[i / sharing] + bias
//
//   a block has WARPS warps: `split` of them share a block of 16 rows, each a part of its columns, and add up in order
//   x lies in shared memory as B fragments have it; it is column 0 of B, and the other columns are zeros
//   codes come by plain loads, several units (16 rows x 128 columns) ahead
//
// Which expert is read from memory, so that a step with its choice is recorded. weight_atom.cuh draws the packed
// weights.
#include "ampere.cuh"
#include "decode_codes.cuh"
#include "ptx.cuh"

// As `Params` in experts_gemv.rs.
struct Params {
  const u64* weights;  // [experts]: addresses of atoms, [n][k] each
  const u64* biases;  // [experts]: addresses of floats, [n] each; or null
  const u32* ids;  // [gridDim.y]
  const u16* x;  // [gridDim.y / sharing][k], at a multiple of 16 bytes
  float* y;  // [gridDim.y][n]
  u32 n, k, experts, sharing;
  u32 split, padding;
};

constexpr int WARPS = 8, AT_ONCE = 16 / BITS;  // units

extern __shared__ __align__(16) u32 x_words[];  // [units][8 k16 steps in pairs][4 lanes][4]

struct Unit {
  u32 codes[8 * WORDS], scales[GROUPS], zeros[GROUPS];
  // From where a row block's codes of 128 columns lie, less than an atom behind its beginning.
  __device__ __forceinline__ void load(const u8* atom, u32 quarter, u32 lane) {
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) {
      const uint4 v = load_once(atom + quarter * (256 * BITS) + i * 512 + lane * 16);
      codes[4 * i] = v.x, codes[4 * i + 1] = v.y, codes[4 * i + 2] = v.z, codes[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      scales[g] = __ldg(reinterpret_cast<const u32*>(atom + SCALES + g * 128 + quarter * 32) + (lane >> 2));
      zeros[g] = ZERO ? __ldg(reinterpret_cast<const u16*>(atom + ZEROS + g * 64 + quarter * 16) + (lane >> 2)) : 0;
    }
  }
  // Adds its products to the sums of rows R and R+8, which the first of four lanes has.
  __device__ __forceinline__ void multiply(const u32* x, u32 lane, float& sum, float& sum8) const {
    u32 b[16] = {};
    if (lane < 4) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint4 v = reinterpret_cast<const uint4*>(x)[4 * i + lane];
        b[4 * i] = v.x, b[4 * i + 1] = v.y, b[4 * i + 2] = v.z, b[4 * i + 3] = v.w;
      }
    }
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      constexpr int EACH = 8 / GROUPS;  // k16 steps of a group
      const Zeros z = ZERO ? zeros_of(zeros[g]) : zeros_symmetric();
      float acc[2][4] = {};
#pragma unroll
      for (int j = g * EACH; j < (g + 1) * EACH; j++) {
        u32 a[4];
        decode(&codes[j * WORDS], z, a);
        mma_sync<BF16>(acc[j % 2], a, b[2 * j], b[2 * j + 1]);
      }
      sum = fmaf(acc[0][0] + acc[1][0], low(scales[g]), sum);
      sum8 = fmaf(acc[0][2] + acc[1][2], high(scales[g]), sum8);
    }
  }
};

DEV u32 expert_of_block(const Params& p) { return min(p.ids[blockIdx.y], p.experts - 1); }  // the limit guards memory

extern "C" __global__ void __launch_bounds__(32 * WARPS) experts_gemv(const __grid_constant__ Params p) {
  __shared__ float sums[WARPS][16];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % p.split;
  const u32 steps = (p.k + 127) / 128, strips = (p.n + 63) / 64;
  const u32 row_block = blockIdx.x * (WARPS / p.split) + warp / p.split;
  dependency_wait();
  launch_dependents();
  Unit units[AT_ONCE];
  const u32 strip = row_block / 4, super = strip & ~3u, in = min(4u, strips - super);
  const u32 begin = part * steps / p.split, end = row_block < 4 * strips ? (part + 1) * steps / p.split : begin;
  const u8* const atoms =
      reinterpret_cast<const u8*>(p.weights[expert_of_block(p)]) + (u64(super) * steps + (strip - super)) * ATOM;
  auto load = [&](u32 i, u32 k) {
    if (k < end) units[i].load(atoms + u64(k) * in * ATOM, row_block % 4, lane);
  };
#pragma unroll
  for (u32 i = 0; i < AT_ONCE; i++) load(i, begin + i);

  // x, while the first weights come: eight columns at a time, words of one k16 step and one half of it.
  const uint4* const x = reinterpret_cast<const uint4*>(p.x + u64(blockIdx.y / p.sharing) * p.k);
#pragma unroll 4
  for (u32 i = threadIdx.x; i < steps * 16; i += 32 * WARPS) {
    const uint4 v = 8 * i < p.k ? x[i] : make_uint4(0, 0, 0, 0);
    const u32 step = i / 2 % 8;
    u32* const to = x_words + i / 16 * 64 + step / 2 * 16 + step % 2 * 2 + i % 2;
    to[0] = v.x, to[4] = v.y, to[8] = v.z, to[12] = v.w;
  }
  __syncthreads();
  float sum = 0, sum8 = 0;
#pragma unroll 1
  for (u32 k = begin; k < end; k += AT_ONCE)
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (k + i < end) units[i].multiply(x_words + (k + i) * 64, lane, sum, sum8);
      load(i, k + AT_ONCE + i);
    }
  if (lane % 4 == 0) sums[warp][lane / 4] = sum, sums[warp][8 + lane / 4] = sum8;
  __syncthreads();
  const u32 row = blockIdx.x * (WARPS / p.split) * 16 + threadIdx.x;
  if (threadIdx.x >= WARPS / p.split * 16 || row >= p.n) return;
  float total = p.biases ? reinterpret_cast<const float*>(p.biases[expert_of_block(p)])[row] : 0;
  for (u32 i = 0; i < p.split; i++) total += sums[threadIdx.x / 16 * p.split + i][threadIdx.x % 16];
  p.y[u64(blockIdx.y) * p.n + row] = total;
}
