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

// The same of 5 or 6 bits, out of words of 8-bit codes.
template <int BITS> DEV void store_planes_of_bytes(u8* half, u32 lane, const u32 (&even)[4], const u32 (&odd)[4]) {
  constexpr u32 UP = BITS - 4, LOWER = 0x0f0f0f0f, UPPER = ((1 << UP) - 1) * 0x01010101;
  constexpr int STEPS = 4 / UP;  // of a word of upper bits
  u32 low[4], high[UP] = {};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    low[j] = (even[j] & LOWER) | (odd[j] & LOWER) << 4;
    high[j / STEPS] |= ((even[j] >> 4 & UPPER) | (odd[j] >> 4 & UPPER) << UP) << (2 * UP * (j % STEPS));
  }
  reinterpret_cast<uint4*>(half)[lane] = make_uint4(low[0], low[1], low[2], low[3]);
#pragma unroll
  for (int i = 0; i < int(UP); i++) reinterpret_cast<u32*>(half + 512)[UP * lane + i] = high[i];
}

// ---- scales and offsets that are multiples of halves: layout/cuda_wna16/multiples.rs
// Whether factors have 4 bits.
DEV bool has_nibbles(const Params& p) { return p.zero_kind == OFFSET && p.atom_group == 16; }

// Of a row and a run of groups: a half, and as many factors as an atom has; zeros where there are none.
struct Multiples {
  u32 half;
  u32 factors[8];
};
DEV Multiples load_multiples(const Params& p, u32 row, u32 group, bool offsets) {
  Multiples m = {};
  if (row >= p.n || group >= p.groups) return m;
  const Part& part = part_of(p, row);
  const u32 own = own_row(p, part, row);
  const u64 at = u64(own) * p.groups + group;
  const int sign = offsets ? part.offset_sign : part.scale_sign;
  m.half = (offsets ? part.offset_halves : static_cast<const u16*>(part.channels))[at / part.block];
  if (sign < 0) m.half ^= 0x8000;
  const signed char* factors = static_cast<const signed char*>(offsets ? part.zeros : part.scales) + at;
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    if (i < 128 / p.atom_group && group + i < p.groups) m.factors[i] = u32(sign * factors[i]);
  return m;
}
