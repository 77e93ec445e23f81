// Packed weights of wna16 and wna8 kernels, and the form of their numbers.
//
// PACKED WEIGHTS (one copy on the device serves every m, fp16 and bf16 x, mma.sync and wgmma)
//   W[n][k] is padded to n % 64 == 0 and k % 128 == 0 with codes equal to the zero point (symmetric: 8 or 128) and
//   scales of zero.
//   strip = 64 rows;  super-strip = 4 strips (the last one may have 1..3);  atom = one strip x 128 k;
//   unit = the 16 rows of an atom that a warp multiplies.
//   Order of atoms: super-strip, then k, then strip:    k 0: s0 s1 s2 s3 | k 128: s0 s1 s2 s3 | ...
//   so 1, 2 or 4 strips of one k step are one linear piece, and 4 strips over a run of k are one linear stream.
//   atom = [codes of 4 units: 256*BITS bytes each] [parameters of 4 units]
//   parameters = [scales: 128/GROUP x 32 bytes, in f32 64]
//                [zero points: 128/GROUP x 16 bytes, where there are any; or offsets, as the scales]
//   so what a warp needs are two pieces. Codes begin at multiples of 64 bytes, since copies of others were slower.
//   codes, 4 bits: [half h 0..1][lane 0..31][word j 0..3]:
//   one word = the 8 codes of one lane for one k16 step.
//     Rows R = lane/4 and R+8 of the unit;   k0 = 64h + 16j + 2*(lane%4)
//       bits  0.. 3: (R  , k0  )   bits 16..19: (R  , k0+1)      A register 0 of mma m16n8k16 and wgmma m64k16
//       bits  4.. 7: (R+8, k0  )   bits 20..23: (R+8, k0+1)      A register 1
//       bits  8..11: (R  , k0+8)   bits 24..27: (R  , k0+9)      A register 2
//       bits 12..15: (R+8, k0+8)   bits 28..31: (R+8, k0+9)      A register 3
//     So a byte has two rows of one column: as bytes the codes of R are one mask away, those of R+8 times 16 another.
//   codes, 2 and 3 bits: [half h 0..1] { [lane 0..31][word j 0..1], of 3 bits [lane 0..31] one word more }:
//   word j of the first has the lower 2 bits of the k16 steps 4h + 2j and 4h + 2j + 1: those that their words of 4-bit
//     codes would have in bits 0, 1 and 2, 3 of each nibble;
//   the other word has the upper bits of steps 4h .. 4h + 3, in bits 0 .. 3 of each nibble.
//   Where only integers are multiplied, symmetric ones become codes of 4 bits, whose zero is 8, by an addition.
//   codes of a TABLE: as those of 4 bits their numbers in it, which has codes of 8 bits.
//   codes, 8 bits (biased: b = q + 128): [quarter i 0..3][lane 0..31][word j 0..3]:
//   words 2j', 2j'+1 are the k16 step 2i + j'.
//     k0 = 32i + 16j' + 2*(lane%4)
//       even word, bytes 0..3: (R, k0) (R+8, k0) (R, k0+1) (R+8, k0+1)
//       odd word: the same for k0+8
//   codes, 6 bits: [half h 0..1] { [lane 0..31][word j 0..3], [lane 0..31][word i 0..1] }:
//   word j of the first has the lower 4 bits of the k16 step 4h + j: those that its even word of 8-bit codes would have
//     in the lower nibbles, byte for byte, those of the odd word in the upper ones;
//   word i of the second has the upper 2 bits of steps 4h + 2i and 4h + 2i + 1, in bits 2t, 2t+1 of each byte:
//     t = 0, 1: even and odd word of the first step; t = 2, 3: of the second
//   codes, 5 bits: [half h 0..1] { [lane 0..31][word j 0..3], [lane 0..31] one word more }:
//   the first as of 6 bits; the other has the upper bits of steps 4h .. 4h + 3, in bit t of each byte:
//     t = 2j, 2j + 1: even and odd word of step 4h + j
//   scales and offsets of a group: [i 0..7] {row i, row i+8}, 2 or 4 bytes each.
//   zero points of a group: the same order, one byte each (4 bits: 0..16; 8 bits: 0..255, of biased codes).
//   GROUP 0 (one scale a row): units have codes only; a second array holds, for each strip, 128 bytes of scales and,
//   where there are any, 64 bytes of zero points, those of 16 rows in the order above, one behind the other.
//   FACTORS (scales on two levels, 4 bits): the second array has the scales of the rows; the 2 bytes of a row's scale
//   in a group are its factor f and 128 - z f: q f + (128 - z f) is the weight as a byte, plus 128.
//   MULTIPLES (scales and offsets are whole multiples of halves that a unit has for each row): instead of scales and
//   offsets [i 0..7][word 0..3], [i 0..7] last word, of rows R = i and i+8:
//     with offsets, groups of 32: word g has the factors of group g: bits 0.. 5 of the scale of row R, 16..21 of R+8,
//       6..11 and 22..27 of their offsets; what is left of the four words, 4 bits above each offset, are the halves of
//       the scales of R and R+8: byte i has its lower 4 bits in word i/2, the upper ones in word 2 + i/2; the last word
//       has the halves of the offsets
//     with offsets, groups of 16 (NIBBLES): byte 2(g%2) of word g/2 has factors of group g and row R, of the scale in
//       its lower nibble, of the offset in the upper one; the next byte those of R+8; two last words, [i 0..7] each,
//       have the halves of the scales and of the offsets
//     without, groups of 16: byte 2(g%2) of word g/2 has the factor of group g and row R, the next one that of R+8,
//       plus 128 each; the last word has the halves of the scales
#pragma once
#include "multiples.cuh"

