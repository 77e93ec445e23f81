// What pack.cu is given: a matrix, and the tensors that its rows lie in, one below the other.
#pragma once
#include "stored_codes.cuh"

enum ZeroKind : u32 { SYMMETRIC = 0, INTEGER = 1, OFFSET = 2 };

// As `Params` in pack.rs.
struct Params {
  const Part* parts;  // those that rows from `first` on lie in, one below the other
  const u32* order;  // [k], or null: the column of the file for each packed one
  void* codes;  // atoms, or words [words along k][n]
  void* scales;  // of rows, where a row has one; or [groups][n]
  void* zeros;  // [groups][n]
  u32 n, k, groups;
  u32 first;  // row
  u32 count;  // of parts
  u32 group;  // columns that share a scale
  u32 atom_group;  // the same in an atom; 0: all of a row
  u32 middle;  // the code of zero in a symmetric format
  FloatType scale_type;
  ZeroKind zero_kind;
  u32 factors;  // scales on two levels: atoms have factors, with zero points in them
  u32 gated;  // two parts: 8 rows of the first, 8 of the second, and so on; tops are in rows of a part
  u32 raised;  // added to codes in places of 4 and 6 bits, modulo 2^32
  u32 atom_bits;  // of a code's place
  u32 multiples;  // scales and offsets are multiples of halves, which another kernel writes
  u32 padding;
};

constexpr u32 EIGHT = 8;  // rows of a part, in a gated matrix

DEV const Part& part_of(const Params& p, u32 row) {
  if (p.gated) return p.parts[row / EIGHT % 2];
  u32 i = 0;
  while (i + 1 < p.count && row >= p.parts[i + 1].top) i++;
  return p.parts[i];
}

// The row of its part that a row of the packed matrix is.
DEV u32 own_row(const Params& p, const Part& part, u32 row) {
  return (p.gated ? row / (2 * EIGHT) * EIGHT + row % EIGHT : row) - part.top;
}

// Codes in planes: layout/cuda_wna16/planes.rs.
// Four words of 4-bit codes to the planes of codes of 2 or 3 bits, where those of a half of a unit's columns begin.
template <int BITS> DEV void store_planes(u8* half, u32 lane, const u32 (&words)[4]) {
  constexpr u32 LOWER = 0x33333333, UPPER = 0x11111111;
  reinterpret_cast<uint2*>(half)[lane] =
      make_uint2((words[0] & LOWER) | (words[1] & LOWER) << 2, (words[2] & LOWER) | (words[3] & LOWER) << 2);
  if constexpr (BITS == 3) {
    u32 high = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) high |= (words[j] >> 2 & UPPER) << j;
    reinterpret_cast<u32*>(half + 256)[lane] = high;
  }
}

// The same of 6 bits, out of words of 8-bit codes.
[[maybe_unused]] DEV void store_planes_of_6(u8* half, u32 lane, const u32 (&even)[4], const u32 (&odd)[4]) {
  constexpr u32 LOWER = 0x0f0f0f0f, UPPER = 0x03030303;
  u32 low[4], high[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    low[j] = (even[j] & LOWER) | (odd[j] & LOWER) << 4;
    high[j / 2] |= ((even[j] >> 4 & UPPER) | (odd[j] >> 4 & UPPER) << 2) << (4 * (j % 2));
  }
  reinterpret_cast<uint4*>(half)[lane] = make_uint4(low[0], low[1], low[2], low[3]);
  reinterpret_cast<uint2*>(half + 512)[lane] = make_uint2(high[0], high[1]);
}
