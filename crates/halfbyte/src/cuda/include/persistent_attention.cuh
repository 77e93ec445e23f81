// Attention of the persistent kernel: a block takes query heads of a kv head, and a part of the positions
// that they see.
#pragma once
#include "persistent_parts.cuh"

// What is subtracted before 2^x: a row of only minus infinities has weights 0, not NaN.
DEV float base_of(float greatest) { return greatest == __int_as_float(0xff800000) ? 0 : greatest; }

// Norms and rotates a head that lies in `raw`, element by element.
DEV float rotated(const Shared& m, u32 rope, const float* raw, u32 e, bool rotates) {
  if (!rotates || int(e) >= int(2 * PAIRS)) return raw[e];
  const bool first = int(e) < int(PAIRS);
  const u32 i = first ? e : e - PAIRS;
  const float a = raw[i], b = raw[i + PAIRS];
  const float2 angle = m.angles(rope)[i];
  return first ? a * angle.x - b * angle.y : fmaf(b, angle.x, a * angle.y);
}

// Scores and sums of each warp, over the tiles that it takes of a part.
DEV void attend(const Params& p, const Shared& m, u32 layer_number) {
  const Layer& layer = m.layer(layer_number);
  const u32 now = m.step()[0];
  constexpr u32 G = HEADS_OF_SHARE;
  constexpr float LOG2_E = 1.4426950408889634f;
  const PartOfBlock of(now, layer.window);
  const u32 from = of.from, to = of.to, share = of.share, kv_head = of.kv_head;
  if (from == to) return;
  const u32 slot = thread_index() / 32, lane = thread_index() & 31, g = lane >> 2, c = lane & 3;
  u16* const keys = static_cast<u16*>(layer.keys) + u64(kv_head) * p.capacity * HEAD;
  u16* const values = static_cast<u16*>(layer.values) + u64(kv_head) * p.capacity * HEAD;

  float greatest[2], weight[2] = {}, sums[HEAD / 16][4];
  greatest[0] = greatest[1] = __int_as_float(0xff800000);
  u32 high[2], less[2];
  float s[4], shrink[2];
  // Where this lane loads a row of the four matrices of a run from. Behind the last position it is the last one's, with
  // a weight of zero; this token's are not in the cache yet.
  auto row_of = [&](const TileOfRing& tile, u32 first, u32 run, u32 row, const u32* own) {
    const u32 position = min(first + row, to - 1);
    return position == now ? BoxRow{shared_address(own) + 128 * run, 0} : tile.row(run, position - first);
  };
  // Four sums side by side, since each product waits for the one before; two where heads are so long that registers are
  // scarce.
  constexpr u32 SIDE = HEAD > 128 ? 1 : 2;
  auto multiply_keys = [&](TileOfRing& tile, u32 first) {
    const u32 queries = shared_address(m.queries()) + (lane & 7) * QUERY_ROW * 2 + (lane >> 3) * 16;
    float of[2 * SIDE][4] = {};
#pragma unroll
    for (u32 run = 0; run < RUNS; run++) {
      tile.wait(run);
      const BoxRow row = row_of(tile, first, run, lane & 15, m.key());
#pragma unroll
      for (u32 i = 0; i < 2; i++) {
        if (64 * run + 32 * i >= HEAD) continue;
        u32 q[2][4];
#pragma unroll
        for (int part = 0; part < 2; part++)
          load_matrices(q[part], queries + part * 16 * QUERY_ROW + 128 * run + 64 * i);
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
          if (64 * run + 32 * i + 16 * e >= HEAD) continue;
          u32 a[4];
          load_matrices(a, row.chunk(4 * i + 2 * e + (lane >> 4)));
#pragma unroll
          for (int part = 0; part < 2; part++)
            mma_sync<BF16>(of[SIDE * part + e % SIDE], a, q[part][2 * e], q[part][2 * e + 1]);
        }
      }
      tile.free(run);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[i] = of[0][i] + of[1][i];
      if (SIDE == 2) s[i] += of[2 * SIDE - 2][i] + of[2 * SIDE - 1][i];
    }
  };
  auto weigh = [&](u32 tile) {
    if (CAPPED) {
      const float cap = m.layer(again(layer_number)).cap * LOG2_E;
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = cap * tanhf(s[i] / cap);
    }
    if (ALIBI) {
      const float behind = float(int(tile + g) - int(m.step()[0]));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float slope = m.slopes()[2 * c + h];
        s[h] = fmaf(slope, behind, s[h]), s[2 + h] = fmaf(slope, behind + 8, s[2 + h]);
      }
    }
    if (tile + g >= to) s[0] = s[1] = __int_as_float(0xff800000);
    if (tile + g + 8 >= to) s[2] = s[3] = __int_as_float(0xff800000);
    if (PAGED) {
      const u32 first = first_seen(m.step()[0] + 1, m.layer(again(layer_number)).window);
      if (tile + g < first) s[0] = s[1] = __int_as_float(0xff800000);
      if (tile + g + 8 < first) s[2] = s[3] = __int_as_float(0xff800000);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float higher = fmaxf(s[h], s[2 + h]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(ALL_LANES, higher, d));
      higher = fmaxf(higher, greatest[h]);
      const float base = base_of(higher);
      shrink[h] = exp2f(greatest[h] - base);
      greatest[h] = higher;
      s[h] = exp2f(s[h] - base), s[2 + h] = exp2f(s[2 + h] - base);
      weight[h] = weight[h] * shrink[h] + (s[h] + s[2 + h]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 b = pair(s[2 * r], s[2 * r + 1]);
      high[r] = transpose_8x8(b);
      less[r] = transpose_8x8(pair(s[2 * r] - first_of(b), s[2 * r + 1] - second_of(b)));
    }
  };
  auto add_values = [&](TileOfRing& tile, u32 first) {
#pragma unroll
    for (u32 run = 0; run < RUNS; run++) {
      tile.wait(run);
      const u32 own_lane = thread_index() & 31;  // read anew: a register less through the loop
      const BoxRow row = row_of(tile, first, run, (own_lane & 7) + (own_lane >> 4) * 8, m.value());
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        if (64 * run + 16 * i >= HEAD) continue;
        u32 a[4];
        load_transposed(a, row.chunk(2 * i + (lane >> 3 & 1)));
        float (&sum)[4] = sums[4 * run + i];
        sum[0] *= shrink[0], sum[1] *= shrink[1], sum[2] *= shrink[0], sum[3] *= shrink[1];
        mma_sync<BF16>(sum, a, high[0], high[1]);
        mma_sync<BF16>(sum, a, less[0], less[1]);
      }
      tile.free(run);
    }
  };
  // The heads of this token: queries, then key and value where they are in this part.
