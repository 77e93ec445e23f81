// Codes of 4 and 8 bits to halves, in registers: the exact conversions of halfbyte's kernels, AWQ's and
// FasterTransformer's, for kernels of other people.  docs/cuda-conversions.md explains them.
//
// One file without any other: nvcc, NVRTC (no header of the toolkit is needed) and C++17 on a host, where the same
// functions give the same bits by plain arithmetic, slowly, so that what a kernel does can be tested without a GPU.
//
// A register holds two halves ("pair"), the first in its low 16 bits.  `out` is in the order of the elements, two a
// register.  All results are exact: integers of at most 9 bits.  fp16 needs sm_75, bf16 sm_80.
//
//   order          where element e lies                       who stores codes so
//   interleaved    nibble 0 4 1 5 2 6 3 7 of e; byte 0 2 1 3  AWQ (nibbles), FasterTransformer, TensorRT-LLM, halfbyte
//   linear         nibble e, byte e                           GPTQ, compressed-tensors, ONNX
#ifndef HALFBYTE_CONVERSIONS_CUH
#define HALFBYTE_CONVERSIONS_CUH

#if defined(__CUDACC__)
#define HALFBYTE_FUNCTION static __host__ __device__ __forceinline__
#else
#define HALFBYTE_FUNCTION static inline
#endif
#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace halfbyte {

// ---- single instructions, and on a host what they compute
namespace instruction {

#if !defined(__CUDA_ARCH__)
// A finite float of so many bits of mantissa and this least exponent, as a double; and back, to nearest, ties to even.
template <int MANTISSA, int LEAST> static inline double value(unsigned bits) {
  const unsigned exponent = (bits & 0x7fffu) >> MANTISSA, low = bits & ((1u << MANTISSA) - 1);
  const unsigned steps = exponent == 0 ? low : low | 1u << MANTISSA;
  const double magnitude = std::ldexp(double(steps), LEAST - MANTISSA + (exponent == 0 ? 0 : int(exponent) - 1));
  return bits & 0x8000u ? -magnitude : magnitude;
}
template <int MANTISSA, int LEAST> static inline unsigned nearest(double value) {
  const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = value == 0 || exponent - 1 < LEAST ? LEAST : exponent - 1;
  const unsigned steps = unsigned(std::nearbyint(std::ldexp(std::fabs(value), MANTISSA - exponent)));
  // Steps that reach the next power of two carry into the exponent.
  const unsigned normal = (unsigned(exponent - LEAST + 1) << MANTISSA) + steps - (1u << MANTISSA);
  return sign | (steps < 1u << MANTISSA ? steps : normal);
}
// a * b + c in both halves of a pair.
template <int MANTISSA, int LEAST> static inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  unsigned out = 0;
  for (int at = 0; at < 32; at += 16) {
    const double x = value<MANTISSA, LEAST>(a >> at & 0xffff), y = value<MANTISSA, LEAST>(b >> at & 0xffff);
    out |= nearest<MANTISSA, LEAST>(x * y + value<MANTISSA, LEAST>(c >> at & 0xffff)) << at;
  }
  return out;
}
#endif

// (a & b) | c, one LOP3.
HALFBYTE_FUNCTION unsigned and_or(unsigned a, unsigned b, unsigned c) {
#if defined(__CUDA_ARCH__)
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return (a & b) | c;
#endif
}
// (~a & b) | c, one LOP3.
HALFBYTE_FUNCTION unsigned andn_or(unsigned a, unsigned b, unsigned c) {
#if defined(__CUDA_ARCH__)
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return (~a & b) | c;
#endif
}
// Four bytes of the eight of a (0 to 3) and b (4 to 7), chosen by the nibbles of `selector`: one PRMT.
HALFBYTE_FUNCTION unsigned permute(unsigned a, unsigned b, unsigned selector) {
#if defined(__CUDA_ARCH__)
  unsigned d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
#else
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned chosen = selector >> (4 * i) & 7;
    out |= ((chosen < 4 ? a : b) >> (8 * (chosen & 3)) & 0xff) << (8 * i);
  }
  return out;
#endif
}
HALFBYTE_FUNCTION unsigned half_fma(unsigned a, unsigned b, unsigned c) {
#if defined(__CUDA_ARCH__)
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return fma_pair<10, -14>(a, b, c);
#endif
}
HALFBYTE_FUNCTION unsigned half_add(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
  unsigned d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return half_fma(a, 0x3c003c00, b);
#endif
}
HALFBYTE_FUNCTION unsigned bf16_fma(unsigned a, unsigned b, unsigned c) {
#if defined(__CUDA_ARCH__)
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
#else
  return fma_pair<7, -126>(a, b, c);
#endif
}
// a * 1 + b: sm_80 has no packed addition of bf16.
HALFBYTE_FUNCTION unsigned bf16_add(unsigned a, unsigned b) { return bf16_fma(a, 0x3f803f80, b); }

}  // namespace instruction

