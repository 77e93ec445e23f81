// What an MLP does between its products: out = f(gate) * up, where a row of x has the gate first, then up; or f(x).
//
//   a thread has four neighbours of a row, in blocks of 128 threads: one row is spread over many multiprocessors
//
// gate_quantized makes codes of 8 bits of what gate would have left: the same numbers, rounded to the same type, by
// quantize_rows.cuh.
#include "quantize_rows.cuh"

#include "activation.cuh"
#include "ampere.cuh"
#include "early_launch.cuh"

constexpr int THREADS = 128;

// As `Function` in gate.rs.
struct Function {
  Activation activation;
  u32 gated;
  float low, high;  // of a clamp
  float alpha, limit;  // limit above 0: gate * sigmoid(alpha * gate) * (up + 1), of a gate and up that it bounds
};

// As `Params` in gate.rs.
struct Params {
  const float* x;  // [rows][2][inner]; not gated: [rows][inner]
  void* out;  // [rows][inner]
  u64 inner, rows;
  Function function;
  FloatType out_type;
  u32 aligned;  // rows of both begin at multiples of 16 bytes, as do their halves, and have whole vectors of four
};

// As `QuantizedParams` in gate.rs.
struct QuantizedParams {
  const float* x;  // [rows][2][inner]; not gated: [rows][inner]
  Target to;  // inner is its k
  Function function;
  FloatType out_type;
  u32 aligned;  // as in Params
};

// Comparisons with NaN are false, which leaves it.
DEV float result(float gate, float up, const Function& f) {
  if (f.limit > 0) {
    gate = gate > f.limit ? f.limit : gate;
    up = up > f.limit ? f.limit : up < -f.limit ? -f.limit : up;
    return gate / (1 + expf(-f.alpha * gate)) * (up + 1);
  }
  const float v = activate(gate, f.activation, f.low, f.high);
  return f.gated ? v * up : v;
}

__global__ void __launch_bounds__(THREADS) gate(const Params p) {
  wait_and_launch(p.rows > FEW_ROWS);
  const u64 column = 4 * (u64(blockIdx.x) * THREADS + threadIdx.x);
  if (column >= p.inner) return;
  const u64 left = p.inner - column;
  for (u64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const float* from = p.x + row * (1 + p.function.gated) * p.inner + column;
    float4 gate[1], up[1] = {};
    load_fours<1, 1>(from, left, p.aligned, gate);
    if (p.function.gated) load_fours<1, 1>(from + p.inner, left, p.aligned, up);
    const float4 out = make_float4(result(gate[0].x, up[0].x, p.function), result(gate[0].y, up[0].y, p.function),
                                   result(gate[0].z, up[0].z, p.function), result(gate[0].w, up[0].w, p.function));
    store_four(p.out, row * p.inner + column, out, p.out_type, left, p.aligned);
  }
}

// A row of the result.
struct Results {
  const QuantizedParams& p;
  const float* row;
  // Columns from c on; gives how many there are.
  __device__ __forceinline__ int operator()(u64 c, float (&v)[COLUMNS]) const {
    const int there = columns_there(p.to, c);
    float4 gate[COLUMNS / 4], up[COLUMNS / 4] = {};
    load_fours<COLUMNS / 4, 1>(row + c, there, p.aligned, gate);
    if (p.function.gated) load_fours<COLUMNS / 4, 1>(row + p.to.k + c, there, p.aligned, up);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
      v[i] = i < there ? rounded(result(element(gate, i), element(up, i), p.function), p.out_type) : 0.f;
    return there;
  }
};

template <int OF_A_GROUP, bool OFFSET>
__global__ void __launch_bounds__(BLOCK, 2) gate_quantized(const QuantizedParams p) {
  // As in quantize_activations.cu, and for the same reason not earlier.
  dependency_wait();
  launch_dependents();
  const float* const row = p.x + u64(blockIdx.x) * (1 + p.function.gated) * p.to.k;
  quantize_row<OF_A_GROUP, OFFSET>(p.to, blockIdx.x, blockIdx.y, Results{p, row});
}
