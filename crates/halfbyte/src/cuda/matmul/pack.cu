// From the words of files to the layouts of the kernels.
//
//   a block makes one tile of 64 outputs x 128 columns:
//       words of the file -> codes, one a byte, [64][128] in shared memory
//       codes -> an atom of layout/cuda_wna16.rs, or words of layout/cuda_plain.rs, written as one piece or in lines
//           of outputs; or what the codes stand for, as floats
//
// Each byte is read once and written once, but under act-order, where the eight codes of a word go to several tiles:
// those of 256 outputs come one after the other, and find the words in the cache.
#include "multiples.cuh"
#include "packing.cuh"

constexpr int OUTPUTS = 64;  // of a tile
constexpr int COLUMNS = 128;
constexpr int THREADS = 256;

// Words that a row of a tile takes in shared memory: two banks from row to row, so that neighbouring outputs do not
// collide.
constexpr int STRIDE = COLUMNS / 4 + 2;

// Codes of whole lines of one tensor, from its row and column on; what lies beyond its edges is left as it comes. All
// rows of the tile; or, of a gated matrix, every other 8 of them, from the first or (`second`) the ninth on.
template <int BITS, bool GATED = false>
DEV void lines(u32 (&all)[OUTPUTS][STRIDE], const Part& part, u32 row0, u32 column0, u32 k, u32 second = 0) {
  constexpr u32 OWN = GATED ? OUTPUTS / 2 : OUTPUTS;
  constexpr int PER_WORD = 32 / BITS, WORDS = COLUMNS / PER_WORD, EACH = OWN * WORDS / THREADS;
  struct Rows {
    u32 (*all)[STRIDE];
    u32 first;
    __device__ __forceinline__ u32 (&operator[](u32 row) const)[STRIDE] {
      return all[GATED ? first + row / EIGHT * (2 * EIGHT) + row % EIGHT : row];
    }
  };
  const Rows tile = {all, second * EIGHT};
  const u32 thread = threadIdx.x, rows = part.rows - row0, columns = k - column0;
  const u64 stride = part.stride;
  const auto put = [&](u32 row, u32 word, u32 codes) {
    u32 bytes[8 / BITS];
    spread<BITS>(codes, bytes);
    u32* to = &tile[row][word * (8 / BITS)];
    if constexpr (BITS == 4)
      *reinterpret_cast<uint2*>(to) = make_uint2(bytes[0], bytes[1]);
    else {
#pragma unroll
      for (int j = 0; j < 8 / BITS; j++) to[j] = bytes[j];
    }
  };
  if (part.kind == BYTES) {
    const u32 row = thread / 32, column = thread % 32 * 4;
    const u8* bytes = static_cast<const u8*>(part.codes) + (row0 + row) * stride + column0 + column;
    constexpr int LINES = OWN / 8;
    u32 loaded[LINES];
#pragma unroll
    for (int i = 0; i < LINES; i++, bytes += 8 * stride) {
      loaded[i] = 0;
      if (row + i * 8 >= rows || column >= columns) continue;
      if (k % 4 == 0) {
        loaded[i] = *reinterpret_cast<const u32*>(bytes);
      } else {
#pragma unroll
        for (int b = 0; b < 4; b++) loaded[i] |= column + b < columns ? u32(bytes[b]) << (8 * b) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < LINES; i++) tile[row + i * 8][thread % 32] = loaded[i] ^ part.flip;
  } else if (part.kind == ALONG) {
    constexpr int ROWS = THREADS / WORDS;
    const u32 row = thread / WORDS, word = thread % WORDS;
    const u32* words = static_cast<const u32*>(part.codes) + (row0 + row) * stride + column0 / PER_WORD + word;
    u32 loaded[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++, words += ROWS * stride)
      loaded[i] = row + i * ROWS < rows && word * PER_WORD < columns ? *words : 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) put(row + i * ROWS, word, loaded[i]);
  } else if (part.kind == BLOCKS || part.kind == TABLES) {
    // Columns are whole blocks.
    const u32 row = thread / 32, column = column0 + thread % 32 * 4;
#pragma unroll 2
    for (u32 i = row; i < OWN; i += 8)
      tile[i][thread % 32] = i < rows && column < k ? four_of_block(part, row0 + i, column) : 0;
  } else if (part.kind == RANDOM) {
    constexpr int ROWS = THREADS / WORDS;
    const u32 row = thread / WORDS, word = thread % WORDS;
#pragma unroll 1
    for (int i = 0; i < EACH; i++)
      put(row + i * ROWS, word, drawn(part, row0 + row + i * ROWS, column0 / PER_WORD + word));
  } else if (part.kind == DOWN) {
    constexpr int DOWN_AT_ONCE = THREADS / OWN;
    const u32 row = thread % OWN, word = thread / OWN;
    const u32* words = static_cast<const u32*>(part.codes) + (column0 / PER_WORD + word) * stride + row0 + row;
    u32 loaded[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++, words += DOWN_AT_ONCE * stride)
      loaded[i] = row < rows && (word + i * DOWN_AT_ONCE) * PER_WORD < columns ? *words : 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) put(row, word + i * DOWN_AT_ONCE, loaded[i]);
  } else if constexpr (BITS == 4) {
    // Rows and columns of four registers of four bytes, exchanged.
    const auto transpose = [](const u32(&in)[4], u32(&out)[4]) {
      const u32 a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
      const u32 c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
      out[0] = __byte_perm(a, b, 0x5410), out[1] = __byte_perm(a, b, 0x7632);
      out[2] = __byte_perm(c, d, 0x5410), out[3] = __byte_perm(c, d, 0x7632);
    };
    // A thread has four columns of eight outputs.
    const u32 eight = thread % 8, column = thread / 8 * 4;
    if (eight >= OWN / 8) return;
    const u32* words = static_cast<const u32*>(part.codes) + (column0 + column) * stride + row0 / 8 + eight;
    u32 loaded[4], even[4], odd[4], bytes[4];
#pragma unroll
    for (int i = 0; i < 4; i++, words += stride) loaded[i] = eight * 8 < rows && column + i < columns ? *words : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) even[i] = loaded[i] & 0x0f0f0f0f, odd[i] = loaded[i] >> 4 & 0x0f0f0f0f;
    u32(*out)[STRIDE] = &tile[eight * 8];
    // Nibbles 0, 2, 4, 6 hold outputs 0, 4, 1, 5; the others 2, 6, 3, 7.
    transpose(even, bytes);
    out[0][thread / 8] = bytes[0], out[4][thread / 8] = bytes[1];
    out[1][thread / 8] = bytes[2], out[5][thread / 8] = bytes[3];
    transpose(odd, bytes);
    out[2][thread / 8] = bytes[0], out[6][thread / 8] = bytes[1];
    out[3][thread / 8] = bytes[2], out[7][thread / 8] = bytes[3];
  }
}

