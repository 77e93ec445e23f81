// All layers of a step of one token in one persistent kernel: a block a multiprocessor, which stays from the first layer to
// the last, and weights that stream through rings of bulk copies, on from product to product.
//
//   a layer:    norm, q k v | attention | output, added | norm, gate and up, gated | down, added         | all blocks wait
//   a product (GEMV):  a block owns blocks of 16 rows.  Its warps cut rows x columns into runs of equally many stages, each
//       with a ring of its own; codes are multiplied by mma.sync, x in one column of B; the sums of runs are added in order.
//   attention (persistent_attention.cuh):  a block takes a kv head and a part of the positions.
//
// WHO SEES WHAT WHEN.  No fence is used: a release waits for the bulk copies in flight, and would stop the stream.
//   What blocks leave for each other are 32-bit words, each written once a step, in a place of its own: a place for every
//   layer.  Before that a place holds NOT_YET, which no result is.  Readers take words by relaxed loads, and wait while they
//   are NOT_YET.  So a word says for itself that it is there, and nothing rests on the order in which words of different
//   places are seen.  Counters tell readers when to begin to look, and nothing more.
//   There are two sets of places, used in turns by steps; a step resets the set of the step before, which has ended.
// Waiting for each other takes blocks that are there at once: a cooperative launch.
//
// What an output is added up from depends on the model and the number of multiprocessors, not on the position or the text.
#include "hopper.cuh"
#include "decode_codes.cuh"
#include "warp.cuh"

// The model, as the host compiles it in, and what follows.
constexpr u32 HIDDEN = HB_HIDDEN, INNER = HB_INNER, HEADS = HB_HEADS, KV_HEADS = HB_KV_HEADS, HEAD = HB_HEAD,
              PAIRS = HB_PAIRS, BLOCKS = HB_BLOCKS;
constexpr u32 STEPS = HB_STEPS, STAGES = HB_STAGES;  // steps of 128 columns in a stage; stages of a warp's ring
constexpr u32 WARPS = 14, THREADS = 32 * WARPS, COPYING_WARPS = 2;  // that compute; that bring weights
constexpr u32 HEADS_OF_GROUP = HEADS / KV_HEADS, ATTENDED_LENGTH = HEADS * HEAD,
              QKV_LENGTH = (HEADS + 2 * KV_HEADS) * HEAD;
constexpr u32 UNIT_SCALES = 256 * BITS, UNIT_ZEROS = UNIT_SCALES + 32 * GROUPS,
              UNIT = UNIT_ZEROS + (ZERO ? 16 * GROUPS : 0);
constexpr u32 STAGE = STEPS * UNIT;  // bytes; a unit is 16 rows of an atom
constexpr u32 NOT_YET = 0xffffffffu;
constexpr u32 TILE = 16, PART_POSITIONS = 256, MOST_PARTS = BLOCKS / KV_HEADS < 32 ? BLOCKS / KV_HEADS : 32;
static_assert(HIDDEN % (128 * STEPS) == 0 && INNER % (128 * STEPS) == 0 && ATTENDED_LENGTH % (128 * STEPS) == 0,
              "whole stages");
static_assert(HEAD == 64 || HEAD == 128, "heads of one or two runs of 64");
static_assert(HEADS_OF_GROUP <= 8 && MOST_PARTS >= 1, "a column of B for each query head");
static_assert(GROUPS > 0 && !FACTORS, "scales of groups lie in atoms");

struct Product {
  const u8* w;
  const float *bias, *norm;  // [n], or null; what the stream is normed with before it, [k], or null
  float eps;
  u32 padding;  // of this struct
};
struct Layer {
  Product qkv, output, up, down;
  const float *query_norm, *key_norm;  // [HEAD], or null
  void *keys, *values;  // [kv_heads][capacity][HEAD]
  float query_eps, key_eps, scale;
  u32 window;  // 0: none
  __device__ __forceinline__ const Product& product(u32 i) const { return (&qkv)[i]; }
};
struct Params {
  const Layer* layers;
  const u32 *token, *position;
  const void* embedding;  // [vocab][HIDDEN]
  const float* norm;  // the last one
  void* normed;  // [HIDDEN]
  const double* turns;  // [PAIRS]: of a position
  u32* words;  // two sets
  u32* state;  // [0] steps done; [1] parts of attention in the step before
  u64 capacity;
  u32 count;  // layers
  u32 embedding_type;  // 0 f16, 1 bf16, 2 f32
  float eps;
  u32 padding;  // of this struct
};

