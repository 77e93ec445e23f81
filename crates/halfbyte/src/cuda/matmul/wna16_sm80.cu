// y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]) from sm_80 on: 4- or 8-bit weights, x fp16 or bf16, fp32 sums.
//
// The product is computed transposed: rows of W are the A operand of mma.sync m16n8k16, tokens its N.  include/wna16_atom.cuh draws
// the packed weights, wna16_sm80.cuh names what is configured.
//
// A block walks over units of one tile x 128 k.  All of its threads keep a ring of stages full with cp.async, and each warp takes from
// a stage the codes of its rows, which it converts in registers to exact integers q - z, and the x of its tokens by ldmatrix.
// Fragments of a step are loaded while the tensor cores work on the step before, also over the end of a stage.
// A scale multiplies the sums of its group in fp32: no weight is ever rounded.
// A tile that one block computed alone is stored; parts of a tile are joined in memory.
// Every sum is formed in the order of k and the same way whatever the tile, so where tiles are cut alone decides its bits.
#include "wna16_sm80.cuh"
#include "wna16_epilogue.cuh"

// The stages of this block in order, with what a thread copies of them: 16-byte pieces t, t + THREADS, ... of W and of x.  What depends on
// t is computed once a stage, the rest are constants.  Behind the last stage nothing is left of W, and x is zeros.
struct Feed {
  Schedule sc; const u8* source; u32 step; int strips, half;
  const u16* x; int rows_left, k_left;           // of this thread's first piece of x, and what is left from there
  __device__ __forceinline__ void start(const Arguments& g) {
    strips = rows_left = half = 0;
    if (!sc.next(g)) { sc.k = 0; sc.kend = 1 << 30; return; }
    const Place at = place(g, sc.tile);
    const int all = (g.n + 63) >> 6, strip = at.row * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = all - 4 * super < 4 ? all - 4 * super : 4;
    strips = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    source = g.w + ((u64)super * 4 * g.steps + (u64)sc.k * in + sub) * ATOM;
    step = in * ATOM;
    const int t = threadIdx.x, m = at.column * NT + t / 8 % NT, k = sc.k * 128 + t / X_PIECES * 64 + t % 8 * 8;
    x = g.x + (u64)m * g.pitch + k;
    rows_left = g.m - m; k_left = g.k - k;
  }
  __device__ __forceinline__ void next(const Arguments& g) {
    x += STEP; k_left -= STEP;
    if (++half < HALVES) return;
    half = 0; source += step;
    if (++sc.k == sc.kend) start(g);
  }
};
// Of the pieces of W of a stage, every THREADS-th one from `first` on.
DEV void copy_w(const Feed& f, u32 to, int first) {
  constexpr int PIECES = STRIP_CODES / 16, OF_WARP = WARP_CODES / 16;
  const int t = threadIdx.x, strip = first / PIECES, rest = first % PIECES;
  const u32 from = t / PIECES * ATOM + (t % PIECES) / OF_WARP * (256 * BITS) + t % OF_WARP * 16 + f.half * WARP_CODES;
  if ((W_PIECES % THREADS == 0 || first + t < W_PIECES) && strip + t / PIECES < f.strips)
    copy_16(to + (strip + t / PIECES) * STRIP_BYTES + (rest + t % PIECES) * 16, f.source + from + strip * ATOM + rest / OF_WARP * (256 * BITS));
}
// Scales and zero points.
DEV void copy_groups(const Feed& f, u32 to) {
  constexpr int SCALE_PIECES = 8 * STAGE_GROUPS, EACH = GROUP == 0 ? 1 : ZERO ? 12 * STAGE_GROUPS : SCALE_PIECES;
  if constexpr (GROUP != 0) {
    static_assert(TILE_STRIPS * EACH <= THREADS, "one piece a thread");
    const int strip = threadIdx.x / EACH, at = threadIdx.x % EACH, group = GROUP == 128 ? 0 : f.half * STAGE_GROUPS;
    const u32 from = strip * ATOM + (at < SCALE_PIECES ? SCALES + group * 128 + at * 16 : ZEROS + group * 64 + (at - SCALE_PIECES) * 16);
    if (strip < f.strips) copy_16(to + strip * STRIP_BYTES + STRIP_SCALES + at * 16, f.source + from);
  }
}
// Of the pieces of x, every THREADS-th one from `first` on; zeros beyond m and k.
DEV void copy_x(const Arguments& g, const Feed& f, u32 to, int first) {
  const int t = threadIdx.x, token = t / 8 % NT, piece = t % 8, box = first / X_PIECES, more = first % X_PIECES / 8;
  const bool there = more < f.rows_left && box * 64 < f.k_left;
  if (STEP / 64 * X_PIECES % THREADS == 0 || first + t < STEP / 64 * X_PIECES)
    copy_16_or_zero(to + (box + t / X_PIECES) * BOX + (more + token) * 128 + ((piece ^ (token & 7)) << 4), there ? f.x + (u64)more * g.pitch + box * 64 : g.x, there);
}

