// Who computes what: whole tiles in rounds, then the remaining tiles cut evenly into units of 128 k.
#pragma once
#include "wna16_layout.cuh"

// A worker is a block, or a pair of blocks that share x.  A tile is TILE_STRIPS strips a block and NT tokens.
struct Schedule {
  int steps, workers, worker;                    // atoms along k; workers; this one
  int first, units, sharers;                     // first cut tile; units in all cut tiles; workers that share them
  int wave, waves, u, end;                       // rounds of whole tiles done, and in all; next unit, and the end of this worker's
  int tile, k, kend;                             // the current piece: atoms [k, kend) of `tile`
  DEV Schedule make(int steps, int tiles, int waves) {
    Schedule s;
    s.steps = steps; s.waves = waves; s.wave = 0; s.tile = s.k = s.kend = 0;
    s.workers = gridDim.x / (SPLIT * PAIR); s.worker = blockIdx.x / (SPLIT * PAIR);
    s.first = waves * s.workers; s.units = (tiles - s.first) * steps;
    s.sharers = s.workers < s.units ? s.workers : s.units;
    s.u = s.worker < s.sharers ? s.cut(s.worker) : 0; s.end = s.worker < s.sharers ? s.cut(s.worker + 1) : 0;
    return s;
  }
  // First unit of worker i; the host keeps units * workers below 2^32.
  __device__ __forceinline__ int cut(int i) const { return (int)((u32)i * (u32)units / (u32)sharers); }
  // Worker of unit v.
  __device__ __forceinline__ int owner(int v) const { return (int)(((u32)(v + 1) * (u32)sharers - 1) / (u32)units); }
  // Moves to the next piece; false at the end.
  __device__ __forceinline__ bool next() {
    if constexpr (SPLIT > 1) {                   // every worker is a cluster with one whole tile, its blocks share the k of it
      if (wave) return false;
      const int rank = blockIdx.x % SPLIT;
      wave = 1; tile = worker; k = rank * steps / SPLIT; kend = (rank + 1) * steps / SPLIT;
      return true;
    }
    if (wave < waves) { tile = wave++ * workers + worker; k = 0; kend = steps; return true; }
    if (u >= end) return false;
    const int t = u / steps;
    tile = first + t; k = u - t * steps; kend = k + end - u < steps ? k + end - u : steps; u += kend - k;
    return true;
  }
};

// Where a tile lies: all rows of four columns of tokens, then the next four, which keeps the bytes that the blocks of one round
// read from memory few (over the same k a column of 256 tokens is as many bytes as eight row tiles of 128).
struct Place { int row, column; };
DEV Place place(int tile, int rows, int columns) {
  constexpr int WIDE = 4;
  const int group = tile / (rows * WIDE), left = columns - group * WIDE, width = left < WIDE ? left : WIDE, r = tile - group * rows * WIDE;
  return {r / width, group * WIDE + r % width};
}
