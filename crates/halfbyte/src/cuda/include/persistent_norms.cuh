// Norms of the persistent kernel: what they make of numbers of the stream, and what they need to know of all of it.
#pragma once
#include "exchange_words.cuh"
#include "persistent_plan.cuh"
#include "persistent_ranks.cuh"
#include "warp.cuh"

// Not behind what is waited for, where the compiler would put it.
DEV float2 load_early(const float* p) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
DEV u32 load_early(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
template <class T> DEV T* load_early(T* const* p) {
  T* v;
  asm volatile("ld.global.nc.u64 %0, [%1];" : "=l"(v) : "l"(p));
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
// 1 / what a norm divides by, from the squares that warps have added up; a LayerNorm that looks at all has divided.
DEV float factor_of_norm(const Shared& m, float eps) {
  if (LAYER_NORM && !MEAN_OF_SUMS) return 1.0f;
  return rsqrtf(sum_of_warps(m.reduce()) / float(HIDDEN) + eps);
}
struct Norm {
  const float *weight, *bias;  // [HIDDEN]; the bias of a LAYER_NORM
  float eps;
};
// NORMS_BEHIND: what the last addend of a stream is normed with, and where sums of its squares lie.
struct NormBehind {
  const float* weight;
  const u32* sums;
  float eps;
};
// What the last addend is multiplied with, besides the weights. It is kept for who adds to the stream. A barrier for
// all.
DEV float factor_behind(const Params& p, const Shared& m, const NormBehind& norm) {
  const float of_warp = warp_sum(look_for_sums(p, norm.sums));
  if ((thread_index() & 31) == 0) m.squares()[thread_index() / 32] = of_warp;
  sync();
  const float factor = rsqrtf(sum_of_warps(m.squares()) / float(HIDDEN) + norm.eps);
  if (thread_index() == 0) m.all().factor = factor;
  return factor;
}
// Four columns that lie together, with their addends.
DEV void add_normed(uint4& stream, const uint4& added, float factor, const float2 (&weight)[2]) {
  auto add = [&](u32& to, u32 v, float w) {
    to = __float_as_uint(fmaf(__uint_as_float(v) * factor, w, __uint_as_float(to)));
  };
  add(stream.x, added.x, weight[0].x), add(stream.y, added.y, weight[1].x);
  add(stream.z, added.z, weight[0].y), add(stream.w, added.w, weight[1].y);
}
#include "persistent_experts.cuh"

// What a norm makes of a number of the stream. What an RMS norm divides by is left to `factor_of_norm`.
DEV float normed(const Shared& m, float x, float weight, float bias) {
  return LAYER_NORM ? fmaf((x - m.all().mean) * m.all().factor, weight, bias) : x * weight;
}
// A norm's weights of four columns that lie together, and its biases where it ADDS them.
template <bool ADDS> struct NormColumns {
  static constexpr u32 BIASES = ADDS ? 2 : 1;
  float2 weight[2], bias[BIASES];
  __device__ __forceinline__ void load(const Norm& norm, u32 place) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      weight[h] = load_early(norm.weight + column_at(place) + 8 * h);
      bias[h % BIASES] = ADDS ? load_early(norm.bias + column_at(place) + 8 * h) : make_float2(0, 0);
    }
  }
  __device__ __forceinline__ void of(const Shared& m, const uint4& v, float (&x)[4]) const {
    x[0] = normed(m, __uint_as_float(v.x), weight[0].x, bias[0].x);
    x[1] = normed(m, __uint_as_float(v.y), weight[1].x, bias[1 % BIASES].x);
    x[2] = normed(m, __uint_as_float(v.z), weight[0].y, bias[0].y);
    x[3] = normed(m, __uint_as_float(v.w), weight[1].y, bias[1 % BIASES].y);
  }
  // Less a mean, neither divided nor added to.
  __device__ __forceinline__ void of_centred(float mean, const uint4& v, float (&x)[4]) const {
    x[0] = (__uint_as_float(v.x) - mean) * weight[0].x, x[1] = (__uint_as_float(v.y) - mean) * weight[1].x;
    x[2] = (__uint_as_float(v.z) - mean) * weight[0].y, x[3] = (__uint_as_float(v.w) - mean) * weight[1].y;
  }
};
DEV float sum_of_squares(const uint4& v, float mean) {
  const float x[4] = {__uint_as_float(v.x) - mean, __uint_as_float(v.y) - mean, __uint_as_float(v.z) - mean,
                      __uint_as_float(v.w) - mean};
  return x[0] * x[0] + x[1] * x[1] + (x[2] * x[2] + x[3] * x[3]);
}
DEV u32 bits_of_magnitude(float v) { return __float_as_uint(v) & 0x7fffffff; }
DEV u32 greatest_of(const float (&x)[4]) {
  return max(max(bits_of_magnitude(x[0]), bits_of_magnitude(x[1])),
             max(bits_of_magnitude(x[2]), bits_of_magnitude(x[3])));
}
// The rule of a WHOLE x, from the greatest |x| that each thread has; a barrier for all.
DEV Step rule_of_all(const Shared& m, u32 greatest) {
  greatest = __reduce_max_sync(ALL_LANES, greatest);
  if ((thread_index() & 31) == 0) m.greatest()[thread_index() / 32] = greatest;
  sync();
  greatest = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) greatest = max(greatest, m.greatest()[w]);
  const Step of = step_of(greatest);
  if ((thread_index() & 31) == 0) m.all().step = of;  // the same of each warp
  return of;
}
// Four columns of a WHOLE x that lie together, at a place of all.
DEV void put_of_all(u32 place, const float (&x)[4], const Step& of) {
  put_digits(shared_address(shared) + X + place / 128 * X_UNIT, place >> 4 & 7, place >> 2 & 3, x, of.over);
}
// Of the stream's numbers, or of their squares less the mean's: what each warp has of the sum.
template <bool SQUARES> DEV void leave_sum(float* of_warps, const uint4 (&v)[LOADS_OF_STREAM], float mean) {
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS_OF_STREAM; i++) {
    if (4 * (thread_index() + i * THREADS) >= HIDDEN) break;
    sum += SQUARES ? sum_of_squares(v[i], mean)
                   : __uint_as_float(v[i].x) + __uint_as_float(v[i].y) +
                         (__uint_as_float(v[i].z) + __uint_as_float(v[i].w));
  }
  sum = warp_sum(sum);
  if ((thread_index() & 31) == 0) of_warps[thread_index() / 32] = sum;
}
// All threads look at the whole stream and leave what its norm needs to know: the sum of squares, or the mean and what
// is divided by. `then` is done before, when all threads have ended what comes before. Where columns are NEEDED, they
// become a WHOLE x; or, of the LAST norm, `each` gets the place of four and what the norm makes of them, and the sum is
// known. A barrier must follow.
template <bool NEEDED, bool LAST, class Then, class Each>
DEV void look_at_stream(const Params& p, const Shared& m, const u32* from, const Norm& norm, const NormBehind& behind,
                        Then&& then, Each&& each) {
  constexpr u32 LOADS = LOADS_OF_STREAM;
  constexpr bool EARLY = NEEDED && LOADS <= (LAYER_NORM ? 4 : 8);  // where registers hold them beside the stream
  NormColumns<LAYER_NORM> early[EARLY ? LOADS : 1];
  uint4 v[LOADS];
  auto place = [&](u32 i) { return 4 * (thread_index() + i * THREADS); };
#pragma unroll
  for (u32 i = 0; EARLY && i < LOADS; i++) early[EARLY ? i : 0].load(norm, place(i) < HIDDEN ? place(i) : 0);
  sync();
  then();
  auto at = [&](u32 i) { return place(i) < HIDDEN ? from + place(i) : nullptr; };
  look_for_stream(p, v, at);
  if constexpr (NORMS_BEHIND) {
    uint4 added[LOADS];
    look_for_stream(p, added, [&](u32 i) { return at(i) ? at(i) + HIDDEN : nullptr; });
    const float factor = factor_behind(p, m, behind);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      if (place(i) >= HIDDEN) break;
      NormColumns<false> weights;
      weights.load({behind.weight, nullptr, 0}, place(i));
      add_normed(v[i], added[i], factor, weights.weight);
    }
  }
  if constexpr (LAYER_NORM) {
    leave_sum<false>(m.reduce(), v, 0);
    sync();
    const float mean = sum_of_warps(m.reduce()) / float(HIDDEN);
    leave_sum<true>(m.squares(), v, mean);
    sync();
    const float variance = sum_of_warps(m.squares()) / float(HIDDEN);
    if (thread_index() == 0) m.all().mean = mean, m.all().factor = rsqrtf(variance + norm.eps);
  } else {
    leave_sum<true>(m.reduce(), v, 0);
  }
  if (LAYER_NORM || LAST) sync();
  u32 greatest = 0;
#pragma unroll
  for (u32 i = 0; NEEDED && i < LOADS; i++) {
    if (place(i) >= HIDDEN) break;
    NormColumns<LAYER_NORM> late;
    if (!EARLY) late.load(norm, place(i));
    float x[4];
    (EARLY ? early[EARLY ? i : 0] : late).of(m, v[i], x);
    if (LAST) each(place(i), x);
    if (WHOLE) {
      greatest = max(greatest, greatest_of(x));
      v[i] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
  }
  if constexpr (WHOLE && !LAST) {
    const Step of = rule_of_all(m, greatest);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      if (place(i) >= HIDDEN) break;
      const float x[4] = {__uint_as_float(v[i].x), __uint_as_float(v[i].y), __uint_as_float(v[i].z),
                          __uint_as_float(v[i].w)};
      put_of_all(place(i), x, of);
    }
  }
}
