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
  __device__ __forceinline__ void advance(u32 n = 1) { stage += n; if (stage >= STAGES) { stage -= STAGES; phase ^= 1; } }
};

// The units of this block in order, with what their copies need.
struct Feed {
  Schedule sc; const u8* source; u32 step, bytes; int token;
  // rank: of this block in a pair.
  __device__ __forceinline__ bool start(const Arguments& g, int rank) {
    if (!sc.next(g)) return false;
    const Place at = place(g, sc.tile);
    const int strips = (g.n + 63) >> 6, strip = (at.row * PAIR + rank) * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = strips - 4 * super < 4 ? strips - 4 * super : 4, here = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    source = g.w + ((u64)super * 4 * g.steps + (u64)sc.k * in + sub) * ATOM;
    step = in * ATOM; bytes = here > 0 ? here * ATOM : 0; token = at.column * NT;
    return true;
  }
  __device__ __forceinline__ bool next(const Arguments& g, int rank) { if (++sc.k < sc.kend) { source += step; return true; } return start(g, rank); }
};
DEV void load_w(const Feed& f, const Rings& r, u32 s, u32 more, u64 policy) {
  mbarrier_expect(r.full_w + 8 * s, f.bytes + more);
  if (f.bytes) copy_bulk(r.w + s * STAGE_W, f.source, f.bytes, r.full_w + 8 * s, policy);
}
// Boxes [box, box + BOXES) of 64 k of the unit.
DEV void load_x(const Feed& f, const TensorMap* map, const Rings& r, u32 s, int box, int rank) {
#pragma unroll
  for (int i = 0; i < BOXES; i++) {
    const u32 to = r.x + s * STAGE_X + i * BOX;
    if constexpr (PAIR == 1) copy_box(to, map, f.sc.k * 128 + (box + i) * 64, f.token, r.full_x + 8 * s);
    else copy_box_multicast(to + rank * (BOX / 2), map, f.sc.k * 128 + (box + i) * 64, f.token + rank * (NT / 2), r.full_x + 8 * s, 3);
  }
}
DEV void produce(const Arguments& g, const TensorMap* map, const Rings& r, int rank, bool of_x) {
  const u64 policy = g.columns == 1 ? policy_evict_first() : policy_evict_normal();
  Feed f;
  f.sc = Schedule::make(g);
  bool more = f.start(g, rank);
  if constexpr (JOINT) {
    const u32 x_bytes = 2 * g.box_bytes;
    Turn<STAGES_W> t;
    int n = 0;
#pragma unroll 1
    for (; more && n < STAGES_W; n++, more = f.next(g, rank)) load_w(f, r, n, x_bytes, policy);
    if (!LATE_TRIGGER || !more) launch_dependents();
    dependency_wait();
    Feed x;
    x.sc = Schedule::make(g);
    x.start(g, rank);
#pragma unroll 1
    for (int i = 0; i < n; i++, x.next(g, rank)) load_x(x, map, r, i, 0, rank);
#pragma unroll 1
    while (more) {
      mbarrier_wait(r.empty_w + 8 * t.stage, t.phase);
      load_w(f, r, t.stage, x_bytes, policy); load_x(f, map, r, t.stage, 0, rank);
      t.advance();
      more = f.next(g, rank);
      if (LATE_TRIGGER && !more) launch_dependents();
    }
  } else if (!of_x) {
    Turn<STAGES_W> t;
    t.phase = 1;                                 // the first round finds empty stages
#pragma unroll 1
    for (; more; more = f.next(g, rank), t.advance()) { mbarrier_wait(r.empty_w + 8 * t.stage, t.phase); load_w(f, r, t.stage, 0, policy); }
    launch_dependents();
  } else {
    Turn<STAGES_X> t;
    t.phase = 1;
    dependency_wait();
#pragma unroll 1
    for (; more; more = f.next(g, rank))
#pragma unroll 1
      for (int box = 0; box < 2; box += BOXES, t.advance()) {
        if constexpr (PAIR == 1) mbarrier_wait(r.empty_x + 8 * t.stage, t.phase); else mbarrier_wait_cluster(r.empty_x + 8 * t.stage, t.phase);
        mbarrier_expect(r.full_x + 8 * t.stage, BOXES * g.box_bytes * PAIR);
        load_x(f, map, r, t.stage, box, rank);
      }
  }
}

