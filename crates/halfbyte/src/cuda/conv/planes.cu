// Images from planes to pixels, or back: each is a matrix that is transposed.
//   a block moves 32 x 32 elements through shared memory, so that both sides are read and written in rows
#include "ptx.cuh"

constexpr u32 TILE = 32, ROWS = 8;  // of a block; rows that its threads move at once

// As `Params` in planes.rs.
struct Params {
  const void* from;  // [images][rows][columns]
  void* to;  // [images][columns][rows]
  u32 images, rows, columns;
  u32 down, across;  // tiles of an image
  u32 padding;  // of this struct
};

template <typename T> __global__ void __launch_bounds__(TILE* ROWS) transpose(const Params p) {
  __shared__ T tile[TILE][TILE + 4 / sizeof(T)];
  const u32 of_image = p.down * p.across, image = blockIdx.x / of_image, at = blockIdx.x % of_image;
  const u32 row0 = at / p.across * TILE, column0 = at % p.across * TILE, x = threadIdx.x % TILE, y = threadIdx.x / TILE;
  const u64 size = u64(p.rows) * p.columns;
  const T* const from = static_cast<const T*>(p.from) + image * size;
  T* const to = static_cast<T*>(p.to) + image * size;
#pragma unroll
  for (u32 i = y; i < TILE; i += ROWS)
    if (row0 + i < p.rows && column0 + x < p.columns) tile[i][x] = from[u64(row0 + i) * p.columns + column0 + x];
  __syncthreads();
#pragma unroll
  for (u32 i = y; i < TILE; i += ROWS)
    if (column0 + i < p.columns && row0 + x < p.rows) to[u64(column0 + i) * p.rows + row0 + x] = tile[x][i];
}
