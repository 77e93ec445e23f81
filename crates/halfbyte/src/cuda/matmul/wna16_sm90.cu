// y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]) on sm_90a: 4- or 8-bit weights, x and y fp16 or bf16, fp32 sums.
//
// The product is computed transposed: rows of W are the A operand of the tensor cores, converted in registers and used at once;
// tokens are its N, which comes in steps of 8.  include/wna16_layout.cuh draws the packed weights and names what is configured.
//
// One block a multiprocessor walks over units of one tile x 128 k:
//   producers (one thread each) keep a ring of atoms of W (one linear bulk copy a unit) and a ring of boxes of x (a tensor map in
//   128-byte swizzle) full.  W does not depend on earlier kernels, so its first copies are issued before the dependency wait.
//   consumers (WARPGROUPS x 4 warps, STRIPS strips each): codes to registers, converted to exact integers q - z, then
//     mma.sync, up to 16 tokens: a scale multiplies the sums of its group in fp32;
//     wgmma: the conversion of one step of 64 k and one strip runs while the tensor cores work on the step before;
//     the scales apply either to the sums of a group as above, or (EARLY) to the integers, rounded once.
//   A tile that one block computed alone is stored; parts of a tile are joined in memory (stream-K) or in a cluster (SPLIT).
// Sums are in fp32 and in one order: the same input gives the same bits.
#include "wgmma.cuh"
#include "wna16_epilogue.cuh"

struct Rings {                                   // addresses in shared memory
  u32 x, w, full_w, empty_w, full_x, empty_x, flag;
  DEV Rings make(u32 base) {
    const u32 b = base + BARRIERS;
    Rings r;
    r.x = base; r.w = base + STAGES_X * STAGE_X; r.full_w = b; r.empty_w = b + 8 * STAGES_W;
    r.full_x = JOINT ? r.full_w : b + 16 * STAGES_W; r.empty_x = JOINT ? r.empty_w : r.full_x + 8 * STAGES_X;
    r.flag = b + 16 * (STAGES_W + STAGES_X);
    return r;
  }
};
template <int STAGES> struct Turn {              // position in a ring
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance() { if (++stage == STAGES) { stage = 0; phase ^= 1; } }
};

// The units of this block in order, with what their copies need.
struct Feed {
  Schedule sc; const u8 *w, *source; u32 step, bytes; int strips, columns, rank, token;
  __device__ __forceinline__ bool start() {
    if (!sc.next()) return false;
    const int rows = (strips + TILE_STRIPS * PAIR - 1) / (TILE_STRIPS * PAIR);
    const Place at = place(sc.tile, rows, columns);
    const int strip = (at.row * PAIR + rank) * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = strips - 4 * super < 4 ? strips - 4 * super : 4, here = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    source = w + ((u64)super * 4 * sc.steps + (u64)sc.k * in + sub) * ATOM;
    step = in * ATOM; bytes = here > 0 ? here * ATOM : 0; token = at.column * NT;
    return true;
  }
  __device__ __forceinline__ bool next() { if (++sc.k < sc.kend) { source += step; return true; } return start(); }
};
DEV void load_w(const Feed& f, const Rings& r, u32 s, u32 more, u64 policy) {
  mbarrier_expect(r.full_w + 8 * s, f.bytes + more);
  if (f.bytes) copy_bulk(r.w + s * STAGE_W, f.source, f.bytes, r.full_w + 8 * s, policy);
}
// Boxes [box, box + BOXES) of 64 k of the unit.
DEV void load_x(const Feed& f, const TensorMap* map, const Rings& r, u32 s, int box) {
#pragma unroll
  for (int i = 0; i < BOXES; i++) {
    const u32 to = r.x + s * STAGE_X + i * BOX;
    if constexpr (PAIR == 1) copy_box(to, map, f.sc.k * 128 + (box + i) * 64, f.token, r.full_x + 8 * s);
    else copy_box_multicast(to + f.rank * (BOX / 2), map, f.sc.k * 128 + (box + i) * 64, f.token + f.rank * (NT / 2), r.full_x + 8 * s, 3);
  }
}
DEV void produce(const Arguments& g, const TensorMap* map, const Rings& r, const Feed& all, bool of_x) {
  const u64 policy = all.columns == 1 ? policy_evict_first() : policy_evict_normal();
  Feed f = all;
  bool more = f.start();
  if constexpr (JOINT) {
    const u32 x_bytes = 2 * g.box_bytes;
    Turn<STAGES_W> t;
    int n = 0;
#pragma unroll 1
    for (; more && n < STAGES_W; n++, more = f.next()) load_w(f, r, n, x_bytes, policy);
    if (!LATE_TRIGGER || !more) launch_dependents();
    dependency_wait();
    Feed x = all;
    x.start();
#pragma unroll 1
    for (int i = 0; i < n; i++, x.next()) load_x(x, map, r, i, 0);
#pragma unroll 1
    while (more) {
      mbarrier_wait(r.empty_w + 8 * t.stage, t.phase);
      load_w(f, r, t.stage, x_bytes, policy); load_x(f, map, r, t.stage, 0);
      t.advance();
      more = f.next();
      if (LATE_TRIGGER && !more) launch_dependents();
    }
  } else if (!of_x) {
    Turn<STAGES_W> t;
    t.phase = 1;                                 // the first round finds empty stages
#pragma unroll 1
    for (; more; more = f.next(), t.advance()) { mbarrier_wait(r.empty_w + 8 * t.stage, t.phase); load_w(f, r, t.stage, 0, policy); }
    launch_dependents();
  } else {
    Turn<STAGES_X> t;
    t.phase = 1;
    dependency_wait();
#pragma unroll 1
    for (; more; more = f.next())
#pragma unroll 1
      for (int box = 0; box < 2; box += BOXES, t.advance()) {
        if constexpr (PAIR == 1) mbarrier_wait(r.empty_x + 8 * t.stage, t.phase); else mbarrier_wait_cluster(r.empty_x + 8 * t.stage, t.phase);
        mbarrier_expect(r.full_x + 8 * t.stage, BOXES * g.box_bytes * PAIR);
        load_x(f, map, r, t.stage, box);
      }
  }
}

