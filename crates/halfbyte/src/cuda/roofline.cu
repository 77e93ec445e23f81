// What a GPU can do at most, measured: reads of memory, and numbers to read and multiply; and an empty kernel.
#include "ampere.cuh"
#include "ptx.cuh"
#include "random.cuh"

// Reads `pieces` of 16 bytes and keeps nothing of them but that they were read.
extern "C" __global__ void __launch_bounds__(512) read(const uint4* from, u64 pieces, u32* sink) {
  constexpr int AHEAD = 8;
  const u64 threads = u64(gridDim.x) * 512;
  u32 sum = 0;
  for (u64 at = u64(blockIdx.x) * 512 + threadIdx.x; at < pieces; at += AHEAD * threads) {
    uint4 v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) v[i] = at + i * threads < pieces ? __ldcs(from + at + i * threads) : uint4();
#pragma unroll
    for (int i = 0; i < AHEAD; i++) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (sum == 0x12345678) *sink = sum;
}

// Near to normal floats of this deviation, in fp16 (type 0) or bf16 (1): the sum of four uniform numbers.
extern "C" __global__ void normal(u16* out, u64 len, u32 seed, float deviation, u32 type) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < len; i += u64(gridDim.x) * blockDim.x) {
    const u32 a = mixed(u32(i) * 2 + seed), b = mixed(u32(i) * 2 + 1 + seed + u32(i >> 31) * 77);
    const float sum = float(a & 0xffff) + float(a >> 16) + float(b & 0xffff) + float(b >> 16) - 131070.f;
    const float v = sum * (deviation * 2.6428e-5f);
    out[i] = type ? bfloat_of_float(v) : half_of_float(v);
  }
}

// Uniform floats in fp16: two of each word, from number `first` on, (bits - 32767.5) * step. As on the CPU.
extern "C" __global__ void uniform(u16* out, u64 len, u64 first, float step) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; 2 * i < len; i += u64(gridDim.x) * blockDim.x) {
    const u32 word = random_word(first + i);
    out[2 * i] = half_of_float((float(word & 0xffff) - 32767.5f) * step);
    if (2 * i + 1 < len) out[2 * i + 1] = half_of_float((float(word >> 16) - 32767.5f) * step);
  }
}

// A launch and nothing else.
extern "C" __global__ void nothing() { dependency_wait(); }
