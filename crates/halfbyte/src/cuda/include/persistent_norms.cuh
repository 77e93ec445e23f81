// Norms of the persistent kernel: the stream, when it is counted, with a norm's weights, to what a product reads.
#pragma once
#include "exchange_words.cuh"
#include "persistent_plan.cuh"
#include "persistent_ranks.cuh"
#include "warp.cuh"

// Waits until about all of n words are counted.
DEV void wait_for(const u32* counter, u32 n) {
  if (thread_index() == 0)
    while (look(counter) + 1 < n) {
    }
  sync();
}
// Not behind what is waited for, where the compiler would put it.
DEV float2 load_early(const float* p) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
// The places of this step.
DEV u32* set_of(const Params& p, const Shared& m) { return p.words + m.step()[2]; }
// Sums of warps, added up.
DEV float sum_of_warps(const float* of_warps) {
  float sum = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w += 4) {
    const float4 v = *reinterpret_cast<const float4*>(of_warps + w);
    sum += v.x + v.y + (v.z + v.w);
  }
  return sum;
}
// 1 / what a norm divides by, from the squares that warps have added up; a LayerNorm has divided.
DEV float factor_of_norm(const Shared& m, float eps) {
  return LAYER_NORM ? 1.0f : rsqrtf(sum_of_warps(m.reduce()) / float(HIDDEN) + eps);
}
struct Norm {
  const float *weight, *bias;  // [HIDDEN]; the bias of a LAYER_NORM
  float eps;
};
#include "persistent_experts.cuh"

DEV u32 bits_of_magnitude(float v) { return __float_as_uint(v) & 0x7fffffff; }
DEV u32 greatest_of(const float (&x)[4]) {
  return max(max(bits_of_magnitude(x[0]), bits_of_magnitude(x[1])),
             max(bits_of_magnitude(x[2]), bits_of_magnitude(x[3])));
}
// The greatest |x| of all, of those of threads.
DEV void leave_greatest(const Shared& m, u32 of_thread) {
  const u32 of_warp = __reduce_max_sync(ALL_LANES, of_thread);
  if ((thread_index() & 31) == 0) m.greatest()[thread_index() / 32] = of_warp;
}
DEV Step step_of_all(const Shared& m) {
  u32 greatest = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) greatest = max(greatest, m.greatest()[w]);
  const Step of = step_of(greatest);
  if (thread_index() == 0) put_power(shared_address(shared) + X, of.power);
  return of;
}
// The stream times a norm's weights, when it is counted, four columns at a time, as they lie together. What the norm
// divides by is left to `factor_of_norm`. The rows that this block will add to are kept. Where x has one rule, `put`
// gets it when all is known. `router`: of experts, whose logits this block has some of, or null.
template <class Put>
DEV void rms_norm(const Params& p, const Shared& m, const u32* from, const u32* counter, const float* weight,
                  const void* router, Put&& put) {
  constexpr u32 LOADS = LOADS_OF_STREAM;
  const Plan& own = m.plan(1);
  float2 w[LOADS][2];
  uint4 v[LOADS];
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
#pragma unroll
    for (u32 h = 0; h < 2; h++) w[i][h] = e < HIDDEN ? load_early(weight + column_at(e) + 8 * h) : make_float2(0, 0);
  }
  RowsOfRouter rows;
  rows.load(router);
  wait_for(counter, HIDDEN);
  look_for_stream(p, v, [&](u32 i) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    return e < HIDDEN ? from + e : nullptr;
  });
  float sum = 0;
  u32 greatest = 0;
  auto normed = [&](u32 i, float (&to)[4]) {
    to[0] = __uint_as_float(v[i].x) * w[i][0].x, to[1] = __uint_as_float(v[i].y) * w[i][1].x;
    to[2] = __uint_as_float(v[i].z) * w[i][0].y, to[3] = __uint_as_float(v[i].w) * w[i][1].y;
  };
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    if (e >= HIDDEN) break;
    const float x[4] = {__uint_as_float(v[i].x), __uint_as_float(v[i].y), __uint_as_float(v[i].z),
                        __uint_as_float(v[i].w)};
    sum = fmaf(x[0], x[0], fmaf(x[1], x[1], fmaf(x[2], x[2], fmaf(x[3], x[3], sum))));
    if (e - 16 * own.first < 16 * own.blocks) *reinterpret_cast<uint4*>(m.own() + e - 16 * own.first) = v[i];
    float here[4];
    normed(i, here);
    rows.add(i, here);
    if constexpr (WHOLE)
      greatest = max(greatest, greatest_of(here));
    else
      put(e, here, Step{});
  }
  sum = warp_sum(sum);
  if ((thread_index() & 31) == 0) m.reduce()[thread_index() / 32] = sum;
  rows.leave(m);
  if constexpr (WHOLE) leave_greatest(m, greatest);
  sync();
  if constexpr (WHOLE) {
    const Step of = step_of_all(m);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const u32 e = 4 * (thread_index() + i * THREADS);
      if (e >= HIDDEN) break;
      float here[4];
      normed(i, here);
      put(e, here, of);
    }
    sync();
  }
}