// The ring: stages that are read in turn.  While one is read, the one before it is filled again, a part of it in each step.
struct Ring {
  u32 x, w; Feed feed; u32 stage, free;
  static constexpr int COPIES_W = (W_PIECES + THREADS - 1) / THREADS, COPIES_X = (STEP / 64 * X_PIECES + THREADS - 1) / THREADS, PARTS = K16 - 1;
  __device__ __forceinline__ void copy_all_w() const {
#pragma unroll
    for (int c = 0; c < COPIES_W; c++) copy_w(feed, w + free * STAGE_W, c * THREADS);
    copy_groups(feed, w + free * STAGE_W);
  }
  __device__ __forceinline__ void copy_all_x(const Arguments& g) const {
#pragma unroll
    for (int c = 0; c < COPIES_X; c++) copy_x(g, feed, x + free * STAGE_X, c * THREADS);
  }
  // Part `part` of PARTS; each a few copies.
  __device__ __forceinline__ void copy(const Arguments& g, int part) const {
#pragma unroll
    for (int c = 0; c < COPIES_W; c++) if (c % PARTS == part) copy_w(feed, w + free * STAGE_W, c * THREADS);
#pragma unroll
    for (int c = 0; c < COPIES_X; c++) if ((c + COPIES_W) % PARTS == part) copy_x(g, feed, x + free * STAGE_X, c * THREADS);
    if (part == PARTS - 1) copy_groups(feed, w + free * STAGE_W);
  }
  // After all parts.
  __device__ __forceinline__ void close(const Arguments& g) { copy_commit(); feed.next(g); }
  __device__ __forceinline__ void fill(const Arguments& g, u32 base) {
    x = base; w = base + STAGES * STAGE_X;
    feed.sc = Schedule::make(g);
    feed.start(g);
#if __CUDA_ARCH__ >= 900
    // W depends on no kernel before this one: it is copied while they end.
    const Feed first = feed;
#pragma unroll 1
    for (free = 0; free < STAGES - 1; free++, feed.next(g)) copy_all_w();
    dependency_wait();
    feed = first;
#pragma unroll 1
    for (free = 0; free < STAGES - 1; free++) { copy_all_x(g); close(g); }
#else
#pragma unroll 1
    for (free = 0; free < STAGES - 1; free++) { copy_all_w(); copy_all_x(g); close(g); }
#endif
    stage = STAGES - 1; free = STAGES - 2;
  }
  // Moves to the next stage, when it is there for all warps.
  __device__ __forceinline__ void open() {
    free = stage;
    if (++stage == STAGES) stage = 0;
    copy_wait<STAGES - 2>();
    __syncthreads();
  }
};

constexpr int WORDS_A_STAGE = K16 * WORDS;       // a lane's words of a strip of a stage
typedef u32 Step[(NT + 15) / 16][4];             // B fragments of 16 k

