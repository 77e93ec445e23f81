// The cp.async pipeline of the GEMMs by mma.sync: a ring of stages that all threads of a block keep full, and where a
// warp finds its part of a stage.  On sm_75 what is copied waits in registers while a stage is read.
// After the header of a kernel's configuration, which says
//   X_BYTES     bytes of a column of x
//   PADDED      whether rows of x have zeros up to a multiple of 128 columns
//   WIDTH       of how many tokens fragments are loaded at once
//   PARTS       in how many parts a stage is filled
//   COPIES_TERMS, copy_terms  what copies what x has beside its columns, a thread's copies of it
//   sum_stage   what makes sums of a stage of x, where W_OFFSET needs them: while the stage before is read
// x is a matrix, or (HB_IMAGES) windows on images.
#pragma once
#include "epilogue.cuh"

constexpr int BOX_K = 128 / X_BYTES, BOXES = STEP / BOX_K;  // columns of a box, boxes of a stage of x
constexpr int COPIES_W = (W_PIECES + THREADS - 1) / THREADS,
              COPIES_X = (BOXES * X_PIECES + THREADS - 1) / THREADS;  // a thread's
// Of scales, zero points and offsets that do not come with codes.
constexpr int GROUP_PIECES = STEP < 128 && GROUP != 0 ? 4 * TILE_STRIPS * (STAGE_PARAMS / 16) : 0,
              COPIES_GROUPS = (GROUP_PIECES + THREADS - 1) / THREADS;
// Where each kind begins among the copies of a stage.
constexpr int FIRST_X = COPIES_W, FIRST_GROUP = FIRST_X + COPIES_X, FIRST_TERM = FIRST_GROUP + COPIES_GROUPS;
typedef PendingCopies<FIRST_TERM + COPIES_TERMS> StageCopies;

// Where a thread's pieces of x lie, in the order of its copies of a stage: of rows of a matrix.
//
//   begin(g, token, strip, k)  the rows from `token` on, which a strip of W is multiplied by, from atom k on
//   next_stage(g, half)        moves on by STEP columns, within an atom
//   next_atom(g)               the same, to the next atom; whether W begins anew with it
//   end()                      there are no more: zeros
//   atom_of_w(g, k)            the atom of W along k that atom k is multiplied by
//   is_there(g, c), at(g, c)   copy c, zeros where nothing is there
struct MatrixRows {
  const u8* x;
  int rows_left, k_left;  // of this thread's first piece of x, and what is left from there
  __device__ __forceinline__ void begin(const Given& g, int token, int, int k) {
    const int t = threadIdx.x, m = token + t / 8 % NT, column = k * 128 + t / X_PIECES * BOX_K + t % 8 * (16 / X_BYTES);
    x = (const u8*)g.x + ((u64)m * g.pitch + column) * X_BYTES;
    rows_left = g.m - m;
    k_left = g.k - column;
  }
  __device__ __forceinline__ void next_stage(const Given&, int) {
    x += STEP * X_BYTES;
    k_left -= STEP;
  }
  __device__ __forceinline__ bool next_atom(const Given& g) {
    next_stage(g, 0);
    return false;
  }
  __device__ __forceinline__ void end() { rows_left = -NT; }
  DEV int atom_of_w(const Given&, int k) { return k; }
  DEV int box_of(int copy) { return copy * THREADS / X_PIECES; }
  DEV int row_of(int copy) { return copy * THREADS % X_PIECES / 8; }
  __device__ __forceinline__ bool is_there(const Given&, int copy) const {
    return row_of(copy) < rows_left && (PADDED || box_of(copy) * BOX_K < k_left);
  }
  __device__ __forceinline__ const u8* at(const Given& g, int copy) const {
    return x + ((u64)row_of(copy) * g.pitch + box_of(copy) * BOX_K) * X_BYTES;
  }
  // First token of the tile; behind the last stage one that is not there.
  __device__ __forceinline__ int token(const Given& g) const { return g.m - rows_left - (int)threadIdx.x / 8 % NT; }
};
#ifdef HB_IMAGES
#include "image_rows.cuh"
typedef ImageRows RowsOfX;
#else
typedef MatrixRows RowsOfX;
DEV int steps_of_w(const Given& g) { return g.steps; }
#endif

