// Instructions of sm_90a that CUDA C++ has no operators for, one function each.  wgmma is in wgmma.cuh.
// Shared memory is addressed by 32-bit addresses of the shared window.  NVRTC needs no header for this file.
#pragma once
#include "dequant.cuh"

// An encoded tensor map (CUtensorMap), passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap { u8 bytes[128]; };

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarrier: a phase ends when all arrivals and all announced bytes have come; waiting is by the parity of the phase
DEV void mbarrier_init(u32 bar, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory"); }
// Makes initialised barriers visible to the copy engine and to the cluster.
DEV void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// Arrives once and announces bytes that copies will bring.
DEV void mbarrier_expect(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
DEV void mbarrier_wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}

// ---- copies from global memory by the copy engine; bar counts the bytes
// One linear piece, a multiple of 16 bytes, with an L2 policy.
DEV void copy_bulk(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
// Fetches a linear piece into L2.
DEV void prefetch_bulk(const void* src, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory"); }
// One box of a 2-D tensor map at (x, y).
DEV void copy_box(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
// The same box to the same place, and the same barrier, in every block of the cluster that the mask names.
DEV void copy_box_multicast(u32 dst, const TensorMap* map, int x, int y, u32 bar, u16 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask) : "memory");
}
// Fetches the map itself, so that the first box does not wait for it.
DEV void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEV u64 policy_evict_first() { u64 p; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
DEV u64 policy_evict_normal() { u64 p; asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p)); return p; }

// ---- loads
DEV void load_shared(u32 (&v)[4], u32 a) { asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a)); }
DEV u32 load_shared(u32 a) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a)); return v; }
DEV u32 load_shared_u16(u32 a) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a)); return v; }
DEV void store_shared(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEV void store_shared(u32 a, float x, float y, float z, float w) { asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory"); }
// Four floats to the shared memory of a block of the cluster; its barrier `bar` counts the 16 bytes (both addresses from cluster_address).
DEV void store_cluster(u32 a, u32 bar, float x, float y, float z, float w) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(a), "r"(bar), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// Four floats from global memory past L1, which other blocks wrote.
DEV float4 load_l2(const float4* p) { float4 v; asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory"); return v; }
DEV u32 load_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
// Adds 1 and returns the value before; orders what this block wrote before it, and what it reads after it.
DEV u32 count_up(u32* p) { u32 v; asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory"); return v; }

// ---- warps and blocks
// Barrier id for `threads` threads of a block.
DEV void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// The address in block `rank` of the cluster that `a` has in this block.
DEV u32 cluster_address(u32 a, u32 rank) { u32 d; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(rank)); return d; }
// Barrier of all threads of the cluster; what was written to shared memory before it is seen after it.
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Gives registers back to the pool, or takes more from it; all warps of a warpgroup, which then own N registers a thread.
template <int N> DEV void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
// Programmatic dependent launch: waits until the kernels before this one have ended and their writes are visible.
DEV void dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel start its blocks where there is room; it may read what this one writes only after its own dependency_wait.
DEV void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- fragments
// Four 8x8 matrices of halves; lane i gives the address of row i%8 of matrix i/8.
DEV void load_matrices(u32 (&b)[4], u32 a) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(a) : "memory"); }
// Stores four 8x8 matrices transposed; lane i gives the address of row i%8 of matrix i/8.
DEV void store_matrices(u32 a, u32 m0, u32 m1, u32 m2, u32 m3) { asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(m0), "r"(m1), "r"(m2), "r"(m3) : "memory"); }
// Transposes an 8x8 matrix of halves held by a warp.
DEV u32 transpose_8x8(u32 a) { u32 d; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); return d; }
// c += A * B, m16n8k16, fp32 sums.
template <bool BF16> DEV void mma_sync(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
