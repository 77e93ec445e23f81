// Sums of a tile that several sets of a block, or several blocks of a cluster (split-K), have parts of: joined in
// shared memory.
#pragma once
#include "hopper.cuh"
#include "epilogue.cuh"

// SETS: the sums of all sets, in their order, go to set 0.  wg: warpgroup of the set; t: thread of the warpgroup.
DEV void join_sets(float (&sum)[STRIPS][NT / 2], u32 base, int set, int wg, int t) {
  const u32 to = base + (wg * STRIPS * (NT / 8) * 128 + t) * 16;
  constexpr u32 SET = TILE_STRIPS * 64 * NT * 4;
  if (set > 0) {
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < NT / 8; i++)
        store_shared(to + (set - 1) * SET + (p * (NT / 8) + i) * 2048, sum[p][4 * i], sum[p][4 * i + 1],
                     sum[p][4 * i + 2], sum[p][4 * i + 3]);
  }
  barrier_sync(8 + wg, SETS * 128);
  if (set == 0) {
#pragma unroll
    for (int other = 0; other < SETS - 1; other++)
#pragma unroll
      for (int p = 0; p < STRIPS; p++)
#pragma unroll
        for (int i = 0; i < NT / 8; i++) {
          u32 v[4];
          load_shared(v, to + other * SET + (p * (NT / 8) + i) * 2048);
#pragma unroll
          for (int e = 0; e < 4; e++) sum[p][4 * i + e] += __uint_as_float(v[e]);
        }
  }
  barrier_sync(8 + wg, SETS * 128);  // read before the next piece overwrites it
}

// SPLIT: part e of 16 rows x 8 tokens is added by block e % SPLIT of the cluster, to whose shared memory every block
// sends its sums of it; `full` there counts the bytes.  Sums are added in the order of k.
constexpr int SLOTS = (BLOCKS_OF_8 + SPLIT - 1) / SPLIT;
DEV int parts_of_rank(int rank) { return (BLOCKS_OF_8 - rank + SPLIT - 1) / SPLIT; }
DEV void reduce_cluster(const float (&sum)[STRIPS][NT / 2], const Given& g, u32 exchange, u32 full, int n_tile,
                        const Place& at, int rank, int set, int wg, int warp4, int lane) {
  if (set == 0) {
#pragma unroll
    for (int p = 0; p < STRIPS; p++)
#pragma unroll
      for (int i = 0; i < NT / 8; i++) {
        const int e = ((wg * STRIPS + p) * 4 + warp4) * (NT / 8) + i;
        store_cluster(cluster_address(exchange + ((rank * SLOTS + e / SPLIT) * 32 + lane) * 16, e % SPLIT),
                      cluster_address(full, e % SPLIT), sum[p][4 * i], sum[p][4 * i + 1], sum[p][4 * i + 2],
                      sum[p][4 * i + 3]);
      }
  }
  int slot = (set * (SET_WARPS / 4) + wg) * 4 + warp4;
#if HB_FOLDED_NORM == 1
  // The first one is on its way meanwhile.
  auto of_slot = [&](int slot) {
    const int e = slot * SPLIT + rank, n0 = n_tile + e / (NT / 8) * 16;
    return of_stream(g, n0 < g.n ? n0 : 0, at.token + 8 * (e % (NT / 8)), at.end, lane);
  };
  OfStream of = of_slot(slot < parts_of_rank(rank) ? slot : 0);
#endif
  mbarrier_wait(full, 0);
#pragma unroll 1
  for (; slot < parts_of_rank(rank); slot += WARPGROUPS * 4) {
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int r = 0; r < SPLIT; r++) {
      u32 q[4];
      load_shared(q, exchange + ((r * SLOTS + slot) * 32 + lane) * 16);
      v.x += __uint_as_float(q[0]);
      v.y += __uint_as_float(q[1]);
      v.z += __uint_as_float(q[2]);
      v.w += __uint_as_float(q[3]);
    }
    const int e = slot * SPLIT + rank, i = e % (NT / 8), n0 = n_tile + e / (NT / 8) * 16;
#if HB_FOLDED_NORM == 1
    if ((n0 >> 6) * 64 < g.n) add_to_stream(v, row_terms(g, at, n0, lane), of, g, n0, at.token + 8 * i, at.end, lane);
    if (slot + WARPGROUPS * 4 < parts_of_rank(rank)) of = of_slot(slot + WARPGROUPS * 4);
    continue;
#endif
    if ((n0 >> 6) * 64 < g.n) store_block(v, row_terms(g, at, n0, lane), g, at, n0, at.token + 8 * i, lane);
  }
}