struct Consumer {                                // what a consumer warp keeps from piece to piece
  Rings r; int wg, warp, lane;                   // warp: in its warpgroup
  Turn<STAGES_W> w; Turn<STAGES_X> x;
  __device__ __forceinline__ u32 atom(int p) const { return r.w + w.stage * STAGE_W + (wg * STRIPS + p) * ATOM; }
  __device__ __forceinline__ u32 scales(int p, int group) const { return load_shared(atom(p) + SCALES + group * 128 + warp * 32 + (lane >> 2) * 4); }
  __device__ __forceinline__ Zeros zeros(int p, int group) const {
    if constexpr (ZERO) return zeros_of(load_shared_u16(atom(p) + ZEROS + group * 64 + warp * 16 + (lane >> 2) * 2));
    else return zeros_symmetric();
  }
  __device__ __forceinline__ Zeros row_zeros(const Arguments& g, int strip) const {
    if constexpr (ZERO) return zeros_of(__ldg((const u16*)(g.rows + (u64)strip * ROW_BLOCK + 128) + warp * 8 + (lane >> 2)));
    else return zeros_symmetric();
  }
  __device__ __forceinline__ void release_x(u32 bar) const {   // an empty barrier of x, of both blocks of a pair
    if constexpr (PAIR == 1) { if (lane == 0) mbarrier_arrive(bar); }
    else { if (lane < 2) mbarrier_arrive_cluster(cluster_address(bar, lane)); }
  }
};
// sum += s * acc, rows R and R+8.
DEV void promote(float (&sum)[NT / 2], const float (&acc)[NT / 2], float s, float s8) {
#pragma unroll
  for (int i = 0; i < NT / 2; i++) sum[i] = fmaf(acc[i], (i & 2) ? s8 : s, sum[i]);
}

// `left` units with mma.sync; sum = the result.
DEV void multiply_sync(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  constexpr int STEPS = GROUP ? GROUP / 16 : 8, CHAINS = NT == 8 ? 2 : 1;    // k16 steps a group; independent sums a token block
  const u32 row = c.r.x + (c.lane & 7) * 128 + (((c.lane >> 3) ^ (c.lane & 7)) << 4);   // this lane's row in a swizzled box
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
#pragma unroll 1
  do {
    mbarrier_wait(c.r.full_w + 8 * c.w.stage, c.w.phase);
    Codes q[STRIPS];
    u32 s[STRIPS][GROUPS + 1];
    Zeros z[STRIPS][GROUPS + 1];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      load_codes(q[p], c.atom(p), c.warp, c.lane);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) { s[p][i] = c.scales(p, i); z[p][i] = c.zeros(p, i); }
      if constexpr (GROUP == 0) z[p][0] = row_zeros[p];
    }
