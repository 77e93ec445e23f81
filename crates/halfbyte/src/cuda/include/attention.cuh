// What the kernels of attention over the cache take, and what they have in common.
#pragma once
#include "floats.cuh"

// As `Params` in nn/attention.rs.
struct Params {
  const float* qkv;  // [rows][row_length], the query heads first
  const void* keys;  // of one layer: [kv_heads][capacity][head_size]
  const void* values;  // likewise
  float* partial;  // [rows][heads][parts][head_size + 2], where there are several parts
  void* out;  // [rows][heads][head_size]
  const u32* position;  // of row 0, less first_row
  u64 row_length, capacity;
  u32 rows, first_row;
  u32 heads, kv_heads, head_size;
  u32 parts, part_length;
  float scale;
  FloatType kind, out_type;  // kind: of the cache
  u32 window;  // 2^32 - 1: none
  float cap;  // a scaled score becomes cap * tanh(score / cap); 0: it stays
  const float* slopes;  // [heads]: of scores by the distance (ALiBi), or null
  const float* sinks;  // [heads]: scores that count in the softmax and stand for no value, or null
};

constexpr float LOG2_E = 1.4426950408889634f;

DEV float minus_infinity() { return __int_as_float(0xff800000); }
DEV float not_a_number() { return __int_as_float(0x7fffffff); }

// Of row 0; what a caller asks for beyond the cache is not reached for.
DEV u64 position_of_first(const Params& p) { return min(u64(*p.position) + p.first_row, p.capacity - p.rows); }

// 2^x within 2 units; results below 2^-126 are 0.
DEV float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A scaled score of a query and a key, in powers of two, with what the model does to it: limit * tanh(score / limit),
// within 2^-22 of the limit, and the slope times the distance.
DEV float changed(float score, const Params& p, float slope, int distance) {
  if (p.cap > 0) {
    const float limit = p.cap * LOG2_E, e = power_of_two(score * (2 / p.cap));
    score = limit - 2 * limit / (1 + e);
  }
  return p.slopes ? fmaf(slope, float(distance), score) : score;
}
DEV float slope_of(const Params& p, u32 head) { return p.slopes ? p.slopes[head] * LOG2_E : 0; }
// The score that stands for no value, in powers of two.
DEV float sink_of(const Params& p, u32 head) { return p.sinks ? p.sinks[head] * LOG2_E : minus_infinity(); }

// As load_matrices, each transposed.
DEV void load_transposed(u32 (&b)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(a)
               : "memory");
}
