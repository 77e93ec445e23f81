// Codes to half floats, in registers: each conversion is one function of a few instructions. docs/cuda-conversions.md
// explains them.
//
// All of them rest on one fact: OR-ing a small unsigned integer into the mantissa of a power of two 2^e adds it, at the
// weight of the bits it lands on.  0x6400 is 1024 as fp16 (one bit = 1), 0x5400 is 64 (one bit = 1/16), 0x4300 is 128
// as bf16 (one bit = 1).  A subtraction then leaves the bare integer, exactly.
//
// Registers hold two halves each ("pair": the low half is the first).  NVRTC needs no header for this file.
#pragma once
#include "ptx.cuh"

// One of two types.
template <bool FIRST, class A, class B> struct Choice {
  typedef A Type;
};
template <class A, class B> struct Choice<false, A, B> {
  typedef B Type;
};

// ---- single instructions
// (a & b) | c in one LOP3.
DEV u32 and_or(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// (a & b) ^ c in one LOP3.
DEV u32 and_xor(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// (~a & b) | c in one LOP3.
DEV u32 andn_or(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEV u32 half_add(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 half_mul(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 half_fma(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEV u32 bf16_fma(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEV u32 bf16_add(u32 a, u32 b) { return bf16_fma(a, 0x3f803f80, b); }  // a * 1 + b: sm_80 has no packed bf16 addition
DEV u32 bf16_mul(u32 a, u32 b) { return bf16_fma(a, b, 0x80008000); }  // a * b + (-0)

// ---- nibbles: rows R and R+8 of one column in a byte, as weight_atom.cuh, AWQ and FasterTransformer have them.
// Nibble r of each half of w becomes a[r], the A registers of mma m16n8k16 and wgmma m64k16: a[0] and a[2] belong to
// row R, a[1] and a[3] to row R+8.
// int4 -> fp16: q-z, exact.  zero_r = pair of -(1024+z), zero_r8 = pair of -(64+z).  1 SHF, 4 LOP3, 4 HADD2.
DEV void int4_to_half(u32 w, u32 zero_r, u32 zero_r8, u32 (&a)[4]) {
  const u32 x = w >> 8;
  a[0] = half_add(and_or(w, 0x000f000f, 0x64006400), zero_r);
  a[1] = half_add(and_or(w, 0x00f000f0, 0x54005400), zero_r8);
  a[2] = half_add(and_or(x, 0x000f000f, 0x64006400), zero_r);
  a[3] = half_add(and_or(x, 0x00f000f0, 0x54005400), zero_r8);
}
// The constants of int4_to_half for zero point z (0..16; 8 for symmetric codes).
DEV u32 int4_half_zero_r(u32 z) { return (0xe400u + z) * 0x10001u; }
DEV u32 int4_half_zero_r8(u32 z) { return (0xd400u + (z << 4)) * 0x10001u; }
// int2 -> fp16: q-z, exact, of the lower or (`upper`) the upper 2 bits of each nibble, with the constants of
// int4_to_half: those of the upper bits are -(256+z) and -(16+z).  1 SHF, 4 LOP3, 4 HADD2, two more for such of zero
// points that are not known before.
DEV void int2_to_half(u32 w, bool upper, u32 zero_r, u32 zero_r8, u32 (&a)[4]) {
  const u32 x = w >> 8;
  if (upper) {
    const u32 r = half_add(zero_r, 0x62006200), r8 = half_add(zero_r8, 0x52005200);  // + 768, + 48
    a[0] = half_add(and_or(w, 0x000c000c, 0x5c005c00), r);
    a[1] = half_add(and_or(w, 0x00c000c0, 0x4c004c00), r8);
    a[2] = half_add(and_or(x, 0x000c000c, 0x5c005c00), r);
    a[3] = half_add(and_or(x, 0x00c000c0, 0x4c004c00), r8);
  } else {
    a[0] = half_add(and_or(w, 0x00030003, 0x64006400), zero_r);
    a[1] = half_add(and_or(w, 0x00300030, 0x54005400), zero_r8);
    a[2] = half_add(and_or(x, 0x00030003, 0x64006400), zero_r);
    a[3] = half_add(and_or(x, 0x00300030, 0x54005400), zero_r8);
  }
}
// int4 -> bf16: q-z, exact.  zero_r, zero_r8 = pairs of -(128+z).  3 SHF, 4 LOP3, 4 HFMA2.
DEV void int4_to_bf16(u32 w, u32 zero_r, u32 zero_r8, u32 (&a)[4]) {
  a[0] = bf16_add(and_or(w, 0x000f000f, 0x43004300), zero_r);
  a[1] = bf16_add(and_or(w >> 4, 0x000f000f, 0x43004300), zero_r8);
  a[2] = bf16_add(and_or(w >> 8, 0x000f000f, 0x43004300), zero_r);
  a[3] = bf16_add(and_or(w >> 12, 0x000f000f, 0x43004300), zero_r8);
}
// The constant of int4_to_bf16 for zero point z (0..16).
DEV u32 int4_bf16_zero(u32 z) { return (0xc300u + z) * 0x10001u; }

// ---- bytes: w holds codes b0..b3, biased by 128 (b = q + 128); a[0] = {b0, b2}, a[1] = {b1, b3}
// int8 -> fp16: b-z, exact.  zero_0, zero_1 = pairs of -(1024+z); z = 128 gives q.  2 PRMT, 2 HADD2.
DEV void int8_to_half(u32 w, u32 zero_0, u32 zero_1, u32 (&a)[2]) {
  a[0] = half_add(__byte_perm(w, 0x64646464, 0x4240), zero_0);
  a[1] = half_add(__byte_perm(w, 0x64646464, 0x4341), zero_1);
}
// The constant of int8_to_half for zero point z (0..255).
DEV u32 int8_half_zero(u32 z) { return (0xe400u + z) * 0x10001u; }
// int8 -> bf16: b-128, exact.  The low 7 bits make 128+l, the top bit 128 (set) or 256 (clear); their difference is l
// or l-128.  1 SHF, 4 LOP3, 2 HFMA2.
DEV void int8_to_bf16(u32 w, u32 (&a)[2]) {
  const u32 x = w >> 8;
  a[0] = bf16_fma(andn_or(w, 0x00800080, 0x43004300), 0xbf80bf80, and_or(w, 0x007f007f, 0x43004300));
  a[1] = bf16_fma(andn_or(x, 0x00800080, 0x43004300), 0xbf80bf80, and_or(x, 0x007f007f, 0x43004300));
}
// int8 -> bf16 through fp32 (FasterTransformer): 0x4b0000bb is 2^23+b; a subtraction, then the upper halves of two
// floats.  4 PRMT, 4 FADD, 2 PRMT.
DEV void int8_to_bf16_fp32(u32 w, u32 (&a)[2]) {
  float f[4];
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = __uint_as_float(__byte_perm(w, 0x4b000000, 0x7650 + i)) - 8388736.f;
  a[0] = __byte_perm(__float_as_uint(f[0]), __float_as_uint(f[2]), 0x7632);
  a[1] = __byte_perm(__float_as_uint(f[1]), __float_as_uint(f[3]), 0x7632);
}

// ---- halves and floats
DEV float half_low(u32 v) {
  float f;
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, l;\n}" : "=f"(f) : "r"(v));
  return f;
}
DEV float half_high(u32 v) {
  float f;
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, h;\n}" : "=f"(f) : "r"(v));
  return f;
}
DEV float bf16_low(u32 v) { return __uint_as_float(v << 16); }
DEV float bf16_high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
#if __CUDA_ARCH__ >= 800
DEV u32 half_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEV u32 bf16_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
#else  // the same rounding: sm_75 converts one half at a time, and knows no bf16
DEV u32 half_pair(float low, float high) {
  u32 d;
  asm("{\n .reg .b16 l, h;\n cvt.rn.f16.f32 l, %1;\n cvt.rn.f16.f32 h, %2;\n mov.b32 %0, {l, h};\n}"
      : "=r"(d)
      : "f"(low), "f"(high));
  return d;
}
DEV u32 bf16_pair(float low, float high) { return bfloat_of_float(low) | u32(bfloat_of_float(high)) << 16; }
#endif
