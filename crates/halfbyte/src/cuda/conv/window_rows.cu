// Images in which a row of a window is one run of channels: pixels beside each other, with zeros left and right of the image.
//
//   out[row of an image][column][channel]:  column 0 is `left` columns left of the image;  channels are filled up with zeros to `pixel`
//   a thread writes eight channels, which are 16 bytes: of one pixel, or of some
//
// Where a row of x is no whole number of 16 bytes from its neighbour (3 channels are 6 bytes), nothing reads windows of it at once;
// here a window begins at a multiple of 16 bytes (conv/window_rows.rs).
#include "hopper.cuh"

// As `Params` in window_rows.rs. Elements of x and of out are below 2^31.
struct Params {
    const u16* x;
    uint4* out;
    u32 rows, pieces;      // rows of all images; sixteen bytes of a row of out
    u32 height, width;     // of an image of x
    u32 channels, pixel;   // of a pixel of x, and of out
    u32 left;
    u32 nhwc;              // x lies pixel by pixel, else plane by plane
    u32 whole;             // eight channels of x are one piece, too
};

extern "C" __global__ void __launch_bounds__(256) window_rows(const __grid_constant__ Params p) {
    const u32 i = blockIdx.x * 256 + threadIdx.x, row = i / p.pieces, piece = i - row * p.pieces;
    dependency_wait();
    if (row >= p.rows) return;
    // What lies left of the image wraps round, to more than its width.
    u32 column = 8 * piece / p.pixel, c = 8 * piece - column * p.pixel;
    column -= p.left;
    const u32 step = p.nhwc ? 1 : p.height * p.width;
    const u32 first = p.nhwc ? row * p.width * p.channels : row / p.height * p.channels * step + row % p.height * p.width;
    const u32 across = p.nhwc ? p.channels : 1;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (p.whole) {
        if (column < p.width) v = *reinterpret_cast<const uint4*>(p.x + first + column * across + c);
    } else {
        u32 eight[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (column < p.width && c < p.channels) eight[e / 2] |= u32(p.x[first + column * across + c * step]) << (16 * (e % 2));
            if (++c == p.pixel) { c = 0; column++; }
        }
        v = make_uint4(eight[0], eight[1], eight[2], eight[3]);
    }
    p.out[i] = v;
}
