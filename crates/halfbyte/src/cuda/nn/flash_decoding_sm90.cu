// Causal grouped-query attention of one row of each of many texts over a cache of halves, with the copy engine of
// sm_90a: out = softmax(scale * q * keys^T) * values.
//
//   a block owns a text's row, up to 8 heads of a key/value head's group and a part of the positions; its warps take
//   tiles of 16 positions in turn, each through a ring of its own in shared memory:
//       scores [positions][heads] = keys * q^T; shift the running maximum; weights = 2^(score - maximum)
//       sums [elements][heads] = sums * 2^(old - new maximum) + values^T * weights
//   what the kernel ahead does not write is asked for before that has ended, as much as the rings hold; the rest as
//   stages become free. At the end sums are joined as in flash_decoding.cuh.
//
// The rows' own queries, keys and values may come as the product before leaves them: they are normed and rotated here,
// as rope.cu does, and keys and values appended to the cache. Then the kernel ahead writes nothing of the cache.
//
// Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
#include "flash_decoding.cuh"
#include "hopper.cuh"
#include "rope.cuh"

// As `MOST_WARPS` in flash_decoding_sm90.rs.
constexpr u32 MOST_WARPS = 8;

// HEAD: size of a head, rounded up to 64. As `shared_bytes` in flash_decoding_sm90.rs.
template <int HEAD> struct Shape {
  static constexpr u32 RUNS = HEAD / 64;  // boxes of 64 elements
  static constexpr u32 BOX = TILE * 128, PART = RUNS * BOX, STAGE = 2 * PART;  // keys, then values
  static constexpr u32 PITCH = HEAD + 8;  // of queries: the same chunk of 8 rows lies in all banks
  static constexpr u32 QUERIES = 2 * 2 * COLUMNS * PITCH;
  static_assert(4 * COLUMNS * (HEAD + 4) <= STAGE, "sums of a warp lie where its ring was");
};
extern __shared__ __align__(1024) u8 shared[];

// Where chunks of 16 bytes of a row lie, run by run of 64 elements: in boxes of 128 bytes a row, whose chunks are XORed
// with it, or of a row by itself.
struct RowAt {
  u32 at, swizzle, run;
  DEV RowAt in_boxes(u32 first, u32 row, u32 box) { return {first + row * 128, row & 7, box}; }
  __device__ __forceinline__ u32 chunk(u32 r, u32 i) const { return at + r * run + ((i ^ swizzle) << 4); }
};

constexpr u32 NOWHERE = 0xffffffff;