// The codes of a tile, one a byte, and `filler` beyond the edges.
template <int BITS, bool GATED = false>
DEV void fill(u32 (&tile)[OUTPUTS][STRIDE], const Params& p, u32 row0, u32 column0, u32 filler) {
  const u32 rows = p.n - row0 < OUTPUTS ? p.n - row0 : OUTPUTS,
            columns = p.k - column0 < COLUMNS ? p.k - column0 : COLUMNS;
  const Part& part = part_of(p, row0);
  u8(*bytes)[STRIDE * 4] = reinterpret_cast<u8(*)[STRIDE * 4]>(tile);
  const bool whole = !p.order && (GATED || row0 + rows <= part.top + part.rows);
  if (GATED && whole) {
#pragma unroll 1
    for (u32 second = 0; second < 2; second++) {
      const Part& own = p.parts[second];
      lines<BITS, true>(tile, own, own_row(p, own, row0), column0, p.k, second);
    }
  } else if (whole) {
    lines<BITS>(tile, part, row0 - part.top, column0, p.k);
  } else {
    // Neighbouring threads take what is near in the file.
    const bool across = part.kind == DOWN || part.kind == ACROSS;
#pragma unroll 1
    for (int i = threadIdx.x; i < OUTPUTS * COLUMNS; i += THREADS) {
      const u32 row = across ? i % OUTPUTS : i / COLUMNS, column = across ? i / OUTPUTS : i % COLUMNS;
      if (row >= rows || column >= columns) continue;
      const Part& own = part_of(p, row0 + row);
      const u32 from = p.order ? p.order[column0 + column] : column0 + column;
      bytes[row][column] = u8(code<BITS>(own, own_row(p, own, row0 + row), from));
    }
  }
  if (rows < OUTPUTS || columns < COLUMNS) {
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < OUTPUTS * COLUMNS; i += THREADS) {
      if (i / COLUMNS >= rows || i % COLUMNS >= columns) bytes[i / COLUMNS][i % COLUMNS] = u8(filler);
    }
  }
  __syncthreads();
}

