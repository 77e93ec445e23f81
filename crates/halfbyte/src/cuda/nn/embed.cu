// Embedding: out[row] = table[tokens[row] - first] * scale, in f32; zeros for tokens that the table has not.
//
//   a block copies one row
#include "floats.cuh"

constexpr int THREADS = 256;

// As `Params` in embed.rs.
struct Params {
  const void* table;  // [vocab][hidden]
  const u32* tokens;  // [rows]
  float* out;  // [rows][hidden]
  u64 hidden;
  u32 vocab, first;
  FloatType kind;
  float scale;
};

__global__ void __launch_bounds__(THREADS) embed(const Params p) {
  const u64 row = blockIdx.x;
  const u32 token = p.tokens[row] - p.first;  // of one before the first a large number
  for (u64 i = threadIdx.x; i < p.hidden; i += THREADS)
    p.out[row * p.hidden + i] = token < p.vocab ? load_float(p.table, token * p.hidden + i, p.kind) * p.scale : 0.f;
}
