// What a persistent kernel is made of: the sizes of its model, what each block computes, what lies where.
#pragma once
#include "exchange_words.cuh"
#include "fixed_point.cuh"

// The model, as the host compiles it in, and what follows.
constexpr u32 HIDDEN = HB_HIDDEN, INNER = HB_INNER, HEADS = HB_HEADS, KV_HEADS = HB_KV_HEADS, HEAD = HB_HEAD,
              PAIRS = HB_PAIRS, BLOCKS = HB_BLOCKS;
// Norms that take off the mean and have biases; scores that fall with the distance; MLPs of gates and what these let
// through, or of a function alone (ACTIVATION).
constexpr bool LAYER_NORM = HB_LAYER_NORM, ALIBI = HB_ALIBI, GATED = HB_GATED;
// What output and down give is normed before it is added to the stream; scores are at most a layer's `cap`.
constexpr bool NORMS_BEHIND = HB_NORMS_BEHIND, CAPPED = HB_CAPPED;
// Kinds of rotations, of which each layer has one.
constexpr u32 ROPES = HB_ROPES, MOST_ROPES = 2;
// Of 16 rows of gate and up 8 are gates of the others, as of experts always; else all gates come first.
constexpr bool BESIDE = HB_BESIDE;
// Experts that the MLP of a layer consists of, 0: it is one; how many of them a token has; whether their shares are a
// softmax of these alone; the type of the router, as `load_float` counts types. A token's experts lie side by side.
constexpr u32 EXPERTS = HB_EXPERTS, CHOSEN = EXPERTS ? HB_CHOSEN : 1, ROUTER_TYPE = HB_ROUTER_TYPE;
constexpr bool SHARES_OF_CHOSEN = HB_SHARES_OF_CHOSEN;
constexpr u32 WIDTH = CHOSEN * INNER;  // of the vector inside the MLP
// Whether keys and values lie in pages; positions of a page, as `PAGE_LENGTH` in kv_pages.rs.
constexpr bool PAGED = HB_PAGED;
constexpr u32 PAGE_LENGTH = 128;
// Ranks that share the model, each on a GPU; what a word of the stream is added up from.
constexpr u32 RANKS = HB_RANKS, MOST_RANKS_OF_STEP = 8;
// Sets of words: of this step and of the one before; other ranks may be a step ahead.
constexpr u32 SETS = RANKS == 1 ? 2 : 3;
constexpr u32 STEPS = HB_STEPS, STAGES = HB_STAGES;  // steps of 128 columns in a stage; stages of a warp's ring
constexpr u32 WARPS = 12, THREADS = 32 * WARPS, COPYING_WARPS = 4;  // that compute; that bring weights
constexpr u32 LOADS_OF_STREAM = (HIDDEN / 4 + THREADS - 1) / THREADS;  // of four words, of each thread
// The mean of a stream comes from sums that blocks leave beside its rows, and what a LayerNorm adds, times the weights,
// is in the bias of the product behind it. Not where x is codes of what the norm gives, or a product has gates beside.
constexpr bool MEAN_OF_SUMS = LAYER_NORM && !QUANTIZED && !BESIDE;
// Vectors that a stream consists of: each rank's part; or the stream before, and what is normed and then added to it.
constexpr u32 OF_STREAM = NORMS_BEHIND ? 2 : RANKS;
// A block attends with query heads that share a key head: all of them, or a share of them where they are more than the
// columns of B.
constexpr u32 SHARES_OF_GROUP = HB_SHARES_OF_GROUP, SHARES = KV_HEADS * SHARES_OF_GROUP,
              HEADS_OF_SHARE = HEADS / SHARES, ATTENDED_LENGTH = HEADS * HEAD,
              QKV_LENGTH = (HEADS + 2 * KV_HEADS) * HEAD;
