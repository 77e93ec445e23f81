// Causal grouped-query attention of many rows over a cache of halves or of codes of 8 bits, on the tensor cores from
// sm_75 on: out = softmax(scale * q * keys^T) * values.
//
//   a block owns one key/value head and a tile of queries (a row's heads of the group, row after row); each half
//   of its warps takes every second tile of positions, in a ring of two stages that cp.async fills:
//       scores = q * keys^T; shift the running maximum; weights = 2^(score - maximum), rounded to halves
//       sums = sums * 2^(old - new maximum) + weights * values
//   at the end the sums of the second half are added to those of the first, both shifted to the common maximum
//
// Queries are rounded to the type that keys have in products, each brought by a power of two to where halves are
// normal.  Tiles begin at multiples of their length and are added in their order, and what a query does not see adds
// nothing: its bits depend on its position and not on the rows beside it.  Blocks of the last rows, which see most,
// come first.
//
// Codes become halves between shared memory and the products: keys fp16, and values bf16, which has room for weights
// times any scale.  Scores are multiplied by the scales of their keys, weights by those of their values.  A product
// takes four codes of a row as elements 0, 2, 1, 3: queries lie in this order, and so do the sums until they are
// stored.
//
// NaN: a score that a query does not see is minus infinity by selection.  Its weight is 0, but 0 * NaN is NaN: in
// tiles that some query of a warp sees in part, values that are not finite are taken as 0, and where there was one, the
// sums of those that see it become NaN.  Codes are finite, and a scale is multiplied by where it is seen.
#include "attention_tiles.cuh"