// The stages of this block in order, with what a thread copies of them: 16-byte pieces t, t + THREADS, ... of W and of
// x.  What depends on t is computed once a stage, the rest are constants.  Behind the last stage nothing is left of W,
// and x is zeros.
struct Feed {
  int piece, k, kend;  // the next piece of this block; of the current one units [k, kend) are left
  const u8* source;
  u32 step;
  int strips, half;
  u32 columns;
  RowsOfX rows;
  __device__ __forceinline__ void start(const Given& g) {
    strips = half = 0;
    Schedule sc;
    if (!Schedule::piece(g, columns, piece++, sc)) {
      k = 0;
      kend = 1 << 30;
      return rows.end();
    }
    k = sc.k;
    kend = sc.kend;
    const Place at = place(g, columns, sc.tile);
    const int all = (g.n + 63) >> 6, strip = at.row * TILE_STRIPS, super = strip >> 2, sub = strip & 3;
    const int in = all - 4 * super < 4 ? all - 4 * super : 4;
    strips = in - sub < TILE_STRIPS ? in - sub : TILE_STRIPS;
    const int steps = steps_of_w(g);
    source = atoms_of(g, at) + ((u64)super * 4 * steps + (u64)RowsOfX::atom_of_w(g, sc.k) * in + sub) * ATOM;
    step = in * ATOM;
    rows.begin(g, at.x, strip, sc.k);
  }
  __device__ __forceinline__ void next(const Given& g) {
    if (++half < HALVES) return rows.next_stage(g, half);
    half = 0;
    source += step;
    if (++k == kend) return start(g);
    if (rows.next_atom(g)) source -= (u64)steps_of_w(g) * step;
  }
};
// Of the pieces of W of a stage, a thread's c-th one: of 128 columns all are one piece of memory, of fewer these are
// codes.
DEV void copy_w(StageCopies& copies, const Feed& f, u32 to, int c) {
  const int t = threadIdx.x, first = c * THREADS;
  if constexpr (STEP == 128) {
    copies.start_if(c, to + (first + t) * 16, f.source + (first + t) * 16, first + t < f.strips * (ATOM / 16));
    return;
  }
  constexpr int OF_UNIT = STAGE_CODES / 16, OF_STRIP = 4 * OF_UNIT;
  if constexpr (THREADS % OF_STRIP != 0 && OF_STRIP % THREADS != 0) {  // of 3 and 5 bits
    const u32 piece = first + t, strip = piece / OF_STRIP, rest = piece % OF_STRIP;
    copies.start_if(c, to + strip * STRIP_BYTES + rest * 16,
                    f.source + strip * ATOM + rest / OF_UNIT * UNIT_CODES + rest % OF_UNIT * 16 + f.half * STAGE_CODES,
                    piece < W_PIECES && strip < u32(f.strips));
    return;
  }
  const u32 strip = first / OF_STRIP, rest = first % OF_STRIP;
  const u32 from = t / OF_STRIP * ATOM + t % OF_STRIP / OF_UNIT * UNIT_CODES + t % OF_UNIT * 16 + f.half * STAGE_CODES;
  copies.start_if(c, to + (strip + t / OF_STRIP) * STRIP_BYTES + (rest + t % OF_STRIP) * 16,
                  f.source + (from + strip * ATOM + rest / OF_UNIT * UNIT_CODES),
                  (W_PIECES % THREADS == 0 || first + t < W_PIECES) && strip + t / OF_STRIP < f.strips);
}
// Scales, zero points, offsets, where they do not come with codes.
DEV void copy_groups(StageCopies& copies, const Feed& f, u32 to) {
  constexpr int SCALE_PIECES = GROUP_SCALES / 16 * STAGE_GROUPS, EACH = GROUP == 0 ? 1 : STAGE_PARAMS / 16;
  if constexpr (COPIES_GROUPS > 0) {
    const int group = GROUP == 128 ? 0 : f.half * STAGE_GROUPS;
#pragma unroll
    for (int c = 0; c < COPIES_GROUPS; c++) {
      const int piece = c * THREADS + threadIdx.x, strip = piece / (4 * EACH), unit = piece / EACH % 4,
                at = piece % EACH;
      const u32 from =
          unit * UNIT_PARAMS +
          (at < SCALE_PIECES ? group * GROUP_SCALES + at * 16 : ZEROS + group * GROUP_ZEROS + (at - SCALE_PIECES) * 16);
      copies.start_if(FIRST_GROUP + c, to + strip * STRIP_BYTES + STRIP_PARAMS + unit * STAGE_PARAMS + at * 16,
                      f.source + strip * ATOM + PARAMS + from, strip < f.strips);
    }
  }
}
// Of the pieces of x, a thread's c-th one; zeros beyond m and k.
DEV void copy_x(StageCopies& copies, const Given& g, const Feed& f, u32 to, int c) {
  const int t = threadIdx.x, first = c * THREADS;
  const int token = t / 8 % NT, piece = t % 8, box = first / X_PIECES, more = first % X_PIECES / 8;
  const bool there = f.rows.is_there(g, c);
  const u32 at = to + (box + t / X_PIECES) * BOX + (more + token) * 128 + ((piece ^ (token & 7)) << 4);
  const u8* from = there ? f.rows.at(g, c) : (const u8*)g.x;
  if (BOXES * X_PIECES % THREADS == 0 || first + t < BOXES * X_PIECES)
    copies.start_or_zero(FIRST_X + c, at, from, there);
  else
    copies.skip(FIRST_X + c);
}