// Weights whose scales and offsets are multiples of halves (GGUF's K types) may differ from tensor to tensor. Such a
// form is 1 with offsets, in groups of 32, or 0 without, in groups of 16; 2 more where codes have 6 bits, not 4.
constexpr u32 FORMS = HB_FORMS;  // a bit for each form that the model has; 0: scales are as they are, all of one form
constexpr bool VALUES_APART = HB_VALUES_APART;  // rows of values may be of another form than those of queries and keys
constexpr u32 FORMS_COUNT = FORMS ? (FORMS & 1) + (FORMS >> 1 & 1) + (FORMS >> 2 & 1) + (FORMS >> 3 & 1) : 1;
// Bits of codes of a form; bytes of them that a row block has of 128 columns. A unit is these and their parameters
// (UNIT_PARAMS).
static __device__ constexpr u32 bits_of(u32 form) { return form == 0 ? 3 : form == 1 ? 4 : form == 2 ? 6 : 5; }
static __device__ constexpr u32 codes_of(u32 form) { return 256 * (FORMS ? bits_of(form) : BITS); }
constexpr u32 LONGEST = FORMS & 4 ? 2 : FORMS & 8 ? 3 : FORMS & 2 ? 1 : 0, UNIT = codes_of(LONGEST) + UNIT_PARAMS;
// A stage has STEPS units of weights, or keys or values of a TILE of positions that attention takes at once: boxes of
// 64 elements, a run of a head, and all of the tile's positions or half of them, at a multiple of 128 bytes behind
// where the stage begins. A stage has room for one of the smaller boxes at least. What a head's last run lacks is
// zeros.
constexpr u32 TILE = 16, RUNS = (HEAD + 63) / 64, LEAST = TILE / 2 * 128;
static __device__ constexpr u32 before_boxes(u32 stage) {  // at most
  return stage % 128 == 0 ? 0 : stage % 64 == 0 ? 64 : stage % 32 == 0 ? 96 : 112;
}
static __device__ constexpr bool has_room(u32 stage, u32 bytes) { return stage >= before_boxes(stage) + bytes; }
constexpr u32 OF_WEIGHTS = STEPS * UNIT,
              STAGE = has_room(OF_WEIGHTS, LEAST) ? OF_WEIGHTS
                      : OF_WEIGHTS > LEAST        ? (OF_WEIGHTS + 127) / 128 * 128
                                                  : LEAST,
              BOX_POSITIONS = has_room(STAGE, 2 * LEAST) ? TILE : TILE / 2, BOX = BOX_POSITIONS * 128;
static_assert((FORMS != 0) == MULTIPLES && (FORMS || !VALUES_APART), "forms of multiples");
constexpr u32 PART_POSITIONS = 256, MOST_PARTS = BLOCKS / SHARES < 32 ? BLOCKS / SHARES : 32;
static_assert(HIDDEN % (128 * STEPS) == 0 && INNER % (128 * STEPS) == 0 && ATTENDED_LENGTH % (128 * STEPS) == 0,
              "whole stages");
static_assert(HEAD % 16 == 0 && RUNS >= 1 && RUNS <= 4, "heads of up to four runs of 64, in steps of mma.sync");
static_assert(ROPES >= 1 && ROPES <= MOST_ROPES, "kinds of rotations that a step knows");
static_assert(!NORMS_BEHIND || RANKS == 1 && !LAYER_NORM, "RMS norms of what one GPU has whole");
static_assert(RANKS >= 1 && RANKS <= MOST_RANKS_OF_STEP, "ranks that a step knows");
static_assert(GATED || !BESIDE, "gates beside others");
static_assert(BESIDE || !EXPERTS, "gates of experts lie beside what they let through");
static_assert(HEADS % SHARES == 0 && HEADS_OF_SHARE <= 8 && MOST_PARTS >= 1, "a column of B for each query head");

