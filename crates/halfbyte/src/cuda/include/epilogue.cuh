// The epilogue of GEMMs: from sums to y. Parts of a tile are added in the order of k (stream-K), then scale of the row,
// bias, activation, and the store.
// After the header of a kernel's configuration.
#pragma once
#include "decode_codes.cuh"
#include "output_function.cuh"
#include "stream_k_schedule.cuh"

// What a lane's rows R and R+8 are multiplied with, and what is added.
struct RowTerms {
  float s, s8, b, b8;
};
DEV RowTerms row_terms(const Given& g, const Place& at, int n0, int lane) {
  RowTerms r = {1.f, 1.f, 0.f, 0.f};
  if constexpr (SUM_GROUP == 0) {
    const u32 s =
        __ldg((const u32*)(rows_of_scales(g, at) + (u64)(n0 >> 6) * ROW_BLOCK + ((n0 & 48) << 1)) + (lane >> 2));
    r.s = low(s);
    r.s8 = high(s);
  }
  if (const float* bias = bias_of(g, at)) {
    const int n = n0 + (lane >> 2) - at.before;
    r.b = n < at.last ? bias[n] : 0.f;
    r.b8 = n + 8 < at.last ? bias[n + 8] : 0.f;
  }
  return r;
}
#ifdef HB_FOLDED_NORM
#include "folded_norm.cuh"
#endif
// Sums to outputs; v.x, v.y are row R and two tokens, v.z, v.w row R+8.
struct Pairs {
  u32 lo, hi;
};
DEV u32 out_pair(float l, float h) { return OUT == 1 ? bf16_pair(l, h) : half_pair(l, h); }
DEV Pairs outputs(float4 v, const RowTerms& r) {
  return {out_pair(activate(fmaf(v.x, r.s, r.b)), activate(fmaf(v.y, r.s, r.b))),
          out_pair(activate(fmaf(v.z, r.s8, r.b8)), activate(fmaf(v.w, r.s8, r.b8)))};
}
// Of gates and others: outputs of two tokens.
DEV u32 gated_outputs(float4 v, const RowTerms& r) {
  return out_pair(gated(fmaf(v.x, r.s, r.b), fmaf(v.z, r.s8, r.b8)), gated(fmaf(v.y, r.s, r.b), fmaf(v.w, r.s8, r.b8)));
}
// The same as store_block of 8 gates and 8 others.
DEV void store_gated(float4 v, const RowTerms& r, const Given& g, int n0, int m0, int end, int lane) {
  if constexpr (OUT == 2) {
    const int token = m0 + 2 * (lane & 3), n = n0 / 2 + (lane >> 2);
    const float o[2] = {gated(fmaf(v.x, r.s, r.b), fmaf(v.z, r.s8, r.b8)),
                        gated(fmaf(v.y, r.s, r.b), fmaf(v.w, r.s8, r.b8))};
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (token + e < end && n < g.pitch_of_y()) ((float*)g.y)[(u64)(token + e) * g.pitch_of_y() + n] = o[e];
    return;
  }
  // A multiple of 8 outputs: the host sees to that.
  const u32 both = transpose_8x8(gated_outputs(v, r));
  const int m = m0 + (lane >> 2), n = n0 / 2 + 2 * (lane & 3);
  if (m < end && n < g.pitch_of_y()) *(u32*)((u16*)g.y + (u64)m * g.pitch_of_y() + n) = both;
}
// Stores 16 rows x 8 tokens of a warp, those before the tile's end: two rows of one token a lane.
DEV void store_block(float4 v, const RowTerms& r, const Given& g, const Place& at, int n0, int m0, int lane) {
  const int end = at.end;
#if HB_FOLDED_NORM == 2
  v = divided(v, m0, lane);
#endif
  if constexpr (GATES) return store_gated(v, r, g, n0, m0, end, lane);
  if constexpr (OUT == 2) {  // 8 rows of a token are 32 bytes
    const int token = m0 + 2 * (lane & 3), row = n0 + (lane >> 2) - at.before;
    float* p = (float*)g.y + (u64)token * g.pitch_of_y() + row;
    const float o[4] = {activate(fmaf(v.x, r.s, r.b)), activate(fmaf(v.y, r.s, r.b)), activate(fmaf(v.z, r.s8, r.b8)),
                        activate(fmaf(v.w, r.s8, r.b8))};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (token + (e & 1) < end && row + 4 * (e & 2) < at.last) p[(e & 1) * g.pitch_of_y() + 4 * (e & 2)] = o[e];
    return;
  }
  const Pairs o = outputs(v, r);
  const u32 lo = transpose_8x8(o.lo), hi = transpose_8x8(o.hi);  // now: token lane/4, rows 2t, 2t+1 (and + 8)
  const int m = m0 + (lane >> 2), n = n0 + 2 * (lane & 3) - at.before;
  if (m >= end) return;
  u16* p = (u16*)g.y + (u64)m * g.pitch_of_y() + n;
  if (((at.unit | g.pitch_of_y()) & 1) == 0 && n + 9 < at.last) {
    *(u32*)p = lo;
    *(u32*)(p + 8) = hi;
    return;
  }
  if (n < at.last) p[0] = (u16)lo;
  if (n + 1 < at.last) p[1] = (u16)(lo >> 16);
  if (n + 8 < at.last) p[8] = (u16)hi;
  if (n + 9 < at.last) p[9] = (u16)(hi >> 16);
}
DEV float4 four(const float* v) { return make_float4(v[0], v[1], v[2], v[3]); }

