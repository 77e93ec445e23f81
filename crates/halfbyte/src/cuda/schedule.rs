//! Who computes what in a GEMM on tiles: whole tiles in rounds, split-K, or stream-K.
//!
//! y is cut into tiles, and a tile's reduction into units of [`STEP`](crate::layout::cuda_wna16::STEP) columns. Blocks first take
//! whole tiles in rounds. Tiles that are left are cut: into as many pieces each (split-K), or so that every block has a run of
//! units of the same length, which begins and ends anywhere (stream-K). Blocks that share a tile leave sums in the workspace, and
//! the last one, which a counter tells, adds them up. How a shape is cut is a matter of each kernel's configuration.

use super::Workspace;
use super::parameters::parameters;

/// Counters that a cut tile has: one for each of two warpgroups.
const COUNTERS: usize = 2;

/// Tiles that may be cut: for each of them the workspace has counters.
pub(in crate::cuda) const MOST_CUT: usize = Workspace::COUNTER_BYTES / 4 / COUNTERS;

/// Who computes what: tiles in whole rounds, then those that are left, cut evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Units of a tile along k.
    pub steps: usize,
    /// Tiles along n.
    pub rows: usize,
    /// Tiles along m.
    pub columns: usize,
    /// Rounds of whole tiles.
    pub waves: usize,
    /// Blocks, or clusters of them.
    pub workers: usize,
    /// Workers that share the cut tiles.
    pub sharers: usize,
    /// Cut tiles, each of `steps` units.
    pub cut: usize,
}

impl Schedule {
    /// Whether the kernels' numbers of 32 bits hold this.
    pub fn fits(&self) -> bool {
        let units = |tiles: u128| tiles * self.steps as u128;
        let all = units(self.rows as u128 * self.columns as u128);
        all < 1 << 31 && units(self.cut as u128) * (self.sharers as u128) < 1 << 32 && self.cut <= MOST_CUT
    }
}

parameters! {
    /// The schedule as sources have it.
    #[derive(Debug)]
    pub(in crate::cuda) struct Cuts {
        steps: i32,
        rows: i32,
        columns: i32,
        waves: i32,
        workers: i32,
        sharers: i32,
        first: i32,
        units: i32,
    }
}

impl From<Schedule> for Cuts {
    /// Of a schedule that fits.
    fn from(Schedule { steps, rows, columns, waves, workers, sharers, cut }: Schedule) -> Self {
        Self {
            steps: steps as i32,
            rows: rows as i32,
            columns: columns as i32,
            waves: waves as i32,
            workers: workers as i32,
            sharers: sharers as i32,
            first: (waves * workers) as i32,
            units: (cut * steps) as i32,
        }
    }
}
