// Dynamic quantisation: rows of activations as codes of 8 bits, with a scale (and an offset) for each group of columns:
// what wNa8 products multiply.
//
//   quantize_rows.cuh has the algorithm; here are the columns of a matrix, in any order.
#include "quantize_rows.cuh"

#include "ampere.cuh"

// As `Params` in quantize_activations.rs.
struct Params {
  const void* x;  // [m][k]
  const u32* order;  // [k]: the column that each place is for, or null
  Target to;
  FloatType x_type;
  u32 aligned;  // rows of x begin at multiples of 16 bytes
};

// A row of x.
struct Matrix {
  const Params& p;
  u64 row;
  // Columns from c on; gives how many there are.
  __device__ __forceinline__ int operator()(u64 c, float (&v)[COLUMNS]) const {
    const int there = columns_there(p.to, c);
    const u64 from = row * p.to.k;
    if (there == COLUMNS && p.aligned && !p.order) {
      float half[2][8];
      load_eight(p.x, from + c, p.x_type, half[0]);
      load_eight(p.x, from + c + 8, p.x_type, half[1]);
#pragma unroll
      for (int i = 0; i < COLUMNS; i++) v[i] = half[i / 8][i % 8];
    } else {
#pragma unroll
      for (int i = 0; i < COLUMNS; i++)
        v[i] = i < there ? load_float(p.x, from + (p.order ? p.order[c + i] : c + i), p.x_type) : 0.f;
    }
    return there;
  }
};

template <int THREADS, bool OFFSET>
__global__ void __launch_bounds__(THREADS == WHOLE ? MOST : BLOCK) quantize_activations(const Params p) {
  // Only now the product may start: beside the one before, its blocks would land two on some multiprocessors and none
  // on others.
  dependency_wait();
  launch_dependents();
  const u32 row = row_of_thread(p.to);
  quantize_row<THREADS, OFFSET>(p.to, row, blockIdx.y, Matrix{p, row});
}
