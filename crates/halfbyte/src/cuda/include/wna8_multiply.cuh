// Units of wNa8 in registers: the three ways of multiplying codes of 8 bits, and the consumers' place in the ring.
//   multiply_sync    up to 16 tokens: mma.sync m16n8k32
//   multiply_groups  more, scales for groups: wgmma, the integers of each group are promoted
//   multiply_rows    more, one scale a row: wgmma, the integers of a whole piece of k are promoted once
#pragma once
#include "wgmma_int8.cuh"
#include "wna8_layout.cuh"
#include "hopper.cuh"
#include "wna16_epilogue.cuh"

struct Rings {                                   // addresses in shared memory
  u32 x, terms, w, full, empty, full_sums, flag;
  DEV Rings make(u32 base) {
    const u32 b = base + BARRIERS;
    return {base, base + TERMS_AT, base + W_AT, b, b + 8 * STAGES, b + 16 * STAGES, b + 16 * STAGES + 16};
  }
};
struct Turn {                                    // position in the ring
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance() { if (++stage == STAGES) { stage = 0; phase ^= 1; } }
};

constexpr float UNIT = BITS == 4 && !FACTORS ? 0.0625f : 1.f;                           // what a byte's 1 stands for
constexpr int BYTE_OF_ZERO = BITS == 4 ? 16 : 1;                            // what a zero point's 1 is in bytes
// The bytes of rows R and R+8 of one k16 step.
DEV void decode_bytes(const u32* q, u32& r, u32& r8) {
  if constexpr (BITS == 4) {
    const u32 x = __funnelshift_r(q[0], q[0], 2), x8 = q[0] << 2;
    if constexpr (ZERO) { r = x & 0xf0f0f0f0; r8 = x8 & 0xf0f0f0f0; }
    else { r = and_xor(x, 0xf0f0f0f0, 0x80808080); r8 = and_xor(x8, 0xf0f0f0f0, 0x80808080); }
  } else {
    r = __byte_perm(q[0], q[1], 0x6240); r8 = __byte_perm(q[0], q[1], 0x7351);
    if constexpr (!ZERO) { r ^= 0x80808080; r8 ^= 0x80808080; }
  }
}
// Of rows R and R+8 and one group on two levels: factors, and 128 less the zero point times that in each byte.
struct Multiples { u32 f, f8, b, b8; };
// The A fragment of a k32 step.
DEV void decode_fragment(const Codes& q, int k32, [[maybe_unused]] const Multiples& w, u32 (&a)[4]) {
  if constexpr (FACTORS) {                       // bytes from 0 to 255, so that none carries into the next; then less 128
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 v = q[2 * k32 + i];
      a[2 * i] = ((__funnelshift_r(v, v, 6) & 0x0f0f0f0f) * w.f + w.b) ^ 0x80808080;
      a[2 * i + 1] = ((v >> 2 & 0x0f0f0f0f) * w.f8 + w.b8) ^ 0x80808080;
    }
    return;
  }
  decode_bytes(&q[k32 * 2 * WORDS], a[0], a[1]);
  decode_bytes(&q[(k32 * 2 + 1) * WORDS], a[2], a[3]);
}

// Of rows R and R+8 and one group: scales in what a byte stands for, what takes MAGIC off, zero points in bytes, and scaled sums of the
// bytes less the zero points.
struct RowGroup { float s, s8, c, c8; int z, z8; float sum, sum8; };

