// Rows of quantised weights as floats: W[row][column] in one of three types, each value rounded once.
//
//   a block owns some rows and a window of columns
//   codes -> value, exact in f32 (in f64 where scales are f32 or there are offsets) -> rounded -> shared memory
//   shared memory -> rows, 16 bytes a thread, so that memory is written in whole lines
//
//   rows that are asked for by number, as of an embedding: a thread has a value, which it reads where its code lies
//
// Bound by what is written. Layouts: cuda_plain (layout/cuda_plain.rs), cuda_wna16 (layout/cuda_wna16.rs). Columns of
// cuda_wna16 that were sorted by group go back to where they belong in shared memory, so that x needs no other order.
#include "floats.cuh"
#include "multiples.cuh"

constexpr int THREADS = 256, BLOCKS = __CUDA_ARCH__ < 800 ? 4 : 5;  // of a block; of a multiprocessor

// Where rows go, as in dequantize.rs. The first row is a multiple of 64.
struct Output {
  void* to;  // [rows][pitch]: begins at 16 bytes, pitch a multiple of 8
  u64 pitch;
  u32 n, k;  // of the matrix
  u32 first, rows;  // which rows
};

// Rows that are chosen: out[i] = W[tokens[i] - first] * scale in f32; zeros for tokens that W has not.
struct Chosen {
  const u32* tokens;  // [rows]
  float* out;  // [rows][k]
  u32 n, k;  // of the matrix
  u32 first;
  float scale;
};

// ---- values

// 0 .. 2^23 as a float, less an integer: exact.
DEV float integer(u32 code, float zero_and_2_23) { return __uint_as_float(code | 0x4b000000) - zero_and_2_23; }
constexpr float TWO_23 = 8388608.f;

// A double as what OUT is rounded from: for halfs a float whose last bit says whether anything was cut off, so that
// rounding it rounds the double.
template <FloatType OUT> DEV float rounded_to_odd(double v) {
  if constexpr (OUT == F32) return float(v);
  const float cut = __double2float_rz(v);
  return double(cut) == v ? cut : __uint_as_float(__float_as_uint(cut) | 1);
}

template <FloatType OUT> struct Stored {
  typedef u16 type;
};
template <> struct Stored<F32> {
  typedef float type;
};

template <FloatType OUT> DEV typename Stored<OUT>::type narrowed(float v) {
  if constexpr (OUT == F32)
    return v;
  else
    return u16(OUT == F16 ? half_pair(v, 0.f) : bf16_pair(v, 0.f));
}

// Two neighbours in shared memory; the first at a multiple of their size.
template <FloatType OUT> DEV void store_pair(typename Stored<OUT>::type* to, float a, float b) {
  if constexpr (OUT == F32)
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
  else
    *reinterpret_cast<u32*>(to) = OUT == F16 ? half_pair(a, b) : bf16_pair(a, b);
}

// 4, 8 or 16 neighbours in shared memory; the first at a multiple of their size.
template <FloatType OUT, int COUNT> DEV void store_run(typename Stored<OUT>::type* to, const float (&v)[COUNT]) {
  if constexpr (OUT == F32) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++)
      reinterpret_cast<float4*>(to)[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  } else {
    u32 pairs[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++)
      pairs[i] = OUT == F16 ? half_pair(v[2 * i], v[2 * i + 1]) : bf16_pair(v[2 * i], v[2 * i + 1]);
    if constexpr (COUNT == 4) *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
#pragma unroll
    for (int i = 0; i < COUNT / 8; i++)
      reinterpret_cast<uint4*>(to)[i] = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
  }
}

// ---- from shared memory to rows

// A row of a tile, `width` columns from column `from` on, by threads `thread`, `thread + threads`, ...
template <typename T>
DEV void store_row(const Output& out, const T* tile, u32 row, u32 from, u32 width, u32 thread, u32 threads) {
  if (row < out.first || row >= min(out.first + out.rows, out.n)) return;
  uint4* to = reinterpret_cast<uint4*>(static_cast<T*>(out.to) + (row - out.first) * out.pitch + from);
  for (u32 i = thread; i < width * sizeof(T) / 16; i += threads) to[i] = reinterpret_cast<const uint4*>(tile)[i];
}

// ---- cuda_plain