// CHANGED: scores are capped, fall with the distance, or have sinks beside them; they are brought to powers of two
// before.
template <int HEAD, KvType KV, bool CHANGED>
__global__ void __launch_bounds__(THREADS, 1) attention_mma(const Params p) {
  using Row = Rows<HEAD>;
  using KvRow = KvRows<HEAD, KV>;
  using S = Shape<HEAD, KV, CHANGED>;
  typedef typename Choice<KV == CODES, u8, u16>::Type Element;
  constexpr bool BF16 = KV == BFLOATS;  // queries and keys
  constexpr int TILES = S::TILES, KEYS = S::KEYS;
  // Weights are 2^LIFT times as large: those of 2^-28 are normal halves.
  constexpr float LIFT = KV == HALVES ? 14 : 0;
  constexpr u32 ONES = BF16 ? 0x3f803f80 : 0x3c003c00;
  extern __shared__ __align__(1024) u8 shared[];
  const u32 base = shared_address(shared);
  float* const factors = reinterpret_cast<float*>(shared + S::FACTORS);
  int* const positions = reinterpret_cast<int*>(shared + S::POSITIONS);
  float* const slopes = reinterpret_cast<float*>(shared + S::SLOPES);

  const u32 thread = threadIdx.x % (32 * STRIPS), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 half = warp / STRIPS, strip = warp % STRIPS;
  const u32 group = p.heads / p.kv_heads, total = p.rows * group;
  const u32 kv_head = blockIdx.x % p.kv_heads;
  const u32 first = (gridDim.x / p.kv_heads - 1 - blockIdx.x / p.kv_heads) * S::QUERIES;
  const int first_position = position_of(p, 0, p.rows), window = min(p.window, 0x7fffffffu);
  const auto position_of_query = [&](u32 query) { return first_position + int(min(query, total - 1) / group); };

  // ---- the ring of this half
  const int end = position_of_query(first + S::QUERIES - 1) + 1;  // of what the block's last query sees
  const int tiles = (end + KEYS - 1) / KEYS;
  int tile = max(position_of_query(first) + 1 - window, 0) / KEYS;
  tile += (tile ^ half) & 1;
  const u32 ring = base + S::RING + half * (2 * S::STAGE);
  const auto fill = [&](u32 stage, int tile) {
    const u64 vector = u64(kv_head) * p.capacity + slot_of(p, 0, u32(tile * KEYS)), begin = vector * p.head_size;
    const Element* keys = static_cast<const Element*>(p.keys) + begin;
    const Element* values = static_cast<const Element*>(p.values) + begin;
    constexpr int AT_ONCE = KEYS == 32 ? 2 : 8;  // where tiles are short, registers are too
    constexpr u32 CHUNKS = HEAD / 8, BYTES = 8 * sizeof(Element);  // chunks of 8 elements
#pragma unroll AT_ONCE
    for (u32 i = 0; i < KEYS * CHUNKS; i += 32 * STRIPS) {
      const u32 piece = i + thread, row = piece / CHUNKS, chunk = piece % CHUNKS;
      if (piece >= KEYS * CHUNKS) break;
      const bool there = tile * KEYS + int(row) < end && 8 * chunk < p.head_size;
      const u32 from = there ? row * p.head_size + 8 * chunk : 0;
      if constexpr (KV == CODES) {
        const u32 to = ring + stage * S::STAGE + KvRow::at(row, chunk / 2) + 8 * (chunk % 2);
        copy_few_or_zero<BYTES>(to, keys + from, there);
        copy_few_or_zero<BYTES>(to + S::PART, values + from, there);
      } else {
        const u32 to = ring + stage * S::STAGE + Row::at(row, chunk);
        copy_16_or_zero(to, keys + from, there);
        copy_16_or_zero(to + S::PART, values + from, there);
      }
    }
    if (KV == CODES && thread < 2 * KEYS) {
      const u32 row = thread % KEYS;
      const bool there = tile * KEYS + int(row) < end;
      const float* scales = thread < KEYS ? p.key_scales : p.value_scales;
      copy_few_or_zero<4>(ring + stage * S::STAGE + 2 * S::PART + 4 * thread, scales + vector + (there ? row : 0),
                          there);
    }
    copy_commit();
  };
  if (tile < tiles) fill(0, tile);

  // ---- queries
#pragma unroll 4
  for (u32 row = warp; row < S::QUERIES; row += 2 * STRIPS) {
    const u32 query = first + row;
    const float* from = p.qkv + u64(query / group) * p.row_length + u64(kv_head * group + query % group) * p.head_size;
    const float factor =
        put_query<HEAD, KV>(p, from, query < total, lane, [&](u32 chunk) { return base + Row::at(row, chunk); });
    if (lane == 0) {
      factors[row] = factor, positions[row] = position_of_query(query);
      if (CHANGED) slopes[row] = slope_of(p, kv_head * group + query % group);
    }
  }
  __syncthreads();

  // ---- this thread's rows, 8 and 16 rows apart, of which it has two columns in eight
  const u32 own = strip * (16 * TILES);
  const int lowest = position_of_query(first + own), highest = position_of_query(first + own + 16 * TILES - 1);
  float maximum[TILES][2], weight[TILES][2] = {}, sums[TILES][HEAD / 8][4] = {};
#pragma unroll
  for (int m = 0; m < TILES; m++) maximum[m][0] = maximum[m][1] = minus_infinity();
  const auto sees = [&](int position, int key) { return key <= position && key > position - window; };
  const auto row_of = [&](int m, int r) { return own + 16 * m + 8 * r + lane / 4; };
  // What is subtracted from a score with the maximum's factor before 2^x: minus infinities have weights 0, not NaN.
  const auto subtracted = [&](float maximum, float factor) {
    return maximum == minus_infinity() ? 0 : __fsub_rn(__fmul_rn(maximum, factor), LIFT);
  };
  const auto factor_of = [&](int m, int r) { return CHANGED ? 1.0f : factors[row_of(m, r)]; };
  const auto head_of = [&](int m, int r) { return kv_head * group + (first + row_of(m, r)) % group; };
  const u32 q_at = base + Row::at(own + lane % 16, lane / 16);
  const u32 k_at = ring + KvRow::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const u32 v_at = ring + S::PART + KvRow::at(lane % 16, lane / 16);
  // Scales of the two positions of this lane in each eight, of keys and KEYS further of values.
  const u32 scales_at = ring + 2 * S::PART + lane % 4 * 8;
  const auto scales_of = [&](u32 stage, int n) {
    u32 v[2];
    load_shared(v, scales_at + stage * S::STAGE + 32 * n);
    return make_float2(__uint_as_float(v[0]), __uint_as_float(v[1]));
  };

  for (u32 stage = 0; tile < tiles; tile += 2, stage ^= 1) {
    copy_wait<0>();
    barrier_sync(1 + half, 32 * STRIPS);  // the tile is there, and nobody reads the one before
    if (tile + 2 < tiles) fill(stage ^ 1, tile + 2);
    const int begin = tile * KEYS;
    if (begin > highest || begin + KEYS - 1 <= lowest - window) continue;
    const bool all = begin + KEYS - 1 <= lowest && begin > highest - window;

    float scores[TILES][KEYS / 8][4] = {};
    const u32 k_stage = k_at + stage * S::STAGE;
#pragma unroll
    for (int d = 0; KV == CODES && d < HEAD / 16; d += 2) {
      u32 q[2][TILES][4];
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int m = 0; m < TILES; m++)
          load_matrices(q[e][m], Row::behind(q_at, 2 * d + 2 * e) + m * (16 * Row::BYTES));
      }
      const u32 at = KvRow::behind(k_stage, d);
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        u32 k[4];  // of two eights of keys, two sixteens of elements
        load_matrices(k, at + n * (16 * KvRow::BYTES));
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 b[2];
          halves_of_codes<false>(k[i], b);
#pragma unroll
          for (int m = 0; m < TILES; m++) mma_sync<false>(scores[m][2 * n + i / 2], q[i % 2][m], b[0], b[1]);
        }
      }
    }
