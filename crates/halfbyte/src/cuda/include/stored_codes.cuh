// Codes as files hold them: where they lie, and how one or several of them are read, one a byte.
#pragma once
#include "floats.cuh"
#include "random.cuh"

enum Kind : u32 { BYTES = 0, ALONG = 1, DOWN = 2, ACROSS = 3, RANDOM = 4, BLOCKS = 5, TABLES = 6 };

// As `Fields` in pack.rs and layout/codes/blocks.rs: where a part of each code of a block lies.
struct Fields {
  u32 at, run, bits;
};

// As `Part` in pack.rs: rows that lie in one tensor, from its first on.
struct Part {
  const void* codes;  // of random ones the number of the first word
  u64 stride;  // bytes or words from a line of codes to the next
  const void* scales;
  u64 scale_output, scale_group;  // elements from a value to that of the next output, and of the next group
  const void* zeros;  // u16 zero points, or offsets
  u64 zero_output, zero_group;
  // Scales of the rows in f32, where scales have two levels; or the halves that scales are multiples of, as f16.
  const void* channels;
  const u16* offset_halves;  // the same of offsets
  u32 top, rows;  // the first row in the packed matrix, and how many there are
  Kind kind;
  u32 flip;  // bits to invert in each of four bytes; of random ones the bits that codes have
  FloatType scale_type, offset_type;
  u32 block_codes, block_bytes;  // of a block
  Fields low, high;
  u32 add;  // to each of four codes
  // Of multiples, whose `scales` and `zeros` are factors in signed bytes: groups that share a half, and what factors
  // are times.
  u32 block;
  int scale_sign, offset_sign;
  u32 table[4];  // of TABLES: the codes that fields of four bits stand for, one a byte
};

// The codes of a word, the lowest bits first, one a byte.
template <int BITS> DEV void spread(u32 word, u32 (&bytes)[8 / BITS]) {
  if constexpr (BITS == 8) bytes[0] = word;
  if constexpr (BITS == 4) {
    const u32 even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
    bytes[0] = __byte_perm(even, odd, 0x5140), bytes[1] = __byte_perm(even, odd, 0x7362);
  }
  if constexpr (BITS == 2) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 four = word >> (8 * i) & 0xff, pairs = (four | four << 12) & 0x000f000f;
      bytes[i] = (pairs | pairs << 6) & 0x03030303;
    }
  }
}

// A word of random codes.
[[maybe_unused]] DEV u32 drawn(const Part& part, u32 row, u32 word) {
  return random_word(reinterpret_cast<u64>(part.codes) + row * part.stride + word) & part.flip;
}

// The fields of four neighbouring codes of a block, the first of which has a number that 4 divides, one a byte.
[[maybe_unused]] DEV u32 four_fields(const Part& part, const u8* block, const Fields& fields, u32 code) {
  const u32 per_run = 8 * fields.run / fields.bits, shift = code % per_run / fields.run * fields.bits;
  const u8* bytes = block + fields.at + code / per_run * fields.run + code % fields.run;
  if (fields.run == 1) {
    // Of one bit each, side by side: bit i goes to byte i.
    if (fields.bits == 1) return (*bytes >> shift & 15u) * 0x00204081 & 0x01010101;
    // Of four, in two bytes: each goes to two bytes.
    const u32 apart = bytes[0] | u32(bytes[1]) << 16;
    return (apart | apart << 4) & 0x0f0f0f0f;
  }
  u32 word;
  if ((part.block_bytes | fields.at) & 1) {
    word = bytes[0] | u32(bytes[1]) << 8 | u32(bytes[2]) << 16 | u32(bytes[3]) << 24;
  } else {
    const u16* halves = reinterpret_cast<const u16*>(bytes);
    word = halves[0] | u32(halves[1]) << 16;
  }
  return word >> shift & ((1u << fields.bits) - 1) * 0x01010101;
}

// What a table holds at four numbers of four bits, one a byte.
[[maybe_unused]] DEV u32 looked_up(const u32 (&table)[4], u32 numbers) {
  // The lower three bits of each choose among eight bytes, the fourth between the halves of the table.
  u32 lower = numbers & 0x07070707;
  lower = (lower | lower >> 4) & 0x00ff00ff;
  lower |= lower >> 8;
  const u32 second = (numbers >> 3 & 0x01010101) * 0xff;
  return (__byte_perm(table[0], table[1], lower) & ~second) | (__byte_perm(table[2], table[3], lower) & second);
}

// Four neighbouring codes that lie in a block, one a byte.
[[maybe_unused]] DEV u32 four_of_block(const Part& part, u32 row, u32 column) {
  const u8* block = static_cast<const u8*>(part.codes) + row * part.stride;
  block += u64(column / part.block_codes) * part.block_bytes;
  const u32 code = column % part.block_codes;
  u32 codes = four_fields(part, block, part.low, code);
  if (part.high.bits > 0) codes |= four_fields(part, block, part.high, code) << part.low.bits;
  if (part.kind == TABLES) return looked_up(part.table, codes);
  return (codes + part.add) ^ part.flip;
}

// One code, wherever it lies.
template <int BITS> DEV u32 code(const Part& part, u32 row, u32 column) {
  constexpr u32 PER_WORD = 32 / BITS, MASK = (1u << BITS) - 1;
  const u32* words = static_cast<const u32*>(part.codes);
  switch (part.kind) {
    case BYTES: return static_cast<const u8*>(part.codes)[row * part.stride + column] ^ (part.flip & 0xff);
    case ALONG: return words[row * part.stride + column / PER_WORD] >> (column % PER_WORD * BITS) & MASK;
    case RANDOM: return drawn(part, row, column / PER_WORD) >> (column % PER_WORD * BITS) & MASK;
    case BLOCKS:
    case TABLES: return four_of_block(part, row, column & ~3u) >> (column % 4 * 8) & 0xff;
    case DOWN: return words[column / PER_WORD * part.stride + row] >> (column % PER_WORD * BITS) & MASK;
    default: return words[column * part.stride + row / 8] >> (4 * (row % 2 * 4 + row % 8 / 2)) & 15;
  }
}