struct Plain {
  const u32* codes;  // [words][n]
  const void* scales;  // [groups][n]
  const void* zeros;  // [groups][n]: u16 zero points, or offsets of the scales' type
  const u32* group_of;  // [k], or null: column / group
  u32 group;
  u32 middle;  // the code of zero in a symmetric format
  FloatType scale_type;
  u32 zero_kind;  // 0 symmetric, 1 integer, 2 offset
};

struct Terms {
  float scale, zero, offset;
};

__device__ inline Terms terms_of(const Plain& p, u32 n, u32 output, u32 group) {
  const u64 at = u64(group) * n + output;
  Terms t = {load_float(p.scales, at, p.scale_type), float(p.middle), 0.f};
  if (p.zero_kind == 1) t.zero = static_cast<const u16*>(p.zeros)[at];
  if (p.zero_kind == 2) t.offset = load_float(p.zeros, at, p.scale_type);
  return t;
}

// A value that f32 does not hold.
template <FloatType OUT> DEV float rounded(const Terms& t, bool offset, float code) {
  const double scale = t.scale;
  return rounded_to_odd<OUT>(offset ? scale * code + double(t.offset) : scale * (code - t.zero));
}

// FIELD: bits of a code's place in a word. A block has 64 rows and 256 bytes of each.
template <int FIELD, FloatType OUT>
__global__ void __launch_bounds__(THREADS, BLOCKS) dequantize_plain(const Output out, const Plain p) {
  typedef typename Stored<OUT>::type T;
  constexpr int ROWS = 64, COLUMNS = 256 / sizeof(T), PITCH = COLUMNS + 16 / sizeof(T), APART = THREADS / ROWS;
  constexpr int PER_WORD = 32 / FIELD, WORDS = COLUMNS / PER_WORD / APART;
  constexpr u32 MASK = (1u << FIELD) - 1;
  __shared__ __align__(16) T tile[ROWS * PITCH];

  const u32 first_column = blockIdx.x * COLUMNS, first_row = out.first + blockIdx.y * ROWS;
  const u32 lane = threadIdx.x % ROWS, row = first_row + lane, first_word = threadIdx.x / ROWS;
  u32 words[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const u32 column = first_column + (first_word + i * APART) * PER_WORD;
    words[i] = row < out.n && column < out.k ? p.codes[u64(column / PER_WORD) * out.n + row] : 0;
  }
  const bool exact = p.scale_type != F32 && p.zero_kind != 2;
  u32 group = (first_column + first_word * PER_WORD) / p.group, end = (group + 1) * p.group;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const u32 within = (first_word + i * APART) * PER_WORD, column = first_column + within;
    if (row >= out.n || column >= out.k) break;
    T* to = tile + lane * PITCH + within;
    for (; column >= end; end += p.group) group++;
    if (exact && !p.group_of && min(end, out.k) - column >= PER_WORD) {
      const Terms t = terms_of(p, out.n, row, group);
      float v[PER_WORD];
#pragma unroll
      for (int f = 0; f < PER_WORD; f++) v[f] = t.scale * integer(words[i] >> f * FIELD & MASK, t.zero + TWO_23);
      store_run<OUT>(to, v);
      continue;
    }
    if (exact && p.group_of && column + PER_WORD <= out.k) {
#pragma unroll 1
      for (int first = 0; first < PER_WORD; first += 4) {
        float v[4];
#pragma unroll
        for (int f = 0; f < 4; f++) {
          const Terms t = terms_of(p, out.n, row, p.group_of[column + first + f]);
          v[f] = t.scale * integer(words[i] >> (first + f) * FIELD & MASK, t.zero + TWO_23);
        }
        store_run<OUT>(to + first, v);
      }
      continue;
    }
    u32 last = ~0u, of_column = group, next = end;
    Terms t;
#pragma unroll 1
    for (int f = 0; f < PER_WORD && column + f < out.k; f++) {
      if (column + f == next) of_column++, next += p.group;
      if (p.group_of) of_column = p.group_of[column + f];
      if (of_column != last) t = terms_of(p, out.n, row, last = of_column);
      const float code = float(words[i] >> f * FIELD & MASK);
      to[f] = narrowed<OUT>(exact ? t.scale * (code - t.zero) : rounded<OUT>(t, p.zero_kind == 2, code));
    }
  }
  __syncthreads();
  // Sixteen threads a row.
  const u32 width = min(u32(out.pitch) - first_column, u32(COLUMNS));
