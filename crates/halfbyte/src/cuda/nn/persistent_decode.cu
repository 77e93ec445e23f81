// All layers of a step of one token in one persistent kernel: a block a multiprocessor, which stays from the first
// layer to the last, and weights that stream through rings of bulk copies, on from product to product.
//
//   a layer, with | where all blocks wait:
//       norm, q k v | attention | output, added | norm, gate and up, gated | down, added
//   a product (GEMV): a block owns blocks of 16 rows. Its warps cut columns x rows into runs of equally many stages,
//       each with a ring of its own; codes are multiplied as bytes by mma.sync, x in four columns of B as the four
//       bytes of integers (fixed_point.cuh); the sums of warps are added in order.
//   attention (persistent_attention.cuh): a block takes a kv head and a part of the positions.
//
// Ranks that share the model run it side by side, and leave parts of the stream for each other (persistent_ranks.cuh).
// Blocks that wait for each other (exchange_words.cuh) are there at once: the launch is cooperative. What an output is
// added up from depends on the model, the number of multiprocessors and the position, not on anything else.
#include "hopper.cuh"
#include "decode_codes.cuh"
#include "exchange_words.cuh"
#include "persistent_plan.cuh"
#include "persistent_ranks.cuh"
#include "warp.cuh"

// The warps that bring weights: a lane a ring. Lanes do not wait for each other: one whose ring is full looks again.
DEV void bring(u32 count, const Shared& m) {
  constexpr u32 RINGS = WARPS / COPYING_WARPS;
  if ((threadIdx.x & 31) >= RINGS) return;
  const u32 warp = (threadIdx.x - THREADS) / 32 * RINGS + (threadIdx.x & 31);
  const u32 base = shared_address(shared), own = base + warp * STAGES * STAGE,
            full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u64 policy = policy_evict_first();
  u32 stage = 0, phase = 1;
  // The product after this one, of all layers; what is left of this one's stages, and the next of them.
  u32 next = 0, left = 0, blocks = 0, j = 0, t = 0;
  const Place* places = nullptr;
  const u8* w = nullptr;
  auto begin = [&] {
    for (; left == 0 && next < 4 * count; next++) {
      const Plan& plan = m.plan(next & 3);
      w = m.layers()[next >> 2].product(next & 3).w, places = plan.places, blocks = plan.blocks;
      left = (plan.run[warp] >> 16) - (plan.run[warp] & 0xffff);
      j = plan.start[warp] & 0xffff, t = (plan.start[warp] >> 16) * STEPS;
    }
  };
  begin();
#pragma unroll 1
  while (left) {
    if (!mbarrier_is(empty + 8 * stage, phase)) continue;
    const Place place = places[j];
    const u8* codes = w + u64(place.offset) * 32 + t * place.wide;
    mbarrier_expect(full + 8 * stage, STAGE);
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, codes += place.wide) {
      const u32 to = own + stage * STAGE + k * UNIT;
      copy_bulk(to, codes, UNIT_SCALES, full + 8 * stage, policy);
      copy_bulk(to + UNIT_SCALES, codes + place.scales, SCALE_BYTES, full + 8 * stage, policy);
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++j == blocks) j = 0, t += STEPS;
    if (--left == 0) begin();
  }
}

