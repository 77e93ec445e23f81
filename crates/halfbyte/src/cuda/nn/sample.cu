// Of each row a token drawn with probabilities that follow from logits: temperature, the k likeliest, the nucleus.
//
//   from sm_90 on a cluster of 8 blocks that share the logits of a row, before it one block. Tokens have an order: by
//       logit, the greater first, of equals the smaller id; as a 64-bit key that only one has
//   weight = e^((logit - greatest) / temperature)
//   k > 0:      the k-th token in order ends the candidates
//   top_p < 1:  among them the first in order whose weights, with those before it, reach top_p of all, ends the
//       candidates
//   the token is the first whose weight, with those before it, passes random * (weight of all candidates): in the same
//       order with top_p < 1, else by id
//
//   The first of an order whose sum reaches a target is found digit by digit, from the highest of its key: 16 sums, one
//   for each value of the digit, over those that have all higher digits right.
//
// Sums are f64, each added up in one order: of threads, warps, and blocks, which leave theirs in all shared memories.
// The token is that of the sampler on the host, but where `random` falls on a border to within the rounding of e^x.
#include "hopper.cuh"
#include "host_tokens.cuh"

constexpr int THREADS = 512, MOST_BLOCKS = 8, MOST_ROWS = 32;

// As `Row` in sample.rs.
struct Row {
  double random;  // from 0 to below 1
  float inverse_temperature;  // 0: nothing is drawn, the choice is taken
  float top_p;
  u32 top_k;  // 0: no limit
  u32 padding;  // of this struct
};

// As `Params` in sample.rs.
struct Params {
  const float* logits;  // [rows][length], at least one and none of them NaN or infinity
  const u32* choice;  // [rows][2]: index of the greatest logit, then its bits
  u32* drawn;  // [rows][2]: the token, then bits of the greatest logit
  u32* tokens;  // [rows]: become the token
  u64 length;
  HostTokensOperands host;
  Row rows[MOST_ROWS];
};

// A row's logits, and what is asked of it.
struct Draw : Row {
  const float* logits;
  u64 length;
};

// Bits that are ordered as the floats are.
DEV u32 ordered(float value) {
  const u32 bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Greater for what comes earlier.
DEV u64 key_of(float logit, u32 index) { return u64(ordered(logit)) << 32 | (0xffffffffu - index); }

struct Shared {
  double of_warps[THREADS / 32][16];
  double of_blocks[2][MOST_BLOCKS][16];  // in turn, so that a block that is ahead overwrites nothing
  double sums[16];
  u64 prefix;
  double above;
};

// Adds up what the warps of all blocks have left of so many sums, in their order; every block has them then.
DEV void join(Shared& s, u32 count, u32& turn) {
  const u32 thread = threadIdx.x;
  __syncthreads();
  if (thread < count) {
    double sum = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) sum += s.of_warps[warp][thread];
    double* to = &s.of_blocks[turn][blockIdx.x][thread];
#if __CUDA_ARCH__ >= 900
    for (u32 block = 0; block < gridDim.x; block++)
      store_cluster(cluster_address(shared_address(to), block), u64(__double_as_longlong(sum)));
#else
    *to = sum;
#endif
  }
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  cluster_sync();
#else
  __syncthreads();
#endif
  if (thread < count) {
    double sum = 0;
    for (u32 block = 0; block < gridDim.x; block++) sum += s.of_blocks[turn][block][thread];
    s.sums[thread] = sum;
  }
  turn ^= 1;
  __syncthreads();
}

enum Measure : u32 { COUNT, REACHES, PASSES };

