// All layers of a step of one token in one persistent kernel: a block a multiprocessor, which stays from the first
// layer to the last, and weights that stream through rings of bulk copies, on from product to product.
//
//   a layer, with | where all blocks wait:
//       norm, q k v | attention | output, added | norm, gate and up, gated | down, added
//       (experts: output, added, the router | choice, norm, gate and up, gated | down, added)
//       (NORMS_BEHIND: output and down are normed and added where the stream is read)
//   a product (GEMV): a block owns blocks of 16 rows. Its warps cut columns x rows into runs of equally many stages,
//       each with a ring of its own; codes are multiplied as bytes by mma.sync, x in four columns of B as the four
//       bytes of integers (fixed_point.cuh); the sums of warps are added in order.
//   attention (persistent_attention.cuh): a block takes query heads of a kv head and a part of the positions.
//
// Ranks that share the model run it side by side, and leave parts of the stream for each other (persistent_ranks.cuh).
// Blocks that wait for each other (exchange_words.cuh) are there at once: the launch is cooperative. What an output is
// added up from depends on the model, the number of multiprocessors and the position, not on anything else.
#include "hopper.cuh"
#include "decode_codes.cuh"
#include "exchange_words.cuh"
#include "output_function.cuh"
#include "persistent_plan.cuh"
#include "persistent_products.cuh"
#include "persistent_ranks.cuh"
#include "warp.cuh"

// A float of a type that is known when the kernel runs.
DEV float load_float(const void* from, u64 at, u32 type) {
  if (type == 2) return static_cast<const float*>(from)[at];
  const u32 bits = static_cast<const u16*>(from)[at];
  return type == 1 ? bf16_low(bits) : half_low(bits);
}

#include "persistent_attention.cuh"

// Where sums lie of the stream that a layer begins with, of that in its middle, of the next layer's.
DEV u32* sums_of_stream(u32* layer, u32 stream) {
  return layer + stream / 2 * WORDS_OF_LAYER + AT_SUMS + stream % 2 * (RANKS * SUMS_OF_RANK);
}