// This warp's stages of a product with x times a factor, to its sums. Digits of x stay in registers for all row blocks
// of a stage's columns. A lane has the sums of two digits: of four lanes the first two have all, the others copies.
DEV void multiply(const Shared& m, u32 product, float factor) {
  const Plan& plan = m.plan(product);
  const u32 warp = thread_index() / 32, lane = thread_index() & 31;
  const u32 blocks = plan.blocks, run = plan.run[warp], start = plan.start[warp];
  const u32 base = shared_address(shared), full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u32 ring = base + warp * STAGES * STAGE;
  factor *= (lane & 3) == 0 ? 1.0f : (lane & 3) == 1 ? 65536.0f : 0.0f;  // of this lane's two digits
  float* const sums = m.sums(product) + warp * blocks * 16 + (lane >> 2);
  u32 j = start & 0xffff, unit = base + X + (start >> 16) * STEPS * X_UNIT, left = (run >> 16) - (run & 0xffff),
      fresh = blocks;  // row blocks that this warp has not been at
  u32 stage = m.turns()[warp] >> 1, phase = m.turns()[warp] & 1;
#pragma unroll 1
  while (left) {
    u32 b[STEPS][8];
    int digit_sums[STEPS][GROUPS][4];  // over the columns of a group: what zero points are multiplied by
    float weight[STEPS];
#pragma unroll
    for (u32 k = 0; k < STEPS; k++, unit += X_UNIT) {
#pragma unroll
      for (int v = 0; v < 2; v++) {
        u32 w[4];
        load_shared(w, unit + v * 256 + (lane >> 2 & 3) * 64 + (lane & 3) * 16);
        b[k][4 * v] = w[0], b[k][4 * v + 1] = w[1], b[k][4 * v + 2] = w[2], b[k][4 * v + 3] = w[3];
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const u32 ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
        int (&sums)[4] = digit_sums[k][g];
        sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
        for (int h = 4 * g / GROUPS; h < 4 * (g + 1) / GROUPS; h++)
          mma_sync_int8<true>(sums, ones, b[k][2 * h], b[k][2 * h + 1]);
      }
      weight[k] = __uint_as_float(load_shared(unit + POWER)) * factor;
    }
#pragma unroll 1
    for (; j < blocks && left; j++, left--) {
      const u32 at = ring + stage * STAGE, quarter = OWN_SCALES ? 0 : row_block(plan, product, j) & 3;
      mbarrier_wait(full + 8 * stage, phase);
      u32 codes[STEPS][8 * WORDS], scales[STEPS][GROUPS];
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
        for (int v = 0; v < 2 * WORDS; v++) {
          u32 w[4];
          load_shared(w, at + lane * 16 + k * UNIT + v * 512);
          codes[k][4 * v] = w[0], codes[k][4 * v + 1] = w[1], codes[k][4 * v + 2] = w[2], codes[k][4 * v + 3] = w[3];
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
          scales[k][g] = load_shared(at + (lane >> 2) * 4 + k * UNIT + UNIT_SCALES + quarter * 32 + 128 * g);
      }
      float sum = 0, sum8 = 0;
#pragma unroll
      for (u32 k = 0; k < STEPS; k++)
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
          constexpr int EACH = 4 / GROUPS;  // k32 steps of a group
          int zero = BITS == 4 ? 8 : 128, zero8 = zero;
          if (ZERO) {
            const u32 z =
                load_shared_u16(at + (lane >> 2) * 2 + k * UNIT + UNIT_SCALES + ZEROS - SCALES + quarter * 16 + 64 * g);
            zero = z & 255, zero8 = z >> 8;
          }
          const int d0 = digit_sums[k][g][0], d1 = digit_sums[k][g][1];
          int c[4] = {INTEGER - zero * d0, INTEGER - zero * d1, INTEGER - TIMES_8 * zero8 * d0,
                      INTEGER - TIMES_8 * zero8 * d1};
#pragma unroll
          for (int h = g * EACH; h < (g + 1) * EACH; h++) {
            u32 a[4];
            codes_as_bytes(&codes[k][2 * h * WORDS], a);
            mma_sync_int8<true>(c, a, b[k][2 * h], b[k][2 * h + 1]);
          }
          auto number = [&](int v) { return __int_as_float(v) - INTEGER_FLOAT; };
          sum = fmaf(fmaf(number(c[1]), 256.0f, number(c[0])) * weight[k], low(scales[k][g]), sum);
          sum8 = fmaf(fmaf(number(c[3]), 256.0f, number(c[2])) * weight[k], high(scales[k][g]), sum8);
        }
      loads_before_copies();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + 8 * stage);
      if (++stage == STAGES) stage = 0, phase ^= 1;
      sum += __shfl_xor_sync(ALL_LANES, sum, 1), sum8 += __shfl_xor_sync(ALL_LANES, sum8, 1);
      if ((lane & 3) == 0) {
        float* const to = sums + j * 16;
        sum8 *= 1.0f / TIMES_8;
        if (fresh)
          to[0] = sum, to[8] = sum8;
        else
          to[0] += sum, to[8] += sum8;
      }
      if (fresh) fresh--;
    }
    j = 0;
  }
  if (lane == 0) m.turns()[warp] = stage << 1 | phase;
  sync();
}
// Rows 2i and 2i+1 of a product: the sums of warps, in order.
DEV float2 rows(const Shared& m, u32 product, u32 i) {
  const Plan& plan = m.plan(product);
  const u32 warps = plan.warps[i / 8];
  const float2* const from = reinterpret_cast<const float2*>(m.sums(product)) + i;
  float2 v[WARPS], total = make_float2(0, 0);
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) v[w] = warps >> w & 1 ? from[w * plan.blocks * 8] : make_float2(0, 0);
#pragma unroll
  for (u32 w = 0; w < WARPS; w++) total.x += v[w].x, total.y += v[w].y;
  return total;
}
// Waits until about all of n words are counted.
DEV void wait_for(const u32* counter, u32 n) {
  if (thread_index() == 0)
    while (look(counter) + 1 < n) {
    }
  sync();
}
// Not behind what is waited for, where the compiler would put it.
DEV float2 load_early(const float* p) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
constexpr u32 LOADS_OF_STREAM = (HIDDEN / 4 + THREADS - 1) / THREADS;
// The stream times a norm's weights, when it is counted, four columns at a time, as they lie together. What the norm
// divides by is left to `factor_of_norm`. The rows that this block will add to are kept.
template <class Put>
DEV void norm(const Params& p, const Shared& m, const u32* from, const u32* counter, const float* weight, Put&& put) {
  constexpr u32 LOADS = LOADS_OF_STREAM;
  const Plan& own = m.plan(1);
  float2 w[LOADS][2];
  uint4 v[LOADS];
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
#pragma unroll
    for (u32 h = 0; h < 2; h++) w[i][h] = e < HIDDEN ? load_early(weight + column_at(e) + 8 * h) : make_float2(0, 0);
  }
  wait_for(counter, HIDDEN);
  look_for_stream(p, v, [&](u32 i) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    return e < HIDDEN ? from + e : nullptr;
  });
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    if (e >= HIDDEN) break;
    const float x[4] = {__uint_as_float(v[i].x), __uint_as_float(v[i].y), __uint_as_float(v[i].z),
                        __uint_as_float(v[i].w)};
    sum = fmaf(x[0], x[0], fmaf(x[1], x[1], fmaf(x[2], x[2], fmaf(x[3], x[3], sum))));
    if (e - 16 * own.first < 16 * own.blocks) *reinterpret_cast<uint4*>(m.own() + e - 16 * own.first) = v[i];
    const float normed[4] = {x[0] * w[i][0].x, x[1] * w[i][1].x, x[2] * w[i][0].y, x[3] * w[i][1].y};
    put(e, normed);
  }
  sum = warp_sum(sum);
  if ((thread_index() & 31) == 0) m.reduce()[thread_index() / 32] = sum;
  sync();
}
DEV float factor_of_norm(const Shared& m, float eps) {
  float sum = 0;
#pragma unroll
  for (u32 w = 0; w < WARPS; w += 4) {
    const float4 v = *reinterpret_cast<const float4*>(m.reduce() + w);
    sum += v.x + v.y + (v.z + v.w);
  }
  return rsqrtf(sum / float(HIDDEN) + eps);
}
DEV u32 bits_of_magnitude(float v) { return __float_as_uint(v) & 0x7fffffff; }
// A warp's four columns a lane are a unit of x.
DEV void put_x(u32 e, const float (&x)[4]) {
  const u32 unit = shared_address(shared) + X + e / 128 * X_UNIT;
  u32 greatest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) greatest = max(greatest, bits_of_magnitude(x[i]));
  const Step of = step_of(__reduce_max_sync(ALL_LANES, greatest));
  put_digits(unit, e >> 4 & 7, e >> 2 & 3, x, of.over);
  if ((thread_index() & 31) == 0) put_power(unit, of.power);
}
// x = n words of pairs, when they are counted: sixteen lanes have a unit. All that a thread needs is asked for at once.
DEV void words_to_x(const Shared& m, const u32* from, const u32* counter, u32 n) {
  constexpr u32 ALL = most(INNER, ATTENDED_LENGTH) / 2, LOADS = (ALL / 4 + THREADS - 1) / THREADS,
                AT_ONCE = LOADS < 6 ? LOADS : 6;
  wait_for(counter, n);
  const u32 lane = thread_index() & 31;
#pragma unroll 1
  for (u32 first = 4 * thread_index(); first - 4 * lane < n; first += 4 * THREADS * AT_ONCE) {
    auto word = [&](u32 i) { return first + 4 * THREADS * i; };
    uint4 v[AT_ONCE];
    Step of[AT_ONCE];
    look_for(v, [&](u32 i) { return word(i) < n ? from + word(i) : nullptr; });
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      // Bits of two halves at a time; what is infinite or NaN stays greatest.
      u32 two = __vmaxu2(__vmaxu2(v[i].x & 0x7fff7fff, v[i].y & 0x7fff7fff),
                         __vmaxu2(v[i].z & 0x7fff7fff, v[i].w & 0x7fff7fff));
#pragma unroll
      for (u32 d = 1; d < 16; d *= 2) two = __vmaxu2(two, __shfl_xor_sync(ALL_LANES, two, d));
      of[i] = step_of(bits_of_magnitude(first_of(max(two & 0xffff, two >> 16))));
    }
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (word(i) >= n) break;
      const u32 unit = shared_address(shared) + X + word(i) / 64 * X_UNIT;
      const float x[2][4] = {{first_of(v[i].x), first_of(v[i].y), second_of(v[i].x), second_of(v[i].y)},
                             {first_of(v[i].z), first_of(v[i].w), second_of(v[i].z), second_of(v[i].w)}};
#pragma unroll
      for (int h = 0; h < 2; h++) put_digits(unit, word(i) >> 3 & 7, (word(i) >> 1 & 3) + h, x[h], of[i].over);
      if ((lane & 15) == 0) put_power(unit, of[i].power);
    }
  }
  sync();
}

