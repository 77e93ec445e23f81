// Causal grouped-query attention of one row of each of many texts over a cache of halves or of
// codes of 8 bits, on the tensor cores from sm_75 on: out = softmax(scale * q * keys^T) * values.
//
//   a block owns a text's row, up to 8 heads of a key/value head's group and a part of the positions; its warps take
//   tiles of 16 positions in turn, from memory to the fragments of the products:
//       scores [positions][heads] = keys * q^T; shift the running maximum; weights = 2^(score - maximum)
//       sums [elements][heads] = sums * 2^(old - new maximum) + values^T * weights
//   the keys of a warp's next tile are asked for when those of this one are multiplied, the values likewise; at the end
//   the warps' sums are added, each shifted to the common maximum, and where a row has several parts the block that
//   comes last adds theirs, in their order
//
// Codes of 8 bits become halves in registers: keys fp16, and values bf16, which has room for weights times any scale. A
// key's scale is taken into its scores, a value's into its weights.
#include "flash_decoding.cuh"

// A lane's words of a tile, 8 elements of a row each; of keys rows lane / 4 and + 8, elements 8 (lane % 4) of each 32;
// of values rows 2 (lane % 4), + 1, + 8, + 9, elements 8 (lane / 4) of each 64.
template <int HEAD, KvType KV> struct Tile {
  typedef typename Choice<KV == CODES, u8, u16>::Type Element;
  static constexpr u32 WORDS = KV == CODES ? 2 : 4;
  u32 keys[HEAD / 32][2][WORDS], values[HEAD / 64][4][WORDS];
  float key_scales[2], value_scales[2];  // of rows lane / 4 and + 8, where elements are codes

  __device__ __forceinline__ static void load(u32 (&w)[WORDS], const Element* row, u32 element, u32 head_size) {
    if constexpr (KV == CODES) {
      uint2 v = make_uint2(0, 0);
      if (element < head_size) v = load_8_once(row + element);
      w[0] = v.x, w[1] = v.y;
    } else {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (element < head_size) v = load_once(row + element);
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
  }

  // Keys of 16 elements as the products take them: of halves words 2 e and 2 e + 1 of both rows, elements in order; of
  // codes word e, elements 0, 2, 1, 3 of each four.
  __device__ __forceinline__ void keys_of(u32 (&a)[4], u32 i, u32 e) const {
    if constexpr (KV == CODES) {
      u32 first[2], second[2];
      halves_of_codes<false>(keys[i][0][e], first);
      halves_of_codes<false>(keys[i][1][e], second);
      a[0] = first[0], a[1] = second[0], a[2] = first[1], a[3] = second[1];
    } else {
      a[0] = keys[i][0][2 * e], a[1] = keys[i][1][2 * e], a[2] = keys[i][0][2 * e + 1], a[3] = keys[i][1][2 * e + 1];
    }
  }

  // Values of all positions of elements 2 j and 2 j + 1 of a lane's 8, transposed.
  __device__ __forceinline__ void values_of(u32 (&a)[4], u32 i, u32 j) const {
    const u32(&v)[4][WORDS] = values[i];
    if constexpr (KV == CODES) {
      const u32 selected = j % 2 ? 0x7632 : 0x5410;
      u32 first[2], second[2];
      halves_of_codes<true>(__byte_perm(v[0][j / 2], v[1][j / 2], selected), first);
      halves_of_codes<true>(__byte_perm(v[2][j / 2], v[3][j / 2], selected), second);
      a[0] = first[0], a[1] = first[1], a[2] = second[0], a[3] = second[1];
    } else {
      a[0] = __byte_perm(v[0][j], v[1][j], 0x5410), a[1] = __byte_perm(v[0][j], v[1][j], 0x7632);
      a[2] = __byte_perm(v[2][j], v[3][j], 0x5410), a[3] = __byte_perm(v[2][j], v[3][j], 0x7632);
    }
  }
};

// Warps of a multiprocessor, of one block or several, as `most_warps` in flash_decoding.rs: what registers allow.
static __device__ constexpr u32 most_warps(int head) { return head <= 64 ? 16 : head <= 128 ? 12 : 8; }
extern __shared__ __align__(16) u8 shared[];

// HEAD: size of a head, rounded up to 64. A block has as many warps as the launch gives it.
template <int HEAD, KvType KV>
__global__ void __launch_bounds__(32 * most_warps(HEAD), 1) flash_decoding(const Params p) {
  constexpr u32 PITCH = HEAD + 32;  // of queries: eight lanes read 16 bytes each from all banks
  const u32 warps = blockDim.x / 32;
  // As `shared_bytes` in flash_decoding.rs: queries, and what warps leave.
  u16(&queries)[2][COLUMNS][PITCH] = *reinterpret_cast<u16(*)[2][COLUMNS][PITCH]>(shared);
  Left<HEAD> left;
  left.sums = reinterpret_cast<float (*)[COLUMNS][HEAD + 4]>(shared + sizeof(queries));
  left.greatest = reinterpret_cast<float (*)[COLUMNS]>(left.sums + warps);
  left.weights = left.greatest + warps;
  __shared__ float factors[COLUMNS];

  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const Share of(p, warps);
  const u32 to = of.to;
  if (of.from >= to) return;

  // ---- the first tile is asked for, before the kernel ahead has ended where that does not write to it
  const u64 of_head = u64(of.kv_head) * p.capacity;
  typedef typename Tile<HEAD, KV>::Element Element;
  const Element* const keys = static_cast<const Element*>(p.keys) + of_head * p.head_size;
  const Element* const values = static_cast<const Element*>(p.values) + of_head * p.head_size;
  Tile<HEAD, KV> t;
  const auto slot_at = [&](u32 slot, u32 tile, u32 i) { return slot + of.seen(tile, i); };
  const auto row_at = [&](const Element* all, u32 slot, u32 tile, u32 i) {
    return all + slot_at(slot, tile, i) * p.head_size;
  };
  const auto load_keys = [&](u32 slot, u32 tile) {
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      const Element* const of_row = row_at(keys, slot, tile, g + 8 * r);
      if (KV == CODES) t.key_scales[r] = load_l2(p.key_scales + of_head + slot_at(slot, tile, g + 8 * r));
#pragma unroll
      for (u32 i = 0; i < HEAD / 32; i++) t.load(t.keys[i][r], of_row, 32 * i + 8 * c, p.head_size);
    }
  };
  const auto load_values = [&](u32 slot, u32 tile) {
    for (u32 r = 0; KV == CODES && r < 2; r++)
      t.value_scales[r] = load_l2(p.value_scales + of_head + slot_at(slot, tile, g + 8 * r));
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
      const Element* const of_row = row_at(values, slot, tile, 2 * c + r % 2 + r / 2 * 8);
#pragma unroll
      for (u32 i = 0; i < HEAD / 64; i++) t.load(t.values[i][r], of_row, 64 * i + 8 * g, p.head_size);
    }
  };
  u32 tile = of.first_tile(warp);
  const u32 slot = tile < to ? u32(slot_of(p, of.row, tile)) : 0;
  const bool settled = tile < to && of.settled(p, tile);
  if (settled) load_keys(slot, tile), load_values(slot, tile);
  dependency_wait();
  launch_dependents();
  if (tile < to && !settled) load_keys(slot, tile), load_values(slot, tile);

  put_queries<HEAD, KV>(p, of, warps, queries, factors);
  __syncthreads();

  // ---- tiles; columns of a lane are heads 2c and 2c + 1
  Weights weights;
  float sums[HEAD / 64][4][4] = {};
