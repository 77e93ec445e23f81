// Experts of the persistent kernel: logits, to which all blocks add, and the choice of a token, which each block makes
// for itself.
#pragma once
#include "exchange_words.cuh"
#include "hopper.cuh"
#include "persistent_plan.cuh"
#include "warp.cuh"

#if HB_EXPERTS
static_assert(!ROWS_SCALED, "scales of groups, where a rule of x is of 128 columns");
static_assert(CHOSEN <= 32 && CHOSEN <= EXPERTS, "a lane for each choice");
static_assert(!LAYER_NORM && !NORMS_BEHIND, "a logit needs no more of the norm than its weights");

// A logit is a sum over the stream, which its norm divides later. So no block waits for all of the stream: each adds to
// all logits what its own rows give, a row block at a time. A word of 64 bits adds up such terms as whole numbers, and
// counts them: sums are exact, whatever the order of blocks, and a word says for itself that it has all. It starts with
// all bits set, as words that are NOT_YET do: what was added is one more.
static __device__ constexpr u32 bits_of_number(u32 v) { return v ? 1 + bits_of_number(v / 2) : 0; }
constexpr u32 TERMS = HIDDEN / 16, COUNT_BITS = bits_of_number(TERMS);

// A word of each expert, for terms in whole numbers of 2^-FRACTION: the sum of terms, of which each has half of its
// range added so that none is negative; from bit SUM on their number; above it the number of those that are none.
template <u32 FRACTION, u32 SUM> struct Plane {
  static constexpr u64 ONE = u64(1) << SUM, MIDDLE = u64(1) << (SUM - COUNT_BITS - 1);
  static constexpr float SCALE = float(u64(1) << FRACTION);
  static __device__ __forceinline__ bool holds(float v) { return fabsf(v) < float(MIDDLE) / SCALE; }
  static __device__ __forceinline__ u64 term(float v) { return ONE + MIDDLE + u64(__float2ll_rn(v * SCALE)); }
  static __device__ __forceinline__ u32 count(u64 word) { return u32(word >> SUM) & ((1u << COUNT_BITS) - 1); }
  static __device__ __forceinline__ float sum(u64 word) {
    return float((long long)((word & (ONE - 1)) - count(word) * MIDDLE)) / SCALE;
  }
};
// Most terms; large ones; and those that are too large or NaN, by their number alone.
using Fine = Plane<32, 64 - COUNT_BITS>;
using Coarse = Plane<12, 64 - 2 * COUNT_BITS>;

DEV u64 look_at_sum(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEV u64* place_of_logit(u64* logits, u32 plane, u32 expert) {
  return logits + plane * (WORDS_OF_PLANE / 2) + expert / SUMS_TOGETHER * SUMS_APART + expert % SUMS_TOGETHER;
}

// A block's rows of the router: columns of its rows of the stream, of all experts. A thread has some of them.
struct RowsOfRouter {
  static constexpr u32 WORDS = ROUTER_TYPE == 2 ? 16 : 8,  // of 16 columns
      LOADS = (EXPERTS * most_blocks(1) + THREADS - 1) / THREADS;
  uint4 w[LOADS][WORDS / 4];

  // The last threads have other things to do before.
  static __device__ __forceinline__ u32 item(u32 i) { return THREADS - 1 - thread_index() + i * THREADS; }
  static __device__ __forceinline__ const u8* at(const Plan& plan, const void* router, u32 expert, u32 block) {
    return static_cast<const u8*>(router) + (u64(expert) * (HIDDEN / 16) + plan.first + block) * WORDS * 4;
  }
  __device__ __forceinline__ void load(const Plan& plan, const void* router) {
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const u32 expert = item(i) % EXPERTS, block = item(i) / EXPERTS;
      const u8* const from = at(plan, router, expert, block);
#pragma unroll
      for (u32 j = 0; j < WORDS / 4; j++) {
        w[i][j] = make_uint4(0, 0, 0, 0);
        // Not behind what is waited for, where the compiler would put it.
        if (block < plan.blocks)
          asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(w[i][j].x), "=r"(w[i][j].y), "=r"(w[i][j].z), "=r"(w[i][j].w)
                       : "l"(from + 16 * j));
      }
    }
  }
  // Adds what the block's rows give to the logits.
  __device__ __forceinline__ void add(const Shared& m, const Plan& plan, u64* logits) const {
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const u32 expert = item(i) % EXPERTS, block = item(i) / EXPERTS;
      if (block >= plan.blocks) continue;
      float x[16], dot = 0;
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        *reinterpret_cast<float4*>(x + 4 * j) = reinterpret_cast<const float4*>(m.rows_of_stream())[4 * block + j];
#pragma unroll
      for (u32 c = 0; c < WORDS; c++) {
        const uint4& four = w[i][c / 4];
        const u32 v = c % 4 == 0 ? four.x : c % 4 == 1 ? four.y : c % 4 == 2 ? four.z : four.w;
        if constexpr (ROUTER_TYPE == 2) {
          dot = fmaf(x[c], __uint_as_float(v), dot);
        } else {
          const bool bf16 = ROUTER_TYPE == 1;
          dot = fmaf(x[2 * c], bf16 ? bf16_low(v) : half_low(v), dot);
          dot = fmaf(x[2 * c + 1], bf16 ? bf16_high(v) : half_high(v), dot);
        }
      }
      const bool fine = Fine::holds(dot), coarse = Coarse::holds(dot);
      const u64 none = Coarse::ONE + (Coarse::ONE << COUNT_BITS);
      const u64 term = fine ? Fine::term(dot) : coarse ? Coarse::term(dot) : none;
      asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(place_of_logit(logits, !fine, expert)), "l"(term)
                   : "memory");
    }
  }
};
DEV u64* logits_of(const Params& p, const Shared& m, u32 layer) {
  return reinterpret_cast<u64*>(set_of(p, m) + layer * WORDS_OF_LAYER + AT_LOGITS);
}