// ---- words that blocks leave for each other
DEV u32 look(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV uint4 look_at_four(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV bool there(u32 v) { return v != NOT_YET; }
DEV bool there(const uint4& v) { return v.x != NOT_YET && v.y != NOT_YET && v.z != NOT_YET && v.w != NOT_YET; }
// N words, or quads of them, all asked for at once; `at(i)` says where, null for none.
template <u32 N, class At> DEV void look_for(uint4 (&v)[N], At&& at) {
#pragma unroll
  for (u32 i = 0; i < N; i++) v[i] = at(i) ? look_at_four(at(i)) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (u32 i = 0; i < N; i++)
    while (at(i) && !there(v[i])) v[i] = look_at_four(at(i));
}
template <u32 N, class At> DEV void look_for(u32 (&v)[N], At&& at) {
#pragma unroll
  for (u32 i = 0; i < N; i++) v[i] = at(i) ? look(at(i)) : 0;
#pragma unroll
  for (u32 i = 0; i < N; i++)
    while (at(i) && !there(v[i])) v[i] = look(at(i));
}
DEV void leave(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v == NOT_YET ? 0x7fff7fffu : v) : "memory");
}
DEV void count(u32* p, u32 n) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory"); }

// The index of a thread or block, read anew wherever it is needed: what follows from it would else be computed before the loop
// over layers, and take registers through all of it.
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
// Words of a layer: the stream that it begins with; q, k, v; what attention gives; the stream after that; what the gate gives.
constexpr u32 AT_QKV = HIDDEN, AT_ATTENDED = AT_QKV + QKV_LENGTH, AT_MIDDLE = AT_ATTENDED + ATTENDED_LENGTH / 2,
              AT_INNER = AT_MIDDLE + HIDDEN, AT_COUNTERS = AT_INNER + INNER / 2, WORDS_OF_LAYER = AT_COUNTERS + 32;
enum Counter : u32 { STREAM = AT_COUNTERS, QKV, ATTENDED, MIDDLE, GATED };
// A part of attention: sums, then greatest scores, then weights.  Parts lie behind all layers.
constexpr u32 PART = HEADS_OF_GROUP * (HEAD + 2), PARTS_OF_LAYER = KV_HEADS * MOST_PARTS * PART;

extern __shared__ __align__(1024) u8 shared[];
// Row blocks of a product, that of a pair counted once; stages of a row block; row blocks of both of a pair that a block has at most.
struct Shape {
  u32 row_blocks, stages, paired;
};
static __device__ constexpr Shape shape(u32 product) {
  return product == 0   ? Shape{QKV_LENGTH / 16, HIDDEN / (128 * STEPS), 0}
         : product == 1 ? Shape{HIDDEN / 16, ATTENDED_LENGTH / (128 * STEPS), 0}
         : product == 2 ? Shape{INNER / 16, HIDDEN / (128 * STEPS), 1}
                        : Shape{HIDDEN / 16, INNER / (128 * STEPS), 0};
}
static __device__ constexpr u32 most(u32 a, u32 b) { return a > b ? a : b; }
static __device__ constexpr u32 most_blocks(u32 product) {
  return (shape(product).row_blocks + BLOCKS - 1) / BLOCKS << shape(product).paired;
}
constexpr u32 MOST_BLOCKS =
    (most(most(most_blocks(0), most_blocks(1)), most(most_blocks(2), most_blocks(3))) + 7) / 8 * 8;