#pragma unroll
    for (int d = 0; KV != CODES && d < HEAD / 16; d++) {
      u32 q[TILES][4];
#pragma unroll
      for (int m = 0; m < TILES; m++) load_matrices(q[m], Row::behind(q_at, 2 * d) + m * (16 * Row::BYTES));
      const u32 at = Row::behind(k_stage, 2 * d);
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {
        u32 k[4];
        load_matrices(k, at + n * (16 * Row::BYTES));
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          mma_sync<BF16>(scores[m][2 * n], q[m], k[0], k[1]);
          mma_sync<BF16>(scores[m][2 * n + 1], q[m], k[2], k[3]);
        }
      }
    }

    if constexpr (KV == CODES) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        const float2 scale = scales_of(stage, n);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          scores[m][n][0] *= scale.x, scores[m][n][1] *= scale.y;
          scores[m][n][2] *= scale.x, scores[m][n][3] *= scale.y;
        }
      }
    }
    if constexpr (CHANGED) {
#pragma unroll
      for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float distance = float(begin + 2 * int(lane % 4) - positions[row_of(m, r)]);
          float factor = factors[row_of(m, r)];
          const float slope = slopes[row_of(m, r)];
          if (p.cap > 0) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
              for (int i = 2 * r; i < 2 * r + 2; i++) scores[m][n][i] = capped(scores[m][n][i] * factor, p);
            }
            factor = 1;
          }
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
              scores[m][n][i] = fmaf(slope, distance + float(8 * n + i % 2), scores[m][n][i] * factor);
          }
        }
      }
    }
    if (!all) {
#pragma unroll
      for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int position = positions[row_of(m, r)];
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const bool seen = sees(position, begin + 8 * n + 2 * int(lane % 4) + i);
              scores[m][n][2 * r + i] = seen ? scores[m][n][2 * r + i] : minus_infinity();
            }
          }
        }
      }
    }
    float shrink[TILES][2];
    bool shrinks = false;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float factor = factor_of(m, r);
        float highest = maximum[m][r];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
          highest = fmaxf(highest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        const float less = subtracted(highest, factor);
        const bool none = maximum[m][r] == minus_infinity();
        shrink[m][r] = none ? 0 : power_of_two(subtracted(maximum[m][r], factor) - less);
        shrinks |= maximum[m][r] != highest;
        maximum[m][r] = highest;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
          for (int i = 2 * r; i < 2 * r + 2; i++) {
            scores[m][n][i] = power_of_two(fmaf(scores[m][n][i], factor, -less));
            sum += scores[m][n][i];
          }
        }
        weight[m][r] = weight[m][r] * shrink[m][r] + sum;
      }
    }
    if (__any_sync(ALL_LANES, shrinks)) {
#pragma unroll
      for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) sums[m][n][i] *= shrink[m][i / 2];
        }
      }
    }

    const u32 v_stage = v_at + stage * S::STAGE;
    if constexpr (KV == CODES) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++) {
        const float2 scale = scales_of(stage, KEYS / 8 + n);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const bool seen = all || sees(positions[row_of(m, i / 2)], begin + 8 * n + 2 * int(lane % 4) + i % 2);
            scores[m][n][i] = seen ? scores[m][n][i] * (i % 2 ? scale.y : scale.x) : 0;
          }
        }
      }
      add_codes<HEAD, KEYS>(scores, v_stage, sums);
    } else if (all) {
      add_values<false, BF16, HEAD, KEYS>(scores, v_stage, sums);
    } else if (__any_sync(ALL_LANES, add_values<true, BF16, HEAD, KEYS>(scores, v_stage, sums))) {
#pragma unroll
      for (int n = 0; n < HEAD / 16; n++) {
        // Of what is not finite: how many each query sees.
        float seen[TILES][2][4] = {};
#pragma unroll 1
        for (int k = 0; k < KEYS; k += 16) {
          u32 v[4];
          load_transposed(v, Row::behind(v_stage, 2 * n) + k * Row::BYTES);
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = not_finite<BF16>(v[i]) & ONES;
#pragma unroll
          for (int m = 0; m < TILES; m++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int position = positions[row_of(m, i % 2)], key = begin + k + i / 2 * 8 + 2 * int(lane % 4);
              a[i] = ((sees(position, key) ? 0xffffu : 0) | (sees(position, key + 1) ? 0xffff0000u : 0)) & ONES;
            }
            mma_sync<BF16>(seen[m][0], a, v[0], v[1]);
            mma_sync<BF16>(seen[m][1], a, v[2], v[3]);
          }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++) {
#pragma unroll
          for (int i = 0; i < 8; i++)
            if (seen[m][i / 4][i % 4] > 0) sums[m][2 * n + i / 4][i % 4] = not_a_number();
        }
      }
    }
  }

  // ---- the second half's sums to the first, then out, by way of shared memory: a row's sums, its maximum, its
  // weight
  constexpr int PITCH = S::PITCH;
  float* const left = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < TILES; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      weight[m][r] += __shfl_xor_sync(ALL_LANES, weight[m][r], 1);
      weight[m][r] += __shfl_xor_sync(ALL_LANES, weight[m][r], 2);
    }
  }
  __syncthreads();
  if (half == 1) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float* const row = left + row_of(m, r) * PITCH;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
          reinterpret_cast<float2*>(row)[4 * n + lane % 4] = make_float2(sums[m][n][2 * r], sums[m][n][2 * r + 1]);
        if (lane % 4 == 0) row[HEAD] = maximum[m][r], row[HEAD + 1] = weight[m][r];
      }
    }
  }
  __syncthreads();
  if (half == 0) {
#pragma unroll
    for (int m = 0; m < TILES; m++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float* const row = left + row_of(m, r) * PITCH;
        const float factor = factor_of(m, r), other = row[HEAD], sink = CHANGED ? sink_of(p, head_of(m, r)) : 0,
                    common = CHANGED ? fmaxf(fmaxf(maximum[m][r], other), sink) : fmaxf(maximum[m][r], other);
        const auto shrink = [&](float maximum) {
          if (maximum == minus_infinity()) return 0.f;
          return power_of_two(subtracted(maximum, factor) - subtracted(common, factor));
        };
        float mine = shrink(maximum[m][r]), others = shrink(other);
        float all = weight[m][r] * mine + row[HEAD + 1] * others;
        if (CHANGED && sink != minus_infinity()) all += power_of_two(sink - subtracted(common, factor));
        mine /= all, others /= all;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++) {
          float2* const two = reinterpret_cast<float2*>(row) + 4 * n + lane % 4;
          const float2 x = *two;
          *two = make_float2(sums[m][n][2 * r] * mine + x.x * others, sums[m][n][2 * r + 1] * mine + x.y * others);
        }
      }
    }
  }
  __syncthreads();
  for (u32 row = warp; row < S::QUERIES && first + row < total; row += 2 * STRIPS) {
    const u32 query = first + row;
    const u64 to = (u64(query / group) * p.heads + kv_head * group + query % group) * p.head_size;
    for (u32 d = lane; d < p.head_size; d += 32) {
      const u32 place = KV == CODES ? place_of(d) : d;
      store_float(p.out, to + d, left[row * PITCH + place], p.out_type);
    }
  }
}
