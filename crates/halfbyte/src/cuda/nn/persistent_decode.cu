// All layers of a step of one token in one persistent kernel: a block a multiprocessor, which stays from the first
// layer to the last, and weights that stream through rings of bulk copies, on from product to product.
//
//   a layer, with | where all blocks wait:
//       norm, q k v | attention | output, added | norm, gate and up, gated | down, added
//   a product (GEMV): a block owns blocks of 16 rows. Its warps cut rows x columns into runs of equally many stages,
//       each with a ring of its own; codes are multiplied by mma.sync, x in one column of B; the sums of runs are
//       added in order.
//   attention (persistent_attention.cuh): a block takes a kv head and a part of the positions.
//
// Blocks that wait for each other (exchange_words.cuh) are there at once: the launch is cooperative. What an output is
// added up from depends on the model, the number of multiprocessors and the position, not on anything else.
#include "hopper.cuh"
#include "decode_codes.cuh"
#include "exchange_words.cuh"
#include "persistent_plan.cuh"
#include "warp.cuh"

// The warps that bring weights: a lane a ring.
DEV void bring(u32 count, const Shared& m) {
  constexpr u32 RINGS = WARPS / COPYING_WARPS;
  if ((threadIdx.x & 31) >= RINGS) return;
  const u32 warp = (threadIdx.x - THREADS) / 32 * RINGS + (threadIdx.x & 31);
  const u32 base = shared_address(shared), own = base + warp * STAGES * STAGE,
            full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u64 policy = policy_evict_first();
  u32 stage = 0, phase = 1;
#pragma unroll 1
  for (u32 layer = 0; layer < count; layer++)
#pragma unroll 1
    for (u32 product = 0; product < 4; product++) {
      const u8* w = m.layers()[layer].product(product).w;
      const Plan& plan = m.plan(product);
      const Shape s = shape(product);
      const u32 run = plan.run[warp], start = plan.start[warp], end = run >> 16;
      const u32 steps = s.stages * STEPS, strips = ((s.row_blocks << s.paired) + 3) / 4;
      u32 j = start & 0xffff, t = start >> 16;
#pragma unroll 1
      for (u32 i = run & 0xffff; i < end;) {
        const u32 block = row_block(plan, product, j), quarter = block & 3;
        const u32 strip = block >> 2, first = strip & ~3u, wide = min(4u, strips - first) * ATOM;
        const u8* codes =
            w + u64(first) * steps * ATOM + t * STEPS * wide + (strip - first) * ATOM + quarter * UNIT_SCALES;
        const u32 scales = SCALES - quarter * UNIT_SCALES + (OWN_SCALES ? quarter * 32 : 0);
#pragma unroll 1
        for (; t < s.stages && i < end; t++, i++) {
          mbarrier_wait(empty + 8 * stage, phase);
          mbarrier_expect(full + 8 * stage, STAGE);
#pragma unroll
          for (u32 k = 0; k < STEPS; k++, codes += wide) {
            const u32 to = own + stage * STAGE + k * UNIT;
            copy_bulk(to, codes, UNIT_SCALES, full + 8 * stage, policy);
            copy_bulk(to + UNIT_SCALES, codes + scales, SCALE_BYTES, full + 8 * stage, policy);
          }
          if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        t = 0, j++;
      }
    }
}

// This warp's stages of a product with x, to sums.
DEV void multiply(const Shared& m, u32 product) {
  const Plan& plan = m.plan(product);
  const u32 warp = thread_index() / 32, lane = thread_index() & 31;
  const u32 stages = shape(product).stages, blocks = plan.blocks, run = plan.run[warp], start = plan.start[warp],
            end = run >> 16;
  const u32 base = shared_address(shared), full = base + BARRIERS + warp * STAGES * 16, empty = full + 8 * STAGES;
  const u32 ring = base + warp * STAGES * STAGE + lane * 16, of_scales = base + warp * STAGES * STAGE + (lane >> 2) * 4;
  const u32 x = base + X + (lane & 3) * 16;
  u32 j = start & 0xffff, t = start >> 16;
  float sum = 0, sum8 = 0;
  u32 stage = m.turns()[warp] >> 1, phase = m.turns()[warp] & 1;
  u32 quarter = OWN_SCALES ? 0 : row_block(plan, product, j) & 3;  // of the scales
#pragma unroll 1
  for (u32 i = run & 0xffff; i < end; i++) {
    const u32 at = ring + stage * STAGE, of_x = x + t * (256 * STEPS),
              scale_at = of_scales + stage * STAGE + quarter * 32;
    const u32 zero_at =
        base + warp * STAGES * STAGE + stage * STAGE + UNIT_SCALES + ZEROS - SCALES + quarter * 16 + (lane >> 2) * 2;
    mbarrier_wait(full + 8 * stage, phase);
    u32 codes[STEPS][8 * WORDS], scales[STEPS][GROUPS];
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
#pragma unroll
      for (int v = 0; v < 2 * WORDS; v++) {
        u32 w[4];
        load_shared(w, at + k * UNIT + v * 512);
        codes[k][4 * v] = w[0], codes[k][4 * v + 1] = w[1], codes[k][4 * v + 2] = w[2], codes[k][4 * v + 3] = w[3];
      }
#pragma unroll
      for (int g = 0; g < GROUPS; g++) scales[k][g] = load_shared(scale_at + k * UNIT + UNIT_SCALES + 128 * g);
    }
    constexpr int EACH = 8 / GROUPS;  // k16 steps of a group
#pragma unroll
    for (u32 k = 0; k < STEPS; k++) {
      u32 b[4][4];
#pragma unroll
      for (int h = 0; h < 4; h++) load_shared(b[h], of_x + k * 256 + h * 64);
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        Zeros z = zeros_symmetric();
        if (ZERO) z = zeros_of(load_shared_u16(zero_at + k * UNIT + 64 * g));
        float acc[2][4] = {};
#pragma unroll
        for (int h = g * EACH; h < (g + 1) * EACH; h++) {
          u32 a[4];
          decode(&codes[k][h * WORDS], z, a);
          mma_sync<BF16>(acc[h % 2], a, b[h / 2][2 * (h % 2)], b[h / 2][2 * (h % 2) + 1]);
        }
        sum = fmaf(acc[0][0] + acc[1][0], low(scales[k][g]), sum);
        sum8 = fmaf(acc[0][2] + acc[1][2], high(scales[k][g]), sum8);
      }
      if (k == STEPS - 1) {
        loads_before_copies();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + 8 * stage);
      }
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
    if (++t == stages || i + 1 == end) {
      if ((lane & 3) == 0) {
        float* to = m.sums() + (j + warp) * 16 + (lane >> 2);
        to[0] = sum, to[8] = sum8;
      }
      sum = sum8 = 0;
      if (t == stages) {
        t = 0, j++;
        if (!OWN_SCALES) quarter = row_block(plan, product, j) & 3;
      }
    }
  }
  if (lane == 0) m.turns()[warp] = stage << 1 | phase;
  sync();
