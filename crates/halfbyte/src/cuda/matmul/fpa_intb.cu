// Codes of 4 or 8 bits between one a byte and the layouts of fpA_intB kernels (layout/codes/fpa_intb.rs), and floats
// straight to them by Paddle's rule (quantize/weight_only.rs), to the same bits as on a CPU.
//
//   a block has a tile of 64 inputs x 32 outputs, in shared memory one code a byte
//       pack      bytes [n][k]              -> tile -> words of the stream
//       unpack    words of the stream       -> tile -> bytes [n][k]
//       quantize  floats [k][n] over scales -> tile -> words of the stream
//       quantize_signed    the same          -> tile -> bytes [n][k] with sign
//       dequantize         words of the stream -> tile, times scales -> floats [k][n]
//   scales: a block has one group of 32 outputs, eight threads an output
#include "floats.cuh"

constexpr int OUTPUTS = 32;
constexpr int INPUTS = 64;
constexpr int THREADS = 256;
constexpr int LANES = THREADS / OUTPUTS;  // of an output, in `scales`

// Neighbouring outputs begin in neighbouring banks.
[[maybe_unused]] constexpr int STRIDE = INPUTS + 4;

// As `Params` in fpa_intb.rs.
struct Params {
  void* floats;  // [k][n]
  void* scales;  // [groups][n]
  u8* codes;  // [n][k]
  u32* stream;
  u32 n, k;
  u32 group;  // inputs that share a scale
  u32 groups;
  u32 of_outputs;  // one scale an output, which is -0 where its first weight is and the others are none
  FloatType float_type;
  FloatType scale_type;
  float most;  // the largest code
};

// The first output and the first input of this block's tile; neighbouring blocks have neighbouring outputs.
[[maybe_unused]] DEV uint2 corner(const Params& p) {
  const u32 strips = (p.n + OUTPUTS - 1) / OUTPUTS;
  return make_uint2(blockIdx.x % strips * OUTPUTS, blockIdx.x / strips * INPUTS);
}

// A word of the tile: where it lies, whether it is there, and the output and input of each of its codes.
template <int BITS, bool INTERLEAVED> struct Word {
  static constexpr int CODES = 32 / BITS, A = 16 / BITS, OF_OUTPUT = INPUTS / CODES;
  u32 output, input;  // of the tile: of the first code
  u64 at;
  bool there;

  __device__ __forceinline__ Word(const Params& p, uint2 corner, u32 word) {
    if (INTERLEAVED) {
      const u32 own = word % OF_OUTPUT;
      output = word / OF_OUTPUT, input = own / 4 * (8 * A) + own % 4 * 2;
      const u32 row = corner.x + output;
      there = row < p.n;
      at = u64(row / A) * (p.k / 2) + corner.y / INPUTS * 32 + row % A * OF_OUTPUT + own;
    } else {
      constexpr u32 ACROSS = OUTPUTS / CODES;
      output = word % ACROSS * CODES, input = word / ACROSS;
      there = corner.x + output < p.n && corner.y + input < p.k;
      at = u64(corner.y + input) * (p.n / CODES) + (corner.x + output) / CODES;
    }
  }

  // The place in the tile of the code whose bits begin at BITS * i.
  __device__ __forceinline__ u32 place(int i) const {
    if (INTERLEAVED) return output * STRIDE + input + i / A + 8 * (i % A);
    return (output + (i < CODES / 2 ? 2 * i : 2 * i - CODES + 1)) * STRIDE + input;
  }
};

template <int BITS> constexpr int WORDS_OF_TILE = OUTPUTS * INPUTS * BITS / 32;

template <int BITS, bool INTERLEAVED> DEV void store_words(const Params& p, uint2 corner, const u8* tile) {
#pragma unroll
  for (int first = 0; first < WORDS_OF_TILE<BITS>; first += THREADS) {
    const Word<BITS, INTERLEAVED> word(p, corner, first + threadIdx.x);
    if (!word.there) continue;
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < 32 / BITS; i++) packed |= (tile[word.place(i)] & ((1u << BITS) - 1)) << (BITS * i);
    p.stream[word.at] = packed;
  }
}

template <int BITS, bool INTERLEAVED> __global__ void __launch_bounds__(THREADS) pack(const Params p) {
  __shared__ u8 tile[OUTPUTS * STRIDE];
  const uint2 from = corner(p);
  for (u32 i = threadIdx.x; i < OUTPUTS * INPUTS; i += THREADS) {
    const u32 output = from.x + i / INPUTS, input = from.y + i % INPUTS;
    if (output < p.n && input < p.k) tile[i / INPUTS * STRIDE + i % INPUTS] = p.codes[u64(output) * p.k + input];
  }
  __syncthreads();
  store_words<BITS, INTERLEAVED>(p, from, tile);
}

template <int BITS, bool INTERLEAVED> DEV void load_words(const Params& p, uint2 corner, u8* tile) {
#pragma unroll
  for (int first = 0; first < WORDS_OF_TILE<BITS>; first += THREADS) {
    const Word<BITS, INTERLEAVED> word(p, corner, first + threadIdx.x);
    if (!word.there) continue;
    const u32 packed = p.stream[word.at];
#pragma unroll
    for (int i = 0; i < 32 / BITS; i++) tile[word.place(i)] = packed >> (BITS * i) & ((1u << BITS) - 1);
  }
}

