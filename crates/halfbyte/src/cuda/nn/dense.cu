// GEMV and GEMM: y = activation(x * W^T + bias) with weights as floats, sums in f32.
//
// Up to 16 rows, weights read once, past L1:
//   dense_rows_mma (tensor cores; W and x of one type of 16 bits): a block owns 16 outputs at a time, and each of its
//       warps every eighth run of 128 columns; while one run is multiplied, the next, of these outputs or of those that
//       follow, is under way: 64 KB a multiprocessor. A lane takes 16 bytes of a row of W and the same columns of x,
//       fragments of two m16n8k16 with columns in an order of their own: nothing is staged in shared memory but the
//       sums of the warps, which are added in the order of the warps. Tensor cores do not round sums to nearest: those
//       of a run are added to sums that are.
//   dense_rows (any types): a warp owns one output; a lane takes 8 elements of every 256, and lanes add up in a tree.
//       Where rows do not begin at 16 bytes, a lane takes single elements.
// More rows:
//   dense_mma (tensor cores): a block owns 128 rows and 128 outputs, a warp 64 x 32 of them; x and W come through a
//       ring of cp.async. After 256 columns sums are added to others that are rounded to nearest.
//   dense_tiles (any types): a block owns 64 rows and 64 outputs, a thread 4 x 4 of them: for each run of 16 columns,
//       x and W -> f32 in shared memory, then sums = fma(x, w, sums), column after column.
//
// What an output is added up from, and in which order, depends on k only, not on how many rows there are, within each
// of the four.
#include "ampere.cuh"
#include "dense.cuh"

constexpr int THREADS = 256;

// ---- few rows, any types
// Eight weights as they lie in memory.
template <FloatType TYPE> struct Eight {
  uint4 words[TYPE == F32 ? 2 : 1];
  __device__ __forceinline__ void load(const void* from, u64 at) {
    const u8* bytes = static_cast<const u8*>(from) + at * (TYPE == F32 ? 4 : 2);
#pragma unroll
    for (int i = 0; i < (TYPE == F32 ? 2 : 1); i++) words[i] = load_once(bytes + 16 * i);
  }
  __device__ __forceinline__ float operator[](int i) const {
    const int word = TYPE == F32 ? i : i / 2;
    const uint4 four = words[word / 4];
    const u32 bits = word % 4 == 0 ? four.x : word % 4 == 1 ? four.y : word % 4 == 2 ? four.z : four.w;
    return TYPE == F32 ? __uint_as_float(bits) : float_of_bits(u16(bits >> (16 * (i % 2))), TYPE);
  }
};

// ROWS: at most.  ACTIVATES: whether an activation function comes last.
template <int ROWS, FloatType TYPE, bool ACTIVATES>
__global__ void __launch_bounds__(THREADS, 2) dense_rows(const Params p) {
  constexpr int AHEAD = TYPE == F32 ? 2 : 4;
  const u64 output = u64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  const u32 lane = threadIdx.x % 32;
  dependency_wait();
  launch_dependents();
  if (output >= p.n) return;
  float sums[ROWS] = {};
  if (p.by_eight) {
#pragma unroll 1
    for (u64 first = 8 * lane; first < p.k; first += 256 * AHEAD) {
      Eight<TYPE> w[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (first + 256 * i < p.k) w[i].load(p.w, output * p.k + first + 256 * i);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const u64 k = first + 256 * i;
        if (k >= p.k) break;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          if (r >= p.m) break;
          float x[8];
          load_eight(p.x, r * p.k + k, p.x_type, x);
#pragma unroll
          for (int e = 0; e < 8; e++) sums[r] = fmaf(x[e], w[i][e], sums[r]);
        }
      }
    }
  } else {
    for (u64 k = lane; k < p.k; k += 32) {
      const float w = load_float(p.w, output * p.k + k, TYPE);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        if (r < p.m) sums[r] = fmaf(load_float(p.x, r * p.k + k, p.x_type), w, sums[r]);
      }
    }
  }
  const float bias = p.bias ? p.bias[output] : 0.f;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float sum = finished<ACTIVATES>(p, warp_sum(sums[r]), bias);
    if (lane == 0 && r < p.m) store_float(p.y, r * p.n + output, sum, p.y_type);
  }
}

