// Columns of x in another order, as weights need them whose columns were sorted by their groups, or in wider rows.
#include "ptx.cuh"

// out[row][j] = x[row][order[j]], or x[row][j] without an order; zero from k to pitch, which is the width of out.
// A block has 256 columns of one row. Elements are 16 bits wide.
extern "C" __global__ void gather(const u16* x, const u32* order, u16* out, u32 k, u32 pitch) {
  const u32 j = blockIdx.x * 256 + threadIdx.x;
  if (j < pitch) out[u64(blockIdx.y) * pitch + j] = j < k ? x[u64(blockIdx.y) * k + (order ? order[j] : j)] : 0;
}
