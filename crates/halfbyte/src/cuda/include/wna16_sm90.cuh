// What a configuration of the wNa16 GEMM for Hopper is made of, and what it is given.
#pragma once
#include "decode_codes.cuh"
#include "grouped.cuh"
#include "next_norm.cuh"
#include "windows.cuh"

// A configuration is compiled with -D; the host's config() chooses it from m, n, k and the number of multiprocessors.
constexpr int NT = HB_NT;  // tokens a tile
constexpr int WARPGROUPS = HB_WARPGROUPS;  // that convert and multiply
constexpr int STRIPS = HB_STRIPS;  // a warpgroup
constexpr int SETS = HB_SETS;  // the warpgroups are this many sets, which take the units of a tile in turn
constexpr bool WGMMA = HB_WGMMA;  // wgmma or mma.sync
constexpr bool EARLY = HB_EARLY;  // scale applied to the weight (one rounding), or to the sums of a group (none)
// Weights are computed in fp32 and then rounded: scales that are not of the type of x, and offsets.
constexpr bool EARLY_F32 = EARLY && (SCALE_F32 || W_OFFSET || SCALE_BF16 != BF16);
constexpr int STAGES_W = HB_STAGES_W;  // atoms of 128 k in the ring of W
constexpr int STAGES_X = HB_STAGES_X;  // stages in the ring of x
constexpr int BOXES = HB_BOXES;  // boxes of 64 k in a stage of x: 1 or 2
constexpr int SPLIT =
    HB_SPLIT;  // blocks of a cluster that share the k of one tile; 1: units are cut evenly over all blocks
constexpr int BLOCKS = HB_BLOCKS;  // blocks a multiprocessor has room for
constexpr int TRIGGER =
    HB_TRIGGER;  // the next kernel may start when a block has this many units left to copy; 0: at once
constexpr int PREFETCH =
    HB_PREFETCH;  // units that are fetched into L2 behind the first round of the ring, before the dependency wait

// x is windows on images, in copies of so many columns: 64, or 32, of which two lie behind each other for a box; or a
// matrix: 0.
#ifdef HB_CONV
constexpr int WINDOW = HB_CONV;
#else
constexpr int WINDOW = 0;
#endif

constexpr int TILE_STRIPS = WARPGROUPS / SETS * STRIPS, SET_WARPS = WARPGROUPS / SETS * 4;
constexpr bool JOINT = NT <= 32 || BLOCKS > 1;  // W and x in one ring with one set of barriers
constexpr bool PRODUCERS =
    !JOINT || WARPGROUPS == 4;  // a whole warpgroup for the copies, whose registers go to the others
constexpr int BOX = NT * 128, STAGE_X = BOXES * BOX, STAGE_W = TILE_STRIPS * ATOM;
// A warp beside the producer sums each unit of x, for offsets that mma.sync multiplies by what is FOLDED of them.
constexpr bool SUMMING_WARP = MULTIPLES && W_OFFSET && BITS == 4 && !WGMMA;
constexpr int THREADS = WARPGROUPS * 128 + (PRODUCERS ? 128 : SUMMING_WARP ? 64 : 32);
constexpr int RING = STAGES_X * STAGE_X + STAGES_W * STAGE_W;
constexpr int BLOCKS_OF_8 =
    TILE_STRIPS * 4 * (NT / 8);  // parts of 16 rows x 8 tokens in a tile, 512 bytes of sums each
constexpr int SET_SUMS = RING;  // where sets leave their sums
constexpr int EXCHANGE =
    SET_SUMS + (SETS - 1) * BLOCKS_OF_8 * 512;  // SPLIT: where the blocks of a cluster leave theirs
constexpr int STAGED = NT < 64 || SPLIT > 1 || OUT == 2 ? 0
                       : NT % 64 == 0                   ? 64
                       : NT % 32 == 0                   ? 32
                                                        : 16;  // tokens that y is staged by
// Sums of x, in two parts of [tokens][4 groups] a stage, which offsets multiply where they are not part of weights: for
// wgmma sum_groups.cu made them before.
constexpr bool X_SUMS = W_OFFSET && WGMMA && !EARLY;
// Of a SUMMING_WARP: a B fragment of bf16 for each 8 tokens.
constexpr int SUMS_BYTES = X_SUMS || SUMMING_WARP ? 2 * NT * 16 : 0;
constexpr int STAGING = EXCHANGE;  // 128 bytes a staged token and warpgroup of a set
constexpr int X_SUMS_AT =
    EXCHANGE + SET_WARPS / 4 * STAGED * 128 + (SPLIT > 1 ? SPLIT * ((BLOCKS_OF_8 + SPLIT - 1) / SPLIT) * 512 : 0);