// A row that is appended.
template <int HEAD> struct OwnRow {
  u16 key[HEAD], value[HEAD];  // as the cache has them
  float heads[COLUMNS][HEAD];  // of queries, rotated
  float2 angles[MOST_PAIRS];
};
// Its queries, and its key and value where the block has the row's own position, which lies at `slot` of the cache; all
// are there behind the next barrier.
template <int HEAD, KvType KV, u32 PITCH>
DEV void put_own_row(const Params& p, const Share& of, u32 warps, u32 slot, u16 (&queries)[2][COLUMNS][PITCH],
                     float* factors, OwnRow<HEAD>& own) {
  const u32 lane = threadIdx.x % 32, size = p.head_size;
  const float* const row = p.qkv + of.row * p.row_length;
#pragma unroll 1
  for (u32 i = threadIdx.x / 32; i < of.columns + (of.to == of.end ? 2 : 0); i += warps) {
    const bool is_query = i < of.columns, is_value = i == of.columns + 1;
    const u32 of_row = is_query ? of.first_head + i : p.heads + (is_value ? p.kv_heads : 0) + of.kv_head;
    const u32 pairs = is_value ? 0 : p.pairs;
    Head<HEAD> head;
    head.load(row + u64(of_row) * size, pairs, size);
    if (p.query_norm && !is_value) {
      Head<HEAD> weight;
      weight.load(is_query ? p.query_norm : p.key_norm, pairs, size);
      head.norm(weight, size, p.eps);
    }
    head.rotate(own.angles, pairs);
    if (is_query) {
      head.store(pairs, size, true, [&](u32 e, float v) { own.heads[i][e] = v; });
      __syncwarp();
      QueryOfLane<HEAD, KV> query;
      query.load(own.heads[i], true, size);
      query.put(queries, factors, i, p.scale);
    } else {
      u16* const cache = static_cast<u16*>(const_cast<void*>(is_value ? p.values : p.keys)) +
                         (u64(of.kv_head) * p.capacity + slot) * size;
      u16* const to = is_value ? own.value : own.key;
      for (u32 e = size + lane; e < HEAD; e += 32) to[e] = 0;
      head.store(pairs, size, true, [&](u32 e, float v) {
        const u16 bits = KV == BFLOATS ? bfloat_of_float(v) : half_of_float(v);
        to[e] = bits;
        if (slot != NOWHERE) cache[e] = bits;
      });
    }
  }
}
// Columns without a query.
template <int HEAD, u32 PITCH>
DEV void clear_columns(const Share& of, u16 (&queries)[2][COLUMNS][PITCH], float* factors) {
  for (u32 i = threadIdx.x; i < (COLUMNS - of.columns) * (HEAD / 2); i += blockDim.x) {
    const u32 h = of.columns + i / (HEAD / 2), d = i % (HEAD / 2) * 2;
    *reinterpret_cast<u32*>(&queries[0][h][d]) = 0;
    *reinterpret_cast<u32*>(&queries[1][h][d]) = 0;
    if (d == 0) factors[h] = 0;
  }
}

