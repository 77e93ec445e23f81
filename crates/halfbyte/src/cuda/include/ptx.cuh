// What kernels need of the machine and the language does not say: types, and one function for each instruction.
// No header of the toolkit is included anywhere: the run-time compiler alone must be enough.
#pragma once

#define DEV static __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Half precision as its bits. Widening is exact; narrowing rounds to nearest, ties to even, and overflows to infinity.
DEV float float_of_half(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEV u16 half_of_float(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Brain float as its bits: the upper half of a single.
DEV float float_of_bfloat(u16 bits) { return __uint_as_float(u32(bits) << 16); }

// The instruction for it begins with sm_80; this is the same rounding everywhere.
DEV u16 bfloat_of_float(float value) {
  if (value != value) return 0x7fff;
  const u32 bits = __float_as_uint(value);
  // Half of the last kept bit, less one unless that bit is odd: carries where nearest-even rounds up.
  return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 16 bytes that no other block reads and no kernel before this one writes: they take no place in L1.
DEV uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
// The same of 8 bytes.
DEV uint2 load_8_once(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
