// y = activation(x * W^T + bias) with x in f32 and weights of 16 bits, by tensor cores (3xTF32): TF32 holds a weight as
// it is, and a float of x in three parts of 11, 11 and 2 bits, so that products are exact.
//
// A block owns 16 * DOWN outputs and 8 * ACROSS rows, and each of its warps every eighth run of 32 columns. A lane
// takes 16 bytes of a row of W and the same columns of x, fragments of four m16n8k8 with columns in an order of their
// own: nothing is staged in shared memory but the sums of the warps, which are added in the order of the warps. Tensor
// cores do not round sums to nearest: those of four runs are added to sums that are. So what an output is added up
// from, and in which order, depends on k only.
#include "ampere.cuh"
#include "dense.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, COLUMNS = 32, RUNS = 4,  // that are summed by tensor cores alone
    PARTS = 3;  // of x

// c += A * B, m16n8k8 of TF32.
DEV void mma_sync_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A float as TF32 without rounding; what that takes off, of an infinite one nothing.
DEV float cut(float v) { return __uint_as_float(__float_as_uint(v) & 0xffffe000); }
DEV float behind(float v, float part) { return fabsf(v) == __int_as_float(0x7f800000) ? 0.f : v - part; }

// Columns 8 * (lane % 4) on of a run: of rows lane / 4 and 8 more of 16 outputs; of row lane / 4 of 8.
template <int DOWN, int ACROSS> struct Run {
  uint4 w[DOWN][2];
  float4 x[ACROSS][2];

  __device__ __forceinline__ void load_w(const Params& p, u64 output, u64 column) {
#pragma unroll
    for (int i = 0; i < DOWN; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const u64 of = output + 16 * i + 8 * h;
        w[i][h] = make_uint4(0, 0, 0, 0);
        if (of < p.n && column < p.k)
          w[i][h] = *reinterpret_cast<const uint4*>(static_cast<const u16*>(p.w) + of * p.k + column);
      }
  }
  __device__ __forceinline__ void load_x(const Params& p, u64 row, u64 column) {
#pragma unroll
    for (int i = 0; i < ACROSS; i++) {
      const u64 of = row + 8 * i;
      const bool there = of < p.m && column < p.k;
      const float4* const from = reinterpret_cast<const float4*>(static_cast<const float*>(p.x) + of * p.k + column);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x[i][h] = make_float4(0, 0, 0, 0);
        if (there) x[i][h] = from[h];
      }
    }
  }
};

// of_parts += W * x of a run, with sums of their own for the parts of x.
template <bool BF16, int DOWN, int ACROSS>
DEV void multiply(const Run<DOWN, ACROSS>& run, float (&of_parts)[PARTS][DOWN][ACROSS][4]) {
#pragma unroll
  for (int step = 0; step < 4; step++) {
    float a[DOWN][4];
#pragma unroll
    for (int down = 0; down < DOWN; down++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint4& four = run.w[down][h];
        const u32 two = step == 0 ? four.x : step == 1 ? four.y : step == 2 ? four.z : four.w;
        a[down][h] = float_of_bits(u16(two), BF16 ? FloatType::BF16 : F16);
        a[down][2 + h] = float_of_bits(u16(two >> 16), BF16 ? FloatType::BF16 : F16);
      }
#pragma unroll
    for (int across = 0; across < ACROSS; across++) {
      const float4& four = run.x[across][step / 2];
      const float x[2] = {step % 2 ? four.z : four.x, step % 2 ? four.w : four.y};
      float part[PARTS][2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        part[0][h] = cut(x[h]);
        const float rest = behind(x[h], part[0][h]);
        part[1][h] = cut(rest), part[2][h] = rest - part[1][h];
      }
#pragma unroll
      for (int down = 0; down < DOWN; down++)
#pragma unroll
        for (int i = 0; i < PARTS; i++) mma_sync_tf32(of_parts[i][down][across], a[down], part[i][0], part[i][1]);
    }
  }
}

// AHEAD: runs that are on their way to a warp.  ACTIVATES: whether an activation function comes last.
template <bool BF16, int DOWN, int ACROSS, int AHEAD, bool ACTIVATES>
__global__ void __launch_bounds__(THREADS) dense_tf32(const Params p) {
  static_assert(RUNS % AHEAD == 0, "runs that are asked for at once are summed together");
  __shared__ __align__(16) float parts[WARPS][DOWN * ACROSS * 128];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u64 tiles = (p.m + 8 * ACROSS - 1) / (8 * ACROSS);  // of rows
  const u64 m0 = blockIdx.x % tiles * 8 * ACROSS, n0 = blockIdx.x / tiles * 16 * DOWN;
  const u64 row = m0 + lane / 4, output = n0 + lane / 4;
  constexpr u64 STEP = WARPS * COLUMNS;
  u64 first = warp * COLUMNS;  // of a run: all lanes multiply, also where some are beyond the last column
  const u64 of_lane = lane % 4 * 8;
  Run<DOWN, ACROSS> run[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) run[i].load_w(p, output, first + of_lane + i * STEP);
  dependency_wait();
  launch_dependents();
  float sums[DOWN][ACROSS][4] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; i++) run[i].load_x(p, row, first + of_lane + i * STEP);
#pragma unroll 1
  while (first < p.k) {
    float of_parts[PARTS][DOWN][ACROSS][4] = {};
#pragma unroll 1
    for (int begun = 0; begun < RUNS; begun += AHEAD)
#pragma unroll
      for (int i = 0; i < AHEAD; i++, first += STEP) {
        multiply<BF16>(run[i], of_parts);
        run[i].load_w(p, output, first + of_lane + AHEAD * STEP);
        run[i].load_x(p, row, first + of_lane + AHEAD * STEP);
      }
#pragma unroll
    for (int down = 0; down < DOWN; down++)
#pragma unroll
      for (int across = 0; across < ACROSS; across++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[down][across][i] +=
              of_parts[0][down][across][i] + (of_parts[1][down][across][i] + of_parts[2][down][across][i]);
  }
#pragma unroll
  for (int i = 0; i < DOWN * ACROSS; i++) {
    const float (&of)[4] = sums[i / ACROSS][i % ACROSS];
    *reinterpret_cast<float4*>(&parts[warp][i * 128 + lane * 4]) = make_float4(of[0], of[1], of[2], of[3]);
  }
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < DOWN * ACROSS * 128; i += THREADS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w][i];
    // Sums 0 and 1 of a lane are those of output lane / 4, rows 2 * (lane % 4) and the next; 2 and 3 of output + 8.
    const u32 tile = i / 128, of = i % 128 / 4, at = i % 4;
    const u64 n = n0 + tile / ACROSS * 16 + of / 4 + at / 2 * 8, m = m0 + tile % ACROSS * 8 + of % 4 * 2 + at % 2;
    if (m < p.m && n < p.n)
      store_float(p.y, m * p.n + n, finished<ACTIVATES>(p, sum, p.bias ? p.bias[n] : 0.f), p.y_type);
  }
}