// Sums of the bytes of rows R and R+8 over a lane's columns; then over all of them.
struct ByteSums {
  int r, r8;
  DEV int add(u32 v, u32 ones, int sum) {
    if constexpr (ZERO) return (int)__dp4a(v, ones, (u32)sum); else return __dp4a((int)v, (int)ones, sum);
  }
  // Ones for the columns of a k16 step that are there: the first `there` of them.
  DEV u32 ones(int there, int lane) {
    if (there >= 16) return 0x01010101;
    const int c = 2 * (lane & 3);
    return (c < there) | (c + 8 < there) << 8 | (c + 1 < there) << 16 | (c + 9 < there) << 24;
  }
  __device__ __forceinline__ void add(const u32 (&a)[4], int there, int lane) {
    const u32 low = ones(there, lane), high = ones(there - 16, lane);
    r = add(a[0], low, add(a[2], high, r)); r8 = add(a[1], low, add(a[3], high, r8));
  }
  DEV int quad(int v) { v += __shfl_xor_sync(0xffffffffu, v, 1); return v + __shfl_xor_sync(0xffffffffu, v, 2); }
  __device__ __forceinline__ ByteSums all() const { return {quad(r), quad(r8)}; }
  // Less the zero points of so many columns, scaled.
  __device__ __forceinline__ void scaled(RowGroup& w, int there) const {
    const ByteSums sums = all();
    w.sum = w.s * (float)(sums.r - w.z * there); w.sum8 = w.s8 * (float)(sums.r8 - w.z8 * there);
  }
};

// Integers of a group are counted from these bits on: up to 2^22 away they are those of the float 1.5 * 2^23 + the integer, and need no
// conversion.  s * MAGIC is exact for scales of 11 bits, so fmaf(f, s, -s * MAGIC) is s times the integer, rounded once.
constexpr float MAGIC = 12582912.f;
constexpr int MAGIC_BITS = 0x4b400000;
DEV float2 load_pair(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
// A term of tokens 2t, 2t + 1 of a block of 8, of a group whose terms begin at `terms`.
DEV float2 load_terms(u32 terms, int term, int block, int t) {
#ifdef HB_CONV
  const u32 at = terms + 16 * (8 * block + 2 * t) + 4 * term;
  return {__uint_as_float(load_shared(at)), __uint_as_float(load_shared(at + 16))};
#else
  return load_pair(terms + 4 * NT * term + 32 * block + 8 * t);
#endif
}
template <int C> DEV void start_integers(int (&acc)[C]) {
#pragma unroll
  for (int i = 0; i < C; i++) acc[i] = MAGIC_BITS;
}
// sum += sx (s (acc - z X)) + ox s S of C / 4 blocks of 8 tokens, and acc starts anew.  terms: address of the first one's terms of x.
template <int C> DEV void promote_integers(float* sum, int (&acc)[C], const RowGroup& w, u32 terms, int lane) {
  const int t = lane & 3;
#pragma unroll
  for (int i = 0; i < C / 4; i++) {
    const float2 sx = load_terms(terms, 0, i, t);
    int total[2] = {0, 0};
    float2 ox = {0.f, 0.f};
    if constexpr (ZERO) {
      const float2 x = load_terms(terms, 1, i, t);
      total[0] = __float_as_int(x.x + MAGIC) - MAGIC_BITS; total[1] = __float_as_int(x.y + MAGIC) - MAGIC_BITS;
    }
    if constexpr (OFFSET) ox = load_terms(terms, 1 + ZERO, i, t);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int v = acc[4 * i + e];
      acc[4 * i + e] = MAGIC_BITS;
      if constexpr (ZERO) v -= (e & 2 ? w.z8 : w.z) * total[e & 1];
      const float scaled = fmaf(__int_as_float(v), e & 2 ? w.s8 : w.s, e & 2 ? w.c8 : w.c);
      sum[4 * i + e] = fmaf(scaled, e & 1 ? sx.y : sx.x, sum[4 * i + e]);
      if constexpr (OFFSET) sum[4 * i + e] = fmaf(e & 1 ? ox.y : ox.x, e & 2 ? w.sum8 : w.sum, sum[4 * i + e]);
    }
  }
}

// Codes of x for wgmma: the upper word of their descriptor, and how far a step of 32 k lies from the first.
#ifdef HB_CONV
constexpr u64 CODES_DESCRIPTOR_HIGH = (32ull << 32) | (2ull << 62);         // 64-byte swizzle: 8 rows in 512 bytes
DEV int codes_step(int k32) { return k32 / 2 * (NT * 64 / 16) + k32 % 2 * 2; }
#else
constexpr u64 CODES_DESCRIPTOR_HIGH = WGMMA_DESCRIPTOR_HIGH;
DEV int codes_step(int k32) { return 2 * k32; }
#endif

