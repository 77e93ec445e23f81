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

// The stages of this block in order, with what their copies need.
struct Feed {
  Schedule sc; const u8* source; u32 step; int strips, token, half;
  __device__ __forceinline__ bool start(const Arguments& g) {
    if (!sc.next(g)) return false;
    const Place at = place(g, sc.tile);
    const int all = (g.n + 63) >> 6, strip = at.row * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = all - 4 * super < 4 ? all - 4 * super : 4;
    strips = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    source = g.w + ((u64)super * 4 * g.steps + (u64)sc.k * in + sub) * ATOM;
    step = in * ATOM; token = at.column * TILE_TOKENS; half = 0;
    return true;
  }
  __device__ __forceinline__ bool next(const Arguments& g) {
    if (++half < HALVES) return true;
    half = 0;
    if (++sc.k < sc.kend) { source += step; return true; }
    return start(g);
  }
};
// Thread t copies the 16-byte pieces t, t + THREADS, ...: what depends on t is computed once, the rest are constants.
// The strips of a stage.
DEV void copy_w(const Feed& f, u32 to) {
  constexpr int PIECES = STRIP_CODES / 16, OF_WARP = WARP_CODES / 16, ALL = TILE_STRIPS * PIECES;
  const int t = threadIdx.x, at = (t % PIECES) / OF_WARP * (256 * BITS) + t % OF_WARP * 16;
  const u8* from = f.source + t / PIECES * ATOM + at + f.half * WARP_CODES;
  const u32 dst = to + t / PIECES * STRIP_BYTES + t % PIECES * 16;
#pragma unroll
  for (int first = 0; first < ALL; first += THREADS) {
    const int strip = first / PIECES, rest = first % PIECES;
    if ((ALL % THREADS == 0 || first + t < ALL) && strip + t / PIECES < f.strips)
      copy_16(dst + strip * STRIP_BYTES + rest * 16, from + strip * ATOM + rest / OF_WARP * (256 * BITS));
  }
  if constexpr (GROUP != 0) {
    constexpr int SCALE_PIECES = 8 * STAGE_GROUPS, EACH = ZERO ? 12 * STAGE_GROUPS : SCALE_PIECES;
    static_assert(TILE_STRIPS * EACH <= THREADS, "one piece a thread");
    const int strip = t / EACH, at = t % EACH, group = GROUP == 128 ? 0 : f.half * STAGE_GROUPS;
    const int from = at < SCALE_PIECES ? SCALES + group * 128 + at * 16 : ZEROS + group * 64 + (at - SCALE_PIECES) * 16;
    if (strip < f.strips) copy_16(to + strip * STRIP_BYTES + STRIP_SCALES + at * 16, f.source + strip * ATOM + from);
  }
}
// The boxes of a stage; zeros beyond m and k.
DEV void copy_x(const Arguments& g, const Feed& f, u32 to) {
  constexpr int PIECES = TILE_TOKENS * 8, ALL = STEP / 64 * PIECES;
  const int t = threadIdx.x, token = t / 8 % TILE_TOKENS, piece = t % 8;
  const int m = f.token + token, k = f.sc.k * 128 + f.half * STEP + t / PIECES * 64 + piece * 8;
  const u16* from = g.x + (u64)m * g.k + k;
  const u32 dst = to + t / PIECES * BOX + token * 128 + ((piece ^ (token & 7)) << 4);
#pragma unroll
  for (int first = 0; first < ALL; first += THREADS) {
    const int box = first / PIECES, more = first % PIECES / 8;
    const bool there = m + more < g.m && k + box * 64 < g.k;
    if (ALL % THREADS == 0 || first + t < ALL) copy_16_or_zero(dst + box * BOX + more * 128, there ? from + (u64)more * g.k + box * 64 : g.x, there);
  }
}

// The ring: stages that are read in turn, each filled again as soon as the next one is opened.
struct Ring {
  u32 x, w; Feed feed; bool more; u32 stage, free;
  __device__ __forceinline__ void fill(const Arguments& g, u32 base) {
    x = base; w = base + STAGES * STAGE_X;
    feed.sc = Schedule::make(g);
    more = feed.start(g);
#if __CUDA_ARCH__ >= 900
    // W depends on no kernel before this one: it is copied while they end.
    Feed of_x = feed;
    bool some = more;
#pragma unroll 1
    for (int s = 0; more && s < STAGES - 1; s++, more = feed.next(g)) copy_w(feed, w + s * STAGE_W);
    dependency_wait();
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
      if (some) { copy_x(g, of_x, x + s * STAGE_X); some = of_x.next(g); }
      copy_commit();
    }
#else
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
      if (more) { copy_w(feed, w + s * STAGE_W); copy_x(g, feed, x + s * STAGE_X); more = feed.next(g); }
      copy_commit();
    }
