// y = a + b, element by element, with a relu behind it or without: floats, or codes of 8 bits as format/int8.rs has
// their sum.
//
//   a thread has 4 neighbours, in one word where they are bytes and lie so
#include "floats.cuh"

constexpr int THREADS = 256, EACH = 4;

// As `Params` in add.rs.
struct Params {
  const void *a, *b;
  void* y;
  u64 elements;
  FloatType a_type, b_type, y_type;
  u32 relu;
};

__global__ void __launch_bounds__(THREADS) add(const Params p) {
  const u64 first = (u64(blockIdx.x) * THREADS + threadIdx.x) * EACH;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (first + i >= p.elements) return;
    const float sum = load_float(p.a, first + i, p.a_type) + load_float(p.b, first + i, p.b_type);
    store_float(p.y, first + i, p.relu && sum < 0.f ? 0.f : sum, p.y_type);  // NaN stays NaN
  }
}

// As `CodeParams` in add.rs.
struct CodeParams {
  const u8 *a, *b;
  u8* y;
  u64 elements;
  int factor_a, factor_b, constant, zero, least, greatest;
  u32 flip_a, flip_b;  // 0x80 of signed bytes: with it they are their codes plus 128
  u32 words;  // all three begin at multiples of 4 bytes
  u32 padding;
};

DEV int code(const CodeParams& p, u32 a, u32 b) {
  // The whole is within 32 bits, its parts may not be.
  const u32 sum =
      u32(p.factor_a) * (int(a ^ p.flip_a) - int(p.flip_a)) + u32(p.factor_b) * (int(b ^ p.flip_b) - int(p.flip_b));
  return min(max((int(sum + u32(p.constant)) >> 16) + p.zero, p.least), p.greatest);
}

__global__ void __launch_bounds__(THREADS) add_codes(const CodeParams p) {
  const u64 first = (u64(blockIdx.x) * THREADS + threadIdx.x) * EACH;
  if (p.words && first + EACH <= p.elements) {
    const u32 a = *reinterpret_cast<const u32*>(p.a + first), b = *reinterpret_cast<const u32*>(p.b + first);
    u32 y = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) y |= u32(code(p, a >> 8 * i & 0xff, b >> 8 * i & 0xff) & 0xff) << 8 * i;
    *reinterpret_cast<u32*>(p.y + first) = y;
    return;
  }
  for (u64 i = first; i < p.elements && i < first + EACH; i++) p.y[i] = u8(code(p, p.a[i], p.b[i]));
}