#pragma unroll 1
  for (u32 h = slot; h < G + (to == of.end ? 2 : 0); h += WARPS) {
    const u32 head = h < G ? share * G + h : HEADS + (h - G) * KV_HEADS + kv_head;
    const float* weight = h < G ? layer.query_norm : h == G ? layer.key_norm : nullptr;
    float* raw = m.raw() + h * HEAD;
    constexpr u32 EACH = (HEAD + 31) / 32;  // elements of a lane, of which the last may be none
    u32 bits[EACH];
    const u32* const of_qkv = set_of(p, m) + layer_number * WORDS_OF_LAYER + AT_QKV;
    auto is_element = [&](u32 j) { return 32 * j + 32 <= HEAD || lane + 32 * j < HEAD; };
    look_for(bits, [&](u32 j) { return is_element(j) ? of_qkv + head * HEAD + lane + 32 * j : nullptr; });
    float v[EACH], sum = 0;
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
      v[j] = __uint_as_float(bits[j]);
      sum = fmaf(v[j], v[j], sum);
    }
    const float factor = weight ? 1.0f / sqrtf(warp_sum(sum) / float(HEAD) + layer.head_eps) : 1.0f;
#pragma unroll
    for (u32 j = 0; j < EACH; j++)
      if (is_element(j)) raw[lane + 32 * j] = weight ? v[j] * factor * __ldg(weight + lane + 32 * j) : v[j];
    __syncwarp();