// Of the stream's numbers less the mean, or of their squares: the sum over all threads.
template <bool SQUARES> DEV float sum_of_stream(float* of_warps, const uint4 (&v)[LOADS_OF_STREAM], float mean) {
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS_OF_STREAM; i++) {
    if (4 * (thread_index() + i * THREADS) >= HIDDEN) break;
    const float x[4] = {__uint_as_float(v[i].x) - mean, __uint_as_float(v[i].y) - mean, __uint_as_float(v[i].z) - mean,
                        __uint_as_float(v[i].w) - mean};
    sum += SQUARES ? x[0] * x[0] + x[1] * x[1] + (x[2] * x[2] + x[3] * x[3]) : x[0] + x[1] + (x[2] + x[3]);
  }
  sum = warp_sum(sum);
  if ((thread_index() & 31) == 0) of_warps[thread_index() / 32] = sum;
  sync();
  return sum_of_warps(of_warps);
}
// The same with the mean taken off, divided, and with a bias added.
template <class Put>
DEV void layer_norm(const Params& p, const Shared& m, const u32* from, const u32* counter, const Norm& norm,
                    Put&& put) {
  constexpr u32 LOADS = LOADS_OF_STREAM;
  constexpr bool EARLY = LOADS <= 4;  // where registers hold weights and biases beside the stream
  const Plan& own = m.plan(1);
  float2 w[EARLY ? LOADS : 1][2], b[EARLY ? LOADS : 1][2];
  uint4 v[LOADS];
  auto column = [&](u32 i) { return 4 * (thread_index() + i * THREADS); };
#pragma unroll
  for (u32 i = 0; EARLY && i < LOADS; i++)
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 at = column_at(column(i)) + 8 * h;
      w[i][h] = column(i) < HIDDEN ? load_early(norm.weight + at) : make_float2(0, 0);
      b[i][h] = column(i) < HIDDEN ? load_early(norm.bias + at) : make_float2(0, 0);
    }
  wait_for(counter, HIDDEN);
  look_for_stream(p, v, [&](u32 i) { return column(i) < HIDDEN ? from + column(i) : nullptr; });
#pragma unroll
  for (u32 i = 0; i < LOADS; i++)
    if (column(i) < HIDDEN && column(i) - 16 * own.first < 16 * own.blocks)
      *reinterpret_cast<uint4*>(m.own() + column(i) - 16 * own.first) = v[i];
  const float mean = sum_of_stream<false>(m.reduce(), v, 0.f) / float(HIDDEN);
  const float squares = sum_of_stream<true>(m.squares(), v, mean);
  const float factor = rsqrtf(squares / float(HIDDEN) + norm.eps);
  u32 greatest = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    if (column(i) >= HIDDEN) break;
    float2 scale[2], bias[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 at = column_at(column(i)) + 8 * h;
      scale[h] = EARLY ? w[EARLY ? i : 0][h] : *reinterpret_cast<const float2*>(norm.weight + at);
      bias[h] = EARLY ? b[EARLY ? i : 0][h] : *reinterpret_cast<const float2*>(norm.bias + at);
    }
    auto normed = [&](u32 x, float scale, float bias) {
      return fmaf((__uint_as_float(x) - mean) * factor, scale, bias);
    };
    const float here[4] = {normed(v[i].x, scale[0].x, bias[0].x), normed(v[i].y, scale[1].x, bias[1].x),
                           normed(v[i].z, scale[0].y, bias[0].y), normed(v[i].w, scale[1].y, bias[1].y)};
    if constexpr (WHOLE) {
      greatest = max(greatest, greatest_of(here));
      v[i] = make_uint4(__float_as_uint(here[0]), __float_as_uint(here[1]), __float_as_uint(here[2]),
                        __float_as_uint(here[3]));
    } else {
      put(column(i), here, Step{});
    }
  }
  if constexpr (WHOLE) {
    leave_greatest(m, greatest);
    sync();
    const Step of = step_of_all(m);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      if (column(i) >= HIDDEN) break;
      const float here[4] = {__uint_as_float(v[i].x), __uint_as_float(v[i].y), __uint_as_float(v[i].z),
                             __uint_as_float(v[i].w)};
      put(column(i), here, of);
    }
  }
  sync();
}
// That of the model.
template <class Put>
DEV void norm(const Params& p, const Shared& m, const u32* from, const u32* counter, const Norm& norm,
              const void* router, Put&& put) {
  if constexpr (LAYER_NORM)
    layer_norm(p, m, from, counter, norm, put);
  else
    rms_norm(p, m, from, counter, norm.weight, router, put);
}
