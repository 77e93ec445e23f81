//! How a product is cut: rows of x into panels as high as a register tile, panels into blocks that fit a cache, outputs
//! into chunks for tasks.

use crate::cpu::isa::per_isa;
use crate::layout::Lines;
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of x that a task goes over again and again: half of a level-2 cache of 1 MiB, less the weights' share.
const X_BLOCK_BYTES: usize = 384 << 10;

/// Panels of 16 outputs that a task takes at most where there are many rows.
const CHUNK_PANELS: usize = 16;

/// Panels that a task takes at least where there is one panel of rows, and tasks that a thread gets at most then: with fewer of them all
/// wait for the slowest thread.
const LEAST_PANELS: usize = 4;
const TASKS_OF_THREAD: usize = 8;

/// Spans, or groups, whose products are added up by themselves before that is added to a sum: in one long sum of like terms roundings add up
/// too, and it would leave the bound. The first of each run has a number that is a multiple of this one. With 32 a row took 9 % longer.
pub(super) const SPANS_TOGETHER: usize = 128;

per_isa! {
    /// Adds a run's sums to others, and leaves zeros for the next run.
    pub(super) fn take(run: &mut [f32], c: &mut [f32]) {
        for (c, sum) in c.iter_mut().zip(run) {
            *c += *sum;
            *sum = 0.0;
        }
    }
}

/// Rows of x, cut evenly into panels of one height; the last rows of a panel may be filler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowPanels {
    m: usize,
    /// Number of panels.
    pub count: usize,
    /// Rows that a panel has room for.
    pub height: usize,
}

impl RowPanels {
    /// Cuts `m` rows for tiles that come in the given heights, ascending, so that little is filler and tiles are few:
    /// what a tile does besides multiplying counts as one more row.
    pub fn new(m: usize, heights: &[usize]) -> Self {
        let cost = |height: usize| m.div_ceil(height) * (height + 1);
        let height = heights.iter().copied().rev().min_by_key(|&height| cost(height)).unwrap_or(1);
        Self { m, count: m.div_ceil(height), height }
    }

    /// Rows of panel `p`.
    pub fn rows(&self, p: usize) -> Range<usize> {
        p * self.m / self.count..(p + 1) * self.m / self.count
    }
}

/// The tasks of a product: chunks of outputs × blocks of row panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tasks {
    row_panels: usize,
    block: usize,
    blocks: usize,
    panels: usize,
    chunk: usize,
    /// Number of tasks.
    pub count: usize,
}

impl Tasks {
    /// Cuts a product whose panel of x takes `x_panel_bytes` at a time and whose tiles span `tile_panels` panels of
    /// outputs, for a team of `threads`.
    pub fn new(rows: RowPanels, x_panel_bytes: usize, panels: usize, tile_panels: usize, threads: usize) -> Self {
        let block = (X_BLOCK_BYTES / x_panel_bytes.max(1)).clamp(1, rows.count.max(1));
        let blocks = rows.count.div_ceil(block);
        // Even blocks: 9 panels in blocks of at most 8 are 5 and 4, not 8 and 1.
        let block = rows.count.div_ceil(blocks.max(1));
        // One panel of rows reads each weight once: a few even chunks a thread, or one if there are few outputs. More
        // rows: chunks whose sums stay in the cache.
        let (wanted, most) = match rows.count {
            0 | 1 => (threads * (panels / (threads * LEAST_PANELS)).clamp(1, TASKS_OF_THREAD), usize::MAX),
            _ => ((threads * 4).div_ceil(blocks.max(1)), CHUNK_PANELS.max(tile_panels)),
        };
        let chunk = panels.div_ceil(wanted.max(1)).next_multiple_of(tile_panels).min(most);
        let count = blocks * panels.div_ceil(chunk);
        Self { row_panels: rows.count, block, blocks, panels, chunk, count }
    }

    /// Row panels and output panels of task `i`. Tasks that share outputs follow each other.
    pub fn get(&self, i: usize) -> (Range<usize>, Range<usize>) {
        let (chunk, block) = (i / self.blocks, i % self.blocks);
        (
            block * self.block..((block + 1) * self.block).min(self.row_panels),
            chunk * self.chunk..((chunk + 1) * self.chunk).min(self.panels),
        )
    }
}

/// The panels of a task in tiles of `wide` panels, and the rest one by one.
pub(super) struct Steps {
    pub panels: Range<usize>,
    pub wide: usize,
}

impl Steps {
    pub fn count(&self) -> usize {
        self.panels.len() / self.wide + self.panels.len() % self.wide
    }

    /// First panel and number of panels of a step.
    pub fn get(&self, step: usize) -> (usize, usize) {
        let full = self.panels.len() / self.wide;
        if step < full {
            (self.panels.start + step * self.wide, self.wide)
        } else {
            (self.panels.start + full * self.wide + step - full, 1)
        }
    }
}

thread_local! {
    static BUFFERS: RefCell<[Lines; 2]> = RefCell::default();
}

/// Hands two f32 buffers of this thread, of at least the given lengths, to `task`. Their contents are arbitrary.
pub(super) fn with_buffers<R>(lens: [usize; 2], task: impl FnOnce(&mut [f32], &mut [f32]) -> R) -> R {
    BUFFERS.with_borrow_mut(|buffers| {
        let [a, b] = buffers;
        a.ensure(lens[0] * 4);
        b.ensure(lens[1] * 4);
        task(&mut a.as_mut_slice()[..lens[0]], &mut b.as_mut_slice()[..lens[1]])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_and_output_is_cut_out_once() {
        for m in [1, 2, 7, 8, 12, 13, 16, 17, 63, 64, 65, 512] {
            let rows = RowPanels::new(m, &[1, 2, 4, 6, 8, 10, 12]);
            let mut next = 0;
            for p in 0..rows.count {
                let range = rows.rows(p);
                assert_eq!(range.start, next);
                assert!(!range.is_empty() && range.len() <= rows.height, "{rows:?} {range:?}");
                next = range.end;
            }
            assert_eq!(next, m);
            for panels in [1, 3, 24, 896] {
                for threads in [1, 2, 7] {
                    let tasks = Tasks::new(rows, 12 * 4096, panels, 2, threads);
                    let mut seen = vec![0; rows.count * panels];
                    for i in 0..tasks.count {
                        let (r, o) = tasks.get(i);
                        for p in r {
                            o.clone().for_each(|q| seen[p * panels + q] += 1);
                        }
                    }
                    assert!(seen.iter().all(|&s| s == 1), "{tasks:?}");
                }
            }
        }
    }
}