DEV u16 zero_point(const Part& part, u32 row, u32 group) {
  return static_cast<const u16*>(part.zeros)[row * part.zero_output + group * part.zero_group];
}

// A scale as the file has it, and a zero point: loaded first and used last, so that nobody waits for them.
struct Loaded {
  u32 scale, offset;
  u16 zero;
  FloatType type, offset_type;
  float channel;  // scale of the row, where scales have two levels
  bool there;
};

// A number's bits, and the float that they are.
DEV u32 load_bits(const void* from, u64 at, FloatType type) {
  return type == F32 ? static_cast<const u32*>(from)[at] : static_cast<const u16*>(from)[at];
}
DEV float float_of_loaded(u32 bits, FloatType type) {
  return type == F32 ? __uint_as_float(bits) : float_of_bits(u16(bits), type);
}

// What lies at `at` among the 64 scales and zero points of a group, of a strip of 64 rows.
DEV Loaded load_param(const Params& p, u32 strip, u32 column, u32 at) {
  const u32 row = strip * 64 + at / 16 * 16 + at % 16 / 2 + 8 * (at % 2), group = p.atom_group ? column / p.group : 0;
  Loaded loaded = {0, 0, u16(p.middle), F32, F32, 0.f, false};
  if (row < p.n && group < p.groups && (column < p.k || !p.atom_group)) {
    const Part& part = part_of(p, row);
    const u32 own = own_row(p, part, row);
    const u64 from = own * part.scale_output + group * part.scale_group;
    loaded.type = part.scale_type;
    loaded.scale = load_bits(part.scales, from, part.scale_type);
    if (p.zero_kind == INTEGER) loaded.zero = zero_point(part, own, group);
    if (p.zero_kind == OFFSET) {
      loaded.offset_type = part.offset_type;
      loaded.offset = load_bits(part.zeros, own * part.zero_output + group * part.zero_group, part.offset_type);
    }
    if (p.factors) loaded.channel = static_cast<const float*>(part.channels)[own];
    loaded.there = true;
  }
  return loaded;
}

// A group's factor, and 128 less its zero point times that; 0 where there is no group.
[[maybe_unused]] DEV u16 factor_of(const Loaded& loaded) {
  if (!loaded.there) return 0;
  const float scale = float_of_loaded(loaded.scale, loaded.type);
  // The quotient is whole: a scale is its factor times that of the channel, exactly.  In a row of zeros all have 1.
  const u32 factor = loaded.channel == 0.f ? 1 : __float2uint_rn(__fdiv_rn(scale, loaded.channel));
  return u16(factor | (128 - loaded.zero * factor) << 8);
}

// `zeros`: bytes, or offsets in the type of the scales.
DEV void store_param(const Params& p, const Loaded& loaded, u32 at, u8* scales, u8* zeros) {
  store_float(scales, at, float_of_loaded(loaded.scale, loaded.type), p.scale_type);
  if (p.zero_kind == INTEGER) zeros[at] = u8(loaded.zero);
  if (p.zero_kind == OFFSET) store_float(zeros, at, float_of_loaded(loaded.offset, loaded.offset_type), p.scale_type);
}

// Bytes of 16 scales, of 16 zero points or offsets, and of the parameters of a unit, which has 16 rows of an atom.
DEV u32 scales_bytes(const Params& p) { return p.scale_type == F32 ? 64 : 32; }
DEV u32 zeros_bytes(const Params& p) {
  return p.factors ? 0 : p.zero_kind == INTEGER ? 16 : p.zero_kind == OFFSET ? scales_bytes(p) : 0;
}
[[maybe_unused]] DEV u32 params_bytes(const Params& p, u32 groups) {
  return p.multiples ? multiples_bytes(has_nibbles(p)) : groups * (scales_bytes(p) + zeros_bytes(p));
}