// What a block computes of a product, the same in every layer.
struct Plan {
  u32 first, blocks;  // row blocks; of both of a pair
  u32 run[WARPS], start[WARPS];  // stages of a warp: begin, end; its first row block and stage of that; 16 bits each
  u32 padding[2];
  u16 warps[MOST_BLOCKS];  // that have a part of a row block: first, last; 8 bits each
};
// Shared memory, as the host counts it: rings; x, and sums of attention; the rest.
constexpr u32 SPLIT = HEAD / 64, SLOTS = WARPS / SPLIT, OF_ATTENTION = SLOTS * HEADS_OF_GROUP * HEAD * 4,
              X_BYTES = most(most(most(HIDDEN, INNER), ATTENDED_LENGTH) * 2, OF_ATTENTION);
constexpr u32 X = WARPS * STAGES * STAGE, SUMS = X + X_BYTES, ROWS = SUMS + (MOST_BLOCKS + WARPS) * 64,
              OWN = ROWS + MOST_BLOCKS * 64, REDUCE = OWN + most_blocks(1) * 64, ANGLES = REDUCE + 192,
              QUERIES = ANGLES + most(PAIRS, 2) * 8, KEY = QUERIES + 32 * HEAD, VALUE = KEY + 2 * HEAD,
              RAW = VALUE + 2 * HEAD, BARRIERS = RAW + (HEADS_OF_GROUP + 2) * HEAD * 4,
              PLANS = BARRIERS + WARPS * STAGES * 16, TABLE = PLANS + 4 * sizeof(Plan);

static_assert(TABLE == HB_TABLE, "the host's sum");
static_assert(sizeof(Plan) % 16 == 0 && QUERIES % 16 == 0, "alignment");
static_assert((MOST_BLOCKS + WARPS) * 64 >= 3 * SLOTS * 32 + 64, "room for greatest scores, weights and factors");
template <class T> DEV T* at_shared(u32 offset) { return reinterpret_cast<T*>(shared + offset); }
struct Shared {
  // Halves in the order of B fragments; sums of attention.
  __device__ __forceinline__ u32* x() const { return at_shared<u32>(X); }
  __device__ __forceinline__ float* sums() const { return at_shared<float>(SUMS); }  // [row blocks + WARPS][16]
  __device__ __forceinline__ float* own() const {
    return at_shared<float>(OWN);
  }  // rows of the stream that this block adds to
  __device__ __forceinline__ float* reduce() const { return at_shared<float>(REDUCE); }
  // Of the step: its position, and how many were before it.
  __device__ __forceinline__ u32* step() const { return at_shared<u32>(REDUCE + 64); }
  // Where each warp is in its ring: stage and phase.
  __device__ __forceinline__ u32* turns() const { return at_shared<u32>(REDUCE + 128); }
  __device__ __forceinline__ float2* angles() const { return at_shared<float2>(ANGLES); }
  __device__ __forceinline__ float* rows() const { return at_shared<float>(ROWS); }  // [row blocks][16]
  __device__ __forceinline__ Plan& plan(u32 product) const { return at_shared<Plan>(PLANS)[product]; }
  __device__ __forceinline__ const Layer* layers() const { return at_shared<const Layer>(TABLE); }
  __device__ __forceinline__ u16* queries() const { return at_shared<u16>(QUERIES); }  // [2][8][HEAD]
  __device__ __forceinline__ u32* key() const { return at_shared<u32>(KEY); }  // of this token [HEAD / 2]
  __device__ __forceinline__ u32* value() const { return at_shared<u32>(VALUE); }
  __device__ __forceinline__ float* raw() const { return at_shared<float>(RAW); }  // [HEADS_OF_GROUP + 2][HEAD]
};
DEV void sync() { barrier_sync(1, THREADS); }

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
    plan.start[lane] = begin / s.stages | begin % s.stages << 16;
  }
  for (u32 j = lane; j < blocks; j += 32)
    plan.warps[j] = u16(((j * s.stages + 1) * workers - 1) / all | ((j + 1) * s.stages * workers - 1) / all << 8);
}