template <int HEAD, KvType KV>
__global__ void __launch_bounds__(32 * MOST_WARPS, 1)
    flash_decoding_sm90(const __grid_constant__ Params p, const __grid_constant__ TensorMap keys,
                        const __grid_constant__ TensorMap values) {
  typedef Shape<HEAD> S;
  constexpr bool BF16 = KV == BFLOATS;
  const u32 warps = blockDim.x / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  // The rings, and in their place at the end what warps leave; queries; a barrier a stage; scores and weights of warps.
  const u32 stages = p.stages, rings = warps * stages * S::STAGE;
  u16(&queries)[2][COLUMNS][S::PITCH] = *reinterpret_cast<u16(*)[2][COLUMNS][S::PITCH]>(shared + rings);
  Left<HEAD> left;
  left.sums = reinterpret_cast<float (*)[COLUMNS][HEAD + 4]>(shared);
  left.greatest = reinterpret_cast<float (*)[COLUMNS]>(shared + rings + S::QUERIES);
  left.weights = left.greatest + warps;
  __shared__ float factors[COLUMNS];
  __shared__ __align__(16) OwnRow<HEAD> own;
  const u32 base = shared_address(shared), ring = base + warp * stages * S::STAGE,
            barriers = base + rings + S::QUERIES + warps * (2 * 4 * COLUMNS) + warp * stages * 8;
  if (threadIdx.x == 0) prefetch_map(&keys), prefetch_map(&values);
  const Share of(p, warps);
  const u32 to = of.to;
  if (of.from >= to) return;

  // ---- as many tiles as the ring holds, each by a lane: those that are settled at once
  const u32 first = of.first_tile(warp), apart = warps * TILE;
  // Where the tile of this lane lies, of 32 from a number of the warp's on.
  const auto row_of = [&](u32 number) {
    const u32 tile = first + (number + lane) * apart;
    return tile < to ? of.kv_head * u32(p.capacity) + slot_of(p, of.row, tile) : 0;
  };
  const auto ask = [&](u32 row, u32 stage) {
    const u32 full = barriers + 8 * stage;
    mbarrier_expect(full, S::STAGE);
#pragma unroll
    for (u32 i = 0; i < 2 * S::RUNS; i++)
      copy_box(ring + stage * S::STAGE + i * S::BOX, i < S::RUNS ? &keys : &values, int(64 * (i % S::RUNS)), int(row),
               full);
  };
  u32 row = row_of(0);
  const bool asks = lane < stages && first + lane * apart < to, settled = asks && of.settled(p, first + lane * apart);
  if (lane < stages) mbarrier_init(barriers + 8 * lane, 1);
  mbarrier_init_fence();
  if (settled) ask(row, lane);
  u32 slot = NOWHERE;  // of the row's own key and value, where this block appends them and the cache has their place
  if (p.appends) {
    for (u32 i = threadIdx.x; i < p.pairs; i += blockDim.x) own.angles[i] = angle_at(of.end - 1, p.turns[i]);
    clear_columns<HEAD>(of, queries, factors);
    if (of.first_head == of.kv_head * p.group && p.positions[of.row] == of.end - 1)
      slot = slot_of(p, of.row, of.end - 1);
  }
  dependency_wait();
  launch_dependents();
  if (asks && !settled) ask(row, lane);
  if (p.appends) {
    __syncthreads();
    put_own_row<HEAD, KV>(p, of, warps, slot, queries, factors, own);
  } else {
    put_queries<HEAD, KV>(p, of, warps, queries, factors);
  }
  __syncthreads();

  // ---- tiles; columns of a lane are heads 2c and 2c + 1
  Weights weights;
  float sums[HEAD / 16][4] = {};
  u32 stage = 0, phase = 0, asked = stages;
  const u32 own_position = p.appends ? of.end - 1 : 0xffffffff;  // which does not come from the cache
  const u32 query = shared_address(queries) + (lane & 7) * (2 * S::PITCH) + (lane >> 3) * 16;
#pragma unroll 1
  for (u32 tile = first; tile < to; tile += apart) {
    mbarrier_wait(barriers + 8 * stage, phase);
    const u32 at = ring + stage * S::STAGE, row_of_key = of.seen(tile, lane & 15),
              row_of_value = of.seen(tile, (lane & 7) + (lane >> 4) * 8);
    RowAt key = RowAt::in_boxes(at, row_of_key, S::BOX), value = RowAt::in_boxes(at + S::PART, row_of_value, S::BOX);
    if (tile + row_of_key == own_position) key = {shared_address(own.key), 0, 128};
    if (tile + row_of_value == own_position) value = {shared_address(own.value), 0, 128};
    float s[4] = {}, less[4] = {};
#pragma unroll
    for (u32 i = 0; i < HEAD / 32; i++) {
      u32 high[4], low[4];
      load_matrices(high, query + 64 * i);
      load_matrices(low, query + 2 * COLUMNS * S::PITCH + 64 * i);
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        u32 a[4];
        load_matrices(a, key.chunk(i / 2, 4 * (i % 2) + 2 * e + (lane >> 4)));
        mma_sync<BF16>(s, a, high[2 * e], high[2 * e + 1]);
        mma_sync<BF16>(less, a, low[2 * e], low[2 * e + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] += less[i];
    const float one[2] = {1, 1};
    const WeightsOfTile of_tile = weigh<KV>(p, of, factors, weights, tile, s, one, one);
#pragma unroll
    for (u32 i = 0; i < HEAD / 16; i++) {
      u32 a[4];
      load_transposed(a, value.chunk(i / 4, 2 * (i % 4) + (lane >> 3 & 1)));
      add_values<KV>(sums[i], a, of_tile);
    }
    const u32 next = tile + stages * apart;
    if (next < to) {
      if (asked % 32 == 0) row = row_of(asked);
      const u32 of_next = __shfl_sync(ALL_LANES, row, asked++ % 32);
      loads_before_copies();
      __syncwarp();
      if (lane == 0) ask(of_next, stage);
    }
    if (++stage == stages) stage = 0, phase ^= 1;
  }

  leave_weights(left, weights);
  __syncthreads();  // the rings are read
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
#pragma unroll
    for (u32 i = 0; i < HEAD / 8; i++) left.sums[warp][2 * c + h][8 * i + g] = sums[i / 2][i % 2 * 2 + h];
  }
  join<HEAD, KV, MOST_WARPS>(p, of, warps, left);
}