// The ring: stages that are read in turn.  While one is read, the one before it is filled again, a part of it in each
// step.
struct Ring {
  u32 x, w;
  Feed feed;
  u32 stage, free;
  StageCopies copies;  // to the stage `free`
  __device__ __forceinline__ void copy_all_w() {
#pragma unroll
    for (int c = 0; c < COPIES_W; c++) copy_w(copies, feed, w + free * STAGE_W, c);
    copy_groups(copies, feed, w + free * STAGE_W);
  }
  __device__ __forceinline__ void copy_all_x(const Given& g) {
#pragma unroll
    for (int c = 0; c < COPIES_X; c++) copy_x(copies, g, feed, x + free * STAGE_X, c);
    copy_terms(copies, FIRST_TERM, g, feed.k, feed.rows.token(g), w + STAGES * STAGE_W + free * STAGE_TERMS);
  }
  // Part `part` of PARTS; each a few copies.
  __device__ __forceinline__ void copy(const Given& g, int part) {
#pragma unroll
    for (int c = 0; c < COPIES_W; c++)
      if (c % PARTS == part) copy_w(copies, feed, w + free * STAGE_W, c);
#pragma unroll
    for (int c = 0; c < COPIES_X; c++)
      if ((c + COPIES_W) % PARTS == part) copy_x(copies, g, feed, x + free * STAGE_X, c);
    if (part == PARTS - 1) {
      copy_groups(copies, feed, w + free * STAGE_W);
      copy_terms(copies, FIRST_TERM, g, feed.k, feed.rows.token(g), w + STAGES * STAGE_W + free * STAGE_TERMS);
    }
  }
  // After all parts.
  __device__ __forceinline__ void close(const Given& g) {
    copies.finish();
    feed.next(g);
  }
  __device__ __forceinline__ void fill(const Given& g, u32 base) {
    x = base;
    w = base + STAGES * STAGE_X;
    feed.piece = 0;
    wait_for_columns(g);
    feed.columns = columns_of(g);
    feed.start(g);
#if __CUDA_ARCH__ >= 900
    // W depends on no kernel before this one: it is copied while they end.
    const Feed first = feed;
#pragma unroll 1
    for (free = 0; free < STAGES - 1; free++, feed.next(g)) copy_all_w();
    dependency_wait();
    feed = first;
#pragma unroll 1
    for (free = 0; free < STAGES - 1; free++) {
      copy_all_x(g);
      close(g);
    }
#else
#pragma unroll 1
    for (free = 0; free < STAGES - 1; free++) {
      copy_all_w();
      copy_all_x(g);
      close(g);
    }
#endif
    stage = STAGES - 1;
    free = STAGES - 2;
    if constexpr (W_OFFSET) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      sum_stage(x, terms(0));
    }
  }
  // Moves to the next stage, when it is there for all warps.
  __device__ __forceinline__ void open() {
    free = stage;
    if (++stage == STAGES) stage = 0;
    copy_wait<STAGES - 2 - W_OFFSET>();
    __syncthreads();
    if constexpr (W_OFFSET) {
      const u32 next = stage + 1 == STAGES ? 0 : stage + 1;
      sum_stage(x + next * STAGE_X, terms(next));
    }
  }
  // What x has beside the columns of a stage.
  __device__ __forceinline__ u32 terms(u32 of) const { return w + STAGES * STAGE_W + of * STAGE_TERMS; }
};

