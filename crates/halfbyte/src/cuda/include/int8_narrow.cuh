// Windows on images for int8_mma whose groups have no multiple of 16 channels: x comes in pieces of PIECE bytes, 8, 4,
// 2 or 1, the most that divide the channels of a group.
//
//   a pixel is whole groups, and x begins at a multiple of PIECE: every piece is aligned, and of one position
//   a thread brings the same 16 columns of every 32nd pixel, each of their 16 / PIECE pieces for itself: one may be in
//       the padding where the next is not
//   8 and 4 bytes are copied (cp.async); 2 and 1 are loaded, put together to words, and wait in registers while a stage
//       is read; so do all on sm_75
// Columns past the last position, and what lies in the padding, are the zero point of x.  Of W only rows of outputs
// that there are come to shared memory: the others stay what they were, and their sums are not stored.
// After the constants and the arguments of the kernel, whose names these are.
#pragma once
#include "requantize.cuh"
#include "windows.cuh"

constexpr bool HELD = PIECE < 4 || __CUDA_ARCH__ < 800;  // pieces wait in registers

static_assert(PIECE == 8 || PIECE == 4 || PIECE == 2 || PIECE == 1, "bytes that are read at once");

// What a thread brings of x.
struct Pixels {
  // The group's first channel of the pixel under position (0, 0), in bytes from the first of x on, modulo 2^32: it may
  // lie outside of the image.
  u32 at[COPIES_X];
  int row[COPIES_X], column[COPIES_X];  // of that pixel
  int ky, kx, channel;  // of the thread's first piece
  int down, across, deep;  // from there to 128 columns on: rows, columns and channels
  DEV Pixels of(const Arguments& g, int first) {
    const Windows& v = g.windows;
    Pixels p;
    const int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COPIES_X; i++) {
      const int token = first + t / 8 + i * (THREADS / 8), at = token < g.m ? token : 0;
      const Window window = Window::of(v, at, 0);
      p.row[i] = token < g.m ? window.row : -0x40000000;  // outside of every image
      p.column[i] = window.column;
      const u32 pixel = ((u32)window.image * g.height + window.row) * g.width + window.column;
      p.at[i] = pixel * g.pixel + blockIdx.y * v.channels;
    }
    const int k = t % 8 * 16, position = k / v.channels, further = 128 / v.channels;
    p.ky = position / v.kernel.columns;
    p.kx = position - p.ky * v.kernel.columns;
    p.channel = k - position * v.channels;
    p.down = further / v.kernel.columns;
    p.across = further - p.down * v.kernel.columns;
    p.deep = 128 - further * v.channels;
    return p;
  }
  // To the same pieces of the next 128 columns.
  __device__ __forceinline__ void advance(const Windows& v) {
    ky += down;
    kx += across;
    channel += deep;
    if (channel >= v.channels) {
      channel -= v.channels;
      kx++;
    }
    if (kx >= v.kernel.columns) {
      kx -= v.kernel.columns;
      ky++;
    }
  }
};

// Sets the e-th piece of 16 bytes to that at an address, or to bytes of `fill` where not `there`. Pieces are set in
// their order.
DEV void set_piece(u32 (&v)[4], int e, const u8* from, bool there, u32 fill) {
  if constexpr (PIECE == 8) {
    uint2 piece = make_uint2(fill, fill);
    if (there) piece = *(const uint2*)from;
    v[2 * e] = piece.x;
    v[2 * e + 1] = piece.y;
  } else if constexpr (PIECE == 4) {
    v[e] = there ? *(const u32*)from : fill;
  } else {
    constexpr int IN_WORD = PIECE < 4 ? 4 / PIECE : 1;
    u32 piece = fill & (PIECE == 2 ? 0xffff : 0xff);
    if (there) piece = PIECE == 2 ? *(const u16*)from : *from;
    const int word = e / IN_WORD, place = e % IN_WORD;
    v[word] = place ? v[word] + (piece << (8 * PIECE * place)) : piece;
  }
}

// A thread's copies to a stage.
struct Stage : PendingCopies<COPIES_W> {
  u32 held[COPIES_X][4];  // pieces that wait, 16 bytes of each pixel
  u32 room;  // where those of the first pixel go
  bool holds;
  // outputs: that are left of the group, from the first row of W on.
  __device__ __forceinline__ void start(const Arguments& g, u32 to, const u8* w, int outputs, const Pixels& p) {
    const Windows& v = g.windows;
    const int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COPIES_W; i++) {
      const int strip = i / (ATOM / 16 / THREADS), at = i * THREADS + t;
      start_if(i, to + at * 16, w + (u64)strip * g.steps * ATOM + (at * 16 - strip * ATOM), at / 8 < outputs);
    }
    room = to + STAGE_W + place_in_rows(t / 8, t % 8);
    holds = true;
    const u32 fill = (u32)(g.x_zero & 255) * 0x01010101u;
    int ky = p.ky, kx = p.kx, channel = p.channel;
#pragma unroll
    for (int e = 0; e < 16 / PIECE; e++) {
      const int down = ky * v.dilation.rows, across = kx * v.dilation.columns;
      const u32 offset = ((u32)down * g.width + across) * g.pixel + channel;
#pragma unroll
      for (int i = 0; i < COPIES_X; i++) {
        const bool inside =
            ky < v.kernel.rows && (u32)(p.row[i] + down) < (u32)g.height && (u32)(p.column[i] + across) < (u32)g.width;
        const u8* from = g.x + (p.at[i] + offset);
        if constexpr (HELD)
          set_piece(held[i], e, from, inside, fill);
        else
          copy_piece(room + i * (THREADS / 8 * 128) + e * PIECE, from, inside, fill);
      }
      channel += PIECE;
      if (channel == v.channels) {
        channel = 0;
        if (++kx == v.kernel.columns) {
          kx = 0;
          ky++;
        }
      }
    }
  }
  DEV void copy_piece(u32 dst, const u8* from, bool there, u32 fill) {
#if __CUDA_ARCH__ >= 800
    if (there) {
      copy_few<PIECE>(dst, from);
    } else {
      store_shared(dst, fill);
      if constexpr (PIECE == 8) store_shared(dst + 4, fill);
    }
#endif
  }
  __device__ __forceinline__ void skip_all() {
#pragma unroll
    for (int i = 0; i < COPIES_W; i++) skip(i);
    holds = false;
  }
  __device__ __forceinline__ void finish() {
    if (HELD && holds)
#pragma unroll
      for (int i = 0; i < COPIES_X; i++)
        store_shared(room + i * (THREADS / 8 * 128), make_uint4(held[i][0], held[i][1], held[i][2], held[i][3]));
    PendingCopies::finish();
  }
};
