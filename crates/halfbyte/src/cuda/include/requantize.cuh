// Requantise: from exact sums of bytes to codes of y, as format/int8.rs has it to the bit:
// clamp(round(sum * multiplier)), less the zero point of y.
#pragma once
#include "ampere.cuh"

// The code of a sum, in the low byte. low and high: the clamp, less the zero point.
DEV u32 requantize(int sum, float multiplier, float low, float high) {
  const float v = fminf(fmaxf(__fmul_rn(__int2float_rn(sum), multiplier), low), high);
  // From 2^23 on floats are integers: the sum rounds v, ties to even, and its low bits are the integer's, at a quarter
  // of the cost of a conversion.
  return __float_as_uint(__fadd_rn(v, 12582912.f));
}
// Codes of four sums, with the zero point, in a word. As above, two by two in 16 bits, where what is added keeps codes
// and what the zero point brings within their 16 bits.
DEV u32 requantize_four(const int (&sums)[4], const float (&multipliers)[4], float low, float high, int zero) {
  u32 codes[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float v = fminf(fmaxf(__fmul_rn(__int2float_rn(sums[i]), multipliers[i]), low), high);
    codes[i] = __float_as_uint(__fadd_rn(v, 12582912.f + 16384.f));
  }
  const u32 zeros = (u32)(zero & 255) * 0x00010001u;
  const u32 left = __byte_perm(codes[0], codes[1], 0x5410) + zeros;
  const u32 right = __byte_perm(codes[2], codes[3], 0x5410) + zeros;
  return __byte_perm(left, right, 0x6420);
}
// The accumulators a[0..3] of a lane are outputs R = lane / 4 and R + 8 of pixels 2t and 2t + 1, t = lane % 4; their
// codes, transposed within the warp: of pixel lane / 4 outputs 2t, 2t + 1, 2t + 8, 2t + 9.
DEV u32 requantize_8x16(const int (&a)[4], float m, float m8, float low, float high) {
  const u32 left = __byte_perm(requantize(a[0], m, low, high), requantize(a[2], m8, low, high), 0x0040);
  const u32 right = __byte_perm(requantize(a[1], m, low, high), requantize(a[3], m8, low, high), 0x0040);
  return __byte_perm(transpose_8x8(__byte_perm(left, right, 0x5410)), 0, 0x3120);
}
// Codes of pixels x 64 outputs of a warpgroup in shared memory, 64 bytes a pixel; 16 outputs are a piece, and pieces
// are exchanged so that neither writes nor reads of a warp meet in a bank.
DEV u32 place_of_piece(int pixel, int piece) { return pixel * 64 + ((piece ^ ((pixel >> 1) & 3)) << 4); }
// What requantize_8x16 returned of pixels 8i to 8i + 7 and the 16 outputs of a warp of the group.
DEV void stage_codes(u32 staging, int i, int warp, int lane, u32 codes) {
  const u32 to = staging + place_of_piece(8 * i + (lane >> 2), warp) + 2 * (lane & 3);
  store_shared_u16(to, codes);
  store_shared_u16(to + 8, codes >> 16);
}
// Codes that a store takes at once, where rows of y are `pitch` bytes apart and begin with whole groups of `outputs`:
// 16, or the power of two that divides both.
DEV int codes_of_store(int outputs, int pitch) {
  const int all = outputs | pitch | 16;
  return all & -all;
}
// 16 codes of a pixel that were staged, from output `out` on of the `outputs` that there are: to memory, with the zero
// point, as many at once as codes_of_store says.
DEV void store_codes(u8* y, u32 staging, int pixel, int piece, int out, int outputs, int at_once, u32 zeros) {
  u32 b[4];
  load_shared(b, staging + place_of_piece(pixel, piece));
  if (zeros)
#pragma unroll
    for (int e = 0; e < 4; e++) b[e] = __vadd4(b[e], zeros);
  if (at_once == 16) {
    *(uint4*)y = make_uint4(b[0], b[1], b[2], b[3]);
  } else if (at_once == 8) {
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (out + 8 * e < outputs) *(uint2*)(y + 8 * e) = make_uint2(b[2 * e], b[2 * e + 1]);
  } else if (at_once == 4) {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (out + 4 * e < outputs) *(u32*)(y + 4 * e) = b[e];
  } else {
#pragma unroll
    for (int e = 0; e < 16; e++)
      if (out + e < outputs) y[e] = (u8)(b[e >> 2] >> (8 * (e & 3)));
  }
}