// The warps that bring weights: a lane a ring.
DEV void bring(u32 count, const Shared& m) {
  constexpr u32 RINGS = WARPS / COPYING_WARPS;
  if ((threadIdx.x & 31) >= RINGS) return;
  const u32 warp = (threadIdx.x - THREADS) / 32 * RINGS + (threadIdx.x & 31);
  const u32 base = shared_address(shared), own = base + warp * STAGES * STAGE,
            full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u64 policy = policy_evict_first();
  u32 stage = 0, phase = 1;
#pragma unroll 1
  for (u32 layer = 0; layer < count; layer++)
#pragma unroll 1
    for (u32 product = 0; product < 4; product++) {
      const u8* w = m.layers()[layer].product(product).w;
      const Plan& plan = m.plan(product);
      const Shape s = shape(product);
      const u32 run = plan.run[warp], start = plan.start[warp], end = run >> 16;
      const u32 steps = s.stages * STEPS, strips = ((s.row_blocks << s.paired) + 3) / 4;
      u32 j = start & 0xffff, t = start >> 16;
#pragma unroll 1
      for (u32 i = run & 0xffff; i < end;) {
        const u32 block = s.paired ? plan.first + (j >> 1) + (j & 1) * s.row_blocks : plan.first + j;
        const u32 strip = block >> 2, first = strip & ~3u, wide = min(4u, strips - first) * ATOM;
        const u8* codes =
            w + u64(first) * steps * ATOM + t * STEPS * wide + (strip - first) * ATOM + (block & 3) * (256 * BITS);
        const u32 scales = SCALES - (block & 3) * (256 * BITS - 32), zeros = ZEROS - (block & 3) * (256 * BITS - 16);
#pragma unroll 1
        for (; t < s.stages && i < end; t++, i++) {
          mbarrier_wait(empty + 8 * stage, phase);
          mbarrier_expect(full + 8 * stage, STAGE);
#pragma unroll
          for (u32 k = 0; k < STEPS; k++, codes += wide) {
            const u32 to = own + stage * STAGE + k * UNIT;
            copy_bulk(to, codes, 256 * BITS, full + 8 * stage, policy);
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
              copy_bulk(to + UNIT_SCALES + 32 * g, codes + scales + g * 128, 32, full + 8 * stage, policy);
              if (ZERO) copy_bulk(to + UNIT_ZEROS + 16 * g, codes + zeros + g * 64, 16, full + 8 * stage, policy);
            }
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        t = 0, j++;
      }
    }
}

// This warp's stages of a product with x, to sums.
DEV void multiply(const Shared& m, u32 product) {
  const Plan& plan = m.plan(product);
  const u32 warp = thread_index() / 32, lane = thread_index() & 31;
  const u32 stages = shape(product).stages, blocks = plan.blocks, run = plan.run[warp], start = plan.start[warp],
            end = run >> 16;
  const u32 base = shared_address(shared), full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u32 ring = base + warp * STAGES * STAGE + lane * 16, of_scales = base + warp * STAGES * STAGE + (lane >> 2) * 4;
  const u32 x = base + X + (lane & 3) * 16;
  u32 j = start & 0xffff, t = start >> 16;
  float sum = 0, sum8 = 0;
  u32 stage = m.turns()[warp] >> 1, phase = m.turns()[warp] & 1;
#pragma unroll 1
  for (u32 i = run & 0xffff; i < end; i++) {
    const u32 at = ring + stage * STAGE, of_x = x + t * (256 * STEPS), scale_at = of_scales + stage * STAGE;
    mbarrier_wait(full + 8 * stage, phase);
    u32 codes[STEPS][8 * WORDS], scales[STEPS][GROUPS];
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
      for (int v = 0; v < 2 * WORDS; v++) {
        u32 w[4];
        load_shared(w, at + k * UNIT + v * 512);
        codes[k][4 * v] = w[0], codes[k][4 * v + 1] = w[1], codes[k][4 * v + 2] = w[2], codes[k][4 * v + 3] = w[3];
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) scales[k][g] = load_shared(scale_at + k * UNIT + UNIT_SCALES + 32 * g);
    }
    constexpr int EACH = 8 / GROUPS;  // k16 steps of a group
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
      u32 b[4][4];
#pragma unroll
      for (int h = 0; h < 4; h++) load_shared(b[h], of_x + k * 256 + h * 64);
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        Zeros z = zeros_symmetric();
        if (ZERO) z = zeros_of(load_shared_u16(at - lane * 16 + k * UNIT + UNIT_ZEROS + 16 * g + (lane >> 2) * 2));
        float acc[2][4] = {};
#pragma unroll
        for (int h = g * EACH; h < (g + 1) * EACH; h++) {
          u32 a[4];
          decode(&codes[k][h * WORDS], z, a);
          mma_sync<BF16>(acc[h % 2], a, b[h / 2][2 * (h % 2)], b[h / 2][2 * (h % 2) + 1]);
        }
        sum = fmaf(acc[0][0] + acc[1][0], low(scales[k][g]), sum);
        sum8 = fmaf(acc[0][2] + acc[1][2], high(scales[k][g]), sum8);
      }
      if (k == STEPS - 1) {
        loads_before_copies();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + 8 * stage);
      }
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++t == stages || i + 1 == end) {
      if ((lane & 3) == 0) {
        float* to = m.sums() + (j + warp) * 16 + (lane >> 2);
        to[0] = sum, to[8] = sum8;
      }
      sum = sum8 = 0;
      if (t == stages) t = 0, j++;
    }
  }
  if (lane == 0) m.turns()[warp] = stage << 1 | phase;
  sync();