// Leaves words, as `leave_one` does: a thread a word, and counts them.
template <class Leave> DEV void leave_words(u32 words_here, u32* counter, Leave&& leave_one) {
#pragma unroll 1
  for (u32 first = thread_index() & ~31u; first < words_here; first += THREADS) {
    const u32 i = first + (thread_index() & 31);
    if (i < words_here) leave_one(i);
    __syncwarp();
    if ((thread_index() & 31) == 0) count(counter, min(32u, words_here - first));
  }
}

// A float of a type that is known when the kernel runs.
DEV float load_float(const void* from, u64 at, u32 type) {
  if (type == 2) return static_cast<const float*>(from)[at];
  const u32 bits = static_cast<const u16*>(from)[at];
  return type == 1 ? bf16_low(bits) : half_low(bits);
}

// The places of this step.
DEV u32* set_of(const Params& p, const Shared& m) { return p.words + m.step()[2]; }

#include "persistent_attention.cuh"

// What is left of a product: rows of q, k and v; the stream with rows of output and down added; gated rows in pairs.
DEV void leave_product(const Params& p, const Shared& m, u32* words, u32 layer, u32 product) {
  const Plan& plan = m.plan(product);
  const float* const bias = m.layers()[layer].product(product).bias;
  const u32 first = 16 * plan.first;
  const u32 at = product == 0 ? AT_QKV : product == 1 ? AT_MIDDLE : product == 2 ? AT_INNER : WORDS_OF_LAYER;
  const u32 counter = product == 0 ? QKV : product == 1 ? MIDDLE : product == 2 ? GATED : WORDS_OF_LAYER + STREAM;
  const bool gates = product == 2;
#pragma unroll 1
  for (u32 i0 = thread_index() & ~31u; i0 < 8 * plan.blocks; i0 += THREADS) {
    const u32 i = i0 + (thread_index() & 31);  // a pair of rows
    const bool there = i < 8 * plan.blocks;
    float2 v = there ? rows(m, product, i) : make_float2(0, 0);
    // The row in the product, and in what is left; rows of gate and up are 8 lanes apart.
    const u32 own = gates ? 16 * (i / 16) + 2 * (i & 7) : 2 * i, row = first + own;
    if (bias && there) {
      const float* const of = bias + row + (gates && i & 8 ? INNER : 0);
      v.x += __ldg(of), v.y += __ldg(of + 1);
    }
    if (gates) {
      const float2 up = make_float2(__shfl_xor_sync(ALL_LANES, v.x, 8), __shfl_xor_sync(ALL_LANES, v.y, 8));
      auto gated = [](float gate, float up) { return gate / (1.0f + expf(-gate)) * up; };
      if (there && !(i & 8)) leave(words + at + place_of_pair(row / 2), pair(gated(v.x, up.x), gated(v.y, up.y)));
    } else if (there) {
      const u32 place = product == 0 ? row : place_of(row), next = product == 0 ? 1 : 2;
      if (product & 1) {
        if (RANKS == 1 || p.rank == 0) v.x += m.own()[place - first], v.y += m.own()[place - first + 2];
        leave_parts(p, words + at + place, {v.x, v.y});
      } else {
        leave(words + at + place, __float_as_uint(v.x)), leave(words + at + place + next, __float_as_uint(v.y));
      }
    }
    __syncwarp();
    const u32 here = min(32u, 8 * plan.blocks - i0);
    if ((thread_index() & 31) == 0) count(words + counter, gates ? here / 2 : 2 * here);
  }
}

