// Main loops of the wNa16 GEMM on Hopper: `left` units of a piece, from the rings to fp32 sums in registers, by
// mma.sync or wgmma.
#pragma once
#include "wna16_stages.cuh"

// `left` units with mma.sync; sum = the result.  Sums of x come from a product with ones, or from another warp.
DEV void multiply_sync(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  constexpr int AT_ONCE = GROUP == 16 ? 2 : 1;  // groups that are summed side by side
  constexpr int STEPS = SCALED ? SCALED * AT_ONCE / 16 : 8,
                CHAINS = NT == 8 || AT_ONCE == 2 ? 2 : 1;  // k16 steps of those; independent sums a token block
  constexpr bool TERMS_FIRST = !SCALE_F32 && !W_OFFSET && GROUP != 16;  // where there are registers for those of a unit
  constexpr u32 ONE = BF16 ? 0x3f803f80 : 0x3c003c00;
  const u32 ones[4] = {ONE, ONE, ONE, ONE};
  const u32 row =
      c.r.x + (c.lane & 7) * 128 + (((c.lane >> 3) ^ (c.lane & 7)) << 4);  // this lane's row in a swizzled box
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = 0.f;
#pragma unroll 1
  for (; left > 0; left--, c.w.advance(SETS)) {
    mbarrier_wait(c.r.full_w + 8 * c.w.stage, c.w.phase);
    Codes q[STRIPS];
    UnitTerms t[STRIPS];
    Multiples m[STRIPS];
#pragma unroll
    for (int p = 0; p < STRIPS; p++) {
      load_codes(q[p], c.codes(p), c.lane);
      m[p] = c.multiples(p);
#pragma unroll
      for (int i = 0; TERMS_FIRST && i < GROUPS; i++) t[p].load_scales(c, {}, p, i), t[p].load_zeros(c, {}, p, i);
      if constexpr (GROUP == 0) t[p].z[0] = row_zeros[p];
    }
#pragma unroll
    for (int group = 0; group < 8 * AT_ONCE / STEPS; group += AT_ONCE) {
      float acc[STRIPS][CHAINS][NT / 2], of_x[AT_ONCE][NT / 2];
#pragma unroll
      for (int p = 0; p < STRIPS; p++) {
#pragma unroll
        for (int i = group; !TERMS_FIRST && i < group + AT_ONCE; i++) t[p].load_zeros(c, m[p], p, i);
#pragma unroll
        for (int h = 0; h < CHAINS; h++)
#pragma unroll
          for (int i = 0; i < NT / 2; i++) acc[p][h][i] = 0.f;
      }
#pragma unroll
      for (int i = 0; W_OFFSET && i < NT / 2; i++) of_x[0][i] = of_x[AT_ONCE - 1][i] = 0.f;
#pragma unroll
      for (int jj = group / AT_ONCE * STEPS; jj < (group / AT_ONCE + 1) * STEPS; jj += 2) {  // 32 k each
        u32 b[NT / 8][4];
#pragma unroll
        for (int n = 0; n < NT / 8; n++)
          load_matrices(b[n], (row + c.w.stage * STAGE_X + (jj >> 2) * BOX + n * 1024) ^ ((jj & 2) << 5));
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int own = AT_ONCE == 2 ? h : 0;
#pragma unroll
          for (int p = 0; p < STRIPS; p++) {
            u32 a[4];
            if constexpr (FOLDED)
              decode<8>(q[p], jj + h, Fold::of(m[p].of_step(jj + h), jj + h), a);
            else
              decode<8>(q[p], jj + h, t[p].z[GROUP ? group + own : 0], a);
#pragma unroll
            for (int n = 0; n < NT / 8; n++)
              mma_sync<BF16>(acc[p][h % CHAINS] + 4 * n, a, b[n][2 * h], b[n][2 * h + 1]);
          }
          if constexpr (W_OFFSET && !FOLDED)
#pragma unroll
            for (int n = 0; n < NT / 8; n++) mma_sync<BF16>(of_x[own] + 4 * n, ones, b[n][2 * h], b[n][2 * h + 1]);
        }
      }
#pragma unroll
      for (int i = group; !TERMS_FIRST && i < group + AT_ONCE; i++)
#pragma unroll
        for (int p = 0; p < STRIPS; p++) t[p].load_scales(c, m[p], p, i);
      [[maybe_unused]] u32 offsets[STRIPS], sums[NT / 8][2];  // FOLDED: of this lane's group
      if constexpr (FOLDED) {
        mbarrier_wait(c.r.summed + 8 * c.w.stage, c.w.phase);
#pragma unroll
        for (int p = 0; p < STRIPS; p++)
          offsets[p] = load_shared(c.params(p) + words_of_pair(c.lane >> 2) + (c.lane & 3) * 4);
#pragma unroll
        for (int n = 0; n < NT / 8; n++) load_shared(sums[n], c.r.x_sums(c.w.stage) + n * 256 + c.lane * 8);
      }
      if (group == 8 * AT_ONCE / STEPS - AT_ONCE) c.release_loaded(c.r.empty_w + 8 * c.w.stage);
#pragma unroll
      for (int p = 0; p < STRIPS; p++) {
        if constexpr (CHAINS == 2 && AT_ONCE == 1) {
#pragma unroll
          for (int i = 0; i < NT / 2; i++) acc[p][0][i] += acc[p][CHAINS - 1][i];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const UnitTerms& terms = t[p];
          promote(sum[p], acc[p][i], GROUP ? first_row(terms.s[group + i]) : 1.f,
                  GROUP ? second_row(terms.s[group + i]) : 1.f);
          if constexpr (FOLDED) multiply_sums(of_x[i], offsets[p], sums);
          if constexpr (W_OFFSET) promote(sum[p], of_x[i], terms.o[group + i].r, terms.o[group + i].r8);
        }
      }
    }
  }
}

