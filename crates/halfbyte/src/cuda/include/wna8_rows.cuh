// Where wna8_sm90.cu takes rows of codes of x, and their terms, from: a matrix (GEMM), or windows on images (implicit
// GEMM). The kernel is written over RowsOfX, which is the one or the other, as wna16_sm90.cu is over that of
// wna16_rows.cuh.
//   Maps                        tensor maps that the kernel takes
//   stage_bytes(g, terms_bytes)   of a stage, without W
//   copy(...)                   the unit at column k, to a stage
#pragma once
#include "hopper.cuh"
#include "wgmma.cuh"
#include "windows.cuh"
#include "wna8_sm90.cuh"

// The group of x that has a group of an atom.
DEV int group_of_x(const Arguments& g, u32 atom_group) { return g.ratio ? __umulhi(atom_group, g.ratio) : atom_group; }

// Rows that lie one behind the other, and terms of which each has a row of its own.
struct MatrixRows {
  struct Maps {
    const TensorMap* x;
    __device__ __forceinline__ void prefetch() const { prefetch_map(x); }
  };
  static constexpr u64 DESCRIPTOR_HIGH = WGMMA_DESCRIPTOR_HIGH;
  DEV int descriptor_step(int k32) { return 2 * k32; }
  DEV u32 stage_bytes(const Arguments& g, u32 terms_bytes) { return g.box_bytes + SUM_GROUPS * TERMS * terms_bytes; }
  __device__ __forceinline__ void begin(const Arguments&, int, int) {}
  __device__ __forceinline__ void next_unit(const Arguments&) {}
  __device__ __forceinline__ void copy(const Arguments& g, u32 to, u32 to_terms, const Maps& maps, u32 bar, int token,
                                       int unit, u32 terms_bytes, u64 policy) const {
    copy_box(to, maps.x, unit * 128, token, bar);
#pragma unroll
    for (int i = 0; i < SUM_GROUPS; i++) {
      // Behind the last group of x lie columns that are not there: any numbers do, their codes are zeros.
      const int group = group_of_x(g, unit * SUM_GROUPS + i), there = group < g.groups ? group : g.groups - 1;
#pragma unroll
      for (int t = 0; t < TERMS; t++)
        copy_bulk(to_terms + (i * TERMS + t) * NT * 4, g.terms + ((u64)there * TERMS + t) * g.m_pitch + token,
                  terms_bytes, bar, policy);
    }
  }
};

// Windows on images of codes, two boxes of 64 codes a token in 64-byte swizzle (8 rows in 512 bytes), and on images of
// terms: a pixel has the same codes in every window, and what lies in the padding has the code 0 and the scale 0.
struct ImageWindows {
  struct Maps {
    const TensorMap *x, *terms;
    __device__ __forceinline__ void prefetch() const {
      prefetch_map(terms);
      prefetch_map(x);
    }
  };
  static constexpr int COLUMNS = GROUP ? GROUP : 128;  // that share terms
  static constexpr u64 DESCRIPTOR_HIGH = (32ull << 32) | (2ull << 62);
  DEV int descriptor_step(int k32) { return k32 / 2 * (NT * 64 / 16) + k32 % 2 * 2; }
  DEV u32 stage_bytes(const ConvArguments&, u32) { return BOX + STAGE_TERMS; }  // zeros count too
  Window window;  // of the unit's first box of 64 k
  __device__ __forceinline__ void begin(const ConvArguments& g, int token, int k) {
    window = Window::of(g.windows, token, k);
  }
  __device__ __forceinline__ void next_unit(const ConvArguments& g) { window.advance_boxes<64, 2>(g.windows); }
  __device__ __forceinline__ void copy(const ConvArguments& g, u32 to, u32 to_terms, const Maps& maps, u32 bar, int,
                                       int, u32, u64) const {
    const Windows& v = g.windows;
    Window at = window;
#pragma unroll
    for (int box = 0; box < 2; box++, at.advance(v, 64)) {
      at.copy(v, to + box * (NT * 64), maps.x, bar);
#pragma unroll
      for (int i = (box * GROUPS + 1) / 2; i < ((box + 1) * GROUPS + 1) / 2; i++) {
        // A group's terms are four floats, which the map counts by twos of bytes.
        const int channel = at.channel + i * COLUMNS % 64, beyond = 8 * g.groups;
        at.copy_from(v, to_terms + i * GROUP_TERMS, maps.terms, bar, 8 * group_of_x(g, channel / COLUMNS), beyond);
      }
    }
  }
};

typedef Choice<WINDOW != 0, ImageWindows, MatrixRows>::Type RowsOfX;