#pragma unroll 1
  for (u32 i = thread_index(); i < 16 * blocks; i += THREADS) {
    const u32 block = i / 16, warps = plan.warps[block];
    float total = 0;
#pragma unroll 1
    for (u32 w = warps & 255; w <= warps >> 8; w++) total += m.sums()[(block + w) * 16 + i % 16];
    m.rows()[i] = total;
  }
  sync();
}
// Waits until about all of n words are counted.
DEV void wait_for(const u32* counter, u32 n) {
  if (thread_index() == 0)
    while (look(counter) + 1 < n) {
    }
  sync();
}
// Where the word of columns k, k+1 of x lies.
DEV u32 place_of(u32 k) { return (k >> 5) * 16 + (k >> 1 & 3) * 4 + (k >> 4 & 1) * 2 + (k >> 3 & 1); }

// Not behind what is waited for, where the compiler would put it.
DEV float4 load_early(const float* p) {
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
// x = norm of the stream, when that is counted; the rows that this block will add to are kept.
DEV void norm_to_x(const Shared& m, const u32* from, const u32* counter, const float* weight, float eps) {
  constexpr u32 LOADS = (HIDDEN / 4 + THREADS - 1) / THREADS;
  const Plan& own = m.plan(1);
  float4 w[LOADS];
  uint4 v[LOADS];
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    w[i] = e < HIDDEN ? load_early(weight + e) : make_float4(0, 0, 0, 0);
  }
  wait_for(counter, HIDDEN);
  look_for(v, [&](u32 i) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    return e < HIDDEN ? from + e : nullptr;
  });
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    if (e < HIDDEN) {
      const float x = __uint_as_float(v[i].x), y = __uint_as_float(v[i].y), z = __uint_as_float(v[i].z),
                  u = __uint_as_float(v[i].w);
      sum = fmaf(x, x, fmaf(y, y, fmaf(z, z, fmaf(u, u, sum))));
      if (e - 16 * own.first < 16 * own.blocks) *reinterpret_cast<uint4*>(m.own() + e - 16 * own.first) = v[i];
    }
  }
  sum = warp_sum(sum);
  if ((thread_index() & 31) == 0) m.reduce()[thread_index() / 32] = sum;
  sync();
  sum = warp_sum((thread_index() & 31) < WARPS ? m.reduce()[thread_index() & 31] : 0.f);
  const float factor = rsqrtf(sum / float(HIDDEN) + eps);
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    if (e < HIDDEN) {
      const u32 at = place_of(e);
      m.x()[at] = pair(__uint_as_float(v[i].x) * factor * w[i].x, __uint_as_float(v[i].y) * factor * w[i].y);
      m.x()[at + 4] = pair(__uint_as_float(v[i].z) * factor * w[i].z, __uint_as_float(v[i].w) * factor * w[i].w);
    }
  }
  sync();
}
// x = words of pairs, when they are counted.
DEV void words_to_x(const Shared& m, const u32* from, const u32* counter, u32 n) {
  wait_for(counter, n);
  constexpr u32 AT_ONCE = 4;
#pragma unroll 1
  for (u32 first = 4 * thread_index(); first < n; first += 4 * THREADS * AT_ONCE) {
    uint4 v[AT_ONCE];
    auto at = [&](u32 i) { return first + 4 * THREADS * i < n ? from + first + 4 * THREADS * i : nullptr; };
    look_for(v, at);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 to = place_of(2 * (first + 4 * THREADS * i));
      if (at(i)) m.x()[to] = v[i].x, m.x()[to + 4] = v[i].y, m.x()[to + 8] = v[i].z, m.x()[to + 12] = v[i].w;
    }
  }
  sync();
}