#pragma unroll 1
  for (u32 i = thread_index(); i < 16 * blocks; i += THREADS) {
    const u32 block = i / 16, warps = plan.warps[block];
    float total = 0;
#pragma unroll 1
    for (u32 w = warps & 255; w <= warps >> 8; w++) total += m.sums()[(block + w) * 16 + i % 16];
    m.rows()[i] = total;
  }
  sync();
}
// Waits until about all of n words are counted.
DEV void wait_for(const u32* counter, u32 n) {
  if (thread_index() == 0)
    while (look(counter) + 1 < n) {
    }
  sync();
}
// Where the word of columns k, k+1 of x lies.
DEV u32 place_of(u32 k) { return (k >> 5) * 16 + (k >> 1 & 3) * 4 + (k >> 4 & 1) * 2 + (k >> 3 & 1); }

// Not behind what is waited for, where the compiler would put it.
DEV float4 load_early(const float* p) {
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
// x = norm of the stream, when that is counted; the rows that this block will add to are kept.
DEV void norm_to_x(const Shared& m, const u32* from, const u32* counter, const float* weight, float eps) {
  constexpr u32 LOADS = (HIDDEN / 4 + THREADS - 1) / THREADS;
  const Plan& own = m.plan(1);
  float4 w[LOADS];
  uint4 v[LOADS];
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    w[i] = e < HIDDEN ? load_early(weight + e) : make_float4(0, 0, 0, 0);
  }
  wait_for(counter, HIDDEN);
  look_for(v, [&](u32 i) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    return e < HIDDEN ? from + e : nullptr;
  });
  float sum = 0;
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    if (e < HIDDEN) {
      const float x = __uint_as_float(v[i].x), y = __uint_as_float(v[i].y), z = __uint_as_float(v[i].z),
                  u = __uint_as_float(v[i].w);
      sum = fmaf(x, x, fmaf(y, y, fmaf(z, z, fmaf(u, u, sum))));
      if (e - 16 * own.first < 16 * own.blocks) *reinterpret_cast<uint4*>(m.own() + e - 16 * own.first) = v[i];
    }
  }
  sum = warp_sum(sum);
  if ((thread_index() & 31) == 0) m.reduce()[thread_index() / 32] = sum;
  sync();
  sum = warp_sum((thread_index() & 31) < WARPS ? m.reduce()[thread_index() & 31] : 0.f);
  const float factor = rsqrtf(sum / float(HIDDEN) + eps);