struct Warp {
  u32 row, codes, scales, zeros;                 // addresses in the first stage: this lane's row of x for ldmatrix, and what W has for it
  DEV Warp make(const Ring& r, int wg, int warp, int lane) {
    const int token = (lane & 7) + (NT == 8 ? 0 : (lane >> 4) << 3);
    const u32 w = r.w + wg * STRIPS * STRIP_BYTES;
    return {r.x + token * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4), w + warp * WARP_CODES + lane * 16,
            w + STRIP_SCALES + warp * 32 + (lane >> 2) * 4, w + STRIP_ZEROS + warp * 16 + (lane >> 2) * 2};
  }
  // x of 16 tokens (or 8) and 16 k.
  __device__ __forceinline__ void load_block(u32 (&b)[4], u32 stage, int j, int i) const {
    const u32 at = ((row + stage * STAGE_X + (j >> 2) * BOX) ^ ((j & 3) << 5)) + i * 2048;
    if constexpr (NT == 8) load_two_matrices(b, at); else load_matrices(b, at);
  }
  __device__ __forceinline__ void load_x(Step& b, u32 stage, int j) const {
#pragma unroll
    for (int i = 0; i < (NT + 15) / 16; i++) load_block(b[i], stage, j, i);
  }
  __device__ __forceinline__ void load_codes(u32 (&q)[STRIPS][WORDS_A_STAGE], u32 stage) const {
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < WORDS_A_STAGE / 4; i++) {
        u32 v[4];
        load_shared(v, codes + stage * STAGE_W + p * STRIP_BYTES + i * 512);
#pragma unroll
        for (int e = 0; e < 4; e++) q[p][4 * i + e] = v[e];
      }
  }
  __device__ __forceinline__ void load_codes_of_32(u32 (&q)[2 * WORDS], u32 stage, int p, int pair) const {
    const u32 at = codes + stage * STAGE_W + p * STRIP_BYTES;
    if constexpr (BITS == 8) load_shared(q, at + pair * 512);
    else load_shared(q, at + (pair >> 1) * 512 + (pair & 1) * 8);
  }
  __device__ __forceinline__ void load_group(u32 (&s)[STRIPS], Zeros (&z)[STRIPS], u32 stage, int group) const {
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      s[p] = load_shared(scales + stage * STAGE_W + p * STRIP_BYTES + group * 128);
      z[p] = zeros_symmetric();
      if constexpr (ZERO) z[p] = zeros_of(load_shared_u16(zeros + stage * STAGE_W + p * STRIP_BYTES + group * 64));
    }
  }
};

// a times x of 16 k.
DEV void multiply_step(float (&sum)[STRIPS][NT / 2], const u32 (&a)[STRIPS][4], const Step& b) {
#pragma unroll
  for (int n = 0; n < NT / 8; n++)
#pragma unroll
    for (int p = 0; p < STRIPS; p++) mma_sync<BF16>(sum[p] + 4 * n, a[p], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
}
// `left` units of 128 k, where a group is a unit or a row; sum = the result.
DEV void multiply(Ring& r, const Arguments& g, const Warp& warp, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  float acc[STRIPS][NT / 2];                     // sums of a group
  u32 q[STRIPS][WORDS_A_STAGE], s[STRIPS];
  Zeros z[STRIPS];
  Step b[2];
  auto open = [&]() {
    r.open();
    warp.load_codes(q, r.stage);
    if constexpr (GROUP != 0) warp.load_group(s, z, r.stage, 0);
    warp.load_x(b[0], r.stage, 0);
  };
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    z[p] = row_zeros[p];
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
  }
  open();
#pragma unroll 1
  for (; left > 0; left--) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int j = 0; j < K16; j++) {
        const bool starts = GROUP != 0 && half == 0 && j == 0, ends = GROUP != 0 && half == HALVES - 1 && j == K16 - 1;
        u32 a[STRIPS][4];
        float s0[STRIPS], s8[STRIPS];
#pragma unroll
        for (int p = 0; p < STRIPS; p++) {
          decode(&q[p][j * WORDS], z[p], a[p]);
          if (ends) { s0[p] = low(s[p]); s8[p] = high(s[p]); }
          if (starts)
#pragma unroll
            for (int i = 0; i < NT / 2; i++) acc[p][i] = 0.f;
        }
        if (j + 1 < K16) {
          warp.load_x(b[(j + 1) & 1], r.stage, j + 1);
          r.copy(g, j);
        } else {
          r.close(g);
          if (half + 1 < HALVES || left > 1) open();
        }
        multiply_step(GROUP ? acc : sum, a, b[j & 1]);
        if (ends)
#pragma unroll
          for (int p = 0; p < STRIPS; p++)
#pragma unroll
            for (int i = 0; i < NT / 2; i++) sum[p][i] = fmaf(acc[p][i], (i & 2) ? s8[p] : s0[p], sum[p][i]);
      }
  }
}

