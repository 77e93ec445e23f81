// wNa16 GEMM and implicit GEMM on sm_90a: y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]), 4- or 8-bit
// weights, x and y fp16 or bf16, fp32 sums; TMA, wgmma or mma.sync, stream-K or split-K in clusters, PDL.
//
// The product is computed transposed: rows of W are the A operand of the tensor cores, converted in registers and used
// at once; tokens are its N, which comes in steps of 8.  include/weight_atom.cuh draws the packed weights,
// wna16_sm90.cuh names what is configured.
//
// One block a multiprocessor walks over units of one tile x 128 k:
//   producers (one thread each) keep a ring of atoms of W (one linear bulk copy a unit) and a ring of boxes of x (a
//   tensor map in 128-byte swizzle) full.  W does not depend on earlier kernels, so its first copies are issued before
//   the dependency wait.
//   consumers (WARPGROUPS x 4 warps, STRIPS strips each): codes to registers, converted to exact integers q - z, then
//     mma.sync, up to 16 tokens: a scale multiplies the sums of its group in fp32;
//     wgmma: the conversion of one step of 64 k and one strip runs while the tensor cores work on the step before;
//     the scales apply either to the sums of a group as above, or (EARLY) to the integers, rounded once.
//   A tile that one block computed alone is stored; parts of a tile are joined in memory (stream-K) or in a cluster
//   (SPLIT).
// Sums are in fp32 and in one order: the same input gives the same bits.
// x is a matrix, or images whose output pixels are tokens and whose boxes are windows (wna16_rows.cuh).
#include "wna16_multiply.cuh"
#include "cluster_join.cuh"

