// From bytes of weights and codes of x to sums: what the wNa8 GEMMs have in common, on every processor.
//   bytes of a fragment, and their sums over columns
//   promote_block    integers of a group, with its scale: sum += sx (s (acc - z X) + o X) + ox (s S + o length)
//   promote_rows     integers of a piece of k, where a row has one scale
// After the header of a kernel's configuration.
#pragma once
#include "epilogue.cuh"

// What a byte's 1 stands for, of rows R and R+8: codes of 4 bits are the upper nibbles of bytes, but those of R that
// count from 0.
constexpr float UNIT = FIELD == 4 && !FACTORS && !FROM_ZERO ? 0.0625f : 1.f,
                UNIT_8 = FIELD == 4 && !FACTORS ? 0.0625f : 1.f;
constexpr int ZERO_8 = FIELD == 4 ? 16 : 1;  // what a zero point's 1 is in bytes of R+8
static_assert(FIELD == 4 || FROM_ZERO || MIDDLE == 128 || BITS == 6, "bytes around 128");
// The bytes of rows R and R+8 of one k16 step.
template <int STEPS> DEV void decode_bytes(const u32* words, int step, u32& r, u32& r8) {
  u32 q[FIELD / 4];
  words_of_step<STEPS, true>(words, step, q);
  if constexpr (FIELD == 4) {
    if constexpr (FROM_ZERO) {
      r = q[0] & 0x0f0f0f0f;
      r8 = q[0] & 0xf0f0f0f0;
    } else {
      r = and_xor(q[0] << 4, 0xf0f0f0f0, 0x80808080);
      r8 = and_xor(q[0], 0xf0f0f0f0, 0x80808080);
    }
  } else {
    r = __byte_perm(q[0], q[1], 0x6240);
    r8 = __byte_perm(q[0], q[1], 0x7351);
    if constexpr (!FROM_ZERO) {
      r ^= 0x80808080;
      r8 ^= 0x80808080;
    }
  }
}
// Of rows R and R+8 and one group on two levels: factors, and 128 less the zero point times that in each byte.
struct Factors {
  u32 f, f8, b, b8;
};
// From a word of an atom's parameters.
DEV Factors factors_of(u32 word) {
  return {word & 255, word >> 16 & 255, __byte_perm(word, 0, 0x1111), __byte_perm(word, 0, 0x3333)};
}
// The A fragment of a k32 step.
DEV void decode_fragment(const Codes& q, int k32, [[maybe_unused]] const Factors& w, u32 (&a)[4]) {
  if constexpr (FACTORS) {  // bytes from 0 to 255, so that none carries into the next; then less 128
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 v = q[2 * k32 + i];
      a[2 * i] = ((v & 0x0f0f0f0f) * w.f + w.b) ^ 0x80808080;
      a[2 * i + 1] = ((v >> 4 & 0x0f0f0f0f) * w.f8 + w.b8) ^ 0x80808080;
    }
    return;
  }
  decode_bytes<8>(q, 2 * k32, a[0], a[1]);
  decode_bytes<8>(q, 2 * k32 + 1, a[2], a[3]);
}

// Of rows R and R+8 and one group: scales in what a byte stands for, what takes MAGIC off, zero points in bytes, scaled
// sums of the bytes less the zero points, and offsets.
struct RowGroup {
  float s, s8, c, c8;
  int z, z8;
  float sum, sum8, o, o8;
};

