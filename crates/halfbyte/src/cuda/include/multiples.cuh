// Scales and offsets as whole multiples of halves: from the words that a unit has for a pair of rows R and R + 8, as
// weight_atom.cuh and layout/cuda_wna16/multiples.rs say, to floats. All products are exact.
#pragma once
#include "dequant.cuh"

// NIBBLES: factors of scales and offsets have 4 bits each. Bytes of a unit's. Where a pair's words begin, and its last
// word; the halves of offsets lie behind those of scales in NIBBLES.
DEV constexpr int multiples_bytes(bool nibbles) { return 8 * (nibbles ? 24 : 20); }
DEV u32 words_of_pair(u32 pair) { return pair * 16; }
template <bool NIBBLES> DEV u32 last_of_pair(u32 pair) { return 128 + pair * (NIBBLES ? 8 : 4); }

// Numbers of R and of R + 8.
struct TwoFloats {
  float r, r8;
};

// The bits of a word as a whole number below 2^23.
DEV float whole(u32 word, u32 bits) { return __uint_as_float(and_or(word, bits, 0x4b000000)) - 8388608.f; }

// Scales of a group out of its word; with offsets beside them, or groups of which two share a word.
template <bool OFFSETS, bool NIBBLES> DEV TwoFloats scales_of_group(u32 word, u32 halves, u32 group) {
  if constexpr (OFFSETS && !NIBBLES)
    return {whole(word, 0x3f) * half_low(halves), whole(word, 0x3f0000) * (half_high(halves) * 0x1p-16f)};
  const u32 both = group % 2 ? word >> 16 : word;
  if constexpr (NIBBLES)
    return {whole(both, 0xf) * half_low(halves), whole(both, 0xf00) * (half_high(halves) * 0x1p-8f)};
  const u32 low = __byte_perm(both, 0x4b000000, 0x7650), high = __byte_perm(both, 0x4b000000, 0x7651);
  return {(__uint_as_float(low) - 8388736.f) * half_low(halves),
          (__uint_as_float(high) - 8388736.f) * half_high(halves)};
}
template <bool NIBBLES> DEV TwoFloats offsets_of_group(u32 word, u32 halves, u32 group) {
  const u32 both = group % 2 ? word >> 16 : word;
  if constexpr (NIBBLES)
    return {whole(both, 0xf0) * (half_low(halves) * 0x1p-4f), whole(both, 0xf000) * (half_high(halves) * 0x1p-12f)};
  return {whole(word, 0xfc0) * (half_low(halves) * 0x1p-6f), whole(word >> 16, 0xfc0) * (half_high(halves) * 0x1p-6f)};
}
// The halves of the scales, where offsets have the last word.
DEV u32 scale_halves(const u32 (&words)[4]) {
  const u32 low = __byte_perm(words[0], words[1], 0x7531), high = __byte_perm(words[2], words[3], 0x7531);
  return (low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0);
}
// The factors of the scales of R and R + 8 as fp16.
DEV u32 factors_of_scales(u32 word) { return half_add(and_or(word, 0x003f003f, 0x64006400), 0xe400e400); }
// The same of NIBBLES, of the first or the second group of a word.
DEV u32 factors_of_nibbles(u32 word, bool second) {
  return half_add(and_or(__byte_perm(word, 0, second ? 0x4342 : 0x4140), 0x000f000f, 0x64006400), 0xe400e400);
}

// The same from memory: `params`, where those of a unit begin.
template <bool OFFSETS, bool NIBBLES> struct PairOfRows {
  u32 words[4], scale_halves_of_pair, offset_halves;
  __device__ __forceinline__ static PairOfRows load(const u8* params, u32 pair) {
    const uint4 four = *reinterpret_cast<const uint4*>(params + words_of_pair(pair));
    const u32* last = reinterpret_cast<const u32*>(params + last_of_pair<NIBBLES>(pair));
    const u32 words[4] = {four.x, four.y, four.z, four.w};
    return {{four.x, four.y, four.z, four.w},
            OFFSETS && !NIBBLES ? scale_halves(words) : last[0],
            OFFSETS ? last[NIBBLES] : 0};
  }
  __device__ __forceinline__ u32 word(u32 group) const {
    const u32 at = OFFSETS && !NIBBLES ? group : group / 2;
    return at == 0 ? words[0] : at == 1 ? words[1] : at == 2 ? words[2] : words[3];
  }
  __device__ __forceinline__ TwoFloats scales(u32 group) const {
    return scales_of_group<OFFSETS, NIBBLES>(word(group), scale_halves_of_pair, group);
  }
  __device__ __forceinline__ TwoFloats offsets(u32 group) const {
    if constexpr (OFFSETS) return offsets_of_group<NIBBLES>(word(group), offset_halves, group);
    return {0.f, 0.f};
  }
};
// Of a group of a pair, which has `groups` in 128 columns: scales, and offsets if there are such.
struct PairTermsOfMultiples {
  TwoFloats scales, offsets;
};
template <bool OFFSETS, bool NIBBLES> DEV PairTermsOfMultiples terms_of_pair(const u8* params, u32 pair, u32 group) {
  const auto rows = PairOfRows<OFFSETS, NIBBLES>::load(params, pair);
  return {rows.scales(group), rows.offsets(group)};
}
DEV PairTermsOfMultiples terms_of_pair(const u8* params, u32 pair, u32 group, u32 groups, bool offsets) {
  if (!offsets) return terms_of_pair<false, false>(params, pair, group);
  return groups == 8 ? terms_of_pair<true, true>(params, pair, group) : terms_of_pair<true, false>(params, pair, group);
}
