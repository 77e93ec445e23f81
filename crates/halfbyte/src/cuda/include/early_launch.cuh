// When a small kernel between two large ones lets the next one start.
#pragma once
#include "ampere.cuh"

// Rows up to which LayerNorms and gates do not start the next kernel early: 1 and 4 were slower by it, 16 faster.
constexpr u32 FEW_ROWS = 8;

// Waits for the kernel before this one, and lets the next one start: early, as soon as all blocks of this one run. Then
// its blocks fill their rings where others end. That is good where each has a multiprocessor to itself, and bad where
// two fit, since some multiprocessors then get two and others none.
DEV void wait_and_launch(bool early) {
  if (early) launch_dependents();
  dependency_wait();
  if (!early) launch_dependents();
}
