// Of each row the greatest logit and its index, the first of equals; and the next step of a text that takes it for its
// next token.
//
//   a logit and its index are one key of 64 bits, whose order is theirs: the greatest key is looked for, in any order
//   from sm_90 on a cluster of 8 blocks a row, before it one block; a thread requests four vectors of four logits at
//       once; lanes, warps and the blocks of the cluster join their keys, the latter in the first block's shared memory
//
// NaN counts as greater than any number, so that whoever reads the value sees it.
#include "hopper.cuh"
#include "host_tokens.cuh"

constexpr int THREADS = 1024, FOURS = 4;

// As `Params` in argmax.rs.
struct Params {
  const float* logits;  // [rows][length]
  u32* choice;  // [rows][2]: index, then bits of the logit
  u32* tokens;  // [rows]: become the index
  u32* positions;  // [rows]: grow by `advance`
  u64 length;
  u32 advance;
  u32 padding;  // of this struct
  HostTokensOperands host;
};

// Greater for a greater logit, for NaN, and of equals, as zeros of both signs and NaNs are, for the smaller index.
DEV u64 key_of(float logit, u32 index) {
  const u32 bits = __float_as_uint(logit + 0.f);  // of both zeros +0
  const u32 ordered = logit != logit ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return u64(ordered) << 32 | (0xffffffffu - index);
}

DEV u64 greatest_of_warp(u64 key) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, distance));
  return key;
}

// The greatest key of what a thread has of the logits: vectors from the first address on that has 16 bytes for itself,
// and single ones before and after them.
DEV u64 greatest_of_thread(const Params& p, const float* logits) {
  const u64 thread = u64(blockIdx.x) * THREADS + threadIdx.x, threads = u64(gridDim.x) * THREADS;
  const u64 before = min(p.length, (16 - u64(logits) % 16) % 16 / 4), vectors = (p.length - before) / 4;
  const u64 after = before + 4 * vectors;
  const float4* fours = reinterpret_cast<const float4*>(logits + before);
  u64 key = 0;
  if (thread < before) key = key_of(logits[thread], u32(thread));
  if (thread < p.length - after) key = max(key, key_of(logits[after + thread], u32(after + thread)));
  for (u64 first = thread; first < vectors; first += FOURS * threads) {
    float4 v[FOURS];
#pragma unroll
    for (int i = 0; i < FOURS; i++)
      if (first + i * threads < vectors) v[i] = fours[first + i * threads];
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      if (first + i * threads >= vectors) break;
      const u32 at = u32(before + 4 * (first + i * threads));
      key = max(key, max(key_of(v[i].x, at), key_of(v[i].y, at + 1)));
      key = max(key, max(key_of(v[i].z, at + 2), key_of(v[i].w, at + 3)));
    }
  }
  return key;
}

__global__ void __launch_bounds__(THREADS) argmax(const Params p) {
  __shared__ u64 of_warps[THREADS / 32];
#if __CUDA_ARCH__ >= 900
  cluster_sync();  // all blocks run: their shared memory can be written
#endif
  dependency_wait();
  launch_dependents();
  const u32 row = blockIdx.y;
  const float* const logits = p.logits + row * p.length;
  u64 key = greatest_of_warp(greatest_of_thread(p, logits));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  static_assert(THREADS == 32 * 32, "a warp's key to a lane");
  if (threadIdx.x < 32) key = greatest_of_warp(of_warps[threadIdx.x]);
#if __CUDA_ARCH__ >= 900
  __shared__ u64 of_blocks[8];
  if (threadIdx.x == 0) store_cluster(cluster_address(shared_address(of_blocks + blockIdx.x), 0), key);
  __syncwarp();
  cluster_sync();
  if (blockIdx.x == 0 && threadIdx.x < 32) key = greatest_of_warp(threadIdx.x < gridDim.x ? of_blocks[threadIdx.x] : 0);
#endif
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const u32 index = 0xffffffffu - u32(key);
    const float greatest = logits[index];
    p.choice[2 * row] = index;
    p.choice[2 * row + 1] = __float_as_uint(greatest);
    p.tokens[row] = index;
    p.positions[row] += p.advance;
    leave_for_host(p.host, row, index, greatest);
  }
}