struct Consumer {                                // what a consumer warp keeps from piece to piece
  Rings r; int wg, warp, lane; Turn t;
  int columns;                                   // of the weight, from the current unit on
  __device__ __forceinline__ void wait() const { mbarrier_wait(r.full + 8 * t.stage, t.phase); }
  __device__ __forceinline__ u32 atom(int p) const { return r.w + t.stage * STAGE_W + (wg * STRIPS + p) * ATOM; }
  __device__ __forceinline__ u32 terms(int group) const { return r.terms + t.stage * STAGE_TERMS + group * GROUP_TERMS; }
  __device__ __forceinline__ RowGroup rows(int p, int group) const {
    const u32 s = load_shared(atom(p) + SCALES + group * 128 + warp * 32 + (lane >> 2) * 4);
    u32 z = 0;
    if constexpr (ZERO) z = load_shared_u16(atom(p) + ZEROS + group * 64 + warp * 16 + (lane >> 2) * 2);
    const float r = low(s) * UNIT, r8 = high(s) * UNIT;
    return {r, r8, -MAGIC * r, -MAGIC * r8, (int)(z & 255) * BYTE_OF_ZERO, (int)(z >> 8) * BYTE_OF_ZERO, 0.f, 0.f};
  }
  // Of the group that a k32 step of a unit lies in.
  __device__ __forceinline__ Multiples multiples(int p, int k32) const {
    if constexpr (!FACTORS) return {};
    const u32 s = load_shared(atom(p) + SCALES + (k32 * GROUPS / 4) * 128 + warp * 32 + (lane >> 2) * 4);
    return {s & 255, s >> 16 & 255, __byte_perm(s, 0, 0x1111), __byte_perm(s, 0, 0x3333)};
  }
  // Columns of group i of a unit that the weight has.
  __device__ __forceinline__ int there(int i) const { return min(max(columns - i * GROUP, 0), GROUP); }
  __device__ __forceinline__ void advance() { t.advance(); columns -= 128; }
  // The descriptor of the codes of x; the shuffle makes it uniform.
  __device__ __forceinline__ u64 descriptor() const {
    return CODES_DESCRIPTOR_HIGH | __shfl_sync(0xffffffffu, wgmma_descriptor_low(r.x) + t.stage * (BOX / 16), 0);
  }
  // Frees a stage that this warp is done with.
  __device__ __forceinline__ void release(u32 bar) const { __syncwarp(); if (lane == 0) mbarrier_arrive(bar); }
};

// One scale a row: integers of a piece of k to sums.  first: whether it begins at column 0;  token: of the tile;  columns: of the piece.
template <int C> DEV void promote_rows(float* sum, const int (&acc)[C], ByteSums bytes, const Arguments& g, const Consumer& c, int strip, int token, int columns, bool first) {
  int z = 0, z8 = 0;
  if constexpr (ZERO) {
    const u32 both = __ldg((const u16*)(g.rows_of_scales + (u64)strip * ROW_BLOCK + 128) + c.warp * 8 + (c.lane >> 2));
    z = (int)(both & 255) * BYTE_OF_ZERO; z8 = (int)(both >> 8) * BYTE_OF_ZERO;
  }
  float rows = 0.f, rows8 = 0.f;
  if constexpr (OFFSET) {
    const ByteSums all = bytes.all();
    rows = (float)(all.r - z * columns); rows8 = (float)(all.r8 - z8 * columns);
  }
#pragma unroll
  for (int i = 0; i < C / 4; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int m = token + 8 * i + 2 * (c.lane & 3) + e, at = m < g.m ? m : 0;
      const float sx = load_l2(g.terms + at) * UNIT;
      int v = acc[4 * i + e], v8 = acc[4 * i + 2 + e];
      if constexpr (ZERO) if (first) {
        const int x = (int)load_l2(g.terms + g.m_pitch + at);
        v -= z * x; v8 -= z8 * x;
      }
      sum[4 * i + e] = (float)v * sx; sum[4 * i + 2 + e] = (float)v8 * sx;
      if constexpr (OFFSET) {
        const float ox = load_l2(g.terms + (u64)(1 + ZERO) * g.m_pitch + at) * UNIT;
        sum[4 * i + e] = fmaf(ox, rows, sum[4 * i + e]); sum[4 * i + 2 + e] = fmaf(ox, rows8, sum[4 * i + 2 + e]);
      }
    }
}