// ---- many rows, any types
// A tile of rows and columns, transposed; zeros beyond the matrix.
template <int COLUMNS, int TILE>
DEV void fetch(float (&to)[COLUMNS][TILE + 4], const void* from, FloatType type, u64 row0, u64 rows, u64 k0, u64 k) {
#pragma unroll
  for (int i = 0; i < TILE * COLUMNS / THREADS; i++) {
    const int at = threadIdx.x + i * THREADS, row = at / COLUMNS, column = at % COLUMNS;
    const bool within = row0 + row < rows && k0 + column < k;
    to[column][row] = within ? load_float(from, (row0 + row) * k + k0 + column, type) : 0;
  }
}

// TILE: rows, and outputs, of a block.
template <int TILE, bool ACTIVATES> __global__ void __launch_bounds__(THREADS, 4) dense_tiles(const Params p) {
  constexpr int COLUMNS = 16, EACH = TILE / 16;  // of a run; of a thread
  static_assert(EACH == 4, "a thread reads four rows and four outputs at once");
  __shared__ __align__(16) float smem_x[COLUMNS][TILE + 4];
  __shared__ __align__(16) float smem_w[COLUMNS][TILE + 4];
  const u32 tiles = u32((p.n + TILE - 1) / TILE);  // of outputs
  const u64 n0 = u64(blockIdx.x % tiles) * TILE, m0 = u64(blockIdx.x / tiles) * TILE;
  const int down = threadIdx.x / 16 * EACH, across = threadIdx.x % 16 * EACH;
  float sums[EACH][EACH] = {};
  for (u64 k0 = 0; k0 < p.k; k0 += COLUMNS) {
    fetch<COLUMNS, TILE>(smem_x, p.x, p.x_type, m0, p.m, k0, p.k);
    fetch<COLUMNS, TILE>(smem_w, p.w, p.w_type, n0, p.n, k0, p.k);
    __syncthreads();
#pragma unroll
    for (int column = 0; column < COLUMNS; column++) {
      const float4 x4 = *reinterpret_cast<const float4*>(&smem_x[column][down]);
      const float4 w4 = *reinterpret_cast<const float4*>(&smem_w[column][across]);
      const float x[EACH] = {x4.x, x4.y, x4.z, x4.w}, w[EACH] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
      for (int r = 0; r < EACH; r++) {
#pragma unroll
        for (int c = 0; c < EACH; c++) sums[r][c] = fmaf(x[r], w[c], sums[r][c]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < EACH; r++) {
#pragma unroll
    for (int c = 0; c < EACH; c++) {
      const u64 row = m0 + down + r, output = n0 + across + c;
      if (row >= p.m || output >= p.n) continue;
      const float sum = finished<ACTIVATES>(p, sums[r][c], p.bias ? p.bias[output] : 0.f);
      store_float(p.y, row * p.n + output, sum, p.y_type);
    }
  }
}

// ---- tensor cores
// Few rows: what a lane has of 16 outputs and a run of columns: in steps of 32, of each 8 columns of two outputs.
struct Run {
  static constexpr int OUTPUTS = 16, COLUMNS = 128, STEPS = COLUMNS / 32;
  uint4 low[STEPS], high[STEPS];

  // Outputs `output` and `output` + 8, columns from `column` on; zeros beyond k, and beyond n the last output.
  __device__ __forceinline__ void load(const Params& p, u64 output, u64 column) {
    const u64 last = p.n - 1;
    const u16* rows = static_cast<const u16*>(p.w) + column;
    const u16 *of_low = rows + min(output, last) * p.k, *of_high = rows + min(output + 8, last) * p.k;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      low[i] = high[i] = make_uint4(0, 0, 0, 0);
      if (column + 32 * i < p.k) {
        low[i] = load_once(of_low + 32 * i);
        high[i] = load_once(of_high + 32 * i);
      }
    }
  }
};

// ROWS: 8 or 16.
template <bool BF16, int ROWS, bool ACTIVATES>
__global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ < 800 ? 1 : 2) dense_rows_mma(const Params p) {
  constexpr int BLOCKS_OF_8 = ROWS / 8, WARPS = THREADS / 32;
  __shared__ float parts[2][WARPS][BLOCKS_OF_8 * 128];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const u64 tiles = (p.n + Run::OUTPUTS - 1) / Run::OUTPUTS, first = warp * Run::COLUMNS + lane % 4 * 8;
  const u64 all = (p.k + Run::COLUMNS - 1) / Run::COLUMNS,
            runs = all > warp ? (all - warp + WARPS - 1) / WARPS : 0;  // of this warp
  u64 tile = blockIdx.x;
  Run next;
  if (runs > 0) next.load(p, tile * Run::OUTPUTS + row, first);
  dependency_wait();
  launch_dependents();
  for (u32 half = 0; tile < tiles; tile += gridDim.x, half ^= 1) {
    float sums[BLOCKS_OF_8][4] = {};
    u64 column = first;
#pragma unroll 1
    for (u64 run = 0; run < runs; run++, column += WARPS * Run::COLUMNS) {
      const Run w = next;
      const bool more = run + 1 < runs;
      const u64 of_tile = more ? tile : tile + gridDim.x, from = more ? column + WARPS * Run::COLUMNS : first;
      if (of_tile < tiles) next.load(p, of_tile * Run::OUTPUTS + row, from);
      float of_run[BLOCKS_OF_8][4] = {};
#pragma unroll
      for (int i = 0; i < Run::STEPS; i++) {
        const u32 a[2][4] = {{w.low[i].x, w.high[i].x, w.low[i].y, w.high[i].y},
                             {w.low[i].z, w.high[i].z, w.low[i].w, w.high[i].w}};
#pragma unroll
        for (int b = 0; b < BLOCKS_OF_8; b++) {
          uint4 x = make_uint4(0, 0, 0, 0);
          if (8 * b + row < p.m && column + 32 * i < p.k)
            x = *reinterpret_cast<const uint4*>(static_cast<const u16*>(p.x) + (8 * b + row) * p.k + column + 32 * i);
          mma_sync<BF16>(of_run[b], a[0], x.x, x.y);
          mma_sync<BF16>(of_run[b], a[1], x.z, x.w);
        }
      }
#pragma unroll
      for (int b = 0; b < BLOCKS_OF_8; b++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[b][e] += of_run[b][e];
    }
#pragma unroll
    for (int b = 0; b < BLOCKS_OF_8; b++)
      *reinterpret_cast<float4*>(&parts[half][warp][b * 128 + lane * 4]) =
          make_float4(sums[b][0], sums[b][1], sums[b][2], sums[b][3]);
    __syncthreads();  // one is enough: the next tile's sums go to the other half
    if (threadIdx.x < BLOCKS_OF_8 * 128) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += parts[half][w][threadIdx.x];
      // Sums 0 and 1 of a lane are those of output lane / 4, rows 2 * (lane % 4) and the next; 2 and 3 of output + 8.
      const u32 of = threadIdx.x % 128 / 4, at = threadIdx.x % 4;
      const u64 output = tile * Run::OUTPUTS + of / 4 + at / 2 * 8, m = threadIdx.x / 128 * 8 + of % 4 * 2 + at % 2;
      if (m < p.m && output < p.n)
        store_float(p.y, m * p.n + output, finished<ACTIVATES>(p, sum, p.bias ? p.bias[output] : 0.f), p.y_type);
    }
  }
}

// Many rows: a stage of 128 rows, or outputs, and 64 columns. A row of it is 8 pieces of 16 bytes, in an order that
// depends on its number.
struct Stage {
  static constexpr int ROWS = 128, COLUMNS = 64, BYTES = ROWS * COLUMNS * 2;

  // Rows from row0 on, columns from k0 on; zeros beyond the matrix.
  static __device__ __forceinline__ void copy(u32 to, const void* from, u64 row0, u64 rows, u64 k0, u64 k) {
#pragma unroll
    for (int i = 0; i < ROWS * 8 / THREADS; i++) {
      const u32 at = threadIdx.x + i * THREADS, row = at / 8, piece = at % 8;
      const bool there = row0 + row < rows && k0 + 8 * piece < k;
      const u16* source = static_cast<const u16*>(from) + (there ? (row0 + row) * k + k0 + 8 * piece : 0);
      copy_16_or_zero(to + row * 128 + ((piece ^ (row & 7)) << 4), source, there);
    }
  }

  // Fragments of 16 rows from `row` on and of the 16 columns of a step: rows 0-7 and 8-15 of columns 0-7, then of 8-15.
  static __device__ __forceinline__ void load(u32 (&f)[4], u32 from, int row, int step) {
    const int lane = threadIdx.x % 32, of = row + lane % 16, piece = 2 * step + lane / 16;
    load_matrices(f, from + of * 128 + ((piece ^ (of & 7)) << 4));
  }
};

template <bool BF16, bool ACTIVATES> __global__ void __launch_bounds__(THREADS, 1) dense_mma(const Params p) {
  constexpr int DOWN = 4, ACROSS = 4;  // 16 rows and 8 outputs at a time, of a warp's 64 x 32
  constexpr int STAGES = __CUDA_ARCH__ < 800 ? 2 : 3,
                ROUNDED = 256 / Stage::COLUMNS;  // stages after which sums are rounded to nearest
  extern __shared__ __align__(128) u8 shared[];
  const u32 base = shared_address(shared), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int down = warp / 4 * 64, across = warp % 4 * 32;
  const u32 tiles = u32((p.m + Stage::ROWS - 1) / Stage::ROWS);  // of rows
  const u64 m0 = u64(blockIdx.x % tiles) * Stage::ROWS, n0 = u64(blockIdx.x / tiles) * Stage::ROWS;
  const u64 stages = (p.k + Stage::COLUMNS - 1) / Stage::COLUMNS;
  auto copy = [&](u64 stage) {
    const u32 to = base + u32(stage % STAGES) * 2 * Stage::BYTES;
    if (stage < stages) {
      Stage::copy(to, p.x, m0, p.m, stage * Stage::COLUMNS, p.k);
      Stage::copy(to + Stage::BYTES, p.w, n0, p.n, stage * Stage::COLUMNS, p.k);
    }
    copy_commit();  // also of nothing: groups are counted
  };
  dependency_wait();
  launch_dependents();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) copy(stage);
  float sums[DOWN][ACROSS][4] = {}, parts[DOWN][ACROSS][4] = {};
  auto round = [&]() {
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
      for (int j = 0; j < ACROSS; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          sums[i][j][e] += parts[i][j][e];
          parts[i][j][e] = 0;
        }
  };
#pragma unroll 1
  for (u64 stage = 0; stage < stages; stage++) {
    copy_wait<STAGES - 2>();
    __syncthreads();  // the stage is there for all, and the one before it has been read by all
    copy(stage + STAGES - 1);
    const u32 x = base + u32(stage % STAGES) * 2 * Stage::BYTES, w = x + Stage::BYTES;
#pragma unroll
    for (int step = 0; step < Stage::COLUMNS / 16; step++) {
      u32 a[DOWN][4], b[ACROSS / 2][4];
#pragma unroll
      for (int i = 0; i < DOWN; i++) Stage::load(a[i], x, down + 16 * i, step);
#pragma unroll
      for (int j = 0; j < ACROSS / 2; j++) Stage::load(b[j], w, across + 16 * j, step);
#pragma unroll
      for (int i = 0; i < DOWN; i++)
#pragma unroll
        for (int j = 0; j < ACROSS; j++) mma_sync<BF16>(parts[i][j], a[i], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
    }
    if (stage % ROUNDED == ROUNDED - 1) round();
  }
  round();
#pragma unroll
  for (int i = 0; i < DOWN; i++)
#pragma unroll
    for (int j = 0; j < ACROSS; j++)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const u64 row = m0 + down + 16 * i + lane / 4 + 4 * e, output = n0 + across + 8 * j + lane % 4 * 2;
        if (row >= p.m || output >= p.n) continue;
        const bool second = output + 1 < p.n;
        float y[2] = {sums[i][j][e], sums[i][j][e + 1]};
        y[0] = finished<ACTIVATES>(p, y[0], p.bias ? p.bias[output] : 0.f);
        if (second) y[1] = finished<ACTIVATES>(p, y[1], p.bias ? p.bias[output + 1] : 0.f);
        if (p.by_two && p.y_type == F32) {
          *reinterpret_cast<float2*>(static_cast<float*>(p.y) + row * p.n + output) = make_float2(y[0], y[1]);
        } else {
          store_float(p.y, row * p.n + output, y[0], p.y_type);
          if (second) store_float(p.y, row * p.n + output + 1, y[1], p.y_type);
        }
      }
}
