// Experts of the persistent kernel: logits, of which each block has some, and the choice of a token, which each block
// makes for itself.
#pragma once
#include "exchange_words.cuh"
#include "hopper.cuh"
#include "persistent_plan.cuh"
#include "warp.cuh"

#if HB_EXPERTS
static_assert(!ROWS_SCALED, "scales of groups, where a rule of x is of 128 columns");
static_assert(CHOSEN <= 32 && CHOSEN <= EXPERTS, "a lane for each choice");

// A block has the logits of experts block + i * BLOCKS. What they are the dot products of, the stream and rows of the
// router, is added up beside the norm: a thread has the columns that it has of the stream.
struct RowsOfRouter {
  static constexpr u32 ROWS = OF_BLOCK, WORDS = ROUTER_TYPE == 2 ? 2 : 1;  // words of two columns
  bool there;  // whether the norm is one before experts
  u32 w[ROWS][LOADS_OF_STREAM][2][WORDS];
  float dots[ROWS];

  __device__ __forceinline__ void load(const void* router) {
    there = router != nullptr;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      const u32 expert = block_index() + r * BLOCKS;
      const u64 row = u64(expert) * HIDDEN;
      dots[r] = 0;
#pragma unroll
      for (u32 i = 0; i < LOADS_OF_STREAM; i++) {
        const u32 e = 4 * (thread_index() + i * THREADS);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
          const u32* const from = static_cast<const u32*>(router) + (row + column_at(e) + 8 * h) / 2 * WORDS;
#pragma unroll
          for (u32 j = 0; j < WORDS; j++) w[r][i][h][j] = 0;
          if (!there || expert >= EXPERTS || e >= HIDDEN) continue;
          // Not behind what is waited for, where the compiler would put it.
#pragma unroll
          for (u32 j = 0; j < WORDS; j++)
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(w[r][i][h][j]) : "l"(from + j));
        }
      }
    }
  }
  // Columns 2c, 2c + 8, 2c + 1, 2c + 9 of the i-th load.
  __device__ __forceinline__ void add(u32 i, const float (&x)[4]) {
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32(&v)[WORDS] = w[r][i][h];
        const float first = ROUTER_TYPE == 0   ? half_low(v[0])
                            : ROUTER_TYPE == 1 ? bf16_low(v[0])
                                               : __uint_as_float(v[0]);
        const float second = ROUTER_TYPE == 0   ? half_high(v[0])
                             : ROUTER_TYPE == 1 ? bf16_high(v[0])
                                                : __uint_as_float(v[WORDS - 1]);
        dots[r] = fmaf(x[h], first, fmaf(x[2 + h], second, dots[r]));
      }
  }
  __device__ __forceinline__ void leave(const Shared& m) const {
    if (!there) return;
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
      const float of_warp = warp_sum(dots[r]);
      if ((thread_index() & 31) == 0) m.dots()[r * WARPS + thread_index() / 32] = of_warp;
    }
  }
};

// Is greater where a logit is; above 0.
DEV u32 rank_of(float logit) {
  const u32 bits = __float_as_uint(logit + 0.f);  // -0 + 0 is 0
  return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}
DEV float logit_of(u32 rank) { return __uint_as_float(rank >> 31 ? rank ^ 0x80000000u : ~rank); }

// Leaves the logits that this block has, and waits for all: the greatest are those of the token's experts, of equals
// that of the lower number, the greatest first. Where a logit is not finite all shares are NaN, of experts that there
// are. The first warp does it, and tells the warps that bring weights.
DEV void choose(const Params& p, const Shared& m, u32 layer) {
  if (thread_index() >= 32) return;
  // Four at a time where there are many.
  constexpr bool QUADS = EXPERTS % 4 == 0 && EXPERTS > 64;
  constexpr u32 OF_LANE = QUADS ? (EXPERTS + 127) / 128 * 4 : (EXPERTS + 31) / 32;
  const u32 lane = thread_index(), first = lane * OF_LANE;  // a lane's experts lie side by side
  const Layer& of = m.layer(layer);
  u32* const logits = set_of(p, m) + layer * WORDS_OF_LAYER + AT_LOGITS;
  u64 w[OF_LANE][2];
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++)
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
      w[i][j] = 0;
      const u8* const table = of.product(2 + j).w + 8 * (first + i);
      if (first + i < EXPERTS) asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(w[i][j]) : "l"(table));
    }
  const float factor = factor_of_norm(m, of.eps[1]);