// What a unit of wgmma starts with: codes, scales and zero points in registers.
struct Unit {
  Codes q[STRIPS];
  UnitTerms t[STRIPS];
  Multiples m[STRIPS];
  TwoFloats o[STRIPS];  // offsets of the group that this lane has a column of
  u32 params[STRIPS], empty_w;
  __device__ __forceinline__ RowPair scales(int p, int group) const {
    return MULTIPLES ? m[p].scales(group) : t[p].s[group];
  }
};
// A lane has the offsets of the group that it has a column of; what they take off codes it gets of every group.
[[maybe_unused]] DEV void load_offsets(const Consumer& c, Unit& u, int p) {
  constexpr int ALL = GROUPS ? GROUPS : 1;
  const int group = (c.lane & 3) % ALL;
  if constexpr (CENTRED) {
    const Centred own = Centred::of(c.scales({}, p, group), c.offsets({}, p, group));
    u.o[p] = own.o;
#pragma unroll
    for (int i = 0; i < ALL; i++)
      u.t[p].z[i] = {__shfl_sync(0xffffffffu, own.z.r, i, 4), __shfl_sync(0xffffffffu, own.z.r8, i, 4)};
  } else {
    const u32 word = load_shared(c.params(p) + words_of_pair(c.lane >> 2) + group * 4);
    u.o[p] = both_rows(offset_pair(word, u.m[p].of_offsets, group));
  }
}
DEV void load_unit(Consumer& c, Unit& u, const Zeros (&row_zeros)[STRIPS]) {
  mbarrier_wait(c.r.full_w + 8 * c.w.stage, c.w.phase);
#pragma unroll
  for (int p = 0; p < STRIPS; p++) {
    u.m[p] = c.multiples(p);
    u.params[p] = c.params(p);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      if constexpr (!MULTIPLES && !EARLY_F32) u.t[p].s[i] = c.scales({}, p, i);
      u.t[p].z[i] = c.zeros(p, i);
    }
    if constexpr (W_OFFSET && !EARLY) load_offsets(c, u, p);
    if constexpr (GROUP == 0) u.t[p].z[0] = row_zeros[p];
  }
