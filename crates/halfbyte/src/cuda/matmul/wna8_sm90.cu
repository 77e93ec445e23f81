// wNa8 GEMM and implicit GEMM on sm_90a: y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]), where x is
// codes of 8 bits with a scale (and an offset) for each token and group: 4- or 8-bit weights, integer products, sums of
// a group promoted to fp32; TMA, wgmma or mma.sync, stream-K or split-K in clusters, PDL.
//
// As in wna16_sm90.cu the product is computed transposed, over units of one tile x 128 k; the packed weights are the
// same.
//   producer (one thread): a ring of stages: atoms of W, a box of codes of x, and the terms of x for the unit's groups.
//   consumers: words of W to bytes in registers, then mma.sync or wgmma:
//     symmetric: 16 (q - 8) or q as signed bytes;  with zero points: 16 q or q as unsigned bytes.
//     Bytes of 16 columns come out in the order 2t, 2t + 8, 2t + 1, 2t + 9, in which the codes of x lie too.
//   The integers of a group are promoted while the tensor cores work for the other warpgroup:
//     sum += sx (s (acc - z X) + o X) + ox (s S + o length)
//         s, z: scale and zero point of the row;  S: sum of the row's integers q - z
//         sx, ox, X: scale, offset and sum of the codes of the token
//   GROUP 0 and FACTORS: integers of a whole piece of k are promoted once; with factors a code times that of its group,
//   less the zero point times that, is made a signed byte by one multiply-add of a word.
// Integers are exact; fp32 sums are in one order: the same input gives the same bits.
// x is a matrix, or images whose output pixels are tokens and whose boxes of codes and of terms are windows
// (wna8_rows.cuh).
#include "wna8_multiply.cuh"
#include "cluster_join.cuh"

// What the copies of a unit need.
struct Copies {
  Schedule sc;
  const u8* source;
  u32 step, bytes, terms_bytes;
  int token;
};
// The units of this block in order.
struct Feed : Copies, RowsOfX {
  __device__ __forceinline__ bool start(const Given& g) {
    if (!sc.next(g)) return false;
    const Place at = place(g, sc.columns, sc.tile);
    const int strips = (g.n + 63) >> 6, strip = at.row * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = strips - 4 * super < 4 ? strips - 4 * super : 4,
              here = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    source = atoms_of(g, at) + ((u64)super * 4 * g.steps + (u64)sc.k * in + sub) * ATOM;
    step = in * ATOM;
    bytes = here * ATOM;
    token = at.x;
    const int left = g.m_pitch - token;
    terms_bytes = 4 * (left < NT ? left : NT);
    begin(g, token, sc.k * 128);
    return true;
  }
  __device__ __forceinline__ bool next(const Given& g) {
    if (++sc.k >= sc.kend) return start(g);
    source += step;
    next_unit(g);
    return true;
  }
};
DEV void load_w(const Given& g, const Feed& f, const Rings& r, u32 s, u64 policy) {
  mbarrier_expect(r.full + 8 * s, f.bytes + RowsOfX::stage_bytes(g, f.terms_bytes));
  copy_bulk(r.w + s * STAGE_W, f.source, f.bytes, r.full + 8 * s, policy);
}
DEV void load_x(const Given& g, const Feed& f, const RowsOfX::Maps& maps, const Rings& r, u32 s, u64 policy) {
  f.copy(g, r.x + s * BOX, r.terms + s * STAGE_TERMS, maps, r.full + 8 * s, f.token, f.sc.k, f.terms_bytes, policy);
}
DEV void produce(const Given& g, const RowsOfX::Maps& maps, const Rings& r) {
  const u64 policy = g.columns == 1 ? policy_evict_first() : policy_evict_normal(), keep = policy_evict_normal();
  Feed f;
  wait_for_columns(g);
  f.sc = Schedule::make(g);
  bool more = f.start(g);
  if constexpr (TRIGGER == 0) launch_dependents();
  int left = cuts_of(g, f.sc.columns).waves * g.steps + f.sc.units(g),
      n = 0;  // units still to copy; units copied before the wait
#pragma unroll 1
  for (; more && n < STAGES; n++, left--, more = f.next(g)) load_w(g, f, r, n, policy);
  if (TRIGGER > 0 && left <= TRIGGER) launch_dependents();
  if constexpr (PREFETCH > 0) {
    Feed ahead = f;
    bool there = more;
#pragma unroll 1
    for (int i = 0; i < PREFETCH && there; i++, there = ahead.next(g)) prefetch_bulk(ahead.source, ahead.bytes);
  }
  dependency_wait();
  Feed x;
  x.sc = Schedule::make(g, f.sc.columns);
  x.start(g);
#pragma unroll 1
  for (int i = 0; i < n; i++, x.next(g)) load_x(g, x, maps, r, i, keep);
  Turn t;
#pragma unroll 1
  while (more) {
    mbarrier_wait(r.empty + 8 * t.stage, t.phase);
    load_w(g, f, r, t.stage, policy);
    load_x(g, f, maps, r, t.stage, keep);
    t.advance();
    more = f.next(g);
    if (TRIGGER > 0 && --left == TRIGGER) launch_dependents();
  }
}