// Leaves what a product gives: rows of q, k and v; the stream with rows of output and down added; gated
// rows in pairs. A norm's factor comes to them here. What does not need the sums is done before they are waited for.
template <u32 PRODUCT> DEV void leave_rows(const Params& p, const Shared& m, u32 layer) {
  // Gates and what they let through: in row blocks of their own, or both in one. Or a function alone.
  constexpr bool SUMS = (MEAN_OF_SUMS || NORMS_BEHIND) && PRODUCT & 1, INSIDE_MLP = PRODUCT == 2,
                 GATES = INSIDE_MLP && PAIRED, GATES_BESIDE = INSIDE_MLP && BESIDE, ALONE = INSIDE_MLP && !GATED,
                 ADDS = PRODUCT & 1, ROUTED_NEXT = EXPERTS && PRODUCT == 1;
  constexpr u32 AT = PRODUCT == 0 ? AT_QKV : PRODUCT == 1 ? AT_MIDDLE : INSIDE_MLP ? AT_INNER : WORDS_OF_LAYER;
  const Plan& plan = m.plan(PRODUCT);
  u32* const words = set_of(p, m) + layer * WORDS_OF_LAYER;
  const float* const bias = m.layer(layer).product(PRODUCT).bias;
  // What output and down are added to, where it has parts of ranks; it is the first rank's.
  const u32* const stream = words + (PRODUCT == 1 ? 0 : AT_MIDDLE);
  const u32 first = 16 * plan.first, pairs = 8 * plan.blocks;
  bool waits = true;
#pragma unroll 1
  for (u32 i0 = thread_index() & ~31u; i0 < pairs || waits; i0 += THREADS) {
    const u32 i = i0 + (thread_index() & 31);  // rows r and r + 8 of a row block
    const bool there = i < pairs;
    // The row in the product, and its place in what is left; rows of gate and up are 8 lanes apart.
    const u32 row = first + 16 * (GATES ? i / 16 : i / 8) + (i & 7),
              place = GATES || ALONE ? place_of_pair((row - (i & 1)) / 2 + 4 * (i & 1))
                      : GATES_BESIDE ? place_of_pair((first / 2 + i) / 2)
                      : ADDS         ? place_of(row)
                                     : row;
    float2 added = make_float2(0, 0);
    if (bias && there) {
      const bool value = VALUES_APART && PRODUCT == 0 && row >= 16 * OF_QUERIES_AND_KEYS;
      const float* const of_row = (value ? m.layer(layer).bias_of_values : bias) + row + (GATES && i & 8 ? INNER : 0);
      added = make_float2(__ldg(of_row), __ldg(of_row + 8));
    }
    u32 scales = 0;
    if (ROWS_SCALED && there) {
      const u32 of_all = row + (GATES && i & 8 ? INNER : 0);
      scales = __ldg(reinterpret_cast<const u32*>(p.scales[4 * layer + PRODUCT]) + of_all / 16 * 8 + of_all % 8);
    }
    if (ADDS && there) {
      if constexpr (NORMS_BEHIND) {  // the stream with its last addend stays apart from the next one
        Own& own = m.own(i);
        const float2 weight = own.weights[PRODUCT / 2];
        const float factor = m.all().factor;
        own.stream.x = fmaf(own.added.x * factor, weight.x, own.stream.x);
        own.stream.y = fmaf(own.added.y * factor, weight.y, own.stream.y);
        leave_at(words + AT + place, own.stream);
      } else if (RANKS == 1 || p.rank == 0) {
        const float2 before = RANKS == 1 ? m.own(i).stream : pair_of_stream(p, stream + place);
        added.x += before.x, added.y += before.y;
      }
    }
    float2 of_norm = make_float2(0, 0);
    if (ROUTED_NEXT && there) {
      const float* const weight = m.layer(layer).norms[1] + row;
      of_norm = make_float2(__ldg(weight), __ldg(weight + 8));
    }
    if (waits) sync();
    if (EXPERTS && INSIDE_MLP && waits && i0 == THREADS - 32) share(m, factor_of_norm(m, m.layer(layer).eps[1]));
    waits = false;
    if (i0 >= pairs && !(SUMS && i0 < 32 * SUMS_OF_STREAM)) break;
    float factor = ADDS ? 1.0f : factor_of_norm(m, m.layer(layer).eps[PRODUCT / 2]);
    if (WHOLE) factor *= m.all().step.power;
    float2 v = rows(m, there ? i : 0);
    if (ROWS_SCALED) v.x *= low(scales), v.y *= high(scales);
    v.x = fmaf(v.x, factor, added.x), v.y = fmaf(v.y, factor, added.y);
    u32* const to = words + AT + (ADDS && NORMS_BEHIND ? HIDDEN : 0) + place;
    if (GATES || ALONE) {
      float one, other;
      if constexpr (GATES) {
        const float2 up = make_float2(__shfl_xor_sync(ALL_LANES, v.x, 8), __shfl_xor_sync(ALL_LANES, v.y, 8));
        one = gated(v.x, up.x), other = gated(v.y, up.y);
      } else {
        one = activate(v.x), other = activate(v.y);
      }
      // A word has two rows: the even lane of two leaves the first ones of both, the other lane the second ones.
      const float given = __shfl_xor_sync(ALL_LANES, i & 1 ? one : other, 1);
      if (there && (ALONE || !(i & 8))) leave(to, i & 1 ? pair(given, other) : pair(one, given));
    } else if (GATES_BESIDE) {
      const float one = gated(v.x, v.y), other = __shfl_xor_sync(ALL_LANES, one, 1);
      if (there && !(i & 1)) leave(to, pair(one, other));
    } else if (there) {
      if (ADDS) {
        leave_part(p, to, v);
        if constexpr (NORMS_BEHIND)
          m.own(i).added = v;
        else if (RANKS == 1)
          m.own(i).stream = v;
        if (ROUTED_NEXT) {
          const float2 all = RANKS == 1 ? v : pair_of_stream(p, to);
          float* const rows_of_block = m.rows_of_stream() + 16 * (i / 8) + i % 8;
          rows_of_block[0] = all.x * of_norm.x, rows_of_block[8] = all.y * of_norm.y;
        }
      } else
        leave(to, __float_as_uint(v.x)), leave(to + 8, __float_as_uint(v.y));
    }
    const float of_rows = NORMS_BEHIND ? v.x * v.x + v.y * v.y : v.x + v.y;
    if (SUMS) leave_sum_of_rows(p, sums_of_stream(words, PRODUCT == 1 ? 1 : 2), i0 / 32, there ? of_rows : 0.0f);
  }
}

