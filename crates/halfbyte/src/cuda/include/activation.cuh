// Activation functions that are chosen when a kernel runs.
#pragma once
#include "ptx.cuh"

// As `activation` in matmul/mod.rs.
enum Activation : u32 { NONE = 0, CLAMP = 1, GELU = 2, GELU_TANH = 3, SILU = 4 };

// NaN stays NaN: comparisons with it are false. CLAMP is to low .. high.
DEV float activate(float v, Activation activation, float low, float high) {
  switch (activation) {
    case CLAMP: return v < low ? low : v > high ? high : v;
    case GELU: return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    case GELU_TANH: return v / (1.0f + expf(-1.5957691f * (v + 0.044715f * v * v * v)));  // as 1 + tanh(u) is 2 σ(2u)
    case SILU: return v / (1.0f + expf(-v));
    default: return v;
  }
}
