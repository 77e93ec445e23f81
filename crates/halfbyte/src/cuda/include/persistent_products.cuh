// Products of the persistent kernel: warps that bring weights through rings, warps that multiply them with x as digits,
// and the sums that these leave.
#pragma once
#include "decode_codes.cuh"
#include "hopper.cuh"
#include "persistent_plan.cuh"

// The warps that bring weights: a lane a ring. Lanes do not wait for each other: one whose ring is full looks again.
DEV void bring(u32 count, const Shared& m) {
  constexpr u32 RINGS = WARPS / COPYING_WARPS;
  if ((threadIdx.x & 31) >= RINGS) return;
  const u32 warp = (threadIdx.x - THREADS) / 32 * RINGS + (threadIdx.x & 31);
  const u32 base = shared_address(shared), own = base + warp * STAGES * STAGE,
            full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u64 policy = policy_evict_first();
  u32 stage = 0, phase = 1;
  // The product after this one, of all layers; what is left of this one's stages, and the next of them.
  u32 next = 0, left = 0, blocks = 0, j = 0, t = 0;
  const Place* places = nullptr;
  const u8* w = nullptr;
  auto begin = [&] {
    for (; left == 0 && next < 4 * count; next++) {
      const Plan& plan = m.plan(next & 3);
      w = m.layers()[next >> 2].product(next & 3).w, places = plan.places, blocks = plan.blocks;
      left = (plan.run[warp] >> 16) - (plan.run[warp] & 0xffff);
      j = plan.start[warp] & 0xffff, t = (plan.start[warp] >> 16) * STEPS;
    }
  };
  begin();
#pragma unroll 1
  while (left) {
    if (!mbarrier_is(empty + 8 * stage, phase)) continue;
    const Place place = places[j];
    const u8* codes = w + u64(place.offset) * 32 + t * place.wide;
    mbarrier_expect(full + 8 * stage, STAGE);
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, codes += place.wide) {
      const u32 to = own + stage * STAGE + k * UNIT;
      copy_bulk(to, codes, UNIT_SCALES, full + 8 * stage, policy);
      copy_bulk(to + UNIT_SCALES, codes + place.scales, SCALE_BYTES, full + 8 * stage, policy);
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++j == blocks) j = 0, t += STEPS;
    if (--left == 0) begin();
  }
}

