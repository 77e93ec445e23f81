// A row of numbers, wherever they come from, as codes of 8 bits with a scale (and an offset) for each group of columns.
//
//   a thread has 16 columns of a row, 1 to 32 threads (or a block, where groups are long) a group; short rows may share
//       a block
//   least and greatest element -> scale, offset -> codes, and their sum
//   a group of many columns may be asked for its sums piece by piece: then each piece has scale and offset beside its
//       sum
//
// quantize.cuh has the rule.
// Codes of 16 columns lie in the order of the A fragments that packed weights give (matmul/wna8_sm90.cu): columns
// 2t, 2t + 8, 2t + 1, 2t + 9 in bytes 4t .. 4t + 3.
#pragma once
#include "quantize.cuh"

// As `Target` in quantize_activations.rs.
struct Target {
  signed char* codes;  // [m][pitch]: pitch a multiple of 16, zeros from k on
  float* scales;  // of row r and piece i: at i * piece_pitch + r * row_pitch
  float* sums;  // of codes, likewise; or null
  float* offsets;  // likewise, where there are any
  u64 m, k, pitch, piece_pitch, row_pitch;
  u32 group, groups;  // group: columns of codes from a group to the next, a multiple of 16
  u32 piece, pieces;  // piece: the group; or a part of it, 16, 32, 64 or 128 columns
  u32 threads, rows;  // of a row in a block, rows of a block; where a block has one group, at least its threads and 1
  u32 blocks;  // of a row
  u32 padding;  // of this struct
};

constexpr u32 COLUMNS = 16;  // a thread
constexpr u32 BLOCK = 256, MOST = 1024;  // threads: where blocks have several groups; at most, where they have one
constexpr int WHOLE = 256;  // instead of the threads of a group: all that its block has

// That of the lane at a distance.
DEV Range across(Range r, int distance) {
  return {__shfl_xor_sync(ALL_LANES, r.low, distance), __shfl_xor_sync(ALL_LANES, r.high, distance),
          bool(__shfl_xor_sync(ALL_LANES, int(r.finite), distance))};
}

// How many of the columns from c on there are.
DEV int columns_there(const Target& p, u64 c) { return c < p.k ? int(min(p.k - c, u64(COLUMNS))) : 0; }

DEV Range range_of(const float (&v)[COLUMNS], int there) {
  Range r = range_of_none();
#pragma unroll
  for (int i = 0; i < COLUMNS; i++)
    if (i < there) r = joined(r, range_of_one(v[i]));
  return r;
}

// Writes the codes of 16 columns in the order of fragments and returns their sum.
DEV int write_bytes(const Target& p, u64 row, u64 c, const int (&code)[COLUMNS]) {
  int sum = 0;
  u32 words[4];
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const u32 low = __byte_perm(code[2 * t], code[2 * t + 8], 0x0040),
              high = __byte_perm(code[2 * t + 1], code[2 * t + 9], 0x0040);
    words[t] = __byte_perm(low, high, 0x5410);
    sum = __dp4a(int(words[t]), 0x01010101, sum);
  }
  *reinterpret_cast<uint4*>(p.codes + row * p.pitch + c) = make_uint4(words[0], words[1], words[2], words[3]);
  return sum;
}

// The same of 16 columns of numbers, of which `there` are there.
DEV int write_codes(const Target& p, u64 row, u64 c, const float (&v)[COLUMNS], int there, const Rule& rule) {
  int code[COLUMNS];
#pragma unroll
  for (int i = 0; i < COLUMNS; i++) code[i] = i < there ? code_of(v[i], rule) : 0;
  return write_bytes(p, row, c, code);
}

