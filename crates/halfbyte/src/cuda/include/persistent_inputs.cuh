// What products of the persistent kernel read, as digits (fixed_point.cuh): the stream with a norm, or what attention
// and the gate give, in pairs. A warp makes digits of the columns that it multiplies, stage by stage: no block waits
// for all of them, or has room for all. Only where all of x has one rule (WHOLE), which all must be known for, are all
// made at once.
#pragma once
#include "output_function.cuh"
#include "persistent_norms.cuh"

// A product's input.
struct Input {
  bool pairs;  // or the stream
  bool for_shares;  // this block has no row of the product, but experts' shares need what the norm divides by
  bool shared_out;  // pairs of experts, each of which has its share
  const u32* words;
  u32 count;  // of words
  Norm norm;  // of the stream
  NormBehind behind;
  const u32* sums;  // of the stream, where its mean comes from these
};
// Whether all of it is looked at before it is multiplied: x has one rule, or the norm needs all.
DEV bool looks_at_all(const Input& of) {
  return WHOLE || !of.pairs && (LAYER_NORM && !MEAN_OF_SUMS || EXPERTS && of.for_shares);
}

// Two halves at a time; what is infinite or NaN stays greatest.
DEV u32 greatest_pairs(const uint4& v) {
  return __vmaxu2(__vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff), __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
}
DEV u32 greatest_of_pair(u32 two) { return bits_of_magnitude(first_of(max(two & 0xffff, two >> 16))); }

// Pairs as four columns and four columns.
DEV void columns_of_pairs(const uint4& v, float (&x)[2][4]) {
  x[0][0] = first_of(v.x), x[0][1] = first_of(v.y), x[0][2] = second_of(v.x), x[0][3] = second_of(v.y);
  x[1][0] = first_of(v.z), x[1][1] = first_of(v.w), x[1][2] = second_of(v.z), x[1][3] = second_of(v.w);
}
// Pairs to a WHOLE x; they are looked at once more where a thread has too many to keep.
DEV void make_whole(const Shared& m, const Input& of) {
  constexpr u32 QUADS = most(WIDTH, ATTENDED_LENGTH) / 8, ALL = (QUADS + THREADS - 1) / THREADS,
                LOADS = ALL < 6 ? ALL : 6;
  uint4 v[LOADS];
  auto look_from = [&](u32 first) {
    look_for(v,
             [&](u32 i) { return first + 4 * THREADS * i < of.count ? of.words + first + 4 * THREADS * i : nullptr; });
  };
  u32 two = 0;
#pragma unroll 1
  for (u32 first = 4 * thread_index(); first < of.count; first += 4 * THREADS * LOADS) {
    look_from(first);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) two = __vmaxu2(two, greatest_pairs(v[i]));
  }
  const Step rule = rule_of_all(m, greatest_of_pair(two));
#pragma unroll 1
  for (u32 first = 4 * thread_index(); first < of.count; first += 4 * THREADS * LOADS) {
    if (LOADS < ALL) look_from(first);
#pragma unroll
    for (u32 i = 0; i < LOADS; i++) {
      const u32 word = first + 4 * THREADS * i;
      if (word >= of.count) break;
      float x[2][4];
      columns_of_pairs(v[i], x);
#pragma unroll
      for (u32 h = 0; h < 2; h++) put_of_all(2 * word + 4 * h, x[h], rule);
    }
  }
}

// Does `then` when all threads have ended what comes before, and looks at all of the input where that is needed.
template <class Then> DEV void look_at_input(const Params& p, const Shared& m, const Input& of, Then&& then) {
  if (!looks_at_all(of)) {
    sync();
    then();
    return;
  }
  if (of.pairs) {
    sync();
    then();
    make_whole(m, of);
  } else {
    look_at_stream<WHOLE, false>(p, m, of.words, of.norm, of.behind, then, [](u32, const float (&)[4]) {});
  }
  sync();
}

// A lane's numbers of a stage's columns, on their way while the stage before is multiplied: of the stream four of each
// step, of two ranks at a time; of pairs four words, and of the next stage's columns as many.
struct InputColumns {
  // Of pairs those of this stage and of the next. Of the stream parts of a rank, and what the ranks before it add up
  // to, at first parts of rank 0; or the last addend, which is to be normed, and the stream before.
  uint4 v[STEPS], sum[STEPS];
  NormColumns<LAYER_NORM && !MEAN_OF_SUMS> norm[STEPS];
  NormColumns<false> behind[NORMS_BEHIND ? STEPS : 1];
  float mean;  // of the stream, where it comes from sums
  float factor;  // NORMS_BEHIND
  u32 first;  // the first step of columns
  u32 rank;  // whose parts `v` is