// The same for groups of 32 and 64, 32 k at a time in a short loop, which leaves registers for their scales and zero points.
DEV void multiply_short(Ring& r, const Arguments& g, const Warp& warp, float (&sum)[STRIPS][NT / 2], int left) {
  constexpr int OF_GROUP = GROUP == 64 ? 2 : 1;  // times 32 k
  float acc[STRIPS][NT / 2];
  u32 q[STRIPS][2 * WORDS], s[STRIPS];
  Zeros z[STRIPS];
  Step b[2];
  int pair = 0;                                  // of steps of 16 k of the stage
  auto open = [&]() {
    r.open();
#pragma unroll
    for (int part = 0; part < Ring::PARTS; part++) r.copy(g, part);
    r.close(g);
  };
  auto load = [&]() {
#pragma unroll
    for (int p = 0; p < STRIPS; p++) warp.load_codes_of_32(q[p], r.stage, p, pair);
    if (pair % OF_GROUP == 0) warp.load_group(s, z, r.stage, pair / OF_GROUP);
    warp.load_x(b[0], r.stage, 2 * pair);
  };
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = acc[p][i] = 0.f;
  open();
  load();
#pragma unroll 1
  for (left *= 4; left > 0; left--) {
    const bool ends = pair % OF_GROUP == OF_GROUP - 1;
    u32 a[STRIPS][4];
    float s0[STRIPS], s8[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      decode(q[p], z[p], a[p]);
      s0[p] = low(s[p]); s8[p] = high(s[p]);
    }
    warp.load_x(b[1], r.stage, 2 * pair + 1);
    multiply_step(acc, a, b[0]);
#pragma unroll
    for (int p = 0; p < STRIPS; p++) decode(q[p] + WORDS, z[p], a[p]);
    if (++pair == K16 / 2) {
      pair = 0;
      if (left > 1) open();
    }
    if (left > 1) load();
    multiply_step(acc, a, b[1]);
    if (ends)
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
#pragma unroll
        for (int i = 0; i < NT / 2; i++) { sum[p][i] = fmaf(acc[p][i], (i & 2) ? s8[p] : s0[p], sum[p][i]); acc[p][i] = 0.f; }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna16_sm80(const __grid_constant__ Arguments g) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;   // the shuffle tells the compiler: uniform
  const int wg = warp >> 2, warp4 = warp & 3;
  const u32 base = shared_address(shared);
  launch_dependents();
  Ring r;
  r.fill(g, base);
  const Warp own = Warp::make(r, wg, warp4, lane);
  Schedule sc = Schedule::make(g);
  while (sc.next(g)) {
    const Place at = place(g, sc.tile);
    const int strip = at.row * TILE_STRIPS + wg * STRIPS, n0 = strip * 64 + warp4 * 16, m0 = at.column * NT;
    Zeros row_zeros[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      row_zeros[p] = zeros_symmetric();
      if constexpr (GROUP == 0 && ZERO)
        if ((strip + p) * 64 < g.n) row_zeros[p] = zeros_of(__ldg((const u16*)(g.rows_of_scales + (u64)(strip + p) * ROW_BLOCK + 128) + warp4 * 8 + (lane >> 2)));
    }
    float sum[STRIPS][NT / 2];
    if constexpr (GROUP == 32 || GROUP == 64) multiply_short(r, g, own, sum, sc.kend - sc.k);
    else multiply(r, g, own, sum, sc.kend - sc.k, row_zeros);
    const bool whole = sc.k == 0 && sc.kend == g.steps;
    if (whole || join_parts(sum, g, sc, wg, threadIdx.x & 127, base + FLAGS)) store_tile(sum, g, n0, m0, base + STAGING, wg, threadIdx.x & 127);
  }
}
