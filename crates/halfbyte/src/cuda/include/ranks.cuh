// Words that ranks leave in each other's memory: kernels of several GPUs, or of several processes on one.
//
//   Each rank has an inbox, into which all others write. Before a word comes, its place holds NOT_YET, which nothing
//       that is sent is: a word says for itself that it is there, and no order between words is needed.
//   An inbox has two slots, which calls use in turn, and a slot has a place for the words of each rank. Who takes a
//       word puts NOT_YET in its place. A rank that sends in call c has all words of call c - 1, so the others have
//       begun that one, and have ended call c - 2, whose slot is this call's.
//   All ranks make the same calls in the same order. The number of a call stands in the device's memory, so that
//       recorded steps serve every call.
//   A word that does not come within LIMIT fails the call and all that follow; the host finds who was silent.
#pragma once
#include "ampere.cuh"
#include "exchange_words.cuh"
#include "floats.cuh"

constexpr u32 MOST_RANKS = 16;
constexpr u64 LIMIT = 8ull * 1000 * 1000 * 1000;  // ns

// Counts of a rank's device.
struct RankState {
  u32 call;  // how many there were
  u32 done;  // blocks of this call that are done
  u32 failed;  // 0, or 1 and the rank that was silent
  u32 padding;
};

// As `Ranks` in collectives.rs.
struct Ranks {
  u32* inboxes[MOST_RANKS];  // of each rank
  RankState* state;
  u32* silent;  // the host's: as `failed`
  u64 capacity;  // words of a place, a multiple of 4
  u32 rank, size;
  u32 own_gpu;  // no other rank's kernels need room on this GPU
  u32 padding;
};