// `left` units with mma.sync.
DEV void multiply_sync(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, bool first, const Arguments& g, const int (&strips)[STRIPS], int token) {
  constexpr int K32 = SUM_GROUP ? SUM_GROUP / 32 : 4;    // steps of a group
  const u32 row = c.r.x + (c.lane & 7) * 128 + (((c.lane >> 3) ^ (c.lane & 7)) << 4);   // this lane's row in a swizzled box
  const int columns = min(left * 128, c.columns);
  int acc[STRIPS][NT / 2];
  ByteSums bytes[STRIPS];
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    bytes[p] = {0, 0};
#pragma unroll
    for (int i = 0; i < NT / 2; i++) { acc[p][i] = SUM_GROUP ? MAGIC_BITS : 0; sum[p][i] = 0.f; }
  }
#pragma unroll 1
  for (; left > 0; left--, c.advance()) {
    c.wait();
    Codes q[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) load_codes(q[p], c.atom(p), c.warp, c.lane);
    RowGroup rows[STRIPS][SUM_GROUPS + 1];
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < SUM_GROUPS; i++) rows[p][i] = c.rows(p, i);
    u32 b[NT / 8][2][4];                         // 64 k each: columns 16 i .. 16 i + 15 in register i
#pragma unroll
    for (int n = 0; n < NT / 8; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) load_matrices(b[n][h], (row + c.t.stage * BOX + n * 1024) ^ (h << 6));
#pragma unroll
    for (int k32 = 0; k32 < 4; k32++) {
      const int group = SUM_GROUP ? k32 / K32 : 0;
      const bool opens = SUM_GROUP != 0 && k32 % K32 == 0, closes = SUM_GROUP != 0 && k32 % K32 == K32 - 1;
#pragma unroll
      for (int p = 0; p < STRIPS; p++) {
        if (opens) bytes[p] = {0, 0};
        u32 a[4];
        decode_fragment(q[p], k32, c.multiples(p, k32), a);
        if constexpr (OFFSET) bytes[p].add(a, c.columns - 32 * k32, c.lane);
#pragma unroll
        for (int n = 0; n < NT / 8; n++) mma_sync_int8<ZERO>(acc[p] + 4 * n, a, b[n][k32 / 2][k32 % 2 * 2], b[n][k32 / 2][k32 % 2 * 2 + 1]);
        if (closes) {
          RowGroup w = rows[p][group];
          if constexpr (OFFSET) bytes[p].scaled(w, c.there(group));
          promote_integers(sum[p], acc[p], w, c.terms(group), c.lane);
        }
      }
    }
    loads_before_copies();
    c.release(c.r.empty + 8 * c.t.stage);
  }
  if constexpr (SUM_GROUP == 0)
#pragma unroll
    for (int p = 0; p < STRIPS; p++) promote_rows(sum[p], acc[p], bytes[p], g, c, strips[p], token, columns, first);
}

