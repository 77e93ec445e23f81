// One kernel for each conversion of dequant.cuh: the registers of halves that words of codes become. `zero` is a zero
// point; rows R+8, or the second register, have another one, so that the two cannot be mistaken for each other.
#include "dequant.cuh"

// A thread has a word, which `convert` makes N registers of.
template <int N, class Convert> DEV void each(const u32* words, u32* out, u32 count, Convert convert) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  u32 a[N];
  convert(words[i], a);
#pragma unroll
  for (int j = 0; j < N; j++) out[N * i + j] = a[j];
}

template <int> __global__ void int4_half(const u32* words, u32* out, u32 count, u32 zero) {
  const u32 r = int4_half_zero_r(zero), r8 = int4_half_zero_r8(16 - zero);
  each<4>(words, out, count, [=](u32 w, u32(&a)[4]) { int4_to_half(w, r, r8, a); });
}

template <int UPPER> __global__ void int2_half(const u32* words, u32* out, u32 count, u32 zero) {
  const u32 r = int4_half_zero_r(zero), r8 = int4_half_zero_r8(4 - zero);
  each<4>(words, out, count, [=](u32 w, u32(&a)[4]) { int2_to_half(w, UPPER, r, r8, a); });
}

template <int> __global__ void int4_bf16(const u32* words, u32* out, u32 count, u32 zero) {
  const u32 r = int4_bf16_zero(zero), r8 = int4_bf16_zero(16 - zero);
  each<4>(words, out, count, [=](u32 w, u32(&a)[4]) { int4_to_bf16(w, r, r8, a); });
}

template <int> __global__ void int8_half(const u32* words, u32* out, u32 count, u32 zero) {
  const u32 first = int8_half_zero(zero), second = int8_half_zero(255 - zero);
  each<2>(words, out, count, [=](u32 w, u32(&a)[2]) { int8_to_half(w, first, second, a); });
}

template <int> __global__ void int8_bf16(const u32* words, u32* out, u32 count, u32) {
  each<2>(words, out, count, [](u32 w, u32(&a)[2]) { int8_to_bf16(w, a); });
}

template <int> __global__ void int8_bf16_fp32(const u32* words, u32* out, u32 count, u32) {
  each<2>(words, out, count, [](u32 w, u32(&a)[2]) { int8_to_bf16_fp32(w, a); });
}