// Is greater where a logit is; above 0.
DEV u32 rank_of(float logit) {
  const u32 bits = __float_as_uint(logit + 0.f);  // -0 + 0 is 0
  return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

// Waits for all logits: the greatest are those of the token's experts, of equals that of the lower number, the greatest
// first. Where a logit is not finite all become NaN, and experts are any that there are. The first warp does it, and
// tells the warps that bring weights.
DEV void choose(const Params& p, const Shared& m, u32 layer) {
  if (thread_index() >= 32) return;
  constexpr u32 OF_LANE = (EXPERTS + 31) / 32;
  const u32 lane = thread_index();
  const Layer& of = m.layer(layer);
  u64* const logits = logits_of(p, m, layer);
  auto number = [&](u32 i) { return lane + 32 * i; };
  u64 w[OF_LANE][2], fine[OF_LANE], coarse[OF_LANE];
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      w[i][j] = 0;
      const u8* const table = of.product(2 + j).w + 8 * number(i);
      if (number(i) < EXPERTS) asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(w[i][j]) : "l"(table));
    }
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) fine[i] = coarse[i] = 0;
  bool all;
#pragma unroll 1
  do {
    all = true;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) {
      if (number(i) >= EXPERTS || Fine::count(fine[i]) + Coarse::count(coarse[i]) == TERMS) continue;
      all = false;
      fine[i] = look_at_sum(place_of_logit(logits, 0, number(i))) + 1;
      coarse[i] = look_at_sum(place_of_logit(logits, 1, number(i))) + 1;
    }
  } while (!all);
  float logit[OF_LANE];
  bool finite = true;
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) {
    logit[i] = Fine::sum(fine[i]) + Coarse::sum(coarse[i]);
    finite &= coarse[i] >> (64 - COUNT_BITS) == 0;
  }
  finite = __all_sync(ALL_LANES, finite);
  u32 rank[OF_LANE];
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) {
    if (!finite) logit[i] = __uint_as_float(0x7fffffff);
    rank[i] = number(i) >= EXPERTS ? 0 : finite ? rank_of(logit[i]) : ~number(i);
    if (number(i) < EXPERTS) m.logits()[number(i)] = logit[i];
  }
#pragma unroll 1
  for (u32 choice = 0; choice < CHOSEN; choice++) {
    u32 own = 0;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) own = max(own, rank[i]);
    const u32 best = __reduce_max_sync(ALL_LANES, own);
    u32 lowest = NOT_YET;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) lowest = min(lowest, rank[i] == best ? number(i) : NOT_YET);
    const u32 taken = __reduce_min_sync(ALL_LANES, lowest);
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) {
      if (number(i) != taken) continue;
      rank[i] = 0;
      m.chosen()[choice].share = logit[i];
#pragma unroll
      for (u32 j = 0; j < 2; j++) m.chosen()[choice].w[j] = reinterpret_cast<const u8*>(w[i][j]);
    }
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared_address(shared) + ROUTED);
}

// What logits make of shares, when it is known what the norm divides by: a warp.
DEV void share(const Shared& m, float factor) {
  const u32 lane = thread_index() & 31;
  const float greatest = m.chosen()[0].share;
  auto of_logit = [&](float logit) { return expf((logit - greatest) * factor); };
  const float own = lane < CHOSEN ? of_logit(m.chosen()[lane].share) : 0.f;
  float all = own;
  if constexpr (!SHARES_OF_CHOSEN) {
    all = 0;
#pragma unroll 1
    for (u32 e = lane; e < EXPERTS; e += 32) all += of_logit(m.logits()[e]);
  }
  all = warp_sum(all);
  __syncwarp();
  if (lane < CHOSEN) m.chosen()[lane].share = own / all;
}

// Brings the router's rows that this block will read into the second-level cache.
DEV void prefetch_router(const Shared& m, const Layer& layer) {
  const Plan& plan = m.plan(1);
#pragma unroll 1
  for (u32 item = thread_index(); item < EXPERTS * plan.blocks; item += THREADS)
    prefetch_l2(RowsOfRouter::at(plan, layer.router, item % EXPERTS, item / EXPERTS));
}
#else
struct RowsOfRouter {
  __device__ __forceinline__ void load(const Plan&, const void*) {}
  __device__ __forceinline__ void add(const Shared&, const Plan&, u64*) const {}
};
DEV u64* logits_of(const Params&, const Shared&, u32) { return nullptr; }
DEV void choose(const Params&, const Shared&, u32) {}
DEV void share(const Shared&, float) {}
DEV void prefetch_router(const Shared&, const Layer&) {}
#endif
