// The packed weights of the wNa16 kernels, and what a configuration of the kernel is made of.
//
// PACKED WEIGHTS (one copy on the device serves every m, fp16 and bf16 x, mma.sync and wgmma)
//   W[n][k] is padded to n % 64 == 0 and k % 128 == 0 with codes equal to the zero point (symmetric: 8 or 128) and scales of zero.
//   strip = 64 rows;  super-strip = 4 strips (the last one may have 1..3);  atom = one strip x 128 k.
//   Order of atoms: super-strip, then k, then strip:    k 0: s0 s1 s2 s3 | k 128: s0 s1 s2 s3 | ...
//   so 1, 2 or 4 strips of one k step are one linear piece, and 4 strips over a run of k are one linear stream.
//   atom = [codes: 1024*BITS bytes] [scales: 128/GROUP x 128 bytes] [zero points: 128/GROUP x 64 bytes, where there are any]
//   codes, 4 bits: [warp w 0..3][half h 0..1][lane 0..31][word j 0..3]: one word = the 8 codes of one lane for one k16 step.
//     Rows R = 16w + lane/4 and R+8;   k0 = 64h + 16j + 2*(lane%4)
//       bits  6.. 9: (R  , k0  )   bits 22..25: (R  , k0+1)      A register 0 of mma m16n8k16 and wgmma m64k16
//       bits  2.. 5: (R+8, k0  )   bits 18..21: (R+8, k0+1)      A register 1
//       bits 14..17: (R  , k0+8)   bits 30..33: (R  , k0+9)      A register 2 (wraps round: bits 30, 31, 0, 1)
//       bits 10..13: (R+8, k0+8)   bits 26..29: (R+8, k0+9)      A register 3
//   codes, 8 bits (biased: b = q + 128): [warp w 0..3][quarter i 0..3][lane 0..31][word j 0..3]: words 2j', 2j'+1 are the k16 step 2i + j'.
//     k0 = 32i + 16j' + 2*(lane%4);  even word, bytes 0..3: (R, k0) (R+8, k0) (R, k0+1) (R+8, k0+1);  odd word: the same for k0+8.
//   scales of a group: [warp w][i 0..7] {row 16w+i, row 16w+i+8}, 2 bytes each, of the type of x.
//   zero points of a group: the same order, one byte each (4 bits: 0..16; 8 bits: 0..255, of biased codes).
//   GROUP 0 (one scale a row): atoms hold codes only; a second array holds, for each strip, 128 bytes of scales and, where there are
//   any, 64 bytes of zero points, in the order above.
#pragma once
#include "dequant.cuh"

// A configuration is compiled with -D; the host's config() chooses it from m, n, k and the number of multiprocessors.
constexpr int BITS = HB_BITS;                    // 4 or 8
constexpr bool BF16 = HB_BF16;                   // type of x and the scales: bf16 or fp16
constexpr int OUT = HB_OUT;                      // type of y: 0 fp16, 1 bf16, 2 fp32
constexpr int GROUP = HB_GROUP;                  // 32, 64, 128; 0: one scale a row
constexpr bool ZERO = HB_ZERO;                   // integer zero points
constexpr int ACTIVATION = HB_ACTIVATION;        // 0 none, 1 clamp to HB_LOW .. HB_HIGH, 2 GELU, 3 GELU (tanh), 4 SiLU
constexpr int NT = HB_NT;                        // tokens a tile
constexpr int WARPGROUPS = HB_WARPGROUPS;        // that convert and multiply
constexpr int STRIPS = HB_STRIPS;                // a warpgroup
constexpr int SETS = HB_SETS;                    // the warpgroups are this many sets, which take the units of a tile in turn
constexpr bool WGMMA = HB_WGMMA;                 // wgmma or mma.sync
constexpr bool EARLY = HB_EARLY;                 // scale applied to the weight (one rounding), or to the sums of a group (none)
constexpr int STAGES_W = HB_STAGES_W;            // atoms of 128 k in the ring of W
constexpr int STAGES_X = HB_STAGES_X;            // stages in the ring of x
constexpr int BOXES = HB_BOXES;                  // boxes of 64 k in a stage of x: 1 or 2
constexpr int SPLIT = HB_SPLIT;                  // blocks of a cluster that share the k of one tile; 1: units are cut evenly over all blocks
constexpr int BLOCKS = HB_BLOCKS;                // blocks a multiprocessor has room for
constexpr int TRIGGER = HB_TRIGGER;              // the next kernel may start when a block has this many units left to copy; 0: at once
constexpr int PREFETCH = HB_PREFETCH;            // units that are fetched into L2 behind the first round of the ring, before the dependency wait

