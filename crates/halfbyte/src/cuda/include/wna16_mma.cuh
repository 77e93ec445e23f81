// What a configuration of the wNa16 GEMM by mma.sync is made of, and what it is given.
#pragma once
#include "grouped.cuh"
#include "decode_codes.cuh"
#include "windows.cuh"

// A configuration is compiled with -D; the host's config() chooses it.  A warpgroup is 4 warps, each with 16 rows of
// each of its strips.
constexpr int NT = HB_NT;  // tokens a tile
constexpr int WARPGROUPS = HB_WARPGROUPS;  // one behind the other along the rows
constexpr int STRIPS = HB_STRIPS;  // a warpgroup
constexpr int STEP = HB_STEP;  // k a stage: 64 or 128
constexpr int STAGES = HB_STAGES;  // of the ring of W and x
constexpr int BLOCKS = HB_BLOCKS;  // blocks that a multiprocessor has registers for

constexpr int SPLIT = 1, SET_WARPS = WARPGROUPS * 4;  // one block a worker, one set of warps a block
constexpr int THREADS = WARPGROUPS * 128;
constexpr int TILE_STRIPS = WARPGROUPS * STRIPS;
constexpr int HALVES = 128 / STEP, K16 = STEP / 16;  // stages an atom, and steps of the tensor cores a stage
// A strip of a stage has what 4 units have of its STEP columns, as an atom has it: codes, then parameters.
constexpr int STAGE_GROUPS = GROUP == 0 ? 0 : GROUP < STEP ? STEP / GROUP : 1;
constexpr int STAGE_CODES = 2 * BITS * STEP, STAGE_ZEROS = GROUP_SCALES * STAGE_GROUPS,
              STAGE_PARAMS = STEP == 128 ? UNIT_PARAMS : STAGE_ZEROS + GROUP_ZEROS * STAGE_GROUPS,
              STRIP_PARAMS = 4 * STAGE_CODES, STRIP_BYTES = STRIP_PARAMS + 4 * STAGE_PARAMS;
// x lies in boxes of 64 k, 128 bytes a token, whose 16-byte pieces are XORed with the token.
constexpr int BOX = NT * 128, STAGE_X = STEP / 64 * BOX, STAGE_W = TILE_STRIPS * STRIP_BYTES;
// Of 16 bytes: of a stage all of W, or its codes; a box of x.
constexpr int W_PIECES = STEP == 128 ? STAGE_W / 16 : TILE_STRIPS * STRIP_PARAMS / 16, X_PIECES = NT * 8;
constexpr int X_BYTES = 2;  // of a column of x
constexpr int STAGE_TERMS = W_OFFSET ? STAGE_GROUPS * NT * 4 : 0;  // sums of x [groups][tokens], which offsets multiply
constexpr bool PADDED = false;  // rows of x end with k
constexpr int WIDTH = NT < 16 ? NT : 16;  // tokens of a B fragment that are loaded at once
constexpr int PARTS = K16 - 1;  // a stage is filled in: steps of another one
constexpr int RING = STAGES * (STAGE_X + STAGE_W + STAGE_TERMS);
constexpr int STAGED = NT < 64 || OUT == 2 ? 0 : 32;  // tokens that y is staged by
constexpr int STAGING = RING;  // 128 bytes a staged token and warpgroup
constexpr int FLAGS = STAGING + WARPGROUPS * STAGED * 128;  // a word a warpgroup
constexpr int SHARED_BYTES = FLAGS + 16;

static_assert(NT % 8 == 0 && (NT == 8 || NT % 16 == 0), "tokens");
static_assert(TILE_STRIPS == 1 || TILE_STRIPS == 2 || TILE_STRIPS == 4, "strips");
static_assert(STEP == 128 || (STEP == 64 && !MULTIPLES), "step");
static_assert(STAGES >= (W_OFFSET ? 3 : 2) && WARPGROUPS <= 4, "form of a block");
static_assert(SHARED_BYTES == HB_SHARED_BYTES && THREADS == HB_THREADS, "the host's sums");

// What the kernel is given.  x, w and y start at multiples of 16 bytes, and pitch is a multiple of 8.
// The host keeps units * sharers below 2^32, all units below 2^31.
struct Arguments {
  const u8* w;  // packed weights
  const u8* rows_of_scales;  // GROUP 0: scales (and zero points) of the rows
  const u16* x;  // [m][pitch], of which k columns count; zeros from k to the next multiple of 8
  void* y;  // [m][n]
  const float* bias;  // [n], or null
  float* parts;  // 2 * workers * TILE_STRIPS * 64 * NT floats
  u32* counters;  // cut tiles * WARPGROUPS words, zero before; every launch leaves zeros
  int m, n, k, pitch;
  int steps, rows, columns;  // atoms along k; tiles along n and along m
  int waves, workers, sharers;  // rounds of whole tiles; grid; workers that share the cut tiles
  int first, units;  // first cut tile (waves * workers); units in all cut tiles
  // Outputs from a token of y to the next.
  __device__ __forceinline__ int pitch_of_y() const { return GATES ? n / 2 : n; }
};

// With several weights, each with rows of its own: m is all rows of x, and what follows `columns` is not given.
struct GroupedArguments : Arguments {
  GroupedOperands grouped;
};
// With x as windows on images (image_rows.cuh): `x` is the images, k the columns of W, pitch nothing. W has for each
// group of the convolution a whole number of tiles' strips.
struct ImageArguments : Arguments {
  Windows windows;  // channels: of a group, a multiple of 8
  int height, width, pixel;  // of an image of x; elements from a pixel to the next
  int outputs, strips;  // of a group
  int steps_of_w;  // atoms of W along k
  u64 part;  // elements of x from a part to the next
  u64 of_channels, of_columns;  // 2^32 by channels / 8, and by the columns of the kernel, rounded up
  __device__ __forceinline__ int pitch_of_y() const { return windows.pitch; }
};
#ifdef HB_IMAGES
constexpr bool IMAGES = HB_IMAGES;
#else
constexpr bool IMAGES = false;
#endif
typedef Choice<IMAGES, ImageArguments, Choice<GROUPED, GroupedArguments, Arguments>::Type>::Type Given;
constexpr int COPIES_TERMS = 0;
template <class C> DEV void copy_terms(C&, int, const Arguments&, int, int, u32) {}

// Sums of the groups of a stage of x, to [groups][tokens]: a thread sums 8 columns of a token, its neighbours the
// others of a group.  Where a group is longer than a stage, of what the stage has of it.
DEV void sum_stage(u32 x, u32 terms) {
  // of 8 columns: of a stage, of a group
  constexpr int PIECES = STEP / 8, RUN = (GROUP == 0 || GROUP > STEP ? STEP : GROUP) / 8;
  const int piece = threadIdx.x % PIECES;
#pragma unroll
  for (int first = 0; first < NT; first += THREADS / PIECES) {
    const int token = first + threadIdx.x / PIECES;
    if (NT % (THREADS / PIECES) != 0 && token >= NT) break;  // of whole warps
    const float sum = sum_of_run<RUN, BOX>(x, token, piece);
    if (piece % RUN == 0) store_shared(terms + (piece / RUN * NT + token) * 4, __float_as_uint(sum));
  }
}