// Sums of the bytes of rows R and R+8 over a lane's columns; then over all of them.
struct ByteSums {
  int r, r8;
  DEV int add(u32 v, u32 ones, int sum) {
    if constexpr (FROM_ZERO)
      return (int)__dp4a(v, ones, (u32)sum);
    else
      return __dp4a((int)v, (int)ones, sum);
  }
  // Ones for the columns of a k16 step that are there: the first `there` of them.
  DEV u32 ones(int there, int lane) {
    if (there >= 16) return 0x01010101;
    const int c = 2 * (lane & 3);
    return (c < there) | (c + 8 < there) << 8 | (c + 1 < there) << 16 | (c + 9 < there) << 24;
  }
  // Of a k16 step, and of both of a k32 step.
  __device__ __forceinline__ void add(u32 v, u32 v8, int there, int lane) {
    const u32 those = ones(there, lane);
    r = add(v, those, r);
    r8 = add(v8, those, r8);
  }
  __device__ __forceinline__ void add(const u32 (&a)[4], int there, int lane) {
    add(a[2], a[3], there - 16, lane);
    add(a[0], a[1], there, lane);
  }
  DEV int quad(int v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
  }
  __device__ __forceinline__ ByteSums all() const { return {quad(r), quad(r8)}; }
  // Less the zero points of so many columns, scaled; with their offsets.
  __device__ __forceinline__ void scaled(RowGroup& w, int there) const {
    const ByteSums sums = all();
    w.sum = w.s * (float)(sums.r - w.z * there);
    w.sum8 = w.s8 * (float)(sums.r8 - w.z8 * there);
    if constexpr (W_OFFSET) {
      w.sum = fmaf(w.o, (float)there, w.sum);
      w.sum8 = fmaf(w.o8, (float)there, w.sum8);
    }
  }
};

// Integers of a group are counted from these bits on: up to 2^22 away they are those of the float 1.5 * 2^23 + the
// integer, and need no conversion.  s * MAGIC is exact for scales of 11 bits, so fmaf(f, s, -s * MAGIC) is s times the
// integer, rounded once; for scales in f32 MAGIC comes off first.
constexpr float MAGIC = 12582912.f;
constexpr int MAGIC_BITS = 0x4b400000;
// Of rows R and R+8, from their scales, and zero points or offsets.
DEV RowGroup row_group(RowPair s, u32 z, RowPair o) {
  const float r = first_row(s) * UNIT, r8 = second_row(s) * UNIT_8;
  RowGroup w = {r, r8, -MAGIC * r, -MAGIC * r8, (int)(z & 255), (int)(z >> 8) * ZERO_8, 0.f, 0.f, 0.f, 0.f};
  if constexpr (W_OFFSET) {
    w.o = first_row(o);
    w.o8 = second_row(o);
  }
  return w;
}
// `params`: where those of a unit begin; `scales` and `zeros`: those of a group, where they are no multiples.
DEV RowGroup load_row_group([[maybe_unused]] u32 params, [[maybe_unused]] int group, [[maybe_unused]] int pair,
                            [[maybe_unused]] u32 scales, [[maybe_unused]] u32 zeros) {
  if constexpr (MULTIPLES) {
    const Multiples all = Multiples::load(params, pair);
    const u32 word = load_shared(params + words_of_pair(pair) + word_of_group(group) * 4);
    return row_group(scale_pair(word, all.halves(), group), 0,
                     W_OFFSET ? offset_pair(word, all.of_offsets, group) : RowPair{});
  } else {
    return row_group(load_row_pair(scales), ZERO ? load_shared_u16(zeros) : 0,
                     W_OFFSET ? load_row_pair(zeros) : RowPair{});
  }
}
DEV float2 load_pair(u32 a) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a));
  return v;
}
// A term of tokens 2t, 2t + 1 of a block of 8, of a group whose terms begin at `terms`.
DEV float2 load_terms(u32 terms, int term, int block, int t) {
  if constexpr (TERMS_BY_TOKEN) {
    const u32 at = terms + 16 * (8 * block + 2 * t) + 4 * term;
    return {__uint_as_float(load_shared(at)), __uint_as_float(load_shared(at + 16))};
  } else {
    return load_pair(terms + 4 * NT * term + 32 * block + 8 * t);
  }
}
template <int C> DEV void start_integers(int (&acc)[C]) {
#pragma unroll
  for (int i = 0; i < C; i++) acc[i] = MAGIC_BITS;
}
// What x has for two tokens of a lane and a group: scales, offsets, sums of codes; those scaled.
struct TokenTerms {
  float2 sx, ox, sums;
  int total, total_1;
};
DEV TokenTerms token_terms(u32 terms, int block, int t) {
  TokenTerms x;
  x.sx = load_terms(terms, 0, block, t);
  x.ox = x.sums = {0.f, 0.f};
  x.total = x.total_1 = 0;
  if constexpr (ZERO) {
    const float2 total = load_terms(terms, 1, block, t);
    x.total = __float_as_int(total.x + MAGIC) - MAGIC_BITS;
    x.total_1 = __float_as_int(total.y + MAGIC) - MAGIC_BITS;
  }
  if constexpr (W_OFFSET) {
    const float2 total = load_terms(terms, 1, block, t);
    x.sums = {x.sx.x * total.x, x.sx.y * total.y};
  }
  if constexpr (OFFSET) x.ox = load_terms(terms, 1 + FROM_ZERO, block, t);
  return x;
}
// Of 16 rows and 8 tokens, block i of a lane's integers, which start anew.
template <int C> DEV void promote_block(float* sum, int (&acc)[C], int i, const RowGroup& w, const TokenTerms& x) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    int v = acc[4 * i + e];
    acc[4 * i + e] = MAGIC_BITS;
    if constexpr (ZERO) v -= (e & 2 ? w.z8 : w.z) * (e & 1 ? x.total_1 : x.total);
    const float scaled = SCALE_F32 ? (__int_as_float(v) - MAGIC) * (e & 2 ? w.s8 : w.s)
                                   : fmaf(__int_as_float(v), e & 2 ? w.s8 : w.s, e & 2 ? w.c8 : w.c);
    sum[e] = fmaf(scaled, e & 1 ? x.sx.y : x.sx.x, sum[e]);
    if constexpr (W_OFFSET) sum[e] = fmaf(e & 1 ? x.sums.y : x.sums.x, e & 2 ? w.o8 : w.o, sum[e]);
    if constexpr (OFFSET) sum[e] = fmaf(e & 1 ? x.ox.y : x.ox.x, e & 2 ? w.sum8 : w.sum, sum[e]);
  }
}
// The same of all blocks.  terms: address of the first one's terms of x.
template <int C> DEV void promote_integers(float* sum, int (&acc)[C], const RowGroup& w, u32 terms, int lane) {
  const int t = lane & 3;
#pragma unroll
  for (int i = 0; i < C / 4; i++) promote_block(sum + 4 * i, acc, i, w, token_terms(terms, i, t));
}