#pragma unroll
  for (int p = 0; p < STRIPS; p++) load_codes(u.q[p], c.codes(p), c.lane);
  u.empty_w = c.r.empty_w + 8 * c.w.stage;
  c.w.advance(SETS);
}
// Frees the stage of W, once a wgmma holds the last codes: they have arrived then, and no fence is needed.  In a joint
// ring it is freed with x.
DEV void release_unit(const Consumer& c, const Unit& u) {
  if constexpr (!JOINT) {
    __syncwarp();
    c.release(u.empty_w);
  }
}
// Waits for the current stage of x and returns its descriptor; the shuffle makes it uniform, else it would cost two
// moves a wgmma.
DEV u64 open_x(const Consumer& c) {
  if constexpr (!JOINT) mbarrier_wait(c.r.full_x + 8 * c.x.stage, c.x.phase);
  return RowsOfX::DESCRIPTOR_HIGH |
         __shfl_sync(0xffffffffu, wgmma_descriptor_low(c.r.x) + c.x.stage * (STAGE_X / 16), 0);
}
// Offsets of a unit as the A operand of TF32, 8 k: of four groups the upper 11 bits, then what is left of them; of two
// groups both, twice.
[[maybe_unused]] DEV void split_offsets(TwoFloats offsets, int lane, u32 (&o)[4]) {
  const float both[2] = {offsets.r, offsets.r8};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float high = rounded_to_tf32(both[i]), rest = rounded_to_tf32(both[i] - high);
    o[i] = __float_as_uint(GROUPS == 2 && (lane & 2) ? rest : high);
    o[i + 2] = GROUPS == 2 ? o[i] : __float_as_uint(rest);
  }
}
// The descriptor of the upper parts of the current stage's sums of x: [tokens][4 groups, or twice 2], 8 tokens in 128
// bytes; lower parts lie behind all of them.  Of four groups both halves of k are the same parts, of two the upper and
// the lower ones.
[[maybe_unused]] DEV u64 x_sums_low(const Consumer& c) {
  const u32 low = __shfl_sync(0xffffffffu, (c.r.x_sums(c.x.stage) & 0x3ffff) >> 4, 0);
  return (128ull / 16) << 32 | (GROUPS == 2 ? NT << 16 : 0) | low;
}
// sum += offsets * sums of TOKENS of x.
template <int TOKENS, int C> DEV void multiply_offsets(float (&sum)[C], const u32 (&o)[4], u64 x_sums) {
  WgmmaTf32<TOKENS>::run(sum, o, x_sums);
  if constexpr (GROUPS == 4) WgmmaTf32<TOKENS>::run(sum, o, x_sums + NT);
}
// Step i of a unit is strip i % STRIPS of half i / STRIPS (64 k): its four fragments.
DEV void decode_step(const Consumer& c, const Unit& u, int i, u32 (&a)[4][4]) {
  constexpr int STEPS = GROUP ? GROUP / 16 : 8;  // k16 steps of a group
  [[maybe_unused]] TwoFloats s, o;  // EARLY_F32: those of a group are loaded where it begins
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int k16 = 4 * (i / STRIPS) + j, p = i % STRIPS, group = k16 / STEPS;
    decode<8>(u.q[p], k16, u.t[p].z[group], a[j]);
    if constexpr (EARLY_F32) {
      if (j == 0 || k16 % STEPS == 0) {
        s = both_rows(MULTIPLES ? u.m[p].scales_of_group(group) : c.scales(u.params[p], group));
        o = both_rows(MULTIPLES ? u.m[p].offsets_of_group(group) : c.offsets(u.params[p], group));
      }
      scale_fragment(s, o, a[j]);
    } else if constexpr (EARLY && GROUP != 0) {
      scale_fragment(u.t[p].s[group].v[0], a[j]);
    }
  }
  pin(a);
}
// The step's wgmmas, as one group; keep: whether the first one adds to d.
DEV void multiply_step(int i, float (&d)[NT / 2], const u32 (&a)[4][4], u64 descriptor, int keep) {
  const u64 b = descriptor + (BOXES == 2 ? i / STRIPS * (BOX / 16) : 0);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; j++) Wgmma<NT, BF16>::run(d, a[j], b + RowsOfX::descriptor_step(j), j ? 1 : keep);
  wgmma_commit();
}

