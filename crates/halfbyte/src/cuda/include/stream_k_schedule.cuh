// Stream-K: who computes what. Whole tiles in rounds, then the remaining tiles cut evenly into units of 128 k.
// Split-K where a worker is a cluster of SPLIT blocks: one whole tile, whose k the blocks share.
// After the header of a kernel's configuration, which has SPLIT and Given.
#pragma once
#include "weight_atom.cuh"

// A worker is a block, or a cluster.  A tile is TILE_STRIPS strips a block and NT tokens.
struct Schedule {
  int wave, u, end;  // next round of whole tiles; next unit of the cut tiles, and the end of this worker's
  int tile, k, kend;  // the current piece: atoms [k, kend) of `tile`
  DEV int worker() { return blockIdx.x / SPLIT; }
  // First unit of worker i.
  DEV int cut(const Given& g, int i) { return (int)((u32)i * (u32)g.units / (u32)g.sharers); }
  // Worker of unit v.
  DEV int owner(const Given& g, int v) { return (int)(((u32)(v + 1) * (u32)g.sharers - 1) / (u32)g.units); }
  DEV Schedule make(const Given& g) {
    const bool shares = SPLIT == 1 && worker() < g.sharers;
    return {0, shares ? cut(g, worker()) : 0, shares ? cut(g, worker() + 1) : 0, 0, 0, 0};
  }
  // Units of this worker in cut tiles, from the current piece on.
  __device__ __forceinline__ int units(const Given& g) const { return SPLIT > 1 ? kend - k : end - u + kend - k; }
  // Moves to the next piece; false at the end.
  __device__ __forceinline__ bool next(const Given& g) {
    if constexpr (SPLIT > 1) {  // every worker is a cluster with one whole tile, its blocks share the k of it
      if (wave) return false;
      const int rank = blockIdx.x % SPLIT;
      wave = 1;
      tile = worker();
      k = rank * g.steps / SPLIT;
      kend = (rank + 1) * g.steps / SPLIT;
      return true;
    }
    if (wave < g.waves) {
      tile = wave++ * g.workers + worker();
      k = 0;
      kend = g.steps;
      return true;
    }
    if (u >= end) return false;
    const int t = u / g.steps;
    tile = g.first + t;
    k = u - t * g.steps;
    kend = k + end - u < g.steps ? k + end - u : g.steps;
    u += kend - k;
    return true;
  }
  // Piece i of this worker, of those that next() passes; false if there are not so many.
  DEV bool piece(const Given& g, int i, Schedule& s) {
    s = make(g);
    s.wave = i < g.waves ? i : g.waves;
    if (i > g.waves) s.u = (s.u / g.steps + (i - g.waves)) * g.steps;  // all but the first begin with their tile
    return s.next(g);
  }
};

// Where a tile lies: all rows of four columns of tokens, then the next four, which keeps the bytes that the blocks of
// one round read from memory few (over the same k a column of 256 tokens is as many bytes as eight row tiles of 128).
struct Place {
  int row, column;
};
DEV Place place(const Given& g, int tile) {
  constexpr int WIDE = 4;
  const int group = tile / (g.rows * WIDE), left = g.columns - group * WIDE, width = left < WIDE ? left : WIDE,
            r = tile - group * g.rows * WIDE;
  return {r / width, group * WIDE + r % width};
}
