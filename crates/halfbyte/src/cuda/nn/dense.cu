// GEMV and GEMM: y = activation(x * W^T + bias) with weights as floats, sums in f32.
//
//   dense_rows (GEMV): few rows. A warp owns one output and ROWS rows; a lane takes 8 elements of every 256, and lanes
//       add up in a tree. Where rows do not begin at 16 bytes, a lane takes single elements.
//   dense_tiles (GEMM): many rows. A block owns 64 rows and 64 outputs, a thread 4 x 4 of them: for each run of 16
//       columns, x and W -> f32 in shared memory, then sums = fma(x, w, sums), column after column.
//
// What an output is added up from depends on k only, not on how many rows there are, within each of the two.
#include "activation.cuh"
#include "floats.cuh"

constexpr int THREADS = 256;

// As `Params` in dense.rs.
struct Params {
  const void* x;  // [m][k]
  const void* w;  // [n][k]
  const float* bias;  // [n], or null
  void* y;  // [m][n]
  u64 m, n, k;
  FloatType x_type, w_type, y_type;
  u32 by_eight;  // whether rows of x and W begin at 16 bytes
  Activation activation;
  float low, high;  // of a clamp
  u32 padding;
};

// ACTIVATES: whether an activation function comes last.
template <int ROWS, bool ACTIVATES> __global__ void __launch_bounds__(THREADS, 2) dense_rows(const Params p) {
  const u64 output = u64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, m0 = u64(blockIdx.y) * ROWS;
  const u32 lane = threadIdx.x % 32;
  if (output >= p.n) return;
  float sums[ROWS] = {};
  if (p.by_eight) {
#pragma unroll 2
    for (u64 k = 8 * lane; k < p.k; k += 256) {
      float w[8];
      load_eight(p.w, output * p.k + k, p.w_type, w);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (m0 + r >= p.m) break;
        float x[8];
        load_eight(p.x, (m0 + r) * p.k + k, p.x_type, x);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[r] = fmaf(x[i], w[i], sums[r]);
      }
    }
  } else {
    for (u64 k = lane; k < p.k; k += 32) {
      const float w = load_float(p.w, output * p.k + k, p.w_type);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (m0 + r < p.m) sums[r] = fmaf(load_float(p.x, (m0 + r) * p.k + k, p.x_type), w, sums[r]);
      }
    }
  }
  const float bias = p.bias ? p.bias[output] : 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float sum = warp_sum(sums[r]) + bias;
    if constexpr (ACTIVATES) sum = activate(sum, p.activation, p.low, p.high);
    if (lane == 0 && m0 + r < p.m) store_float(p.y, (m0 + r) * p.n + output, sum, p.y_type);
  }
}

// A tile of rows and columns, transposed; zeros beyond the matrix.
template <int COLUMNS, int TILE>
DEV void fetch(float (&to)[COLUMNS][TILE + 4], const void* from, FloatType type, u64 row0, u64 rows, u64 k0, u64 k) {
#pragma unroll
  for (int i = 0; i < TILE * COLUMNS / THREADS; i++) {
    const int at = threadIdx.x + i * THREADS, row = at / COLUMNS, column = at % COLUMNS;
    const bool within = row0 + row < rows && k0 + column < k;
    to[column][row] = within ? load_float(from, (row0 + row) * k + k0 + column, type) : 0;
  }
}

// TILE: rows, and outputs, of a block.
template <int TILE, bool ACTIVATES> __global__ void __launch_bounds__(THREADS) dense_tiles(const Params p) {
  constexpr int COLUMNS = 16, EACH = TILE / 16;  // of a run; of a thread
  static_assert(EACH == 4, "a thread reads four rows and four outputs at once");
  __shared__ __align__(16) float smem_x[COLUMNS][TILE + 4];
  __shared__ __align__(16) float smem_w[COLUMNS][TILE + 4];
  const u64 n0 = u64(blockIdx.x) * TILE, m0 = u64(blockIdx.y) * TILE;
  const int down = threadIdx.x / 16 * EACH, across = threadIdx.x % 16 * EACH;
  float sums[EACH][EACH] = {};
  for (u64 k0 = 0; k0 < p.k; k0 += COLUMNS) {
    fetch<COLUMNS, TILE>(smem_x, p.x, p.x_type, m0, p.m, k0, p.k);
    fetch<COLUMNS, TILE>(smem_w, p.w, p.w_type, n0, p.n, k0, p.k);
    __syncthreads();
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
      const float4 x4 = *reinterpret_cast<const float4*>(&smem_x[column][down]);
      const float4 w4 = *reinterpret_cast<const float4*>(&smem_w[column][across]);
      const float x[EACH] = {x4.x, x4.y, x4.z, x4.w}, w[EACH] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
      for (int r = 0; r < EACH; r++) {
#pragma unroll
        for (int c = 0; c < EACH; c++) sums[r][c] = fmaf(x[r], w[c], sums[r][c]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < EACH; r++) {
#pragma unroll
    for (int c = 0; c < EACH; c++) {
      const u64 row = m0 + down + r, output = n0 + across + c;
      if (row >= p.m || output >= p.n) continue;
      float sum = sums[r][c] + (p.bias ? p.bias[output] : 0);
      if constexpr (ACTIVATES) sum = activate(sum, p.activation, p.low, p.high);
      store_float(p.y, row * p.n + output, sum, p.y_type);
    }
  }
}
