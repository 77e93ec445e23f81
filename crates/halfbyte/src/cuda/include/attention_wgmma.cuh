// Products of attention by wgmma: scores of queries and keys, both in shared memory; weights, in registers, times
// values as they lie there, a row for each position.
#pragma once
#include "hopper.cuh"
#include "wgmma.cuh"

template <int KEYS, bool BF16> struct WgmmaOfScores;
#define DEFINE_WGMMA_OF_SCORES(N, C, A, B, KEEP, BF16, TYPE)                                                  \
  template <> struct WgmmaOfScores<N, BF16> {                                                                 \
    DEV void run(float (&d)[C], u64 a, u64 b, int keep) {                                                     \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #KEEP ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." TYPE "." TYPE "\n {" S##C "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"              \
                   : O##C                                                                                     \
                   : "l"(a), "l"(b), "r"(keep));                                                              \
    }                                                                                                         \
  };
DEFINE_WGMMA_OF_SCORES(64, 32, 32, 33, 34, false, "f16")
DEFINE_WGMMA_OF_SCORES(64, 32, 32, 33, 34, true, "bf16")
DEFINE_WGMMA_OF_SCORES(128, 64, 64, 65, 66, false, "f16")
DEFINE_WGMMA_OF_SCORES(128, 64, 64, 65, 66, true, "bf16")

// d += weights * values; of values the elements of a position lie side by side.
template <int ELEMENTS, bool BF16> struct WgmmaOfValues;
#define DEFINE_WGMMA_OF_VALUES_TYPE(N, C, A0, A1, A2, A3, B, BF16, TYPE)                                             \
  template <> struct WgmmaOfValues<N, BF16> {                                                                        \
    DEV void run(float (&d)[C], const u32 (&a)[4], u64 b) {                                                          \
      asm volatile("{\n .reg .pred p;\n setp.eq.u32 p, 1, 1;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                   "." TYPE "\n {" S##C "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, 1;\n}"          \
                   : O##C                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }                                                                                                                \
  };
#define DEFINE_WGMMA_OF_VALUES(N, C, A0, A1, A2, A3, B)              \
  DEFINE_WGMMA_OF_VALUES_TYPE(N, C, A0, A1, A2, A3, B, false, "f16") \
  DEFINE_WGMMA_OF_VALUES_TYPE(N, C, A0, A1, A2, A3, B, true, "bf16")
DEFINE_WGMMA_OF_VALUES(64, 32, 32, 33, 34, 35, 36)
DEFINE_WGMMA_OF_VALUES(80, 40, 40, 41, 42, 43, 44)
DEFINE_WGMMA_OF_VALUES(96, 48, 48, 49, 50, 51, 52)
DEFINE_WGMMA_OF_VALUES(112, 56, 56, 57, 58, 59, 60)
DEFINE_WGMMA_OF_VALUES(128, 64, 64, 65, 66, 67, 68)
DEFINE_WGMMA_OF_VALUES(160, 80, 80, 81, 82, 83, 84)
DEFINE_WGMMA_OF_VALUES(192, 96, 96, 97, 98, 99, 100)
DEFINE_WGMMA_OF_VALUES(224, 112, 112, 113, 114, 115, 116)
DEFINE_WGMMA_OF_VALUES(256, 128, 128, 129, 130, 131, 132)

// Rows of halves in shared memory as boxes of 64 elements that the copy engine brings, in 128-byte swizzle.
template <int ROWS> struct Boxes {
  static constexpr u32 BYTES = 128, BOX = ROWS * BYTES;  // of a row of a box, of a box
  DEV u32 at(u32 row, u32 chunk) { return chunk / 8 * BOX + row * BYTES + 16 * ((chunk ^ row) & 7); }
  // `chunks` (an even number) behind the address of chunk 0 or 1.
  DEV u32 behind(u32 address, u32 chunks) { return (address ^ (16 * (chunks & 6))) + chunks / 8 * BOX; }
  // Descriptors of the box at an address; where a row is a column of the operand, and where it is of its depth.
  DEV u64 as_columns(u32 address) { return WGMMA_DESCRIPTOR_HIGH | wgmma_descriptor_low(address); }
  DEV u64 as_depth(u32 address) { return WGMMA_DESCRIPTOR_HIGH | BOX / 16 << 16 | (address & 0x3ffff) >> 4; }
  // What 16 elements further, or 16 rows further, add to them.
  DEV u64 elements(u32 sixteens) { return sixteens / 4 * (BOX / 16) + sixteens % 4 * 2; }
  DEV u64 rows(u32 sixteens) { return sixteens * (16 * BYTES / 16); }
};
