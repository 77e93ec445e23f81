// GEMM by ordinary threads (SIMT): y = activation(x * dequant(W)^T + bias) with float x, for every format of weights on
// every processor from sm_75 on: the kernel that is right.
//
//   a block owns 64 outputs and 4 * ROWS rows of x; a thread one output and ROWS rows
//   for each run of 32 columns:
//       all threads: codes -> f32 weights [32 columns][64 outputs] in shared memory, x -> f32 [rows][32 columns]
//       each thread: sums[r] = fma(x[r][column], weight[column], sums[r]), column after column
//   y = activation(sum + bias), rounded once
//
// Every sum is made by one thread from the first column to the last, so that a row of y has the same bits whatever m
// is. Types of x, scales and y are looked at where they are loaded and stored: the compiler would else make 27 kernels
// of one. The layout of the weights is that of layout/cuda_plain.rs.
#include "activation.cuh"

constexpr int OUTPUTS = 64;  // of a block
constexpr int COLUMNS = 32;  // of a run
constexpr int THREADS = 256;

enum FloatType : u32 { F16 = 0, BF16 = 1, F32 = 2 };
enum ZeroKind : u32 { SYMMETRIC = 0, INTEGER = 1, OFFSET = 2 };

// As `Params` in simt.rs.
struct Params {
  const void* x;  // [m][k]
  const u32* codes;  // [words][n]
  const void* scales;  // [groups][n]
  const void* zeros;  // [groups][n]: u16 zero points, or offsets of the scales' type
  const u32* group_of;  // [k], or null: column / group
  const float* bias;  // [n], or null
  void* y;  // [m][n]
  u64 m, n, k;
  u32 group;
  u32 middle;  // the code of zero in a symmetric format
  FloatType x_type, scale_type, y_type;
  ZeroKind zero_kind;
  Activation activation;
  float low, high;  // of CLAMP
  u32 row_blocks;
};

DEV float load(const void* from, u64 at, FloatType type) {
  if (type == F32) return static_cast<const float*>(from)[at];
  u16 bits = static_cast<const u16*>(from)[at];
  return type == F16 ? float_of_half(bits) : float_of_bfloat(bits);
}

DEV void store(void* to, u64 at, float value, FloatType type) {
  if (type == F32)
    static_cast<float*>(to)[at] = value;
  else
    static_cast<u16*>(to)[at] = type == F16 ? half_of_float(value) : bfloat_of_float(value);
}

// FIELD: bits of a code's place in a word; ROWS: rows of x a thread.
template <int FIELD, int ROWS> __global__ void __launch_bounds__(THREADS, 2) simt(const Params p) {
  constexpr int PER_WORD = 32 / FIELD;
  constexpr int BLOCK_ROWS = THREADS / OUTPUTS * ROWS;
  __shared__ float smem_w[COLUMNS][OUTPUTS];
  __shared__ float smem_x[BLOCK_ROWS][COLUMNS];

  const int thread = threadIdx.x, lane = thread % OUTPUTS, first_row = thread / OUTPUTS * ROWS;
  const u64 m0 = u64(blockIdx.x % p.row_blocks) * BLOCK_ROWS, n0 = u64(blockIdx.x / p.row_blocks) * OUTPUTS;

  float sums[ROWS] = {};
  for (u64 k0 = 0; k0 < p.k; k0 += COLUMNS) {
    for (int i = thread; i < COLUMNS / PER_WORD * OUTPUTS; i += THREADS) {
      const int word = i / OUTPUTS, column = word * PER_WORD;
      const u64 output = n0 + i % OUTPUTS;
      const bool within = output < p.n && k0 + column < p.k;
      const u32 codes = within ? p.codes[(k0 + column) / PER_WORD * p.n + output] : 0;
      u64 loaded = ~0ull;
      float scale = 0, offset = 0, zero = float(p.middle);
#pragma unroll 1
      for (int f = 0; f < PER_WORD; f++) {
        const u64 k = k0 + column + f;
        float weight = 0;
        if (within && k < p.k) {
          const u64 at = (p.group_of ? p.group_of[k] : u32(k) / p.group) * p.n + output;
          if (at != loaded) {
            loaded = at;
            scale = load(p.scales, at, p.scale_type);
            if (p.zero_kind == INTEGER) zero = static_cast<const u16*>(p.zeros)[at];
            if (p.zero_kind == OFFSET) offset = load(p.zeros, at, p.scale_type);
          }
          const float code = float(codes >> (f * FIELD) & ((1u << FIELD) - 1));
          weight = p.zero_kind == OFFSET ? fmaf(scale, code, offset) : scale * (code - zero);
        }
        smem_w[column + f][i % OUTPUTS] = weight;
      }
    }
    for (int i = thread; i < BLOCK_ROWS * COLUMNS; i += THREADS) {
      const u64 row = m0 + i / COLUMNS, k = k0 + i % COLUMNS;
      smem_x[i / COLUMNS][i % COLUMNS] = row < p.m && k < p.k ? load(p.x, row * p.k + k, p.x_type) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
      const float weight = smem_w[column][lane];
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r] = fmaf(smem_x[first_row + r][column], weight, sums[r]);
    }
    __syncthreads();
  }

  // The sums change hands by way of shared memory, so that the code of the epilogue stands here once and not for each
  // row.
  static_assert(BLOCK_ROWS <= COLUMNS, "the sums take the place of the weights");
#pragma unroll
  for (int r = 0; r < ROWS; r++) smem_w[first_row + r][lane] = sums[r];
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < BLOCK_ROWS * OUTPUTS; i += THREADS) {
    const u64 row = m0 + i / OUTPUTS, output = n0 + i % OUTPUTS;
    if (row >= p.m || output >= p.n) continue;
    float sum = smem_w[i / OUTPUTS][i % OUTPUTS];
    if (p.bias) sum += p.bias[output];
    store(p.y, row * p.n + output, activate(sum, p.activation, p.low, p.high), p.y_type);
  }
}
