// Images, and the windows that output pixels see of them.
#pragma once
#include "ptx.cuh"

// As `Images` in conv/images.rs.
struct Images {
  u64 batch, height, width;  // of x
  u64 rows, columns;  // of an image of y
  u32 kernel_rows, kernel_columns;
  u32 channels, outputs, groups;  // channels and outputs of a group
  u32 x_nhwc, y_nhwc;
  u32 padding;  // of this struct
  u64 stride_down, stride_across, dilation_down, dilation_across, top, left;
};

// An output pixel: its image, row and column.
struct Pixel {
  u64 image, row, column;
};

DEV Pixel pixel_of(const Images& v, u64 at) {
  return {at / (v.rows * v.columns), at / v.columns % v.rows, at % v.columns};
}

// Where channel 0 of the input pixel under a position of the kernel lies in x, and whether it does.
struct Place {
  u64 at;
  bool inside;
};

DEV Place place_of(const Images& v, const Pixel& p, u32 ky, u32 kx) {
  // What lies above or left of the image wraps round, to more than its size.
  const u64 y = p.row * v.stride_down + ky * v.dilation_down - v.top,
            x = p.column * v.stride_across + kx * v.dilation_across - v.left;
  const u64 all = u64(v.channels) * v.groups;
  return {v.x_nhwc ? ((p.image * v.height + y) * v.width + x) * all : (p.image * all * v.height + y) * v.width + x,
          y < v.height && x < v.width};
}

// From a channel of x to the next.
DEV u64 channel_step(const Images& v) { return v.x_nhwc ? 1 : v.height * v.width; }

// Where an output of a pixel lies in y.
DEV u64 output_at(const Images& v, u64 pixel, const Pixel& p, u64 output) {
  const u64 all = u64(v.outputs) * v.groups;
  return v.y_nhwc ? pixel * all + output : ((p.image * all + output) * v.rows + p.row) * v.columns + p.column;
}
