// Weights of convolutions read element by element from each layout: floats [n][k], that of layout/cuda_plain.rs, that
// of layout/cuda_wna16.rs.
#pragma once
#include "floats.cuh"

enum Layout : int { DENSE = 0, PLAIN = 1, WNA16 = 2 };
enum ZeroKind : u32 { SYMMETRIC = 0, INTEGER = 1, OFFSET = 2 };

// As `Weight` in conv/simt.rs: some of the groups of a convolution.
struct Weight {
  const void* codes;  // DENSE: floats [n][k];  PLAIN: words [words][n];  WNA16: atoms
  const void* scales;  // PLAIN: [groups][n];  WNA16: the table of rows
  const void* zeros;  // PLAIN: [groups][n]: u16 zero points, or offsets of the scales' type
  u64 n, k;
  u32 group;  // columns that share a scale; WNA16: 0 for all of a row
  u32 middle;  // the code of zero in a symmetric format
  FloatType dtype;  // of the scales, or of the floats
  ZeroKind zero_kind;
};

// A row of the weight, whose scale is kept from column to column.
template <int LAYOUT, int BITS> struct Row;

template <> struct Row<DENSE, 0> {
  u64 first;
  __device__ __forceinline__ Row(const Weight& w, u64 row) : first(row * w.k) {}
  __device__ __forceinline__ float at(const Weight& w, u64 k) { return load_float(w.codes, first + k, w.dtype); }
};

// BITS: of a code's place in a word.
template <int BITS> struct Row<PLAIN, BITS> {
  u64 row, loaded = ~0ull;
  float scale = 0, offset = 0, zero;
  __device__ __forceinline__ Row(const Weight& w, u64 row) : row(row), zero(float(w.middle)) {}
  __device__ __forceinline__ float at(const Weight& w, u64 k) {
    constexpr u32 PER_WORD = 32 / BITS;
    const u64 param = u64(u32(k) / w.group) * w.n + row;  // 31 bits count columns
    if (param != loaded) {
      loaded = param;
      scale = load_float(w.scales, param, w.dtype);
      if (w.zero_kind == INTEGER) zero = static_cast<const u16*>(w.zeros)[param];
      if (w.zero_kind == OFFSET) offset = load_float(w.zeros, param, w.dtype);
    }
    const u32 word = static_cast<const u32*>(w.codes)[k / PER_WORD * w.n + row];
    const float code = float(word >> (u32(k) % PER_WORD * BITS) & ((1u << BITS) - 1));
    return w.zero_kind == OFFSET ? fmaf(scale, code, offset) : scale * (code - zero);
  }
};

template <int BITS> struct Row<WNA16, BITS> {
  const u8 *codes, *params;  // of the first unit of the row
  u64 step, loaded = ~0ull;
  u32 warp, of_warp, upper;  // rows of a strip: 16 a warp, 8 below them
  float scale = 0, zero;  // zero: or the offset
  __device__ __forceinline__ Row(const Weight& w, u64 row) : zero(float(w.middle)) {
    const u64 strips = (w.n + 63) / 64, strip = row / 64, super = strip / 4, steps = (w.k + 127) / 128;
    const u64 in = strips - 4 * super < 4 ? strips - 4 * super : 4;
    const u32 groups = w.group ? 128 / w.group : 0, each = scales_bytes(w) + zeros_bytes(w);
    const u64 atom = 4 * (256 * BITS + groups * each);
    warp = u32(row) % 64 / 16, of_warp = u32(row) % 8, upper = u32(row) % 16 / 8;
    const u8* first = static_cast<const u8*>(w.codes) + (super * 4 * steps + strip % 4) * atom;
    codes = first + warp * (256 * BITS), params = first + 1024 * BITS + warp * (groups * each);
    step = in * atom;
    // Of rows, four times those of 16.
    const u8* table = static_cast<const u8*>(w.scales) + strip * (4 * each);
    if (!w.group) load_params(w, table + warp * scales_bytes(w), table + 4 * scales_bytes(w) + warp * zeros_bytes(w));
  }
  // Of 16 rows and a group.
  DEV u32 scales_bytes(const Weight& w) { return w.dtype == F32 ? 64 : 32; }
  DEV u32 zeros_bytes(const Weight& w) {
    return w.zero_kind == INTEGER ? 16 : w.zero_kind == OFFSET ? scales_bytes(w) : 0;
  }
  __device__ __forceinline__ void load_params(const Weight& w, const u8* scales, const u8* zeros) {
    const u32 at = of_warp * 2 + upper;
    scale = load_float(scales, at, w.dtype);
    if (w.zero_kind == INTEGER) zero = zeros[at];
    if (w.zero_kind == OFFSET) zero = load_float(zeros, at, w.dtype);
  }
  __device__ __forceinline__ float at(const Weight& w, u64 k) {
    const u8* unit = codes + k / 128 * step;
    const u32 c = u32(k) % 128, lane = of_warp * 4 + c % 8 / 2, high = c % 16 / 8, odd = c % 2;
    if (w.group && k / w.group != loaded) {
      loaded = k / w.group;
      const u8* own = params + k / 128 * step;
      load_params(w, own + c / w.group * scales_bytes(w),
                  own + 128 / w.group * scales_bytes(w) + c / w.group * zeros_bytes(w));
    }
    u32 code;
    if (BITS < 4) {
      const u8* half = unit + c / 64 * (128 * BITS);
      const u32 step = c % 64 / 16, at = 4 * upper + 8 * high + 16 * odd;
      code = reinterpret_cast<const u32*>(half)[2 * lane + step / 2] >> (at + step % 2 * 2) & 3;
      if (BITS == 3) code |= (reinterpret_cast<const u32*>(half + 256)[lane] >> (at + step) & 1) << 2;
    } else if (BITS == 4) {
      const u32 word = reinterpret_cast<const u32*>(unit)[(c / 64 * 32 + lane) * 4 + c % 64 / 16];
      code = word >> (4 * upper + 8 * high + 16 * odd) & 15;
    } else {
      code = unit[((c / 32 * 32 + lane) * 4 + c % 32 / 16 * 2 + high) * 4 + 2 * odd + upper];
    }
    return w.zero_kind == OFFSET ? fmaf(scale, float(code), zero) : scale * (float(code) - zero);
  }
};
