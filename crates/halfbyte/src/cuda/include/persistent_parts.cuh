// Parts of the positions that a token attends to: which a block of the persistent kernel has, and how its tiles of keys
// and values come through the rings that weights come through, before the weights of the product behind attention.
#pragma once
#include "hopper.cuh"
#include "persistent_norms.cuh"
#include "persistent_plan.cuh"

// The page of the text that a position lies in, which is asked for; where in the cache the position lies then, or where
// its positions lie in order.
DEV u32 page_of(const Params& p, u32 position) { return PAGED ? load_early(p.pages + position / PAGE_LENGTH) : 0; }
DEV u32 slot_in(const Params& p, u32 page, u32 position) {
  if (!PAGED) return position;
  return min(page, u32(p.capacity / PAGE_LENGTH) - 1) * PAGE_LENGTH + position % PAGE_LENGTH;
}
// The first position that a layer's queries see.
DEV u32 first_seen(u32 end, u32 window) { return window && end > window ? end - window : 0; }
// Positions that a layer's queries see, in parts of equal length; in pages from a whole tile on, so that none lies in
// two.
struct Parts {
  u32 begin, end, length, count;
  __device__ __forceinline__ Parts(u32 position, u32 window) {
    end = position + 1;
    begin = first_seen(end, window);
    if (PAGED) begin = begin / TILE * TILE;
    const u32 seen = end - begin, most = min(MOST_PARTS, (seen + PART_POSITIONS - 1) / PART_POSITIONS);
    length = ((seen + most - 1) / most + TILE - 1) / TILE * TILE;
    count = (seen + length - 1) / length;
  }
};
// A block's share of query heads, their kv head, and its part, whose tiles its warps take in turns; from == to where
// there are no more.
struct PartOfBlock : Parts {
  u32 share, kv_head, part, from, to;
  __device__ __forceinline__ PartOfBlock(u32 position, u32 window) : Parts(position, window) {
    share = block_index() % SHARES, part = block_index() / SHARES, kv_head = share / SHARES_OF_GROUP;
    from = min(begin + part * length, end), to = min(from + length, end);
  }
};

// Keys and values of all layers, [layers][KV_HEADS][capacity][HEAD]: boxes of BOX_POSITIONS and 64 elements. Those of a
// tile come run by run: several runs in a stage, or a run in several stages.
struct Cache {
  const TensorMap *keys, *values;
};
constexpr u32 RUNS_OF_STAGE = RUNS % 4 == 0 && has_room(STAGE, 4 * TILE * 128)   ? 4
                              : RUNS % 2 == 0 && has_room(STAGE, 2 * TILE * 128) ? 2
                                                                                 : 1,
              STAGES_OF_RUN = TILE / BOX_POSITIONS, PIECES = RUNS / RUNS_OF_STAGE * STAGES_OF_RUN;
static_assert(STAGES_OF_RUN <= STAGES, "stages for a run");
static_assert(BOX_POSITIONS == HB_BOX_POSITIONS, "the boxes of the host's maps");
DEV u32 boxes_of(u32 stage_address) { return (stage_address + 127) & ~127u; }

// A warp's tiles that are still to be brought. Where each lies in pages is asked for a tile ahead, and kept of the
// first one, which most layers begin with.
struct Tiles {
  u32 tile = 0, to = 0, piece;
  u32 head, row;  // of all rows of the cache: where the kv head begins, the tile
  u32 first = ~0u, page_of_first, coming;
  __device__ __forceinline__ bool left() const { return tile < to; }
  __device__ __forceinline__ void begin(const Params& p, u32 layer, u32 window, u32 position, u32 warp) {
    const PartOfBlock of(position, window);
    tile = of.from + TILE * warp, to = of.to, head = (layer * KV_HEADS + of.kv_head) * u32(p.capacity);
    if (!left()) return;
    if (tile != first) first = tile, page_of_first = page_of(p, tile);
    begin_tile(p, page_of_first);
  }
  __device__ __forceinline__ void begin_tile(const Params& p, u32 page) {
    piece = 0, row = head + slot_in(p, page, tile);
    if (tile + TILE * SLOTS < to) coming = page_of(p, tile + TILE * SLOTS);
  }
  // Rows behind the last position are whatever lies there, or zeros behind the cache.
  __device__ __forceinline__ void bring(const Params& p, const Cache& cache, u32 to_stage, u32 full) {
    mbarrier_expect(full, RUNS_OF_STAGE * BOX);
    const TensorMap* const map = piece < PIECES ? cache.keys : cache.values;
    const u32 of = piece % PIECES, run = of / STAGES_OF_RUN * RUNS_OF_STAGE,
              first_row = row + of % STAGES_OF_RUN * BOX_POSITIONS;
#pragma unroll
    for (u32 i = 0; i < RUNS_OF_STAGE; i++)
      copy_box(boxes_of(to_stage) + i * BOX, map, 64 * (run + i), first_row, full);
    if (++piece < 2 * PIECES) return;
    tile += TILE * SLOTS;
    if (left()) begin_tile(p, coming);
  }
};

// Where fragments of a row of a run are loaded from: its eight chunks of 16 bytes.
struct BoxRow {
  u32 at, swizzle;
  __device__ __forceinline__ u32 chunk(u32 i) const { return at + ((i ^ swizzle) << 4); }
};
// A warp's stages of a tile, run by run of keys, then of values.
struct TileOfRing {
  u32 ring, full, stage, phase;
  __device__ __forceinline__ TileOfRing(const Shared& m, u32 warp) {
    ring = shared_address(shared) + warp * STAGES * STAGE, full = full_barriers(warp);
    stage = m.turns()[warp] >> 1, phase = m.turns()[warp] & 1;
  }
  __device__ __forceinline__ void wait(u32 run) const {
    if (run % RUNS_OF_STAGE) return;
#pragma unroll
    for (u32 i = 0; i < STAGES_OF_RUN; i++) {
      const bool over = stage + i >= STAGES;
      mbarrier_wait(full + 8 * (stage + i - (over ? STAGES : 0)), phase ^ over);
    }
  }
  __device__ __forceinline__ BoxRow row(u32 run, u32 i) const {
    const u32 of = stage + i / BOX_POSITIONS, in_ring = STAGES_OF_RUN == 1 || of < STAGES ? of : of - STAGES,
              at = boxes_of(ring + in_ring * STAGE) + run % RUNS_OF_STAGE * BOX + i % BOX_POSITIONS * 128;
    return {at, at >> 7 & 7};
  }
  // All that is needed of the run is on its way to registers.
  __device__ __forceinline__ void free(u32 run) {
    if ((run + 1) % RUNS_OF_STAGE) return;
    loads_before_copies();
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < STAGES_OF_RUN; i++) {
      if ((thread_index() & 31) == 0) mbarrier_arrive(full + 8 * (STAGES + stage));
      if (++stage == STAGES) stage = 0, phase ^= 1;
    }
  }
  __device__ __forceinline__ void leave(const Shared& m, u32 warp) const {
    if ((thread_index() & 31) == 0) m.turns()[warp] = stage << 1 | phase;
  }
};
