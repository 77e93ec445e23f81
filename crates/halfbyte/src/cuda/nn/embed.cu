// Embedding: out[row] = table[tokens[row]] * scale, in f32.
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
  u32 vocab;
  FloatType kind;
  float scale;
  u32 padding;  // of this struct
};

__global__ void __launch_bounds__(THREADS) embed(const Params p) {
  const u64 row = blockIdx.x;
  // Ids from the host are checked there, and others come from `argmax`: the limit guards memory against a torn buffer.
  const u64 token = min(p.tokens[row], p.vocab - 1);
  for (u64 i = threadIdx.x; i < p.hidden; i += THREADS)
    p.out[row * p.hidden + i] = load_float(p.table, token * p.hidden + i, p.kind) * p.scale;
}
