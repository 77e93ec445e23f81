// What a configuration of the wNa8 GEMM for Hopper is made of, and what it is given.
#pragma once
#include "grouped.cuh"
#include "weight_atom.cuh"
#include "windows.cuh"

// A configuration is compiled with -D; the host's config() chooses it from m, n, k and the number of multiprocessors.
constexpr int NT = HB_NT;  // tokens a tile: 8, 16, 32, 64, 128; 256 with one scale a row
constexpr int WARPGROUPS = HB_WARPGROUPS;  // that convert and multiply
constexpr int STRIPS = HB_STRIPS;  // a warpgroup
constexpr int STAGES = HB_STAGES;  // units of W and x in flight
constexpr int SPLIT =
    HB_SPLIT;  // blocks of a cluster that share the k of one tile; 1: units are cut evenly over all blocks
constexpr int BLOCKS = HB_BLOCKS;  // blocks a multiprocessor has room for
constexpr int TRIGGER =
    HB_TRIGGER;  // the next kernel may start when a block has this many units left to copy; 0: at once
constexpr int PREFETCH =
    HB_PREFETCH;  // units that are fetched into L2 behind the first round of the ring, before the dependency wait
constexpr bool OFFSET = HB_OFFSET;  // x has offsets beside scales

// x is windows on images, in copies of so many columns: 64; or a matrix: 0.
#ifdef HB_CONV
constexpr int WINDOW = HB_CONV;
#else
constexpr int WINDOW = 0;
#endif

constexpr bool SYNC = NT <= 16;  // mma.sync, not wgmma
constexpr int SETS = 1;
constexpr int TILE_STRIPS = WARPGROUPS * STRIPS, SET_WARPS = WARPGROUPS * 4;
constexpr bool PRODUCERS = NT > 32;  // a whole warpgroup for the copies, whose registers go to the others
constexpr int THREADS = WARPGROUPS * 128 + (PRODUCERS ? 128 : 32);
// A thread's; a producer's with those of two consumers are 504 of 512, and with those of one of two blocks 256 of 256.
constexpr int PRODUCER_REGISTERS = !SUM_GROUP    ? 40
                                   : BLOCKS == 2 ? 48
                                                 : 56,
              CONSUMER_REGISTERS = BLOCKS == 2 ? 256 - PRODUCER_REGISTERS
                                   : SUM_GROUP ? 224
                                               : 232;
// Of each group and token: a scale, the sum of the codes where weights have zero points or offsets, an
// offset.
constexpr int TERMS = 1 + FROM_ZERO + OFFSET;
// A stage: 128 bytes of codes a token in 128-byte swizzle, atoms, and the terms of its groups, term by term.
// With windows: two boxes of 64 codes a token in 64-byte swizzle, and the terms of a group token by token, four numbers
// each.
constexpr bool TERMS_BY_TOKEN = WINDOW != 0;
constexpr int GROUP_TERMS = TERMS_BY_TOKEN ? NT * 16 : TERMS * NT * 4;
constexpr int BOX = NT * 128, STAGE_TERMS = SUM_GROUPS * GROUP_TERMS;
constexpr int STAGE_W = TILE_STRIPS * ATOM, W_AT = STAGES * BOX,
              TERMS_AT = W_AT + STAGES * STAGE_W;  // copies of W go to whole lines of 128 bytes
constexpr int RING = TERMS_AT + STAGES * STAGE_TERMS;
constexpr int BLOCKS_OF_8 =
    TILE_STRIPS * 4 * (NT / 8);  // parts of 16 rows x 8 tokens in a tile, 512 bytes of sums each
constexpr int EXCHANGE = RING;  // SPLIT: where the blocks of a cluster leave their sums
constexpr int STAGED = NT < 64 || SPLIT > 1 || OUT == 2 ? 0 : 64;  // tokens that y is staged by
constexpr int STAGING = EXCHANGE;  // 128 bytes a staged token and warpgroup
constexpr int BARRIERS =
    EXCHANGE + WARPGROUPS * STAGED * 128 + (SPLIT > 1 ? SPLIT * ((BLOCKS_OF_8 + SPLIT - 1) / SPLIT) * 512 : 0);
constexpr int SHARED_BYTES = BARRIERS + 16 * STAGES + 32;

static_assert(NT == 8 || NT == 16 || NT == 32 || NT == 64 || NT == 128 || (NT == 256 && SUM_GROUP == 0), "tokens");
static_assert(TILE_STRIPS == 1 || TILE_STRIPS == 2 || TILE_STRIPS == 4, "strips");
static_assert(TERMS_AT % 128 == 0, "copies of terms go to whole lines, too");
static_assert(STAGES >= 2 && SPLIT <= 8, "rings and clusters");
static_assert(!PRODUCERS || BLOCKS == 1 || (BLOCKS == 2 && WARPGROUPS == 1),
              "registers are shared out for one block, or for two of one consumer");
static_assert(SHARED_BYTES <= 232448, "shared memory");
static_assert(WINDOW == 0 || (WINDOW == 64 && !SYNC && GROUP != 0), "windows have a scale a position");
static_assert(SHARED_BYTES == HB_SHARED_BYTES && THREADS == HB_THREADS, "the host's sums");

// What the kernel is given, besides the tensor map of the codes of x: {pitch, m} of bytes, box {128, min(NT, m)},
// 128-byte swizzle, zero fill. Codes of 16 columns lie in the order that quantize_activations.cu gives them.  w, y and
// the terms start at multiples of 16 bytes. The host keeps units * sharers below 2^32, all units below 2^31, and steps
// >= SPLIT.
struct Arguments {
  const u8* w;  // packed weights
  const u8* rows_of_scales;  // GROUP 0 or FACTORS: scales (and zero points) of the rows
  const float* terms;  // [groups of x][TERMS][m_pitch]: scales, sums, offsets
  void* y;  // [m][n]
  const float* bias;  // [n], or null
  float* parts;  // 2 * workers * TILE_STRIPS * 64 * NT floats; SPLIT: null
  u32* counters;  // cut tiles * WARPGROUPS words, zero before; every launch leaves zeros; SPLIT: null
  int m, n, k, box_bytes, m_pitch;  // box_bytes: 128 * rows of a box of x; m_pitch: a multiple of 4
  int steps, rows, columns;  // atoms along k; tiles along n and along m
  int waves, workers, sharers;  // rounds of whole tiles; grid / SPLIT; workers that share the cut tiles
  int first, units;  // first cut tile (waves * workers); units in all cut tiles
  u32 ratio;  // 2^32 / r + 1 where r groups of atoms have one group of x; 0: each has its own
  int groups;  // of x
  int padding;  // of this struct
  // Outputs from a token of y to the next.
  __device__ __forceinline__ int pitch_of_y() const { return GATES ? n / 2 : n; }
};

// With windows: x is images; its map, and one of the terms [pixels][groups][4], are of im2col.
struct ConvArguments : Arguments {
  Windows windows;
  __device__ __forceinline__ int pitch_of_y() const { return windows.pitch; }  // a convolution may have groups
};
// With several weights, each with rows of its own: m is all rows of x, and what follows `columns` is not given.
struct GroupedArguments : Arguments {
  GroupedOperands grouped;
};
typedef Choice<WINDOW != 0, ConvArguments, Choice<GROUPED, GroupedArguments, Arguments>::Type>::Type Given;