// A block makes one atom of layout/cuda_wna16.rs, from the strip of row `first` on. BITS: of a code's place there;
// FIELD: in the file. A GATED matrix has a kernel apart, so that this one takes no more registers.
template <int BITS, bool GATED, int FIELD>
__global__ void __launch_bounds__(THREADS, GATED ? 4 : 1) wna16(const Params p) {
  __shared__ __align__(16) u32 tile[OUTPUTS][STRIDE];
  // Blocks begin with a super-strip: 4 strips, at the end of the matrix fewer.
  const u32 strips = (p.n + 63) / 64, steps = (p.k + 127) / 128, super = blockIdx.x / (4 * steps) * 4;
  const u32 first = p.first / 64 + super, within = blockIdx.x - super * steps,
            wide = strips - first < 4 ? strips - first : 4;
  const u32 strip = first + within % wide, step = within / wide;
  const u32 groups = p.atom_group ? COLUMNS / p.atom_group : 0;
  const u64 at = u64(p.first / 64) * steps + blockIdx.x;
  const u32 of_params = params_bytes(p, groups);
  u8* atom = static_cast<u8*>(p.codes) + 4 * at * (256 * BITS + of_params);

  static_assert(THREADS == 4 * 64, "a thread for each scale of an atom, or for two");
  u32 group = threadIdx.x / 64;
  Loaded loaded;
  if (group < groups && !p.multiples)
    loaded = load_param(p, strip, step * 128 + group * p.atom_group, threadIdx.x % 64);
  fill<FIELD, GATED>(tile, p, strip * 64, step * 128, p.middle);
  // The two codes of a row from an even column on, in bytes 0 and 1.
  const auto pair = [&](int row, int column) -> u32 {
    return reinterpret_cast<const u16*>(tile[row])[column / 2] + (BITS < 8 ? 0x101 * p.raised : 0);
  };
  // The word of 8-bit codes of a step of 16 columns, from row and column on.
  const auto bytes_at = [&](int row, int column) -> u32 {
    return __byte_perm(pair(row, column), pair(row + 8, column), 0x5140);
  };
  if constexpr (BITS == 5 || BITS == 6) {
    const int warp = threadIdx.x / 64, lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2;
    u32 even[4], odd[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int row = warp * 16 + lane / 4, column = 64 * half + 16 * j + lane % 4 * 2;
      even[j] = bytes_at(row, column), odd[j] = bytes_at(row, column + 8);
    }
    store_planes_of_bytes<BITS>(atom + warp * (256 * BITS) + half * (128 * BITS), lane, even, odd);
  }
  constexpr int QUADS = BITS == 5 || BITS == 6 ? 0 : BITS == 8 ? 512 : 256;  // of words of 4 or 8 bits
#pragma unroll
  for (int i = threadIdx.x; i < QUADS; i += THREADS) {
    const int lane = i % 32;
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (BITS <= 4) {
        const int row = i / 64 * 16 + lane / 4, column = i / 32 % 2 * 64 + 16 * j + lane % 4 * 2;
        // Codes of a pair lie 16 bits apart.
        const u32 a = __byte_perm(pair(row, column), 0, 0x4140);
        const u32 b = __byte_perm(pair(row + 8, column), 0, 0x4140);
        const u32 c = __byte_perm(pair(row, column + 8), 0, 0x4140);
        const u32 d = __byte_perm(pair(row + 8, column + 8), 0, 0x4140);
        words[j] = a | b << 4 | c << 8 | d << 12;
      } else {
        const int row = i / 128 * 16 + lane / 4;
        const int column = i / 32 % 4 * 32 + 16 * (j / 2) + 8 * (j % 2) + lane % 4 * 2;
        words[j] = bytes_at(row, column);
      }
    }
    if constexpr (BITS < 4)
      store_planes<BITS>(atom + i / 32 * (128 * BITS), lane, words);
    else
      reinterpret_cast<uint4*>(atom)[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (p.multiples) return;
  u8* scales = atom + 1024 * BITS + threadIdx.x % 64 / 16 * of_params;
  if (p.factors) {
    if (group < groups) reinterpret_cast<u16*>(scales + group * scales_bytes(p))[threadIdx.x % 16] = factor_of(loaded);
    return;
  }
  u8* zeros = scales + groups * scales_bytes(p);
#pragma unroll 1
  while (group < groups) {
    store_param(p, loaded, threadIdx.x % 16, scales + group * scales_bytes(p), zeros + group * zeros_bytes(p));
    if ((group += 4) < groups) loaded = load_param(p, strip, step * 128 + group * p.atom_group, threadIdx.x % 64);
  }
}

// What atoms have in the place of scales and offsets that are multiples of halves, as layout/cuda_wna16/multiples.rs
// says: a block has a strip, and of it 8 atoms.
extern "C" __global__ void __launch_bounds__(THREADS) wna16_multiples(const Params p) {
  const u32 strips = (p.n + 63) / 64, steps = (p.k + 127) / 128, blocks = (steps + 7) / 8;
  const u32 strip = p.first / 64 + blockIdx.x / blocks, step = blockIdx.x % blocks * 8 + threadIdx.x % 8;
  if (step >= steps) return;
  const u32 pair = threadIdx.x / 8, row = strip * 64 + pair / 8 * 16 + pair % 8, group = step * (128 / p.atom_group);
  const u32 super = strip & ~3u, wide = strips - super < 4 ? strips - super : 4;
  const u64 at = u64(super) * steps + u64(step) * wide + (strip - super);
  const bool nibbles = has_nibbles(p);
  const u32 codes = 256 * p.atom_bits, bytes = multiples_bytes(nibbles);
  u8* to = static_cast<u8*>(p.codes) + 4 * at * (codes + bytes) + 4 * codes + pair / 8 * bytes;
  const Multiples s = load_multiples(p, row, group, false), s8 = load_multiples(p, row + 8, group, false);
  const u32 of_scales = s.half | s8.half << 16;
  u32 words[4], last = of_scales;
  if (nibbles) {
    const Multiples o = load_multiples(p, row, group, true), o8 = load_multiples(p, row + 8, group, true);
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = s.factors[2 * i] | o.factors[2 * i] << 4 | s8.factors[2 * i] << 8 | o8.factors[2 * i] << 12 |
                 s.factors[2 * i + 1] << 16 | o.factors[2 * i + 1] << 20 | s8.factors[2 * i + 1] << 24 |
                 o8.factors[2 * i + 1] << 28;
    *reinterpret_cast<uint2*>(to + last_of_pair<true>(pair % 8)) = make_uint2(of_scales, o.half | o8.half << 16);
  } else if (p.zero_kind == OFFSET) {
    const Multiples o = load_multiples(p, row, group, true), o8 = load_multiples(p, row + 8, group, true);
#pragma unroll
    for (int g = 0; g < 4; g++)
      words[g] = s.factors[g] | s8.factors[g] << 16 | o.factors[g] << 6 | o8.factors[g] << 22 |
                 (of_scales >> (16 * (g % 2) + g / 2 * 4) & 15) << 12 |
                 (of_scales >> (16 * (g % 2) + g / 2 * 4 + 8) & 15) << 28;
    last = o.half | o8.half << 16;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const auto byte = [](u32 factor) { return (factor + 128) & 0xff; };
      words[i] = byte(s.factors[2 * i]) | byte(s8.factors[2 * i]) << 8 | byte(s.factors[2 * i + 1]) << 16 |
                 byte(s8.factors[2 * i + 1]) << 24;
    }
  }
  *reinterpret_cast<uint4*>(to + words_of_pair(pair % 8)) = make_uint4(words[0], words[1], words[2], words[3]);
  if (!nibbles) *reinterpret_cast<u32*>(to + last_of_pair<false>(pair % 8)) = last;
}

