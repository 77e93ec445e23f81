// y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]) on sm_90a, where x is codes of 8 bits with a scale (and an offset) for
// each token and group: 4- or 8-bit weights, integer products, sums of a group promoted to fp32.
//
// As in wna16_sm90.cu the product is computed transposed, over units of one tile x 128 k; the packed weights are the same.
//   producer (one thread): a ring of stages: atoms of W, a box of codes of x, and the terms of x for the unit's groups.
//   consumers: words of W to bytes in registers, then wgmma m64nNk32:
//     symmetric: 16 (q - 8) or q as signed bytes;  with zero points: 16 q or q as unsigned bytes.
//     Bytes of 16 columns come out in the order 2t, 2t + 8, 2t + 1, 2t + 9, in which the codes of x lie too.
//   The conversion for one group runs while the tensor cores work on the group before; then its integers are promoted:
//     sum += s (sx (acc - z X) + ox S)       s, z: scale and zero point of the row;  sx, ox, X: scale, offset and sum of the codes of the
//                                            token;  S: sum of the row's integers q - z
//   GROUP 0: integers of a whole piece of k are promoted once.
// Integers are exact; fp32 sums are in one order: the same input gives the same bits.
#include "wgmma_int8.cuh"
#include "wna8_layout.cuh"
#include "wna16_join.cuh"

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

// The units of this block in order, with what their copies need.
struct Feed {
  Schedule sc; const u8* source; u32 step, bytes, terms_bytes; int token;
  __device__ __forceinline__ bool start(const Arguments& g) {
    if (!sc.next(g)) return false;
    const Place at = place(g, sc.tile);
    const int strips = (g.n + 63) >> 6, strip = at.row * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = strips - 4 * super < 4 ? strips - 4 * super : 4, here = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    source = g.w + ((u64)super * 4 * g.steps + (u64)sc.k * in + sub) * ATOM;
    step = in * ATOM; bytes = here * ATOM; token = at.column * NT;
    const int left = g.m_pitch - token;
    terms_bytes = 4 * (left < NT ? left : NT);
    return true;
  }
  __device__ __forceinline__ bool next(const Arguments& g) { if (++sc.k < sc.kend) { source += step; return true; } return start(g); }
};
DEV void load_w(const Arguments& g, const Feed& f, const Rings& r, u32 s, u64 policy) {
  mbarrier_expect(r.full + 8 * s, f.bytes + g.box_bytes + GROUPS * TERMS * f.terms_bytes);
  copy_bulk(r.w + s * STAGE_W, f.source, f.bytes, r.full + 8 * s, policy);
}
DEV void load_x(const Arguments& g, const Feed& f, const TensorMap* map, const Rings& r, u32 s, u64 policy) {
  copy_box(r.x + s * BOX, map, f.sc.k * 128, f.token, r.full + 8 * s);
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    // Behind the last group of x lie columns that are not there: any numbers do, their codes are zeros.
    const int group = (f.sc.k * GROUPS + i) / g.ratio, there = group < g.groups ? group : g.groups - 1;
#pragma unroll
    for (int t = 0; t < TERMS; t++)
      copy_bulk(r.terms + s * STAGE_TERMS + (i * TERMS + t) * NT * 4, g.terms + ((u64)there * TERMS + t) * g.m_pitch + f.token, f.terms_bytes, r.full + 8 * s, policy);
  }
}
DEV void produce(const Arguments& g, const TensorMap* map, const Rings& r) {
  const u64 policy = g.columns == 1 ? policy_evict_first() : policy_evict_normal(), keep = policy_evict_normal();
  Feed f;
  f.sc = Schedule::make(g);
  bool more = f.start(g);
  if constexpr (TRIGGER == 0) launch_dependents();
  int left = g.waves * g.steps + f.sc.units(g), n = 0;                       // units still to copy; units copied before the wait
#pragma unroll 1
  for (; more && n < STAGES; n++, left--, more = f.next(g)) load_w(g, f, r, n, policy);
  if (TRIGGER > 0 && left <= TRIGGER) launch_dependents();
  dependency_wait();
  Feed x;
  x.sc = Schedule::make(g);
  x.start(g);
#pragma unroll 1
  for (int i = 0; i < n; i++, x.next(g)) load_x(g, x, map, r, i, keep);
  Turn t;
#pragma unroll 1
  while (more) {
    mbarrier_wait(r.empty + 8 * t.stage, t.phase);
    load_w(g, f, r, t.stage, policy); load_x(g, f, map, r, t.stage, keep);
    t.advance();
    more = f.next(g);
    if (TRIGGER > 0 && --left == TRIGGER) launch_dependents();
  }
}