// Brings what the layer will read besides weights into the second-level cache.
DEV void prefetch(const Params& p, const Shared& m, u32 i) {
  const Layer& layer = m.layers()[i];
  prefetch_cache(p, layer, m.step()[0]);
  if (block_index() != BLOCKS - 1) return;
  const float* next = i + 1 < p.count ? m.layers()[i + 1].product(0).norm : p.norm;
#pragma unroll 1
  for (u32 e = 32 * thread_index(); e < HIDDEN; e += 32 * THREADS)
    prefetch_l2(layer.product(2).norm + e), prefetch_l2(next + e);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * COPYING_WARPS, 1)
    persistent_decode(const __grid_constant__ Params p) {
  const Shared m;
  const u32 barriers = shared_address(shared) + BARRIERS;
  if (threadIdx.x < WARPS * STAGES) {
    const u32 bar = barriers + (threadIdx.x / STAGES) * STAGES * 16 + (threadIdx.x % STAGES) * 8;
    mbarrier_init(bar, 1);
    mbarrier_init(bar + 8 * STAGES, 1);
  }
  for (u32 i = threadIdx.x; i < p.count * sizeof(Layer) / 4; i += THREADS + 32 * COPYING_WARPS)
    at_shared<u32>(TABLE)[i] = reinterpret_cast<const u32*>(p.layers)[i];
  mbarrier_init_fence();
  if (threadIdx.x < 4 * 32) make_plan(m.plan(threadIdx.x / 32), threadIdx.x / 32);
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    bring(p.count, m);
    return;
  }

  const u32 step = p.state[0], position = min(*p.position, u32(p.capacity) - 1);  // the limit guards memory
  if (threadIdx.x < WARPS) m.turns()[threadIdx.x] = 0;
  const u64 of_set = u64(p.count + 1) * WORDS_OF_LAYER + u64(p.count) * PARTS_OF_LAYER;
  if (threadIdx.x == 0) m.step()[0] = position, m.step()[1] = step, m.step()[2] = u32(step % SETS * of_set);
  {  // the set of the step before, as far as that has used it
    u32* const other = p.words + (step + SETS - 1) % SETS * of_set;
    const u64 used = u64(p.count + 1) * WORDS_OF_LAYER + (p.state[1] > 1 ? u64(p.count) * PARTS_OF_LAYER : 0);
    for (u64 i = 4 * (blockIdx.x * THREADS + threadIdx.x); i < used; i += 4 * THREADS * BLOCKS)
      *reinterpret_cast<uint4*>(other + i) = make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET);
  }
  const u32 token = *p.token;
  for (u32 i = threadIdx.x; i < PAIRS; i += THREADS) {
    double turns = double(position) * p.turns[i], sine, cosine;
    turns -= rint(turns);
    sincospi(2 * turns, &sine, &cosine);
    m.angles()[i] = make_float2(float(cosine), float(sine));
  }
  for (u32 i = threadIdx.x; i < 2 * 8 * HEAD / 2; i += THREADS) reinterpret_cast<u32*>(m.queries())[i] = 0;

  sync();

  // The token's vector is the first stream. It is one rank's; the others add nothing.
  {
    const Plan& rows = m.plan(1);
    u32* const set = set_of(p, m);
    const u64 own = token - p.first;
    auto of = [&](u32 i) {
      if (RANKS > 1 && own >= p.tokens) return 0.0f;
      return load_float(p.embedding, own * HIDDEN + 16 * rows.first + column_at(i), p.embedding_type);
    };
    leave_words(16 * rows.blocks, set + STREAM, [&](u32 i) { leave_parts(p, set + 16 * rows.first + i, {of(i)}); });
  }
