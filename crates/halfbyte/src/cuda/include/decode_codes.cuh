// From the words of an atom to A fragments of tensor cores, and the scales and zero points that go with them.
#pragma once
#include "ampere.cuh"
#include "weight_atom.cuh"

// A lane's words for so many k16 steps, at least two where codes are in planes: first the lower bits of all, then the
// upper ones.
DEV constexpr int lower_words(int steps) {
  return BITS == 5 || BITS == 6 ? steps : BITS == 3 ? steps / 2 : steps * BITS / 4;
}
DEV constexpr int words_of(int steps) {
  return lower_words(steps) + (BITS == 6 ? steps / 2 : BITS == 3 || BITS == 5 ? (steps + 3) / 4 : 0);
}
typedef u32 Codes[words_of(8)];  // a lane's words of a unit

// The lane's codes of one unit; at: its address.
DEV void load_codes(Codes& q, u32 at, int lane) {
  if constexpr (BITS < 4) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 v[2];
      load_shared(v, at + i * (UNIT_CODES / 2) + lane * 8);
      q[2 * i] = v[0], q[2 * i + 1] = v[1];
      if (BITS == 3) q[(4 + i) % words_of(8)] = load_shared(at + i * (UNIT_CODES / 2) + 256 + lane * 4);
    }
  } else {
    constexpr int QUADS = BITS == 8 ? 4 : 2, APART = UNIT_CODES / QUADS;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      u32 v[4];
      load_shared(v, at + i * APART + lane * 16);
#pragma unroll
      for (int j = 0; j < 4; j++) q[4 * i + j] = v[j];
    }
#pragma unroll
    for (int i = 0; BITS == 5 && i < 2; i++) q[(8 + i) % words_of(8)] = load_shared(at + i * APART + 512 + lane * 4);