struct Product {
  const u8* w;  // of experts a table of u64, [experts]: where the weights of each are
  const float* bias;  // [n], or null
};
struct Layer {
  Product qkv, output, up, down;
  const float* norms[2];  // what the stream is normed with before q, k, v and before gate and up, [HIDDEN]
  const float* norm_biases[2];  // of a LAYER_NORM
  // NORMS_BEHIND: what the last addends of both streams are normed with; of the first layer's, which are 0, any.
  const float* norms_behind[2];
  const float *query_norm, *key_norm;  // [HEAD], or null
  void *keys, *values;  // [kv_heads][capacity][HEAD]
  const u8* w_of_values;  // where they are apart; of their bias the place of row 0 of q, k, v, or null
  const float* bias_of_values;
  const void* router;  // [EXPERTS][HIDDEN]
  float eps[2], eps_behind[2], head_eps;  // of norms
  float scale, cap;  // of scores; CAPPED
  u32 window;  // 0: none
  u32 rope;  // which of the kinds
  u32 forms;  // of the weights of each product, and of values where they are apart: 4 bits each
  __device__ __forceinline__ const Product& product(u32 i) const { return (&qkv)[i]; }
};
static __device__ __forceinline__ u32 form_of(u32 forms, u32 i) { return forms >> (4 * i) & 15; }
constexpr u32 VALUES = 4;  // their place among forms
struct Params {
  const Layer* layers;  // [count]
  const u64* scales;  // [layers][products]: where the scales of a product's rows are, two bytes each, in their order
  const u32 *token, *position;
  const void* embedding;  // [vocab][HIDDEN]
  const float *norm, *norm_bias, *norm_behind;  // the last ones
  const float* slopes;  // ALIBI: [HEADS]
  void* normed;  // [HIDDEN]
  const double* turns[MOST_ROPES];  // [PAIRS]: of a position
  u32* words;  // the sets
  u32* state;  // [0] the set of the next step; [1] parts of attention in the step before
  u32* of_ranks[MOST_RANKS_OF_STEP];  // the sets of each rank
  u32 *failed, *silent;  // 0, or 1 and the rank that was silent; the host's
  const u32* pages;  // of the text; null: its positions lie in order
  const u8* behind;  // what the next kernel reads first: a piece of `of_behind` bytes for each ring
  u64 capacity;
  u64 positions;  // that the text has room for
  u64 first, tokens;  // those whose vectors this rank has
  u32 count;  // layers
  u32 embedding_type;  // 0 f16, 1 bf16, 2 f32
  float eps, eps_behind;
  u32 rank;
  u32 of_behind;
};

