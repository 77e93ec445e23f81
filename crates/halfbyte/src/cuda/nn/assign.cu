// Which rows are whose in a grouped GEMM (include/grouped.cuh): the choices of all rows, sorted by expert, and the
// columns of tiles that come of it. One block; choices keep their order, so that the result does not depend on who is
// first.
//
//   a warp counts the choices of its part, expert by expert
//   a thread an expert: where the parts of its rows begin, how many columns they are
//   a warp puts the choices of its part where they belong
#include "grouped.cuh"
#include "ptx.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, LISTS = 2;

// As `Params` in assign.rs.
struct Params {
  const u32* ids;  // [choices]: expert of each
  u32* rows;  // [capacity]: row of each place; places that no choice has are of row 0
  u32* places;  // [choices]
  Column* lists[LISTS];  // of columns; of the first x is a row if `direct`, else all are places
  u32* counts;  // [LISTS]
  u32 choices, experts, top_k;
  u32 align, capacity;  // the places of an expert begin at a multiple of align
  u32 tiles[LISTS];  // rows of a tile
  u32 direct;  // of one row
};

extern __shared__ u32 counts[];  // [WARPS][experts], then [experts + 1]: where experts begin

// The sum over all threads before this one, and of all; only those of the first `warps` have any.
DEV u32 sum_before(u32 value, u32 warps, u32 (&of_warps)[WARPS], u32& all) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  u32 before = 0;
  all = 0;
#pragma unroll 1
  for (u32 i = 0; i < warps; i++) {
    if (i < warp) before += of_warps[i];
    all += of_warps[i];
  }
  return before + sum - value;
}

extern "C" __global__ void __launch_bounds__(THREADS) assign(const Params p) {
  __shared__ u32 of_warps[WARPS];
  const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, experts = p.experts;
  u32* const of_warp = counts + warp * experts;
  u32* const firsts = counts + WARPS * experts;
  // Whole rounds of 32 choices a warp.
  const u32 each = (p.choices + THREADS - 1) / THREADS * 32, parts = (p.choices + each - 1) / each,
            first = min(warp * each, p.choices), end = min(first + each, p.choices),
            warps = min((experts + 31) / 32, WARPS);
  for (u32 i = thread; i < parts * experts; i += THREADS) counts[i] = 0;
  dependency_wait();
  launch_dependents();
  __syncthreads();
  const auto expert_of = [&](u32 i) { return min(p.ids[i], experts - 1); };  // the limit guards memory
#pragma unroll 1
  for (u32 i = first + lane; i < end; i += 32) atomicAdd(of_warp + expert_of(i), 1);
  __syncthreads();
  u32 places = 0, columns[LISTS] = {};  // of the experts so far
#pragma unroll 1
  for (u32 base = 0; base < experts; base += THREADS) {
    const u32 expert = base + thread;
    u32 count = 0;
    if (expert < experts)
#pragma unroll 1
      for (u32 i = 0; i < parts; i++) {
        const u32 of_part = counts[i * experts + expert];
        counts[i * experts + expert] = count;
        count += of_part;
      }
    const u32 taken = (count + p.align - 1) / p.align * p.align;
    u32 all;
    const u32 place = places + sum_before(taken, warps, of_warps, all);
    places += all;
    if (expert < experts) firsts[expert] = place;
    for (u32 i = count; i < taken; i++) p.rows[place + i] = 0;
#pragma unroll
    for (int list = 0; list < LISTS; list++) {
      const u32 tile = p.tiles[list], own = (count + tile - 1) / tile;
      u32 at = columns[list] + sum_before(own, warps, of_warps, all);
      columns[list] += all;
#pragma unroll 1
      for (u32 i = 0; i < own; i++, at++) {
        const u32 row = place + i * tile;
        p.lists[list][at] = {expert, row, min(row + tile, place + count), list == 0 && p.direct ? 0 : row};
      }
    }
  }
#pragma unroll
  for (int list = 0; list < LISTS; list++)
    if (thread == list) p.counts[list] = columns[list];
  for (u32 i = places + thread; i < p.capacity; i += THREADS) p.rows[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 i = first; i < end; i += 32) {
    const bool there = i + lane < end;
    const u32 expert = there ? expert_of(i + lane) : experts;
    const u32 same = __match_any_sync(0xffffffffu, expert), before = __popc(same & ((1u << lane) - 1));
    const u32 place = there ? firsts[expert] + of_warp[expert] + before : 0;
    __syncwarp();
    if (there && before == 0) of_warp[expert] += __popc(same);
    __syncwarp();
    if (there) p.rows[place] = (i + lane) / p.top_k, p.places[i + lane] = place;
  }
}
