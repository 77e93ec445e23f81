// What the kernels of attention over the cache take, and what they have in common.
#pragma once
#include "dequant.cuh"
#include "floats.cuh"

// What keys and values lie in, for kernels on tensor cores; CODES: of 8 bits, with a scale for each position and head.
enum KvType : u32 { HALVES, BFLOATS, CODES };

// As `Params` in nn/attention.rs.
struct Params {
  const float* qkv;  // [rows][row_length], the query heads first
  const void* keys;  // of one layer: [kv_heads][capacity][head_size]
  const void* values;  // likewise
  const float* key_scales;  // of codes of 8 bits, [kv_heads][capacity]; null: keys and values are floats
  const float* value_scales;  // likewise
  float* partial;  // [rows][heads][parts][head_size + 2], where there are several parts
  void* out;  // [rows][heads][head_size]
  const u32* positions;  // [rows], each in its text
  const u32* pages;  // of a text, [texts][pages_of_text]; null: the one text lies in the cache in order
  u64 row_length, capacity;
  u32 rows, pages_of_text;
  u32 heads, kv_heads, head_size;
  u32 parts, part_length;  // length 0: as follows from each row's positions
  float scale;
  FloatType kind, out_type;  // kind: of a cache of floats
  u32 window;  // 2^32 - 1: none
  float cap;  // a scaled score becomes cap * tanh(score / cap); 0: it stays
  const float* slopes;  // [heads]: of scores by the distance (ALiBi), or null
  const float* sinks;  // [heads]: scores that count in the softmax and stand for no value, or null
  u32* counters;  // of one row a text: [rows][blocks of heads], zeros between launches
  u32 fresh;  // last positions of a text that the kernel before this one may write
  u32 stages;  // of a warp's ring in flash_decoding_sm90.cu
  // Where it norms, rotates and appends the rows itself, as rope.cu does; else zeros.
  const double* turns;  // [pairs]: of a position
  const float *query_norm, *key_norm;  // weights [head_size], with norms
  u32 appends, pairs;
  float eps;
  u32 group;  // heads of a key/value head
};

constexpr float LOG2_E = 1.4426950408889634f;

DEV float minus_infinity() { return __int_as_float(0xff800000); }
DEV float not_a_number() { return __int_as_float(0x7fffffff); }

// As `PAGE_LENGTH` in kv_pages.rs.
constexpr u32 PAGE_LENGTH = 128;

// Of a row that `rows - 1` others of its text follow; what a caller asks for beyond the cache is not reached for.
DEV u64 position_of(const Params& p, u32 row, u32 rows) {
  return min(u64(p.positions[row]), (p.pages ? u64(p.pages_of_text) * PAGE_LENGTH : p.capacity) - rows);
}

// Where a text's position, a multiple of a power of two up to a page, and those after it lie in the cache.
DEV u32 slot_of(const Params& p, u32 text, u32 position) {
  if (!p.pages) return position;
  const u32 page = p.pages[u64(text) * p.pages_of_text + position / PAGE_LENGTH];
  return min(page, u32(p.capacity / PAGE_LENGTH) - 1) * PAGE_LENGTH + position % PAGE_LENGTH;
}

// 2^x within 2 units; results below 2^-126 are 0.
DEV float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What is subtracted before 2^x: a row of only minus infinities has weights 0, not NaN.
DEV float base_of(float maximum) { return maximum == minus_infinity() ? 0 : maximum; }

// What sums are divided by that were shifted to a maximum: their weights, and that of a sink.
DEV float total_of(float maximum, float weight, float sink) {
  return sink == minus_infinity() ? weight : weight + exp2f(sink - base_of(maximum));
}

// The first position that a query sees which sees positions below `end`.
template <bool WINDOW> DEV u64 first_seen(const Params& p, u64 end) {
  return WINDOW && end > p.window ? end - p.window : 0;
}

// A scaled score of a query and a key, in powers of two, where the model caps it: limit * tanh(score / limit), within
// 2^-22 of the limit.
DEV float capped(float score, const Params& p) {
  const float limit = p.cap * LOG2_E, e = power_of_two(score * (2 / p.cap));
  return limit - 2 * limit / (1 + e);
}
// The same with all that the model does to it: capped, and with the slope times the distance.
DEV float changed(float score, const Params& p, float slope, int distance) {
  return fmaf(slope, float(distance), p.cap > 0 ? capped(score, p) : score);
}
DEV float slope_of(const Params& p, u32 head) { return p.slopes ? p.slopes[head] * LOG2_E : 0; }
// The score that stands for no value, in powers of two.
DEV float sink_of(const Params& p, u32 head) { return p.sinks ? p.sinks[head] * LOG2_E : minus_infinity(); }

template <bool BF16> DEV u32 pair(float low, float high) {
  if constexpr (BF16)
    return bf16_pair(low, high);
  else
    return half_pair(low, high);
}

// Four codes of 8 bits, elements 0, 2 and elements 1, 3.
template <bool BF16> DEV void halves_of_codes(u32 codes, u32 (&pairs)[2]) {
  const u32 biased = codes ^ 0x80808080;
  if constexpr (BF16)
    int8_to_bf16(biased, pairs);
  else
    int8_to_half(biased, int8_half_zero(128), int8_half_zero(128), pairs);
}