  __device__ __forceinline__ uint4 ask_for_pairs(const Input& of, u32 step) const {
    const u32 i = 4 * (thread_index() & 31);
    return STEPS == 2 || i < 64 ? look_at_four(of.words + 64 * step + i) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ const u32* of_stream(const Input& of, u32 of_rank, u32 k) const {
    return of.words + of_rank * HIDDEN + 128 * (first + k) + 4 * (thread_index() & 31);
  }
  // A run's first columns; whether there are `more`.
  __device__ __forceinline__ void load(const Input& of, u32 step, bool more) {
    first = step, rank = 1;
    if (of.pairs) {
      v[0] = ask_for_pairs(of, first);
      if (STEPS == 2 && more) v[1] = ask_for_pairs(of, first + STEPS);
      return;
    }
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) sum[k] = look_at_part(of_stream(of, 0, k));
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
      const u32 place = 128 * (first + k) + 4 * (thread_index() & 31);
      if (OF_STREAM > 1) v[k] = look_at_part(of_stream(of, 1, k));
      if (NORMS_BEHIND) behind[NORMS_BEHIND ? k : 0].load({of.behind.weight, nullptr, 0}, place);
      norm[k].load(of.norm, place);
    }
  }
  // The next columns of the run, when digits of the first ones are made.
  __device__ __forceinline__ void next(const Input& of, bool more) {
    if (STEPS != 2 || !of.pairs) return load(of, first + STEPS, more);
    first += STEPS;
    v[0] = v[1];
    if (more) v[1] = ask_for_pairs(of, first + STEPS);
  }
  // Adds a rank's parts, and asks for the next one's.
  __device__ __forceinline__ void add_next(const Params& p, const Input& of) {
    if (rank == 1) wait_for_part(p, 0, sum, [&](u32 k) { return of_stream(of, 0, k); });
    if constexpr (OF_STREAM > 1) wait_for_part(p, rank, v, [&](u32 k) { return of_stream(of, rank, k); });
    if constexpr (RANKS > 1) add_part(sum, v);
    if constexpr (NORMS_BEHIND) {
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) add_normed(sum[k], v[k], factor, behind[k].weight);
    }
    if constexpr (RANKS > 2) {
      if (++rank == RANKS) return;
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) v[k] = look_at_part(of_stream(of, rank, k));
    }
  }
  // While other work is done: the same, but for the last rank's.
  __device__ __forceinline__ void advance(const Params& p, const Input& of) {
    if (RANKS > 2 && !of.pairs && rank + 1 < RANKS) add_next(p, of);
  }
  // Makes digits, to the units at `unit`. Gives what squares of the stream add up to.
  __device__ __forceinline__ float put(const Params& p, const Shared& m, const Input& of, u32 unit) {
    const u32 lane = thread_index() & 31;
    if (of.pairs) {
      while (!there(v[0])) v[0] = ask_for_pairs(of, first);
      const u32 two = greatest_pairs(v[0]), own = max(two & 0xffff, two >> 16);
      const u32 lower = __reduce_max_sync(ALL_LANES, lane < 16 ? own : 0),
                upper = __reduce_max_sync(ALL_LANES, lane < 16 ? 0 : own);
      const Step step = step_of(bits_of_magnitude(first_of(lane < 16 ? lower : upper)));
      if (STEPS == 1 && lane >= 16) return 0;
      unit += lane / 16 * X_UNIT;
      float x[2][4];
      columns_of_pairs(v[0], x);
#pragma unroll
      for (int h = 0; h < 2; h++) put_digits(unit, lane >> 1 & 7, (2 * lane & 3) + h, x[h], step.over);
      if ((lane & 15) == 0) {
        const u32 expert = EXPERTS && of.shared_out ? 128 * (first + lane / 16) / INNER : 0;
        put_power(unit, EXPERTS && of.shared_out ? step.power * m.chosen()[expert].share : step.power);
      }
      return 0;
    }
    add_next(p, of);
#pragma unroll 1
    while (RANKS > 2 && rank < RANKS) add_next(p, of);
    float squares = 0;
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, unit += X_UNIT) {
      float x[4];
      if (MEAN_OF_SUMS)
        norm[k].of_centred(mean, sum[k], x);
      else
        norm[k].of(m, sum[k], x);
      if (!LAYER_NORM || MEAN_OF_SUMS) squares += sum_of_squares(sum[k], MEAN_OF_SUMS ? mean : 0);
      const Step step = step_of(__reduce_max_sync(ALL_LANES, greatest_of(x)));
      put_digits(unit, lane >> 2, lane & 3, x, step.over);
      if (lane == 0) put_power(unit, step.power);
    }
    return squares;
  }
};
