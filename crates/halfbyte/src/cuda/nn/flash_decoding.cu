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
// Queries and weights are two halves each, the second what the first leaves, so that products lose next to nothing.
// Codes of 8 bits become halves in registers: keys fp16, and values bf16, which has room for weights times any scale. A
// key's scale is taken into its scores, a value's into its weights.
// Where the rows of a tile are not seen, the row beside them is read in their place, with a weight of 0: what a query
// does not see does not reach it.
//
// Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
#include "ampere.cuh"
#include "attention.cuh"

// What is left of two floats by the pair that they became.
template <bool BF16> DEV u32 rest(float low, float high, u32 taken) {
  const FloatType type = BF16 ? FloatType::BF16 : F16;
  return pair<BF16>(low - float_of_bits(u16(taken), type), high - float_of_bits(u16(taken >> 16), type));
}

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
  constexpr u32 TILE = 16, COLUMNS = 8;  // positions; heads
  constexpr bool BF16_KEYS = KV == BFLOATS, BF16_VALUES = KV != HALVES;  // in the products
  constexpr u32 PITCH = HEAD + 32;  // of queries: eight lanes read 16 bytes each from all banks
  constexpr float LIFT =
      BF16_VALUES ? 0 : 14;  // weights are 2^LIFT times as large: what the second half leaves is small
  const u32 warps = blockDim.x / 32;
  // As `shared_bytes` in flash_decoding.rs: queries; sums of warps; what these are shifted by, and their weights.
  u16(&queries)[2][COLUMNS][PITCH] = *reinterpret_cast<u16(*)[2][COLUMNS][PITCH]>(shared);
  float (*const left)[COLUMNS][HEAD + 8] = reinterpret_cast<float (*)[COLUMNS][HEAD + 8]>(shared + sizeof(queries));
  float (*const greatest_of)[COLUMNS] = reinterpret_cast<float (*)[COLUMNS]>(left + warps);
  float (*const weight_of)[COLUMNS] = greatest_of + warps;
  __shared__ float factors[COLUMNS];

  const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, c = lane % 4;
  const u32 group = p.heads / p.kv_heads, blocks = (group + COLUMNS - 1) / COLUMNS, part = blockIdx.z;
  const u32 row = blockIdx.x, kv_head = blockIdx.y / blocks, first = blockIdx.y % blocks * COLUMNS;
  const u32 columns = min(COLUMNS, group - first), first_head = kv_head * group + first;
  // Positions and pages are older than the kernel before this one.
  const u32 end = u32(position_of(p, row, 1)) + 1, seen_from = u32(first_seen<true>(p, end));
  // Parts of a length that is given, or of one that gives each warp of all parts as many tiles.
  const u32 given = p.part_length, begin = seen_from - seen_from % (given ? given : TILE), round = TILE * warps,
            each = given ? given : (end - begin + p.parts * round - 1) / (p.parts * round) * round;
  const u32 part_begin = begin + part * each, from = max(part_begin, seen_from), to = min(part_begin + each, end);
  // Those of the row that see something.
  const u32 parts = min(p.parts, (end - begin + each - 1) / each);
  if (from >= to) return;

  // ---- the first tile is asked for, before the kernel ahead has ended where that does not write to it
  const u64 of_head = u64(kv_head) * p.capacity;
  typedef typename Tile<HEAD, KV>::Element Element;
  const Element* const keys = static_cast<const Element*>(p.keys) + of_head * p.head_size;
  const Element* const values = static_cast<const Element*>(p.values) + of_head * p.head_size;
  Tile<HEAD, KV> t;
  // Rows that are not seen are one that is.
  const auto slot_at = [&](u32 slot, u32 tile, u32 i) { return slot + (min(max(tile + i, from), to - 1) - tile); };
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
  u32 tile = from / TILE * TILE + warp * TILE;
  const u32 slot = tile < to ? u32(slot_of(p, row, tile)) : 0;
  const bool settled = tile < to && u64(min(tile + TILE, to)) + p.fresh <= end;
  if (settled) load_keys(slot, tile), load_values(slot, tile);
  dependency_wait();
  launch_dependents();
  if (tile < to && !settled) load_keys(slot, tile), load_values(slot, tile);

  // ---- queries
  constexpr u32 AT_ONCE = 2;  // heads of a warp
