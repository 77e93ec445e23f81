// Kernels that show that launches, clusters, dependent launches, tensor maps and faults arrive as they should.
#include "ptx.cuh"

struct alignas(64) TensorMap {
  u8 bytes[128];
};

template <int V> __global__ void add(float* y, u32 n) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += V;
}

// The same as a dependent launch: it may start early, and waits for what it reads.
template <int V> __global__ void add_after(float* y, u32 n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = y[i] * 2 + V;
}

// Each block's rank in its cluster, and the cluster's size.
template <int V> __global__ void ranks(u32* y) {
#if __CUDA_ARCH__ >= 900
  u32 rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) y[blockIdx.x] = rank + 100 * size;
#endif
}

// Dynamic shared memory, all of it written and read again backwards.
template <int V> __global__ void reverse(u32* y, u32 n) {
  extern __shared__ u32 smem[];
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) smem[i] = i;
  __syncthreads();
  for (u32 i = threadIdx.x; i < n; i += blockDim.x) y[i] = smem[n - 1 - i];
}

// One box of 8 rows of 64 halfs at (row, column), as the copy engine lays it down.
template <int V> __global__ void box(u16* y, const __grid_constant__ TensorMap map, int row, int column) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(128) u16 smem[8 * 64];
  __shared__ alignas(8) u64 barrier;
  const u32 bar = u32(__cvta_generic_to_shared(&barrier)), to = u32(__cvta_generic_to_shared(smem));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(u32(sizeof smem)) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(column), "r"(row)
        : "memory");
  }
  __syncthreads();
  u32 done = 0;
  while (!done)
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar)
                 : "memory");
  for (u32 i = threadIdx.x; i < 8 * 64; i += blockDim.x) y[i] = smem[i];
#endif
}

// Writes where nothing is.
template <int V> __global__ void fault(u32* y) { *(u32*)(u64(y) + (1ull << 45)) = V; }

// Conversions of single numbers: each of the first 65536 threads widens its own number, all narrow x.
template <int V>
__global__ void convert(float* from_half, float* from_bfloat, u16* to_half, u16* to_bfloat, const float* x, u32 n) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < 65536) {
    from_half[i] = float_of_half(u16(i));
    from_bfloat[i] = float_of_bfloat(u16(i));
  }
  if (i < n) {
    to_half[i] = half_of_float(x[i]);
    to_bfloat[i] = bfloat_of_float(x[i]);
  }
}