#pragma unroll
    for (int group = 0; group < 8 / STEPS; group++) {
      float acc[STRIPS][CHAINS][NT / 2];
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
#pragma unroll
        for (int h = 0; h < CHAINS; h++)
#pragma unroll
          for (int i = 0; i < NT / 2; i++) acc[p][h][i] = 0.f;
#pragma unroll
      for (int jj = group * STEPS; jj < (group + 1) * STEPS; jj += 2) {      // 32 k each
        u32 b[NT / 8][4];
#pragma unroll
        for (int n = 0; n < NT / 8; n++) load_matrices(b[n], (row + c.w.stage * STAGE_X + (jj >> 2) * BOX + n * 1024) ^ ((jj & 2) << 5));
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int p = 0; p < STRIPS; p++) {
            u32 a[4];
            decode(&q[p][(jj + h) * WORDS], z[p][GROUP ? group : 0], a);
#pragma unroll
            for (int n = 0; n < NT / 8; n++) mma_sync<BF16>(acc[p][h % CHAINS] + 4 * n, a, b[n][2 * h], b[n][2 * h + 1]);
          }
      }
      if (group == 8 / STEPS - 1) {
        __syncwarp();
        if (c.lane == 0) mbarrier_arrive(c.r.empty_w + 8 * c.w.stage);
      }
#pragma unroll
      for (int p = 0; p < STRIPS; p++) {
        const float s0 = GROUP ? low(s[p][group]) : 1.f, s8 = GROUP ? high(s[p][group]) : 1.f;
        if constexpr (CHAINS == 2) {
#pragma unroll
          for (int i = 0; i < NT / 2; i++) acc[p][0][i] += acc[p][CHAINS - 1][i];
        }
        promote(sum[p], acc[p][0], s0, s8);
      }
    }
    c.w.advance();
  } while (--left > 0);
}