constexpr int GROUPS = GROUP ? 128 / GROUP : 0;
constexpr int CODES = 1024 * BITS, SCALES = CODES, ZEROS = SCALES + 128 * GROUPS, ATOM = ZEROS + (ZERO ? 64 * GROUPS : 0);
constexpr int ROW_BLOCK = ZERO ? 192 : 128;      // bytes a strip in the array of GROUP 0
constexpr int TILE_STRIPS = WARPGROUPS / SETS * STRIPS, SET_WARPS = WARPGROUPS / SETS * 4;
constexpr bool JOINT = NT <= 32 || BLOCKS == 2;  // W and x in one ring with one set of barriers
constexpr bool PRODUCERS = !JOINT || WARPGROUPS == 4;                     // a whole warpgroup for the copies, whose registers go to the others
constexpr int BOX = NT * 128, STAGE_X = BOXES * BOX, STAGE_W = TILE_STRIPS * ATOM;
constexpr int THREADS = WARPGROUPS * 128 + (PRODUCERS ? 128 : 32);
constexpr int RING = STAGES_X * STAGE_X + STAGES_W * STAGE_W;
constexpr int BLOCKS_OF_8 = TILE_STRIPS * 4 * (NT / 8);                   // parts of 16 rows x 8 tokens in a tile, 512 bytes of sums each
constexpr int SET_SUMS = RING;                                           // where sets leave their sums
constexpr int EXCHANGE = SET_SUMS + (SETS - 1) * BLOCKS_OF_8 * 512;      // SPLIT: where the blocks of a cluster leave theirs
constexpr int STAGED = NT < 64 || SPLIT > 1 || OUT == 2 ? 0 : NT % 64 == 0 ? 64 : NT % 32 == 0 ? 32 : 16;   // tokens that y is staged by
constexpr int STAGING = EXCHANGE;                                        // 128 bytes a staged token and warpgroup of a set
constexpr int BARRIERS = EXCHANGE + SET_WARPS / 4 * STAGED * 128 + (SPLIT > 1 ? SPLIT * ((BLOCKS_OF_8 + SPLIT - 1) / SPLIT) * 512 : 0);
constexpr int SHARED_BYTES = BARRIERS + 16 * (STAGES_W + STAGES_X) + 48;

static_assert(BITS == 4 || BITS == 8, "bits");
static_assert(GROUP == 0 || GROUP == 32 || GROUP == 64 || GROUP == 128, "group");
static_assert(NT % 8 == 0 && NT <= 256, "tokens");
static_assert(TILE_STRIPS == 1 || TILE_STRIPS == 2 || TILE_STRIPS == 4, "strips");
static_assert(!JOINT || (BOXES == 2 && STAGES_X == STAGES_W), "a joint ring");
static_assert(WGMMA || (JOINT && !EARLY), "mma.sync is for few tokens");
static_assert(!WGMMA || EARLY || GROUP == 0 || GROUP == 128 || (STRIPS == 1 && NT <= 128), "registers for the sums of a group");
static_assert(SETS == 1 || (WARPGROUPS % SETS == 0 && STAGES_W % SETS == 0 && STAGES_X % (SETS * 2 / BOXES) == 0), "a stage belongs to one set");
static_assert(SPLIT <= 8, "clusters that every device takes");
static_assert(!PRODUCERS || BLOCKS == 1, "registers are shared out for one block");
static_assert(SHARED_BYTES <= 232448, "shared memory");
static_assert(SHARED_BYTES == HB_SHARED_BYTES && THREADS == HB_THREADS, "the host's sums");