// Leaves words, as `of` makes them: a thread a word, and counts them.
template <class Of> DEV void leave_words(u32 words_here, u32* to, u32* counter, Of&& of) {
#pragma unroll 1
  for (u32 first = thread_index() & ~31u; first < words_here; first += THREADS) {
    const u32 i = first + (thread_index() & 31);
    if (i < words_here) leave(to + i, of(i));
    __syncwarp();
    if ((thread_index() & 31) == 0) count(counter, min(32u, words_here - first));
  }
}

// A float of a type that is known when the kernel runs.
DEV float load_float(const void* from, u64 at, u32 type) {
  if (type == 2) return static_cast<const float*>(from)[at];
  const u32 bits = static_cast<const u16*>(from)[at];
  return type == 1 ? bf16_low(bits) : half_low(bits);
}

#include "persistent_attention.cuh"

// What is left of a product: rows of q, k and v; the stream with rows of output and down added; gated rows in pairs.
DEV void leave_product(const Shared& m, u32* words, u32 layer, u32 product) {
  const Plan& plan = m.plan(product);
  const float* const bias = m.layers()[layer].product(product).bias;
  const u32 first = 16 * plan.first;
  if (product == 2) {
    leave_words(4 * plan.blocks, words + AT_INNER + first / 2, words + GATED, [&](u32 i) {
      float v[2];
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        const u32 j = i / 8, r = 2 * i % 16 + e;
        float gate = m.rows()[32 * j + r], up = m.rows()[32 * j + 16 + r];
        if (bias) gate += __ldg(bias + first + 16 * j + r), up += __ldg(bias + INNER + first + 16 * j + r);
        v[e] = gate / (1.0f + expf(-gate)) * up;
      }
      return pair(v[0], v[1]);
    });
    return;
  }
  u32* const to = words + (product == 0 ? AT_QKV : product == 1 ? AT_MIDDLE : WORDS_OF_LAYER) + first;
  u32* const counter = words + (product == 0 ? QKV : product == 1 ? MIDDLE : WORDS_OF_LAYER + STREAM);
  leave_words(16 * plan.blocks, to, counter, [&](u32 i) {
    float v = m.rows()[i];
    if (bias) v += __ldg(bias + first + i);
    return __float_as_uint(product == 0 ? v : v + m.own()[i]);
  });
}

// Brings what the layer will read besides weights into the second-level cache.
DEV void prefetch(const Params& p, const Shared& m, u32 i) {
  const Layer& layer = m.layers()[i];
  prefetch_cache(p, layer, m.step()[0]);
  if (block_index() != BLOCKS - 1) return;
  const float* next = i + 1 < p.count ? m.layers()[i + 1].product(0).norm : p.norm;
#pragma unroll 1
  for (u32 e = 32 * thread_index(); e < HIDDEN; e += 32 * THREADS)
    prefetch_l2(layer.product(2).norm + e), prefetch_l2(next + e);
}