// `left` units with wgmma, where all products of a tile go to one set of sums: scales early, or one scale a row.
// Step i uses fragments i & 1 while the wgmmas of step i - 1 are in flight.
DEV void multiply_early(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  u32 a[2][4][4];
  u32 x_last = 0;  // empty barrier of the stage of x that the last step reads (0: none)
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
      decode_step(c, u, i, a[i & 1]);
      multiply_step(i, sum[p], a[i & 1], descriptor, half ? 1 : keep);
      if (i == 2 * STRIPS - 1) release_unit(c, u);
      wgmma_wait<1>();  // step i - 1 is done
      pin(a[(i & 1) ^ 1]);
      if (opens && x_last != 0) c.release(x_last);
      if (closes) {
        x_last = c.r.empty_x + 8 * c.x.stage;
        c.x.advance(half == 1 ? 1 + (SETS - 1) * (2 / BOXES) : 1);
      }
    }
    keep = 1;
  } while (--left > 0);
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < STRIPS; p++) pin(sum[p]);
  pin(a[1]);
  c.release(x_last);
}

// `left` units with wgmma, where a unit has sums of its own, which the scales multiply; two strips a warpgroup.
DEV void multiply_late_of_strips(Consumer& c, float (&sum)[STRIPS][NT / 2], int left,
                                 const Zeros (&row_zeros)[STRIPS]) {
  float acc[STRIPS][NT / 2];
  u32 a[2][4][4];
  u32 x_last = 0;
  float s = 0.f, s8 = 0.f;  // scales of the last strip of the unit before
#pragma unroll
  for (int p = 0; p < STRIPS; p++)
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[p][i] = acc[p][i] = 0.f;
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
      decode_step(c, u, i, a[i & 1]);
      if (i == 0) {  // the last strip of the unit before was in the tensor cores until here
        wgmma_wait<0>();
        pin(a[1]);
        pin(acc[STRIPS - 1]);
        promote(sum[STRIPS - 1], acc[STRIPS - 1], s, s8);
        s = first_row(u.t[STRIPS - 1].s[0]);
        s8 = second_row(u.t[STRIPS - 1].s[0]);
      }
      multiply_step(i, acc[p], a[i & 1], descriptor, half);
      if (i == 2 * STRIPS - 1) release_unit(c, u);
      if (i > 0) {
        wgmma_wait<1>();
        pin(a[(i & 1) ^ 1]);
      }
      if (opens && x_last != 0) c.release(x_last);
      if (closes) {
        x_last = c.r.empty_x + 8 * c.x.stage;
        c.x.advance(half == 1 ? 1 + (SETS - 1) * (2 / BOXES) : 1);
      }
      if (half == 1 && p > 0) {
        pin(acc[p - 1]);
        promote(sum[p - 1], acc[p - 1], first_row(u.t[p - 1].s[0]), second_row(u.t[p - 1].s[0]));
      }
    }
  } while (--left > 0);
  wgmma_wait<0>();
  pin(a[1]);
  pin(acc[STRIPS - 1]);
  promote(sum[STRIPS - 1], acc[STRIPS - 1], s, s8);
  c.release(x_last);
}