#pragma unroll 1
  for (u32 number = 0; number < 4 * p.count; number++) {
    const u32 product = number & 3;
    const Product& of = m.layers()[number >> 2].product(product);
    {
      const u32* const words = set_of(p, m) + (again(number) >> 2) * WORDS_OF_LAYER;
      if (product & 1)
        words_to_x(m, words + (product == 1 ? AT_ATTENDED : AT_INNER), words + (product == 1 ? ATTENDED : GATED),
                   (product == 1 ? ATTENDED_LENGTH : INNER) / 2);
      else
        norm(p, m, words + (product ? AT_MIDDLE : 0), words + (product ? MIDDLE : STREAM), of.norm, put_x);
    }
    if (product == 0) prefetch(p, m, again(number) >> 2);
    multiply(m, product, product & 1 ? 1.0f : factor_of_norm(m, of.eps));
    leave_product(p, m, set_of(p, m) + (again(number) >> 2) * WORDS_OF_LAYER, again(number) >> 2, again(number) & 3);
    if ((again(number) & 3) == 0) {
      attend(p, m, again(number) >> 2);
      join(p, m, again(number) >> 2);
    }
  }
  if (block_index() != 0) return;
  u32* const last = set_of(p, m) + p.count * WORDS_OF_LAYER;
  norm(p, m, last, last + STREAM, p.norm, [&](u32 e, const float (&x)[4]) {
    float* const to = at_shared<float>(X) + e;
    to[0] = x[0], to[1] = x[1], to[2] = x[2], to[3] = x[3];
  });
  const float factor = factor_of_norm(m, p.eps);
  for (u32 i = thread_index(); i < HIDDEN / 2; i += THREADS) {
    const float* const x = at_shared<float>(X) + (2 * i & ~15u) + (i & 3) * 4 + (i >> 2 & 1);
    static_cast<u32*>(p.normed)[i] = pair(x[0] * factor, x[2] * factor);
  }
  if (thread_index() == 0) {
    p.state[0] = m.step()[1] + 1;
    p.state[1] = Parts(m.step()[0], 0).count;
  }
}
