// Causal grouped-query attention of many rows over a cache of halves, by wgmma and the copy engine of sm_90a:
// out = softmax(scale * q * keys^T) * values.
//
//   a block owns one key/value head and a tile of queries (a row's heads of the group, row after row), of which each
//   of two warpgroups multiplies 64; the third brings tiles of keys and of values, in a ring of two stages:
//       scores = q * keys^T; shift the running maximum; weights = 2^(score - maximum), rounded to halves
//       sums = sums * 2^(old - new maximum) + weights * values
//   while the scores of a tile are shifted and become weights, the tensor cores multiply the weights of the tile before
//
// Queries are rounded, and bits of a query depend on its position alone, as in attention_mma.cu; tiles are longer here.
//
// NaN: a score that a query does not see is minus infinity by selection, but 0 * NaN is NaN. So the third warpgroup
// makes zeros of what is not finite in tiles that some query sees in part, and says where it was: sums of the queries
// that see it become NaN.
#include "attention_tiles.cuh"
#include "attention_wgmma.cuh"

constexpr int WARPGROUP = 128, QUERIES_OF_WARPGROUP = 64;
constexpr int BLOCK = 3 * WARPGROUP;

// Warps of the third warpgroup: the first one asks for copies, the others look after values.
constexpr u32 CLEANING_WARPS = 3;

// HEAD: size of a head, rounded up to 16. As `Tile` in attention_wgmma.rs.
template <int HEAD> struct Tile {
  static constexpr int KEYS = HEAD <= 128 ? 128 : 64;  // positions
  static constexpr int ELEMENTS = HEAD <= 128 ? HEAD : (HEAD + 31) / 32 * 32;  // of values, as wgmma takes them
  typedef Boxes<QUERIES_OF_WARPGROUP> OfQueries;
  typedef Boxes<KEYS> OfKeys;
  // Of a warpgroup; keys of a stage, or values; bits of these, in bytes of a chunk each, that say what is not finite.
  static constexpr u32 BOXES = (HEAD + 63) / 64, CHUNKS = 8 * BOXES, QUERIES = BOXES * OfQueries::BOX,
                       PART = BOXES * OfKeys::BOX, BITS = KEYS * CHUNKS;
  static constexpr u32 KEYS_AT = 2 * QUERIES, VALUES_AT = KEYS_AT + 2 * PART, BITS_AT = VALUES_AT + 2 * PART,
                       BARRIERS = BITS_AT + 2 * BITS, FOUND = BARRIERS + 80, FACTORS = FOUND + 2 * 4 * CLEANING_WARPS,
                       SHARED_BYTES = FACTORS + 4 * 2 * QUERIES_OF_WARPGROUP;
};
static_assert(Tile<128>::SHARED_BYTES == 168552 && Tile<256>::SHARED_BYTES == 201320, "the host's sums");

// A stage of keys, or of values: full when the copy engine has brought it, clean when values have been looked after,
// empty when all warps that multiply have read it.
struct Stage {
  u32 tile, full, empty, clean, phase;
  u32 bits, found;  // of values: what is not finite, and for each cleaning warp whether there is any
};
template <class T> struct Ring {
  u32 base;
  __device__ __forceinline__ Stage keys(int n) const { return stage(T::KEYS_AT, 0, n); }
  __device__ __forceinline__ Stage values(int n) const { return stage(T::VALUES_AT, 16, n); }

 private:
  __device__ __forceinline__ Stage stage(u32 first, u32 barriers, int n) const {
    const u32 stage = u32(n) % 2, at = base + T::BARRIERS + 40 * stage + barriers;
    return {base + first + stage * T::PART,
            at,
            at + 8,
            at + 16,
            u32(n) / 2 % 2,
            base + T::BITS_AT + stage * T::BITS,
            base + T::FOUND + stage * 4 * CLEANING_WARPS};
  }
};

// Positions behind the first `there` become zeros, and values before them that are not finite, of which a bit says so.
template <bool BF16, class T> DEV bool clean_values(const Stage& stage, int there) {
  u32 any = 0;
#pragma unroll 1
  for (u32 i = threadIdx.x - (BLOCK - 32 * CLEANING_WARPS); i < T::KEYS * T::CHUNKS; i += 32 * CLEANING_WARPS) {
    const u32 row = i / T::CHUNKS, chunk = i % T::CHUNKS, at = stage.tile + T::OfKeys::at(row, chunk);
    u32 v[4], bits = 0;
    load_shared(v, at);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const u32 refused = not_finite<BF16>(v[e]);
      v[e] &= ~refused;
      bits |= (refused & 1 | refused >> 30 & 2) << (2 * e);
    }
    if (int(row) >= there) v[0] = v[1] = v[2] = v[3] = bits = 0;
    if (bits || int(row) >= there)
      store_shared(at, __uint_as_float(v[0]), __uint_as_float(v[1]), __uint_as_float(v[2]), __uint_as_float(v[3]));
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(stage.bits + i), "r"(bits) : "memory");
    any |= bits;
  }
  async_proxy_fence();
  return any != 0;
}

