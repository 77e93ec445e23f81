// Who works on a row of a norm: a block of 256 threads where there are many rows; where there are few, from sm_90 on a
// cluster of 8 blocks of 128 threads, before it a block of 1024.
//
//   a vector of four belongs to place v % 1024 of the row (alone), or v % 256; lanes, then warps are added up in a tree
#pragma once
#include "floats.cuh"
#include "hopper.cuh"

#if __CUDA_ARCH__ >= 900
constexpr int BLOCKS_OF_ROW = 8;
// Threads that a multiprocessor holds.
constexpr int MOST_THREADS = __CUDA_ARCH__ >= 1200 ? 1536 : 2048;
#else
constexpr int BLOCKS_OF_ROW = 1, MOST_THREADS = 0;
#endif

// SHORT: alone, and a thread has one vector at most; in so few registers that blocks fit beside those of a product, of
// which the largest leave 4096, and are there when it ends.
template <bool ALONE, bool SHORT_ROW = false> struct ThreadsOfRow {
  static constexpr bool SHORT = SHORT_ROW;
  static constexpr int BLOCKS = ALONE ? BLOCKS_OF_ROW : 1, ALL = ALONE ? 1024 : 256, BLOCK = ALL / BLOCKS;
  // Vectors that a thread keeps in registers.
  static constexpr int KEPT = SHORT ? 1 : ALONE && BLOCKS == 1 ? 2 : 4;
  // Blocks that registers of a multiprocessor are asked to hold.
  static constexpr int BLOCKS_AT_LEAST = BLOCKS == 1 ? 1 : SHORT ? MOST_THREADS / BLOCK : 8;
  static __device__ __forceinline__ u32 row() { return ALONE ? blockIdx.y : blockIdx.x; }
  static __device__ __forceinline__ u32 thread() { return (ALONE ? blockIdx.x * BLOCK : 0) + threadIdx.x; }
  // Before anything else: all blocks run, their shared memory can be written.
  static __device__ __forceinline__ void meet() {
    if constexpr (BLOCKS > 1) cluster_sync();
  }
  // What a warp of places has, number `warp`, to all blocks; `of_warps` has a word for each warp of places.
  static __device__ __forceinline__ void put(float* of_warps, u32 warp, float value) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (BLOCKS > 1) {
      if (lane < BLOCKS) store_cluster(cluster_address(shared_address(of_warps + warp), lane), value);
    } else if (lane == 0) {
      of_warps[warp] = value;
    }
  }
  // What was put is there.
  static __device__ __forceinline__ void wait() {
    if constexpr (BLOCKS > 1)
      cluster_sync();
    else
      __syncthreads();
  }
};