#pragma unroll
    for (int i = 0; BITS == 6 && i < 2; i++) {
      u32 v[2];
      load_shared(v, at + i * APART + 512 + lane * 8);
      q[(8 + 2 * i) % words_of(8)] = v[0];
      q[(9 + 2 * i) % words_of(8)] = v[1];
    }
  }
}
// The word of 4-bit codes that codes of 2 and 3 bits are, of a step of four; where RAISED, 8 is the zero of symmetric
// ones.
template <bool RAISED> DEV u32 widened(u32 lower, u32 upper, int step) {
  constexpr u32 UP = RAISED && !FROM_ZERO ? (8 - MIDDLE) * 0x11111111u : 0;
  const u32 low = step % 2 ? lower >> 2 : lower;
  if constexpr (BITS == 2) return (low & 0x33333333) + UP;
  const u32 high = step % 4 == 0 ? upper << 2 : step % 4 == 1 ? upper << 1 : step % 4 == 2 ? upper : upper >> 1;
  return and_or(high, 0x44444444, low & 0x33333333) + UP;
}
// What the TABLE has for a word of numbers: the codes of the columns of its even bytes, then those of the odd ones, as
// words of 8-bit codes have them.
DEV void look_up(u32 word, u32 (&codes)[2]) {
  const u32 numbers = __byte_perm(word, 0, 0x3120), lower = numbers & 0x77777777,
            upper = and_or(numbers >> 1, 0x44444444, 0x32103210);  // which half of the table
#pragma unroll
  for (int i = 0; i < 2; i++)
    codes[i] = __byte_perm(__byte_perm(TABLE_0, TABLE_1, lower >> (16 * i)),
                           __byte_perm(TABLE_2, TABLE_3, lower >> (16 * i)), upper >> (16 * i));
}
// The words of a k16 step out of those of STEPS: one of 4-bit codes, which those of 2 and 3 become, or two of bytes,
// which codes of 5 and 6 bits and of a TABLE become; where RAISED, 128 is the zero of symmetric ones.
template <int STEPS, bool RAISED = false> DEV void words_of_step(const u32* q, int step, u32 (&words)[FIELD / 4]) {
  if constexpr (TABLE) {
    u32 codes[2];
    look_up(q[step], codes);
    words[0] = codes[0], words[FIELD / 8] = codes[1];
  } else if constexpr (BITS == 5) {
    const u32 low = q[step], high = q[STEPS + step / 4];
#pragma unroll
    for (int i = 0; i < FIELD / 4; i++) {
      const int up = 4 - 2 * (step % 4) - i;  // to bit 4
      words[i] = and_or(up > 0 ? high << up : high >> -up, 0x10101010, (i ? low >> 4 : low) & 0x0f0f0f0f);
    }
  } else if constexpr (BITS < 4) {
    words[0] = widened<RAISED>(q[step / 2], BITS == 3 ? q[lower_words(STEPS) + step / 4] : 0, step);
  } else if constexpr (BITS == 6) {
    constexpr u32 UP = RAISED && !FROM_ZERO ? (128 - MIDDLE) * 0x01010101u : 0;
    const u32 low = q[step], high = q[STEPS + step / 2];
    const u32 upper[2] = {step % 2 ? high : high << 4, step % 2 ? high >> 2 : high << 2};
#pragma unroll
    for (int i = 0; i < 2; i++) words[i] = and_or(upper[i], 0x30303030, (i ? low >> 4 : low) & 0x0f0f0f0f) + UP;
  } else {
#pragma unroll
    for (int i = 0; i < FIELD / 4; i++) words[i] = q[step * (FIELD / 4) + i];
  }
}
// The constants that take the zero points of rows R and R+8 off.
struct Zeros {
  u32 r, r8;
};
DEV Zeros zeros_symmetric() {
  // Of codes with offsets nothing comes off.
  if constexpr (W_OFFSET) {
    if constexpr (FIELD == 4)
      return BF16 ? Zeros{int4_bf16_zero(0), int4_bf16_zero(0)} : Zeros{int4_half_zero_r(0), int4_half_zero_r8(0)};
    else
      return BF16 ? Zeros{0x43004300, 0x43004300} : Zeros{int8_half_zero(0), int8_half_zero(0)};
  } else if constexpr (FIELD == 4) {
    constexpr u32 Z = MIDDLE;
    return BF16 ? Zeros{int4_bf16_zero(Z), int4_bf16_zero(Z)} : Zeros{int4_half_zero_r(Z), int4_half_zero_r8(Z)};
  } else if constexpr (MIDDLE != 128) {
    constexpr u32 LESS = MIDDLE == 16 ? 0x42e042e0 : 0x42c042c0;  // 128 - MIDDLE
    return BF16 ? Zeros{LESS, LESS} : Zeros{int8_half_zero(MIDDLE), int8_half_zero(MIDDLE)};
  } else {
    if constexpr (BF16)
      return {0, 0};
    else
      return {0xe480e480, 0xe480e480};
  }
}
DEV Zeros zeros_of(u32 a, u32 b) {
  if constexpr (FIELD == 4) {
    if constexpr (BF16)
      return {int4_bf16_zero(a), int4_bf16_zero(b)};
    else
      return {int4_half_zero_r(a), int4_half_zero_r8(b)};
  } else {
    if constexpr (BF16)
      return {bf16_pair(128.f - a, 128.f - a), bf16_pair(128.f - b, 128.f - b)};
    else
      return {int8_half_zero(a), int8_half_zero(b)};
  }
}
DEV Zeros zeros_of(u32 z) { return zeros_of(z & 255, (z >> 8) & 255); }  // both in the low two bytes
// Scales or offsets of rows R and R + 8 of a group as they lie: two halves, or two floats.
struct RowPair {
  u32 v[SCALE_F32 ? 2 : 1];
};
DEV RowPair load_row_pair(u32 at) {
  RowPair pair;
  if constexpr (SCALE_F32) {
    u32 v[2];
    load_shared(v, at);
    pair.v[0] = v[0], pair.v[SCALE_F32] = v[1];
  } else {
    pair.v[0] = load_shared(at);
  }
  return pair;
}
// The same out of multiples of halves.
DEV RowPair row_pair(TwoFloats v) {
  RowPair pair;
  pair.v[0] = __float_as_uint(v.r), pair.v[SCALE_F32] = __float_as_uint(v.r8);
  return pair;
}
DEV TwoFloats both_halves(u32 halves) { return {half_low(halves), half_high(halves)}; }
DEV RowPair scale_pair(u32 word, u32 halves, int group) {
  return row_pair(scales_of_group<W_OFFSET, NIBBLES>(word, halves, group));
}
DEV RowPair offset_pair(u32 word, u32 halves, int group) {
  return row_pair(offsets_of_group<NIBBLES>(word, halves, group));
}
// Which of a pair's words a group has, where two of 16 share one.
DEV int word_of_group(int group) { return GROUP == 16 ? group / 2 : group; }
// All of them; nothing where scales are no multiples.
struct Multiples {
  u32 words[4], last, of_offsets;  // of_offsets: the halves of offsets
  // at: where those of a unit begin.
  DEV Multiples load(u32 at, int pair) {
    Multiples m;
    if constexpr (MULTIPLES) {
      load_shared(m.words, at + words_of_pair(pair));
      m.last = m.of_offsets = load_shared(at + last_of_pair<NIBBLES>(pair));
      if constexpr (NIBBLES) m.of_offsets = load_shared(at + last_of_pair<NIBBLES>(pair) + 4);
    }
    return m;
  }
  // The halves of scales.
  __device__ __forceinline__ u32 halves() const { return W_OFFSET && !NIBBLES ? scale_halves(words) : last; }
  // FOLDED: the word of a k16 step.
  __device__ __forceinline__ u32 of_step(int step) const { return words[step / 2]; }
  // Of a group.
  __device__ __forceinline__ RowPair scales_of_group(int group) const {
    if constexpr (!MULTIPLES) return {};
    return scale_pair(words[word_of_group(group)], halves(), group);
  }
  __device__ __forceinline__ RowPair offsets_of_group(int group) const {
    if constexpr (!MULTIPLES) return {};
    return offset_pair(words[word_of_group(group)], of_offsets, group);
  }
  // What sums of a group are scaled by; FOLDED: what all of them have in common.
  __device__ __forceinline__ RowPair scales(int group) const {
    return FOLDED ? row_pair(both_halves(halves())) : scales_of_group(group);
  }
  __device__ __forceinline__ RowPair offsets(int group) const {
    return FOLDED ? row_pair(both_halves(of_offsets)) : offsets_of_group(group);
  }
};