#pragma unroll 1
  while (tile < to) {
    const u32 next = tile + warps * TILE;
    const u32 next_slot = next < to ? u32(slot_of(p, of.row, next)) : 0;

    float s[4] = {}, of_rest[4] = {};
    float (&less)[4] = HEAD <= 128 ? of_rest : s;  // registers are short
#pragma unroll
    for (u32 i = 0; i < HEAD / 32; i++) {
      u32 high[4], low[4];
      load_shared(high, shared_address(&queries[0][g][32 * i + 8 * c]));
      load_shared(low, shared_address(&queries[1][g][32 * i + 8 * c]));
#pragma unroll
      for (int e = 0; e < 2; e++) {
        u32 a[4];
        t.keys_of(a, i, e);
        mma_sync<BF16_KEYS<KV>>(s, a, high[2 * e], high[2 * e + 1]);
        mma_sync<BF16_KEYS<KV>>(less, a, low[2 * e], low[2 * e + 1]);
      }
    }
#pragma unroll
    for (int i = 0; HEAD <= 128 && i < 4; i++) s[i] += of_rest[i];
    const float of_keys[2] = {KV == CODES ? t.key_scales[0] : 1, KV == CODES ? t.key_scales[1] : 1};
    if (next < to) load_keys(next_slot, next);

    const WeightsOfTile of_tile = weigh<KV>(p, of, factors, weights, tile, s, of_keys, t.value_scales);
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        u32 a[4];
        t.values_of(a, i, j);
        add_values<KV>(sums[i][j], a, of_tile);
      }
    }
    if (next < to) load_values(next_slot, next);
    tile = next;
  }

  leave_weights(left, weights);
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) {
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        *reinterpret_cast<float2*>(&left.sums[warp][2 * c + h][64 * i + 8 * g + 2 * j]) =
            make_float2(sums[i][j][h], sums[i][j][2 + h]);
    }
  }
  join<HEAD, KV, most_warps(HEAD)>(p, of, warps, left);
}
