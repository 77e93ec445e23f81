// wNa8 GEMM by mma.sync, from sm_75 on: y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]), where x is
// codes of 8 bits with a scale (and an offset) for each token and group: weights of 2 to 8 bits, integer products, sums
// of a group promoted to fp32; cp.async, stream-K.
//
// As in wna16_mma.cu the product is computed transposed, over units of one tile x 128 k, out of a ring that all
// threads keep full; weights and codes are those of wna8_sm90.cu, and so is what becomes of the integers.
//   for each group of a unit (GROUP 0 or scales on two levels: the unit):
//     words of W -> bytes in registers, the A fragments of mma.sync m16n8k32 for all k of the group
//     for each part of 16 tokens:
//       codes of x by ldmatrix; integers of the group from nothing, promoted at once:
//           sum += sx (s (acc - z X) + o X) + ox (s S + o length)
// Tokens come inside k, so that the integers are those of one part and not of all tokens.
//   Groups of 16 are multiplied two by two, each by m16n8k16.
//   Where a row has one scale, alone or above factors of groups, which make bytes of codes: integers of a whole piece
//   of k stay in registers and are promoted once.
// Integers are exact; fp32 sums are in one order, so where tiles are cut alone decides their bits.
#include "wna8_mma.cuh"
#include "cp_async_ring.cuh"
#include "wna8_promote.cuh"

constexpr bool SIXTEENS = SUM_GROUP == 16;
constexpr int RUN_GROUPS = SIXTEENS ? 2 : 1;  // whose sums are scaled apart, in one run
constexpr int RUN = SUM_GROUP ? RUN_GROUPS * SUM_GROUP : 128, K32 = RUN / 32,
              RUNS = 128 / RUN;  // columns multiplied in one run, steps of it, runs of a unit
constexpr bool AHEAD =
    FIELD == 4 && SUM_GROUP != 0 && NT >= 64;  // words of the next run are loaded before the last products of this one

// Of a run and a strip: a lane's words, and the A fragments that they become.
typedef u32 Words[words_of(2 * K32)];
typedef u32 Fragments[K32][4];
template <class W>
DEV void decode_words(Fragments& a, const W& q, [[maybe_unused]] const Warp& warp, [[maybe_unused]] u32 stage,
                      [[maybe_unused]] int p) {
#pragma unroll
  for (int j = 0; j < K32; j++) {
    if constexpr (FACTORS) {
      const u32 params = warp.params + stage * STAGE_W + p * STRIP_BYTES;
      decode_fragment(q, j, factors_of(load_shared(params + (j * GROUPS / 4) * GROUP_SCALES + warp.pair * 4)), a[j]);
    } else {
      decode_bytes<2 * K32>(q, 2 * j, a[j][0], a[j][1]);
      decode_bytes<2 * K32>(q, 2 * j + 1, a[j][2], a[j][3]);
    }
  }
}
// The B fragments of a run and WIDTH tokens.
typedef u32 Columns[K32][WIDTH / 8][2];
DEV void load_columns(Columns& b, const Warp& warp, u32 stage, int run, int i) {
  constexpr int AT_ONCE = WIDTH == 8 && K32 > 1 ? 2 : 1;
#pragma unroll
  for (int j = 0; j < K32; j += AT_ONCE) {
    u32 v[4];
    warp.load_block<AT_ONCE == 2>(v, stage, run * K32 + j, i);
#pragma unroll
    for (int e = 0; e < WIDTH / 8 * AT_ONCE; e++) {
      u32(&to)[2] = AT_ONCE == 2 ? b[j + e][0] : b[j][e];
      to[0] = v[2 * e];
      to[1] = v[2 * e + 1];
    }
  }
}
// Scales, and zero points or offsets, of a group.
DEV RowGroup load_group(const Warp& warp, u32 stage, int p, int group) {
  const u32 at = stage * STAGE_W + p * STRIP_BYTES;
  return load_row_group(warp.params + at, group, warp.pair, warp.scales + at + group * GROUP_SCALES,
                        warp.zeros + at + group * GROUP_ZEROS);
}

// The units of a piece; sum = the result.
DEV void multiply(Ring& r, const Given& g, const Warp& warp, float (&sum)[STRIPS][NT / 2], const Schedule& sc,
                  int warp_of_block, int lane) {
  int left = sc.kend - sc.k;
  [[maybe_unused]] int columns = g.k - sc.k * 128;  // of the weight, from the current unit on
  int acc[STRIPS][SUM_GROUP ? WIDTH / 2 : NT / 2];
  ByteSums bytes[STRIPS];
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    bytes[p] = {0, 0};
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
#pragma unroll
    for (int i = 0; i < (SUM_GROUP ? WIDTH : NT) / 2; i++) acc[p][i] = SUM_GROUP ? MAGIC_BITS : 0;
  }
  int run = 0;
  Words ahead[STRIPS];
  auto load_ahead = [&]() {
    if (run == 0) r.open();
#pragma unroll
    for (int p = 0; p < STRIPS; p++) warp.load_steps<2 * K32>(ahead[p], r.stage, p, run * (2 * K32));
  };
  if (AHEAD) load_ahead();
