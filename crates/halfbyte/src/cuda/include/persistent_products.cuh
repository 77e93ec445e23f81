// Products of the persistent kernel: warps that bring weights through rings, warps that multiply them with x as digits,
// and the sums that these leave.
#pragma once
#include "decode_codes.cuh"
#include "hopper.cuh"
#include "persistent_inputs.cuh"
#include "persistent_multiples.cuh"
#include "persistent_parts.cuh"
#include "persistent_plan.cuh"

// What a lane brings into the second-level cache while a token's experts are not known yet: its stages of the next
// layer's q, k, v and output.
struct Ahead {
  u32 layer = 0, product = 0, left = 0, j, t;
  const u8* w;
  __device__ __forceinline__ void begin(const Params& p, const Plan& plan, u32 warp) {
    w = p.layers[layer].product(product).w;
    left = (plan.run[warp] >> 16) - (plan.run[warp] & 0xffff);
    j = plan.start[warp] & 0xffff, t = (plan.start[warp] >> 16) * STEPS;
  }
  // One stage, if there is one left.
  __device__ __forceinline__ void bring(const Params& p, const Shared& m, u32 warp, u32 of_layer) {
    if (of_layer == p.count) return;
    if (layer != of_layer) {
      layer = of_layer, product = 0;
      begin(p, m.plan(0), warp);
    }
    if (left == 0 && product == 0) begin(p, m.plan(++product), warp);
    if (left == 0) return;
    const Plan& plan = m.plan(product);
    const Place place = plan.of(0)[j];
    const u8* codes = w + u64(place.offset) * 16 + t * place.wide;
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, codes += place.wide) {
      prefetch_bulk(codes, codes_of(0));
      if (UNIT_PARAMS) prefetch_bulk(codes + place.params, UNIT_PARAMS);
    }
    if (++j == plan.blocks) j = 0, t += STEPS;
    left--;
  }
};

// Where a product's weights are, and their forms: asked for a product ahead, from memory.
struct WeightsOf {
  const u8 *w, *of_values;
  u32 forms, window;
  DEV WeightsOf ask(const Params& p, u32 number) {
    WeightsOf of{};
    if (number >= 4 * p.count) return of;
    const Layer& layer = p.layers[number >> 2];
    of.w = load_early(&layer.product(number & 3).w);
    of.window = load_early(&layer.window);
    if (VALUES_APART) of.of_values = load_early(&layer.w_of_values);
    if (FORMS) of.forms = load_early(&layer.forms);
    return of;
  }
};

