// Rows of a product out of images: for some output pixels what each of them sees, position by position, channel by channel.
//
//   a block makes a table of a row's units: where each lies from the first position of a window on, and how far down and across
//   a warp has a row at a time, a lane every 32nd unit of it: a unit in the padding, or past the last column, is zero
//
// A unit is as many neighbouring bytes of a pixel as can be moved at once.
#include "images.cuh"

constexpr u32 THREADS = 256;
constexpr u32 ROWS = 64;                 // of a block
constexpr u32 MOST_UNITS = 6144;         // of a row: the table fits every processor's shared memory

// As `Params` in patches.rs. Elements of x, and all its sizes, are below 2^31, steps from position to position below 2^15.
struct Params {
    Images images;
    const void* x;
    void* out;             // [rows][units]
    u32 first, rows;       // first output pixel
    u32 units, there;      // of a row of out; those that lie in windows
    u32 elements;          // of a unit: neighbouring channels of images in nhwc
    u32 unused;
};

struct Unit { int at; short down, across; };

template <typename UNIT>
__global__ void __launch_bounds__(THREADS) patches(const __grid_constant__ Params p) {
    __shared__ Unit table[MOST_UNITS];
    const Images& v = p.images;
    const int height = int(v.height), width = int(v.width), channels = int(v.channels);
    // From a column, a row and a channel of x to the next, in units.
    const int across = v.x_nhwc ? channels / int(p.elements) : 1, down = width * across, deep = v.x_nhwc ? 1 : height * width;
    const u32 of_position = v.channels / p.elements;
    for (u32 i = threadIdx.x; i < p.there; i += THREADS) {
        const u32 position = i / of_position, channel = i % of_position;
        const int y = int(position / v.kernel_columns * v.dilation_down), x = int(position % v.kernel_columns * v.dilation_across);
        table[i] = {y * down + x * across + int(channel) * deep, short(y), short(x)};
    }
    __syncthreads();
    const UNIT* from = static_cast<const UNIT*>(p.x);
    const u32 lane = threadIdx.x % 32, plane = u32(v.rows * v.columns), columns = u32(v.columns);
    const u32 end = min(p.rows, (blockIdx.x + 1) * ROWS);
#pragma unroll 1
    for (u32 row = blockIdx.x * ROWS + threadIdx.x / 32; row < end; row += THREADS / 32) {
        const u32 pixel = p.first + row, image = pixel / plane, in_image = pixel - image * plane, r = in_image / columns;
        const int y = int(r * v.stride_down) - int(v.top), x = int((in_image - r * columns) * v.stride_across) - int(v.left);
        const int at = int(image) * (v.x_nhwc ? height * down : channels * deep) + y * down + x * across;
        UNIT* to = static_cast<UNIT*>(p.out) + u64(row) * p.units;
#pragma unroll 1
        for (u32 i = lane; i < p.units; i += 32) {
            UNIT value = {};
            if (i < p.there) {
                const Unit unit = table[i];
                if (u32(y + unit.down) < u32(height) && u32(x + unit.across) < u32(width)) value = from[at + unit.at];
            }
            to[i] = value;
        }
    }
}