// The key of the first token, in descending order of keys, that with all before it makes up `target`: as many tokens,
// at least that weight, or more than that weight. Where rounding leaves none, the last that has weight. Only tokens
// whose place in the order by logit is at least `least` take part; `by_id`: keys are those of the order by id.
DEV u64 first(const Draw& p, float greatest, Shared& s, u32& turn, Measure measure, double target, u64 least,
              bool by_id) {
  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  u64 prefix = 0;
  double above = 0;
  for (int shift = by_id ? 28 : 60; shift >= 0; shift -= 4) {
    double sums[16] = {};
    bool some = false;
    for (u64 i = u64(blockIdx.x) * THREADS + thread; i < p.length; i += u64(gridDim.x) * THREADS) {
      const float logit = p.logits[i];
      const u64 place = key_of(logit, u32(i)), key = by_id ? place & 0xffffffffu : place;
      // In two steps: a shift by all 64 bits is none.
      if (place < least || key >> shift >> 4 != prefix) continue;
      some = true;
      const float distance = logit - greatest;
      double weight = 1;
      if (measure != COUNT && distance != 0) weight = expf(distance * p.inverse_temperature);
      const u32 digit = u32(key >> shift) & 15;
#pragma unroll
      for (int d = 0; d < 16; d++) sums[d] += digit == d ? weight : 0;
    }
    if (__any_sync(ALL_LANES, some)) {
#pragma unroll
      for (int d = 0; d < 16; d++) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sums[d] += __shfl_xor_sync(ALL_LANES, sums[d], distance);
        if (lane == 0) s.of_warps[warp][d] = sums[d];
      }
    } else if (lane < 16) {
      s.of_warps[warp][lane] = 0;
    }
    join(s, 16, turn);
    if (thread == 0) {
      u32 digit = 0;
      double before = above, so_far = above;
      for (int d = 15; d >= 0; d--) {
        const double sum = s.sums[d];
        if (sum == 0) continue;
        digit = d;
        before = so_far;
        so_far += sum;
        if (measure == PASSES ? so_far > target : so_far >= target) break;
      }
      s.prefix = prefix << 4 | digit;
      s.above = before;
    }
    __syncthreads();
    prefix = s.prefix;
    above = s.above;
    __syncthreads();
  }
  return prefix;
}

// Weight of all tokens from a place in the order on.
DEV double weight_of(const Draw& p, float greatest, Shared& s, u32& turn, u64 least) {
  double sum = 0;
  for (u64 i = u64(blockIdx.x) * THREADS + threadIdx.x; i < p.length; i += u64(gridDim.x) * THREADS) {
    const float logit = p.logits[i], distance = logit - greatest;
    if (key_of(logit, u32(i)) < least) continue;
    sum += distance == 0 ? 1.0 : double(expf(distance * p.inverse_temperature));
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  if (threadIdx.x % 32 == 0) s.of_warps[threadIdx.x / 32][0] = sum;
  join(s, 1, turn);
  return s.sums[0];
}

__global__ void __launch_bounds__(THREADS) sample(const Params p) {
  __shared__ Shared s;
  u32 turn = 0;
#if __CUDA_ARCH__ >= 900
  cluster_sync();  // all blocks run: their shared memory can be written
#endif
  dependency_wait();
  launch_dependents();
  const u32 row = blockIdx.y;
  const u32* const choice = p.choice + 2 * row;
  const bool leaves = blockIdx.x == 0 && threadIdx.x == 0;
  if (p.rows[row].inverse_temperature == 0) {
    if (leaves) {
      p.drawn[2 * row] = p.tokens[row] = choice[0], p.drawn[2 * row + 1] = choice[1];
      leave_for_host(p.host, row, choice[0], __uint_as_float(choice[1]));
    }
    return;
  }
  const Draw d = {p.rows[row], p.logits + row * p.length, p.length};
  const float greatest = __uint_as_float(choice[1]);
  u64 least = 0;
  if (d.top_k > 0 && d.top_k < d.length) least = first(d, greatest, s, turn, COUNT, d.top_k, 0, false);
  double total = weight_of(d, greatest, s, turn, least);
  const bool nucleus = d.top_p < 1;
  if (nucleus) {
    least = first(d, greatest, s, turn, REACHES, total * double(d.top_p), least, false);
    total = weight_of(d, greatest, s, turn, least);
  }
  const u64 key = first(d, greatest, s, turn, PASSES, d.random * total, least, !nucleus);
  if (leaves) {
    const u32 index = 0xffffffffu - u32(key);
    p.drawn[2 * row] = p.tokens[row] = index;
    p.drawn[2 * row + 1] = __float_as_uint(greatest);
    leave_for_host(p.host, row, index, greatest);
  }
}