constexpr float UNIT = BITS == 4 ? 0.0625f : 1.f;                           // what a byte's 1 stands for
// The bytes of rows R and R+8 of one k16 step.
DEV void decode_bytes(const u32* q, u32& r, u32& r8) {
  if constexpr (BITS == 4) {
    const u32 x = __funnelshift_r(q[0], q[0], 2), x8 = q[0] << 2;
    if constexpr (ZERO) { r = x & 0xf0f0f0f0; r8 = x8 & 0xf0f0f0f0; }
    else { r = (x & 0xf0f0f0f0) ^ 0x80808080; r8 = (x8 & 0xf0f0f0f0) ^ 0x80808080; }
  } else {
    r = __byte_perm(q[0], q[1], 0x6240); r8 = __byte_perm(q[0], q[1], 0x7351);
    if constexpr (!ZERO) { r ^= 0x80808080; r8 ^= 0x80808080; }
  }
}
// Four bytes, signed or unsigned, added to a sum.
DEV int add_bytes(u32 v, int sum) {
  if constexpr (ZERO) return (int)__dp4a(v, 0x01010101u, (u32)sum); else return __dp4a((int)v, 0x01010101, sum);
}
DEV int quad_sum(int v) { v += __shfl_xor_sync(0xffffffffu, v, 1); return v + __shfl_xor_sync(0xffffffffu, v, 2); }

// Of rows R and R+8 and one group: scales in what a byte stands for, zero points in bytes, sums of the bytes less the zero points.
struct RowGroup { float s, s8, z, z8, sum, sum8; };
DEV float2 load_pair(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
// terms: address of the group's terms of x.
DEV void promote_integers(float (&sum)[NT / 2], const int (&acc)[NT / 2], const RowGroup& w, u32 terms, int lane) {
  const u32 at = terms + 8 * (lane & 3);
#pragma unroll
  for (int i = 0; i < NT / 8; i++) {
    const float2 sx = load_pair(at + 32 * i);
    float2 total = {0.f, 0.f}, ox = {0.f, 0.f};
    if constexpr (ZERO) total = load_pair(at + 4 * NT + 32 * i);
    if constexpr (OFFSET) ox = load_pair(at + (1 + ZERO) * 4 * NT + 32 * i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float f = __int2float_rn(acc[4 * i + e]);
      if constexpr (ZERO) f = fmaf(-(e & 2 ? w.z8 : w.z), e & 1 ? total.y : total.x, f);
      f *= e & 1 ? sx.y : sx.x;
      if constexpr (OFFSET) f = fmaf(e & 1 ? ox.y : ox.x, e & 2 ? w.sum8 : w.sum, f);
      sum[4 * i + e] = fmaf(f, e & 2 ? w.s8 : w.s, sum[4 * i + e]);
    }
  }
}

struct Consumer { Rings r; int wg, warp, lane; Turn t; };
// Frees a stage whose weights and terms this warp has loaded.
DEV void release(const Consumer& c, u32 bar) { loads_before_copies(); __syncwarp(); if (c.lane == 0) mbarrier_arrive(bar); }
// Waits for the current stage and returns the descriptor of its codes of x; the shuffle makes it uniform.
DEV u64 open(const Consumer& c) {
  mbarrier_wait(c.r.full + 8 * c.t.stage, c.t.phase);
  return WGMMA_DESCRIPTOR_HIGH | __shfl_sync(0xffffffffu, wgmma_descriptor_low(c.r.x) + c.t.stage * (BOX / 16), 0);
}

// `left` units whose groups are promoted one by one.  Steps of up to 64 k alternate between two sets of fragments; a group is one step or two.
DEV void multiply_groups(Consumer& c, float (&sum)[STRIPS][NT / 2], int left) {
  constexpr int STEP = GROUP == 32 ? 32 : 64, K32 = STEP / 32, IN_GROUP = GROUP ? GROUP / STEP : 1, IN_STRIP = 128 / STEP;
  int acc[NT / 2];
  u32 a[2][K32][4];
  u32 last = 0, last_terms = 0;                  // empty barrier of the stage before; terms of the group before
  RowGroup before = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
#pragma unroll
  for (int i = 0; i < NT / 2; i++) acc[i] = 0;
#pragma unroll 1
  do {
    const u64 descriptor = open(c);
    const u32 w = c.r.w + c.t.stage * STAGE_W + c.wg * STRIPS * ATOM;
    Codes q[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) load_codes(q[p], w + p * ATOM, c.warp, c.lane);
    int total = 0, total8 = 0;
#pragma unroll
    for (int i = 0; i < STRIPS * IN_STRIP; i++) {
      const int p = i / IN_STRIP, step = i % IN_STRIP, group = step / IN_GROUP;
      const bool opens = step % IN_GROUP == 0, closes = step % IN_GROUP == IN_GROUP - 1;
#pragma unroll
      for (int j = 0; j < K32; j++) {
        const u32* words = &q[p][(step * K32 + j) * 2 * WORDS];
        decode_bytes(words, a[i & 1][j][0], a[i & 1][j][1]);
        decode_bytes(words + WORDS, a[i & 1][j][2], a[i & 1][j][3]);
      }
      pin(a[i & 1]);
      if (opens) {
        const u32 s = load_shared(w + p * ATOM + SCALES + group * 128 + c.warp * 32 + (c.lane >> 2) * 4);
        u32 z = 0;
        if constexpr (ZERO) z = load_shared_u16(w + p * ATOM + ZEROS + group * 64 + c.warp * 16 + (c.lane >> 2) * 2);
        wgmma_wait<0>();                         // the group before
        pin(acc); pin(a[(i & 1) ^ 1]);
        if (i > 0 || last != 0) promote_integers(sum[i > 0 ? (i - 1) / IN_STRIP : STRIPS - 1], acc, before, last_terms, c.lane);
        if (i == 0 && last != 0) release(c, last);
        before = {low(s) * UNIT, high(s) * UNIT, (float)(z & 255) / UNIT, (float)(z >> 8) / UNIT, 0.f, 0.f};
        last_terms = c.r.terms + c.t.stage * STAGE_TERMS + group * TERMS * NT * 4;
        total = total8 = 0;
      }
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < K32; j++) WgmmaInt8<NT, ZERO>::run(acc, a[i & 1][j], descriptor + 2 * (step * K32 + j), opens && j == 0 ? 0 : 1);
      wgmma_commit();
      if constexpr (OFFSET) {
#pragma unroll
        for (int j = 0; j < K32; j++) {
          total = add_bytes(a[i & 1][j][0], add_bytes(a[i & 1][j][2], total));
          total8 = add_bytes(a[i & 1][j][1], add_bytes(a[i & 1][j][3], total8));
        }
        if (closes) { before.sum = (float)quad_sum(total) - before.z * GROUP; before.sum8 = (float)quad_sum(total8) - before.z8 * GROUP; }
      }
      if (!opens) { wgmma_wait<1>(); pin(a[(i & 1) ^ 1]); }                  // the group's first step is done, its fragments are free
    }
    last = c.r.empty + 8 * c.t.stage;
    c.t.advance();
  } while (--left > 0);
  wgmma_wait<0>();
  pin(acc); pin(a[1]);
  promote_integers(sum[STRIPS - 1], acc, before, last_terms, c.lane);
  release(c, last);
}

