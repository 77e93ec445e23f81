// Products of a few rows with the weights of the experts that they have chosen:
//   COMBINED   y[row] = sum of shares[row][i] * (W[ids[row][i]] . x[row][i] + bias), in the order of i
//   else       y[row][i] = the gated outputs of W[ids[row][i]] . x[row] + bias
//
//   a block walks over items of 16 rows of a weight; its warps share the columns of an item, and add up in order
//   x lies in shared memory as B fragments have it; it is column 0 of B, and the other columns are zeros
//   codes come by plain loads, some units (16 rows x 128 columns) ahead, those of the next item among them
//
// Which expert is read from memory, so that a step with its choice is recorded. weight_atom.cuh draws the packed
// weights.
#include "ampere.cuh"
#include "decode_codes.cuh"
#include "output_function.cuh"
#include "ptx.cuh"

constexpr bool COMBINED = HB_COMBINED;
static_assert(COMBINED != GATED, "one or the other");

// As `Params` in experts_gemv.rs.
struct Params {
  const u64* weights;  // [experts]: addresses of atoms, [n][k] each
  const u64* biases;  // [experts]: addresses of floats, [n] each; or null
  const u32* ids;  // [gridDim.y][top_k]
  const float* shares;  // [gridDim.y][top_k], or null
  const u16* x;  // [gridDim.y][COMBINED ? top_k : 1][k], at a multiple of 16 bytes
  void* y;  // [gridDim.y][n] floats; or [gridDim.y][top_k][n / 2] in the type of x
  u32 n, k, experts, top_k;
};

constexpr int WARPS = 16, BLOCKS = 2, AT_ONCE = 8 / BITS;  // AT_ONCE: units
constexpr int MOST_CHOICES = 16;

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
  // Adds its products, times a share, to the sums of rows R and R+8, which the first of four lanes has.
  __device__ __forceinline__ void multiply(const u32* x, u32 lane, float share, float& sum, float& sum8) const {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      constexpr int EACH = 8 / GROUPS;  // k16 steps of a group
      const Zeros z = ZERO ? zeros_of(zeros[g]) : zeros_symmetric();
      float acc[2][4] = {};
#pragma unroll
      for (int j = g * EACH; j < (g + 1) * EACH; j += 2) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (lane < 4) b = reinterpret_cast<const uint4*>(x)[2 * j + lane];
        u32 a[4];
        decode(&codes[j * WORDS], z, a);
        mma_sync<BF16>(acc[0], a, b.x, b.y);
        decode(&codes[(j + 1) * WORDS], z, a);
        mma_sync<BF16>(acc[1], a, b.z, b.w);
      }
      sum = fmaf(acc[0][0] + acc[1][0], low(scales[g]) * share, sum);
      sum8 = fmaf(acc[0][2] + acc[1][2], high(scales[g]) * share, sum8);
    }
  }
};

// An expert that the row has chosen.
struct Chosen {
  const u8* atoms;
  const float* bias;
  float share;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) experts_gemv(const __grid_constant__ Params p) {
  __shared__ float sums[2][WARPS][16];
  __shared__ Chosen chosen[MOST_CHOICES];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y;
  const u32 steps = (p.k + 127) / 128, strips = (p.n + 63) / 64, row_blocks = (p.n + 15) / 16;
  const u32 items = COMBINED ? row_blocks : p.top_k * row_blocks, all = COMBINED ? p.top_k * steps : steps;
  const u32 begin = warp * all / WARPS, end = (warp + 1) * all / WARPS;
  dependency_wait();
  launch_dependents();
  if (threadIdx.x < p.top_k) {
    const u32 at = row * p.top_k + threadIdx.x, id = min(p.ids[at], p.experts - 1);  // the limit guards memory
    chosen[threadIdx.x] = {reinterpret_cast<const u8*>(p.weights[id]),
                           p.biases ? reinterpret_cast<const float*>(p.biases[id]) : nullptr,
                           p.shares ? p.shares[at] : 1.f};
  }
  __syncthreads();

  // The next unit to load: that of an item.
  u32 item = blockIdx.x, next = begin;
  const auto load = [&](Unit& unit) {
    if (item >= items) return;
    const u32 expert = COMBINED ? next / steps : item / row_blocks, k = COMBINED ? next % steps : next;
    const u32 row_block = COMBINED ? item : item % row_blocks, strip = row_block / 4, super = strip & ~3u;
    const u32 in = min(4u, strips - super);
    unit.load(chosen[expert].atoms + (u64(super) * steps + u64(k) * in + (strip - super)) * ATOM, row_block % 4, lane);
    if (++next == end) next = begin, item += gridDim.x;
  };
  Unit units[AT_ONCE];
  if (begin < end)
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) load(units[i]);

  // x, while the first weights come: eight columns at a time, words of one k16 step and one half of it.
  for (u32 of = 0; of < (COMBINED ? p.top_k : 1); of++) {
    const uint4* const x = reinterpret_cast<const uint4*>(p.x + (COMBINED ? u64(row) * p.top_k + of : u64(row)) * p.k);
#pragma unroll 4
    for (u32 i = threadIdx.x; i < steps * 16; i += 32 * WARPS) {
      const uint4 v = 8 * i < p.k ? x[i] : make_uint4(0, 0, 0, 0);
      const u32 step = i / 2 % 8;
      u32* const to = x_words + (of * steps + i / 16) * 64 + step / 2 * 16 + step % 2 * 2 + i % 2;
      to[0] = v.x, to[4] = v.y, to[8] = v.z, to[12] = v.w;
    }
  }
  __syncthreads();

  u32 turn = 0;
  const auto finish = [&](u32 at, float sum, float sum8) {
    if (lane % 4 == 0) sums[turn][warp][lane / 4] = sum, sums[turn][warp][8 + lane / 4] = sum8;
    __syncthreads();
    const u32 i = threadIdx.x, row_block = COMBINED ? at : at % row_blocks, of = COMBINED ? 0 : at / row_blocks;
    if (i < 16) {
      const u32 output = row_block * 16 + i;
      float total = 0;
      for (u32 j = 0; j < (COMBINED ? p.top_k : 1); j++)
        if (const Chosen& c = chosen[of + j]; c.bias && output < p.n)
          total = fmaf(c.bias[output], COMBINED ? c.share : 1.f, total);
      for (u32 w = 0; w < WARPS; w++) total += sums[turn][w][i];
      if constexpr (COMBINED) {
        if (output < p.n) static_cast<float*>(p.y)[u64(row) * p.n + output] = total;
      } else {
        const float v = gated(total, __shfl_down_sync(0xffff, total, 8));
        const u64 to = (u64(row) * p.top_k + of) * (p.n / 2) + row_block * 8 + i;
        if (i < 8 && output < p.n) static_cast<u16*>(p.y)[to] = BF16 ? bfloat_of_float(v) : half_of_float(v);
      }
    }
    turn ^= 1;
  };
  u32 at = blockIdx.x, unit = begin;
  float sum = 0, sum8 = 0;
  if (begin == end)
    for (; at < items; at += gridDim.x) finish(at, 0.f, 0.f);
#pragma unroll 1
  while (at < items)
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++)
      if (at < items) {
        units[i].multiply(x_words + unit * 64, lane, COMBINED ? chosen[unit / steps].share : 1.f, sum, sum8);
        load(units[i]);
        if (++unit == end) {
          finish(at, sum, sum8);
          sum = sum8 = 0, unit = begin, at += gridDim.x;
        }
      }
}