// What a product reads.
DEV Input input_of(const Params& p, const Shared& m, u32 number, const Layer& layer) {
  const u32 product = number & 3;
  const u32* const words = set_of(p, m) + (number >> 2) * WORDS_OF_LAYER;
  Input of{};
  of.pairs = product & 1;
  of.for_shares = EXPERTS && product == 2 && m.plan(2).blocks == 0;
  of.shared_out = product == 3;
  of.words = words + (product == 0 ? 0 : product == 1 ? AT_ATTENDED : product == 2 ? AT_MIDDLE : AT_INNER);
  of.count = product == 1 ? ATTENDED_LENGTH / 2 : product == 3 ? WIDTH / 2 : HIDDEN;
  of.sums = sums_of_stream(set_of(p, m) + (number >> 2) * WORDS_OF_LAYER, product / 2);
  of.behind = {layer.norms_behind[product / 2], of.sums, layer.eps_behind[product / 2]};
  of.norm = {layer.norms[product / 2], layer.norm_biases[product / 2], layer.eps[product / 2]};
  return of;
}

// Brings what the layer will read besides weights into the second-level cache.
DEV void prefetch(const Params& p, const Shared& m, u32 i) {
  const Layer& layer = m.layer(i);
  prefetch_router(m, layer);
  if (block_index() != BLOCKS - 1) return;
  const bool last = i + 1 == p.count;
  const float* const weights[2] = {layer.norms[1], last ? p.norm : p.layers[i + 1].norms[0]};
  const float* const biases[2] = {layer.norm_biases[1], last ? p.norm_bias : p.layers[i + 1].norm_biases[0]};
  const float* const behind[2] = {layer.norms_behind[1], last ? p.norm_behind : p.layers[i + 1].norms_behind[0]};
#pragma unroll 1
  for (u32 e = 32 * thread_index(); e < HIDDEN; e += 32 * THREADS)
    for (u32 j = 0; j < 2; j++) {
      prefetch_l2(weights[j] + e);
      if (LAYER_NORM && biases[j]) prefetch_l2(biases[j] + e);
      if (NORMS_BEHIND) prefetch_l2(behind[j] + e);
    }
}

