// Columns of x in another order, as weights need them whose columns were sorted by their groups.
#include "ptx.cuh"

// out[row][j] = x[row][order[j]]; a block has 256 columns of one row. Elements are 16 bits wide.
extern "C" __global__ void gather(const u16* x, const u32* order, u16* out, u32 k) {
    const u32 j = blockIdx.x * 256 + threadIdx.x;
    if (j < k) out[u64(blockIdx.y) * k + j] = x[u64(blockIdx.y) * k + order[j]];
}
