// Instructions of sm_90a beside those of ampere.cuh, one function each.  wgmma is in wgmma.cuh.
#pragma once
#include "ampere.cuh"

// An encoded tensor map (CUtensorMap), passed by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u8 bytes[128];
};

// ---- mbarrier: a phase ends when all arrivals and all announced bytes have come; waiting is by the parity of the
// phase
DEV void mbarrier_init(u32 bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster.
DEV void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbarrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// Arrives once and announces bytes that copies will bring.
DEV void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV bool mbarrier_is(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}
DEV void mbarrier_wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
  } while (!done);
}

// ---- copies from global memory by the copy engine; bar counts the bytes
// One linear piece, a multiple of 16 bytes, with an L2 policy.
DEV void copy_bulk(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
// Fetches a line into L2.
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Fetches a linear piece into L2.
DEV void prefetch_bulk(const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
// One box of a 2-D tensor map at (x, y).
DEV void copy_box(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y)
      : "memory");
}
// The channels from c on, as many as a box has, of pixels of a 4-D tensor map in im2col mode: those that lie (across,
// down) from pixel (x, y) of an image and from those that come after it in the map's steps.
DEV void copy_im2col(u32 dst, const TensorMap* map, int c, int x, int y, int image, int across, int down, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2], {%7, %8};" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c), "r"(x), "r"(y), "r"(image), "h"((u16)across), "h"((u16)down)
      : "memory");
}
// Arrives when all copies of 16 bytes (ampere.cuh) that this thread has begun are there; one of the arrivals that the
// barrier counts.
DEV void copies_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// Orders what threads have written to shared memory before what tensor cores read there.
DEV void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders what this thread has loaded from shared memory before what copies write there after a later arrival.
DEV void loads_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Fetches the map itself, so that the first box does not wait for it.
DEV void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
DEV u64 policy_evict_first() {
  u64 p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
DEV u64 policy_evict_normal() {
  u64 p;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
  return p;
}

// ---- blocks and clusters
// Four floats to the shared memory of a block of the cluster; its barrier `bar` counts the 16 bytes (both addresses
// from cluster_address).
DEV void store_cluster(u32 a, u32 bar, float x, float y, float z, float w) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(a),
               "r"(bar), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
// One word of 64 bits to the shared memory of a block of the cluster; it is there after the next cluster_sync.
DEV void store_cluster(u32 a, u64 v) { asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(a), "l"(v) : "memory"); }
// One float, likewise.
DEV void store_cluster(u32 a, float v) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
DEV u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// The address in block `rank` of the cluster that `a` has in this block.
DEV u32 cluster_address(u32 a, u32 rank) {
  u32 d;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(rank));
  return d;
}
// Barrier of all threads of the cluster; what was written to shared memory before it is seen after it.
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Gives registers back to the pool, or takes more from it; all warps of a warpgroup, which then own N registers a
// thread.
template <int N> DEV void registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
