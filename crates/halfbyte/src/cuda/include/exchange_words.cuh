// Words that the blocks of a persistent kernel leave for each other.
//
// No fence is used: a release waits for the bulk copies in flight, and would stop a stream of weights.
// Each word is written once a step, in a place of its own: a place for every layer. Before that the place holds
// NOT_YET, which no result is. Readers take words by relaxed loads, and look again while they are NOT_YET. So a word
// says for itself that it is there, and nothing rests on the order in which words of different places are seen.
// There are two sets of places, used in turns by steps. A step resets the set of the step before, which has ended.
// Ranks on other GPUs write into places too, and may be a step ahead: among them there are three sets.
#pragma once
#include "ampere.cuh"

constexpr u32 NOT_YET = 0xffffffffu;

DEV u32 look(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV uint4 look_at_four(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV bool there(u32 v) { return v != NOT_YET; }
DEV bool there(const uint4& v) { return v.x != NOT_YET && v.y != NOT_YET && v.z != NOT_YET && v.w != NOT_YET; }
DEV void look(u32& v, const u32* p) { v = look(p); }
DEV void look(uint4& v, const u32* p) { v = look_at_four(p); }
// N words, or quads of them, all asked for at once, then again all that are not there; `at(i)` says where, null for
// none.
template <u32 N, class Words, class At> DEV void look_for(Words (&v)[N], At&& at) {
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    v[i] = Words{};
    if (at(i)) look(v[i], at(i));
  }
  bool all;
#pragma unroll 1
  do {
    all = true;
#pragma unroll
    for (u32 i = 0; i < N; i++)
      if (!there(v[i])) all = false, look(v[i], at(i));
  } while (!all);
}
DEV void leave(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v == NOT_YET ? 0x7fff7fffu : v) : "memory");
}