// The places of this step.
DEV u32* set_of(const Params& p, const Shared& m) {
  const u64 words = u64(p.count + 1) * WORDS_OF_LAYER + u64(p.count) * PARTS_OF_LAYER;
  return p.words + (m.step()[1] & 1 ? words : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * COPYING_WARPS, 1)
    persistent_decode(const __grid_constant__ Params p) {
  const Shared m;
  const u32 barriers = shared_address(shared) + BARRIERS;
  if (threadIdx.x < WARPS * STAGES) {
    const u32 bar = barriers + (threadIdx.x / STAGES) * STAGES * 16 + (threadIdx.x % STAGES) * 8;
    mbarrier_init(bar, 1);
    mbarrier_init(bar + 8 * STAGES, 1);
  }
  for (u32 i = threadIdx.x; i < p.count * sizeof(Layer) / 4; i += THREADS + 32 * COPYING_WARPS)
    at_shared<u32>(TABLE)[i] = reinterpret_cast<const u32*>(p.layers)[i];
  mbarrier_init_fence();
  if (threadIdx.x < 4 * 32) make_plan(m.plan(threadIdx.x / 32), threadIdx.x / 32);
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    bring(p.count, m);
    return;
  }

  const u32 step = p.state[0], position = min(*p.position, u32(p.capacity) - 1);  // the limit guards memory
  if (threadIdx.x == 0) m.step()[0] = position, m.step()[1] = step;
  if (threadIdx.x < WARPS) m.turns()[threadIdx.x] = 0;
  const u64 of_set = u64(p.count + 1) * WORDS_OF_LAYER + u64(p.count) * PARTS_OF_LAYER;
  u32* const set = p.words + (step & 1) * of_set;
  {  // the other set, as far as the step before has used it
    u32* const other = p.words + (~step & 1) * of_set;
    const u64 used = u64(p.count + 1) * WORDS_OF_LAYER + (p.state[1] > 1 ? u64(p.count) * PARTS_OF_LAYER : 0);
    for (u64 i = 4 * (blockIdx.x * THREADS + threadIdx.x); i < used; i += 4 * THREADS * BLOCKS)
      *reinterpret_cast<uint4*>(other + i) = make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET);
  }
  const u32 token = *p.token;
  for (u32 i = threadIdx.x; i < PAIRS; i += THREADS) {
    double turns = double(position) * p.turns[i], sine, cosine;
    turns -= rint(turns);
    sincospi(2 * turns, &sine, &cosine);
    m.angles()[i] = make_float2(float(cosine), float(sine));
  }
  for (u32 i = threadIdx.x; i < 2 * 8 * HEAD / 2; i += THREADS) reinterpret_cast<u32*>(m.queries())[i] = 0;

  sync();

  // The token's vector is the first stream.
  {
    const Plan& rows = m.plan(1);
    leave_words(16 * rows.blocks, set + 16 * rows.first, set + STREAM, [&](u32 i) {
      return __float_as_uint(load_float(p.embedding, u64(token) * HIDDEN + 16 * rows.first + i, p.embedding_type));
    });
  }
#pragma unroll 1
  for (u32 i = 0; i < p.count; i++) {
#pragma unroll 1
    for (u32 product = 0; product < 4; product++) {
      {
        const u32* const words = set_of(p, m) + again(i) * WORDS_OF_LAYER;
        const Product& of = m.layers()[i].product(product);
        switch (product) {
          case 0:
          case 2:
            norm_to_x(m, words + (product ? AT_MIDDLE : 0), words + (product ? MIDDLE : STREAM), of.norm, of.eps);
            break;
          default:
            words_to_x(m, words + (product == 1 ? AT_ATTENDED : AT_INNER), words + (product == 1 ? ATTENDED : GATED),
                       (product == 1 ? ATTENDED_LENGTH : INNER) / 2);
        }
      }
      if (product == 0) prefetch(p, m, again(i));
      multiply(m, product);
      leave_product(m, set_of(p, m) + again(i) * WORDS_OF_LAYER, again(i), product);
      if (product == 0) attend(p, m, again(i), set_of(p, m));
    }
  }
  u32* const last = set_of(p, m) + p.count * WORDS_OF_LAYER;
  norm_to_x(m, last, last + STREAM, p.norm, p.eps);
  for (u32 i = block_index() * THREADS + thread_index(); i < HIDDEN / 2; i += BLOCKS * THREADS)
    static_cast<u32*>(p.normed)[i] = m.x()[place_of(2 * i)];
  if (block_index() == 0 && thread_index() == 0) {
    p.state[0] = m.step()[1] + 1;
    p.state[1] = Parts(m.step()[0], 0).count;
  }
}
