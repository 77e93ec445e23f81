// The stream among ranks that share a model, each with a persistent kernel on a GPU of its own.
//
// A rank's products of output and down give parts of sums. It leaves each part in the memory of all ranks, and the norm
// that reads the stream adds them up, in the order of ranks: all have the same bits. The first rank's parts have the
// stream before in them.
//
// Three sets are enough: a rank writes into another's set of step s + 2 after it has ended step s + 1, for which it had
// the other's words of that step, and so the other has ended step s, at whose beginning it reset that set.
#pragma once
#include "persistent_plan.cuh"

constexpr u32 MOST_LOOKS = 1 << 23;  // each takes most of a microsecond

DEV void leave_at_rank(u32* p, float v) {
  const u32 bits = __float_as_uint(v);
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(bits == NOT_YET ? 0x7fff7fffu : bits) : "memory");
}
// This rank's parts of N words of the stream; the first one's place for rank 0 is `to`.
template <u32 N> DEV void leave_parts(const Params& p, u32* to, const float (&v)[N]) {
  if constexpr (RANKS == 1) {
#pragma unroll
    for (u32 i = 0; i < N; i++) leave(to + i, __float_as_uint(v[i]));
  } else {
    const u32 at = u32(to - p.words) + p.rank * HIDDEN;
#pragma unroll 1
    for (u32 r = 0; r < RANKS; r++) {
      u32* const of_rank = p.of_ranks[r] + at;
#pragma unroll
      for (u32 i = 0; i < N; i++) leave_at_rank(of_rank + i, v[i]);
    }
  }
}
DEV uint4 look_at_part(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Whether a rank's words are not waited for any more, after so many looks.
DEV bool give_up(const Params& p, u32 rank, u32 looks) {
  if (looks % 1024) return false;
  if (*static_cast<volatile u32*>(p.failed)) return true;
  if (looks < MOST_LOOKS) return false;
  *static_cast<volatile u32*>(p.failed) = 1 + rank;
  *static_cast<volatile u32*>(p.silent) = 1 + rank;
  return true;
}
DEV u32 add(u32 a, u32 b) { return __float_as_uint(__uint_as_float(a) + __uint_as_float(b)); }
// N quads of words of the stream, added up; `at(i)` says where those of rank 0 are, null for none.
template <u32 N, class At> DEV void look_for_stream(const Params& p, uint4 (&v)[N], At&& at) {
  if constexpr (RANKS == 1) {
    look_for(v, at);
  } else {
#pragma unroll
    for (u32 rank = 0; rank < RANKS; rank++) {
      uint4 parts[N];
#pragma unroll
      for (u32 i = 0; i < N; i++) parts[i] = at(i) ? look_at_part(at(i) + rank * HIDDEN) : make_uint4(0, 0, 0, 0);
#pragma unroll 1
      for (u32 looks = 1;; looks++) {
        bool all = true;
#pragma unroll
        for (u32 i = 0; i < N; i++)
          if (!there(parts[i])) all = false, parts[i] = look_at_part(at(i) + rank * HIDDEN);
        if (all || give_up(p, rank, looks)) break;
      }
#pragma unroll
      for (u32 i = 0; i < N; i++) {
        const uint4 &own = v[i], &part = parts[i];
        v[i] = rank == 0 ? part
                         : make_uint4(add(own.x, part.x), add(own.y, part.y), add(own.z, part.z), add(own.w, part.w));
      }
    }
  }
}
