// Where wna16_sm90.cu takes rows of x from: a matrix (GEMM), or windows on images (implicit GEMM). The kernel is
// written over RowsOfX, which is the one or the other. Each says
//   descriptor_of_tokens(tokens)   how far the rows of so many tokens reach
//   DESCRIPTOR_HIGH, descriptor_step(k16)   how a stage lies for wgmma: the upper word of descriptors, and how far the
//   k16 step of
//                                64 k lies from the first
//   begin(g, token, k)         the rows from `token` on, from column k on
//   next_unit(g)             moves on by 128 columns
//   copy(...)                    boxes [box, box + BOXES) of 64 k of the unit at column k, to a stage
#pragma once
#include "hopper.cuh"
#include "wgmma.cuh"
#include "windows.cuh"
#include "wna16_sm90.cuh"

// Rows that lie one behind the other: the tensor map has all that there is to know.
struct MatrixRows {
  static constexpr u64 DESCRIPTOR_HIGH = WGMMA_DESCRIPTOR_HIGH;
  DEV int descriptor_step(int k16) { return 2 * k16; }
  DEV int descriptor_of_tokens(int tokens) { return tokens * (128 / 16); }
  __device__ __forceinline__ void begin(const Arguments&, int, int) {}
  __device__ __forceinline__ void next_unit(const Arguments&) {}
  __device__ __forceinline__ void copy(const Arguments&, u32 to, const TensorMap* map, u32 bar, int token, int k,
                                       int box) const {
#pragma unroll
    for (int i = 0; i < BOXES; i++) copy_box(to + i * BOX, map, k + (box + i) * 64, token, bar);
  }
};

// Rows that are nowhere in memory: windows on images (windows.cuh), in copies of WIDTH columns. Copies of 32 lie in
// pairs for a box, in 64-byte swizzle: 8 rows in 512 bytes.
template <int WIDTH> struct ImageWindows {
  static constexpr u64 DESCRIPTOR_HIGH = WIDTH == 32 ? (32ull << 32) | (2ull << 62) : WGMMA_DESCRIPTOR_HIGH;
  DEV int descriptor_of_tokens(int tokens) { return tokens * (2 * WIDTH / 16); }
  DEV int descriptor_step(int k16) { return WIDTH == 32 ? k16 / 2 * (NT * 64 / 16) + k16 % 2 * 2 : 2 * k16; }
  Window window;  // of the unit's first box
  __device__ __forceinline__ void begin(const ConvArguments& g, int token, int k) {
    window = Window::of(g.windows, token, k);
  }
  __device__ __forceinline__ void next_unit(const ConvArguments& g) {
    window.advance_boxes<WIDTH, 128 / WIDTH>(g.windows);
  }
  __device__ __forceinline__ void copy(const ConvArguments& g, u32 to, const TensorMap* map, u32 bar, int, int,
                                       int box) const {
    Window at = window;
    if (box) at.advance_boxes<WIDTH, 64 / WIDTH>(g.windows);
#pragma unroll
    for (int i = 0; i < BOXES * 64 / WIDTH; i++, at.advance(g.windows, WIDTH))
      at.copy(g.windows, to + i * (NT * WIDTH * 2), map, bar);
  }
};

typedef Choice<WINDOW != 0, ImageWindows<WINDOW>, MatrixRows>::Type RowsOfX;
