// Tiles of attention_mma.cu, and of attention_wgmma.cu: how queries, keys and values lie in shared memory, and what
// weights times values add to sums.
#pragma once
#include "ampere.cuh"
#include "attention.cuh"
#include "warp.cuh"

// Warps of half a block; each has queries of its own.
constexpr int STRIPS = 4;
constexpr int THREADS = 2 * 32 * STRIPS;

// All bits of each half of a pair that is infinite or NaN: a carry into the sign if all bits of the exponent are set.
template <bool BF16> DEV u32 not_finite(u32 pair) {
  constexpr u32 EXPONENT = BF16 ? 0x7f807f80 : 0x7c007c00, LAST = BF16 ? 0x00800080 : 0x04000400;
  return ((((pair & EXPONENT) + LAST) >> 15) & 0x00010001) * 0xffff;
}

// Rows of HEAD halves in shared memory, in chunks of 16 bytes: the same chunk of 8 rows lies in all banks.
template <int HEAD> struct Rows {
  static constexpr int CHUNKS = HEAD / 8;
  static constexpr bool SWIZZLED = HEAD % 64 == 0;  // else rows are an odd number of chunks apart
  static constexpr int BYTES = 16 * (SWIZZLED ? CHUNKS : CHUNKS | 1);
  DEV u32 at(u32 row, u32 chunk) { return row * BYTES + 16 * (SWIZZLED ? chunk ^ (row & 7) : chunk); }
  // `chunks` (an even number) behind the address of chunk 0 or 1.
  DEV u32 behind(u32 address, u32 chunks) {
    return SWIZZLED ? (address ^ (16 * (chunks & 6))) + 16 * (chunks & ~7u) : address + 16 * chunks;
  }
};

// Keys or values: of codes half as many bytes.
template <int HEAD, KvType KV> using KvRows = Rows<KV == CODES ? HEAD / 2 : HEAD>;

// HEAD: size of a head, rounded up to 16, with codes to 32.  TILES: times 16 queries are a warp's, QUERIES a block's;
// KEYS: positions of a tile.
template <int HEAD, KvType KV, bool CHANGED> struct Shape {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // 64 KB of shared memory
  static constexpr int TILES = HEAD <= 64 ? 2 : 1, KEYS = HEAD <= 64 ? 32 : 16;
#else
  static constexpr int TILES = HEAD <= 128 ? 2 : 1;
#endif
  static constexpr int QUERIES = 16 * TILES * STRIPS;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ / 300 == 3)
  static constexpr int KEYS = HEAD <= (KV == CODES ? 96 : 128) ? 64 : HEAD > 128 && CHANGED ? 16 : 32;
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // 99 KB of shared memory
  static constexpr int KEYS = HEAD <= 128 ? 32 : 16;
#endif
  static constexpr u32 PART = KEYS * KvRows<HEAD, KV>::BYTES;  // keys of a stage, or values
  static constexpr u32 STAGE = 2 * PART + (KV == CODES ? 8 * KEYS : 0);  // with the scales of keys, and of values
  static constexpr u32 PITCH = HEAD + 8;  // of sums
  // In shared memory: queries and the ring, later sums; for each query the factor of its scores, its position and the
  // slope of its head.
  static constexpr u32 RING = QUERIES * Rows<HEAD>::BYTES, RING_END = RING + 4 * STAGE, SUMS = 4 * QUERIES * PITCH,
                       FACTORS = RING_END > SUMS ? RING_END : SUMS, POSITIONS = FACTORS + 4 * QUERIES,
                       SLOPES = POSITIONS + 4 * QUERIES;
};

// Beside codes elements of queries and of sums lie so: of each 16 the even ones, then the odd ones.
DEV u32 place_of(u32 element) { return element / 16 * 16 + element % 2 * 8 + element % 16 / 2; }
DEV u32 element_at(u32 place) { return place / 16 * 16 + place % 8 * 2 + place % 16 / 8; }