// `left` units with one scale a row: integers of the whole piece.  first: whether the piece begins at column 0;  token: of the tile.
DEV void multiply_rows(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, bool first, const Arguments& g, int strip, int token) {
  int acc[STRIPS][NT / 2];
  u32 a[2][2][4];                                // 64 k a step
  u32 last = 0;
  int keep = 0, total[STRIPS], total8[STRIPS];
  const int units = left;
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    total[p] = total8[p] = 0;
#pragma unroll
    for (int i = 0; i < NT / 2; i++) acc[p][i] = 0;
  }
#pragma unroll 1
  do {
    const u64 descriptor = open(c);
    const u32 w = c.r.w + c.t.stage * STAGE_W + c.wg * STRIPS * ATOM;
    Codes q[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) load_codes(q[p], w + p * ATOM, c.warp, c.lane);
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) {
      const int p = i % STRIPS, half = i / STRIPS;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32* words = &q[p][(4 * half + 2 * j) * WORDS];
        decode_bytes(words, a[i & 1][j][0], a[i & 1][j][1]);
        decode_bytes(words + WORDS, a[i & 1][j][2], a[i & 1][j][3]);
        if constexpr (OFFSET) {
          total[p] = add_bytes(a[i & 1][j][0], add_bytes(a[i & 1][j][2], total[p]));
          total8[p] = add_bytes(a[i & 1][j][1], add_bytes(a[i & 1][j][3], total8[p]));
        }
      }
      pin(a[i & 1]);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 2; j++) WgmmaInt8<NT, ZERO>::run(acc[p], a[i & 1][j], descriptor + 2 * (2 * half + j), half + j ? 1 : keep);
      wgmma_commit();
      wgmma_wait<1>();                           // the step before
      pin(a[(i & 1) ^ 1]);
      if (i == 0 && last != 0) release(c, last);
    }
    keep = 1;
    last = c.r.empty + 8 * c.t.stage;
    c.t.advance();
  } while (--left > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) pin(acc[p]);
  pin(a[1]);
  release(c, last);
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    int z = 0, z8 = 0;
    if constexpr (ZERO) {
      const int at = (strip + p) * 64 < g.n ? strip + p : strip;             // the last tile may have fewer strips
      const u32 both = __ldg((const u16*)(g.rows_of_scales + (u64)at * ROW_BLOCK + 128) + c.warp * 8 + (c.lane >> 2));
      z = (int)((both & 255) * (BITS == 4 ? 16 : 1)); z8 = (int)((both >> 8) * (BITS == 4 ? 16 : 1));
    }
    float rows = 0.f, rows8 = 0.f;
    if constexpr (OFFSET) { rows = (float)(quad_sum(total[p]) - z * 128 * units); rows8 = (float)(quad_sum(total8[p]) - z8 * 128 * units); }
