// The experts of a few rows, each choice by itself, in one kernel:
//   inner[row][i] = the gated outputs of up[ids[row][i]] . x[row] + bias
//   y[row] = sum of shares[row][i] * (down[ids[row][i]] . inner[row][i] + bias), in the order of i
//
//   a block walks over items of 32 or 16 rows of a weight; its warps share the columns of an item, each another part
//       from item to item, and one of them, each in its turn, adds up in order
//   what is multiplied lies in shared memory as B fragments have it; it is column 0 of B, the other columns are zeros
//   codes come by plain loads, some units (the rows of an item x 128 columns) ahead, those of the next item among them;
//       the first of down come while the blocks of a row wait for each other
//
// Blocks of a row wait for each other: the launch is cooperative, so that all are there at once, whatever other streams
// run. Which expert is read from memory, so that a step with its choice is recorded. weight_atom.cuh draws the
// packed weights.
#include "ampere.cuh"
#include "decode_codes.cuh"
#include "output_function.cuh"
#include "ptx.cuh"

// Of all experts, one kind of weight.
struct Weights {
  const u64* atoms;  // [experts]: addresses of atoms
  const u64* biases;  // [experts]: addresses of floats; or null
};

// As `Params` in experts_gemv.rs.
struct Params {
  Weights up, down;  // [2 * width][hidden], gates and others in turn; [hidden][width]
  const u32* ids;  // [rows][top_k]
  const float* shares;  // [rows][top_k]
  const u16* x;  // [rows][hidden], at a multiple of 16 bytes
  u16* inner;  // [rows][top_k][width], likewise
  float* y;  // [rows][hidden]
  u32* counters;  // [rows][2], zeros before and after: blocks that have left what they add to inner; that have ended
  u32 hidden, width, experts, top_k;
};

constexpr u32 WARPS = 16, MOST_CHOICES = 16;  // of a block, of a row
constexpr int AT_ONCE = HB_AT_ONCE;  // units on their way, of each warp
constexpr u32 TOGETHER = 4;  // items that end together: shares of one are not even, those of some are more so
// Blocks of 16 rows of an item: what x is loaded for at once. Of down fewer, where that gives more blocks something to
// do; chosen before it is compiled, since a kernel with both was slower.
constexpr int OF_UP = 8 / FIELD, OF_DOWN = HB_OF_DOWN;

extern __shared__ __align__(16) u32 x_words[];  // [units][8 k16 steps in pairs][4 lanes][4]

template <int BLOCKS_OF_16> struct Unit {
  u32 codes[BLOCKS_OF_16][words_of(8)], scales[BLOCKS_OF_16][GROUPS], zeros[BLOCKS_OF_16][GROUPS];
  // From where the codes of an item's rows and 128 columns lie, less than an atom behind its beginning.
  __device__ __forceinline__ void load(const u8* atom, u32 first, u32 lane) {
#pragma unroll
    for (int r = 0; r < BLOCKS_OF_16; r++) {
      const u8 *const own = atom + (first + r) * UNIT_CODES, *const params = atom + PARAMS + (first + r) * UNIT_PARAMS;
      if constexpr (BITS < 4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint2 v = load_8_once(own + i * (UNIT_CODES / 2) + lane * 8);
          codes[r][2 * i] = v.x, codes[r][2 * i + 1] = v.y;
          if (BITS == 3)
            codes[r][(4 + i) % words_of(8)] =
                __ldg(reinterpret_cast<const u32*>(own + i * (UNIT_CODES / 2) + 256) + lane);
        }
      } else {
        constexpr int QUADS = lower_words(2);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
          const u8* quad = own + i * (UNIT_CODES / QUADS);
          const uint4 v = load_once(quad + lane * 16);
          codes[r][4 * i] = v.x, codes[r][4 * i + 1] = v.y, codes[r][4 * i + 2] = v.z, codes[r][4 * i + 3] = v.w;
          if (BITS == 5) codes[r][(8 + i) % words_of(8)] = __ldg(reinterpret_cast<const u32*>(quad + 512) + lane);
        }
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        scales[r][g] = __ldg(reinterpret_cast<const u32*>(params + g * GROUP_SCALES) + (lane >> 2));
        zeros[r][g] = ZERO ? __ldg(reinterpret_cast<const u16*>(params + ZEROS + g * GROUP_ZEROS) + (lane >> 2)) : 0;
      }
    }
  }
  // Adds its products, times a share, to the sums of rows R and R+8 of each 16, which the first of four lanes has.
  __device__ __forceinline__ void multiply(const u32* x, u32 lane, float share, float (&sum)[BLOCKS_OF_16][2]) const {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      constexpr int EACH = 8 / GROUPS;  // k16 steps of a group
      float acc[BLOCKS_OF_16][4] = {};
#pragma unroll
      for (int j = g * EACH; j < (g + 1) * EACH; j += 2) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (lane < 4) b = reinterpret_cast<const uint4*>(x)[2 * j + lane];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int r = 0; r < BLOCKS_OF_16; r++) {
            u32 a[4];
            decode<8>(codes[r], j + half, ZERO ? zeros_of(zeros[r][g]) : zeros_symmetric(), a);
            mma_sync<BF16>(acc[r], a, half ? b.z : b.x, half ? b.w : b.y);
          }
      }