#pragma unroll 1
  for (left *= RUNS; left > 0; left--, columns -= RUN) {
    if (!AHEAD && run == 0) r.open();
    Fragments a[STRIPS];
    RowGroup rows[STRIPS][RUN_GROUPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      if constexpr (AHEAD)
        decode_words(a[p], ahead[p], warp, r.stage, p);
      else {
        Words q;
        warp.load_steps<2 * K32>(q, r.stage, p, run * (2 * K32));
        decode_words(a[p], q, warp, r.stage, p);
      }
    }
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      if constexpr (SUM_GROUP != 0)
#pragma unroll
        for (int h = 0; h < RUN_GROUPS; h++) rows[p][h] = load_group(warp, r.stage, p, run * RUN_GROUPS + h);
      if constexpr (OFFSET && SUM_GROUP == 0)
#pragma unroll
        for (int j = 0; j < K32; j++) bytes[p].add(a[p][j], columns - 32 * j, lane);
      if constexpr (OFFSET && SUM_GROUP != 0)
#pragma unroll
        for (int h = 0; h < RUN_GROUPS; h++) {
          bytes[p] = {0, 0};
          const int first = h * SUM_GROUP;
          if constexpr (SIXTEENS) {
            bytes[p].add(a[p][0][2 * h], a[p][0][2 * h + 1], columns - first, lane);
          } else {
#pragma unroll
            for (int j = 0; j < K32; j++) bytes[p].add(a[p][j], columns - 32 * j, lane);
          }
          bytes[p].scaled(rows[p][h], min(max(columns - first, 0), SUM_GROUP));
        }
    }
    const u32 terms = r.w + STAGES * STAGE_W + r.stage * STAGE_TERMS + run * (RUN_GROUPS * GROUP_TERMS);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      Columns b;
      load_columns(b, warp, r.stage, run, i);
      if (RUNS == 1 || run == 0) r.copy(g, i);
      TokenTerms x[RUN_GROUPS][WIDTH / 8];  // loaded before the products, which hide how long that takes
      if constexpr (SUM_GROUP != 0)
#pragma unroll
        for (int h = 0; h < RUN_GROUPS; h++)
#pragma unroll
          for (int e = 0; e < WIDTH / 8; e++)
            x[h][e] = token_terms(terms + h * GROUP_TERMS, i * (WIDTH / 8) + e, lane & 3);
      if (i == PARTS - 1) {
        if (++run == RUNS) {
          run = 0;
          r.close(g);
        }
        if (AHEAD && left > 1) load_ahead();
      }
#pragma unroll
      for (int h = 0; h < RUN_GROUPS; h++) {
#pragma unroll
        for (int j = 0; j < K32; j++)
#pragma unroll
          for (int e = 0; e < WIDTH / 8; e++)
#pragma unroll
            for (int p = 0; p < STRIPS; p++) {
              int* to = acc[p] + (SUM_GROUP ? 0 : i * (WIDTH / 2)) + 4 * e;
              if constexpr (SIXTEENS)
                mma_sync_int8_k16<FROM_ZERO>(to, a[p][j][2 * h], a[p][j][2 * h + 1], b[j][e][h]);
              else
                mma_sync_int8<FROM_ZERO>(to, a[p][j], b[j][e][0], b[j][e][1]);
            }
        if constexpr (SUM_GROUP != 0)
#pragma unroll
          for (int e = 0; e < WIDTH / 8; e++)
#pragma unroll
            for (int p = 0; p < STRIPS; p++)
              promote_block(sum[p] + i * (WIDTH / 2) + 4 * e, acc[p], e, rows[p][h], x[h][e]);
      }
    }
  }
  if constexpr (SUM_GROUP == 0) {
    const Place at = place(g, sc.columns, sc.tile);
    const int strip = at.row * TILE_STRIPS + (warp_of_block >> 2) * STRIPS,
              of_piece = min((sc.kend - sc.k) * 128, g.k - sc.k * 128);
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      const int of_weight = (strip + p) * 64 < g.n ? strip + p : 0;  // the last tile may have fewer
      promote_rows(sum[p], acc[p], bytes[p], g, at, warp_of_block & 3, lane, of_weight, of_piece, sc.k == 0);
    }
  }
}

// The same number.  Where registers are short the compiler is not told so: what follows from it is then computed anew,
// and takes none while units are multiplied.
DEV int anew(int v) {
  if constexpr (BLOCKS == 1) asm volatile("" : "+r"(v));
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna8_mma(const __grid_constant__ Given g) {
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  launch_dependents();
  Ring r;
  r.fill(g, base);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
            lane = threadIdx.x & 31;  // the shuffle tells the compiler: uniform
  const Warp own = Warp::make(r, warp >> 2, warp & 3, lane);
  const u32 columns = columns_of(g);
  Schedule sc;
#pragma unroll 1
  for (int piece = 0; Schedule::piece(g, columns, piece, sc); piece++) {
    float sum[STRIPS][NT / 2];
    multiply(r, g, own, sum, sc, warp, lane);
    Schedule::piece(g, columns, anew(piece), sc);
    const int t = anew(threadIdx.x), wg = __shfl_sync(0xffffffffu, t >> 7, 0);
    const Place at = place(g, sc.columns, sc.tile);
    const int n0 = (at.row * TILE_STRIPS + wg * STRIPS) * 64 + (t >> 5 & 3) * 16;
    const bool whole = sc.k == 0 && sc.kend == g.steps;
    if (whole || join_parts(sum, g, sc, wg, t & 127, base + FLAGS))
      store_tile(sum, g, at, n0, base + STAGING, wg, t & 127);
  }
}
