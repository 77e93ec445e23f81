// What becomes of sums before they are stored, by HB_ACTIVATION: a function, or that of a gate times what it lets
// through.
#pragma once
#include "weight_atom.cuh"

DEV float activate(float v) {
  if constexpr (ACTIVATION == 1)
    return v < HB_LOW ? HB_LOW : v > HB_HIGH ? HB_HIGH : v;
  else if constexpr (ACTIVATION == 2)
    return 0.5f * v * (1.f + erff(v * 0.7071067812f));
  else if constexpr (ACTIVATION == 3)
    return v / (1.f + __expf(-1.5957691216f * (v + 0.044715f * v * v * v)));  // as 1 + tanh(u) is 2 σ(2u)
  else if constexpr (ACTIVATION == 4)
    return v / (1.f + __expf(-v));
  else
    return v;
}
[[maybe_unused]] DEV float gated(float gate, float other) {
  if constexpr (ACTIVATION == 5) {  // comparisons with NaN are false, which leaves it
    gate = gate > HB_HIGH ? HB_HIGH : gate;
    other = other > HB_HIGH ? HB_HIGH : other < -HB_HIGH ? -HB_HIGH : other;
    return gate / (1.f + __expf(-HB_LOW * gate)) * (other + 1.f);
  }
  return activate(gate) * other;
}