#endif
    stage = STAGES - 1; free = STAGES - 2;
  }
  // Moves to the next stage, waits until it is there for all warps, and refills the one that was read before.
  __device__ __forceinline__ void open(const Arguments& g) {
    free = stage;
    if (++stage == STAGES) stage = 0;
    copy_wait<STAGES - 2>();
    __syncthreads();
    if (more) { copy_w(feed, w + free * STAGE_W); copy_x(g, feed, x + free * STAGE_X); more = feed.next(g); }
    copy_commit();
  }
};

constexpr int WORDS_A_STAGE = K16 * WORDS;       // a lane's words of a strip of a stage
typedef u32 Step[(NT + 15) / 16][4];             // B fragments of 16 k

struct Warp {
  u32 row, codes, scales, zeros;                 // addresses in the first stage: this lane's row of x for ldmatrix, and what W has for it
  DEV Warp make(const Ring& r, int row_part, int column, int warp, int lane) {
    const int token = (lane & 7) + (NT == 8 ? 0 : (lane >> 4) << 3);
    const u32 w = r.w + row_part * STRIPS * STRIP_BYTES;
    return {r.x + (column * NT + token) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4), w + warp * WARP_CODES + lane * 16,
            w + STRIP_SCALES + warp * 32 + (lane >> 2) * 4, w + STRIP_ZEROS + warp * 16 + (lane >> 2) * 2};
  }
  __device__ __forceinline__ void load_x(Step& b, u32 stage, int j) const {
    const u32 at = (row + stage * STAGE_X + (j >> 2) * BOX) ^ ((j & 3) << 5);
    if constexpr (NT == 8) load_two_matrices(b[0], at);
    else
#pragma unroll
      for (int i = 0; i < NT / 16; i++) load_matrices(b[i], at + i * 2048);
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
  __device__ __forceinline__ void load_group(u32 (&s)[STRIPS], Zeros (&z)[STRIPS], u32 stage, int group) const {
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      s[p] = load_shared(scales + stage * STAGE_W + p * STRIP_BYTES + group * 128);
      if constexpr (ZERO) z[p] = zeros_of(load_shared_u16(zeros + stage * STAGE_W + p * STRIP_BYTES + group * 64));
    }
  }
};

// `left` units of 128 k; sum = the result.
DEV void multiply(Ring& r, const Arguments& g, const Warp& warp, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  float acc[STRIPS][NT / 2];                     // sums of a group
  u32 q[STRIPS][WORDS_A_STAGE], s[STRIPS];
  Zeros z[STRIPS];
  Step b[2];
  auto open = [&]() {
    r.open(g);
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
        const int k = (half * K16 + j) * 16;
        const bool starts = GROUP != 0 && k % (GROUP ? GROUP : 1) == 0, ends = GROUP != 0 && (k + 16) % (GROUP ? GROUP : 1) == 0;
        if (starts && j > 0) warp.load_group(s, z, r.stage, j * 16 / (GROUP ? GROUP : 1));
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
        if (j + 1 < K16) warp.load_x(b[(j + 1) & 1], r.stage, j + 1);
        else if (half + 1 < HALVES || left > 1) open();
#pragma unroll
        for (int n = 0; n < NT / 8; n++)
#pragma unroll
          for (int p = 0; p < STRIPS; p++) mma_sync<BF16>((GROUP ? acc : sum)[p] + 4 * n, a[p], b[j & 1][n / 2][n % 2 * 2], b[j & 1][n / 2][n % 2 * 2 + 1]);
        if (ends)
#pragma unroll
          for (int p = 0; p < STRIPS; p++)
#pragma unroll
            for (int i = 0; i < NT / 2; i++) sum[p][i] = fmaf(acc[p][i], (i & 2) ? s8[p] : s0[p], sum[p][i]);
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna16_sm80(const __grid_constant__ Arguments g) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;   // the shuffle tells the compiler: uniform
  const int wg = warp >> 2, row_part = wg / COLUMNS, column = wg % COLUMNS, warp4 = warp & 3;
  const u32 base = shared_address(shared);
  launch_dependents();
  Ring r;
  r.fill(g, base);
  const Warp own = Warp::make(r, row_part, column, warp4, lane);
  Schedule sc = Schedule::make(g);
  while (sc.next(g)) {
    const Place at = place(g, sc.tile);
    const int strip = at.row * TILE_STRIPS + row_part * STRIPS, n0 = strip * 64 + warp4 * 16, m0 = at.column * TILE_TOKENS + column * NT;
    Zeros row_zeros[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      row_zeros[p] = zeros_symmetric();
      if constexpr (GROUP == 0 && ZERO)
        if ((strip + p) * 64 < g.n) row_zeros[p] = zeros_of(__ldg((const u16*)(g.rows_of_scales + (u64)(strip + p) * ROW_BLOCK + 128) + warp4 * 8 + (lane >> 2)));
    }
    float sum[STRIPS][NT / 2];
    multiply(r, g, own, sum, sc.kend - sc.k, row_zeros);
    const bool whole = sc.k == 0 && sc.kend == g.steps;
    if (whole || join_parts(sum, g, sc, wg, threadIdx.x & 127, base + FLAGS)) store_tile(sum, g, n0, m0, base + STAGING, wg, threadIdx.x & 127);
  }
}
