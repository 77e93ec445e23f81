// Stream-K: who computes what. Whole tiles in rounds, then the remaining tiles cut evenly into units of 128 k.
// Split-K where a worker is a cluster of SPLIT blocks: one whole tile, whose k the blocks share.
// After the header of a kernel's configuration, which has SPLIT and Given.
#pragma once
#include "weight_atom.cuh"

// Columns of tiles; of several weights they are read, once.
DEV u32 columns_of(const Arguments& g) { return g.columns; }
[[maybe_unused]] DEV u32 columns_of(const GroupedArguments& g) { return columns_of(g.grouped); }
// Before anything that depends on columns.
DEV void wait_for_columns(const Arguments&) {}
[[maybe_unused]] DEV void wait_for_columns(const GroupedArguments& g) { wait_for_list(g.grouped); }

// The numbers of a schedule; with several weights they follow from the columns that there are.
struct Cuts {
  int waves, first, units, sharers;
};
DEV Cuts cuts_of(const Arguments& g, u32) { return {g.waves, g.first, g.units, g.sharers}; }
[[maybe_unused]] DEV Cuts cuts_of(const GroupedArguments& g, u32 columns) {
  const int tiles = columns * g.rows, waves = tiles / g.workers, first = waves * g.workers,
            units = (tiles - first) * g.steps;
  return {waves, first, units, units < g.workers ? units : g.workers};
}

// A worker is a block, or a cluster.  A tile is TILE_STRIPS strips a block and NT tokens.
struct Schedule {
  int wave, u, end;  // next round of whole tiles; next unit of the cut tiles, and the end of this worker's
  int tile, k, kend;  // the current piece: atoms [k, kend) of `tile`
  u32 columns;
  DEV int worker() { return blockIdx.x / SPLIT; }
  // First unit of worker i.
  DEV int cut(const Cuts& c, int i) { return (int)((u32)i * (u32)c.units / (u32)c.sharers); }
  // Worker of unit v.
  DEV int owner(const Cuts& c, int v) { return (int)(((u32)(v + 1) * (u32)c.sharers - 1) / (u32)c.units); }
  DEV Schedule make(const Given& g) { return make(g, columns_of(g)); }
  DEV Schedule make(const Given& g, u32 columns) {
    const Cuts c = cuts_of(g, columns);
    const bool shares = SPLIT == 1 && worker() < c.sharers;
    return {0, shares ? cut(c, worker()) : 0, shares ? cut(c, worker() + 1) : 0, 0, 0, 0, columns};
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
    const Cuts c = cuts_of(g, columns);
    if (wave < c.waves) {
      tile = wave++ * g.workers + worker();
      k = 0;
      kend = g.steps;
      return true;
    }
    if (u >= end) return false;
    const int t = u / g.steps;
    tile = c.first + t;
    k = u - t * g.steps;
    kend = k + end - u < g.steps ? k + end - u : g.steps;
    u += kend - k;
    return true;
  }
  // Piece i of this worker, of those that next() passes; false if there are not so many.
  DEV bool piece(const Given& g, u32 columns, int i, Schedule& s) {
    s = make(g, columns);
    const int waves = cuts_of(g, columns).waves;
    s.wave = i < waves ? i : waves;
    if (i > waves) s.u = (s.u / g.steps + (i - waves)) * g.steps;  // all but the first begin with their tile
    return s.next(g);
  }
};

// Where a tile lies: all rows of four columns of tokens, then the next four, which keeps the bytes that the blocks of
// one round read from memory few (over the same k a column of 256 tokens is as many bytes as eight row tiles of 128).
struct Cell {
  int row, column;
};
DEV Cell cell(int rows, int columns, int tile) {
  constexpr int WIDE = 4;
  const int group = tile / (rows * WIDE), left = columns - group * WIDE, width = left < WIDE ? left : WIDE,
            r = tile - group * rows * WIDE;
  return {r / width, group * WIDE + r % width};
}
struct Place {
  int row;  // of tiles
  int x, token, end;  // the first row of x, and rows of y: from the first, before the end
  int weight;  // of several
  // The output of a row of W lies so many before it; outputs end before `last`, which is a multiple of `unit`, as the
  // first of them is.
  int before, last, unit;
};
DEV Place place(const Arguments& g, u32, int tile) {
  const Cell at = cell(g.rows, g.columns, tile);
  return {at.row, at.column * NT, at.column * NT, g.m, 0, 0, g.n, g.n};
}
[[maybe_unused]] DEV Place place(const GroupedArguments& g, u32 columns, int tile) {
  const Cell at = cell(g.rows, columns, tile);
  const Column c = column_of(g.grouped, at.column);
  return {at.row, (int)c.x, (int)c.row, (int)c.end, (int)c.weight, 0, g.n, g.n};
}
// Of the weight of a tile: its atoms, scales (and zero points) of rows, bias.
DEV const u8* atoms_of(const Arguments& g, const Place&) { return g.w; }
DEV const u8* rows_of_scales(const Arguments& g, const Place&) { return g.rows_of_scales; }
DEV const float* bias_of(const Arguments& g, const Place&) { return g.bias; }
[[maybe_unused]] DEV const u8* atoms_of(const GroupedArguments& g, const Place& at) {
  return (const u8*)__ldg(g.grouped.atoms + at.weight);
}
[[maybe_unused]] DEV const u8* rows_of_scales(const GroupedArguments& g, const Place& at) {
  return (const u8*)__ldg(g.grouped.rows_of_scales + at.weight);
}
[[maybe_unused]] DEV const float* bias_of(const GroupedArguments& g, const Place& at) {
  return g.grouped.biases == nullptr ? nullptr : (const float*)__ldg(g.grouped.biases + at.weight);
}
