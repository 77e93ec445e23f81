// An epilogue apart: what comes after sums that lie in memory, which may be in parts: y = activation(sum + bias),
// rounded once.
#include "activation.cuh"
#include "floats.cuh"

// As `Params` in finish.rs.
struct Params {
  const float* sums;  // [parts][rows][sums_pitch]: what is added, the first part first
  const float* bias;  // [n], or null
  void* y;  // [rows][y_pitch]; may be the sums themselves
  u64 sums_pitch, y_pitch, part;  // part: from a part to the next
  u32 rows, n;
  FloatType y_type;
  Activation activation;
  float low, high;  // of CLAMP
  u32 parts, padding;
};

constexpr u32 THREADS = 256, EACH = 4;

// A block has 1024 columns of some rows; a thread four of them, 256 apart.
extern "C" __global__ void __launch_bounds__(THREADS) finish(const Params p) {
  const u32 first = blockIdx.x * THREADS * EACH + threadIdx.x;
  float bias[EACH];
#pragma unroll
  for (u32 i = 0; i < EACH; i++) bias[i] = p.bias && first + i * THREADS < p.n ? p.bias[first + i * THREADS] : 0.f;
  for (u32 row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float v[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
      const float* sum = p.sums + row * p.sums_pitch + first + i * THREADS;
      v[i] = 0.f;
      if (first + i * THREADS >= p.n) continue;
      v[i] = sum[0];
      for (u32 part = 1; part < p.parts; part++) v[i] += sum[part * p.part];
    }
#pragma unroll 1
    for (u32 i = 0; i < EACH; i++) {
      const u32 column = first + i * THREADS;
      if (column >= p.n) break;
      const float sum = i == 0 ? v[0] : i == 1 ? v[1] : i == 2 ? v[2] : v[3];
      const float b = i == 0 ? bias[0] : i == 1 ? bias[1] : i == 2 ? bias[2] : bias[3];
      store_float(p.y, row * p.y_pitch + column, activate(p.bias ? sum + b : sum, p.activation, p.low, p.high),
                  p.y_type);
    }
  }
}
