// What a configuration of the wNa8 GEMM by mma.sync is made of, and what it is given.
#pragma once
#include "ampere.cuh"
#include "grouped.cuh"
#include "weight_atom.cuh"

// A configuration is compiled with -D; the host's config() chooses it.  A warpgroup is 4 warps, each with 16 rows of
// each of its strips.
constexpr int NT = HB_NT;  // tokens a tile
constexpr int WARPGROUPS = HB_WARPGROUPS;  // one behind the other along the rows
constexpr int STRIPS = HB_STRIPS;  // a warpgroup
constexpr int STAGES = HB_STAGES;  // of the ring: units of W and x
constexpr int BLOCKS = HB_BLOCKS;  // blocks that a multiprocessor has registers for
constexpr bool OFFSET = HB_OFFSET;  // x has offsets beside scales

constexpr int SPLIT = 1, SET_WARPS = WARPGROUPS * 4;  // one block a worker, one set of warps a block
constexpr int THREADS = WARPGROUPS * 128;
constexpr int TILE_STRIPS = WARPGROUPS * STRIPS;
constexpr int STEP = 128, HALVES = 1, K16 = 8;  // a stage is a unit
// A strip of a stage is an atom.
constexpr int STAGE_GROUPS = GROUPS, STAGE_CODES = UNIT_CODES, STAGE_ZEROS = ZEROS, STAGE_PARAMS = UNIT_PARAMS,
              STRIP_PARAMS = PARAMS, STRIP_BYTES = ATOM;
// x has 128 bytes a token, whose 16-byte pieces are XORed with the token, and for each group of the unit terms (of
// scales on two levels, as of rows, none: a token has one scale): a
// scale, the sum of the codes where weights have zero points or offsets, an offset.
constexpr int X_BYTES = 1, TERMS = 1 + FROM_ZERO + OFFSET;
constexpr bool TERMS_BY_TOKEN = false;
constexpr bool PADDED = true;  // rows of codes have zeros up to a multiple of 128
constexpr int BOX = NT * 128, STAGE_X = BOX, STAGE_W = TILE_STRIPS * STRIP_BYTES, GROUP_TERMS = TERMS * NT * 4,
              STAGE_TERMS = SUM_GROUPS * GROUP_TERMS;
constexpr int W_PIECES = STAGE_W / 16, X_PIECES = NT * 8;  // of 16 bytes
// Tokens that are multiplied at once, and how many times a unit has as many: a stage is filled a part in each of them.
constexpr int WIDTH = NT < 16 ? NT : 16, PARTS = NT / WIDTH;
constexpr int RING = STAGES * (STAGE_X + STAGE_W + STAGE_TERMS);
constexpr int STAGED = NT < 64 || OUT == 2 ? 0 : 32;  // tokens that y is staged by
constexpr int STAGING = RING;  // 128 bytes a staged token and warpgroup
constexpr int FLAGS = STAGING + WARPGROUPS * STAGED * 128;  // a word a warpgroup
constexpr int SHARED_BYTES = FLAGS + 16;

static_assert(NT == 8 || NT == 16 || NT == 32 || NT == 64 || NT == 128, "tokens");
static_assert(TILE_STRIPS == 1 || TILE_STRIPS == 2 || TILE_STRIPS == 4, "strips");
static_assert(STAGES >= 2 && WARPGROUPS <= 4, "form of a block");
static_assert(SHARED_BYTES == HB_SHARED_BYTES && THREADS == HB_THREADS, "the host's sums");

// What the kernel is given.  w, x, terms and y start at multiples of 16 bytes, pitch is a multiple of 128 and m_pitch
// one of 4. The host keeps units * sharers below 2^32, all units below 2^31.
struct Arguments {
  const u8* w;  // packed weights
  const u8* rows_of_scales;  // GROUP 0 or FACTORS: scales (and zero points) of the rows
  const signed char* x;  // codes [m][pitch], zeros from k on, in the order of quantize_activations.cu
  const float* terms;  // [groups of x][TERMS][m_pitch]: scales, sums, offsets
  void* y;  // [m][n]
  const float* bias;  // [n], or null
  float* parts;  // 2 * workers * TILE_STRIPS * 64 * NT floats
  u32* counters;  // cut tiles * WARPGROUPS words, zero before; every launch leaves zeros
  int m, n, k, pitch;
  int steps, rows, columns;  // atoms along k; tiles along n and along m
  int waves, workers, sharers;  // rounds of whole tiles; grid; workers that share the cut tiles
  int first, units;  // first cut tile (waves * workers); units in all cut tiles
  u32 ratio;  // 2^32 / r + 1 where r groups of atoms have one group of x; 0: each has its own
  int groups, m_pitch;  // of x; from group and term to the next
  int padding;  // of this struct
  // Outputs from a token of y to the next.
  __device__ __forceinline__ int pitch_of_y() const { return GATES ? n / 2 : n; }
};

// With several weights, each with rows of its own: m is all rows of x, and what follows `columns` is not given.
struct GroupedArguments : Arguments {
  GroupedOperands grouped;
};
typedef Choice<GROUPED, GroupedArguments, Arguments>::Type Given;

// The terms of a unit and the tokens of a tile: [group][term][NT], four tokens a piece.  Those of tokens that are not
// there stay as they are.
DEV void sum_stage(u32, u32) {}  // sums of x come with its codes
constexpr int OF_TERM = NT / 4, TERM_PIECES = SUM_GROUPS * TERMS * OF_TERM,
              COPIES_TERMS = (TERM_PIECES + THREADS - 1) / THREADS;
template <class C> DEV void copy_terms(C& copies, int place, const Arguments& g, int unit, int token, u32 to) {
#pragma unroll
  for (int c = 0; c < COPIES_TERMS; c++) {
    const int at = c * THREADS + threadIdx.x, row = at / OF_TERM, four = token + at % OF_TERM * 4;
    // Behind the last group of x lie columns that are not there: any numbers do, their codes are zeros.
    const u32 atom_group = unit * SUM_GROUPS + row / TERMS;
    const int group = g.ratio ? __umulhi(atom_group, g.ratio) : atom_group,
              there = group < g.groups ? group : g.groups - 1;
    copies.start_if(place + c, to + at * 16, g.terms + ((u64)there * TERMS + row % TERMS) * g.m_pitch + four,
                    (TERM_PIECES % THREADS == 0 || at < TERM_PIECES) && four < g.m);
  }
}
