// wNa16 GEMM by mma.sync, from sm_75 on: y[m][n] = activation(x[m][k] . dequantise(W[n][k])^T + bias[n]), weights of 2
// to 8 bits, x fp16 or (from sm_80 on) bf16, fp32 sums; cp.async, stream-K.
//
// The product is computed transposed: rows of W are the A operand of mma.sync m16n8k16, tokens its N.
// include/weight_atom.cuh draws the packed weights, wna16_mma.cuh names what is configured.
//
// A block walks over units of one tile x 128 k.
//   All of its threads keep a ring of stages full with cp.async, and each warp takes from a stage the codes of its
//       rows, which it converts in registers to exact integers q - z, and the x of its tokens by ldmatrix.
//   Fragments of a step are loaded while the tensor cores work on the step before, also over the end of a stage.
//   A scale multiplies the sums of its group in fp32: no weight is ever rounded.
//   A tile that one block computed alone is stored; parts of a tile are joined in memory (stream-K).
// Every sum is formed in the order of k and the same way whatever the tile, so where tiles are cut alone decides its
// bits.
#include "wna16_mma.cuh"
#include "cp_async_ring.cuh"

// Scales, offsets and zero points of a group of a stage, of a lane's rows: what its sums are multiplied by, and sums of
// x, and what comes off codes.
DEV void load_group(const Warp& w, RowPair (&s)[STRIPS], TwoFloats (&o)[STRIPS], Zeros (&z)[STRIPS], u32 stage,
                    int group) {
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    const u32 strip = stage * STAGE_W + p * STRIP_BYTES, zeros = w.zeros + strip + group * GROUP_ZEROS;
    [[maybe_unused]] RowPair offsets;
    if constexpr (MULTIPLES) {
      const u32 params = w.params + strip,
                word = load_shared(params + words_of_pair(w.pair) + word_of_group(group) * 4);
      u32 halves = load_shared(params + last_of_pair<NIBBLES>(w.pair));
      if constexpr (W_OFFSET) {
        const u32 of_offsets = NIBBLES ? load_shared(params + last_of_pair<NIBBLES>(w.pair) + 4) : halves;
        offsets = offset_pair(word, of_offsets, group);
        if constexpr (!NIBBLES) halves = scale_halves(Multiples::load(params, w.pair).words);
      }
      s[p] = scale_pair(word, halves, group);
    } else {
      s[p] = load_row_pair(w.scales + strip + group * GROUP_SCALES);
      if constexpr (W_OFFSET) offsets = load_row_pair(zeros);
    }
    z[p] = zeros_symmetric();
    if constexpr (ZERO) z[p] = zeros_of(load_shared_u16(zeros));
    if constexpr (CENTRED) {
      const Centred centred = Centred::of(s[p], offsets);
      z[p] = centred.z, o[p] = centred.o;
    } else if constexpr (W_OFFSET) {
      o[p] = both_rows(offsets);
    }
  }
}

// sum += scale * acc.
DEV void add_scaled(float (&sum)[STRIPS][NT / 2], const float (&acc)[STRIPS][NT / 2], const RowPair (&s)[STRIPS]) {
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    const float s0 = first_row(s[p]), s8 = second_row(s[p]);
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = fmaf(acc[p][i], (i & 2) ? s8 : s0, sum[p][i]);
  }
}

// sum += offset * sum of x; `sums`: where those of a group's tokens begin.
[[maybe_unused]] DEV void add_offsets(float (&sum)[STRIPS][NT / 2], const TwoFloats (&o)[STRIPS], u32 sums) {
#pragma unroll
  for (int p = 0; p < STRIPS; p++) add_offsets(sum[p], o[p], sums);
}