#pragma unroll 1
  for (u32 h0 = warp; h0 < COLUMNS; h0 += AT_ONCE * warps) {
    float x[AT_ONCE][HEAD / 64][2];
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; n++) {
      const u32 h = h0 + n * warps;
      const float* const query = p.qkv + row * p.row_length + u64(first_head + h) * p.head_size;
#pragma unroll
      for (u32 i = 0; i < HEAD / 64; i++) {
        // Beside codes elements lie in the order of `keys_of`.
        const u32 d = 64 * i + (KV == CODES ? 4 * (lane / 2) + lane % 2 : 2 * lane);
        const bool there = h < columns && d < p.head_size;
        x[n][i][0] = there ? query[d] : 0;
        x[n][i][1] = there ? query[d + (KV == CODES ? 2 : 1)] : 0;
      }
    }
#pragma unroll
    for (u32 n = 0; n < AT_ONCE; n++) {
      const u32 h = h0 + n * warps;
      if (h >= COLUMNS) break;
      float most = 0;
#pragma unroll
      for (u32 i = 0; i < HEAD / 64; i++) most = fmaxf(most, fmaxf(fabsf(x[n][i][0]), fabsf(x[n][i][1])));
      // The power of two that brings the largest element between 2^14 and 2^15, and its inverse.
      const u32 exponent = min(max(268 - int(__float_as_uint(warp_max(most)) >> 23), 1), 253);
      const float up = BF16_KEYS ? 1 : __uint_as_float(exponent << 23),
                  down = BF16_KEYS ? 1 : __uint_as_float((254 - exponent) << 23);
#pragma unroll
      for (u32 i = 0; i < HEAD / 64; i++) {
        const float a = x[n][i][0] * up, b = x[n][i][1] * up;
        const u32 high = pair<BF16_KEYS>(a, b), d = 64 * i + 2 * lane;
        *reinterpret_cast<u32*>(&queries[0][h][d]) = high;
        *reinterpret_cast<u32*>(&queries[1][h][d]) = rest<BF16_KEYS>(a, b, high);
      }
      if (lane == 0) factors[h] = p.scale * LOG2_E * down;
    }
  }
  __syncthreads();

  // ---- tiles; columns of a lane are heads 2c and 2c + 1
  const bool changes = p.cap > 0 || p.slopes;
  float weight[2] = {}, greatest[2] = {minus_infinity(), minus_infinity()}, sums[HEAD / 64][4][4] = {};
#pragma unroll 1
  while (tile < to) {
    const u32 next = tile + warps * TILE;
    const u32 next_slot = next < to ? u32(slot_of(p, row, next)) : 0;

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
        mma_sync<BF16_KEYS>(s, a, high[2 * e], high[2 * e + 1]);
        mma_sync<BF16_KEYS>(less, a, low[2 * e], low[2 * e + 1]);
      }
    }
    const float of_keys[2] = {KV == CODES ? t.key_scales[0] : 1, KV == CODES ? t.key_scales[1] : 1};
    if (next < to) load_keys(next_slot, next);

    float shrink[2];
    u32 high[2], low[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const float factor = factors[2 * c + h];
#pragma unroll
      for (u32 r = 0; r < 2; r++) {
        const u32 position = tile + g + 8 * r;
        float& score = s[2 * r + h];
        score = (HEAD <= 128 ? score + of_rest[2 * r + h] : score) * (KV == CODES ? factor * of_keys[r] : factor);
        if (changes) {
          const float slope = slope_of(p, first_head + min(2 * c + h, columns - 1));
          score = changed(score, p, slope, int(position) - int(end) + 1);
        }
        if (position < from || position >= to) score = minus_infinity();
      }
      float higher = fmaxf(s[h], s[2 + h]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL_LANES, higher, d));
      higher = fmaxf(higher, greatest[h]);
      const float base = base_of(higher);
      shrink[h] = power_of_two(greatest[h] - base);
      greatest[h] = higher;
      s[h] = power_of_two(s[h] - base + LIFT), s[2 + h] = power_of_two(s[2 + h] - base + LIFT);
      weight[h] = weight[h] * shrink[h] + (s[h] + s[2 + h]);
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
      if (KV == CODES) s[2 * r] *= t.value_scales[r], s[2 * r + 1] *= t.value_scales[r];
      const u32 taken = pair<BF16_VALUES>(s[2 * r], s[2 * r + 1]);
      high[r] = transpose_8x8(taken);
      low[r] = transpose_8x8(rest<BF16_VALUES>(s[2 * r], s[2 * r + 1], taken));
    }
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        u32 a[4];
        t.values_of(a, i, j);
        float (&sum)[4] = sums[i][j];
        sum[0] *= shrink[0], sum[1] *= shrink[1], sum[2] *= shrink[0], sum[3] *= shrink[1];
        mma_sync<BF16_VALUES>(sum, a, high[0], high[1]);
        mma_sync<BF16_VALUES>(sum, a, low[0], low[1]);
      }
    }
    if (next < to) load_values(next_slot, next);
    tile = next;
  }

  // ---- the sums of all warps
