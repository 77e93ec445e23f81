// wgmma m64 nN k16 of sm_90a: d = A * B (keep = 0) or d += A * B; A from four registers a thread, B by a shared-memory
// descriptor, fp32 sums. Between a write to A or d and the first wgmma that reads it stands wgmma_fence(); A, d and B
// may be touched again only after wgmma_commit() and wgmma_wait<>(), followed by pin() on the registers, which keeps
// the compiler from moving their uses up.
#pragma once
#include "dequant.cuh"

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups are unfinished.
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int C> DEV void pin(float (&v)[C]) {
#pragma unroll
  for (int i = 0; i < C; i++) asm volatile("" : "+f"(v[i])::"memory");
}
template <int C> DEV void pin(u32 (&v)[C][4]) {
#pragma unroll
  for (int i = 0; i < C; i++) asm volatile("" : "+r"(v[i][0]), "+r"(v[i][1]), "+r"(v[i][2]), "+r"(v[i][3])::"memory");
}
// Descriptor of a K-major B tile in 128-byte swizzle, 8 rows in 1024 bytes: the constant upper word.
constexpr u64 WGMMA_DESCRIPTOR_HIGH = (64ull << 32) | (1ull << 62);
// The lower word; 16 k are 32 bytes, so the next k16 step is 2 more.
DEV u32 wgmma_descriptor_low(u32 address) { return ((address & 0x3ffff) >> 4) | (1u << 16); }

template <int N, bool BF16> struct Wgmma;

// Operand lists: S<c> numbers the first c accumulators, O<c> binds them.
#define S4 "%0,%1,%2,%3"
#define O4 ACCUMULATORS(0)
#define ACCUMULATORS(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define S8 S4 ",%4,%5,%6,%7"
#define O8 O4, ACCUMULATORS(4)
#define S12 S8 ",%8,%9,%10,%11"
#define O12 O8, ACCUMULATORS(8)
#define S16 S12 ",%12,%13,%14,%15"
#define O16 O12, ACCUMULATORS(12)
#define S20 S16 ",%16,%17,%18,%19"
#define O20 O16, ACCUMULATORS(16)
#define S24 S20 ",%20,%21,%22,%23"
#define O24 O20, ACCUMULATORS(20)
#define S28 S24 ",%24,%25,%26,%27"
#define O28 O24, ACCUMULATORS(24)
#define S32 S28 ",%28,%29,%30,%31"
#define O32 O28, ACCUMULATORS(28)
#define S36 S32 ",%32,%33,%34,%35"
#define O36 O32, ACCUMULATORS(32)
#define S40 S36 ",%36,%37,%38,%39"
#define O40 O36, ACCUMULATORS(36)
#define S44 S40 ",%40,%41,%42,%43"
#define O44 O40, ACCUMULATORS(40)
#define S48 S44 ",%44,%45,%46,%47"
#define O48 O44, ACCUMULATORS(44)
#define S52 S48 ",%48,%49,%50,%51"
#define O52 O48, ACCUMULATORS(48)
#define S56 S52 ",%52,%53,%54,%55"
#define O56 O52, ACCUMULATORS(52)
#define S60 S56 ",%56,%57,%58,%59"
#define O60 O56, ACCUMULATORS(56)
#define S64 S60 ",%60,%61,%62,%63"
#define O64 O60, ACCUMULATORS(60)
#define S68 S64 ",%64,%65,%66,%67"
#define O68 O64, ACCUMULATORS(64)
#define S72 S68 ",%68,%69,%70,%71"
#define O72 O68, ACCUMULATORS(68)
#define S76 S72 ",%72,%73,%74,%75"
#define O76 O72, ACCUMULATORS(72)
#define S80 S76 ",%76,%77,%78,%79"
#define O80 O76, ACCUMULATORS(76)
#define S84 S80 ",%80,%81,%82,%83"
#define O84 O80, ACCUMULATORS(80)
#define S88 S84 ",%84,%85,%86,%87"
#define O88 O84, ACCUMULATORS(84)
#define S92 S88 ",%88,%89,%90,%91"
#define O92 O88, ACCUMULATORS(88)
#define S96 S92 ",%92,%93,%94,%95"
#define O96 O92, ACCUMULATORS(92)
#define S100 S96 ",%96,%97,%98,%99"
#define O100 O96, ACCUMULATORS(96)
#define S104 S100 ",%100,%101,%102,%103"
#define O104 O100, ACCUMULATORS(100)
#define S108 S104 ",%104,%105,%106,%107"
#define O108 O104, ACCUMULATORS(104)
#define S112 S108 ",%108,%109,%110,%111"
#define O112 O108, ACCUMULATORS(108)
#define S116 S112 ",%112,%113,%114,%115"
#define O116 O112, ACCUMULATORS(112)
#define S120 S116 ",%116,%117,%118,%119"
#define O120 O116, ACCUMULATORS(116)
#define S124 S120 ",%120,%121,%122,%123"
#define O124 O120, ACCUMULATORS(120)
#define S128 S124 ",%124,%125,%126,%127"
#define O128 O124, ACCUMULATORS(124)
#define DEFINE_WGMMA_TYPE(N, C, A0, A1, A2, A3, B, KEEP, BF16, TYPE)                                          \
  template <> struct Wgmma<N, BF16> {                                                                         \
    DEV void run(float (&d)[C], const u32 (&a)[4], u64 b, int keep) {                                         \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #KEEP ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                   "k16.f32." TYPE "." TYPE "\n {" S##C "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B      \
                                                        ", p, 1, 1, 0;\n}"                                    \
                   : O##C                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                          \
    }                                                                                                         \
  };
#define DEFINE_WGMMA(N, C, A0, A1, A2, A3, B, KEEP)              \
  DEFINE_WGMMA_TYPE(N, C, A0, A1, A2, A3, B, KEEP, false, "f16") \
  DEFINE_WGMMA_TYPE(N, C, A0, A1, A2, A3, B, KEEP, true, "bf16")
DEFINE_WGMMA(8, 4, 4, 5, 6, 7, 8, 9)
DEFINE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
DEFINE_WGMMA(24, 12, 12, 13, 14, 15, 16, 17)
DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
DEFINE_WGMMA(40, 20, 20, 21, 22, 23, 24, 25)
DEFINE_WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
DEFINE_WGMMA(56, 28, 28, 29, 30, 31, 32, 33)
DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
DEFINE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
DEFINE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
DEFINE_WGMMA(224, 112, 112, 113, 114, 115, 116, 117)
DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

// d += A * B of TF32, m64 nN k8: numbers of 11 bits.  B by a descriptor without swizzle, 8 rows of 16 bytes in 128.
template <int N> struct WgmmaTf32;
#define DEFINE_WGMMA_TF32(N, C, A0, A1, A2, A3, B)                                                              \
  template <> struct WgmmaTf32<N> {                                                                             \
    DEV void run(float (&d)[C], const u32 (&a)[4], u64 b) {                                                     \
      asm volatile("{\n .reg .pred p;\n setp.eq.u32 p, 1, 1;\n wgmma.mma_async.sync.aligned.m64n" #N            \
                   "k8.f32.tf32.tf32\n {" S##C "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1;\n}" \
                   : O##C                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
    }                                                                                                           \
  };
DEFINE_WGMMA_TF32(48, 24, 24, 25, 26, 27, 28)
DEFINE_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36)