struct Consumer {                                // what a consumer warp keeps from piece to piece
  Rings r; int set, wg, warp, lane;              // wg: of its set;  warp: of its warpgroup
  Turn<STAGES_W> w; Turn<STAGES_X> x;
  __device__ __forceinline__ u32 atom(int p) const { return r.w + w.stage * STAGE_W + (wg * STRIPS + p) * ATOM; }
  __device__ __forceinline__ u32 scales(int p, int group) const { return load_shared(atom(p) + SCALES + group * 128 + warp * 32 + (lane >> 2) * 4); }
  __device__ __forceinline__ Zeros zeros(int p, int group) const {
    if constexpr (ZERO) return zeros_of(load_shared_u16(atom(p) + ZEROS + group * 64 + warp * 16 + (lane >> 2) * 2));
    else return zeros_symmetric();
  }
  __device__ __forceinline__ Zeros row_zeros(const Arguments& g, int strip) const {
    if constexpr (ZERO) return zeros_of(__ldg((const u16*)(g.rows_of_scales + (u64)strip * ROW_BLOCK + 128) + warp * 8 + (lane >> 2)));
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
  for (; left > 0; left--, c.w.advance(SETS)) {
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
  }
}

// What a unit of wgmma starts with: codes, scales and zero points in registers, and the stage of W free again (in a joint ring later).
struct Unit { Codes q[STRIPS]; u32 s[STRIPS][GROUPS + 1]; Zeros z[STRIPS][GROUPS + 1]; };
DEV void load_unit(Consumer& c, Unit& u, const Zeros (&row_zeros)[STRIPS]) {
  mbarrier_wait(c.r.full_w + 8 * c.w.stage, c.w.phase);
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    load_codes(u.q[p], c.atom(p), c.warp, c.lane);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) { u.s[p][i] = c.scales(p, i); u.z[p][i] = c.zeros(p, i); }
    if constexpr (GROUP == 0) u.z[p][0] = row_zeros[p];
  }
  if constexpr (!JOINT) {
    __syncwarp();
    if (c.lane == 0) mbarrier_arrive(c.r.empty_w + 8 * c.w.stage);
  }
  c.w.advance(SETS);
}
// Waits for the current stage of x and returns its descriptor; the shuffle makes it uniform, else it would cost two moves a wgmma.
DEV u64 open_x(const Consumer& c) {
  if constexpr (!JOINT) mbarrier_wait(c.r.full_x + 8 * c.x.stage, c.x.phase);
  return WGMMA_DESCRIPTOR_HIGH | __shfl_sync(0xffffffffu, wgmma_descriptor_low(c.r.x) + c.x.stage * (STAGE_X / 16), 0);
}
// Step i of a unit is strip i % STRIPS of half i / STRIPS (64 k): its four fragments.
DEV void decode_step(const Unit& u, int i, u32 (&a)[4][4]) {
  const int half = i / STRIPS, p = i % STRIPS;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int k16 = 4 * half + j, group = GROUP ? k16 / (GROUP / 16) : 0;
    decode(&u.q[p][k16 * WORDS], u.z[p][group], a[j]);
    if constexpr (EARLY) scale_fragment(u.s[p][group], a[j]);
  }
  pin(a);
}
// The step's wgmmas, as one group; keep: whether the first one adds to d.
DEV void multiply_step(float (&d)[NT / 2], const u32 (&a)[4][4], u64 descriptor, int half, int keep) {
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; j++) Wgmma<NT, BF16>::run(d, a[j], descriptor + (BOXES == 2 ? half * (BOX / 16) : 0) + 2 * j, j ? 1 : keep);
  wgmma_commit();
}

