// What the wNa16 GEMM on Hopper has in shared memory, and what a warp that multiplies takes from a stage: codes,
// scales, zero points and offsets of its rows; and the warp that sums x where offsets are multiplied by such sums.
#pragma once
#include "wna16_rows.cuh"

struct Rings {  // addresses in shared memory
  u32 x, w, full_w, empty_w, full_x, empty_x, full_sums, flag, summed;
  DEV Rings make(u32 base) {
    const u32 b = base + BARRIERS;
    Rings r;
    r.x = base;
    r.w = base + STAGES_X * STAGE_X;
    r.full_w = b;
    r.empty_w = b + 8 * STAGES_W;
    r.full_x = JOINT ? r.full_w : b + 16 * STAGES_W;
    r.empty_x = JOINT ? r.empty_w : r.full_x + 8 * STAGES_X;
    r.full_sums = b + 16 * (STAGES_W + STAGES_X);
    r.flag = r.full_sums + 16;
    r.summed = base + SUMMED;
    return r;
  }
  // Sums of a stage of x.
  __device__ __forceinline__ u32 x_sums(u32 stage) const { return x + X_SUMS_AT + stage * SUMS_BYTES; }
};
template <int STAGES> struct Turn {  // position in a ring
  u32 stage = 0, phase = 0;
  __device__ __forceinline__ void advance(u32 n = 1) {
    stage += n;
    if (stage >= STAGES) {
      stage -= STAGES;
      phase ^= 1;
    }
  }
};

struct Consumer {  // what a consumer warp keeps from piece to piece
  Rings r;
  int set, wg, warp, lane;  // wg: of its set;  warp: of its warpgroup
  Turn<STAGES_W> w;
  Turn<STAGES_X> x;
  __device__ __forceinline__ u32 atom(int p) const { return r.w + w.stage * STAGE_W + (wg * STRIPS + p) * ATOM; }
  __device__ __forceinline__ u32 codes(int p) const { return atom(p) + warp * UNIT_CODES; }
  __device__ __forceinline__ u32 params(int p) const { return atom(p) + PARAMS + warp * UNIT_PARAMS; }
  __device__ __forceinline__ Multiples multiples(int p) const { return Multiples::load(params(p), lane >> 2); }
  // Scales and offsets of a group that lie among the parameters at an address.
  __device__ __forceinline__ RowPair scales(u32 params, int group) const {
    return load_row_pair(params + group * GROUP_SCALES + (lane >> 2) * (GROUP_SCALES / 8));
  }
  __device__ __forceinline__ RowPair offsets(u32 params, int group) const {
    if constexpr (!W_OFFSET) return RowPair{};
    return load_row_pair(params + ZEROS + group * GROUP_ZEROS + (lane >> 2) * (GROUP_ZEROS / 8));
  }
  // What sums of a group are scaled by.
  __device__ __forceinline__ RowPair scales(const Multiples& m, int p, int group) const {
    return MULTIPLES ? m.scales(group) : scales(params(p), group);
  }
  __device__ __forceinline__ RowPair offsets(const Multiples& m, int p, int group) const {
    return MULTIPLES ? m.offsets(group) : offsets(params(p), group);
  }
  __device__ __forceinline__ Zeros zeros(int p, int group) const {
    if constexpr (ZERO)
      return zeros_of(load_shared_u16(params(p) + ZEROS + group * GROUP_ZEROS + (lane >> 2) * 2));
    else
      return zeros_symmetric();
  }
  __device__ __forceinline__ Zeros row_zeros(const u8* rows_of_scales, int strip) const {
    if constexpr (ZERO)
      return zeros_of(__ldg((const u16*)(rows_of_scales + (u64)strip * ROW_BLOCK + 128) + warp * 8 + (lane >> 2)));
    else
      return zeros_symmetric();
  }
  // Frees a stage that the tensor cores have read.
  __device__ __forceinline__ void release(u32 bar) const {
    if (lane == 0) mbarrier_arrive(bar);
  }
  // Frees a stage that this warp has loaded to registers: the copy engine writes it by another way, on which an arrival
  // alone does not keep it behind loads that are still on theirs.
  __device__ __forceinline__ void release_loaded(u32 bar) const {
    loads_before_copies();
    __syncwarp();
    release(bar);
  }
};
// sum += s * acc, rows R and R+8.
template <int C> DEV void promote(float (&sum)[C], const float (&acc)[C], float s, float s8) {
#pragma unroll
  for (int i = 0; i < C; i++) sum[i] = fmaf(acc[i], (i & 2) ? s8 : s, sum[i]);
}