constexpr int BARRIERS = X_SUMS_AT + STAGES_X * SUMS_BYTES;
constexpr int SUMMED = BARRIERS + 16 * (STAGES_W + STAGES_X) + 48;  // barriers of a SUMMING_WARP
constexpr int FACTORS_OF_ROWS = SUMMED + (SUMMING_WARP ? 8 * STAGES_W : 0);  // of rows, for a norm that products share
constexpr int FOLDED_ROWS = 32;  // that have such, as in folded_norm.rs
constexpr int SHARED_BYTES = FACTORS_OF_ROWS + (NT <= FOLDED_ROWS ? 4 * FOLDED_ROWS : 0);

static_assert(NT % 8 == 0 && NT <= 256, "tokens");
static_assert(WINDOW == 0 || WINDOW == 32 || WINDOW == 64, "rows of a swizzle");
static_assert(TILE_STRIPS == 1 || TILE_STRIPS == 2 || TILE_STRIPS == 4, "strips");
static_assert(!JOINT || (BOXES == 2 && STAGES_X == STAGES_W), "a joint ring");
static_assert(WGMMA || (JOINT && !EARLY), "mma.sync is for few tokens");
static_assert(!WGMMA || EARLY || GROUP == 0 || GROUP == 128 || (STRIPS == 1 && NT <= 128),
              "registers for the sums of a group");
static_assert(SETS == 1 || (WARPGROUPS % SETS == 0 && STAGES_W % SETS == 0 && STAGES_X % (SETS * 2 / BOXES) == 0),
              "a stage belongs to one set");
static_assert(!X_SUMS || (!JOINT && BOXES == 2), "sums come with whole units of x");
static_assert(!W_OFFSET || GROUP == 32 || GROUP == 64, "groups of offsets");
static_assert(SPLIT <= 8, "clusters that every device takes");
static_assert(!PRODUCERS || BLOCKS == 1, "registers are shared out for one block");
static_assert(SHARED_BYTES <= 232448, "shared memory");
static_assert(SHARED_BYTES == HB_SHARED_BYTES && THREADS == HB_THREADS, "the host's sums");

// A norm that two products share (folded_norm.cuh).
struct NormOperands {
  u64* squares;  // [m][BINS]
  void* scaled;  // [m][width], of the type of x
  const float* weight;  // [width]
  const float* scales;  // [m]
  NextOperands next;
  float eps;
  int width;  // of the stream
};

// What the kernel is given, besides the tensor map of x: {k, m} of 2-byte numbers, box {64, min(NT, m)}, 128-byte
// swizzle, zero fill. x starts at a multiple of 16 bytes and its rows are a multiple of 16 bytes apart; w and y start
// at a multiple of 16 bytes. The host keeps units * sharers below 2^32, all units below 2^31, and steps >= SPLIT.
struct Arguments {
  const u8* w;  // packed weights
  const u8* rows_of_scales;  // GROUP 0: scales (and zero points) of the rows
  void* y;  // [m][n]
  const float* bias;  // [n], or null
  float* parts;  // 2 * workers * TILE_STRIPS * 64 * NT floats; SPLIT: null
  u32* counters;  // cut tiles * SET_WARPS / 4 words, zero before; every launch leaves zeros; SPLIT: null
  int m, n, box_bytes;  // box_bytes: 128 * rows of a box of x
  int steps, rows, columns;  // atoms along k; tiles along n and along m
  int waves, workers, sharers;  // rounds of whole tiles; grid / SPLIT; workers that share the cut tiles
  int first, units;  // first cut tile (waves * workers); units in all cut tiles
  int padding;  // of this struct
  const float* x_sums;  // X_SUMS: [columns][steps][SUMS_BYTES / 4]; else null
  NormOperands norm;  // if the kernel is compiled with HB_FOLDED_NORM
  // Outputs from a token of y to the next.
  __device__ __forceinline__ int pitch_of_y() const { return GATES ? n / 2 : n; }
};

// With windows: x is images, and its map one of im2col: boxes of NT pixels x WINDOW channels.
struct ConvArguments : Arguments {
  Windows windows;
  __device__ __forceinline__ int pitch_of_y() const { return windows.pitch; }  // a convolution may have groups
};
// With several weights, each with rows of its own: m is all rows of x, and what follows `columns` is not given.
struct GroupedArguments : Arguments {
  GroupedOperands grouped;
};
typedef Choice<WINDOW != 0, ConvArguments, Choice<GROUPED, GroupedArguments, Arguments>::Type>::Type Given;