// `left` units with wgmma, where all products of a tile go to one set of sums: scales early, or one scale a row.
// Step i uses fragments i & 1 while the wgmmas of step i - 1 are in flight.
DEV void multiply_early(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  u32 a[2][4][4];
  u32 x_last = 0;                                // empty barrier of the stage of x that the last step reads (0: none)
  int keep = 0;
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
  if (SETS > 1 && left == 0) return;
#pragma unroll 1
  do {
    Unit u;
    load_unit(c, u, row_zeros);
    u64 descriptor = 0;
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) {
      const int half = i / STRIPS, p = i % STRIPS;
      const bool opens = p == 0 && (half == 0 || BOXES == 1), closes = p == STRIPS - 1 && (half == 1 || BOXES == 1);
      if (opens) descriptor = open_x(c);
      decode_step(u, i, a[i & 1]);
      multiply_step(sum[p], a[i & 1], descriptor, half, half ? 1 : keep);
      wgmma_wait<1>();                           // step i - 1 is done
      pin(a[(i & 1) ^ 1]);
      if (opens && x_last != 0) c.release_x(x_last);
      if (closes) { x_last = c.r.empty_x + 8 * c.x.stage; c.x.advance(half == 1 ? 1 + (SETS - 1) * (2 / BOXES) : 1); }
    }
    keep = 1;
  } while (--left > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) pin(sum[p]);
  pin(a[1]);
  c.release_x(x_last);
}