#pragma unroll
      for (int r = 0; r < BLOCKS_OF_16; r++) {
        sum[r][0] = fmaf(acc[r][0], low(scales[r][g]) * share, sum[r][0]);
        sum[r][1] = fmaf(acc[r][2], high(scales[r][g]) * share, sum[r][1]);
      }
    }
  }
};

// An expert that the row has chosen.
struct Chosen {
  const u8* atoms[2];  // of up, of down
  const float* biases[2];
  float share;
};

struct Shared {
  float sums[2 * TOGETHER][WARPS][16 * OF_UP];
  Chosen chosen[MOST_CHOICES];
};

// Elements of rows, past the first-level cache, to the places that B fragments have: eight columns at a time, words of
// one k16 step and one half of it. Short rows come several at once.
DEV void stage(const u16* from, u32 rows, u32 columns) {
  const u32 steps = (columns + 127) / 128, vectors = 16 * steps, at_once = max(1, 32 * WARPS / vectors);
  const u32 own = at_once > 1 ? threadIdx.x / vectors : 0;
#pragma unroll 1
  for (u32 row = own < at_once ? own : rows; row < rows; row += at_once) {
    const uint4* const x = reinterpret_cast<const uint4*>(from + u64(row) * columns);
#pragma unroll 2
    for (u32 i = threadIdx.x - own * vectors; i < vectors; i += 32 * WARPS) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (8 * i < columns)
        asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(x + i));
      const u32 step = i / 2 % 8;
      u32* const to = x_words + (row * steps + i / 16) * 64 + step / 2 * 16 + step % 2 * 2 + i % 2;
      to[0] = v.x, to[4] = v.y, to[8] = v.z, to[12] = v.w;
    }
  }
  __syncthreads();
}

