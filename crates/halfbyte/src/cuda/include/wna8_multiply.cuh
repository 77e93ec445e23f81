// Main loops of the wNa8 GEMM on Hopper: the three ways of multiplying codes of 8 bits, and the consumers' place in the
// ring.
//   multiply_sync    up to 16 tokens: mma.sync m16n8k32
//   multiply_groups  more, scales for groups: wgmma, the integers of each group are promoted; _of_strips: two strips
//   multiply_rows    more, one scale a row: wgmma, the integers of a whole piece of k are promoted once
#pragma once
#include "wgmma_int8.cuh"
#include "wna8_rows.cuh"
#include "wna8_promote.cuh"

struct Rings {  // addresses in shared memory
  u32 x, terms, w, full, empty, full_sums, flag;
  DEV Rings make(u32 base) {
    const u32 b = base + BARRIERS;
    return {base, base + TERMS_AT, base + W_AT, b, b + 8 * STAGES, b + 16 * STAGES, b + 16 * STAGES + 16};
  }
};
struct Turn {  // position in the ring
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Consumer {  // what a consumer warp keeps from piece to piece
  Rings r;
  int wg, warp, lane;
  Turn t;
  int columns;  // of the weight, from the current unit on
  __device__ __forceinline__ void wait() const { mbarrier_wait(r.full + 8 * t.stage, t.phase); }
  __device__ __forceinline__ u32 atom(int p) const { return r.w + t.stage * STAGE_W + (wg * STRIPS + p) * ATOM; }
  __device__ __forceinline__ u32 codes(int p) const { return atom(p) + warp * UNIT_CODES; }
  // From where codes lie: another base spills.
  __device__ __forceinline__ u32 params(int p) const { return codes(p) + PARAMS - warp * (UNIT_CODES - UNIT_PARAMS); }
  __device__ __forceinline__ u32 terms(int group) const {
    return r.terms + t.stage * STAGE_TERMS + group * GROUP_TERMS;
  }
  __device__ __forceinline__ RowGroup rows(int p, int group) const {
    const u32 s = group * GROUP_SCALES + (lane >> 2) * (GROUP_SCALES / 8);
    const u32 z = ZEROS + group * GROUP_ZEROS + (lane >> 2) * (GROUP_ZEROS / 8);
    return load_row_group(params(p), group, lane >> 2, params(p) + s, params(p) + z);
  }
  // Of the group that a k32 step of a unit lies in.
  __device__ __forceinline__ Factors factors(int p, int k32) const {
    if constexpr (!FACTORS) return {};
    return factors_of(load_shared(params(p) + (k32 * GROUPS / 4) * GROUP_SCALES + (lane >> 2) * 4));
  }
  // Columns of group i of a unit that the weight has.
  __device__ __forceinline__ int there(int i) const { return min(max(columns - i * GROUP, 0), GROUP); }
  __device__ __forceinline__ void advance() {
    t.advance();
    columns -= 128;
  }
  // The descriptor of the codes of x; the shuffle makes it uniform.
  __device__ __forceinline__ u64 descriptor() const {
    return RowsOfX::DESCRIPTOR_HIGH | __shfl_sync(0xffffffffu, wgmma_descriptor_low(r.x) + t.stage * (BOX / 16), 0);
  }
  // Frees a stage that this warp is done with.
  __device__ __forceinline__ void release(u32 bar) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(bar);
  }
};

// `left` units with mma.sync.
DEV void multiply_sync(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, bool first, const Given& g,
                       const int (&strips)[STRIPS], const Place& at) {
  constexpr int K32 = SUM_GROUP ? SUM_GROUP / 32 : 4;  // steps of a group
  const u32 row =
      c.r.x + (c.lane & 7) * 128 + (((c.lane >> 3) ^ (c.lane & 7)) << 4);  // this lane's row in a swizzled box
  const int columns = min(left * 128, c.columns);
  int acc[STRIPS][NT / 2];
  ByteSums bytes[STRIPS];
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    bytes[p] = {0, 0};
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
      acc[p][i] = SUM_GROUP ? MAGIC_BITS : 0;
      sum[p][i] = 0.f;
    }
  }
#pragma unroll 1
  for (; left > 0; left--, c.advance()) {
    c.wait();
    Codes q[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) load_codes(q[p], c.codes(p), c.lane);
    RowGroup rows[STRIPS][SUM_GROUPS + 1];
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < SUM_GROUPS; i++) rows[p][i] = c.rows(p, i);
    u32 b[NT / 8][2][4];  // 64 k each: columns 16 i .. 16 i + 15 in register i
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
        decode_fragment(q[p], k32, c.factors(p, k32), a);
        if constexpr (OFFSET) bytes[p].add(a, c.columns - 32 * k32, c.lane);
#pragma unroll
        for (int n = 0; n < NT / 8; n++)
          mma_sync_int8<FROM_ZERO>(acc[p] + 4 * n, a, b[n][k32 / 2][k32 % 2 * 2], b[n][k32 / 2][k32 % 2 * 2 + 1]);
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
    for (int p = 0; p < STRIPS; p++)
      promote_rows(sum[p], acc[p], bytes[p], g, at, c.warp, c.lane, strips[p], columns, first);
}

