// Images in which what a row of a window sees is the channels of one pixel.
//
//   out[row of an image][output column][columns]: position after position of a window's row, channel by channel; zeros
//       outside of the image, and behind the last position
//   a thread writes eight columns, which are 16 bytes
//
// Where a pixel of x is no whole number of 16 bytes (3 channels are 6), the copy engine does not read windows of it;
// here a row of a window is one box or a few (conv/window_rows.rs).
#include "hopper.cuh"

// As `Params` in window_rows.rs. Elements of x and of out are below 2^31.
struct Params {
  const u16* x;
  uint4* out;
  u32 pieces, of_pixel;  // sixteen bytes of out, and of a pixel of it
  u32 outputs;  // columns of y
  u32 height, width, channels;  // of an image of x
  u32 there;  // columns that a row of a window has
  u32 across, dilation, left;
  u32 nhwc;  // x lies pixel by pixel, else plane by plane
  u32 unused;
};

extern "C" __global__ void __launch_bounds__(256) window_rows(const __grid_constant__ Params p) {
  const u32 i = blockIdx.x * 256 + threadIdx.x, pixel = i / p.of_pixel, first = 8 * (i - pixel * p.of_pixel);
  const u32 row = pixel / p.outputs, output = pixel - row * p.outputs;
  dependency_wait();
  if (i >= p.pieces) return;
  // What lies left of the image wraps round, to more than its width.
  const u32 left = output * p.across - p.left;
  u32 eight[4] = {0, 0, 0, 0};
  if (p.nhwc && p.dilation == 1) {  // columns of a window's row are neighbours
    const u32 at = left * p.channels + first, end = p.width * p.channels;
    const u16* from = p.x + row * end;
#pragma unroll
    for (u32 e = 0; e < 8; e++)
      if (first + e < p.there && at + e < end) eight[e / 2] |= u32(from[at + e]) << (16 * (e % 2));
  } else {
    const u32 position = first / p.channels, plane = p.height * p.width, step = p.nhwc ? 1 : plane;
    const u16* from =
        p.x + (p.nhwc ? row * p.width * p.channels : row / p.height * p.channels * plane + row % p.height * p.width);
    u32 c = first - position * p.channels, x = left + position * p.dilation;
#pragma unroll
    for (u32 e = 0; e < 8; e++) {
      if (first + e < p.there && x < p.width)
        eight[e / 2] |= u32(from[x * (p.nhwc ? p.channels : 1) + c * step]) << (16 * (e % 2));
      if (++c == p.channels) {
        c = 0;
        x += p.dilation;
      }
    }
  }
  p.out[i] = make_uint4(eight[0], eight[1], eight[2], eight[3]);
}
