// Grouped GEMM: products with several weights of one shape and format in one launch, each with rows of its own. Rows
// lie weight by weight, in columns of tiles that have rows of one weight each; the list of columns is in memory, where
// an earlier kernel has left it (nn/assign.cu), so that a launch that is recorded serves every choice of weights.
#pragma once
#include "ampere.cuh"

#ifdef HB_GROUPED
constexpr bool GROUPED = HB_GROUPED;
#else
constexpr bool GROUPED = false;
#endif

// Rows [row, end) of y, products of one weight with the rows from `x` on of x.
struct Column {
  u32 weight, row, end, x;
};

// As `GroupedOperands` in grouped.rs.
struct GroupedOperands {
  const u64* atoms;  // addresses of packed weights
  const u64* rows_of_scales;  // GROUP 0: those of scales (and zero points) of their rows
  const u64* biases;  // those of their biases, or null
  const Column* list;
  const u32* count;  // of the list
  u32 listed;  // the list was complete before the kernel ahead of this one let it begin
  u32 padding;  // of this struct
};

// Before the list is read.
DEV void wait_for_list(const GroupedOperands& g) {
  if (!g.listed) dependency_wait();
}
DEV u32 columns_of(const GroupedOperands& g) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(g.count));
  return v;
}
DEV Column column_of(const GroupedOperands& g, int i) {
  Column c;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.weight), "=r"(c.row), "=r"(c.end), "=r"(c.x)
               : "l"(g.list + i));
  return c;
}