// Two floats that lie side by side; `pairs`: where two of them begin at a multiple of their size.
DEV void store_two(void* to, u64 at, float x, float y, FloatType type, bool pairs) {
  if (pairs && type == F32) {
    *reinterpret_cast<float2*>(static_cast<float*>(to) + at) = make_float2(x, y);
  } else if (pairs) {
    *reinterpret_cast<u32*>(static_cast<u16*>(to) + at) = type == F16 ? half_pair(x, y) : bf16_pair(x, y);
  } else {
    store_float(to, at, x, type);
    store_float(to, at + 1, y, type);
  }
}

// CHANGED: scores are capped, fall with the distance, or have sinks beside them; they are brought to powers of two
// before.
template <int HEAD, KvType KV, bool CHANGED>
__global__ void __launch_bounds__(BLOCK, 1)
    attention_wgmma(const __grid_constant__ Params p, const __grid_constant__ TensorMap keys,
                    const __grid_constant__ TensorMap values) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using T = Tile<HEAD>;
  using OfQueries = typename T::OfQueries;
  using OfKeys = typename T::OfKeys;
  constexpr bool BF16 = KV == BFLOATS;
  constexpr int KEYS = T::KEYS, ELEMENTS = T::ELEMENTS;
  // Weights are 2^LIFT times as large: those of 2^-28 are normal halves.
  constexpr float LIFT = KV == HALVES ? 14 : 0;
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared), lane = threadIdx.x % 32;
  const u32 warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0), warpgroup = warp / 4;
  float* const factors = reinterpret_cast<float*>(shared + T::FACTORS);
  const Ring<T> ring{base};

  const u32 group = p.heads / p.kv_heads, total = p.rows * group;
  const u32 kv_head = blockIdx.x % p.kv_heads;
  const u32 first = (gridDim.x / p.kv_heads - 1 - blockIdx.x / p.kv_heads) * (2 * QUERIES_OF_WARPGROUP);
  const int first_position = __shfl_sync(ALL_LANES, int(position_of(p, 0, p.rows)), 0),
            window = min(p.window, 0x7fffffffu);
  const auto position_of_query = [&](u32 query) { return first_position + int(min(query, total - 1) / group); };
  // Of what the block's queries see.
  const int end = position_of_query(first + 2 * QUERIES_OF_WARPGROUP - 1) + 1, tiles = (end + KEYS - 1) / KEYS;
  const int first_tile = max(position_of_query(first) + 1 - window, 0) / KEYS;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; stage++) {
      const Stage of[2] = {ring.keys(stage), ring.values(stage)};
      for (int i = 0; i < 2; i++) {
        mbarrier_init(of[i].full, 1);
        mbarrier_init(of[i].empty, 2 * WARPGROUP / 32);
      }
      mbarrier_init(of[1].clean, CLEANING_WARPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  // Whether queries at these positions all see all of a tile.
  const auto sees_all = [&](int tile, int lowest, int highest) {
    return (tile + 1) * KEYS - 1 <= lowest && tile * KEYS > highest - window;
  };
  if (warpgroup == 2) {
    registers_decrease<40>();
    for (int n = 0; n < tiles - first_tile; n++) {
      const int tile = first_tile + n;
      if (warp != BLOCK / 32 - 4) {
        const Stage stage = ring.values(n);
        mbarrier_wait(stage.full, stage.phase);
        bool found = false;
        if (!sees_all(tile, position_of_query(first), end - 1)) found = clean_values<BF16, T>(stage, end - tile * KEYS);
        found = __any_sync(ALL_LANES, found);
        if (lane) continue;
        store_shared(stage.found + 4 * (BLOCK / 32 - 1 - warp), u32(found));
        mbarrier_arrive(stage.clean);
      } else if (lane == 0) {
        const int row = int(u64(kv_head) * p.capacity + slot_of(p, 0, u32(tile * KEYS)));
        const auto fill = [&](const Stage& stage, const TensorMap* map) {
          mbarrier_wait(stage.empty, stage.phase ^ 1);
          mbarrier_expect(stage.full, T::PART);
          for (u32 box = 0; box < T::BOXES; box++)
            copy_box(stage.tile + box * OfKeys::BOX, map, int(64 * box), row, stage.full);
        };
        fill(ring.keys(n), &keys);
        fill(ring.values(n), &values);
      }
    }
    return;
  }
  registers_increase<232>();

  // ---- queries of this warp
  const u32 own = first + warpgroup * QUERIES_OF_WARPGROUP, queries = base + warpgroup * T::QUERIES;
#pragma unroll 4
  for (u32 i = 0; i < 16; i++) {
    const u32 row = warp % 4 * 16 + i, query = own + row;
    const float* from = p.qkv + u64(query / group) * p.row_length + u64(kv_head * group + query % group) * p.head_size;
    const float factor = put_query<HEAD, KV>(p, from, query < total, lane,
                                             [&](u32 chunk) { return queries + OfQueries::at(row, chunk); });
    if (lane == 0) factors[warpgroup * QUERIES_OF_WARPGROUP + row] = factor;
  }
  async_proxy_fence();
  barrier_sync(1 + warpgroup, WARPGROUP);

  // ---- this thread's rows, 8 apart, of which it has two columns in eight
  const int lowest = position_of_query(own), highest = position_of_query(own + QUERIES_OF_WARPGROUP - 1);
  const auto query_of = [&](int r) { return own + warp % 4 * 16 + 8 * r + lane / 4; };
  const auto head_of = [&](int r) { return kv_head * group + query_of(r) % group; };
  int position[2];
  float factor[2], slope[2] = {};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    position[r] = position_of_query(query_of(r)), factor[r] = factors[query_of(r) - first];
    if (CHANGED) slope[r] = slope_of(p, head_of(r));
  }
  float maximum[2] = {minus_infinity(), minus_infinity()}, weight[2] = {};
  float scores[KEYS / 8][4], sums[ELEMENTS / 2] = {};
  float (&flat_scores)[KEYS / 2] = reinterpret_cast<float (&)[KEYS / 2]>(scores);
  u32 weights[KEYS / 16][4];
  const auto sees = [&](int position, int key) { return key <= position && key > position - window; };
  // What is subtracted from a score with the maximum's factor before 2^x: minus infinities have weights 0, not NaN.
  const auto subtracted = [&](float maximum, float factor) {
    return maximum == minus_infinity() ? 0 : __fsub_rn(__fmul_rn(maximum, factor), LIFT);
  };
  const auto release = [&](const Stage& stage) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(stage.empty);
  };

  // Begins to multiply queries and keys.
  const auto multiply_keys = [&](const Stage& stage) {
    mbarrier_wait(stage.full, stage.phase);
    const u64 q = OfQueries::as_columns(queries), k = OfKeys::as_columns(stage.tile);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < HEAD / 16; d++)
      WgmmaOfScores<KEYS, BF16>::run(flat_scores, q + OfQueries::elements(d), k + OfKeys::elements(d), d ? 1 : 0);
    wgmma_commit();
  };
  // Begins to multiply weights and values of a tile.
  const auto multiply_values = [&](const Stage& stage) {
    mbarrier_wait(stage.full, stage.phase);
    mbarrier_wait(stage.clean, stage.phase);
    const u64 v = OfKeys::as_depth(stage.tile);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) WgmmaOfValues<ELEMENTS, BF16>::run(sums, weights[k], v + OfKeys::rows(k));
    wgmma_commit();
  };
  // Waits for that; sums of those that see a value which is not finite become NaN.
  const auto wait_for_values = [&](const Stage& stage, int tile) {
    wgmma_wait<0>();
    pin(sums);
    pin(weights);
    u32 found = 0;
#pragma unroll
    for (u32 i = 0; i < CLEANING_WARPS; i++) found |= load_shared(stage.found + 4 * i);
    if (found) {
      u32 bits[2][T::CHUNKS / 4] = {};
#pragma unroll 1
      for (int key = 0; key < KEYS; key++) {
#pragma unroll
        for (u32 i = 0; i < T::CHUNKS / 4; i++) {
          const u32 of_key = load_shared(stage.bits + key * T::CHUNKS + 4 * i);
#pragma unroll
          for (int r = 0; r < 2; r++) bits[r][i] |= sees(position[r], tile * KEYS + key) ? of_key : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < HEAD / 2; i++) {
        const u32 column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
        if (bits[i / 2 % 2][i / 16] >> column % 32 & 1) sums[i] = not_a_number();
      }
    }
    release(stage);
  };
  // Scores become weights as floats; gives what the sums shrink by.
  const auto weigh = [&](int tile, float (&shrink)[2]) {
    const int begin = tile * KEYS;
    const bool all = sees_all(tile, lowest, highest);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float of_scores = factor[r];
      if constexpr (CHANGED) {
        if (p.cap > 0) {
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) scores[n][i] = capped(scores[n][i] * of_scores, p);
          }
          of_scores = 1;
        }
        const float nearest = slope[r] * float(begin + 2 * int(lane % 4) - position[r]);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
          for (int i = 0; i < 2; i++)
            scores[n][2 * r + i] = fmaf(slope[r], float(8 * n + i), fmaf(scores[n][2 * r + i], of_scores, nearest));
        }
        of_scores = 1;
      }
      if (!all) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const bool seen = sees(position[r], begin + 8 * n + 2 * int(lane % 4) + i);
            scores[n][2 * r + i] = seen ? scores[n][2 * r + i] : minus_infinity();
          }
        }
      }
      float greatest = maximum[r];
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) greatest = fmaxf(greatest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 1));
      greatest = fmaxf(greatest, __shfl_xor_sync(ALL_LANES, greatest, 2));
      const float less = subtracted(greatest, of_scores);
      const bool none = maximum[r] == minus_infinity();
      shrink[r] = none ? 0 : power_of_two(subtracted(maximum[r], of_scores) - less);
      maximum[r] = greatest;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; i++) {
          scores[n][i] = power_of_two(fmaf(scores[n][i], of_scores, -less));
          sum += scores[n][i];
        }
      }
      weight[r] = weight[r] * shrink[r] + sum;
    }
  };

  const auto round_weights = [&]() {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) weights_of<BF16>(weights[k], scores, k);
  };

  // ---- tiles that these queries see; the others are let go
  const int from = max(lowest + 1 - window, 0) / KEYS - first_tile, to = highest / KEYS + 1 - first_tile;
  const auto let_go = [&](const Stage& stage) {
    mbarrier_wait(stage.full, stage.phase);
    release(stage);
  };
  for (int n = 0; n < from; n++) let_go(ring.keys(n)), let_go(ring.values(n));
  float shrink[2];
  multiply_keys(ring.keys(from));
  wgmma_wait<0>();
  pin(flat_scores);
  release(ring.keys(from));
  weigh(first_tile + from, shrink);
  round_weights();