#pragma unroll
    for (int i = 0; i < NT / 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int m = token + 8 * i + 2 * (c.lane & 3) + e, at = m < g.m ? m : 0;
        const float sx = __ldg(g.terms + at) * UNIT;
        int v = acc[p][4 * i + e], v8 = acc[p][4 * i + 2 + e];
        if constexpr (ZERO) if (first) {
          const int x = (int)__ldg(g.terms + g.m_pitch + at);
          v -= z * x; v8 -= z8 * x;
        }
        sum[p][4 * i + e] = (float)v * sx; sum[p][4 * i + 2 + e] = (float)v8 * sx;
        if constexpr (OFFSET) {
          const float ox = __ldg(g.terms + (u64)(1 + ZERO) * g.m_pitch + at) * UNIT;
          sum[p][4 * i + e] = fmaf(ox, rows, sum[p][4 * i + e]); sum[p][4 * i + 2 + e] = fmaf(ox, rows8, sum[p][4 * i + 2 + e]);
        }
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna8_sm90(const __grid_constant__ Arguments g, const __grid_constant__ TensorMap x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;   // the shuffle tells the compiler: uniform
  const int rank = SPLIT > 1 ? cluster_rank() : 0;
  const Rings r = Rings::make(shared_address(shared));
  if (threadIdx.x == WARPGROUPS * 128) {
    for (int s = 0; s < STAGES; s++) { mbarrier_init(r.full + 8 * s, 1); mbarrier_init(r.empty + 8 * s, SET_WARPS); }
    if constexpr (SPLIT > 1) { mbarrier_init(r.full_sums, 1); mbarrier_expect(r.full_sums, SPLIT * parts_of_rank(rank) * 512); }
    mbarrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (threadIdx.x == 0) prefetch_map(&x_map);
  if constexpr (SPLIT > 1) cluster_sync(); else __syncthreads();
  if (warp >= WARPGROUPS * 4) {
    if constexpr (PRODUCERS) registers_decrease<40>();
    if (warp == WARPGROUPS * 4 && lane == 0) produce(g, &x_map, r);
    __syncwarp();
  } else {
    if constexpr (PRODUCERS) registers_increase<232>();
    dependency_wait();
    Consumer c{r, warp >> 2, warp & 3, lane};
    Schedule sc = Schedule::make(g);
    while (sc.next(g)) {
      const Place at = place(g, sc.tile);
      const int strip = at.row * TILE_STRIPS + c.wg * STRIPS, n0 = strip * 64 + c.warp * 16, m0 = at.column * NT;
      float sum[STRIPS][NT / 2];
      if constexpr (GROUP == 0) multiply_rows(c, sum, sc.kend - sc.k, sc.k == 0, g, strip, m0);
      else multiply_groups(c, sum, sc.kend - sc.k);
      if constexpr (SPLIT > 1) {
        reduce_cluster(sum, g, r.x + EXCHANGE, r.full_sums, at.row * TILE_STRIPS * 64, m0, rank, 0, c.wg, c.warp, lane);
      } else {
        const bool whole = sc.k == 0 && sc.kend == g.steps;
        if (whole || join_parts(sum, g, sc, c.wg, threadIdx.x & 127, r.flag)) store_tile(sum, g, n0, m0, r.x + STAGING, c.wg, threadIdx.x & 127);
      }
    }
  }
}