#pragma unroll
  for (u32 i = 0; i < LOADS; i++) {
    const u32 e = 4 * (thread_index() + i * THREADS);
    if (e < HIDDEN) {
      const u32 at = place_of(e);
      m.x()[at] = pair(__uint_as_float(v[i].x) * factor * w[i].x, __uint_as_float(v[i].y) * factor * w[i].y);
      m.x()[at + 4] = pair(__uint_as_float(v[i].z) * factor * w[i].z, __uint_as_float(v[i].w) * factor * w[i].w);
    }
  }
  sync();
}
// x = words of pairs, when they are counted.
DEV void words_to_x(const Shared& m, const u32* from, const u32* counter, u32 n) {
  wait_for(counter, n);
  constexpr u32 AT_ONCE = 4;
#pragma unroll 1
  for (u32 first = 4 * thread_index(); first < n; first += 4 * THREADS * AT_ONCE) {
    uint4 v[AT_ONCE];
    auto at = [&](u32 i) { return first + 4 * THREADS * i < n ? from + first + 4 * THREADS * i : nullptr; };
    look_for(v, at);
#pragma unroll
    for (u32 i = 0; i < AT_ONCE; i++) {
      const u32 to = place_of(2 * (first + 4 * THREADS * i));
      if (at(i)) m.x()[to] = v[i].x, m.x()[to + 4] = v[i].y, m.x()[to + 8] = v[i].z, m.x()[to + 12] = v[i].w;
    }
  }
  sync();
}