constexpr int BITS = HB_BITS;  // 2, 3, 4, 5, 6 or 8
#ifdef HB_TABLE_0
constexpr bool TABLE = true;  // codes are numbers in a table, four of which a word of it has
constexpr u32 TABLE_0 = HB_TABLE_0, TABLE_1 = HB_TABLE_1, TABLE_2 = HB_TABLE_2, TABLE_3 = HB_TABLE_3;
#else
constexpr bool TABLE = false;
constexpr u32 TABLE_0 = 0, TABLE_1 = 0, TABLE_2 = 0, TABLE_3 = 0;
#endif
constexpr int FIELD = BITS <= 4 && !TABLE ? 4 : 8;  // of codes in the words that are multiplied
constexpr int MIDDLE = TABLE ? 128 : 1 << (BITS - 1);  // the code of zero, where there are no zero points
constexpr bool BF16 = HB_BF16;  // type of x: bf16 or fp16
#ifdef HB_SCALE_BF16
constexpr bool SCALE_BF16 = HB_SCALE_BF16;  // type of the scales
#else
constexpr bool SCALE_BF16 = BF16;  // unless told, that of x
#endif
constexpr int OUT = HB_OUT;  // type of y: 0 fp16, 1 bf16, 2 fp32
constexpr int GROUP = HB_GROUP;  // 16, 32, 64, 128; 0: one scale a row
constexpr bool ZERO = HB_ZERO;  // integer zero points
constexpr int ACTIVATION = HB_ACTIVATION;  // 0 none, 1 clamp to HB_LOW .. HB_HIGH, 2 GELU, 3 GELU (tanh), 4 SiLU
// Of each 16 rows the first 8 are gates of the others: an output for both, activation(gate) * other. Instead of an
// activation 5: gate * sigmoid(HB_LOW * gate) * (other + 1), of a gate and another that HB_HIGH bounds.
#ifdef HB_GATED
constexpr bool GATES = HB_GATED;
#else
constexpr bool GATES = false;
#endif

#ifdef HB_FACTORS
constexpr bool FACTORS = HB_FACTORS;  // scales on two levels
#else
constexpr bool FACTORS = false;
#endif

#ifdef HB_SCALE_F32
constexpr bool SCALE_F32 = HB_SCALE_F32;  // scales (and offsets) in f32
#else
constexpr bool SCALE_F32 = false;
#endif
#ifdef HB_W_OFFSET
constexpr bool W_OFFSET = HB_W_OFFSET;  // w = scale * code + offset
#else
constexpr bool W_OFFSET = false;
#endif
#ifdef HB_MULTIPLES
constexpr bool MULTIPLES = HB_MULTIPLES;  // scales and offsets are multiples of halves
#else
constexpr bool MULTIPLES = false;
#endif

// Factors of scales and offsets have 4 bits each, and lie side by side.
constexpr bool NIBBLES = MULTIPLES && W_OFFSET && GROUP == 16;
// Codes times the factors of scales are whole numbers that fp16 holds (15 * 63 below 2^11; of NIBBLES 3 * 15), as
// factors of offsets are: what is left is one scale and one offset for all columns of a row of an atom.
constexpr bool FOLDED = MULTIPLES && W_OFFSET && (BITS == 4 || NIBBLES) && !BF16;
constexpr int SCALED = FOLDED ? 128 : GROUP;  // columns whose sums are scaled together; 0: all of a row

// Offsets are of codes less the one that comes nearest to 0 (Centred in decode_codes.cuh).
constexpr bool CENTRED = W_OFFSET && !MULTIPLES;
// Codes count from 0, and sums of what multiplies them come with x.
constexpr bool FROM_ZERO = ZERO || W_OFFSET;

constexpr int GROUPS = GROUP ? 128 / GROUP : 0;
constexpr int GROUP_SCALES = SCALE_F32 ? 64 : 32,
              GROUP_ZEROS = ZERO       ? 16
                            : W_OFFSET ? GROUP_SCALES
                                       : 0;  // bytes of a group, of 16 rows
constexpr int SUM_GROUP = FACTORS ? 0 : GROUP, SUM_GROUPS = FACTORS ? 0 : GROUPS;  // whose sums are scaled apart
// Bytes of a unit's codes; where zero points or offsets lie among its parameters; their bytes; where those of the first
// unit begin in an atom; its bytes.
constexpr int UNIT_CODES = 256 * BITS, ZEROS = GROUP_SCALES * GROUPS,
              UNIT_PARAMS = MULTIPLES ? multiples_bytes(NIBBLES) : ZEROS + GROUP_ZEROS * GROUPS,
              PARAMS = 4 * UNIT_CODES, ATOM = PARAMS + 4 * UNIT_PARAMS;
constexpr int ROW_BLOCK = ZERO ? 192 : 128;  // bytes a strip in the array of GROUP 0

static_assert(BITS >= 2 && BITS <= 8 && BITS != 7 && (BITS != 6 || MULTIPLES) && (BITS != 5 || !ZERO), "bits");
static_assert(!MULTIPLES || (SCALE_F32 && !ZERO && (GROUP == 16 || (GROUP == 32 && W_OFFSET))), "forms of multiples");
static_assert(!TABLE || (BITS == 4 && !FROM_ZERO && !MULTIPLES && !FACTORS), "tables of symmetric codes");
static_assert(!FACTORS || (BITS == 4 && GROUP != 0 && !ZERO), "factors have the zero points in them");
static_assert(GROUP == 0 || GROUP == 16 || GROUP == 32 || GROUP == 64 || GROUP == 128, "group");
static_assert(GROUP != 0 || (!SCALE_F32 && !W_OFFSET), "rows have half scales, and no offsets");
static_assert(!(ZERO && W_OFFSET), "zero points or offsets");