#pragma unroll
  for (int r = threadIdx.x / 16; r < ROWS; r += THREADS / 16)
    store_row(out, tile + r * PITCH, first_row + r, first_column, width, threadIdx.x % 16, 16);
}

// A block has 256 columns of a row.
template <int FIELD> __global__ void __launch_bounds__(THREADS) dequantize_rows_plain(const Chosen out, const Plain p) {
  constexpr u32 PER_WORD = 32 / FIELD, MASK = (1u << FIELD) - 1;
  const u32 column = blockIdx.y * THREADS + threadIdx.x, token = out.tokens[blockIdx.x] - out.first;
  if (column >= out.k) return;
  float value = 0;
  if (token < out.n) {
    const bool exact = p.scale_type != F32 && p.zero_kind != 2;
    const Terms t = terms_of(p, out.n, token, p.group_of ? p.group_of[column] : column / p.group);
    const u32 word = p.codes[u64(column / PER_WORD) * out.n + token], code = word >> column % PER_WORD * FIELD & MASK;
    value = exact ? t.scale * integer(code, t.zero + TWO_23) : rounded<F32>(t, p.zero_kind == 2, float(code));
  }
  out.out[u64(blockIdx.x) * out.k + column] = value * out.scale;
}

// ---- cuda_wna16

struct Wna16 {
  const u8* atoms;
  const u8* rows;  // scales and zero points of rows, where a row has one of each
  const u32* order;  // [k]: the column that each lies in for, or null
  u32 steps;  // atoms along k
  u32 groups;  // in an atom: 8, 4, 2, 1; 0: one scale a row
  u32 shift;  // log2 of the columns of a group
  u32 params_bytes;  // of 16 rows of an atom
  FloatType scale_type;
  u32 zero_kind;  // 0 symmetric, 1 integer, 2 offset
  u32 table[4];  // the codes that numbers of a TABLE stand for, one a byte
  u32 window;  // columns of a block
  u32 twice;  // values that f32 does not hold may round to it first
};

// What scales and offsets are, and codes: numbers; multiples of halves; numbers, and codes those in a table.
enum Kinds { NUMBERS = 0, MULTIPLES = 1, TABLES = 2 };

// What a group's codes of rows R and R + 8 are made values by; `zero` has 2^23 in it.
struct PairTerms {
  float scale, scale8, zero, zero8, offset, offset8;
};

// The same out of multiples of halves, from where those of a unit begin.
[[maybe_unused]] DEV PairTerms pair_of_multiples(const Wna16& p, const u8* params, u32 pair, u32 group, float middle) {
  const bool offsets = p.zero_kind == 2;
  const auto [s, o] = terms_of_pair(params, pair, group, p.groups, offsets);
  const float zero = TWO_23 + (offsets ? 0.f : middle);
  return {s.r, s.r8, zero, zero, o.r, o.r8};
}