#pragma unroll 1
  for (int n = from + 1; n < to; n++) {
    multiply_keys(ring.keys(n));
    multiply_values(ring.values(n - 1));
    wgmma_wait<1>();
    pin(flat_scores);
    release(ring.keys(n));
    weigh(first_tile + n, shrink);
    wait_for_values(ring.values(n - 1), first_tile + n - 1);
    if (__any_sync(ALL_LANES, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int i = 0; i < ELEMENTS / 2; i++) sums[i] *= shrink[i / 2 % 2];
    }
    round_weights();
  }
  multiply_values(ring.values(to - 1));
  wait_for_values(ring.values(to - 1), first_tile + to - 1);
  for (int n = to; n < tiles - first_tile; n++) let_go(ring.keys(n)), let_go(ring.values(n));

  // ---- out
  const bool pairs = u64(p.out) % (p.out_type == F32 ? 8 : 4) == 0;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    weight[r] += __shfl_xor_sync(ALL_LANES, weight[r], 1);
    weight[r] += __shfl_xor_sync(ALL_LANES, weight[r], 2);
    const float of_scores = CHANGED ? 1 : factor[r], sink = CHANGED ? sink_of(p, head_of(r)) : 0;
    float mine = 1, all = weight[r];
    if (CHANGED && sink != minus_infinity()) {
      const float common = fmaxf(maximum[r], sink);
      const bool none = maximum[r] == minus_infinity();
      mine = none ? 0 : power_of_two(subtracted(maximum[r], of_scores) - subtracted(common, of_scores));
      all = all * mine + power_of_two(sink - subtracted(common, of_scores));
    }
    mine /= all;
    const u32 query = query_of(r);
    if (query >= total) continue;
    const u64 row = (u64(query / group) * p.heads + head_of(r)) * p.head_size;
#pragma unroll
    for (u32 n = 0; n < HEAD / 8; n++) {
      const u32 d = 8 * n + 2 * (lane % 4);
      if (d < p.head_size)
        store_two(p.out, row + d, sums[4 * n + 2 * r] * mine, sums[4 * n + 2 * r + 1] * mine, p.out_type, pairs);
    }
  }
#endif
}
