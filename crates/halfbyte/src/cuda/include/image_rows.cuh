// Rows of x of a GEMM that are nowhere in memory: windows on images (implicit GEMM), of which a thread copies pieces of
// 8 channels. A row is an output pixel, its columns are the pixels under the positions of the kernel, channel by
// channel.
//
//   images [part][batch][height][width][pixel elements], halfs; a group of the convolution has `channels` of a pixel
//   W has the rows of a group side by side, in strips that no other group has a part of
//   k runs over the positions of the first part, then over those of the next one, for which W begins anew: x is the
//       sum of its parts, of which the smallest come first
#pragma once
#include "windows.cuh"

// Where a thread's pieces lie, as MatrixRows of cp_async_ring.cuh: of some rows, in one or two boxes of 64 columns.
struct ImageRows {
  static constexpr int ROWS = X_PIECES > THREADS ? X_PIECES / THREADS : 1, SPANS = X_PIECES < THREADS ? 1 : STEP / 64;
  static constexpr int NOWHERE = -0x60000000, PAST = 0x40000000;  // rows of no image, also where both are added
  // Of the pixel under position (0, 0), and its first element of the group.
  int row[ROWS], column[ROWS], first[ROWS];
  int down[SPANS], across[SPANS], offset[SPANS];  // from there
  int atom;  // of W along k
  const u16* x;  // the part
  __device__ __forceinline__ void begin(const Given& g, int token, int strip, int k) {
    const int part = k / g.steps_of_w, channel = strip / g.strips * g.windows.channels;
    const Windows& v = g.windows;
    // The first row's pixel of y; the others follow, THREADS / 8 pixels apart.
    int at = token + (int)threadIdx.x / 8 % NT, line = at / v.output.columns, c = at - line * v.output.columns,
        image = line / v.output.rows, r = line - image * v.output.rows;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int y = r * v.stride.rows - v.padding.rows;
      row[i] = at < g.m ? y : NOWHERE;
      column[i] = c * v.stride.columns - v.padding.columns;
      first[i] = ((image * g.height + y) * g.width + column[i]) * g.pixel + channel;
      at += THREADS / 8;
      for (c += THREADS / 8; i + 1 < ROWS && c >= v.output.columns; c -= v.output.columns)
        if (++r == v.output.rows) {
          r = 0;
          image++;
        }
    }
    x = g.x + part * g.part;
    atom = k - part * g.steps_of_w;
    next_stage(g, 0);
  }
  __device__ __forceinline__ void next_stage(const Given& g, int half) {
    const Windows& v = g.windows;
#pragma unroll
    for (int s = 0; s < SPANS; s++) {
      const u32 box = half * (STEP / 64) + s + (X_PIECES < THREADS ? threadIdx.x / X_PIECES : 0),
                piece = atom * 16 + box * 8 + threadIdx.x % 8, position = (u32)(piece * g.of_channels >> 32),
                ky = (u32)(position * g.of_columns >> 32), kx = position - ky * v.kernel.columns;
      down[s] = (int)ky < v.kernel.rows ? (int)ky * v.dilation.rows : PAST;
      across[s] = (int)kx * v.dilation.columns;
      offset[s] =
          ((int)ky * v.dilation.rows * g.width + across[s]) * g.pixel + (int)(piece * 8 - position * v.channels);
    }
  }
  __device__ __forceinline__ bool next_atom(const Given& g) {
    const bool anew = ++atom == g.steps_of_w;
    if (anew) {
      atom = 0;
      x += g.part;
    }
    next_stage(g, 0);
    return anew;
  }
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int i = 0; i < ROWS; i++) row[i] = NOWHERE;
  }
  DEV int atom_of_w(const Given& g, int k) { return k % g.steps_of_w; }
  DEV int row_of(int copy) { return copy * THREADS % X_PIECES / THREADS; }
  DEV int span_of(int copy) { return X_PIECES < THREADS ? 0 : copy * THREADS / X_PIECES; }
  __device__ __forceinline__ bool is_there(const Given& g, int copy) const {
    return (u32)(row[row_of(copy)] + down[span_of(copy)]) < (u32)g.height &&
           (u32)(column[row_of(copy)] + across[span_of(copy)]) < (u32)g.width;
  }
  __device__ __forceinline__ const u8* at(const Given&, int copy) const {
    return (const u8*)(x + (long long)(first[row_of(copy)] + offset[span_of(copy)]));
  }
  __device__ __forceinline__ int token(const Given&) const { return 0; }  // rows have no terms
};
DEV int steps_of_w(const Given& g) { return g.steps_of_w; }

// A tile has outputs of one group of the convolution.
DEV Place place(const ImageArguments& g, u32 columns, int tile) {
  Place at = place(static_cast<const Arguments&>(g), columns, tile);
  const int group = at.row * TILE_STRIPS / g.strips;
  at.before = group * (g.strips * 64 - g.outputs);
  at.last = (group + 1) * g.outputs;
  at.unit = g.outputs;
  return at;
}