// Leaves words, as `of` makes them: a thread a word, and counts them.
template <class Of> DEV void leave_words(u32 words_here, u32* to, u32* counter, Of&& of) {
#pragma unroll 1
  for (u32 first = thread_index() & ~31u; first < words_here; first += THREADS) {
    const u32 i = first + (thread_index() & 31);
    if (i < words_here) leave(to + i, of(i));
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

#include "persistent_attention.cuh"

// What is left of a product: rows of q, k and v; the stream with rows of output and down added; gated rows in pairs.
DEV void leave_product(const Shared& m, u32* words, u32 layer, u32 product) {
  const Plan& plan = m.plan(product);
  const float* const bias = m.layers()[layer].product(product).bias;
  const u32 first = 16 * plan.first;
  if (product == 2) {
    leave_words(4 * plan.blocks, words + AT_INNER + first / 2, words + GATED, [&](u32 i) {
      float v[2];
#pragma unroll
      for (u32 e = 0; e < 2; e++) {
        const u32 j = i / 8, r = 2 * i % 16 + e;
        float gate = m.rows()[32 * j + r], up = m.rows()[32 * j + 16 + r];
        if (bias) gate += __ldg(bias + first + 16 * j + r), up += __ldg(bias + INNER + first + 16 * j + r);
        v[e] = gate / (1.0f + expf(-gate)) * up;
      }
      return pair(v[0], v[1]);
    });
    return;
  }
  u32* const to = words + (product == 0 ? AT_QKV : product == 1 ? AT_MIDDLE : WORDS_OF_LAYER) + first;
  u32* const counter = words + (product == 0 ? QKV : product == 1 ? MIDDLE : WORDS_OF_LAYER + STREAM);
  leave_words(16 * plan.blocks, to, counter, [&](u32 i) {
    float v = m.rows()[i];
    if (bias) v += __ldg(bias + first + i);
    return __float_as_uint(product == 0 ? v : v + m.own()[i]);
  });
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

// The places of this step.
DEV u32* set_of(const Params& p, const Shared& m) {
  const u64 words = u64(p.count + 1) * WORDS_OF_LAYER + u64(p.count) * PARTS_OF_LAYER;
  return p.words + (m.step()[1] & 1 ? words : 0);
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
  if (threadIdx.x == 0) m.step()[0] = position, m.step()[1] = step;
  if (threadIdx.x < WARPS) m.turns()[threadIdx.x] = 0;
  const u64 of_set = u64(p.count + 1) * WORDS_OF_LAYER + u64(p.count) * PARTS_OF_LAYER;
  u32* const set = p.words + (step & 1) * of_set;
  {  // the other set, as far as the step before has used it
    u32* const other = p.words + (~step & 1) * of_set;
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

  // The token's vector is the first stream.
  {
    const Plan& rows = m.plan(1);
    leave_words(16 * rows.blocks, set + 16 * rows.first, set + STREAM, [&](u32 i) {
      return __float_as_uint(load_float(p.embedding, u64(token) * HIDDEN + 16 * rows.first + i, p.embedding_type));
    });
  }
#pragma unroll 1
  for (u32 i = 0; i < p.count; i++) {
#pragma unroll 1
    for (u32 product = 0; product < 4; product++) {
      {
        const u32* const words = set_of(p, m) + again(i) * WORDS_OF_LAYER;
        const Product& of = m.layers()[i].product(product);
        switch (product) {
          case 0:
          case 2:
            norm_to_x(m, words + (product ? AT_MIDDLE : 0), words + (product ? MIDDLE : STREAM), of.norm, of.eps);
            break;
          default:
            words_to_x(m, words + (product == 1 ? AT_ATTENDED : AT_INNER), words + (product == 1 ? ATTENDED : GATED),
                       (product == 1 ? ATTENDED_LENGTH : INNER) / 2);
        }
      }
      if (product == 0) prefetch(p, m, again(i));
      multiply(m, product);
      leave_product(m, set_of(p, m) + again(i) * WORDS_OF_LAYER, again(i), product);
      if (product == 0) attend(p, m, again(i), set_of(p, m));
    }
  }
  u32* const last = set_of(p, m) + p.count * WORDS_OF_LAYER;
  norm_to_x(m, last, last + STREAM, p.norm, p.eps);
  for (u32 i = block_index() * THREADS + thread_index(); i < HIDDEN / 2; i += BLOCKS * THREADS)
    static_cast<u32*>(p.normed)[i] = m.x()[place_of(2 * i)];
  if (block_index() == 0 && thread_index() == 0) {
    p.state[0] = m.step()[1] + 1;
    p.state[1] = Parts(m.step()[0], 0).count;
  }
}