#pragma unroll
    for (u32 j = 0; j < EACH; j++) {
      if (!is_element(j)) break;
      const u32 e = lane + 32 * j;
      const float value = rotated(m, layer.rope, raw, e, h <= G);
      if (h < G) {
        const float scaled = value * (layer.scale * LOG2_E);
        const u32 high = pair(scaled, 0);
        m.queries()[h * QUERY_ROW + e] = u16(high);
        m.queries()[(8 + h) * QUERY_ROW + e] = u16(pair(scaled - first_of(high), 0));
      } else {
        const u16 bits = u16(pair(value, 0));
        (h == G ? keys : values)[u64(m.step()[3]) * HEAD + e] = bits;
        reinterpret_cast<u16*>(h == G ? m.key() : m.value())[e] = bits;
      }
    }
  }
  sync();

#pragma unroll
  for (u32 i = 0; i < HEAD / 4; i++) sums[i / 4][i % 4] = 0;
  TileOfRing tile(m, slot);
#pragma unroll 1
  for (u32 first = from + TILE * slot; first < to; first += TILE * SLOTS) {
    multiply_keys(tile, first);
    weigh(first);
    add_values(tile, first);
  }
  tile.leave(m, thread_index() / 32);
  float* const of_warps = m.shifts();  // [2][8][SLOTS]: greatest scores, weights
  float* const all = m.attended();  // [slots][G][SUMS_ROW]
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int d = 4; d < 32; d *= 2) weight[h] += __shfl_xor_sync(ALL_LANES, weight[h], d);
  if (g == 0) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      of_warps[(2 * c + h) * SLOTS + slot] = greatest[h], of_warps[(8 + 2 * c + h) * SLOTS + slot] = weight[h];
  }
  if (from + TILE * slot < to) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (2 * c + h >= G) continue;
#pragma unroll
      for (u32 i = 0; i < HEAD / 8; i++)
        all[(slot * G + 2 * c + h) * SUMS_ROW + 8 * i + g] = sums[i / 2][i % 2 * 2 + h];
    }
  }
  sync();
}

