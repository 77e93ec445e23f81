// wgmma m64 nN k32 of sm_90a for bytes with both operands in shared memory, by descriptors: d = A * B (keep = 0) or
// d += A * B; A signed, B not or signed too, 32-bit integer sums.  Rules for fences and waits are those of wgmma.cuh.
#pragma once
#include "wgmma_int8.cuh"

template <int N, bool UNSIGNED> struct WgmmaBytes;
#define DEFINE_WGMMA_BYTES_TYPE(N, C, A, B, KEEP, UNSIGNED, TYPE)                                             \
  template <> struct WgmmaBytes<N, UNSIGNED> {                                                                \
    DEV void run(int (&d)[C], u64 a, u64 b, int keep) {                                                       \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #KEEP ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                   "k32.s32.s8." TYPE "\n {" S##C "}, %" #A ", %" #B ", p;\n}"                                \
                   : I##C                                                                                     \
                   : "l"(a), "l"(b), "r"(keep));                                                              \
    }                                                                                                         \
  };
#define DEFINE_WGMMA_BYTES(N, C, A, B, KEEP)             \
  DEFINE_WGMMA_BYTES_TYPE(N, C, A, B, KEEP, false, "s8") \
  DEFINE_WGMMA_BYTES_TYPE(N, C, A, B, KEEP, true, "u8")
DEFINE_WGMMA_BYTES(32, 16, 16, 17, 18)
DEFINE_WGMMA_BYTES(64, 32, 32, 33, 34)
DEFINE_WGMMA_BYTES(96, 48, 48, 49, 50)
DEFINE_WGMMA_BYTES(112, 56, 56, 57, 58)
DEFINE_WGMMA_BYTES(128, 64, 64, 65, 66)
