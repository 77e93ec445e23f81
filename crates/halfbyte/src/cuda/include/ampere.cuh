// Instructions from sm_80 on that CUDA C++ has no operators for, one function each, and on sm_75 what takes their
// place.  hopper.cuh adds those of sm_90a.  Shared memory is addressed by 32-bit addresses of the shared window.
#pragma once
#include "dequant.cuh"

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- copies of 16 bytes from global to shared memory, past L1, in groups of a thread's own (cp.async); on sm_75 a
// load and a store, which a barrier makes visible as it does with cp.async
DEV void store_shared(u32 a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#if __CUDA_ARCH__ >= 800
DEV void copy_16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// Zeros where not `there`: then src is not read.
DEV void copy_16_or_zero(u32 dst, const void* src, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}
// 4 or 8 bytes, by way of L1.
template <int BYTES> DEV void copy_few(u32 dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst), "l"(src), "n"(BYTES) : "memory");
}
// The same, zeros where not `there`.
template <int BYTES> DEV void copy_few_or_zero(u32 dst, const void* src, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(BYTES), "r"(there ? BYTES : 0)
               : "memory");
}
// Nothing where not `there`.
DEV void copy_16_if(u32 dst, const void* src, bool there) {
  asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(dst),
               "l"(src), "r"((int)there)
               : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread are unfinished.
template <int N> DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
#else
// 16 bytes past L1, which a kernel before this one may have written; zeros where not `there`: then src is not read.
DEV uint4 load_16_or_zero(const void* src, bool there) {
  uint4 v;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n mov.b32 %2, 0;\n mov.b32 %3, 0;\n"
      " @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(src), "r"((int)there));
  return v;
}
DEV void copy_16_or_zero(u32 dst, const void* src, bool there) { store_shared(dst, load_16_or_zero(src, there)); }
DEV void copy_16(u32 dst, const void* src) { copy_16_or_zero(dst, src, true); }
DEV void store_few(u32 a, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory");
}
DEV void store_few(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
template <int BYTES> DEV void copy_few_or_zero(u32 dst, const void* src, bool there) {
  typedef typename Choice<BYTES == 8, uint2, u32>::Type Word;
  store_few(dst, there ? *static_cast<const Word*>(src) : Word());
}
template <int BYTES> DEV void copy_few(u32 dst, const void* src) { copy_few_or_zero<BYTES>(dst, src, true); }
DEV void copy_16_if(u32 dst, const void* src, bool there) {
  if (there) copy_16(dst, src);
}
DEV void copy_commit() {}
template <int N> DEV void copy_wait() {}
#endif

// Copies of a thread that are on their way from `start` to `finish`, which makes a group of them.  On sm_75 they wait
// in registers, as one of N each.
template <int N> struct PendingCopies {
#if __CUDA_ARCH__ >= 800
  // Nothing where not `there`; the other, zeros.
  __device__ __forceinline__ void start_if(int, u32 dst, const void* src, bool there) {
    if (there) copy_16(dst, src);
  }
  __device__ __forceinline__ void start_or_zero(int, u32 dst, const void* src, bool there) {
    copy_16_or_zero(dst, src, there);
  }
  __device__ __forceinline__ void skip(int) {}
  __device__ __forceinline__ void finish() { copy_commit(); }
#else
  uint4 v[N];
  u32 to[N];
  bool is[N];
  __device__ __forceinline__ void start_if(int i, u32 dst, const void* src, bool there) {
    to[i] = dst;
    is[i] = there;
    v[i] = load_16_or_zero(src, there);
  }
  __device__ __forceinline__ void start_or_zero(int i, u32 dst, const void* src, bool there) {
    start_if(i, dst, src, there);
    is[i] = true;
  }
  __device__ __forceinline__ void skip(int i) { is[i] = false; }
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (is[i]) store_shared(to[i], v[i]);
  }
#endif
};

// ---- loads
DEV void load_shared(u32 (&v)[4], u32 a) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a));
}
DEV void load_shared(u32 (&v)[2], u32 a) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(a));
}
DEV u32 load_shared(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
DEV u32 load_shared_u16(u32 a) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a));
  return v;
}
DEV void store_shared(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEV void store_shared_u16(u32 a, u32 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"((u16)v) : "memory"); }
DEV void store_shared(u32 a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
DEV void store_shared(u32 a, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// Floats from global memory past L1, which other blocks wrote, or a kernel that this one has waited for.
DEV float load_l2(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DEV float4 load_l2(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Adds 1 and returns the value before; orders what this block wrote before it, and what it reads after it.
DEV u32 count_up(u32* p) {
  u32 v;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// ---- warps and blocks
// Barrier id for `threads` threads of a block.
DEV void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// The same, without waiting for the others.
DEV void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Programmatic dependent launch: waits until the kernels before this one have ended and their writes are visible;
// before sm_90 a kernel starts only then.
DEV void dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start its blocks where there is room; it may read what this one writes only after its own
// dependency_wait.
DEV void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- fragments
// Four 8x8 matrices of halves; lane i gives the address of row i%8 of matrix i/8.
DEV void load_matrices(u32 (&b)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(a)
               : "memory");
}
// The same, each transposed.
DEV void load_transposed(u32 (&b)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(a)
               : "memory");
}
// The first two of them; lanes 0 to 15 give addresses.
DEV void load_two_matrices(u32 (&b)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(a) : "memory");
}
// Transposes an 8x8 matrix of halves held by a warp.
DEV u32 transpose_8x8(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
// Stores four 8x8 matrices transposed; lane i gives the address of row i%8 of matrix i/8.
DEV void store_matrices(u32 a, u32 m0, u32 m1, u32 m2, u32 m3) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
#else
  const u32 m[4] = {m0, m1, m2, m3}, lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < 4; j++)
    store_shared(__shfl_sync(0xffffffffu, a, 8 * j + (lane >> 2)) + 4 * (lane & 3), transpose_8x8(m[j]));
#endif
}
// A float as TF32 has it: rounded to 11 bits.
DEV float rounded_to_tf32(float v) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return __uint_as_float(bits);
}
// c += A * B, m16n8k8 of fp16, fp32 sums.
DEV void mma_sync_k8(float* c, u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
// c += A * B, m16n8k16, fp32 sums.  sm_75 has no bf16, and half of the columns at a time.
template <bool BF16> DEV void mma_sync(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
  static_assert(!BF16, "tensor cores of sm_75 multiply fp16");
  mma_sync_k8(c, a[0], a[1], b0);
  mma_sync_k8(c, a[2], a[3], b1);
#else
  if constexpr (BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
// c += A * B, m8n8k16 of bytes, A signed or unsigned, B signed, 32-bit integer sums.
template <bool UNSIGNED> DEV void mma_sync_int8_m8(int* c, u32 a, u32 b) {
  if constexpr (UNSIGNED)
    asm("mma.sync.aligned.m8n8k16.row.col.s32.u8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a), "r"(b));
  else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a), "r"(b));
}
// c += A * B, m16n8k16 of bytes, A signed or unsigned, B signed, 32-bit integer sums; on sm_75 8 rows at a time.
template <bool UNSIGNED> DEV void mma_sync_int8_k16(int* c, u32 a0, u32 a1, u32 b) {
#if __CUDA_ARCH__ < 800
  mma_sync_int8_m8<UNSIGNED>(c, a0, b);
  mma_sync_int8_m8<UNSIGNED>(c + 2, a1, b);
#else
  if constexpr (UNSIGNED)
    asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
#endif
}
// c += A * B, m16n8k32 of bytes, A signed or unsigned, B signed, 32-bit integer sums; on sm_75 8 rows and 16 columns at
// a time.
template <bool UNSIGNED> DEV void mma_sync_int8(int* c, const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ < 800
#pragma unroll
  for (int half = 0; half < 2; half++) {
    mma_sync_int8_m8<UNSIGNED>(c + 2 * half, a[half], b0);
    mma_sync_int8_m8<UNSIGNED>(c + 2 * half, a[half + 2], b1);
  }
#else
  if constexpr (UNSIGNED)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