// Scales and zero points where a row has one of each: a block has those of a strip.
extern "C" __global__ void wna16_rows(const Params p) {
  const u32 strip = p.first / 64 + blockIdx.x;
  if (p.factors) {
    const u32 at = threadIdx.x, row = strip * 64 + at / 16 * 16 + at % 16 / 2 + 8 * (at % 2);
    const Part& part = part_of(p, row);
    const float scale = row < p.n ? static_cast<const float*>(part.channels)[own_row(p, part, row)] : 0.f;
    static_cast<u16*>(p.scales)[strip * 64 + at] = p.scale_type == F16 ? half_of_float(scale) : bfloat_of_float(scale);
    return;
  }
  u8* to = static_cast<u8*>(p.scales) + u64(strip) * (4 * (scales_bytes(p) + zeros_bytes(p)));
  store_param(p, load_param(p, strip, 0, threadIdx.x), threadIdx.x, to, to + 4 * scales_bytes(p));
}

// A block makes the words of one tile of layout/cuda_plain.rs; FIELD: bits of a code's place.
template <int FIELD> __global__ void __launch_bounds__(THREADS) plain(const Params p) {
  constexpr int PER_WORD = 32 / FIELD, WORDS = COLUMNS / PER_WORD;
  __shared__ __align__(16) u32 tile[OUTPUTS][STRIDE];
  const u32 steps = (p.k + 127) / 128, row0 = p.first + blockIdx.x / steps * OUTPUTS, step = blockIdx.x % steps;
  fill<FIELD>(tile, p, row0, step * COLUMNS, 0);
  const u32 words = (p.k + PER_WORD - 1) / PER_WORD;
#pragma unroll
  for (int i = threadIdx.x; i < OUTPUTS * WORDS; i += THREADS) {
    const int output = i % OUTPUTS, t = i / OUTPUTS;
    const u32* bytes = &tile[output][t * (8 / FIELD)];
    u32 word = 0;
#pragma unroll
    for (int j = 0; j < 8 / FIELD; j++) {
      // Four bytes to four fields.
      u32 four = bytes[j];
      if constexpr (FIELD == 4) {
        four = (four | four >> 4) & 0x00ff00ff;
        four = (four | four >> 8) & 0xffff;
      }
      if constexpr (FIELD == 2) {
        four = (four | four >> 6) & 0x000f000f;
        four = (four | four >> 12) & 0xff;
      }
      word |= four << (4 * FIELD * j % 32);
    }
    const u32 row = row0 + output, at = step * WORDS + t;
    if (row < p.n && at < words) static_cast<u32*>(p.codes)[u64(at) * p.n + row] = word;
  }
}