// The lower or the upper half of a pair, twice; a move that instructions on halves take over.
DEV u32 twice_low(u32 v) {
  u32 d;
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n mov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(v));
  return d;
}
DEV u32 twice_high(u32 v) {
  u32 d;
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n mov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(v));
  return d;
}
// What codes of a step are multiplied by where they are FOLDED: pairs of the factor of row R and of what takes off the
// float that its codes lie in, times that; of R + 8. All are whole numbers up to 1024 * 63, which fp16 holds.
struct Fold {
  u32 f, c, f8, c8;
  DEV Fold of(u32 word, int step) {
    u32 both, less;
    if constexpr (NIBBLES) {
      both = factors_of_nibbles(word, step % 2);
      less = half_mul(both, step % 2 ? 0xcc00dc00 : 0xd400e400);  // * -256, * -16; or as below
    } else {
      both = factors_of_scales(word), less = half_mul(both, 0xd400e400);  // * -1024, * -64
    }
    return {twice_low(both), twice_low(less), twice_high(both), twice_high(less)};
  }
};
// One k16 step out of STEPS, codes of 4 or 2 bits as fp16: exact integers q * f.
template <int STEPS> DEV void decode(const u32* words, int step, const Fold& fold, u32 (&a)[4]) {
  if constexpr (BITS == 2) {  // as int2_to_half
    const u32 w = words[step / 2], x = w >> 8;
    const bool upper = step % 2;
    const u32 mask = upper ? 0x000c000c : 0x00030003, mask8 = mask << 4, one = upper ? 0x5c005c00 : 0x64006400,
              one8 = upper ? 0x4c004c00 : 0x54005400;
    a[0] = half_fma(and_or(w, mask, one), fold.f, fold.c);
    a[1] = half_fma(and_or(w, mask8, one8), fold.f8, fold.c8);
    a[2] = half_fma(and_or(x, mask, one), fold.f, fold.c);
    a[3] = half_fma(and_or(x, mask8, one8), fold.f8, fold.c8);
    return;
  }
  const u32 w = words[step], x = w >> 8;
  a[0] = half_fma(and_or(w, 0x000f000f, 0x64006400), fold.f, fold.c);
  a[1] = half_fma(and_or(w, 0x00f000f0, 0x54005400), fold.f8, fold.c8);
  a[2] = half_fma(and_or(x, 0x000f000f, 0x64006400), fold.f, fold.c);
  a[3] = half_fma(and_or(x, 0x00f000f0, 0x54005400), fold.f8, fold.c8);
}