// The same number, of which the compiler is not told so: what follows from it is then computed anew, and takes no
// registers while units are multiplied.
[[maybe_unused]] DEV int anew(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// The second tensor map of windows: a parameter of the kernel, which no type can leave out.
#ifdef HB_CONV
#define HB_TERMS_MAP , const __grid_constant__ TensorMap terms_map
#define HB_TERMS , &terms_map
#else
#define HB_TERMS_MAP
#define HB_TERMS
#endif
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    wna8_sm90(const __grid_constant__ Given g, const __grid_constant__ TensorMap x_map HB_TERMS_MAP) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
            lane = threadIdx.x & 31;  // the shuffle tells the compiler: uniform
  const int rank = SPLIT > 1 ? cluster_rank() : 0;
  const Rings r = Rings::make(shared_address(shared));
  if (threadIdx.x == WARPGROUPS * 128) {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(r.full + 8 * s, 1);
      mbarrier_init(r.empty + 8 * s, SET_WARPS);
    }
    if constexpr (SPLIT > 1) {
      mbarrier_init(r.full_sums, 1);
      mbarrier_expect(r.full_sums, SPLIT * parts_of_rank(rank) * 512);
    }
    mbarrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  const RowsOfX::Maps maps = {&x_map HB_TERMS};
  if (threadIdx.x == 0) maps.prefetch();
  if constexpr (SPLIT > 1)
    cluster_sync();
  else
    __syncthreads();
  if (warp >= WARPGROUPS * 4) {
    if constexpr (PRODUCERS) registers_decrease<PRODUCER_REGISTERS>();
    if (warp == WARPGROUPS * 4 && lane == 0) produce(g, maps, r);
    __syncwarp();
  } else {
    if constexpr (PRODUCERS) registers_increase<CONSUMER_REGISTERS>();
    dependency_wait();
    Consumer c{r, warp >> 2, warp & 3, lane, {}, 0};
    Schedule sc = Schedule::make(g);
    while (sc.next(g)) {
      const Place at = place(g, sc.columns, sc.tile);
      const int strip = at.row * TILE_STRIPS + c.wg * STRIPS;
      [[maybe_unused]] const int n0 = strip * 64 + c.warp * 16;
      int strips[STRIPS];  // the last tile may have fewer
#pragma unroll
      for (int p = 0; p < STRIPS; p++) strips[p] = (strip + p) * 64 < g.n ? strip + p : 0;
      float sum[STRIPS][NT / 2];
      c.columns = g.k - sc.k * 128;
      if constexpr (SYNC)
        multiply_sync(c, sum, sc.kend - sc.k, sc.k == 0, g, strips, at);
      else if constexpr (SUM_GROUP == 0)
        multiply_rows(c, sum, sc.kend - sc.k, sc.k == 0, g, strips, at);
      else if constexpr (STRIPS > 1)
        multiply_groups_of_strips(c, sum, sc.kend - sc.k);
      else
        multiply_groups(c, sum, sc.kend - sc.k);
      if constexpr (SPLIT > 1) {
        reduce_cluster(sum, g, r.x + EXCHANGE, r.full_sums, at.row * TILE_STRIPS * 64, at, rank, 0, c.wg, c.warp, lane);
      } else {
        const bool whole = sc.k == 0 && sc.kend == g.steps;
        if (whole || join_parts(sum, g, sc, c.wg, threadIdx.x & 127, r.flag)) {
          if constexpr (NT == 256 || GROUPED) {
            const Place to = place(g, sc.columns, anew(sc.tile));
            const int row = (to.row * TILE_STRIPS + c.wg * STRIPS) * 64 + c.warp * 16;
            store_tile(sum, g, to, row, r.x + STAGING, c.wg, threadIdx.x & 127);
          } else {
            store_tile(sum, g, at, n0, r.x + STAGING, c.wg, threadIdx.x & 127);
          }
        }
      }
    }
  }
}