// What the copies of a unit need.
struct Copies {
  Schedule sc;
  const u8* source;
  u32 step, bytes;
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
DEV void load_w(const Feed& f, const Rings& r, u32 s, u32 more, u64 policy) {
  mbarrier_expect(r.full_w + 8 * s, f.bytes + more);
  copy_bulk(r.w + s * STAGE_W, f.source, f.bytes, r.full_w + 8 * s, policy);
}
// Boxes [box, box + BOXES) of 64 k of the unit.
DEV void load_x(const Given& g, const Feed& f, const TensorMap* map, const Rings& r, u32 s, int box) {
  f.copy(g, r.x + s * STAGE_X, map, r.full_x + 8 * s, f.token, f.sc.k * 128, box);
}
DEV void produce(const Given& g, const TensorMap* map, const Rings& r, bool of_x) {
  const u64 policy = g.columns == 1 ? policy_evict_first() : policy_evict_normal();
  Feed f;
  wait_for_columns(g);
  f.sc = Schedule::make(g);
  bool more = f.start(g);
  if constexpr (TRIGGER == 0) launch_dependents();
  if constexpr (JOINT) {
    const u32 x_bytes = 2 * g.box_bytes;
    int left = cuts_of(g, f.sc.columns).waves * g.steps + f.sc.units(g),
        n = 0;  // units still to copy; units copied before the wait
#pragma unroll 1
    for (; more && n < STAGES_W; n++, left--, more = f.next(g)) load_w(f, r, n, x_bytes, policy);
    if (TRIGGER > 0 && left <= TRIGGER) launch_dependents();
    Feed x;
    if constexpr (PREFETCH > 0) {
      x = f;
      bool some = more;
#pragma unroll 1
      for (int i = 0; some && i < PREFETCH; i++, some = x.next(g)) prefetch_bulk(x.source, x.bytes);
    }
    dependency_wait();
    x.sc = Schedule::make(g, f.sc.columns);
    x.start(g);
#pragma unroll 1
    for (int i = 0; i < n; i++, x.next(g)) load_x(g, x, map, r, i, 0);
    Turn<STAGES_W> t;
#pragma unroll 1
    while (more) {
      mbarrier_wait(r.empty_w + 8 * t.stage, t.phase);
      load_w(f, r, t.stage, x_bytes, policy);
      load_x(g, f, map, r, t.stage, 0);
      t.advance();
      more = f.next(g);
      if (TRIGGER > 0 && --left == TRIGGER) launch_dependents();
    }
  } else if (!of_x) {
    Turn<STAGES_W> t;
    t.phase = 1;  // the first round finds empty stages
#pragma unroll 1
    for (; more; more = f.next(g), t.advance()) {
      mbarrier_wait(r.empty_w + 8 * t.stage, t.phase);
      load_w(f, r, t.stage, 0, policy);
    }
    if constexpr (TRIGGER > 0) launch_dependents();
  } else {
    Turn<STAGES_X> t;
    t.phase = 1;
    dependency_wait();
#pragma unroll 1
    for (; more; more = f.next(g))
#pragma unroll 1
      for (int box = 0; box < 2; box += BOXES, t.advance()) {
        mbarrier_wait(r.empty_x + 8 * t.stage, t.phase);
        mbarrier_expect(r.full_x + 8 * t.stage, BOXES * g.box_bytes + SUMS_BYTES);
        if constexpr (X_SUMS) {
          const u64 unit = (u64)(f.token / NT) * g.steps + f.sc.k;
          copy_bulk(r.x_sums(t.stage), g.x_sums + unit * (SUMS_BYTES / 4), SUMS_BYTES, r.full_x + 8 * t.stage, policy);
        }
        load_x(g, f, map, r, t.stage, box);
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    wna16_sm90(const __grid_constant__ Given g, const __grid_constant__ TensorMap x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
            lane = threadIdx.x & 31;  // the shuffle tells the compiler: uniform
  const int rank = SPLIT > 1 ? cluster_rank() : 0;
  const Rings r = Rings::make(shared_address(shared));
  if (threadIdx.x == WARPGROUPS * 128) {
    for (int s = 0; s < STAGES_W; s++) {
      mbarrier_init(r.full_w + 8 * s, 1);
      mbarrier_init(r.empty_w + 8 * s, SET_WARPS + (FOLDED && SUMMING_WARP));
      if constexpr (SUMMING_WARP) mbarrier_init(r.summed + 8 * s, 1);
    }
    if constexpr (!JOINT)
      for (int s = 0; s < STAGES_X; s++) {
        mbarrier_init(r.full_x + 8 * s, 1);
        mbarrier_init(r.empty_x + 8 * s, SET_WARPS);
      }
    if constexpr (SPLIT > 1) {
      mbarrier_init(r.full_sums, 1);
      mbarrier_expect(r.full_sums, SPLIT * parts_of_rank(rank) * 512);
    }
    mbarrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if (threadIdx.x == 0) prefetch_map(&x_map);
  if constexpr (SPLIT > 1)
    cluster_sync();
  else
    __syncthreads();
  if (warp >= WARPGROUPS * 4) {
    if constexpr (PRODUCERS) registers_decrease<WARPGROUPS == 4 ? 32 : 40>();
    const int role = warp - WARPGROUPS * 4;  // 0: W (and x of a joint ring), 1: x
    if (role < (JOINT ? 1 : 2) && lane == 0) produce(g, &x_map, r, role == 1);
    if constexpr (FOLDED && SUMMING_WARP)
      if (role == 1) {
        wait_for_columns(g);
        Schedule sc = Schedule::make(g);
        int units = 0;
        while (sc.next(g)) units += sc.kend - sc.k;
        sum_units(r, units, lane);
      }
    __syncwarp();
  } else {
    if constexpr (PRODUCERS) registers_increase<WARPGROUPS == 4 ? 112 : 232>();
    dependency_wait();
#if HB_FOLDED_NORM == 2
    factors_of_norm(g.norm, g.m, threadIdx.x);
#endif
    Consumer c{r, warp / SET_WARPS, warp % SET_WARPS >> 2, warp & 3, lane};
    c.w.stage = c.set;
    c.x.stage = c.set * (2 / BOXES);
    int position = 0;  // in the sequence of the block's units, of which each set takes its own
    Schedule sc = Schedule::make(g);
    while (sc.next(g)) {
      const Place at = place(g, sc.columns, sc.tile);
      const int strip = at.row * TILE_STRIPS + c.wg * STRIPS, n0 = strip * 64 + c.warp * 16;
      Zeros row_zeros[STRIPS];
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
        row_zeros[p] =
            GROUP == 0 && (strip + p) * 64 < g.n ? c.row_zeros(rows_of_scales(g, at), strip + p) : zeros_symmetric();
      float sum[STRIPS][NT / 2];
      const int units = sc.kend - sc.k, mine = (units + (position + SETS - 1 - c.set) % SETS) / SETS;
      position = (position + units) % SETS;
      if constexpr (!WGMMA)
        multiply_sync(c, sum, mine, row_zeros);
      else if constexpr (EARLY || GROUP == 0)
        multiply_early(c, sum, mine, row_zeros);
      else if constexpr (STRIPS == 1)
        multiply_late(c, sum, mine, row_zeros);
      else
        multiply_late_of_strips(c, sum, mine, row_zeros);
      if constexpr (SETS > 1) join_sets(sum, r.x + SET_SUMS, c.set, c.wg, threadIdx.x & 127);
      if constexpr (SPLIT > 1) {
        reduce_cluster(sum, g, r.x + EXCHANGE, r.full_sums, at.row * TILE_STRIPS * 64, at, rank, c.set, c.wg, c.warp,
                       lane);
      } else if (c.set == 0) {
        const bool whole = sc.k == 0 && sc.kend == g.steps;
        if (whole || join_parts(sum, g, sc, c.wg, threadIdx.x & 127, r.flag))
          store_tile(sum, g, at, n0, r.x + STAGING, c.wg, threadIdx.x & 127);
      }
    }
  }
}
