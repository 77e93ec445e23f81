// wgmma m64 nN k32 of sm_90a for bytes: d = A * B (keep = 0) or d += A * B; A signed or unsigned from four registers a
// thread, B signed by a shared-memory descriptor, 32-bit integer sums.  Rules for fences and waits are those of
// wgmma.cuh.
#pragma once
#include "wgmma.cuh"

template <int C> DEV void pin(int (&v)[C]) {
#pragma unroll
  for (int i = 0; i < C; i++) asm volatile("" : "+r"(v[i])::"memory");
}

template <int N, bool UNSIGNED> struct WgmmaInt8;

#define I4 INTEGERS(0)
#define INTEGERS(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define I8 I4, INTEGERS(4)
#define I12 I8, INTEGERS(8)
#define I16 I12, INTEGERS(12)
#define I20 I16, INTEGERS(16)
#define I24 I20, INTEGERS(20)
#define I28 I24, INTEGERS(24)
#define I32 I28, INTEGERS(28)
#define I36 I32, INTEGERS(32)
#define I40 I36, INTEGERS(36)
#define I44 I40, INTEGERS(40)
#define I48 I44, INTEGERS(44)
#define I52 I48, INTEGERS(48)
#define I56 I52, INTEGERS(52)
#define I60 I56, INTEGERS(56)
#define I64 I60, INTEGERS(60)
#define I128                                                                                                           \
  I64, INTEGERS(64), INTEGERS(68), INTEGERS(72), INTEGERS(76), INTEGERS(80), INTEGERS(84), INTEGERS(88), INTEGERS(92), \
      INTEGERS(96), INTEGERS(100), INTEGERS(104), INTEGERS(108), INTEGERS(112), INTEGERS(116), INTEGERS(120),          \
      INTEGERS(124)
#define DEFINE_WGMMA_INT8_TYPE(N, C, A0, A1, A2, A3, B, KEEP, UNSIGNED, TYPE)                                 \
  template <> struct WgmmaInt8<N, UNSIGNED> {                                                                 \
    DEV void run(int (&d)[C], const u32 (&a)[4], u64 b, int keep) {                                           \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #KEEP ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                   "k32.s32." TYPE                                                                            \
                   ".s8"                                                                                      \
                   "\n {" S##C "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p;\n}"                     \
                   : I##C                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                          \
    }                                                                                                         \
  };
#define DEFINE_WGMMA_INT8(N, C, A0, A1, A2, A3, B, KEEP)             \
  DEFINE_WGMMA_INT8_TYPE(N, C, A0, A1, A2, A3, B, KEEP, false, "s8") \
  DEFINE_WGMMA_INT8_TYPE(N, C, A0, A1, A2, A3, B, KEEP, true, "u8")
DEFINE_WGMMA_INT8(8, 4, 4, 5, 6, 7, 8, 9)
DEFINE_WGMMA_INT8(16, 8, 8, 9, 10, 11, 12, 13)
DEFINE_WGMMA_INT8(32, 16, 16, 17, 18, 19, 20, 21)
DEFINE_WGMMA_INT8(64, 32, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA_INT8(128, 64, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA_INT8(256, 128, 128, 129, 130, 131, 132, 133)