// a times x of 16 k.
DEV void multiply_step(float (&sum)[STRIPS][NT / 2], const u32 (&a)[STRIPS][4], const Step& b) {
#pragma unroll
  for (int n = 0; n < NT / 8; n++)
#pragma unroll
    for (int p = 0; p < STRIPS; p++) mma_sync<BF16>(sum[p] + 4 * n, a[p], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
}
// `left` units of 128 k, where a group is a unit or a row, or its factors are in the codes; sum = the result.
DEV void multiply(Ring& r, const Given& g, const Warp& warp, float (&sum)[STRIPS][NT / 2], int left,
                  const Zeros (&row_zeros)[STRIPS]) {
  float acc[STRIPS][NT / 2];  // sums of a group
  u32 q[STRIPS][words_of(K16)];
  RowPair s[STRIPS];
  TwoFloats o[STRIPS];
  Zeros z[STRIPS];
  Multiples m[STRIPS];  // FOLDED
  Step b[2];
  auto open = [&]() {
    r.open();
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      warp.load_steps<K16>(q[p], r.stage, p, 0);
      if constexpr (FOLDED) m[p] = Multiples::load(warp.params + r.stage * STAGE_W + p * STRIP_BYTES, warp.pair);
    }
    if constexpr (GROUP != 0 && !FOLDED) load_group(warp, s, o, z, r.stage, 0);
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
        const u32 sums = r.terms(r.stage);
        u32 a[STRIPS][4];
        RowPair scales[STRIPS];  // of the stage that `open` leaves
        TwoFloats offsets[STRIPS];
        Multiples own_multiples[STRIPS];
#pragma unroll
        for (int p = 0; p < STRIPS; p++) {
          if constexpr (FOLDED) {
            decode<K16>(q[p], j, Fold::of(m[p].of_step(j), j), a[p]);
            own_multiples[p] = m[p];
            scales[p] = m[p].scales(0);
          } else {
            decode<K16>(q[p], j, z[p], a[p]);
            scales[p] = s[p], offsets[p] = o[p];
          }
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
        if (ends) add_scaled(sum, acc, scales);
        // Sums of x are those of a stage.
        if (FOLDED && ends) {
#pragma unroll
          for (int p = 0; p < STRIPS; p++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
              add_offsets(
                  sum[p],
                  both_rows(offset_pair(own_multiples[p].words[word_of_group(g)], own_multiples[p].of_offsets, g)),
                  sums + g * (NT * 4));
        } else if (W_OFFSET && j == K16 - 1) {
          add_offsets(sum, offsets, sums);
        }
      }
  }
}

// The same for groups of 16, 32 and 64, 32 k at a time in a short loop, which leaves registers for their scales and
// zero points.
DEV void multiply_short(Ring& r, const Given& g, const Warp& warp, float (&sum)[STRIPS][NT / 2], int left) {
  constexpr int OF_GROUP = GROUP == 64 ? 2 : 1;  // times 32 k
  constexpr int GROUPS_OF_PAIR = GROUP == 16 ? 2 : 1;
  float acc[STRIPS][NT / 2];
  u32 q[STRIPS][words_of(2)];
  RowPair s[STRIPS];
  TwoFloats o[STRIPS];
  Zeros z[STRIPS];
  Step b[2];
  int pair = 0;  // of steps of 16 k of the stage
  auto open = [&]() {
    r.open();
#pragma unroll
    for (int part = 0; part < PARTS; part++) r.copy(g, part);
  };
  auto load = [&]() {
#pragma unroll
    for (int p = 0; p < STRIPS; p++) warp.load_steps<2>(q[p], r.stage, p, 2 * pair);
    if (pair % OF_GROUP == 0) load_group(warp, s, o, z, r.stage, pair / OF_GROUP * GROUPS_OF_PAIR);
    warp.load_x(b[0], r.stage, 2 * pair);
  };
  // The sums of a group are scaled, and begin again.
  auto promote = [&](const RowPair(&scales)[STRIPS]) {
    add_scaled(sum, acc, scales);
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < NT / 2; i++) acc[p][i] = 0.f;
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
    u32 sums = r.terms(r.stage) + pair / OF_GROUP * GROUPS_OF_PAIR * (NT * 4);
    u32 a[STRIPS][4];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) decode<2>(q[p], 0, z[p], a[p]);
    warp.load_x(b[1], r.stage, 2 * pair + 1);
    multiply_step(acc, a, b[0]);
    if constexpr (GROUP == 16) {
      if constexpr (W_OFFSET) add_offsets(sum, o, sums);
      promote(s);
      sums += NT * 4;
      load_group(warp, s, o, z, r.stage, 2 * pair + 1);
    }
    RowPair scales[STRIPS];  // of the stage that is closed below
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      decode<2>(q[p], 1, z[p], a[p]);
      scales[p] = s[p];
    }
    if (W_OFFSET && ends) add_offsets(sum, o, sums);
    if (++pair == K16 / 2) {
      pair = 0;
      r.close(g);
      if (left > 1) open();
    }
    if (left > 1) load();
    multiply_step(acc, a, b[1]);
    if (ends) promote(scales);
  }
}

// The stages of `left` units in a warp whose rows are none of the outputs: it copies, and multiplies nothing.
[[maybe_unused]] DEV void pass(Ring& r, const Given& g, float (&sum)[STRIPS][NT / 2], int left) {
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
#pragma unroll 1
  for (left *= HALVES; left > 0; left--) {
    r.open();
#pragma unroll
    for (int part = 0; part < PARTS; part++) r.copy(g, part);
    r.close(g);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) wna16_mma(const __grid_constant__ Given g) {
  extern __shared__ __align__(1024) u8 shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0),
            lane = threadIdx.x & 31;  // the shuffle tells the compiler: uniform
  const int wg = warp >> 2, warp4 = warp & 3;
  const u32 base = shared_address(shared);
  launch_dependents();
  Ring r;
  r.fill(g, base);
  const Warp own = Warp::make(r, wg, warp4, lane);
  Schedule sc = Schedule::make(g);
  while (sc.next(g)) {
    const Place at = place(g, sc.columns, sc.tile);
    const int strip = at.row * TILE_STRIPS + wg * STRIPS, n0 = strip * 64 + warp4 * 16;
    Zeros row_zeros[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      row_zeros[p] = zeros_symmetric();
      if constexpr (GROUP == 0 && ZERO)
        if ((strip + p) * 64 < g.n)
          row_zeros[p] = zeros_of(__ldg((const u16*)(rows_of_scales(g, at) + (u64)(strip + p) * ROW_BLOCK + 128) +
                                        warp4 * 8 + (lane >> 2)));
    }
    float sum[STRIPS][NT / 2];
    // Of an image's groups many have fewer than 64 outputs.
    if (IMAGES && n0 - at.before >= at.last)
      pass(r, g, sum, sc.kend - sc.k);
    else if constexpr (SCALED == 16 || SCALED == 32 || SCALED == 64)
      multiply_short(r, g, own, sum, sc.kend - sc.k);
    else
      multiply(r, g, own, sum, sc.kend - sc.k, row_zeros);
    const bool whole = sc.k == 0 && sc.kend == g.steps;
    if (whole || join_parts(sum, g, sc, wg, threadIdx.x & 127, base + FLAGS))
      store_tile(sum, g, at, n0, base + STAGING, wg, threadIdx.x & 127);
  }
}