// One k16 step out of STEPS: exact integers q - z.
template <int STEPS> DEV void decode(const u32* words, int step, Zeros z, u32 (&a)[4]) {
  if constexpr (BITS == 2 && !BF16) {  // in place, without a detour
    int2_to_half(words[step / 2], step % 2, z.r, z.r8, a);
    return;
  }
  u32 q[FIELD / 4];
  words_of_step<STEPS>(words, step, q);
  if constexpr (FIELD == 4) {
    if constexpr (BF16)
      int4_to_bf16(q[0], z.r, z.r8, a);
    else
      int4_to_half(q[0], z.r, z.r8, a);
  } else {
    u32 lo[2], hi[2];
    if constexpr (BF16) {
      int8_to_bf16(q[0], lo);
      int8_to_bf16(q[1], hi);
    } else {
      int8_to_half(q[0], z.r, z.r8, lo);
      int8_to_half(q[1], z.r, z.r8, hi);
    }
    a[0] = lo[0];
    a[1] = lo[1];
    a[2] = hi[0];
    a[3] = hi[1];
    if constexpr (BF16 && (MIDDLE != 128 || FROM_ZERO)) {
      a[0] = bf16_add(a[0], z.r);
      a[1] = bf16_add(a[1], z.r8);
      a[2] = bf16_add(a[2], z.r);
      a[3] = bf16_add(a[3], z.r8);
    }
  }
}
// Times the scales of rows R (low half of s) and R+8.
DEV void scale_fragment(u32 s, u32 (&a)[4]) {
  const u32 r = __byte_perm(s, s, 0x1010), r8 = __byte_perm(s, s, 0x3232);
  if constexpr (BF16) {
    a[0] = bf16_mul(a[0], r);
    a[1] = bf16_mul(a[1], r8);
    a[2] = bf16_mul(a[2], r);
    a[3] = bf16_mul(a[3], r8);
  } else {
    a[0] = half_mul(a[0], r);
    a[1] = half_mul(a[1], r8);
    a[2] = half_mul(a[2], r);
    a[3] = half_mul(a[3], r8);
  }
}
// Scales of rows R and R+8.
DEV float low(u32 v) { return SCALE_BF16 ? bf16_low(v) : half_low(v); }
DEV float high(u32 v) { return SCALE_BF16 ? bf16_high(v) : half_high(v); }
DEV float first_row(RowPair pair) { return SCALE_F32 ? __uint_as_float(pair.v[0]) : low(pair.v[0]); }
DEV float second_row(RowPair pair) { return SCALE_F32 ? __uint_as_float(pair.v[SCALE_F32]) : high(pair.v[0]); }
DEV TwoFloats both_rows(RowPair pair) { return {first_row(pair), second_row(pair)}; }
// What is taken off the codes of a group with offsets, and the offsets that are left: w = s * (q - z) + (o + s * z),
// where z is the code that comes nearest to 0. Both terms together are at most three times the weight, so that sums of
// them lose no more than sums of weights would; s * q and o alone may be far greater than it.
struct Centred {
  Zeros z;
  TwoFloats o;
  DEV Centred of(RowPair scales, RowPair offsets) {
    Centred centred;
    const u32 z = code_of_zero(first_row(scales), first_row(offsets), centred.o.r),
              z8 = code_of_zero(second_row(scales), second_row(offsets), centred.o.r8);
    centred.z = zeros_of(z, z8);
    return centred;
  }
  // Any whole number would be right, so that the division may be rounded, and a scale of 0 takes 0 off.
  DEV u32 code_of_zero(float s, float o, float& left) {
    constexpr float MOST = (1 << BITS) - 1;
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(s * -MOST));
    const float shifted = fmaf(__saturatef(o * inverse), MOST, 0x1p23f);
    left = fmaf(shifted - 0x1p23f, s, o);
    return __float_as_uint(shifted) - 0x4b000000;
  }
};
// sum += offset * sum of x, of a strip; `sums`: where those of the tokens of a group begin.
template <int HALF> DEV void add_offsets(float (&sum)[HALF], TwoFloats offsets, u32 sums) {
  const float o = offsets.r, o8 = offsets.r8;
#pragma unroll
  for (int n = 0; n < HALF / 4; n++) {
    u32 x[2];
    load_shared(x, sums + n * 32 + threadIdx.x % 4 * 8);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[4 * n + i] = fmaf((i & 2) ? o8 : o, __uint_as_float(x[i & 1]), sum[4 * n + i]);
  }
}
DEV u32 pair(float l, float h) { return BF16 ? bf16_pair(l, h) : half_pair(l, h); }
DEV float first_of(u32 v) { return BF16 ? bf16_low(v) : half_low(v); }
DEV float second_of(u32 v) { return BF16 ? bf16_high(v) : half_high(v); }
// Codes of rows R and R+8 times their scales, and their offsets if there are any, in fp32; then rounded.
DEV void scale_fragment(TwoFloats scales, TwoFloats offsets, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float s = i % 2 ? scales.r8 : scales.r, o = i % 2 ? offsets.r8 : offsets.r;
    const float first = first_of(a[i]), second = second_of(a[i]);
    a[i] = W_OFFSET ? pair(fmaf(first, s, o), fmaf(second, s, o)) : pair(first * s, second * s);
  }
}

// Sums of 8 columns of a token, and of its neighbours' with it: of runs of RUN threads.  x: boxes of 64 columns, BOX
// bytes each, in rows of 128 bytes whose pieces of 16 are XORed with the row.
template <int RUN, int BOX> DEV float sum_of_run(u32 x, int token, int piece) {
  u32 v[4];
  load_shared(v, x + piece / 8 * BOX + token * 128 + (((piece ^ token) & 7) << 4));
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += first_of(v[i]) + second_of(v[i]);
#pragma unroll
  for (int apart = 1; apart < RUN; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  return sum;
}