// Scale, sum and offset of a piece of a row.
template <bool OFFSET> DEV void write_terms(const Target& p, u64 row, u64 piece, const Rule& rule, int sum) {
  if (piece >= p.pieces) return;
  const u64 at = piece * p.piece_pitch + row * p.row_pitch;
  p.scales[at] = rule.scale;
  if (p.sums) p.sums[at] = float(sum);
  if (OFFSET) p.offsets[at] = rule.offset;
}
// The terms of the piece, less than a group, that a thread's 16 columns from c on lie in; its threads are neighbours.
template <bool OFFSET> DEV void write_terms_of_part(const Target& p, u64 row, u64 c, const Rule& rule, int sum) {
  const u32 lanes = p.piece / COLUMNS, lane = threadIdx.x % 32, mask = ((1u << lanes) - 1) << (lane & ~(lanes - 1));
  for (u32 distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);
  if (lane % lanes == 0) write_terms<OFFSET>(p, row, c / p.piece, rule, sum);
}

// The row of this thread in a launch whose blocks are dealt rows as `p` says.
DEV u32 row_of_thread(const Target& p) { return blockIdx.x * p.rows + threadIdx.x / p.threads; }

// THREADS: of a group. Fewer than WHOLE: groups have up to THREADS * 16 columns, a block several of them, of one row or
//     of some. WHOLE: a block, of any number of warps, has one group of any length.
// row: of this thread;  block: of the row;  `columns(c, v)` gives columns of the row from c on, and how many there are.
template <int THREADS, bool OFFSET, class Columns>
DEV void quantize_row(const Target& p, u32 row, u32 block, const Columns& columns) {
  constexpr bool LONG = THREADS == WHOLE;
  constexpr int LANES = LONG ? 32 : THREADS;
  __shared__ float lows[32], highs[32];
  __shared__ int finites[32], totals[32];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const u32 in_block = threadIdx.x / p.threads, of_row = block * BLOCK + threadIdx.x - in_block * p.threads;
  const u32 group = LONG ? block : of_row / THREADS, column = (LONG ? threadIdx.x : of_row % THREADS) * COLUMNS;
  const u64 first = u64(group) * p.group + column, stride = blockDim.x * COLUMNS;
  // Of a long group the last one fills the row up; of others those behind it do.
  u64 end = LONG && group + 1 == p.groups ? p.pitch : u64(group + 1) * p.group;
  if constexpr (!LONG) end = in_block < p.rows && row < p.m ? min(p.pitch, end) : 0;
  // The first columns of a thread stay in registers; what a long group has beyond them is read twice.
  float v[COLUMNS];
  const int there = first < end ? columns(first, v) : 0;
  Range range = range_of(v, there);
  if constexpr (LONG) {
#pragma unroll 1
    for (u64 c = first + stride; c < end; c += stride) {
      float more[COLUMNS];
      const int there = columns(c, more);
      range = joined(range, range_of(more, there));
    }
  }
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) range = joined(range, across(range, distance));
  if constexpr (LONG) {
    if (lane == 0) lows[warp] = range.low, highs[warp] = range.high, finites[warp] = range.finite;
    __syncthreads();
    range = {lows[lane % warps], highs[lane % warps], bool(finites[lane % warps])};
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) range = joined(range, across(range, distance));
  }
  Rule rule;
  if constexpr (LONG) {  // one thread divides: a division is a call, which registers are saved for
    __shared__ Rule of_all;
    if (threadIdx.x == 0) of_all = rule_of<OFFSET>(range);
    __syncthreads();
    rule = of_all;
  } else {
    rule = rule_of<OFFSET>(range);
  }

  const bool parts = p.piece < p.group;
  int sum = 0;
  if (first < end) {
    sum = write_codes(p, row, first, v, there, rule);
    if (parts) write_terms_of_part<OFFSET>(p, row, first, rule, sum);
  }
  if constexpr (LONG) {
#pragma unroll 1
    for (u64 c = first + stride; c < end; c += stride) {
      float more[COLUMNS];
      const int there = columns(c, more), here = write_codes(p, row, c, more, there, rule);
      if (parts) write_terms_of_part<OFFSET>(p, row, c, rule, here);
      sum += here;
    }
  }
  if (parts) return;
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  if constexpr (LONG) {
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    sum = 0;
    for (u32 w = 0; w < warps; w++) sum += totals[w];
  }
  if (column == 0 && (LONG || first < end)) write_terms<OFFSET>(p, row, group, rule, sum);
}
