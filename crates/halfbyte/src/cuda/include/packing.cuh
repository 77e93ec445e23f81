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