// Products of groups with wgmma: while a group is in the tensor cores, the fragments of the next one are converted.
struct Groups { int acc[NT / 2]; u32 a[2][GROUP ? GROUP / 32 : 1][4]; RowGroup before; u32 last, terms; };
// Promotes the group before, whose parity is P ^ 1, once it is done.
template <int P> DEV void finish_group(const Consumer& c, Groups& s, float (&sum)[NT / 2], bool any) {
  wgmma_wait<0>();
  pin(s.acc); pin(s.a[P ^ 1]);
  if (any) promote_integers(sum, s.acc, s.before, s.terms, c.lane);
}
// Group I of a unit; P: its parity.
template <int P, int I> DEV void multiply_group(const Consumer& c, Groups& s, float (&sum)[NT / 2], const Codes& q, u64 descriptor) {
  constexpr int K32 = GROUP ? GROUP / 32 : 1;
  [[maybe_unused]] ByteSums bytes = {0, 0};
#pragma unroll
  for (int j = 0; j < K32; j++) {
    decode_fragment(q, I * K32 + j, {}, s.a[P][j]);
    if constexpr (OFFSET) bytes.add(s.a[P][j], c.columns - 32 * (I * K32 + j), c.lane);
  }
  pin(s.a[P]);
  RowGroup w = c.rows(0, I);
  if constexpr (OFFSET) bytes.scaled(w, c.there(I));
  finish_group<P>(c, s, sum, I > 0 || s.last != 0);
  if (I == 0 && s.last != 0) c.release(s.last);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < K32; j++) WgmmaInt8<NT, ZERO>::run(s.acc, s.a[P][j], descriptor + codes_step(I * K32 + j), 1);
  wgmma_commit();
  s.before = w; s.terms = c.terms(I);
}
// One unit, whose first group has parity P.
template <int P> DEV void multiply_unit(Consumer& c, Groups& s, float (&sum)[NT / 2]) {
  c.wait();
  const u64 descriptor = c.descriptor();
  Codes q;
  load_codes(q, c.atom(0), c.warp, c.lane);
  multiply_group<P, 0>(c, s, sum, q, descriptor);
  if constexpr (GROUPS >= 2) multiply_group<P ^ 1, 1>(c, s, sum, q, descriptor);
  if constexpr (GROUPS == 4) { multiply_group<P, 2>(c, s, sum, q, descriptor); multiply_group<P ^ 1, 3>(c, s, sum, q, descriptor); }
  s.last = c.r.empty + 8 * c.t.stage;
  c.advance();
}
DEV void multiply_groups(Consumer& c, float (&sum)[STRIPS][NT / 2], int left) {
  static_assert(STRIPS == 1 || SUM_GROUP == 0 || SYNC, "integers of one strip");
  Groups s;
  s.last = 0; s.terms = 0; s.before = {};
#pragma unroll
  for (int i = 0; i < NT / 2; i++) sum[0][i] = 0.f;
  start_integers(s.acc);
#pragma unroll 1
  while (true) {
    multiply_unit<0>(c, s, sum[0]);
    if (--left == 0) { finish_group<GROUPS % 2>(c, s, sum[0], true); break; }
    multiply_unit<GROUPS % 2>(c, s, sum[0]);
    if (--left == 0) { finish_group<0>(c, s, sum[0], true); break; }
  }
  c.release(s.last);
}

// `left` units with one scale a row.  Steps of 64 k alternate between two sets of fragments.
DEV void multiply_rows(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, bool first, const Arguments& g, const int (&strips)[STRIPS], int token) {
  int acc[STRIPS][NT / 2];
  u32 a[2][2][4];
  u32 last = 0;
  int keep = 0;
  ByteSums bytes[STRIPS];
  const int columns = min(left * 128, c.columns);
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    bytes[p] = {0, 0};
#pragma unroll
    for (int i = 0; i < NT / 2; i++) acc[p][i] = 0;
  }
#pragma unroll 1
  do {
    c.wait();
    const u64 descriptor = c.descriptor();
    Codes q[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) load_codes(q[p], c.atom(p), c.warp, c.lane);
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) {
      const int p = i % STRIPS, half = i / STRIPS;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        decode_fragment(q[p], 2 * half + j, c.multiples(p, 2 * half + j), a[i & 1][j]);
        if constexpr (OFFSET) bytes[p].add(a[i & 1][j], c.columns - 32 * (2 * half + j), c.lane);
      }
      pin(a[i & 1]);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 2; j++) WgmmaInt8<NT, ZERO>::run(acc[p], a[i & 1][j], descriptor + 2 * (2 * half + j), half + j ? 1 : keep);
      wgmma_commit();
      wgmma_wait<1>();                           // the step before
      pin(a[(i & 1) ^ 1]);
      if (i == 0 && last != 0) c.release(last);
    }
    keep = 1;
    last = c.r.empty + 8 * c.t.stage;
    c.advance();
  } while (--left > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) pin(acc[p]);
  pin(a[1]);
  c.release(last);
#pragma unroll
  for (int p = 0; p < STRIPS; p++) promote_rows(sum[p], acc[p], bytes[p], g, c, strips[p], token, columns, first);
}
