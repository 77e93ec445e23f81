// LLM.int8(): rows of x as codes of 8 bits but for its outlier columns, and what becomes of the sums of codes.
//
//   outlier_columns   a thread has a column and ROWS rows: a flag where some |x| > threshold
//   list_outliers     one block: the columns with a flag, in their order, and how many
//   quantize_outside  a block has a row: the largest |x| that is not above the threshold, and codes, 0 in outlier
//       columns
//   (product          of codes and weights, sums in f32: the scale of every row and of every output is 1)
//   add_outliers      a thread has an output and PIECE rows: y = sum * scale * range / 127 + outliers + bias
//
// Every operation is f32, rounded once, in the order of the CPU (ops/on_cpu/llm_int8.rs).
#include "quantize_rows.cuh"

constexpr int ROWS = 16;
constexpr int PIECE = 4;
constexpr u32 LISTING = 1024;  // threads of list_outliers

// As `Params` in llm_int8.rs.
struct Params {
  const void* x;  // [m][k]
  const signed char* columns;  // [k][n]: weights, column by column
  const float* scales;  // [n]
  const float* bias;  // [n], or null
  const float* sums;  // [m][n]
  void* y;  // [m][n]
  u32* flags;  // [k], zeros at first
  u32* outliers;  // [k], and behind them how many there are
  float* ranges;  // [m]
  Target to;
  u64 n;
  float threshold;
  FloatType x_type, y_type;
  u32 unused;
};

extern "C" __global__ void __launch_bounds__(BLOCK) outlier_columns(const __grid_constant__ Params p) {
  const u64 at = u64(blockIdx.x) * BLOCK + threadIdx.x, column = at % p.to.k, first = at / p.to.k * ROWS;
  const u64 end = min(p.to.m, first + ROWS);
  bool outlier = false;
  for (u64 row = first; row < end; row++)
    outlier = outlier || fabsf(load_float(p.x, row * p.to.k + column, p.x_type)) > p.threshold;
  if (outlier) p.flags[column] = 1;
}

extern "C" __global__ void __launch_bounds__(LISTING) list_outliers(const __grid_constant__ Params p) {
  __shared__ u32 counts[LISTING / 32];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 found = 0;  // in the columns before
  for (u64 first = 0; first < p.to.k; first += LISTING) {
    const u64 column = first + threadIdx.x;
    const bool outlier = column < p.to.k && p.flags[column] != 0;
    const u32 lanes = __ballot_sync(ALL_LANES, outlier);
    if (lane == 0) counts[warp] = __popc(lanes);
    __syncthreads();
    u32 before = found;
    for (u32 w = 0; w < LISTING / 32; w++) {
      if (w < warp) before += counts[w];
      found += counts[w];
    }
    if (outlier) p.outliers[before + __popc(lanes & ((1u << lane) - 1))] = u32(column);
    __syncthreads();
  }
  if (threadIdx.x == 0) p.outliers[p.to.k] = found;
}

// Halves away from zero, within a byte; what is no number becomes 0.
DEV int byte_of(float x, float inverse) {
  const float steps = roundf(__fmul_rn(__fmul_rn(x, 127.f), inverse));
  return steps == steps ? int(fmaxf(fminf(steps, 127.f), -127.f)) : 0;
}

extern "C" __global__ void __launch_bounds__(BLOCK) quantize_outside(const __grid_constant__ Params p) {
  __shared__ float largest[BLOCK / 32];
  const u64 row = blockIdx.x, from = row * p.to.k;
  float range = 0.f;
  bool nan = false;
  for (u64 c = threadIdx.x; c < p.to.k; c += BLOCK) {
    const float magnitude = fabsf(load_float(p.x, from + c, p.x_type));
    nan = nan || magnitude != magnitude;
    if (magnitude <= p.threshold) range = fmaxf(range, magnitude);
  }
  range = warp_max(range);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = range;
  // Of a row with NaN all codes are 0, and the range is NaN.
  nan = __syncthreads_or(nan);
#pragma unroll
  for (u32 warp = 0; warp < BLOCK / 32; warp++) range = fmaxf(range, largest[warp]);
  const float inverse = __frcp_rn(range);
  for (u64 first = threadIdx.x * COLUMNS; first < p.to.pitch; first += BLOCK * COLUMNS) {
    int code[COLUMNS];
#pragma unroll
    for (u32 i = 0; i < COLUMNS; i++) {
      const u64 c = first + i;
      const bool inside = c < p.to.k && !nan && range > 0.f && p.flags[c] == 0;
      code[i] = inside ? byte_of(load_float(p.x, from + c, p.x_type), inverse) : 0;
    }
    write_bytes(p.to, row, first, code);
  }
  if (threadIdx.x != 0) return;
  p.to.scales[row * p.to.row_pitch] = 1.f;
  p.ranges[row] = nan ? __uint_as_float(0x7fc00000) : range;
}

extern "C" __global__ void __launch_bounds__(BLOCK) add_outliers(const __grid_constant__ Params p) {
  const u64 at = u64(blockIdx.x) * BLOCK + threadIdx.x, output = at % p.n, first = at / p.n * PIECE;
  if (first >= p.to.m) return;
  const int rows = int(min(p.to.m - first, u64(PIECE)));
  const float scale = p.scales[output];
  float sums[PIECE] = {};
#pragma unroll
  for (int r = 0; r < PIECE; r++)
    if (r < rows)
      sums[r] = __fmul_rn(__fmul_rn(p.sums[(first + r) * p.n + output], scale), __fdiv_rn(p.ranges[first + r], 127.f));
  const u32 count = p.outliers[p.to.k];
  for (u32 i = 0; i < count; i++) {
    const u64 column = p.outliers[i];
    const float w = rounded(__fmul_rn(float(p.columns[column * p.n + output]), scale), p.x_type);
#pragma unroll
    for (int r = 0; r < PIECE; r++)
      if (r < rows)
        sums[r] = __fadd_rn(sums[r], __fmul_rn(load_float(p.x, (first + r) * p.to.k + column, p.x_type), w));
  }
#pragma unroll
  for (int r = 0; r < PIECE; r++) {
    if (r >= rows) break;
    const float sum = p.bias ? __fadd_rn(sums[r], p.bias[output]) : sums[r];
    store_float(p.y, (first + r) * p.n + output, sum, p.y_type);
  }
}
