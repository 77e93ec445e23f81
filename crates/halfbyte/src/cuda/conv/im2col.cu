// im2col: rows of a GEMM out of images. For some output pixels what each of them sees, position by position, channel by
// channel.
//
//   a block makes a table of a row's units: where each lies from the first position of a window on, and how far down
//       and across
//   a warp has a row at a time, a lane every 32nd piece of its units: a unit in the padding, or past the last column,
//       is what fills those
#include "images.cuh"

constexpr u32 THREADS = 256;
constexpr u32 ROWS = 64, WARPS = 8;  // of a block
constexpr int OUTSIDE = -0x8000;  // as far up as no window begins below
constexpr u32 MOST_UNITS = 6144;  // of a row: the table fits every processor's shared memory

// As `Params` in im2col.rs. Elements of x, and all its sizes, are below 2^31, steps from position to position below
// 2^15.
struct Params {
  Images images;
  const void* x;
  void* out;  // [rows][units]
  u32 first, rows;  // first output pixel
  u32 units, there;  // of a row of out; those that lie in windows
  u32 elements;  // of a unit: neighbouring channels of images in nhwc
  u32 fill;  // every byte of elements in the padding
};

struct Unit {
  int at;
  short down, across;
};

// A unit of which every word is the same.
template <typename UNIT> DEV UNIT filled(u32 word) {
  if constexpr (sizeof(UNIT) <= 4)
    return UNIT(word);
  else {
    UNIT v;
    v.x = v.y = word;
    if constexpr (sizeof(UNIT) == 16) v.z = v.w = word;
    return v;
  }
}

// UNITS: that a lane writes at once, 16 bytes of them or one, where rows are no whole number of 16 bytes.
template <typename UNIT, int UNITS>
__global__ void __launch_bounds__(THREADS) patches(const __grid_constant__ Params p) {
  struct alignas(sizeof(UNIT) * UNITS) Piece {
    UNIT units[UNITS];
  };
  __shared__ Unit table[MOST_UNITS];
  const Images& v = p.images;
  const int height = int(v.height), width = int(v.width), channels = int(v.channels);
  // From a column, a row and a channel of x to the next, in units.
  const int across = v.x_nhwc ? channels / int(p.elements) : 1, down = width * across,
            deep = v.x_nhwc ? 1 : height * width;
  const u32 of_position = v.channels / p.elements;
  for (u32 i = threadIdx.x; i < p.units; i += THREADS) {
    const u32 position = i / of_position, channel = i % of_position;
    const int y = int(position / v.kernel_columns * v.dilation_down),
              x = int(position % v.kernel_columns * v.dilation_across);
    // Past the last column lies nothing.
    table[i] = {y * down + x * across + int(channel) * deep, short(i < p.there ? y : OUTSIDE), short(x)};
  }
  __syncthreads();
  const UNIT* from = static_cast<const UNIT*>(p.x);
  const u32 lane = threadIdx.x % 32, plane = u32(v.rows * v.columns), columns = u32(v.columns),
            pieces = p.units / UNITS;
  const u32 end = min(p.rows, (blockIdx.x + 1) * ROWS);
  u32 row = blockIdx.x * ROWS + threadIdx.x / 32, image = (p.first + row) / plane;
  u32 r = (p.first + row) % plane / columns, c = (p.first + row) % columns;
#pragma unroll 1
  for (; row < end; row += WARPS) {
    const int y = int(r * v.stride_down) - int(v.top), x = int(c * v.stride_across) - int(v.left);
    const int at = int(image) * (v.x_nhwc ? height * down : channels * deep) + y * down + x * across;
    Piece* to = static_cast<Piece*>(p.out) + u64(row) * pieces;
#pragma unroll 1
    for (u32 i = lane; i < pieces; i += 32) {
      Piece piece;
#pragma unroll
      for (int e = 0; e < UNITS; e++) {
        const Unit unit = table[i * UNITS + e];
        const bool inside = u32(y + unit.down) < u32(height) && u32(x + unit.across) < u32(width);
        piece.units[e] = inside ? from[at + unit.at] : filled<UNIT>(p.fill);
      }
      to[i] = piece;
    }
    // The warp's next row.
    for (c += WARPS; c >= columns; c -= columns)
      if (++r == u32(v.rows)) {
        r = 0;
        image++;
      }
  }
}
