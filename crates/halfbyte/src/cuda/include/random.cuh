// Random words, each a function of its number: the same whatever computes them, and as layout/codes/random.rs has them.
#pragma once
#include "ptx.cuh"

DEV u32 mixed(u32 x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

DEV u32 random_word(u64 number) { return mixed(mixed(u32(number >> 32)) ^ u32(number)); }