// Four neighbouring words of a unit's codes, as those of 4 or of 8 bits lie; of 2 and 3 bits as if they were 4, of 5
// and 6 as if they were 8. `part`: of the columns, as many as four words of a lane have.
template <int BITS> DEV void load_quad(u32 (&words)[4], const u8* codes, u32 part, u32 lane) {
  if constexpr (BITS < 4) {
    const u8* own = codes + part * (128 * BITS);
    const uint2 low = reinterpret_cast<const uint2*>(own)[lane];
    const u32 high = BITS == 3 ? reinterpret_cast<const u32*>(own + 256)[lane] : 0;
    words[0] = and_or(high << 2, 0x44444444, low.x & 0x33333333);
    words[1] = and_or(high << 1, 0x44444444, low.x >> 2 & 0x33333333);
    words[2] = and_or(high, 0x44444444, low.y & 0x33333333);
    words[3] = and_or(high >> 1, 0x44444444, low.y >> 2 & 0x33333333);
    return;
  }
  if constexpr (BITS == 5) {
    const u8* own = codes + part / 2 * 640;
    const uint2 low = reinterpret_cast<const uint2*>(own)[2 * lane + part % 2];
    const u32 high = reinterpret_cast<const u32*>(own + 512)[lane] >> (4 * (part % 2));
    words[0] = and_or(high << 4, 0x10101010, low.x & 0x0f0f0f0f);
    words[1] = and_or(high << 3, 0x10101010, low.x >> 4 & 0x0f0f0f0f);
    words[2] = and_or(high << 2, 0x10101010, low.y & 0x0f0f0f0f);
    words[3] = and_or(high << 1, 0x10101010, low.y >> 4 & 0x0f0f0f0f);
  } else if constexpr (BITS == 6) {
    const u8* own = codes + part / 2 * 768;
    const uint2 low = reinterpret_cast<const uint2*>(own)[2 * lane + part % 2];
    const u32 high = reinterpret_cast<const u32*>(own + 512)[2 * lane + part % 2];
    words[0] = and_or(high << 4, 0x30303030, low.x & 0x0f0f0f0f);
    words[1] = and_or(high << 2, 0x30303030, low.x >> 4 & 0x0f0f0f0f);
    words[2] = and_or(high, 0x30303030, low.y & 0x0f0f0f0f);
    words[3] = and_or(high >> 2, 0x30303030, low.y >> 4 & 0x0f0f0f0f);
  } else {
    const uint4 quad = reinterpret_cast<const uint4*>(codes)[part * 32 + lane];
    words[0] = quad.x, words[1] = quad.y, words[2] = quad.z, words[3] = quad.w;
  }
}

// Where the scales of a group and a unit begin, and its zero points or offsets; `params`: where the unit's do.
struct Places {
  const u8 *scales, *zeros;
};
[[maybe_unused]] DEV Places places_of(const Wna16& p, const u8* params, u32 strip, u32 warp, u32 group) {
  const u32 scales = p.scale_type == F32 ? 64 : 32, zeros = p.zero_kind == 1 ? 16 : p.zero_kind == 2 ? scales : 0;
  if (p.groups) return {params + group * scales, params + p.groups * scales + group * zeros};
  const u8* rows = p.rows + u64(strip) * (4 * (scales + zeros));
  return {rows + warp * scales, rows + 4 * scales + warp * zeros};
}

// What codes of a symmetric format are less.
template <int BITS, Kinds KINDS> constexpr u32 MIDDLE = KINDS == TABLES ? 128 : 1 << (BITS - 1);
// The codes that a word's four numbers of 4 bits from bit `from` on stand for, one a byte.
[[maybe_unused]] DEV u32 looked_up(const Wna16& p, u32 word, u32 from) {
  const u32 numbers = word >> from, lower = numbers & 0x7777, upper = and_or(numbers >> 1, 0x4444, 0x3210);
  return __byte_perm(__byte_perm(p.table[0], p.table[1], lower), __byte_perm(p.table[2], p.table[3], lower), upper);
}

// at: of the pair of rows.
template <u32 MIDDLE> DEV PairTerms pair_terms(const Wna16& p, Places from, u32 at) {
  PairTerms t;
  t.scale = load_float(from.scales, 2 * at, p.scale_type), t.scale8 = load_float(from.scales, 2 * at + 1, p.scale_type);
  t.zero = t.zero8 = TWO_23 + MIDDLE;
  t.offset = t.offset8 = 0.f;
  if (p.zero_kind == 1) {
    const u32 z = reinterpret_cast<const u16*>(from.zeros)[at];
    t.zero = TWO_23 + float(z & 255), t.zero8 = TWO_23 + float(z >> 8);
  } else if (p.zero_kind == 2) {
    t.zero = t.zero8 = TWO_23;
    t.offset = load_float(from.zeros, 2 * at, p.scale_type),
    t.offset8 = load_float(from.zeros, 2 * at + 1, p.scale_type);
  }
  return t;
}