// This warp's stages of a product with x, to its sums. Digits of x stay in registers for all row blocks of a stage's
// columns. A lane has the sums of two digits: of four lanes the first two have all, the others copies.
DEV void multiply(const Shared& m, u32 product) {
  const Plan& plan = m.plan(product);
  const u32 warp = thread_index() / 32, lane = thread_index() & 31;
  const u32 blocks = plan.blocks, run = plan.run[warp], start = plan.start[warp];
  const u32 base = shared_address(shared), full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u32 ring = base + warp * STAGES * STAGE;
  const float factor = (lane & 1) == 0 ? 1.0f : 65536.0f;  // of this lane's two digits
  float2* const sums = m.sums(product) + warp * 16 + (lane & 1) * 8 + (lane >> 2);
  const bool adds = (lane & 3) < 2;
  for (u32 j = 0; j < blocks; j++)
    if (adds) sums[j * SUMS_OF_BLOCK] = make_float2(0, 0);
  u32 j = start & 0xffff, unit = base + X + (start >> 16) * STEPS * X_UNIT, left = (run >> 16) - (run & 0xffff);
  u32 stage = m.turns()[warp] >> 1, phase = m.turns()[warp] & 1;
#pragma unroll 1
  while (left) {
    u32 b[STEPS][8];
    int digit_sums[STEPS][GROUPS][4];  // over the columns of a group: what zero points are multiplied by
    float weight[STEPS];
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, unit += X_UNIT) {
#pragma unroll
      for (int v = 0; v < 2; v++) {
        u32 w[4];
        load_shared(w, unit + v * 256 + (lane >> 2 & 3) * 64 + (lane & 3) * 16);
        b[k][4 * v] = w[0], b[k][4 * v + 1] = w[1], b[k][4 * v + 2] = w[2], b[k][4 * v + 3] = w[3];
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const u32 ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
        int (&sums)[4] = digit_sums[k][g];
        sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
        for (int h = 4 * g / GROUPS; h < 4 * (g + 1) / GROUPS; h++)
          mma_sync_int8<true>(sums, ones, b[k][2 * h], b[k][2 * h + 1]);
      }
      weight[k] = __uint_as_float(load_shared(unit + POWER)) * factor;
    }
    const u32 end = min(blocks, j + left);
    left -= end - j;
#pragma unroll 1
    for (; j < end; j++) {
      const u32 at = ring + stage * STAGE, quarter = OWN_SCALES ? 0 : row_block(plan, product, j) & 3;
      mbarrier_wait(full + 8 * stage, phase);
      u32 codes[STEPS][8 * WORDS], scales[STEPS][GROUPS];
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
        for (int v = 0; v < 2 * WORDS; v++) {
          u32 w[4];
          load_shared(w, at + lane * 16 + k * UNIT + v * 512);
          codes[k][4 * v] = w[0], codes[k][4 * v + 1] = w[1], codes[k][4 * v + 2] = w[2], codes[k][4 * v + 3] = w[3];
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
          scales[k][g] = load_shared(at + (lane >> 2) * 4 + k * UNIT + UNIT_SCALES + quarter * 32 + 128 * g);
      }
      float sum = 0, sum8 = 0;
#pragma unroll
      for (u32 k = 0; k < STEPS; k++)
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
          constexpr int EACH = 4 / GROUPS;  // k32 steps of a group
          int zero = BITS == 4 ? 8 : 128, zero8 = zero;
          if (ZERO) {
            const u32 z =
                load_shared_u16(at + (lane >> 2) * 2 + k * UNIT + UNIT_SCALES + ZEROS - SCALES + quarter * 16 + 64 * g);
            zero = z & 255, zero8 = z >> 8;
          }
          const int d0 = digit_sums[k][g][0], d1 = digit_sums[k][g][1];
          int c[4] = {INTEGER - zero * d0, INTEGER - zero * d1, INTEGER - TIMES_8 * zero8 * d0,
                      INTEGER - TIMES_8 * zero8 * d1};
#pragma unroll
          for (int h = g * EACH; h < (g + 1) * EACH; h++) {
            u32 a[4];
            codes_as_bytes(&codes[k][2 * h * WORDS], a);
            mma_sync_int8<true>(c, a, b[k][2 * h], b[k][2 * h + 1]);
          }
          auto number = [&](int v) { return __int_as_float(v) - INTEGER_FLOAT; };
          sum = fmaf(fmaf(number(c[1]), 256.0f, number(c[0])) * weight[k], low(scales[k][g]), sum);
          sum8 = fmaf(fmaf(number(c[3]), 256.0f, number(c[2])) * weight[k], high(scales[k][g]), sum8);
        }
      loads_before_copies();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      if (adds) {
        float2* const to = sums + j * SUMS_OF_BLOCK;
        const float2 before = *to;
        *to = make_float2(before.x + sum, before.y + sum8);
      }
    }
    j = j == blocks ? 0 : j;
  }
  if (lane == 0) m.turns()[warp] = stage << 1 | phase;
}
// The second half is added to the first, and so on as long as there are two.
template <u32 HALF, u32 N> DEV void fold(float2 (&v)[N]) {
#pragma unroll
  for (u32 w = 0; w < HALF; w++) v[w].x += v[w + HALF].x, v[w].y += v[w + HALF].y;
  if constexpr (HALF % 2 == 0) fold<HALF / 2>(v);
}
// Rows i % 8 and i % 8 + 8 of row block i / 8 of a product: the sums of warps, always in the same order.
DEV float2 rows(const Shared& m, u32 product, u32 i) {
  const float2* const from = m.sums(product) + i / 8 * SUMS_OF_BLOCK + i % 8;
  float2 v[2 * WARPS];
#pragma unroll
  for (u32 w = 0; w < 2 * WARPS; w++) v[w] = from[8 * w];
  static_assert(WARPS == 12, "halves down to three");
  fold<WARPS>(v);
  return make_float2(v[0].x + v[1].x + v[2].x, (v[0].y + v[1].y + v[2].y) * (1.0f / TIMES_8));
}