// Codes of the tile to bytes [n][k], with some bits flipped.
DEV void store_bytes(const Params& p, uint2 corner, const u8* tile, u8 flipped) {
  for (u32 i = threadIdx.x; i < OUTPUTS * INPUTS; i += THREADS) {
    const u32 output = corner.x + i / INPUTS, input = corner.y + i % INPUTS;
    if (output < p.n && input < p.k)
      p.codes[u64(output) * p.k + input] = tile[i / INPUTS * STRIDE + i % INPUTS] ^ flipped;
  }
}

template <int BITS, bool INTERLEAVED> __global__ void __launch_bounds__(THREADS) unpack(const Params p) {
  __shared__ u8 tile[OUTPUTS * STRIDE];
  const uint2 from = corner(p);
  load_words<BITS, INTERLEAVED>(p, from, tile);
  __syncthreads();
  store_bytes(p, from, tile, 0);
}

// Each product is rounded once, to the type of the scales.
template <int BITS, bool INTERLEAVED> __global__ void __launch_bounds__(THREADS) dequantize(const Params p) {
  __shared__ u8 tile[OUTPUTS * STRIDE];
  const uint2 from = corner(p);
  load_words<BITS, INTERLEAVED>(p, from, tile);
  __syncthreads();
  for (u32 i = threadIdx.x; i < OUTPUTS * INPUTS; i += THREADS) {
    const u32 output = from.x + i % OUTPUTS, input = from.y + i / OUTPUTS;
    if (output >= p.n || input >= p.k) continue;
    const int code = int(tile[i % OUTPUTS * STRIDE + i / OUTPUTS]) - (1 << (BITS - 1));
    const float scale = load_float(p.scales, u64(input / p.group) * p.n + output, p.scale_type);
    store_float(p.floats, u64(input) * p.n + output, __fmul_rn(float(code), scale), p.scale_type);
  }
}

// The code of a weight, with the middle one for zero. What is no number becomes the largest code of 8 bits and the
// least of 4, as on a CPU, where it passes `min` and `max` or a cast to integers.
template <int BITS> DEV u32 code_of(float weight, float scale) {
  constexpr float MOST = (1 << (BITS - 1)) - 1;
  const float steps = roundf(__fdiv_rn(weight, scale));
  float code = fminf(fmaxf(steps, -MOST), MOST);
  if (BITS == 8 && steps != steps) code = MOST;
  if (BITS == 4 && !(fabsf(steps) <= 3.4028234e38f)) code = -MOST;
  return int(code) + (1 << (BITS - 1));
}

template <int BITS> DEV void load_floats(const Params& p, uint2 corner, u8* tile) {
  for (u32 i = threadIdx.x; i < OUTPUTS * INPUTS; i += THREADS) {
    const u32 output = corner.x + i % OUTPUTS, input = corner.y + i / OUTPUTS;
    if (output >= p.n || input >= p.k) continue;
    const float weight = load_float(p.floats, u64(input) * p.n + output, p.float_type);
    const float scale = load_float(p.scales, u64(input / p.group) * p.n + output, p.scale_type);
    tile[i % OUTPUTS * STRIDE + i / OUTPUTS] = code_of<BITS>(weight, scale);
  }
}

template <int BITS, bool INTERLEAVED> __global__ void __launch_bounds__(THREADS) quantize(const Params p) {
  __shared__ u8 tile[OUTPUTS * STRIDE];
  const uint2 from = corner(p);
  load_floats<BITS>(p, from, tile);
  __syncthreads();
  store_words<BITS, INTERLEAVED>(p, from, tile);
}

__global__ void __launch_bounds__(THREADS) quantize_signed(const Params p) {
  __shared__ u8 tile[OUTPUTS * STRIDE];
  const uint2 from = corner(p);
  load_floats<8>(p, from, tile);
  __syncthreads();
  store_bytes(p, from, tile, 0x80);
}

// NaN where a weight is no number.
__global__ void __launch_bounds__(THREADS) scales(const Params p) {
  __shared__ float largest[LANES][OUTPUTS];
  const u32 strips = (p.n + OUTPUTS - 1) / OUTPUTS, group = blockIdx.x / strips;
  const u32 lane = threadIdx.x / OUTPUTS, own = threadIdx.x % OUTPUTS, output = blockIdx.x % strips * OUTPUTS + own;
  const u64 first = u64(group) * p.group, end = first + p.group < p.k ? first + p.group : p.k;
  float most = 0.f;
  if (output < p.n) {
    for (u64 input = first + lane; input < end; input += LANES) {
      const float magnitude = fabsf(load_float(p.floats, input * p.n + output, p.float_type));
      // Once NaN, it stays.
      most = magnitude > most || magnitude != magnitude ? magnitude : most;
    }
  }
  largest[lane][own] = most;
  __syncthreads();
  if (lane != 0 || output >= p.n) return;
#pragma unroll
  for (int i = 1; i < LANES; i++) {
    const float other = largest[i][own];
    most = other > most || other != other ? other : most;
  }
  if (most > 3.4028234e38f) most = __int_as_float(0x7fffffff);
  if (most == 0.f && p.of_outputs && __float_as_uint(load_float(p.floats, output, p.float_type)) >> 31) most = -0.f;
  store_float(p.scales, u64(group) * p.n + output, __fdiv_rn(most, p.most), p.scale_type);
}