// The warps' sums, each shifted to the greatest score of all; then those of parts.
DEV void join(const Params& p, const Shared& m, u32 layer_number) {
  const PartOfBlock parts(m.step()[0], m.layer(layer_number).window);
  if (parts.from == parts.to) return;
  constexpr u32 G = HEADS_OF_SHARE;
  const u32 lane = thread_index() & 31, share = parts.share, part = parts.part;
  const u32 active = min(u32(SLOTS), (parts.to - parts.from + TILE - 1) / TILE);
  float* const of_warps = m.shifts();
  float* const all = m.attended();
  u32* const set = set_of(p, m);
  u32* const words = set + again(layer_number) * WORDS_OF_LAYER;
  constexpr u32 WORDS_OF_SHARE = G * HEAD / 2;
  u32* const attended = words + AT_ATTENDED + share * WORDS_OF_SHARE;
  // Two columns of a head: the sums of all warps, shifted to the greatest score; that score; the weights' sum.
  struct Sum {
    float2 sum;
    float greatest, over;
  };
  auto sum_of = [&](u32 i) {
    const u32 h = 2 * i / HEAD;
    float shift[SLOTS];
#pragma unroll
    for (u32 w = 0; w < SLOTS; w++) shift[w] = w < active ? of_warps[h * SLOTS + w] : __int_as_float(0xff800000);
    Sum sum{make_float2(0, 0), shift[0], 0};
#pragma unroll
    for (u32 w = 1; w < SLOTS; w++) sum.greatest = fmaxf(sum.greatest, shift[w]);
    const float base = base_of(sum.greatest);
#pragma unroll
    for (u32 w = 0; w < SLOTS; w++) {
      if (w >= active) break;
      const float factor = exp2f(shift[w] - base);
      const float2 v = *reinterpret_cast<const float2*>(all + (w * G + h) * SUMS_ROW + 2 * i % HEAD);
      sum.over = fmaf(of_warps[(8 + h) * SLOTS + w], factor, sum.over);
      sum.sum.x = fmaf(v.x, factor, sum.sum.x), sum.sum.y = fmaf(v.y, factor, sum.sum.y);
    }
    return sum;
  };
  if (parts.count == 1) {
#pragma unroll 1
    for (u32 place = thread_index(); place < WORDS_OF_SHARE; place += THREADS) {
      const Sum all = sum_of(pair_at(place));
      leave(attended + place, pair(__fdividef(all.sum.x, all.over), __fdividef(all.sum.y, all.over)));
    }
    return;
  }
  u32* const of_parts =
      set + u64(p.count + 1) * WORDS_OF_LAYER + u64(again(layer_number)) * PARTS_OF_LAYER + share * MOST_PARTS * PART;
#pragma unroll 1
  for (u32 i = thread_index(); i < WORDS_OF_SHARE; i += THREADS) {
    const Sum all = sum_of(i);
    u32* const own = of_parts + part * PART;
    leave(own + 2 * i, __float_as_uint(all.sum.x));
    leave(own + 2 * i + 1, __float_as_uint(all.sum.y));
    if (2 * i % HEAD) continue;
    leave(own + G * HEAD + 2 * i / HEAD, __float_as_uint(all.greatest));
    leave(own + G * HEAD + G + 2 * i / HEAD, __float_as_uint(all.over));
  }
  // Each part joins its share of the words: as many lanes as there are parts, rounded up to a power of two, a word.
  u32 lanes = 2;
  while (lanes < parts.count) lanes *= 2;
  const u32 first = part * WORDS_OF_SHARE / parts.count, last = (part + 1) * WORDS_OF_SHARE / parts.count;
  const u32 other = lane & (lanes - 1), each = THREADS / lanes;
#pragma unroll 1
  for (u32 i0 = first; i0 < last; i0 += each) {
    const u32 i = i0 + thread_index() / lanes, h = 2 * i / HEAD;
    const bool there = i < last && other < parts.count;
    float x = 0, y = 0, over = 0, higher = __int_as_float(0xff800000);
    if (there) {
      const u32* from_part = of_parts + other * PART;
      u32 v[4];
      const u32 offsets[4] = {G * HEAD + h, G * HEAD + G + h, 2 * i, 2 * i + 1};
      look_for(v, [&](u32 e) { return from_part + offsets[e]; });
      higher = __uint_as_float(v[0]), over = __uint_as_float(v[1]), x = __uint_as_float(v[2]),
      y = __uint_as_float(v[3]);
    }
    float greatest_of_all = higher;
#pragma unroll 1
    for (u32 d = 1; d < lanes; d *= 2)
      greatest_of_all = fmaxf(greatest_of_all, __shfl_xor_sync(ALL_LANES, greatest_of_all, d));
    const float shrink = exp2f(higher - base_of(greatest_of_all));
    x *= shrink, y *= shrink, over *= shrink;
#pragma unroll 1
    for (u32 d = 1; d < lanes; d *= 2) {
      x += __shfl_xor_sync(ALL_LANES, x, d);
      y += __shfl_xor_sync(ALL_LANES, y, d);
      over += __shfl_xor_sync(ALL_LANES, over, d);
    }
    if (there && other == 0) leave(attended + place_of_pair(i), pair(x / over, y / over));
  }
}