// BITS: 2 to 8. A block has a strip of 64 rows and 512 bytes of
// each; or, where columns were SORTED, rows R and R + 8 and a window of columns: it looks at all and takes those that
// belong there. Shared memory: rows of the window and 16 bytes each.
template <int BITS, FloatType OUT, bool SORTED, Kinds KINDS>
__global__ void __launch_bounds__(THREADS, SORTED || KINDS != NUMBERS || BITS == 3 || BITS == 5 ? 4 : BLOCKS)
    dequantize_wna16(const Output out, const Wna16 p) {
  typedef typename Stored<OUT>::type T;
  constexpr int CODE = BITS <= 4 ? 4 : 8;
  constexpr u32 CODES = 256 * BITS, PARTS = CODE / 2, MASK = (1u << BITS) - 1;
  constexpr u32 PAIRS = SORTED ? 1 : 32;  // of rows R and R + 8
  extern __shared__ uint4 shared[];
  T* tile = reinterpret_cast<T*>(shared);
  const u32 window = SORTED ? p.window : 512 / sizeof(T), pitch = window + 16 / sizeof(T);

  // Neighbouring blocks write neighbouring columns, which is 10 % faster.
  const u32 strip = out.first / 64 + (SORTED ? blockIdx.x / 32 : blockIdx.y), first_pair = SORTED ? blockIdx.x % 32 : 0;
  const u32 from = (SORTED ? blockIdx.y : blockIdx.x) * window, first_step = SORTED ? 0 : from / 128;
  const u32 steps = SORTED ? p.steps : min(p.steps - first_step, window / 128);
  const bool exact = p.scale_type != F32 && p.zero_kind != 2;
  // Strips of a super-strip take turns along k.
  const u32 first_strip = strip & ~3u, wide = min(4u, (out.n + 63) / 64 - first_strip);
  const u32 bytes = 4 * (CODES + p.params_bytes);  // of an atom
  const u8* base = p.atoms + (u64(first_strip) * p.steps + (strip & 3)) * bytes;

  // A thread takes four words, which lie in 16 bytes, of one pair of rows.
  for (u32 i = threadIdx.x; i < 4 * PAIRS * PARTS * steps; i += THREADS) {
    const u32 four = i % 4, pair = i / 4 % PAIRS, part = i / (4 * PAIRS) % PARTS,
              step = first_step + i / (4 * PAIRS * PARTS);
    const u32 warp = (first_pair + pair) / 8, r = (first_pair + pair) % 8;
    const u8 *atom = base + u64(step * wide) * bytes, *params = atom + 4 * CODES + warp * p.params_bytes;
    u32 words[4];
    load_quad<BITS>(words, atom + warp * CODES, part, 4 * r + four);
    T* upper = tile + pair * pitch;
    T* lower = tile + (PAIRS + pair) * pitch;
    PairTerms t;
    constexpr u32 SPAN = CODE == 4 ? 64 : 32;  // columns of four words
#pragma unroll
    for (int j = 0; j < 4; j++) {
      // Words of 4 bits have 16 columns each, two of 8 bits together.
      const u32 first = SPAN * part + (CODE == 4 ? 16 * j : 16 * (j / 2));
      if (j == 0 || (CODE == 4 || j == 2) && (first & ((1 << p.shift) - 1)) == 0) {
        const u32 group = first >> p.shift;
        t = KINDS == MULTIPLES ? pair_of_multiples(p, params, r, group, MIDDLE<BITS, KINDS>)
                               : pair_terms<MIDDLE<BITS, KINDS>>(p, places_of(p, params, strip, warp, group), r);
      }
      // Columns c, c + 1 and, with 4 bits, c + 8, c + 9.
      const u32 within = SPAN * part + 2 * four + (CODE == 4 ? 16 * j : 16 * (j / 2) + 8 * (j % 2));
#pragma unroll
      for (int half = 0; half < (CODE == 4 ? 2 : 1); half++) {
        const u32 c = step * 128 + within + 8 * half;
        constexpr int DOWN = CODE, F[4] = {0, 16, DOWN, 16 + DOWN};
        float v[4];
#pragma unroll
        for (int f = 0; f < 4; f++) {
          // A rotation: with a shift there are too few registers.
          const u32 code = KINDS == TABLES ? looked_up(p, words[j], F[f] / 16 * 16) >> (F[f] % 16 * 2 + 16 * half) & 255
                                           : __funnelshift_r(words[j], words[j], F[f] + 8 * half) & MASK;
          v[f] = integer(code, f < 2 ? t.zero : t.zero8);
        }
        if (exact) {
          v[0] *= t.scale, v[1] *= t.scale, v[2] *= t.scale8, v[3] *= t.scale8;
        } else if (p.twice) {
          v[0] = fmaf(v[0], t.scale, t.offset), v[1] = fmaf(v[1], t.scale, t.offset);
          v[2] = fmaf(v[2], t.scale8, t.offset8), v[3] = fmaf(v[3], t.scale8, t.offset8);
        } else {
#pragma unroll
          for (int f = 0; f < 4; f++)
            v[f] =
                rounded_to_odd<OUT>(double(f < 2 ? t.scale : t.scale8) * v[f] + double(f < 2 ? t.offset : t.offset8));
        }
        if constexpr (!SORTED) {
          store_pair<OUT>(upper + (c - from), v[0], v[1]);
          store_pair<OUT>(lower + (c - from), v[2], v[3]);
        } else {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const u32 to = c + e < out.k ? p.order[c + e] - from : window;
            if (to >= window) continue;
            upper[to] = narrowed<OUT>(v[e]);
            lower[to] = narrowed<OUT>(v[2 + e]);
          }
        }
      }
    }
  }
  __syncthreads();
  const u32 width = min(u32(out.pitch) - from, window);
  if constexpr (SORTED) {
    const u32 row = strip * 64 + first_pair / 8 * 16 + first_pair % 8;
    store_row(out, tile, row, from, width, threadIdx.x, THREADS);
    store_row(out, tile + pitch, row + 8, from, width, threadIdx.x, THREADS);
  } else {
    // A warp a row.
#pragma unroll 4
    for (u32 r = threadIdx.x / 32; r < 64; r += THREADS / 32) {
      const u32 pair = r % 32, row = strip * 64 + pair / 8 * 16 + pair % 8 + r / 32 * 8;
      store_row(out, tile + r * pitch, row, from, width, threadIdx.x % 32, 32);
    }
  }
}