// Up, or down with the sum over a row's experts.
template <bool DOWN, int BLOCKS_OF_16> struct Phase {
  static constexpr u32 ROWS = 16 * BLOCKS_OF_16;
  const Params& p;
  Shared& shared;
  u32 warp, lane, row, steps, strips, row_blocks, items, all;
  __device__ __forceinline__ Phase(const Params& p, Shared& shared)
      : p(p), shared(shared), warp(threadIdx.x / 32), lane(threadIdx.x % 32), row(blockIdx.y) {
    const u32 n = DOWN ? p.hidden : 2 * p.width;
    steps = ((DOWN ? p.width : p.hidden) + 127) / 128, strips = (n + 63) / 64, row_blocks = (n + ROWS - 1) / ROWS;
    items = DOWN ? row_blocks : p.top_k * row_blocks, all = DOWN ? p.top_k * steps : steps;
  }

  // A place among the units of this warp: of an item, of the rows from ROWS * `rows` on of the weight of choice `of`.
  struct Walk {
    u32 item, part, unit, end, rows, of;
  };
  __device__ __forceinline__ void enter(Walk& w) const {
    w.unit = w.part * all / WARPS, w.end = (w.part + 1) * all / WARPS;
    if constexpr (DOWN)
      w.of = w.unit / steps;
    else
      while (w.rows >= row_blocks && w.item < items) w.rows -= row_blocks, w.of++;
  }
  __device__ __forceinline__ void next_item(Walk& w) const {
    w.item += gridDim.x, w.rows += gridDim.x, w.part = (w.part + 1) % WARPS;
    enter(w);
  }
  // The next unit; false at the end of what is known of the weight's place.
  __device__ __forceinline__ bool next_unit(Walk& w) const {
    w.unit++;
    if (DOWN && w.unit == (w.of + 1) * steps) {
      w.of++;
      return false;
    }
    return w.unit != w.end;
  }

  // Keeps what this warp has of an item, the block's number `turn`; of the last of several that end together warps wait
  // for each other, and each of some adds up an item.
  __device__ __forceinline__ void finish(const Walk& at, u32 turn, float (&sum)[BLOCKS_OF_16][2]) const {
    float (&own)[16 * OF_UP] = shared.sums[turn % (2 * TOGETHER)][at.part];
#pragma unroll
    for (int r = 0; r < BLOCKS_OF_16; r++) {
      if (lane % 4 == 0) own[16 * r + lane / 4] = sum[r][0], own[16 * r + 8 + lane / 4] = sum[r][1];
      sum[r][0] = sum[r][1] = 0;
    }
    if (turn % TOGETHER != TOGETHER - 1 && at.item + gridDim.x < items) return;
    __syncthreads();
    const u32 behind = (turn - warp) % WARPS;  // turns since that of which this warp adds up the parts
    if (behind > turn % TOGETHER) return;
    const u32 item = at.item - behind * gridDim.x, of = DOWN ? 0 : item / row_blocks, rows = item - of * row_blocks;
    const float (&sums)[WARPS][16 * OF_UP] = shared.sums[(turn - behind) % (2 * TOGETHER)];
    const u32 i = lane % ROWS, output = rows * ROWS + i, first = of;
    const bool there = output < (DOWN ? p.hidden : 2 * p.width);
    float total = 0;
    for (u32 j = first; j < (DOWN ? p.top_k : first + 1); j++)
      if (const float* bias = shared.chosen[j].biases[DOWN]; bias && there)
        total = fmaf(bias[output], DOWN ? shared.chosen[j].share : 1.f, total);
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) total += sums[w][i];
    if constexpr (DOWN) {
      if (lane < ROWS && there) p.y[u64(row) * p.hidden + output] = total;
    } else {
      const float v = gated(total, __shfl_down_sync(0xffffffff, total, 8));
      const u64 to = (u64(row) * p.top_k + first) * p.width + rows * (ROWS / 2) + i / 16 * 8 + i % 8;
      if (lane < ROWS && i % 16 < 8 && there) p.inner[to] = BF16 ? bfloat_of_float(v) : half_of_float(v);
    }
  }

  // `input` brings what is multiplied, once the first weights are on their way.
  template <class Input> __device__ __forceinline__ void run(const Input& input) const {
    Walk here = {blockIdx.x, warp, 0, 0, blockIdx.x, 0};
    enter(here);
    Walk ahead = here;
    u32 step = 0;
    const u8* from = nullptr;
    const auto find = [&] {
      while (ahead.item < items && ahead.unit == ahead.end) next_item(ahead);
      if (ahead.item >= items) return;
      const u32 strip = ahead.rows / (64 / ROWS), super = strip & ~3u, in = min(4u, strips - super);
      const u32 k = DOWN ? ahead.unit - ahead.of * steps : ahead.unit;
      step = in * ATOM;
      from = shared.chosen[ahead.of].atoms[DOWN] + (u64(super) * steps + u64(k) * in + (strip - super)) * ATOM;
    };
    const auto load = [&](Unit<BLOCKS_OF_16>& unit) {
      if (ahead.item >= items) return;
      unit.load(from, ahead.rows % (64 / ROWS) * BLOCKS_OF_16, lane);
      from += step;
      if (!next_unit(ahead)) find();
    };
    Unit<BLOCKS_OF_16> units[AT_ONCE];
    find();
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) load(units[i]);
    input();
    u32 turn = 0;
    float sum[BLOCKS_OF_16][2] = {};
    const auto end_items = [&] {  // all that have no units of this warp left
      for (; here.item < items && here.unit == here.end; next_item(here), turn++) finish(here, turn, sum);
    };
    end_items();
#pragma unroll 1
    while (here.item < items)
#pragma unroll
      for (u32 i = 0; i < AT_ONCE; i++)
        if (here.item < items) {
          const float share = DOWN ? shared.chosen[here.of].share : 1.f;
          units[i].multiply(x_words + here.unit * 64, lane, share, sum);
          load(units[i]);
          next_unit(here);
          if (here.unit == here.end) end_items();
        }
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) experts_gemv(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const u32 row = blockIdx.y;
  dependency_wait();
  launch_dependents();
  if (threadIdx.x < p.top_k) {
    const u32 at = row * p.top_k + threadIdx.x, id = min(p.ids[at], p.experts - 1);  // the limit guards memory
    Chosen& chosen = shared.chosen[threadIdx.x];
    chosen.atoms[0] = reinterpret_cast<const u8*>(p.up.atoms[id]);
    chosen.atoms[1] = reinterpret_cast<const u8*>(p.down.atoms[id]);
    chosen.biases[0] = p.up.biases ? reinterpret_cast<const float*>(p.up.biases[id]) : nullptr;
    chosen.biases[1] = p.down.biases ? reinterpret_cast<const float*>(p.down.biases[id]) : nullptr;
    chosen.share = p.shares[at];
  }
  __syncthreads();
  Phase<false, OF_UP>(p, shared).run([&] { stage(p.x + u64(row) * p.hidden, 1, p.hidden); });
  u32* const counters = p.counters + 2 * row;
  __syncthreads();
  if (threadIdx.x == 0) count_up(counters);
  Phase<true, OF_DOWN>(p, shared).run([&] {
    if (threadIdx.x == 0)
      while (load_acquire(counters) != gridDim.x) {
      }
    __syncthreads();
    stage(p.inner + u64(row) * p.top_k * p.width, p.top_k, p.width);
  });
  if (threadIdx.x == 0 && count_up(counters + 1) == gridDim.x - 1) counters[0] = counters[1] = 0;
}