// The warps that bring weights: a lane a ring. Lanes do not wait for each other: one whose ring is full looks again.
DEV void bring(const Params& p, const Shared& m, const Cache& cache) {
  constexpr u32 RINGS = WARPS / COPYING_WARPS;
  if ((threadIdx.x & 31) >= RINGS) return;
  const u32 warp = (threadIdx.x - THREADS) / 32 * RINGS + (threadIdx.x & 31);
  const u32 base = shared_address(shared), own = base + warp * STAGES * STAGE, full = full_barriers(warp),
            empty = full + 8 * STAGES;
  const u32 position = min(*p.position, u32(p.positions) - 1);
  const u64 policy = policy_evict_first();
  u32 stage = 0, phase = 1;
  // Of a token's experts: done with a layer's choice.
  const u32 routed = base + ROUTED;
  // The product after this one, of all layers; what is left of this one's stages, and the next of them.
  u32 next = 0, left = 0, blocks = 0, j = 0, t = 0;
  struct {
    const u8* w;
    const Place* places;
    u32 codes;
  } of, of_values;  // from row block `apart` on
  u32 apart = 0;
  Tiles tiles;  // of attention, before the stages of the product behind it
  WeightsOf coming = WeightsOf::ask(p, 0);
  auto begin = [&] {
    for (; left == 0 && !tiles.left() && next < 4 * p.count; next++) {
      if ((next & 3) == 1) tiles.begin(p, next >> 2, coming.window, position, warp);
      const Plan& plan = m.plan(next & 3);
      const u32 form = form_of(coming.forms, next & 3), form_of_values = form_of(coming.forms, VALUES);
      of = {coming.w, plan.of(form), codes_of(form)}, blocks = plan.blocks;
      if (VALUES_APART)
        apart = plan.apart, of_values = {coming.of_values, plan.of(form_of_values), codes_of(form_of_values)};
      coming = WeightsOf::ask(p, next + 1);
      left = (plan.run[warp] >> 16) - (plan.run[warp] & 0xffff);
      j = plan.start[warp] & 0xffff, t = (plan.start[warp] >> 16) * STEPS;
    }
  };
  Ahead ahead;
  begin();
#pragma unroll 1
  while (left || tiles.left()) {
    if (!mbarrier_is(empty + 8 * stage, phase)) continue;
    if (tiles.left()) {
      tiles.bring(p, cache, own + stage * STAGE, full + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      begin();
      continue;
    }
    const u32 product = (next - 1) & 3;
    const bool of_expert = EXPERTS && product >= 2;
    if (of_expert && !mbarrier_is(routed, (next - 1) >> 2 & 1)) {
      ahead.bring(p, m, warp, ((next - 1) >> 2) + 1);
      continue;
    }
    const bool value = VALUES_APART && j >= apart;
    const Place place = (value ? of_values : of).places[j];
    const u8* w = (value ? of_values : of).w;
    u32 column = t;
    if (of_expert) {
      constexpr u32 EACH = INNER / 128;
      w = m.chosen()[product == 2 ? place.choice : t / EACH].w[product - 2];
      if (product == 3) column = t % EACH;
    }
    const u8* codes = w + u64(place.offset) * 16 + column * place.wide;
    const u32 of_codes = (value ? of_values : of).codes;
    mbarrier_expect(full + 8 * stage, STEPS * (of_codes + UNIT_PARAMS));
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, codes += place.wide) {
      const u32 to = own + stage * STAGE + k * UNIT;
      copy_bulk(to, codes, of_codes, full + 8 * stage, policy);
      if (UNIT_PARAMS) copy_bulk(to + of_codes, codes + place.params, UNIT_PARAMS, full + 8 * stage, policy);
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++j == blocks) j = 0, t += STEPS;
    if (--left == 0) begin();
  }
  // Memory has nothing else to do from then on until the next kernel begins.
  mbarrier_wait(empty + 8 * (stage ? stage - 1 : STAGES - 1), phase ^ (stage ? 1 : 0));
  if (p.of_behind) prefetch_bulk(p.behind + u64(blockIdx.x * WARPS + warp) * p.of_behind, p.of_behind);
}

