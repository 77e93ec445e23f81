// Rows of x as what their codes of 8 bits stand for, in f32: dynamic quantisation for groups of any columns.
//
//   a warp has one group of a row at a time: least and greatest element -> scale, offset -> scale * code + offset
//   where a row has more groups than a launch has warps for, they take them in turn
//
// quantize.cuh has the rule.
#include "quantize.cuh"

constexpr u32 WARPS = 8;  // of a block

// As `Params` in round_activations.rs.
struct Params {
  const void* x;  // [rows][k]
  float* rounded;  // [rows][k]
  const u32* columns;  // [k], group by group; null: in order
  const u32* starts;  // [groups + 1]: where the columns of each group begin; null: each has as many
  u64 k;
  u32 group, groups;
  FloatType x_type;
  u32 padding;  // of this struct
};

template <bool OFFSET> __global__ void __launch_bounds__(WARPS * 32) round_activations(const Params p) {
  const u32 lane = threadIdx.x % 32;
  const u64 row = blockIdx.x * p.k;
  for (u32 group = blockIdx.y * WARPS + threadIdx.x / 32; group < p.groups; group += gridDim.y * WARPS) {
    const u64 own = u64(group) * p.group, first = p.starts ? p.starts[group] : own,
              end = p.starts ? p.starts[group + 1] : min(own + p.group, p.k);
    Range range = range_of_none();
    for (u64 i = first + lane; i < end; i += 32)
      range = joined(range, range_of_one(load_float(p.x, row + (p.columns ? p.columns[i] : i), p.x_type)));
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
      range =
          joined(range, {__shfl_xor_sync(ALL_LANES, range.low, apart), __shfl_xor_sync(ALL_LANES, range.high, apart),
                         bool(__shfl_xor_sync(ALL_LANES, int(range.finite), apart))});
    const Rule rule = rule_of<OFFSET>(range);
    for (u64 i = first + lane; i < end; i += 32) {
      const u64 at = row + (p.columns ? p.columns[i] : i);
      p.rounded[at] = fmaf(rule.scale, float(code_of(load_float(p.x, at, p.x_type), rule)), rule.offset);
    }
  }
}