// `left` units with wgmma; sum = the result.  Step i of a unit is strip i % STRIPS of half i / STRIPS (64 k); it uses fragments i & 1
// while the wgmmas of step i - 1 are in flight.
DEV void multiply_wgmma(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  constexpr bool LATE = !EARLY && GROUP != 0;
  float acc[STRIPS][NT / 2];                      // LATE: sums of the group
  u32 a[2][4][4];
  u32 x_last = 0;                                // empty barrier of the stage of x that the last step reads (0: none)
  int keep = 0;
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) { sum[p][i] = acc[p][i] = 0.f; }
#pragma unroll 1
  do {
    mbarrier_wait(c.r.full_w + 8 * c.w.stage, c.w.phase);
    Codes q[STRIPS];
    u32 s[STRIPS][GROUPS + 1];
    Zeros z[STRIPS][GROUPS + 1];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      load_codes(q[p], c.atom(p), c.warp, c.lane);
#pragma unroll
      for (int i = 0; i < GROUPS; i++) { s[p][i] = c.scales(p, i); z[p][i] = c.zeros(p, i); }
      if constexpr (GROUP == 0) z[p][0] = row_zeros[p];
    }
    if constexpr (!JOINT) {
      __syncwarp();
      if (c.lane == 0) mbarrier_arrive(c.r.empty_w + 8 * c.w.stage);
    }
    u64 descriptor = 0;
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) {
      const int half = i / STRIPS, p = i % STRIPS;
      if (p == 0 && (half == 0 || BOXES == 1)) {
        if constexpr (!JOINT) { if constexpr (PAIR == 1) mbarrier_wait(c.r.full_x + 8 * c.x.stage, c.x.phase); else mbarrier_wait_cluster(c.r.full_x + 8 * c.x.stage, c.x.phase); }
        // the shuffle makes the descriptor uniform, else it would cost two moves before every wgmma
        descriptor = WGMMA_DESCRIPTOR_HIGH | __shfl_sync(0xffffffffu, wgmma_descriptor_low(c.r.x) + c.x.stage * (STAGE_X / 16), 0);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int k16 = 4 * half + j, group = GROUP ? k16 / (GROUP / 16) : 0;
        decode(&q[p][k16 * WORDS], z[p][group], a[i & 1][j]);
        if constexpr (EARLY) scale_fragment(s[p][group], a[i & 1][j]);
      }
      pin(a[i & 1]);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u64 d = descriptor + (BOXES == 2 ? half * (BOX / 16) : 0) + 2 * j;
        if constexpr (LATE) Wgmma<NT, BF16>::run(acc[p], a[i & 1][j], d, j || (GROUP == 128 && half));
        else Wgmma<NT, BF16>::run(sum[p], a[i & 1][j], d, j || half ? 1 : keep);
      }
      wgmma_commit();
      if (LATE && i == 2 * STRIPS - 1) {
        wgmma_wait<1>();
        pin(a[(i & 1) ^ 1]);
        pin(acc[0]);
        promote(sum[0], acc[0], low(s[0][0]), high(s[0][0]));
        wgmma_wait<0>();
        pin(a[i & 1]);
        pin(acc[1]);
        promote(sum[1], acc[1], low(s[1][0]), high(s[1][0]));
      } else {
        wgmma_wait<1>();                           // step i - 1 is done
        pin(a[(i & 1) ^ 1]);
      }
      if (p == 0 && (half == 0 || BOXES == 1)) {
        if (x_last != 0) c.release_x(x_last);
        x_last = 0;
      }
      if (p == STRIPS - 1 && (half == 1 || BOXES == 1)) { x_last = c.r.empty_x + 8 * c.x.stage; c.x.advance(); }
    }
    keep = 1;
    c.w.advance();
  } while (--left > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) pin(sum[p]);
  pin(a[1]);
  c.release_x(x_last);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna16_sm90(const __grid_constant__ Arguments g, const __grid_constant__ TensorMap x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  const int strips = (g.n + 63) >> 6, columns = (g.m + NT - 1) / NT, rows = (strips + TILE_STRIPS * PAIR - 1) / (TILE_STRIPS * PAIR);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;   // the shuffle tells the compiler: uniform
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const Rings r = Rings::make(shared_address(shared));
  Schedule sc = Schedule::make((g.k + 127) >> 7, rows * columns, g.waves);
  if (threadIdx.x == WARPGROUPS * 128) {
    for (int s = 0; s < STAGES_W; s++) { mbarrier_init(r.full_w + 8 * s, 1); mbarrier_init(r.empty_w + 8 * s, WARPGROUPS * 4); }
    if constexpr (!JOINT) for (int s = 0; s < STAGES_X; s++) { mbarrier_init(r.full_x + 8 * s, 1); mbarrier_init(r.empty_x + 8 * s, WARPGROUPS * 4 * PAIR); }
    mbarrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if constexpr (PAIR > 1) cluster_sync(); else __syncthreads();
  if (warp >= WARPGROUPS * 4) {
    if constexpr (PRODUCERS) registers_decrease<WARPGROUPS == 4 ? 32 : 56>();
    const int role = warp - WARPGROUPS * 4;      // 0: W (and x of a joint ring), 1: x
    const Feed f{sc, g.w, g.w, 0, 0, strips, columns, PAIR > 1 ? rank : 0, 0};
    if (role < (JOINT ? 1 : 2) && lane == 0) produce(g, &x_map, r, f, role == 1);
    __syncwarp();
  } else {
    if constexpr (PRODUCERS) registers_increase<WARPGROUPS == 4 ? 112 : 224>();
    dependency_wait();
    Consumer c{r, warp >> 2, warp & 3, lane};
    while (sc.next()) {
      const Place at = place(sc.tile, rows, columns);
      const int strip = (at.row * PAIR + (PAIR > 1 ? rank : 0)) * TILE_STRIPS + c.wg * STRIPS, n0 = strip * 64 + c.warp * 16, m0 = at.column * NT;
      Zeros row_zeros[STRIPS];
#pragma unroll
      for (int p = 0; p < STRIPS; p++) row_zeros[p] = GROUP == 0 && strip + p < strips ? c.row_zeros(g, strip + p) : zeros_symmetric();
      float sum[STRIPS][NT / 2];
      if constexpr (WGMMA) multiply_wgmma(c, sum, sc.kend - sc.k, row_zeros); else multiply_sync(c, sum, sc.kend - sc.k, row_zeros);
      if constexpr (SPLIT > 1) {
        barrier_sync(1, WARPGROUPS * 128);       // the rings are read to their end before the parts overwrite them
        reduce_cluster(sum, g, r.x, strip * 64 - c.wg * STRIPS * 64, m0, rank, c.wg, c.warp, lane);
      } else {
        const bool whole = sc.k == 0 && sc.kend == sc.steps;
        if (whole || join_parts(sum, g, sc, PAIR > 1 ? rank : 0, c.wg, threadIdx.x & 127, r.flag)) store_tile(sum, g, n0, m0, lane);
      }
    }
  }
  if constexpr (SPLIT > 1) { if (warp >= WARPGROUPS * 4) cluster_sync(); }   // the producers' share of the barrier in reduce_cluster
  if constexpr (CLUSTER > 1) cluster_sync();     // no block leaves while another may still reach into its shared memory
}
