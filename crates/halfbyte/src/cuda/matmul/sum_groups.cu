// Sums of x over the groups of weights with offsets, for a product in tiles: y gets offset times sum, group by group,
// by TF32 tensor cores, which take numbers in parts of 11 bits.
//
//   a thread has 8 columns of a row, GROUP / 8 neighbours a group; a sum is the same whatever tile its row is in
//   where a row has more columns than a launch has threads for, blocks take them in turn
#include "floats.cuh"

#include "ampere.cuh"

// As `Params` in sum_groups.rs.
struct Params {
  const void* x;  // [rows][pitch], rows at multiples of 16 bytes
  float* sums;  // [tiles][atoms][2][tokens][4]: upper parts, then lower ones; two groups come twice
  u64 pitch;
  u32 rows, k;
  u32 atoms;  // of 128 columns
  u32 tokens;  // rows a tile
  FloatType x_type;
  u32 padding;  // of this struct
};

constexpr u32 THREADS = 256, OF_BLOCK = 8 * THREADS;  // columns

template <int GROUP> __global__ void __launch_bounds__(THREADS) sum_groups(const Params p) {
  // Only now the product may start: see quantize_activations.cu.
  dependency_wait();
  launch_dependents();
  const u32 row = blockIdx.x;
  for (u32 first = blockIdx.y * OF_BLOCK; first < p.atoms * 128; first += gridDim.y * OF_BLOCK) {
    const u32 column = first + threadIdx.x * 8, group = column / GROUP;
    float sum = 0.f;
    if (row < p.rows && column < p.k) {
      float v[8];
      load_eight(p.x, row * p.pitch + column, p.x_type, v);
      const u32 there = p.k - column;  // columns that are left; what lies behind them in a row is not x
#pragma unroll
      for (u32 i = 0; i < 8; i++) sum += i < there ? v[i] : 0.f;
    }
#pragma unroll
    for (int apart = 1; apart < GROUP / 8; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (column % GROUP != 0 || column / 128 >= p.atoms) continue;
    const float upper = rounded_to_tf32(sum), lower = rounded_to_tf32(sum - upper);
    float* to = p.sums + ((u64(row / p.tokens) * p.atoms + column / 128) * 2 * p.tokens + row % p.tokens) * 4;
    constexpr u32 GROUPS = 128 / GROUP;
#pragma unroll
    for (u32 i = group % GROUPS; i < 4; i += GROUPS) {
      to[i] = upper;
      to[p.tokens * 4 + i] = lower;
    }
  }
}
