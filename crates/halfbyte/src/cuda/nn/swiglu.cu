// SwiGLU: out = silu(gate) * up, with silu(x) = x / (1 + e^-x); a row of gate_up has the gate first, then up.
//
//   a thread has four neighbours of a row, in blocks of 128 threads: one row is spread over many multiprocessors
//
// swiglu_quantized makes codes of 8 bits of what swiglu would have left: the same numbers, rounded to the same type, by
// quantize_rows.cuh.
#include "quantize_rows.cuh"

#include "ampere.cuh"

constexpr int THREADS = 128;

// As `Params` in swiglu.rs.
struct Params {
  const float* gate_up;  // [rows][2][inner]
  void* out;  // [rows][inner]
  u64 inner, rows;
  FloatType out_type;
  u32 aligned;  // rows of both begin at multiples of 16 bytes, as do their halves, and have whole vectors of four
};

// As `QuantizedParams` in swiglu.rs.
struct QuantizedParams {
  const float* gate_up;  // [rows][2][inner]
  Target to;  // inner is its k
  FloatType out_type;
  u32 aligned;  // as in Params
};

DEV float product(float gate, float up) { return gate / (1 + expf(-gate)) * up; }

__global__ void __launch_bounds__(THREADS) swiglu(const Params p) {
  dependency_wait();
  launch_dependents();
  const u64 column = 4 * (u64(blockIdx.x) * THREADS + threadIdx.x);
  if (column >= p.inner) return;
  const u64 left = p.inner - column;
  for (u64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const float* from = p.gate_up + row * 2 * p.inner + column;
    float4 gate[1], up[1];
    load_fours<1, 1>(from, left, p.aligned, gate);
    load_fours<1, 1>(from + p.inner, left, p.aligned, up);
    const float4 out = make_float4(product(gate[0].x, up[0].x), product(gate[0].y, up[0].y),
                                   product(gate[0].z, up[0].z), product(gate[0].w, up[0].w));
    store_four(p.out, row * p.inner + column, out, p.out_type, left, p.aligned);
  }
}

// A row of the result.
struct Products {
  const QuantizedParams& p;
  const float* row;
  // Columns from c on; gives how many there are.
  __device__ __forceinline__ int operator()(u64 c, float (&v)[COLUMNS]) const {
    const int there = columns_there(p.to, c);
    float4 gate[COLUMNS / 4], up[COLUMNS / 4];
    load_fours<COLUMNS / 4, 1>(row + c, there, p.aligned, gate);
    load_fours<COLUMNS / 4, 1>(row + p.to.k + c, there, p.aligned, up);
#pragma unroll
    for (int i = 0; i < COLUMNS; i++)
      v[i] = i < there ? rounded(product(element(gate, i), element(up, i)), p.out_type) : 0.f;
    return there;
  }
};

template <int OF_A_GROUP, bool OFFSET>
__global__ void __launch_bounds__(BLOCK, 2) swiglu_quantized(const QuantizedParams p) {
  // As in quantize_activations.cu, and for the same reason not earlier.
  dependency_wait();
  launch_dependents();
  quantize_row<OF_A_GROUP, OFFSET>(p.to, blockIdx.x, blockIdx.y, Products{p, p.gate_up + u64(blockIdx.x) * 2 * p.to.k});
}