// NORMS_BEHIND: asks for the weights of the rows that a thread adds to the stream, of a layer.
DEV void ask_for_own_weights(const Shared& m, const Layer& layer) {
  if (!NORMS_BEHIND) return;
  const Plan& plan = m.plan(1);
#pragma unroll 1
  for (u32 i = thread_index(); i < 8 * plan.blocks; i += THREADS)
    for (u32 half = 0; half < 2; half++)
      for (u32 j = 0; j < 2; j++)
        copy_few<4>(shared_address(&m.own(i).weights[j]) + 4 * half,
                    layer.norms_behind[j] + 16 * plan.first + i / 8 * 16 + i % 8 + 8 * half);
  copy_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * COPYING_WARPS, 1)
    persistent_decode(const __grid_constant__ Params p, const __grid_constant__ TensorMap keys,
                      const __grid_constant__ TensorMap values) {
  const Shared m;
  const u32 barriers = shared_address(shared) + BARRIERS;
  if (threadIdx.x < WARPS * STAGES) {
    const u32 bar = barriers + (threadIdx.x / STAGES) * STAGES * 16 + (threadIdx.x % STAGES) * 8;
    mbarrier_init(bar, 1);
    mbarrier_init(bar + 8 * STAGES, 1);
  }
  if (EXPERTS && threadIdx.x == 0) mbarrier_init(shared_address(shared) + ROUTED, 1);
  ask_for_layer(p, 0);
  mbarrier_init_fence();
  if (threadIdx.x < 4 * 32) make_plan(m.plan(threadIdx.x / 32), threadIdx.x / 32);
  copy_wait<0>();
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    registers_decrease<56>();
    bring(p, m, {&keys, &values});
    return;
  }
  registers_increase<152>();

  const u32 step = p.state[0], position = min(*p.position, u32(p.positions) - 1);  // the limit guards memory
  if (threadIdx.x < WARPS) m.turns()[threadIdx.x] = 0;
  const u64 of_set = u64(p.count + 1) * WORDS_OF_LAYER + u64(p.count) * PARTS_OF_LAYER;
  if (threadIdx.x == 0) {
    m.step()[0] = position, m.step()[1] = step, m.step()[2] = u32(step % SETS * of_set);
    m.step()[3] = slot_in(p, page_of(p, position), position);
  }
  {  // the set of the step before, as far as that has used it
    u32* const other = p.words + (step + SETS - 1) % SETS * of_set;
    const u64 used = u64(p.count + 1) * WORDS_OF_LAYER + (p.state[1] > 1 ? u64(p.count) * PARTS_OF_LAYER : 0);
    for (u64 i = 4 * (blockIdx.x * THREADS + threadIdx.x); i < used; i += 4 * THREADS * BLOCKS)
      *reinterpret_cast<uint4*>(other + i) = make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET);
  }
  const u32 token = *p.token;
  for (int i = threadIdx.x; i < int(ROPES * PAIRS); i += THREADS) {
    const u32 rope = i / most(PAIRS, 1);
    double turns = double(position) * p.turns[rope][i - rope * PAIRS], sine, cosine;
    turns -= rint(turns);
    sincospi(2 * turns, &sine, &cosine);
    m.angles(0)[i] = make_float2(float(cosine), float(sine));
  }
  if (ALIBI && threadIdx.x < HEADS_OF_SHARE)
    m.slopes()[threadIdx.x] =
        p.slopes[blockIdx.x % SHARES * HEADS_OF_SHARE + threadIdx.x] * 1.4426950408889634f;  // log2(e)
  for (u32 i = threadIdx.x; i < 2 * 8 * QUERY_ROW / 2; i += THREADS) reinterpret_cast<u32*>(m.queries())[i] = 0;

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
    for (u32 i = threadIdx.x; i < 32 * SUMS_OF_STREAM; i += THREADS) {  // whole warps
      const bool there = i < 8 * rows.blocks;
      const float2 v = there ? make_float2(of(2 * i), of(2 * i + 1)) : make_float2(0, 0);
      if (there) leave_part(p, set + 16 * rows.first + 2 * i, v);
      if (RANKS == 1 && there) m.own(i).stream = v;
      if constexpr (NORMS_BEHIND) {
        if (there)
          leave_at(set + HIDDEN + 16 * rows.first + 2 * i, make_float2(0, 0)), m.own(i).added = make_float2(0, 0);
      }
      if (MEAN_OF_SUMS || NORMS_BEHIND)
        leave_sum_of_rows(p, sums_of_stream(set, 0), i / 32, MEAN_OF_SUMS ? v.x + v.y : 0.0f);
    }
  }
#pragma unroll 1
  for (u32 number = 0; number < 4 * p.count; number++) {
    const u32 product = number & 3;
    const Layer& of = m.layer(number >> 2);
    if (product == 0) prefetch(p, m, number >> 2), ask_for_own_weights(m, of);
    if (NORMS_BEHIND && product == 1) copy_wait<0>();
    // The layer before has been left by all, since they have met in this layer's q, k and v; and they meet in down.
    if (product == 1) ask_for_layer(p, (number >> 2) + 1);
    if (product == 3) copy_wait<0>();
    multiply(p, m, again(number), of, input_of(p, m, again(number), of));
    const u32 layer = again(number) >> 2;
    switch (again(number) & 3) {
      case 0:
        leave_rows<0>(p, m, layer);
        attend(p, m, layer);
        join(p, m, layer);
        break;
      case 1: leave_rows<1>(p, m, layer); break;
      case 2: leave_rows<2>(p, m, layer); break;
      default: leave_rows<3>(p, m, layer);
    }
  }
  if (block_index() != 0) return;
  u32* const last = set_of(p, m) + p.count * WORDS_OF_LAYER;
  const Norm norm{p.norm, p.norm_bias, p.eps};
  look_at_stream<true, true>(
      p, m, last, norm, {p.norm_behind, sums_of_stream(last, 0), p.eps_behind}, [] {},
      [&](u32 place, const float (&x)[4]) {
        const float factor = LAYER_NORM ? 1.0f : factor_of_norm(m, p.eps);
        u32* const to = static_cast<u32*>(p.normed) + column_at(place) / 2;
        to[0] = pair(x[0] * factor, x[2] * factor), to[4] = pair(x[1] * factor, x[3] * factor);
      });
  if (thread_index() == 0) {
    p.state[0] = (m.step()[1] + 1) % SETS;
    p.state[1] = Parts(m.step()[0], 0).count;
  }
}