// ---- codes of 4 bits, eight a word.
// Interleaved, with zero points known when the kernel runs: `zero` of registers 0 and 2, `zero_8` of 1 and 3, which are
// rows R and R + 8 where the four are the A registers of mma.m16n8k16 (halfbyte); each from 0 to 16.
// fp16: 1 shift, 4 LOP3, 4 additions.  Nibbles on bit 0 of the mantissa of 1024 are 1024 + q, on bit 4 of 64's 64 + q.
HALFBYTE_FUNCTION void int4_fragment_to_half(unsigned word, unsigned zero, unsigned zero_8, unsigned (&out)[4]) {
  using namespace instruction;
  const unsigned shifted = word >> 8;
  const unsigned less = (0xe400u + zero) * 0x10001u, less_8 = (0xd400u + (zero_8 << 4)) * 0x10001u;
  out[0] = half_add(and_or(word, 0x000f000f, 0x64006400), less);
  out[1] = half_add(and_or(word, 0x00f000f0, 0x54005400), less_8);
  out[2] = half_add(and_or(shifted, 0x000f000f, 0x64006400), less);
  out[3] = half_add(and_or(shifted, 0x00f000f0, 0x54005400), less_8);
}
// bf16: 3 shifts, 4 LOP3, 4 fma.
HALFBYTE_FUNCTION void int4_fragment_to_bf16(unsigned word, unsigned zero, unsigned zero_8, unsigned (&out)[4]) {
  using namespace instruction;
  const unsigned less = (0xc300u + zero) * 0x10001u, less_8 = (0xc300u + zero_8) * 0x10001u;
  out[0] = bf16_add(and_or(word, 0x000f000f, 0x43004300), less);
  out[1] = bf16_add(and_or(word >> 4, 0x000f000f, 0x43004300), less_8);
  out[2] = bf16_add(and_or(word >> 8, 0x000f000f, 0x43004300), less);
  out[3] = bf16_add(and_or(word >> 12, 0x000f000f, 0x43004300), less_8);
}
// ZERO: the code of 0, taken off: 0 for codes as they are (AWQ, whose zero points come off later), 8 for symmetric ones
// (FasterTransformer, GPTQ's symmetric files).
template <int ZERO> HALFBYTE_FUNCTION void int4_interleaved_to_half(unsigned word, unsigned (&out)[4]) {
  static_assert(ZERO >= 0 && ZERO <= 15, "a code of 4 bits");
  int4_fragment_to_half(word, ZERO, ZERO, out);
}
template <int ZERO> HALFBYTE_FUNCTION void int4_interleaved_to_bf16(unsigned word, unsigned (&out)[4]) {
  static_assert(ZERO >= 0 && ZERO <= 15, "a code of 4 bits");
  int4_fragment_to_bf16(word, ZERO, ZERO, out);
}
// Nibble e is element e: 4 PRMT more.
HALFBYTE_FUNCTION void in_order(const unsigned (&pairs)[4], unsigned (&out)[4]) {
  out[0] = instruction::permute(pairs[0], pairs[1], 0x5410);
  out[1] = instruction::permute(pairs[2], pairs[3], 0x5410);
  out[2] = instruction::permute(pairs[0], pairs[1], 0x7632);
  out[3] = instruction::permute(pairs[2], pairs[3], 0x7632);
}
template <int ZERO> HALFBYTE_FUNCTION void int4_linear_to_half(unsigned word, unsigned (&out)[4]) {
  unsigned pairs[4];
  int4_interleaved_to_half<ZERO>(word, pairs);
  in_order(pairs, out);
}
template <int ZERO> HALFBYTE_FUNCTION void int4_linear_to_bf16(unsigned word, unsigned (&out)[4]) {
  unsigned pairs[4];
  int4_interleaved_to_bf16<ZERO>(word, pairs);
  in_order(pairs, out);
}

// ---- codes of 8 bits, four a word, biased: byte b stands for b - 128, or in fp16 for b less a zero point of 0 to 255.
// Bytes with a sign (torch.int8) are biased by one XOR.
HALFBYTE_FUNCTION unsigned biased(unsigned word) { return word ^ 0x80808080u; }
// fp16: 2 PRMT, 2 additions.
HALFBYTE_FUNCTION void int8_interleaved_to_half(unsigned word, unsigned zero, unsigned (&out)[2]) {
  using namespace instruction;
  const unsigned less = (0xe400u + zero) * 0x10001u;
  out[0] = half_add(permute(word, 0x64646464, 0x5250), less);
  out[1] = half_add(permute(word, 0x64646464, 0x5351), less);
}
HALFBYTE_FUNCTION void int8_linear_to_half(unsigned word, unsigned zero, unsigned (&out)[2]) {
  using namespace instruction;
  const unsigned less = (0xe400u + zero) * 0x10001u;
  out[0] = half_add(permute(word, 0x64646464, 0x5150), less);
  out[1] = half_add(permute(word, 0x64646464, 0x5352), less);
}
// bf16: the low 7 bits make 128 + l, the top bit 128 (set) or 256 (clear), and their difference is l or l - 128.
// 1 shift (linear: 2 PRMT), 4 LOP3, 2 fma.
HALFBYTE_FUNCTION unsigned bytes_to_bf16(unsigned bytes) {
  using namespace instruction;
  return bf16_fma(andn_or(bytes, 0x00800080, 0x43004300), 0xbf80bf80, and_or(bytes, 0x007f007f, 0x43004300));
}
HALFBYTE_FUNCTION void int8_interleaved_to_bf16(unsigned word, unsigned (&out)[2]) {
  out[0] = bytes_to_bf16(word);
  out[1] = bytes_to_bf16(word >> 8);
}
HALFBYTE_FUNCTION void int8_linear_to_bf16(unsigned word, unsigned (&out)[2]) {
  out[0] = bytes_to_bf16(instruction::permute(word, 0, 0x4140));
  out[1] = bytes_to_bf16(instruction::permute(word, 0, 0x4342));
}

}  // namespace halfbyte

#undef HALFBYTE_FUNCTION
#endif  // HALFBYTE_CONVERSIONS_CUH
