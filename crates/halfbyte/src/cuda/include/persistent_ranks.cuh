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
#include "warp.cuh"

constexpr u32 MOST_LOOKS = 1 << 23;  // each takes most of a microsecond

// The bits of a word that is there.
DEV u32 as_word(float v) {
  const u32 bits = __float_as_uint(v);
  return bits == NOT_YET ? 0x7fff7fffu : bits;
}
DEV void leave_at(u32* p, float v) {
  if (RANKS == 1)
    leave(p, __float_as_uint(v));
  else
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(as_word(v)) : "memory");
}
DEV void leave_at(u32* p, float2 v) {
  const u32 x = as_word(v.x), y = as_word(v.y);
  if (RANKS == 1)
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
  else
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}
// This rank's part of a word of the stream, or of two that lie together; the place for rank 0 is `to`, parts of ranks
// lie `apart`.
template <class Word> DEV void leave_part(const Params& p, u32* to, Word v, u32 apart = HIDDEN) {
  if constexpr (RANKS == 1) {
    leave_at(to, v);
  } else {
    const u32 at = u32(to - p.words) + p.rank * apart;
#pragma unroll 1
    for (u32 r = 0; r < RANKS; r++) leave_at(p.of_ranks[r] + at, v);
  }
}
// What a warp's rows of a stream add up to, of this rank; `to`: where sums of the stream begin.
DEV void leave_sum_of_rows(const Params& p, u32* to, u32 warp, float of_lane) {
  const float sum = warp_sum(of_lane);
  if ((threadIdx.x & 31) == 0) leave_part(p, to + block_index() * SUMS_OF_STREAM + warp, sum, SUMS_OF_RANK);
}
DEV u32 look_at_word(const u32* p) {
  if (RANKS == 1) return look(p);
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV uint4 look_at_part(const u32* p) {
  if (RANKS == 1) return look_at_four(p);
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV uint2 look_at_pair(const u32* p) {
  uint2 v;
  if (RANKS == 1)
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  else
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
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
DEV uint4 add(const uint4& a, const uint4& b) {
  auto add = [](u32 a, u32 b) { return __float_as_uint(__uint_as_float(a) + __uint_as_float(b)); };
  return make_uint4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}
// Waits for a rank's parts of N quads of words of the stream, which have been asked for; `at(i)` says where they are.
template <u32 N, class At> DEV void wait_for_part(const Params& p, u32 rank, uint4 (&part)[N], At&& at) {
#pragma unroll 1
  for (u32 looks = 1;; looks++) {
    bool all = true;
#pragma unroll
    for (u32 i = 0; i < N; i++)
      if (!there(part[i])) all = false, part[i] = look_at_part(at(i));
    if (all || RANKS > 1 && give_up(p, rank, looks)) break;
  }
}
template <u32 N> DEV void add_part(uint4 (&sum)[N], const uint4 (&part)[N]) {
#pragma unroll
  for (u32 i = 0; i < N; i++) sum[i] = add(sum[i], part[i]);
}
// N quads of words of the stream, added up in the order of ranks; `at(i)` says where those of rank 0 are, null for
// none. Two ranks' are on their way at a time.
template <u32 N, class At> DEV void look_for_stream(const Params& p, uint4 (&sum)[N], At&& at) {
  uint4 part[N];
  auto ask = [&](u32 rank, uint4(&to)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++) to[i] = at(i) ? look_at_part(at(i) + rank * HIDDEN) : make_uint4(0, 0, 0, 0);
  };
  ask(0, sum);
  if (RANKS > 1) ask(1, part);
  wait_for_part(p, 0, sum, at);
#pragma unroll
  for (u32 rank = 1; rank < RANKS; rank++) {
    wait_for_part(p, rank, part, [&](u32 i) { return at(i) + rank * HIDDEN; });
    add_part(sum, part);
    if (rank + 1 < RANKS) ask(rank + 1, part);
  }
}
// What a thread has of the sums of a stream, of all ranks, added up.
DEV float look_for_sums(const Params& p, const u32* sums) {
  constexpr u32 ALL = RANKS * SUMS_OF_RANK, LOADS = (ALL + THREADS - 1) / THREADS;
  u32 v[LOADS];
  auto at = [&](u32 i) { return thread_index() + i * THREADS; };
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) v[i] = at(i) < ALL ? look_at_word(sums + at(i)) : 0;
#pragma unroll 1
  for (u32 looks = 1;; looks++) {
    bool all = true;
    u32 silent = 0;
#pragma unroll
    for (u32 i = 0; i < LOADS; i++)
      if (!there(v[i])) all = false, silent = at(i) / SUMS_OF_RANK, v[i] = look_at_word(sums + at(i));
    if (all || RANKS > 1 && give_up(p, silent, looks)) break;
  }
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) sum += __uint_as_float(v[i]);
  return sum;
}
// Two words of the stream that lie together.
DEV float2 pair_of_stream(const Params& p, const u32* at) {
  float2 sum = make_float2(0, 0);
#pragma unroll
  for (u32 rank = 0; rank < RANKS; rank++) {
    uint2 part;
#pragma unroll 1
    for (u32 looks = 1;; looks++) {
      part = look_at_pair(at + rank * HIDDEN);
      if (there(part.x) && there(part.y) || RANKS > 1 && give_up(p, rank, looks)) break;
    }
    const float2 v = make_float2(__uint_as_float(part.x), __uint_as_float(part.y));
    sum = rank == 0 ? v : make_float2(sum.x + v.x, sum.y + v.y);
  }
  return sum;
}