typedef u32 Step[(NT + 15) / 16][4];  // B fragments of 16 k

// A warp's place in the stages.
struct Warp {
  u32 row, codes, scales,
      // addresses in the first stage: this lane's row of x for ldmatrix, and what W has for it; zeros or offsets
      zeros, params, upper;  // what scales are multiples of and by; upper bits of codes of 3, 5 and 6
  int pair;  // of rows
  DEV Warp make(const Ring& r, int wg, int warp, int lane) {
    const int token = (lane & 7) + (WIDTH == 8 ? 0 : (lane >> 4) << 3), piece = lane >> 3 & (WIDTH == 8 ? 3 : 1);
    const u32 strip = r.w + wg * STRIPS * STRIP_BYTES, codes = strip + warp * STAGE_CODES,
              params = strip + STRIP_PARAMS + warp * STAGE_PARAMS;
    return {r.x + token * 128 + ((piece ^ (lane & 7)) << 4),
            codes + lane * (BITS < 4 ? 8 : 16),
            params + (lane >> 2) * (GROUP_SCALES / 8),
            params + STAGE_ZEROS + (lane >> 2) * (GROUP_ZEROS / 8),
            params,
            BITS == 6 ? codes + 512 + lane * 8 : codes + (BITS == 3 ? 256 : 512) + lane * 4,
            lane >> 2};
  }
  // x of WIDTH tokens and 32 bytes of columns; with 8 tokens and PAIR, 64 bytes.
  template <bool PAIR = false> __device__ __forceinline__ void load_block(u32 (&b)[4], u32 stage, int j, int i) const {
    const u32 at = ((row + stage * STAGE_X + (j >> 2) * BOX) ^ ((j & 3) << 5)) + i * (WIDTH * 128);
    if constexpr (WIDTH == 8 && !PAIR)
      load_two_matrices(b, at);
    else
      load_matrices(b, at);
  }
  __device__ __forceinline__ void load_x(Step& b, u32 stage, int j) const {
#pragma unroll
    for (int i = 0; i < (NT + 15) / 16; i++) load_block(b[i], stage, j, i);
  }
  // A lane's words of STEPS k16 steps of a strip of a stage, from a step on.
  template <int STEPS>
  __device__ __forceinline__ void load_steps(u32 (&q)[words_of(STEPS)], u32 stage, int p, int step) const {
    // Words of the lower bits, those that lie together, and from such to the next.
    constexpr int COUNT = lower_words(STEPS), QUAD = BITS < 4 ? 2 : 4, APART = UNIT_CODES / (BITS == 8 ? 4 : 2);
    const u32 strip = stage * STAGE_W + p * STRIP_BYTES, at = codes + strip;
    const int first = lower_words(step);
    if constexpr (COUNT == 1) {
      q[0] = load_shared(at + first / QUAD * APART + first % QUAD * 4);
    } else if constexpr (COUNT == 2 || QUAD == 2) {
#pragma unroll
      for (int i = 0; i < COUNT; i += 2) {
        u32 v[2];
        load_shared(v, at + (first + i) / QUAD * APART + (first + i) % QUAD * 4);
        q[i] = v[0];
        q[i + 1] = v[1];
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        u32 v[4];
        load_shared(v, at + ((first + i) >> 2) * APART);
#pragma unroll
        for (int e = 0; e < 4; e++) q[i + e] = v[e];
      }
    }
    if constexpr (BITS == 6) {
#pragma unroll
      for (int i = 0; i < STEPS / 2; i++)
        q[COUNT + i] = load_shared(upper + strip + (step / 2 + i) / 2 * APART + (step / 2 + i) % 2 * 4);
    }
    if constexpr (BITS == 3 || BITS == 5) {  // of two steps the bits that are those of the first two of four
#pragma unroll
      for (int i = 0; i < (STEPS + 3) / 4; i++) {
        const u32 word = load_shared(upper + strip + (step / 4 + i) * APART);
        q[COUNT + i] = STEPS == 2 ? word >> (BITS == 5 ? 2 * (step & 2) : step & 2) : word;
      }
    }
  }
};