// This warp's stages of a product with its input, when that is there, to its sums. Digits of x stay in registers for
// all row blocks of a stage's columns. A lane has the sums of two digits: of four lanes the first two have all, the
// others copies.
DEV void multiply(const Params& p, const Shared& m, u32 number, const Layer& layer, const Input& input) {
  const u32 product = number & 3;
  const Plan& plan = m.plan(product);
  const u32 warp = thread_index() / 32, lane = thread_index() & 31;
  const u32 blocks = plan.blocks, run = plan.run[warp], start = plan.start[warp];
  const u32 base = shared_address(shared), full = full_barriers(warp), empty = full + 8 * STAGES;
  const u32 ring = base + warp * STAGES * STAGE;
  const float factor = (lane & 1) == 0 ? 1.0f : 65536.0f;  // of this lane's two digits
  constexpr int PARTS = GROUPS ? GROUPS : 1;  // of a step, whose sums are scaled apart
  Sums* const sums = m.sums() + warp * 16 + (lane & 1) * 8 + (lane >> 2);
  const bool adds = (lane & 3) < 2;
  u32 j = start & 0xffff, left = (run >> 16) - (run & 0xffff);
  u32 x = base + X + (WHOLE ? start >> 16 : warp) * X_OF_WARP;
  InputColumns columns;
  RowsOfRouter router;
  if (EXPERTS && product == 2) router.load(m.plan(1), layer.router);
  look_at_input(p, m, input, [&] {
    if (!WHOLE && left) columns.load(input, (start >> 16) * STEPS, left > blocks - j);
    for (u32 i = 0; i < blocks; i++)
      if (adds) sums[i * SUMS_OF_BLOCK] = {0, 0};
  });
  if (EXPERTS && product == 2) {
    router.add(m, m.plan(1), logits_of(p, m, number >> 2));
    choose(p, m, number >> 2);
  }
  if (NORMS_BEHIND && !input.pairs)
    columns.factor = looks_at_all(input) ? m.all().factor : factor_behind(p, m, input.behind);
  if (MEAN_OF_SUMS && !input.pairs) {
    const float of_warp = warp_sum(look_for_sums(p, input.sums));
    if (lane == 0) m.squares()[warp] = of_warp;
    sync();
    columns.mean = sum_of_warps(m.squares()) / float(HIDDEN);
  }
  float squares = 0;
  u32 stage = m.turns()[warp] >> 1, phase = m.turns()[warp] & 1;
#pragma unroll 1
  while (left) {
    if constexpr (!WHOLE) {
      const float of_columns = columns.put(p, m, input, x);
      if (j == 0) squares += of_columns;  // once in a block
      __syncwarp();
    }
    u32 b[STEPS][8];
    int digit_sums[STEPS][PARTS][4];  // over the columns of a group: what zero points are multiplied by
    SumsOfDigits of_groups[STEPS];  // what factors of offsets are multiplied by
    float weight[STEPS];
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
      const u32 unit = x + k * X_UNIT;
      load_digits(b[k], unit, lane);
      if constexpr (FORMS) {
        of_groups[k] = SumsOfDigits::of(b[k]);
      } else {
#pragma unroll
        for (int g = 0; g < PARTS; g++) {
          const u32 ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
          int (&sums)[4] = digit_sums[k][g], others[4] = {0, 0, 0, 0};  // in turns, which need not wait for each other
          sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
          for (int h = 4 * g / PARTS; h < 4 * (g + 1) / PARTS; h++)
            mma_sync_int8<true>(h % 2 ? others : sums, ones, b[k][2 * h], b[k][2 * h + 1]);
          sums[0] += others[0], sums[1] += others[1];
        }
      }
      if (!WHOLE) weight[k] = __uint_as_float(load_shared(unit + POWER)) * factor;
    }
    if (WHOLE) x += X_OF_WARP;
    const u32 end = min(blocks, j + left);
    left -= end - j;
    if (!WHOLE && left) columns.next(input, left > blocks);
#pragma unroll 1
    for (; j < end; j++) {
      const u32 at = ring + stage * STAGE;
      if (!WHOLE) columns.advance(p, input);
      mbarrier_wait(full + 8 * stage, phase);
      Sums sum = {0, 0};
      if constexpr (FORMS) {
        const u32 form = form_of(layer.forms, VALUES_APART && j >= plan.apart ? VALUES : product);
        multiply_units(form, at, lane, b, of_groups, weight, sum);
      } else {
        Codes codes[STEPS];
        u32 scales[STEPS][PARTS];
#pragma unroll
        for (u32 k = 0; k < STEPS; k++) {
          load_codes(codes[k], at + k * UNIT, lane);
#pragma unroll
          for (int g = 0; g < GROUPS; g++)
            scales[k][g] = load_shared(at + (lane >> 2) * 4 + k * UNIT + UNIT_CODES + GROUP_SCALES * g);
        }
#pragma unroll
        for (u32 k = 0; k < STEPS; k++)
#pragma unroll
          for (int g = 0; g < PARTS; g++) {
            constexpr int EACH = 4 / PARTS;  // k32 steps of a group
            int zero = MIDDLE, zero8 = zero;
            if (ZERO) {
              const u32 z = load_shared_u16(at + (lane >> 2) * 2 + k * UNIT + UNIT_CODES + ZEROS + GROUP_ZEROS * g);
              zero = z & 255, zero8 = z >> 8;
            }
            const int d0 = digit_sums[k][g][0], d1 = digit_sums[k][g][1];
            if (FACTORS) zero = zero8 = 0;  // they come with the factors
            constexpr int BEGIN = WHOLE ? 0 : INTEGER;
            int c[4] = {BEGIN - zero * d0, BEGIN - zero * d1, BEGIN - TIMES_8 * zero8 * d0,
                        BEGIN - TIMES_8 * zero8 * d1};
#pragma unroll
            for (int h = g * EACH; h < (g + 1) * EACH; h++) {
              u32 a[4];
              codes_as_bytes(codes[k], h, a);
              mma_sync_int8<true>(c, a, b[k][2 * h], b[k][2 * h + 1]);
            }
            if constexpr (FACTORS) {
              // A byte is a factor, the next one 128 less the zero point times it; then the same of the other row,
              // whose sums lose what they are too great by, so that those of all columns fit.
              auto byte = [&](int i) { return int(scales[k][g] >> (8 * i) & 255); };
              sum.x += byte(0) * c[0] - (128 - byte(1)) * d0;
              sum.y += byte(2) * (c[2] >> SHIFT_8) - (128 - byte(3)) * d0;
            } else if constexpr (WHOLE) {
              sum.x += c[0], sum.y += c[2];
            } else {
              auto number = [&](int v) { return __int_as_float(v) - INTEGER_FLOAT; };
              const float one = fmaf(number(c[1]), 256.0f, number(c[0])) * weight[k],
                          other = fmaf(number(c[3]), 256.0f, number(c[2])) * weight[k];
              sum.x = ROWS_SCALED ? sum.x + one : fmaf(one, low(scales[k][g]), sum.x);
              sum.y = ROWS_SCALED ? sum.y + other : fmaf(other, high(scales[k][g]), sum.y);
            }
          }
      }
      if (adds) {
        Sums* const to = sums + j * SUMS_OF_BLOCK;
        const Sums before = *to;
        *to = {before.x + sum.x, before.y + sum.y};
      }
      // All that was loaded of the stage is in what has just been stored, so no load is under way. (A fence would wait
      // for the next columns too.)
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    j = j == blocks ? 0 : j;
  }
  if (lane == 0) m.turns()[warp] = stage << 1 | phase;
  if (looks_at_all(input) || input.pairs) return;
  squares = warp_sum(squares);
  if (lane == 0) m.reduce()[warp] = squares;
}
// The second half is added to the first, and so on as long as there are two.
template <u32 HALF, u32 N> DEV void fold(Sums (&v)[N]) {
#pragma unroll
  for (u32 w = 0; w < HALF; w++) v[w].x += v[w + HALF].x, v[w].y += v[w + HALF].y;
  if constexpr (HALF % 2 == 0) fold<HALF / 2>(v);
}
// What is left of TIMES_8 in these sums.
constexpr int LEFT_8 = FACTORS || FORMS ? 1 : TIMES_8;
// Rows i % 8 and i % 8 + 8 of row block i / 8 of a product: the sums of warps, always in the same order.
DEV float2 rows(const Shared& m, u32 i) {
  const Sums* const from = m.sums() + i / 8 * SUMS_OF_BLOCK + i % 8;
  Sums v[2 * WARPS];
#pragma unroll
  for (u32 w = 0; w < 2 * WARPS; w++) v[w] = from[8 * w];
  static_assert(WARPS == 12, "halves down to three");
  fold<WARPS>(v);
  return make_float2(float(v[0].x + v[1].x + v[2].x), float(v[0].y + v[1].y + v[2].y) * (1.0f / LEFT_8));
}