// Scales and zeros of layout/cuda_plain.rs: a block has 256 rows of one group.
extern "C" __global__ void plain_params(const Params p) {
  const u32 row = p.first + blockIdx.x / p.groups * THREADS + threadIdx.x, group = blockIdx.x % p.groups;
  if (row >= p.n) return;
  const Part& part = part_of(p, row);
  const u32 own = row - part.top;
  const u64 to = u64(group) * p.n + row;
  const float scale = load_float(part.scales, own * part.scale_output + group * part.scale_group, part.scale_type);
  store_float(p.scales, to, scale, p.scale_type);
  if (p.zero_kind == INTEGER) static_cast<u16*>(p.zeros)[to] = zero_point(part, own, group);
  if (p.zero_kind == OFFSET) {
    const float offset = load_float(part.zeros, own * part.zero_output + group * part.zero_group, part.offset_type);
    store_float(p.zeros, to, offset, p.scale_type);
  }
}

// What the codes of one tile stand for, [n][k] in f32, computed in f64 and rounded once; FIELD: bits of a code's place.
template <int FIELD> __global__ void __launch_bounds__(THREADS) values(const Params p) {
  __shared__ __align__(16) u32 tile[OUTPUTS][STRIDE];
  const u32 steps = (p.k + 127) / 128, row0 = p.first + blockIdx.x / steps * OUTPUTS;
  const u32 column = blockIdx.x % steps * COLUMNS + threadIdx.x % COLUMNS;
  fill<FIELD>(tile, p, row0, column - threadIdx.x % COLUMNS, 0);
  if (column >= p.k) return;
  // `zeros`: the group of each column, where they are not in their order.
  const u32 group = p.zeros ? static_cast<const u32*>(p.zeros)[column] : column / p.group;
#pragma unroll 1
  for (u32 i = threadIdx.x / COLUMNS; i < OUTPUTS && row0 + i < p.n; i += THREADS / COLUMNS) {
    const u32 row = row0 + i;
    const Part& part = part_of(p, row);
    const u32 own = row - part.top;
    const double code = reinterpret_cast<const u8*>(tile[i])[threadIdx.x % COLUMNS];
    const double scale = load_float(part.scales, own * part.scale_output + group * part.scale_group, part.scale_type);
    double value;
    if (p.zero_kind == OFFSET)
      value = scale * code + load_float(part.zeros, own * part.zero_output + group * part.zero_group, part.offset_type);
    else
      value = scale * (code - (p.zero_kind == INTEGER ? zero_point(part, own, group) : p.middle));
    static_cast<float*>(p.codes)[u64(row) * p.k + column] = float(value);
  }
}