// The index of a thread or block, read anew wherever it is needed: what follows from it would else be computed before
// the loop over layers, and take registers through all of it.
DEV u32 thread_index() {
  u32 v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
DEV u32 block_index() {
  u32 v;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
  return v;
}
// The same number, but not to the compiler: what follows from it is computed again and takes no registers meanwhile.
DEV u32 again(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
// Sums of a stream: those of each warp that leaves rows of it, of all blocks; of each rank.
constexpr u32 SUMS_OF_STREAM = ((HIDDEN / 16 + BLOCKS - 1) / BLOCKS + 3) / 4, SUMS_OF_RANK = SUMS_OF_STREAM * BLOCKS;
// Words of 64 bits that all blocks add to lie apart, so that many slices of the second-level cache add them up: so many
// together, at multiples of so many.
constexpr u32 SUMS_TOGETHER = 4, SUMS_APART = 16,
              WORDS_OF_PLANE = (EXPERTS + SUMS_TOGETHER - 1) / SUMS_TOGETHER * SUMS_APART * 2;
// Words of a layer: the stream that it begins with; q, k, v; what attention gives; the stream after that; what the gate
// gives; what the router gives, in two planes; sums of both streams, or of squares of what is added to them.
constexpr u32 AT_QKV = OF_STREAM * HIDDEN, AT_ATTENDED = AT_QKV + QKV_LENGTH,
              AT_MIDDLE = AT_ATTENDED + ATTENDED_LENGTH / 2, AT_INNER = AT_MIDDLE + OF_STREAM * HIDDEN,
              AT_LOGITS = AT_INNER + WIDTH / 2, AT_SUMS = AT_LOGITS + 2 * WORDS_OF_PLANE,
              WORDS_OF_LAYER = AT_SUMS + (MEAN_OF_SUMS || NORMS_BEHIND ? (2 * RANKS * SUMS_OF_RANK + 3) / 4 * 4 : 0);
static_assert(SUMS_OF_STREAM <= WARPS, "a sum of a warp");
// A part of attention: sums, then greatest scores, then weights.  Parts lie behind all layers.
constexpr u32 PART = HEADS_OF_SHARE * (HEAD + 2), PARTS_OF_LAYER = SHARES * MOST_PARTS * PART;

extern __shared__ __align__(1024) u8 shared[];
// Row blocks of a product, that of a pair counted once; stages of a row block; whether gate and up are such pairs.
struct Shape {
  u32 row_blocks, stages, paired;
};
constexpr bool PAIRED = GATED && !BESIDE;
static __device__ constexpr Shape shape(u32 product) {
  return product == 0   ? Shape{QKV_LENGTH / 16, HIDDEN / (128 * STEPS), 0}
         : product == 1 ? Shape{HIDDEN / 16, ATTENDED_LENGTH / (128 * STEPS), 0}
         : product == 2 ? Shape{BESIDE ? WIDTH / 8 : INNER / 16, HIDDEN / (128 * STEPS), PAIRED}
                        : Shape{HIDDEN / 16, WIDTH / (128 * STEPS), 0};
}
static __device__ constexpr u32 most(u32 a, u32 b) { return a > b ? a : b; }
static __device__ constexpr u32 most_blocks(u32 product) {
  return (shape(product).row_blocks + BLOCKS - 1) / BLOCKS << shape(product).paired;
}
constexpr u32 OF_QUERIES_AND_KEYS = (HEADS + KV_HEADS) * HEAD / 16;  // row blocks
constexpr u32 MOST_BLOCKS = most(most(most_blocks(0), most_blocks(1)), most(most_blocks(2), most_blocks(3)));

// Where a row block's units lie: the first one; from one to the next; of gate and up which of a token's experts it is.
struct __align__(16) Place {
  u32 offset, wide, params, choice;
};
// What a block computes of a product, the same in every layer.
struct Plan {
  u32 first, blocks;  // row blocks; of both of a pair
  // Stages of a warp, in the order of columns, then of row blocks: begin, end; the first one's row block, its stage of
  // columns; 16 bits each.
  u32 run[WARPS], start[WARPS];
  u32 apart;  // the first of its row blocks that is of values, where those are apart
  u32 padding;
  Place places[FORMS_COUNT][MOST_BLOCKS];
  // Of weights of a form.
  __device__ __forceinline__ const Place* of(u32 form) const {
    return places[FORMS_COUNT == 1 ? 0 : __popc(FORMS & ((1u << form) - 1))];
  }
};
// The sums of all warps for a row block, [WARPS][2 pairs of digits][8 rows]{row, row + 8}, and what keeps row blocks in
// different banks.
template <bool INTEGERS> struct SumsOf {
  float x, y;
};
template <> struct SumsOf<true> {
  int x, y;
};
using Sums = SumsOf<WHOLE>;
constexpr u32 SUMS_OF_BLOCK = 16 * WARPS + 8;
// An expert of the token: its gate and up, and down; its share.
struct __align__(16) Expert {
  const u8* w[2];
  float share;
};
// Queries, and sums of attention, lie in rows that begin in different banks.
constexpr u32 QUERY_ROW = (HEAD + 31) / 32 * 32 + 8, SUMS_ROW = HEAD + 4;
// Rows r and r + 8 of the stream that a block adds to, where no rank has a part of them: what they were last; or
// (NORMS_BEHIND) without the last addend, this, and the weights of its norms. A thread has its own, and no other reads
// them.
struct Own {
  float2 stream, added, weights[2];
};
// What is known of all of a product's input: what a LAYER_NORM takes off and multiplies with, or what the norm behind
// multiplies the last addend with; the rule of a WHOLE x.
struct OfAll {
  float mean, factor;
  Step step;
};
// Shared memory, as the host counts it: rings; x, a stage's columns of each warp or a WHOLE one, and sums of warps
// behind it, or sums of attention; the rest.
constexpr u32 X_OF_WARP = STEPS * X_UNIT,
              X_OF_ALL = WHOLE ? most(HIDDEN, most(ATTENDED_LENGTH, WIDTH)) / 128 * X_UNIT : WARPS * X_OF_WARP,
              SUMS_BYTES = MOST_BLOCKS * SUMS_OF_BLOCK * 8;
constexpr u32 SLOTS = WARPS, OF_ATTENTION = SLOTS * HEADS_OF_SHARE * SUMS_ROW * 4,
              X_BYTES = most(X_OF_ALL + SUMS_BYTES, OF_ATTENTION + 2 * SLOTS * 32);
constexpr u32 X = WARPS * STAGES * STAGE, REDUCE = X + X_BYTES, ANGLES = REDUCE + 272,
              QUERIES = ANGLES + ROPES * most(PAIRS, 2) * 8, KEY = QUERIES + 32 * QUERY_ROW, VALUE = KEY + 2 * HEAD,
              RAW = VALUE + 2 * HEAD, BARRIERS = RAW + (HEADS_OF_SHARE + 2) * HEAD * 4,
              ROUTED = BARRIERS + WARPS * STAGES * 16, CHOICES = ROUTED + (EXPERTS ? 16 : 0),
              LOGITS = CHOICES + (EXPERTS ? CHOSEN * sizeof(Expert) : 0), ROWS = LOGITS + (EXPERTS + 3) / 4 * 16,
              PLANS = ROWS + (EXPERTS ? 64 * most_blocks(1) : 0), LAYERS = PLANS + 4 * sizeof(Plan),
              OWN = LAYERS + 2 * sizeof(Layer), SHARED_BYTES = OWN + 8 * most_blocks(1) * sizeof(Own);

static_assert(SHARED_BYTES == HB_SHARED_BYTES, "the host's sum");
static_assert(sizeof(Plan) % 16 == 0 && QUERIES % 16 == 0 && LAYERS % 16 == 0, "alignment");
template <class T> DEV T* at_shared(u32 offset) { return reinterpret_cast<T*>(shared + offset); }
struct Shared {
  // Of attention: sums of warps; what they are shifted by.
  __device__ __forceinline__ float* attended() const { return at_shared<float>(X); }
  __device__ __forceinline__ float* shifts() const { return at_shared<float>(X + OF_ATTENTION); }
  // Of a product: [row blocks][SUMS_OF_BLOCK].
  __device__ __forceinline__ Sums* sums() const { return at_shared<Sums>(X + X_OF_ALL); }
  __device__ __forceinline__ float* reduce() const { return at_shared<float>(REDUCE); }
  // Of the step: its position, its set, where that begins; where the position lies in the cache.
  __device__ __forceinline__ u32* step() const { return at_shared<u32>(REDUCE + 64); }
  // The greatest |x| that each warp has.
  __device__ __forceinline__ u32* greatest() const { return at_shared<u32>(REDUCE + 80); }
  // Of a LAYER_NORM: sums of squares of each warp; of ALIBI: slopes of a block's query heads, in powers of two.
  __device__ __forceinline__ float* squares() const { return at_shared<float>(REDUCE + 192); }
  __device__ __forceinline__ float* slopes() const { return at_shared<float>(REDUCE + 240); }
  __device__ __forceinline__ OfAll& all() const { return *at_shared<OfAll>(REDUCE + 176); }
  // Where each warp is in its ring: stage and phase.
  __device__ __forceinline__ u32* turns() const { return at_shared<u32>(REDUCE + 128); }
  __device__ __forceinline__ float2* angles(u32 rope) const { return at_shared<float2>(ANGLES) + rope * PAIRS; }
  __device__ __forceinline__ Expert* chosen() const { return at_shared<Expert>(CHOICES); }
  // Of all experts, before the norm divides; this block's rows of the stream, with the norm's weights.
  __device__ __forceinline__ float* logits() const { return at_shared<float>(LOGITS); }
  __device__ __forceinline__ float* rows_of_stream() const { return at_shared<float>(ROWS); }
  __device__ __forceinline__ Plan& plan(u32 product) const { return at_shared<Plan>(PLANS)[product]; }
  // Of this layer, and of the next when that is near.
  __device__ __forceinline__ const Layer& layer(u32 i) const { return at_shared<const Layer>(LAYERS)[i & 1]; }
  __device__ __forceinline__ Own& own(u32 pair) const { return at_shared<Own>(OWN)[pair]; }
  __device__ __forceinline__ u16* queries() const { return at_shared<u16>(QUERIES); }  // [2][8][QUERY_ROW]
  __device__ __forceinline__ u32* key() const { return at_shared<u32>(KEY); }  // of this token [HEAD / 2]
  __device__ __forceinline__ u32* value() const { return at_shared<u32>(VALUE); }
  __device__ __forceinline__ float* raw() const { return at_shared<float>(RAW); }  // [HEADS_OF_SHARE + 2][HEAD]
};
DEV void sync() { barrier_sync(1, THREADS); }
// Of a warp's ring: a barrier of each stage for what comes, then as many for stages that are empty again.
DEV u32 full_barriers(u32 warp) { return shared_address(shared) + BARRIERS + warp * STAGES * 16; }

// Asks for what is known of a layer, to shared memory. Threads wait for what they have asked for, then for each other.
DEV void ask_for_layer(const Params& p, u32 i) {
  const u32 at = 16 * threadIdx.x;
  if (i < p.count && at < sizeof(Layer))
    copy_16(shared_address(shared) + LAYERS + (i & 1) * sizeof(Layer) + at,
            reinterpret_cast<const u8*>(p.layers + i) + at);
  copy_commit();
}

// A warp fills in the plan of a product: divisions are slow, and the same in every layer.
DEV void make_plan(Plan& plan, u32 product) {
  const Shape s = shape(product);
  const u32 lane = threadIdx.x % 32, first = blockIdx.x * s.row_blocks / BLOCKS,
            blocks = ((blockIdx.x + 1) * s.row_blocks / BLOCKS - first) << s.paired, all = blocks * s.stages,
            workers = min(all, WARPS);
  if (lane == 0) plan.first = first, plan.blocks = blocks;
  if (lane < WARPS) {
    const u32 begin = lane < workers ? lane * all / workers : 0, end = lane < workers ? (lane + 1) * all / workers : 0;
    plan.run[lane] = begin | end << 16;
    plan.start[lane] = blocks ? begin % blocks | begin / blocks << 16 : 0;
  }
  const bool apart = VALUES_APART && product == 0;
  if (lane == 0) plan.apart = apart ? min(blocks, max(OF_QUERIES_AND_KEYS, first) - first) : blocks;
  for (u32 j = lane; j < blocks; j += 32) {
    u32 block = s.paired ? first + (j >> 1) + (j & 1) * s.row_blocks : first + j, all_blocks = s.row_blocks << s.paired;
    u32 choice = 0, stages = s.stages;  // of one matrix
    if (EXPERTS && product == 2) choice = block / (INNER / 8), block %= INNER / 8, all_blocks = INNER / 8;
    if (EXPERTS && product == 3) stages /= CHOSEN;
    if (apart) {  // in the tensor that it is of
      const bool value = block >= OF_QUERIES_AND_KEYS;
      block -= value ? OF_QUERIES_AND_KEYS : 0;
      all_blocks = value ? s.row_blocks - OF_QUERIES_AND_KEYS : OF_QUERIES_AND_KEYS;
    }
    const u32 quarter = block & 3, strip = block >> 2, super = strip & ~3u, strips = (all_blocks + 3) / 4;
    u32 i = 0;
#pragma unroll
    for (u32 form = 0; form < 4; form++) {
      if (FORMS ? !(FORMS >> form & 1) : form > 0) continue;
      const u32 codes = codes_of(form), atom = 4 * (codes + UNIT_PARAMS);
      const u64 offset = u64(super) * stages * STEPS * atom + (strip - super) * atom + quarter * codes;
      const u32 params = (4 - quarter) * codes + quarter * UNIT_PARAMS;
      plan.places[i++][j] = {u32(offset / 16), min(4u, strips - super) * atom, params, choice};
    }
  }
}