DEV float4 look_at_peer(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
DEV void leave_at_peer(float4* p, float4 v) {
  asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
DEV bool there(float4 v) {
  return there(__float_as_uint(v.x)) && there(__float_as_uint(v.y)) && there(__float_as_uint(v.z)) &&
         there(__float_as_uint(v.w));
}
DEV float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Where no other rank adds anything: as `Call`.
struct Alone {
  static constexpr bool WAITS = false;
  template <int COUNT, int STEP>
  __device__ __forceinline__ void add_to_all(u64, u64, const float4 (&own)[COUNT], float4 (&v)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = plus(v[i], own[i]);
  }
  __device__ __forceinline__ void heard() const {}
  __device__ __forceinline__ void end() const {}
};

// A call, as a thread sees it. All threads of a grid begin and end one, after what comes before the kernel is done.
struct Call {
  static constexpr bool WAITS = true;
  const Ranks& ranks;
  u32 slot;
  bool failed;
  u32 done = 0;  // thread 0's, once its block has heard: blocks that were done before

  __device__ __forceinline__ explicit Call(const Ranks& of) : ranks(of) {
    const volatile RankState* state = of.state;
    slot = state->call % 2;
    failed = state->failed != 0;
  }
  // The NaN that is NOT_YET as another one.
  static __device__ __forceinline__ float sendable(float v) {
    return there(__float_as_uint(v)) ? v : __uint_as_float(0x7fffffffu);
  }
  static __device__ __forceinline__ float4 sendable(float4 v) {
    return make_float4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w));
  }
  // The place in the inbox of `to` for the words of `from`, from word `at` on, a multiple of 4.
  __device__ __forceinline__ float4* place(u32 to, u32 from, u64 at) const {
    const u64 first = (u64(slot) * ranks.size + from) * ranks.capacity + at;
    return reinterpret_cast<float4*>(ranks.inboxes[to] + first);
  }
  // Four words of this rank's that are sendable, to all others.
  __device__ __forceinline__ void send(u64 at, float4 v) const {
    if (failed) return;
#pragma unroll 1
    for (u32 to = 0; to < ranks.size; to++)
      if (to != ranks.rank) leave_at_peer(place(to, ranks.rank, at), v);
  }
  // COUNT times four words that are sendable, STEP times four apart, to one; of `left` words from word `at` on.
  template <int COUNT, int STEP>
  __device__ __forceinline__ void send_to(u32 to, u64 at, u64 left, const float4 (&v)[COUNT]) const {
    if (failed) return;
    float4* const p = place(to, ranks.rank, at);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (u64(4 * STEP) * i < left) leave_at_peer(p + STEP * i, v[i]);
  }
  // As many of another rank.
  template <int COUNT, int STEP> __device__ __forceinline__ void take(u32 from, u64 at, u64 left, float4 (&v)[COUNT]) {
    float4* const p = place(ranks.rank, from, at);
    auto has = [&](int i) { return u64(4 * STEP) * i < left; };
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = has(i) ? look_at_peer(p + STEP * i) : make_float4(0.f, 0.f, 0.f, 0.f);
    u64 begun = 0;
    for (u32 looks = 1; !failed; looks++) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        if (!there(v[i])) all = false, v[i] = look_at_peer(p + STEP * i);
      if (all) break;
      if (looks % 1024 == 0) give_up(from, begun);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (has(i)) forget(p + STEP * i);
  }
  // Four words of another rank.
  __device__ __forceinline__ float4 take(u32 from, u64 at) {
    float4* const p = place(ranks.rank, from, at);
    float4 v = look_at_peer(p);
    u64 begun = 0;
    for (u32 looks = 1; !there(v) && !failed; looks++) {
      v = look_at_peer(p);
      if (looks % 1024 == 0) give_up(from, begun);
    }
    forget(p);
    return v;
  }
  // The sum of four words over ranks, in their order; `own` are this rank's, as they were sent.
  __device__ __forceinline__ float4 sum(u64 at, float4 own) {
    if (failed) return own;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (u32 from = 0; from < ranks.size; from++) {
      const float4 v = from == ranks.rank ? own : take(from, at);
      sum = plus(sum, v);
    }
    return sum;
  }
  // Sends COUNT times four words, STEP times four apart, of `left` words from word `at` on, and adds their sums over
  // ranks to `v`.
  template <int COUNT, int STEP>
  __device__ __forceinline__ void add_to_all(u64 at, u64 left, const float4 (&own)[COUNT], float4 (&v)[COUNT]) {
    float4 sent[COUNT], sum[COUNT] = {};
#pragma unroll
    for (int i = 0; i < COUNT; i++) sent[i] = sendable(own[i]);
#pragma unroll 1
    for (u32 i = 1; i < ranks.size; i++) send_to<COUNT, STEP>((ranks.rank + i) % ranks.size, at, left, sent);
    if (failed) return;
#pragma unroll 1
    for (u32 from = 0; from < ranks.size; from++) {
      float4 of_rank[COUNT];
      if (from != ranks.rank) take<COUNT, STEP>(from, at, left, of_rank);
#pragma unroll
      for (int i = 0; i < COUNT; i++) sum[i] = plus(sum[i], from == ranks.rank ? sent[i] : of_rank[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = plus(v[i], sum[i]);
  }
  // A block has all that it waits for: the next kernel may start, and this block is counted.
  __device__ __forceinline__ void heard() {
    __syncthreads();  // all threads know the number of the call, and wait for no other rank
    launch_dependents();
    if (threadIdx.x == 0) done = atomicAdd(&ranks.state->done, 1);
  }
  // Ends the call for a block that has heard: the last one of the grid counts the call.
  __device__ __forceinline__ void end() const {
    if (threadIdx.x || done + 1 != gridDim.x * gridDim.y) return;
    RankState* const state = ranks.state;
    state->done = 0;
    state->call++;
  }

 private:
  static __device__ __forceinline__ void forget(float4* p) {
    const float none = __uint_as_float(NOT_YET);
    leave_at_peer(p, make_float4(none, none, none, none));
  }
  __device__ __forceinline__ void give_up(u32 from, u64& begun) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (!begun) begun = now;
    volatile RankState* const state = ranks.state;
    if (state->failed) {
      failed = true;
    } else if (now - begun > LIMIT) {
      failed = true;
      state->failed = 1 + from;
      *reinterpret_cast<volatile u32*>(ranks.silent) = 1 + from;
    }
  }
};