// `left` units with wgmma, where a unit has sums of its own, which the scales multiply.
DEV void multiply_late(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  float acc[STRIPS][NT / 2];
  u32 a[2][4][4];
  u32 x_last = 0;
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = acc[p][i] = 0.f;
  if (SETS > 1 && left == 0) return;
  if constexpr (STRIPS == 1) {
    // the second half of a unit is in the tensor cores while the next unit is loaded and its first half converted
    float s = 0.f, s8 = 0.f;
#pragma unroll 1
    do {
      Unit u;
      load_unit(c, u, row_zeros);
      u64 descriptor = open_x(c);
      decode_step(u, 0, a[0]);
      wgmma_wait<0>();                           // the unit before
      pin(acc[0]); pin(a[1]);
      if (x_last != 0) c.release_x(x_last);
      promote(sum[0], acc[0], s, s8);
      s = low(u.s[0][0]); s8 = high(u.s[0][0]);
      multiply_step(acc[0], a[0], descriptor, 0, 0);
      const u32 first = c.r.empty_x + 8 * c.x.stage;
      if constexpr (BOXES == 1) { c.x.advance(); descriptor = open_x(c); }
      decode_step(u, 1, a[1]);
      multiply_step(acc[0], a[1], descriptor, 1, 1);
      wgmma_wait<1>();
      pin(a[0]);
      if constexpr (BOXES == 1) c.release_x(first);
      x_last = c.r.empty_x + 8 * c.x.stage;
      c.x.advance(1 + (SETS - 1) * (2 / BOXES));
    } while (--left > 0);
    wgmma_wait<0>();
    pin(acc[0]); pin(a[1]);
    promote(sum[0], acc[0], s, s8);
  } else {
#pragma unroll 1
    do {
      Unit u;
      load_unit(c, u, row_zeros);
      u64 descriptor = 0;
#pragma unroll
      for (int i = 0; i < 2 * STRIPS; i++) {
        const int half = i / STRIPS, p = i % STRIPS;
        const bool opens = p == 0 && (half == 0 || BOXES == 1), closes = p == STRIPS - 1 && (half == 1 || BOXES == 1);
        if (opens) descriptor = open_x(c);
        decode_step(u, i, a[i & 1]);
        multiply_step(acc[p], a[i & 1], descriptor, half, half);
        wgmma_wait<1>();
        pin(a[(i & 1) ^ 1]);
        if (opens && x_last != 0) c.release_x(x_last);
        if (closes) { x_last = c.r.empty_x + 8 * c.x.stage; c.x.advance(half == 1 ? 1 + (SETS - 1) * (2 / BOXES) : 1); }
        if (half == 1 && p > 0) { pin(acc[p - 1]); promote(sum[p - 1], acc[p - 1], low(u.s[p - 1][0]), high(u.s[p - 1][0])); }
      }
      wgmma_wait<0>();
      pin(a[1]); pin(acc[STRIPS - 1]);
      promote(sum[STRIPS - 1], acc[STRIPS - 1], low(u.s[STRIPS - 1][0]), high(u.s[STRIPS - 1][0]));
    } while (--left > 0);
  }
  c.release_x(x_last);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna16_sm90(const __grid_constant__ Arguments g, const __grid_constant__ TensorMap x_map) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;   // the shuffle tells the compiler: uniform
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, pair_rank = PAIR > 1 ? rank : 0;
  const Rings r = Rings::make(shared_address(shared));
  if (threadIdx.x == WARPGROUPS * 128) {
    for (int s = 0; s < STAGES_W; s++) { mbarrier_init(r.full_w + 8 * s, 1); mbarrier_init(r.empty_w + 8 * s, SET_WARPS); }
    if constexpr (!JOINT) for (int s = 0; s < STAGES_X; s++) { mbarrier_init(r.full_x + 8 * s, 1); mbarrier_init(r.empty_x + 8 * s, SET_WARPS * PAIR); }
    mbarrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if constexpr (PAIR > 1) cluster_sync(); else __syncthreads();
  if (warp >= WARPGROUPS * 4) {
    if constexpr (PRODUCERS) registers_decrease<WARPGROUPS == 4 ? 32 : 56>();
    const int role = warp - WARPGROUPS * 4;      // 0: W (and x of a joint ring), 1: x
    if (role < (JOINT ? 1 : 2) && lane == 0) produce(g, &x_map, r, pair_rank, role == 1);
    __syncwarp();
  } else {
    if constexpr (PRODUCERS) registers_increase<WARPGROUPS == 4 ? 112 : 224>();
    dependency_wait();
    Consumer c{r, warp / SET_WARPS, warp % SET_WARPS >> 2, warp & 3, lane};
    c.w.stage = c.set; c.x.stage = c.set * (2 / BOXES);
    int position = 0;                            // in the sequence of the block's units, of which each set takes its own
    Schedule sc = Schedule::make(g);
    while (sc.next(g)) {
      const Place at = place(g, sc.tile);
      const int strip = (at.row * PAIR + pair_rank) * TILE_STRIPS + c.wg * STRIPS, n0 = strip * 64 + c.warp * 16, m0 = at.column * NT;
      Zeros row_zeros[STRIPS];
#pragma unroll
      for (int p = 0; p < STRIPS; p++) row_zeros[p] = GROUP == 0 && (strip + p) * 64 < g.n ? c.row_zeros(g, strip + p) : zeros_symmetric();
      float sum[STRIPS][NT / 2];
      const int units = sc.kend - sc.k, mine = (units + (position + SETS - 1 - c.set) % SETS) / SETS;
      position = (position + units) % SETS;
      if constexpr (!WGMMA) multiply_sync(c, sum, mine, row_zeros);
      else if constexpr (EARLY || GROUP == 0) multiply_early(c, sum, mine, row_zeros);
      else multiply_late(c, sum, mine, row_zeros);
      if constexpr (SETS > 1) {
        join_sets(sum, r.x + SET_SUMS, c.set, c.wg, threadIdx.x & 127);
        if (c.set > 0) continue;
      }
      if constexpr (SPLIT > 1) {
        barrier_sync(1, WARPGROUPS * 128);       // the rings are read to their end before the parts overwrite them
        reduce_cluster(sum, g, r.x, strip * 64 - c.wg * STRIPS * 64, m0, rank, c.wg, c.warp, lane);
      } else {
        const bool whole = sc.k == 0 && sc.kend == g.steps;
        if (whole || join_parts(sum, g, sc, pair_rank, c.wg, threadIdx.x & 127, r.flag)) store_tile(sum, g, n0, m0, lane);
      }
    }
  }
  if constexpr (SPLIT > 1) { if (warp >= WARPGROUPS * 4) cluster_sync(); }   // the producers' share of the barrier in reduce_cluster
  if constexpr (CLUSTER > 1) cluster_sync();     // no block leaves while another may still reach into its shared memory
}