// A block has 256 columns of a row, as they lie.
template <int BITS, Kinds KINDS>
__global__ void __launch_bounds__(THREADS) dequantize_rows_wna16(const Chosen out, const Wna16 p) {
  constexpr bool NIBBLES = BITS <= 4;
  constexpr u32 CODES = 256 * BITS, MASK = (1u << BITS) - 1, SPAN = NIBBLES ? 64 : 32;
  const u32 lies = blockIdx.y * THREADS + threadIdx.x, token = out.tokens[blockIdx.x] - out.first;
  if (lies >= out.k) return;
  float value = 0;
  if (token < out.n) {
    const bool exact = p.scale_type != F32 && p.zero_kind != 2;
    const u32 strip = token / 64, first_strip = strip & ~3u, wide = min(4u, (out.n + 63) / 64 - first_strip);
    const u32 warp = token % 64 / 16, r = token % 8, c = lies % 128;
    const u64 at = u64(first_strip) * p.steps + (strip & 3) + u64(lies / 128 * wide);
    const u8 *atom = p.atoms + 4 * at * (CODES + p.params_bytes), *params = atom + 4 * CODES + warp * p.params_bytes;
    const bool lower = token % 16 >= 8;
    // The word, and where in it the code lies: columns c, c + 1 and, with 4 bits, c + 8, c + 9 share one.
    const u32 j = NIBBLES ? c % SPAN / 16 : c % SPAN / 8, four = c % 8 / 2;
    u32 words[4];
    load_quad<BITS>(words, atom + warp * CODES, c / SPAN, 4 * r + four);
    const u32 word = j == 0 ? words[0] : j == 1 ? words[1] : j == 2 ? words[2] : words[3];
    const u32 field = (NIBBLES ? (lower ? 4 : 0) + c / 8 % 2 * 8 : (lower ? 8 : 0)) + c % 2 * 16;
    u32 code = word >> field & MASK;
    if constexpr (KINDS == TABLES) code = looked_up(p, word, field) & 255;
    const u32 group = c >> p.shift;
    const PairTerms t = KINDS == MULTIPLES
                            ? pair_of_multiples(p, params, r, group, MIDDLE<BITS, KINDS>)
                            : pair_terms<MIDDLE<BITS, KINDS>>(p, places_of(p, params, strip, warp, group), r);
    const float scale = lower ? t.scale8 : t.scale, whole = integer(code, lower ? t.zero8 : t.zero);
    value = exact ? whole * scale : float(double(scale) * whole + double(lower ? t.offset8 : t.offset));
  }
  const u32 column = p.order ? p.order[lies] : lies;
  out.out[u64(blockIdx.x) * out.k + column] = value * out.scale;
}
