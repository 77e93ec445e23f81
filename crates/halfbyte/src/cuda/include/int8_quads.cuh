// Products of four bytes of x by four weights, on the scalar units.
#pragma once
#include "ptx.cuh"

// Four bytes to a word.
DEV u32 word_of_bytes(const int (&v)[4]) {
  return (u32)(v[0] & 255) | (u32)(v[1] & 255) << 8 | (u32)(v[2] & 255) << 16 | (u32)v[3] << 24;
}

// sum + w . x. x is four bytes; w the same number of signed bytes, or in PARTS = 2 words of 16 bits.
template <bool UNSIGNED, int PARTS> DEV int multiply_quad(int sum, const u32 (&w)[PARTS], u32 x) {
  int to;
  if constexpr (PARTS == 2) {
    if constexpr (UNSIGNED) {
      asm("dp2a.lo.s32.u32 %0, %1, %2, %3;" : "=r"(to) : "r"(w[0]), "r"(x), "r"(sum));
      asm("dp2a.hi.s32.u32 %0, %1, %2, %0;" : "+r"(to) : "r"(w[1]), "r"(x));
    } else {
      asm("dp2a.lo.s32.s32 %0, %1, %2, %3;" : "=r"(to) : "r"(w[0]), "r"(x), "r"(sum));
      asm("dp2a.hi.s32.s32 %0, %1, %2, %0;" : "+r"(to) : "r"(w[1]), "r"(x));
    }
  } else if constexpr (UNSIGNED) {
    asm("dp4a.s32.u32 %0, %1, %2, %3;" : "=r"(to) : "r"(w[0]), "r"(x), "r"(sum));
  } else {
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(to) : "r"(w[0]), "r"(x), "r"(sum));
  }
  return to;
}