// A query at `from`, or zeros, rounded to the type that keys have in products, to shared memory: at(c) is where chunk c
// of 8 elements lies. Of a half the largest element is brought between 2^14 and 2^15 before, by a power of two. The
// result is what its products are multiplied by to be scores in powers of two: above 0, so that minus infinity stays
// what it is.
template <int HEAD, KvType KV, class At>
DEV float put_query(const Params& p, const float* from, bool given, u32 lane, const At& at) {
  constexpr bool BF16 = KV == BFLOATS;
  constexpr int PAIRS = (HEAD + 63) / 64;  // of a lane
  float x[PAIRS][2], most = 0;
#pragma unroll
  for (int c = 0; c < PAIRS; c++) {
    const u32 place = 64 * c + 2 * lane, d = KV == CODES ? element_at(place) : place;
    const bool there = given && d < p.head_size;
    x[c][0] = there ? from[d] : 0;
    x[c][1] = there ? from[d + (KV == CODES ? 2 : 1)] : 0;
    most = fmaxf(most, fmaxf(fabsf(x[c][0]), fabsf(x[c][1])));
  }
  // That power of two, and its inverse.
  const u32 exponent = min(max(268 - int(__float_as_uint(warp_max(most)) >> 23), 1), 253);
  const float up = BF16 ? 1 : __uint_as_float(exponent << 23),
              down = BF16 ? 1 : __uint_as_float((254 - exponent) << 23);
  const float factor = p.scale < 0 ? -up : up, of_scores = fabsf(p.scale) * LOG2_E * down;
#pragma unroll
  for (int c = 0; c < PAIRS; c++) {
    const u32 d = 64 * c + 2 * lane;
    if (d < HEAD) store_shared(at(d / 8) + 2 * (d % 8), pair<BF16>(x[c][0] * factor, x[c][1] * factor));
  }
  return of_scores < 0x1p-126f ? 0x1p-126f : of_scores;
}

// The weights of a tile's k-th 16 positions as the products take them.
template <bool BF16, int COUNT> DEV void weights_of(u32 (&a)[4], const float (&weights)[COUNT][4], int k) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* two = &weights[2 * k + i / 2][i % 2 * 2];
    a[i] = pair<BF16>(two[0], two[1]);
  }
}

// sums += weights * values of a tile, each rounded to a half.  PARTLY: where some query may not see all of it; values
// that are not finite are taken as 0, and the result says whether this lane had one.
template <bool PARTLY, bool BF16, int HEAD, int KEYS, int TILES>
DEV bool add_values(const float (&weights)[TILES][KEYS / 8][4], u32 values, float (&sums)[TILES][HEAD / 8][4]) {
  u32 a[KEYS / 16][TILES][4], refused = 0;
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
    for (int m = 0; m < TILES; m++) weights_of<BF16>(a[k][m], weights[m], k);
  }
#pragma unroll
  for (int n = 0; n < HEAD / 16; n++) {
    const u32 at = Rows<HEAD>::behind(values, 2 * n);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      u32 v[4];
      load_transposed(v, at + k * (16 * Rows<HEAD>::BYTES));
#pragma unroll
      for (int i = 0; PARTLY && i < 4; i++) {
        refused |= not_finite<BF16>(v[i]);
        v[i] &= ~not_finite<BF16>(v[i]);
      }
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        mma_sync<BF16>(sums[m][2 * n], a[k][m], v[0], v[1]);
        mma_sync<BF16>(sums[m][2 * n + 1], a[k][m], v[2], v[3]);
      }
    }
  }
  return refused != 0;
}

// The same of codes, weights times scales rounded to a bf16.
template <int HEAD, int KEYS, int TILES>
DEV void add_codes(const float (&weights)[TILES][KEYS / 8][4], u32 values, float (&sums)[TILES][HEAD / 8][4]) {
  u32 a[KEYS / 16][TILES][4];
#pragma unroll
  for (int k = 0; k < KEYS / 16; k++) {
#pragma unroll
    for (int m = 0; m < TILES; m++) weights_of<true>(a[k][m], weights[m], k);
  }
#pragma unroll
  for (int n = 0; n < HEAD / 32; n++) {
    const u32 at = Rows<HEAD / 2>::behind(values, 2 * n);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
      u32 v[4];
      load_transposed(v, at + k * (16 * Rows<HEAD / 2>::BYTES));
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 first[2], second[2];  // positions, and those 8 further
        halves_of_codes<true>(v[2 * i], first);
        halves_of_codes<true>(v[2 * i + 1], second);
#pragma unroll
        for (int m = 0; m < TILES; m++) {
          mma_sync<true>(sums[m][4 * n + 2 * i], a[k][m], first[0], second[0]);
          mma_sync<true>(sums[m][4 * n + 2 * i + 1], a[k][m], first[1], second[1]);
        }
      }
    }
  }
}