// Products of groups with wgmma: while a group is in the tensor cores, the fragments of the next one are converted.
struct Groups {
  int acc[NT / 2];
  u32 a[2][GROUP ? GROUP / 32 : 1][4];
  RowGroup before;
  u32 last, terms;
};
// Promotes the group before, whose parity is P ^ 1, once it is done.
template <int P> DEV void finish_group(const Consumer& c, Groups& s, float (&sum)[NT / 2], bool any) {
  wgmma_wait<0>();
  pin(s.acc);
  pin(s.a[P ^ 1]);
  if (any) promote_integers(sum, s.acc, s.before, s.terms, c.lane);
}
// Group I of a unit; P: its parity.
template <int P, int I>
DEV void multiply_group(const Consumer& c, Groups& s, float (&sum)[NT / 2], const Codes& q, u64 descriptor) {
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
  for (int j = 0; j < K32; j++)
    WgmmaInt8<NT, FROM_ZERO>::run(s.acc, s.a[P][j], descriptor + RowsOfX::descriptor_step(I * K32 + j), 1);
  wgmma_commit();
  s.before = w;
  s.terms = c.terms(I);
}
// One unit, whose first group has parity P.
template <int P> DEV void multiply_unit(Consumer& c, Groups& s, float (&sum)[NT / 2]) {
  c.wait();
  const u64 descriptor = c.descriptor();
  Codes q;
  load_codes(q, c.codes(0), c.lane);
  multiply_group<P, 0>(c, s, sum, q, descriptor);
  if constexpr (GROUPS >= 2) multiply_group<P ^ 1, 1>(c, s, sum, q, descriptor);
  if constexpr (GROUPS == 4) {
    multiply_group<P, 2>(c, s, sum, q, descriptor);
    multiply_group<P ^ 1, 3>(c, s, sum, q, descriptor);
  }
  s.last = c.r.empty + 8 * c.t.stage;
  c.advance();
}
DEV void multiply_groups(Consumer& c, float (&sum)[STRIPS][NT / 2], int left) {
  Groups s;
  s.last = 0;
  s.terms = 0;
  s.before = {};
#pragma unroll
  for (int i = 0; i < NT / 2; i++) sum[0][i] = 0.f;
  start_integers(s.acc);
#pragma unroll 1
  while (true) {
    multiply_unit<0>(c, s, sum[0]);
    if (--left == 0) {
      finish_group<GROUPS % 2>(c, s, sum[0], true);
      break;
    }
    multiply_unit<GROUPS % 2>(c, s, sum[0]);
    if (--left == 0) {
      finish_group<0>(c, s, sum[0], true);
      break;
    }
  }
  c.release(s.last);
}

// The same for two strips, which share the scales of tokens: the fragments of the next group are converted behind the
// promotion of this one.
DEV void multiply_groups_of_strips(Consumer& c, float (&sum)[STRIPS][NT / 2], int left) {
  constexpr int K32 = GROUP ? GROUP / 32 : 1;
  int acc[STRIPS][NT / 2];
  u32 a[STRIPS][K32][4];
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
    start_integers(acc[p]);
  }
#pragma unroll 1
  do {
    c.wait();
    const u64 descriptor = c.descriptor();
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      RowGroup w[STRIPS];
#pragma unroll
      for (int p = 0; p < STRIPS; p++) {
        Codes q;
        load_codes(q, c.codes(p), c.lane);
        w[p] = c.rows(p, i);
        [[maybe_unused]] ByteSums bytes = {0, 0};
#pragma unroll
        for (int j = 0; j < K32; j++) {
          decode_fragment(q, i * K32 + j, {}, a[p][j]);
          if constexpr (OFFSET) bytes.add(a[p][j], c.columns - 32 * (i * K32 + j), c.lane);
        }
        if constexpr (OFFSET) bytes.scaled(w[p], c.there(i));
        pin(a[p]);
        pin(acc[p]);
      }
      wgmma_fence();
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
#pragma unroll
        for (int j = 0; j < K32; j++)
          WgmmaInt8<NT, FROM_ZERO>::run(acc[p], a[p][j], descriptor + RowsOfX::descriptor_step(i * K32 + j), 1);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int p = 0; p < STRIPS; p++) {
        pin(acc[p]);
        pin(a[p]);
      }
#pragma unroll
      for (int e = 0; e < NT / 8; e++) {
        const TokenTerms x = token_terms(c.terms(i), e, c.lane & 3);
#pragma unroll
        for (int p = 0; p < STRIPS; p++) promote_block(sum[p] + 4 * e, acc[p], e, w[p], x);
      }
    }
    loads_before_copies();
    c.release(c.r.empty + 8 * c.t.stage);
    c.advance();
  } while (--left > 0);
}

// `left` units with one scale a row.  Steps of 64 k alternate between two sets of fragments.
DEV void multiply_rows(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, bool first, const Given& g,
                       const int (&strips)[STRIPS], const Place& at) {
  int acc[STRIPS][NT / 2];
  u32 a[2][STRIPS][2][4];
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
    for (int p = 0; p < STRIPS; p++) load_codes(q[p], c.codes(p), c.lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          decode_fragment(q[p], 2 * half + j, c.factors(p, 2 * half + j), a[half][p][j]);
          if constexpr (OFFSET) bytes[p].add(a[half][p][j], c.columns - 32 * (2 * half + j), c.lane);
        }
#pragma unroll
      for (int p = 0; p < STRIPS; p++) pin(a[half][p]);
      wgmma_fence();
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          WgmmaInt8<NT, FROM_ZERO>::run(acc[p], a[half][p][j], descriptor + 2 * (2 * half + j), half + j ? 1 : keep);
      wgmma_commit();
      wgmma_wait<1>();  // the step before
#pragma unroll
      for (int p = 0; p < STRIPS; p++) pin(a[half ^ 1][p]);
      if (half == 0 && last != 0) c.release(last);
    }
    keep = 1;
    last = c.r.empty + 8 * c.t.stage;
    c.advance();
  } while (--left > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    pin(acc[p]);
    pin(a[1][p]);
  }
  c.release(last);
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
    promote_rows(sum[p], acc[p], bytes[p], g, at, c.warp, c.lane, strips[p], columns, first);
}