#pragma unroll
  for (u32 h = 0; h < 2; h++) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) weight[h] += __shfl_xor_sync(ALL_LANES, weight[h], d);
    if (g == 0) greatest_of[warp][2 * c + h] = greatest[h], weight_of[warp][2 * c + h] = weight[h];
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++) {
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        *reinterpret_cast<float2*>(&left[warp][2 * c + h][64 * i + 8 * g + 2 * j]) =
            make_float2(sums[i][j][h], sums[i][j][2 + h]);
    }
  }
  __syncthreads();
  for (u32 i = thread; i < columns * HEAD; i += blockDim.x) {
    const u32 h = i / HEAD, d = i % HEAD;
    if (d >= p.head_size) continue;
    float higher = greatest_of[0][h], sum = 0, all = 0;
    for (u32 w = 1; w < warps; w++) higher = fmaxf(higher, greatest_of[w][h]);
    for (u32 w = 0; w < warps; w++) {
      const float shrink = power_of_two(greatest_of[w][h] - base_of(higher));
      sum = fmaf(left[w][h][d], shrink, sum);
      all = fmaf(weight_of[w][h], shrink, all);
    }
    // What 1 stands for.
    const float one = higher - LIFT;
    const u64 at = u64(row) * p.heads + first_head + h;
    if (parts == 1) {
      store_float(p.out, at * p.head_size + d, sum / total_of(one, all, sink_of(p, first_head + h)), p.out_type);
    } else {
      float* const of_part = p.partial + (at * p.parts + part) * (p.head_size + 2);
      of_part[d] = sum;
      if (d == 0) of_part[p.head_size] = one, of_part[p.head_size + 1] = all;
    }
  }
  if (parts == 1) return;

  // ---- the sums of all parts
  __shared__ u32 before;
  __syncthreads();
  if (thread == 0) {
    u32* const counter = p.counters + row * gridDim.y + blockIdx.y;
    before = count_up(counter);
    if (before + 1 == parts) *counter = 0;
  }
  __syncthreads();
  if (before + 1 < parts) return;
  const u32 length = p.head_size + 2;
  const float* const of_row = p.partial + (u64(row) * p.heads + first_head) * p.parts * length;
  for (u32 h = warp; h < columns; h += warps) {
    const float* const of_head = of_row + u64(h) * p.parts * length + p.head_size;
    float higher = minus_infinity(), all = 0;
    for (u32 i = lane; i < parts; i += 32) higher = fmaxf(higher, load_l2(of_head + i * length));
    higher = warp_max(higher);
    const float base = base_of(higher);
    for (u32 i = lane; i < parts; i += 32)
      all = fmaf(load_l2(of_head + i * length + 1), power_of_two(load_l2(of_head + i * length) - base), all);
    all = warp_sum(all);
    if (lane == 0) greatest_of[0][h] = base, weight_of[0][h] = total_of(higher, all, sink_of(p, first_head + h));
  }
  __syncthreads();
  for (u32 i = thread; i < columns * HEAD; i += blockDim.x) {
    const u32 h = i / HEAD, d = i % HEAD;
    if (d >= p.head_size) continue;
    const float* const of_head = of_row + u64(h) * p.parts * length;
    const float base = greatest_of[0][h];
    float sum = 0;
#pragma unroll 4
    for (u32 j = 0; j < parts; j++)
      sum = fmaf(load_l2(of_head + j * length + d), power_of_two(load_l2(of_head + j * length + p.head_size) - base),
                 sum);
    const u64 at = u64(row) * p.heads + first_head + h;
    store_float(p.out, at * p.head_size + d, sum / weight_of[0][h], p.out_type);
  }
}
