// Windows on images, for convolutions as GEMMs whose x is in memory nowhere (implicit GEMM).
//
//   x: images [batch][height][width][channels]
//   a row of x, a token of the product, is an output pixel; its columns are the pixels under the positions of the
//       kernel, in the order kernel row, kernel column, channel
//   a box of columns of one position for NT tokens is one TMA copy in im2col mode: it goes from output pixel to output
//       pixel through rows and images by itself, and fills with zeros what lies in the padding, beyond the last image,
//       or beyond the last channel
// Columns past the last position, where k is no whole number of units, are boxes beyond the last channel, which W has
// zeros for.
#pragma once
#include "hopper.cuh"

// A number for rows and one for columns.
struct Pair {
  int rows, columns;
};

// As `Windows` in conv/windows.rs.
struct Windows {
  int channels;  // of a position: a multiple of a box
  Pair kernel, output;  // sizes: of the kernel, of an image of y
  Pair stride, dilation, padding;  // padding: above and to the left
  int pitch;  // outputs from a pixel of y to the next
};

// What a box shows: the first of its pixels, and the position and channels that it shows of them all.
struct Window {
  int row, column, image;  // of x, under position (0, 0) of the tile's first output pixel
  int ky, kx, channel;
  // From column `k` on, a multiple of a box.
  DEV Window of(const Windows& v, int token, int k) {
    const int pixels = v.output.rows * v.output.columns, image = token / pixels, pixel = token - image * pixels,
              r = pixel / v.output.columns;
    const int position = k / v.channels, ky = position / v.kernel.columns;
    return {r * v.stride.rows - v.padding.rows,
            (pixel - r * v.output.columns) * v.stride.columns - v.padding.columns,
            image,
            ky,
            position - ky * v.kernel.columns,
            k - position * v.channels};
  }
  // Moves on by a box of so many columns.
  __device__ __forceinline__ void advance(const Windows& v, int box) {
    channel += box;
    if (channel < v.channels) return;
    channel = 0;
    if (++kx == v.kernel.columns) {
      kx = 0;
      ky++;
    }
  }
  // By several boxes of so many columns.
  template <int BOX, int BOXES> __device__ __forceinline__ void advance_boxes(const Windows& v) {
#pragma unroll
    for (int i = 0; i < BOXES; i++) advance(v, BOX);
  }
  // first: channel of x that is channel 0 here.
  __device__ __forceinline__ void copy(const Windows& v, u32 dst, const TensorMap* map, u32 bar, int first = 0) const {
    copy_from(v, dst, map, bar, first + channel, first + v.channels);
  }
  // From coordinate `c` of the map on; past the last position from `beyond` on, where the map has nothing.
  __device__ __forceinline__ void copy_from(const Windows& v, u32 dst, const TensorMap* map, u32 bar, int c,
                                            int beyond) const {
    const bool there = ky < v.kernel.rows;
    copy_im2col(dst, map, there ? c : beyond, column, row, image, there ? kx * v.dilation.columns : 0,
                there ? ky * v.dilation.rows : 0, bar);
  }
};