#pragma unroll
  for (u32 r = 0; r < OF_BLOCK; r++) {
    const u32 expert = block_index() + r * BLOCKS;
    const float dot = warp_sum(lane < WARPS ? m.dots()[r * WARPS + lane] : 0.f);
    if (lane == 0 && expert < EXPERTS) leave(logits + expert, __float_as_uint(dot * factor));
  }
  u32 rank[OF_LANE];
  if (QUADS) {
    constexpr u32 COUNT = (OF_LANE + 3) / 4;
    uint4 quads[COUNT];
    look_for(quads, [&](u32 i) { return first + 4 * i < EXPERTS ? logits + first + 4 * i : nullptr; });
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++)
      rank[i] = i % 4 == 0   ? quads[i / 4].x
                : i % 4 == 1 ? quads[i / 4].y
                : i % 4 == 2 ? quads[i / 4].z
                             : quads[i / 4].w;
  } else {
    look_for(rank, [&](u32 i) { return first + i < EXPERTS ? logits + first + i : nullptr; });
  }
  bool finite = true;
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) finite &= (rank[i] & 0x7fffffff) < 0x7f800000;
  finite = __all_sync(ALL_LANES, finite);
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++)
    rank[i] = first + i >= EXPERTS ? 0 : finite ? rank_of(__uint_as_float(rank[i])) : ~(first + i);
  float logit[OF_LANE];
#pragma unroll
  for (u32 i = 0; i < OF_LANE; i++) logit[i] = logit_of(rank[i]);
  float greatest = 0, of_choice = 0;  // logits: of all; of choice `lane`
#pragma unroll 1
  for (u32 choice = 0; choice < CHOSEN; choice++) {
    u32 own = rank[0];
#pragma unroll
    for (u32 i = 1; i < OF_LANE; i++) own = max(own, rank[i]);
    const u32 best = __reduce_max_sync(ALL_LANES, own), taken = __ffs(__ballot_sync(ALL_LANES, own == best)) - 1;
    if (choice == 0) greatest = logit_of(best);
    if (lane == choice) of_choice = logit_of(best);
    if (lane != taken) continue;
    bool found = false;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) {
      if (found || rank[i] != best) continue;
      found = true, rank[i] = 0;
#pragma unroll
      for (u32 j = 0; j < 2; j++) m.chosen()[choice].w[j] = reinterpret_cast<const u8*>(w[i][j]);
    }
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared_address(shared) + ROUTED);
  const float share = lane < CHOSEN ? expf(of_choice - greatest) : 0.f;
  float all = share;
  if constexpr (!SHARES_OF_CHOSEN) {
    all = 0;
#pragma unroll
    for (u32 i = 0; i < OF_LANE; i++) all += first + i < EXPERTS ? expf(logit[i] - greatest) : 0.f;
  }
  all = warp_sum(all);
  if (lane < CHOSEN) m.chosen()[lane].share = finite ? share / all : __int_as_float(0x7fffffff);
}

// Brings the router's rows that this block will read into the second-level cache.
DEV void prefetch_router(const Layer& layer) {
  constexpr u32 BYTES = HIDDEN * (ROUTER_TYPE == 2 ? 4 : 2);  // of a row
#pragma unroll 1
  for (u32 expert = block_index(); expert < EXPERTS; expert += BLOCKS)
#pragma unroll 1
    for (u32 i = 128 * thread_index(); i < BYTES; i += 128 * THREADS)
      prefetch_l2(static_cast<const u8*>(layer.router) + u64(expert) * BYTES + i);
}
#else
struct RowsOfRouter {
  __device__ __forceinline__ void load(const void*) {}
  __device__ __forceinline__ void add(u32, const float (&)[4]) {}
  __device__ __forceinline__ void leave(const Shared&) const {}
};
DEV void choose(const Params&, const Shared&, u32) {}
DEV void prefetch_router(const Layer&) {}
#endif