// One scale a row: integers of a piece of k to sums.  first: whether it begins at column 0;  at: the tile;
// columns: of the piece.
template <int C>
DEV void promote_rows(float* sum, const int (&acc)[C], ByteSums bytes, const Given& g, const Place& at, int warp,
                      int lane, int strip, int columns, bool first) {
  int z = 0, z8 = 0;
  if constexpr (ZERO) {
    const u32 both = __ldg((const u16*)(rows_of_scales(g, at) + (u64)strip * ROW_BLOCK + 128) + warp * 8 + (lane >> 2));
    z = (int)(both & 255);
    z8 = (int)(both >> 8) * ZERO_8;
  }
  float rows = 0.f, rows8 = 0.f;
  if constexpr (OFFSET) {
    const ByteSums all = bytes.all();
    rows = (float)(all.r - z * columns);
    rows8 = (float)(all.r8 - z8 * columns);
  }
#pragma unroll
  for (int i = 0; i < C / 4; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int m = at.x + 8 * i + 2 * (lane & 3) + e, row = m < g.m ? m : 0;
      const float sx = load_l2(g.terms + row);
      int v = acc[4 * i + e], v8 = acc[4 * i + 2 + e];
      if constexpr (ZERO)
        if (first) {
          const int x = (int)load_l2(g.terms + g.m_pitch + row);
          v -= z * x;
          v8 -= z8 * x;
        }
      sum[4 * i + e] = (float)v * (sx * UNIT);
      sum[4 * i + 2 + e] = (float)v8 * (sx * UNIT_8);
      if constexpr (OFFSET) {
        const float ox = load_l2(g.terms + (u64)(1 + ZERO) * g.m_pitch + row);
        sum[4 * i + e] = fmaf(ox * UNIT, rows, sum[4 * i + e]);
        sum[4 * i + 2 + e] = fmaf(ox * UNIT_8, rows8, sum[4 * i + 2 + e]);
      }
    }
}