// A warpgroup's sums of a whole tile.  n0: first row of the warp;  t: thread of the warpgroup.
// With many tokens they go through shared memory (64 rows x STAGED tokens, 128 bytes a token, 16-byte pieces XORed with
// the token), so that 64 rows of a token are stored as one line.
DEV void store_tile(const float (&sum)[STRIPS][NT / 2], const Given& g, const Place& at, int n0, u32 staging, int wg,
                    int t) {
  const int lane = t & 31, warp4 = t >> 5;
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    const int strip = (n0 >> 6) + p;
    if (strip * 64 >= g.n) break;  // the last tile may have fewer strips
    const RowTerms r = row_terms(g, at, n0 + 64 * p, lane);
#if HB_FOLDED_NORM == 1
    OfStream of[NT / 8];
#pragma unroll
    for (int i = 0; i < NT / 8; i++) of[i] = of_stream(g, n0 + 64 * p, at.token + 8 * i, at.end, lane);
#pragma unroll
    for (int i = 0; i < NT / 8; i++)
      add_to_stream(four(sum[p] + 4 * i), r, of[i], g, n0 + 64 * p, at.token + 8 * i, at.end, lane);
    continue;
#endif
    if constexpr (STAGED == 0) {
#pragma unroll
      for (int i = 0; i < NT / 8; i++) store_block(four(sum[p] + 4 * i), r, g, at, n0 + 64 * p, at.token + 8 * i, lane);
    } else if constexpr (GATES) {
      static_assert(STAGED % 32 == 0, "four matrices of 8 tokens");
      const u32 base = staging + wg * (STAGED * 128), to = base + lane * 128 + ((warp4 ^ (lane & 7)) << 4);
#pragma unroll
      for (int first = 0; first < NT; first += STAGED) {
        barrier_sync(1 + wg, 128);  // the buffer is free
#pragma unroll
        for (int i = 0; i < STAGED / 32; i++) {
          const float* v = sum[p] + (first + 32 * i) / 2;
          store_matrices(to + i * 4096, gated_outputs(four(v), r), gated_outputs(four(v + 4), r),
                         gated_outputs(four(v + 8), r), gated_outputs(four(v + 12), r));
        }
        barrier_sync(1 + wg, 128);
#pragma unroll
        for (int i = 0; i < STAGED / 32; i++) {
          const int m = 32 * i + (t >> 2), c = t & 3, n = strip * 32 + 8 * c;
          u32 v[4];
          load_shared(v, base + m * 128 + ((c ^ (m & 7)) << 4));
          if (at.token + first + m >= at.end || n >= g.pitch_of_y()) continue;
          *(uint4*)((u16*)g.y + (u64)(at.token + first + m) * g.pitch_of_y() + n) = make_uint4(v[0], v[1], v[2], v[3]);
        }
      }
    } else {
      const u32 base = staging + wg * (STAGED * 128);
      const int token = (lane & 7) + ((lane >> 4) << 3);  // this lane's row of the four matrices of stmatrix
      const u32 to = base + token * 128 + (((2 * warp4 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
#pragma unroll
      for (int first = 0; first < NT; first += STAGED) {
        barrier_sync(1 + wg, 128);  // the buffer is free
#pragma unroll
        for (int i = 0; i < STAGED / 16; i++) {
          const float* v = sum[p] + (first + 16 * i) / 2;
          const Pairs o = outputs(four(v), r), q = outputs(four(v + 4), r);
          store_matrices(to + i * 2048, o.lo, o.hi, q.lo, q.hi);
        }
        barrier_sync(1 + wg, 128);
#pragma unroll
        for (int i = 0; i < STAGED / 16; i++) {
          const int m = 16 * i + (t >> 3), c = t & 7, n = strip * 64 + 8 * c - at.before;
          u32 v[4];
          load_shared(v, base + m * 128 + ((c ^ (m & 7)) << 4));
          if (at.token + first + m >= at.end) continue;
          u16* y = (u16*)g.y + (u64)(at.token + first + m) * g.pitch_of_y() + n;
          if (((at.unit | g.pitch_of_y()) & 7) == 0 && n < at.last)
            *(uint4*)y = make_uint4(v[0], v[1], v[2], v[3]);
          else
#pragma unroll
            for (int e = 0; e < 8; e++)
              if (n + e < at.last) y[e] = (u16)(v[e >> 1] >> (16 * (e & 1)));
        }
      }
    }
  }
}

// The parts of a cut tile, for each warpgroup on its own.  Every warpgroup but the last to come leaves its part in
// memory; the last one adds all of them IN THE ORDER OF K, its own included, so the bits do not depend on who is last.
// Nobody waits for anybody.
// Returns whether this warpgroup holds the sum of the tile now.
DEV bool join_parts(float (&sum)[STRIPS][NT / 2], const Given& g, const Schedule& sc, int wg, int t, u32 flag) {
  constexpr bool HOLD = NT * STRIPS <= 64;  // few enough registers to keep the own part
  constexpr int PART = SET_WARPS * STRIPS * 4 * NT;  // float4 a block
  const Cuts cuts = cuts_of(g, sc.columns);
  const int ct = sc.tile - cuts.first, b0 = Schedule::owner(cuts, ct * g.steps),
            b1 = Schedule::owner(cuts, ct * g.steps + g.steps - 1), others = b1 - b0;
  u32* counter = g.counters + ct * (SET_WARPS / 4) + wg;
  // A worker has two slots, for the first and the last tile of its range; only worker b0 can have begun before this
  // tile.
  const int first = 2 * b0 + (Schedule::cut(cuts, b0) < ct * g.steps);
  auto slot = [&](int b) {
    return (float4*)g.parts + (u64)(b == b0 ? first : 2 * b) * PART + wg * (STRIPS * 16 * NT) + t;
  };
  u32 seen = 0;
  auto share = [&]() {  // thread 0's count, for all of the warpgroup
    if (t == 0) store_shared(flag + 4 * wg, seen);
    barrier_sync(wg + 1, 128);
    seen = load_shared(flag + 4 * wg);
    barrier_sync(wg + 1, 128);
  };
  if (HOLD && others <= 2) {
    if (t == 0) seen = load_acquire(counter);
    share();
  }
  if (!HOLD || seen != (u32)others) {
    float4* mine = slot(Schedule::worker());
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < NT / 8; i++) mine[(p * (NT / 8) + i) * 128] = four(sum[p] + 4 * i);
    barrier_sync(wg + 1, 128);  // with the release below: the part is visible before the count
    if (t == 0) seen = count_up(counter);
    share();
  }
  if (seen != (u32)others) return false;
  if (t == 0) *counter = 0;
  float own[STRIPS][NT / 2];
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
      if constexpr (HOLD) own[p][i] = sum[p][i];
      sum[p][i] = 0.f;
    }
#pragma unroll(NT* STRIPS <= 16 ? 4 : NT * STRIPS <= 32 ? 2 : 1)
  for (int b = b0; b <= b1; b++) {
    const float4* from = slot(b);
    const bool mine = HOLD && b == Schedule::worker();
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < NT / 8; i++) {
        float4 v;
        if constexpr (HOLD) v = four(own[p] + 4 * i);
        if (!mine) v = load_l2(from + (p * (NT / 8) + i) * 128);
        sum[p][4 * i] += v.x;
        sum[p][4 * i + 1] += v.y;
        sum[p][4 * i + 2] += v.z;
        sum[p][4 * i + 3] += v.w;
      }
  }
  return true;
}