// What the sums of groups are scaled by, and of x.
struct UnitTerms {
  RowPair s[GROUPS + 1];
  TwoFloats o[GROUPS + 1];
  Zeros z[GROUPS + 1];
  __device__ __forceinline__ void load_scales(const Consumer& c, const Multiples& m, int p, int group) {
    s[group] = c.scales(m, p, group);
    if constexpr (W_OFFSET && !CENTRED) o[group] = both_rows(c.offsets(m, p, group));
  }
  // Where offsets are CENTRED, z and o follow from both.
  __device__ __forceinline__ void load_zeros(const Consumer& c, const Multiples& m, int p, int group) {
    if constexpr (CENTRED) {
      const Centred centred = Centred::of(c.scales(m, p, group), c.offsets(m, p, group));
      z[group] = centred.z, o[group] = centred.o;
    } else {
      z[group] = c.zeros(p, group);
    }
  }
};

// Sums of 32 columns of x in three parts of bf16, which are as exact as a float, as a B fragment: k 2g, 2g + 1 and
// 2g + 8 of group g.
DEV void sum_units(const Rings& r, int units, int lane) {
  Turn<STAGES_W> t;
  const int token = lane >> 2, group = lane & 3;
#pragma unroll 1
  for (; units > 0; units--, t.advance()) {
    mbarrier_wait(r.full_w + 8 * t.stage, t.phase);
#pragma unroll
    for (int n = 0; n < NT / 8; n++) {
      const u32 row = r.x + t.stage * STAGE_X + group / 2 * BOX + (8 * n + token) * 128;
      float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 v[4];
        load_shared(v, row + ((((group & 1) * 4 + i) ^ token) << 4));
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] += first_of(v[e]) + second_of(v[e]);
      }
      const float all = (sum[0] + sum[1]) + (sum[2] + sum[3]), high = bf16_low(bf16_pair(all, 0.f));
      const float rest = isfinite(high) ? all - high : 0.f, middle = bf16_low(bf16_pair(rest, 0.f));
      store_shared(r.x_sums(t.stage) + n * 256 + lane * 8, bf16_pair(high, middle));
      store_shared(r.x_sums(t.stage) + n * 256 + lane * 8 + 4, bf16_pair(rest - middle, 0.f));
    }
    loads_before_copies();
    __syncwarp();
    if (lane == 0) {
      mbarrier_arrive(r.summed + 8 * t.stage);
      mbarrier_arrive(r.empty_w + 8 * t.stage);
    }
  }
}
// The factors of offsets of a lane's group, times sums of x as sum_units leaves them.
[[maybe_unused]] DEV void multiply_sums(float (&of_x)[NT / 2], u32 word, const u32 (&sums)[NT / 8][2]) {
  const u32 both = bf16_add(and_or(word >> 6, 0x003f003f, 0x43004300), 0xc300c300);  // 128 and a factor, less 128
  const u32 r = __byte_perm(both, 0, 0x1010), r8 = __byte_perm(both, 0, 0x3232), a[4] = {r, r8, r, r8};
#pragma unroll
  for (int n = 0; n < NT / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) of_x[4 * n + i] = 0.f;
    mma_sync<true>(of_x + 4 * n, a, sums[n][0], sums[n][1]);
  }
}
