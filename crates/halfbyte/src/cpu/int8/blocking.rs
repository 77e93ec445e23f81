//! How a product of bytes is cut: rows of x into blocks that fit a cache, outputs into chunks for tasks.

use crate::cpu::Cpu;
use crate::layout::cpu_int8::CpuInt8;
use std::ops::Range;

/// Bytes of x that a task goes over again and again: they share a level-2 cache with the weights of a tile.
const X_BLOCK_BYTES: usize = 128 << 10;

/// Rows that a block has at least, where there are so many: each weight that is fetched meets all of them.
const BLOCK_ROWS: usize = 24;

/// Bytes of weights that a task goes over: all blocks meet them while they are in the last cache.
const CHUNK_BYTES: usize = 2 << 20;

/// Tasks that a thread gets if the product gives so many: what one thread is late by is made up by the others.
pub(super) const TASKS_PER_THREAD: usize = 4;

/// Part `i` of `len` elements cut into `parts` even ones.
pub(super) fn even(len: usize, parts: usize, i: usize) -> Range<usize> {
    i * len / parts..(i + 1) * len / parts
}

/// The tasks of a product: blocks of rows × chunks of panels of outputs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tasks {
    m: usize,
    blocks: usize,
    panels: usize,
    chunk: usize,
}

impl Tasks {
    /// Blocks of rows, each with all outputs.
    pub fn of_rows(m: usize, w: &CpuInt8, threads: usize) -> Self {
        // With where each of them begins.
        let most = (X_BLOCK_BYTES / (w.k() + size_of::<usize>())).max(BLOCK_ROWS);
        let wanted = if threads > 1 { threads * TASKS_PER_THREAD } else { 1 };
        let blocks = m.div_ceil(most).max(wanted.min(m / BLOCK_ROWS)).max(1);
        Self { m, blocks, panels: w.panels(), chunk: w.panels() }
    }

    /// The same, with the outputs in chunks of whole tiles of `width` panels: rows that lie ready can be read by many.
    pub fn shared(m: usize, w: &CpuInt8, width: usize, threads: usize) -> Self {
        let rows = Self::of_rows(m, w, threads);
        let wanted = if threads > 1 { (threads * TASKS_PER_THREAD).div_ceil(rows.blocks) } else { 1 };
        let cached = CHUNK_BYTES / w.panel_len().max(1) / width * width;
        let chunk = w.panels().div_ceil(wanted).next_multiple_of(width).min(cached.max(width));
        Self { chunk, ..rows }
    }

    /// Number of tasks.
    pub fn count(&self) -> usize {
        self.blocks * self.panels.div_ceil(self.chunk)
    }

    /// Rows and panels of task `i`. Tasks that share outputs follow each other.
    pub fn get(&self, i: usize) -> (Range<usize>, Range<usize>) {
        let (chunk, block) = (i / self.blocks, i % self.blocks);
        (even(self.m, self.blocks, block), chunk * self.chunk..((chunk + 1) * self.chunk).min(self.panels))
    }

    /// Runs a function on the rows and panels of every task.
    pub fn run(&self, cpu: &Cpu, task: impl Fn(Range<usize>, Range<usize>) + Sync) {
        cpu.threads().run(self.count(), &|i| {
            let (rows, panels) = self.get(i);
            task(rows, panels);
        });
    }
}