// The same for groups of any size, of which each has sums of its own; one strip a warpgroup.  A unit is multiplied in
// steps of a group, of 64 k at most: fragments of a step are converted while the step before is in the tensor cores.
// With many tokens each half of them has products of its own: one half is multiplied while the other is promoted.
DEV void multiply_late(Consumer& c, float (&sum)[STRIPS][NT / 2], int left, const Zeros (&row_zeros)[STRIPS]) {
  constexpr int K16 = SCALED && SCALED < 64 ? SCALED / 16 : 4, STEPS_A_UNIT = 8 / K16;  // k16 steps at once
  constexpr int HALVES = NT >= 96 ? 2 : 1, TOKENS = NT / HALVES, OWN = TOKENS / 2, LAST = HALVES - 1;
  float acc[HALVES][OWN];
  u32 a[2][K16][4];
  u32 x_last = 0;
  float s = 0.f, s8 = 0.f;  // scales of the group before
#pragma unroll
  for (int i = 0; i < NT / 2; i++) sum[0][i] = acc[i / OWN][i % OWN] = 0.f;
  if (SETS > 1 && left == 0) return;
  float (&sums)[HALVES][OWN] = *reinterpret_cast<float (*)[HALVES][OWN]>(sum[0]);
#pragma unroll 1
  do {
    Unit u;
    load_unit(c, u, row_zeros);
    [[maybe_unused]] u32 o[4];
    if constexpr (X_SUMS) split_offsets(u.o[0], c.lane, o);
    u64 descriptor = 0;
#pragma unroll
    for (int step = 0; step < STEPS_A_UNIT; step++) {
      const int first = step * K16, half_k = first / 4, group = SCALED ? first * 16 / SCALED : 0;
      const int columns = SCALED ? SCALED : 128;
      const bool begins = first * 16 % columns == 0, ends = (first + K16) * 16 % columns == 0;  // a group
      const bool opens = first % 4 == 0 && (half_k == 0 || BOXES == 1),
                 closes = (first + K16) % 4 == 0 && (half_k == 1 || BOXES == 1);
      if (opens) descriptor = open_x(c);
      u32(&fragments)[K16][4] = a[step & 1];
#pragma unroll
      for (int j = 0; j < K16; j++) {
        if constexpr (FOLDED)
          decode<8>(u.q[0], first + j, Fold::of(u.m[0].of_step(first + j), first + j), fragments[j]);
        else
          decode<8>(u.q[0], first + j, u.t[0].z[group], fragments[j]);
      }
      pin(fragments);
      const u64 b = descriptor + (BOXES == 2 ? half_k * (BOX / 16) : 0);
      const auto multiply = [&](int h) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < K16; j++)
          Wgmma<TOKENS, BF16>::run(
              acc[h], fragments[j],
              b + RowsOfX::descriptor_of_tokens(h * TOKENS) + RowsOfX::descriptor_step((first + j) & 3),
              j || !begins ? 1 : 0);
        if constexpr (X_SUMS)
          if (step == 0) multiply_offsets<TOKENS>(sums[h], o, x_sums_low(c) + h * TOKENS);
        wgmma_commit();
      };
      // The last half of the step before is in the tensor cores until here, or until the first of this one is there.
      if (step == 0 || (HALVES == 1 && begins)) wgmma_wait<0>();
      if constexpr (HALVES == 2) {
        if (step == 0) pin(acc[LAST]);
        multiply(0);
        if (step > 0) wgmma_wait<1>();
      } else if (!begins) {
        multiply(0);
        wgmma_wait<1>();
      }
      pin(a[(step & 1) ^ 1]);
      if (begins) {
        pin(acc[LAST]);
        if constexpr (X_SUMS) pin(sums[LAST]);
        promote(sums[LAST], acc[LAST], s, s8);
        const RowPair scales = u.scales(0, group);
        s = first_row(scales);
        s8 = second_row(scales);
      }
      if (HALVES == 2 || begins) multiply(LAST);
      if (HALVES == 2 && ends) {
        wgmma_wait<1>();
        pin(acc[0]);
        if constexpr (X_SUMS) pin(sums[0]);
        promote(sums[0], acc[0], s, s8);
      }
      if (step == STEPS_A_UNIT - 1) release_unit(c, u);
      if (x_last != 0) {
        c.release(x_last);
        x_last = 0;
      }
      if (closes) {
        x_last = c.r.empty_x + 8 * c.x.stage;
        c.x.advance(half_k == 1 ? 1 + (SETS - 1) * (2 / BOXES) : 1);
      }
    }
  } while (--left > 0);
  wgmma_wait<0>();
  pin(a[(STEPS_A_UNIT - 1) & 1]);
  pin(acc[LAST]);
  if constexpr (X_SUMS) pin(sums[LAST]);
  promote(sums[LAST], acc[LAST], s, s8);
  c.release(x_last);
}
