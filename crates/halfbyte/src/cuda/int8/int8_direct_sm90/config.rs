//! Which form the kernel takes for a shape: a pure function of the numbers.
//!
//! ```text
//! atom  = max(products at 4096 a clock, LATENCY over the atoms in flight)
//! block = max(atoms of a block · atom, bytes of W and x at 32 a clock) + outputs at 12 a clock
//! time  = blocks of a multiprocessor · block + rounds of blocks that share one · START
//! ```

use super::grid::Grid;
use crate::cuda::sources::Instance;
use crate::layout::cuda_int8::{STEP, STRIP};

/// What the kernel is compiled with, and how it is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Slots a warpgroup, of which there are two.
    pub slots: usize,
    /// Strips of 64 outputs that a block computes.
    pub strips: usize,
    /// Whether a block has a multiprocessor for itself.
    pub alone: bool,
    /// Blocks with neighbouring slots that bring W for each other.
    pub cluster: usize,
}

/// Slots a warpgroup, the most first.
pub(super) const SLOTS: [usize; 4] = [128, 112, 96, 64];

/// Warpgroups that multiply, and all threads.
pub(super) const WARPGROUPS: usize = 2;
pub(super) const THREADS: usize = WARPGROUPS * 128 + 32;

/// Shared memory that a block may have alone, and as one of two.
const ALONE: usize = 232_448;
const SHARED: usize = 115_712;

/// Stages of the ring: at most, and fewer only where there are no more atoms.
const MOST_STAGES: usize = 16;
const LEAST_STAGES: usize = 3;

/// Clocks from the request of an atom to its arrival.
const LATENCY: usize = 1500;

/// Clocks that a block takes beside its products and outputs.
const START: usize = 3000;

/// Multiply-adds, bytes from the second-level cache, and outputs, that a multiprocessor has in a clock.
const PRODUCTS: usize = 4096;
const BYTES: usize = 32;
const OUTPUTS: usize = 12;

/// Where things lie in shared memory, behind the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shared {
    pub stages: usize,
    pub staging: usize,
    pub x: usize,
    pub plane: usize,
    pub offsets: usize,
    pub outputs: usize,
    pub pixels: usize,
    pub barriers: usize,
    pub bytes: usize,
}

/// Every form of a grid and a number of outputs.
pub(super) fn configs(grid: &Grid, n: usize) -> Vec<Config> {
    let all = n.div_ceil(STRIP);
    let mut strips = vec![1, 2, 4, all];
    strips.retain(|&strips| strips <= all);
    strips.sort_unstable();
    strips.dedup();
    // Squares were never faster in narrower tiles.
    let slots = if grid.fold > 0 { &SLOTS[..1] } else { &SLOTS };
    let forms = slots.iter().flat_map(|&slots| strips.iter().map(move |&strips| (slots, strips)));
    let forms = forms.flat_map(|(slots, strips)| [false, true].map(|alone| (slots, strips, alone)));
    let forms = forms.flat_map(|(slots, strips, alone)| [1, 2].map(|cluster| Config { slots, strips, alone, cluster }));
    forms.filter(|config| config.shared(grid).is_some()).collect()
}

/// The configuration for a grid and a number of outputs; none if no block holds what it sees.
pub(super) fn config(grid: &Grid, n: usize, multiprocessors: usize) -> Option<Config> {
    let time = |config: &Config| {
        let [tiles, rows] = config.blocks(grid, n);
        let side_by_side = if config.alone { 1 } else { 2 };
        let each = tiles.saturating_mul(rows).div_ceil(multiprocessors.max(1));
        let atoms = config.strips * grid.k().div_ceil(STEP);
        let stages = config.shared(grid).map_or(0, |shared| shared.stages);
        let ahead = if stages < atoms { stages.saturating_sub(1).max(1) } else { atoms };
        let products = atoms * (STEP * STRIP * config.tile() / PRODUCTS).max(LATENCY / ahead.max(1));
        let bytes = (atoms * STEP * STRIP / config.cluster + (config.tile() + grid.reach()) * grid.channels) / BYTES;
        let block = products.max(bytes) + config.strips * STRIP * config.tile() / OUTPUTS;
        each.saturating_mul(block) + each.div_ceil(side_by_side) * START
    };
    configs(grid, n).into_iter().min_by_key(time)
}

impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { slots, strips, alone, cluster } = self;
        let shared = if *alone { "alone" } else { "one of two" };
        write!(f, "2 × {slots} slots, {strips} strips, {shared}, clusters of {cluster}")
    }
}

impl Config {
    /// Slots of a block's outputs.
    pub fn tile(self) -> usize {
        WARPGROUPS * self.slots
    }

    /// Blocks along the slots and along the outputs.
    pub(super) fn blocks(self, grid: &Grid, n: usize) -> [usize; 2] {
        let tiles = grid.slots().unwrap_or(usize::MAX).div_ceil(self.tile());
        [tiles.div_ceil(self.cluster).saturating_mul(self.cluster), n.div_ceil(STRIP).div_ceil(self.strips)]
    }

    /// What lies where; none if it does not fit.
    pub(super) fn shared(self, grid: &Grid) -> Option<Shared> {
        let steps = grid.k().div_ceil(STEP);
        let seen = self.tile().checked_add(grid.reach())?;
        let chunks = if grid.channels.is_multiple_of(STEP) { grid.channels / STEP } else { 1 };
        // An odd number of slots, so that pieces of a pixel lie in different banks.
        let plane = (seen | 1).checked_mul(16)?;
        let parts = [
            self.tile() * STRIP,
            plane.checked_mul(grid.channels / 16)?,
            steps * 16,
            self.tile() * 4,
            if grid.fold == 0 { seen.next_multiple_of(2) * 4 } else { 0 },
        ];
        let fixed = parts.iter().try_fold(chunks * 8, |sum, &part| part.checked_add(sum))?;
        let room = if self.alone { ALONE } else { SHARED };
        let stages = (room.checked_sub(fixed)? / (STEP * STRIP + 16)).min(MOST_STAGES).min(self.strips * steps);
        if stages < LEAST_STAGES.min(self.strips * steps) {
            return None;
        }
        let staging = stages * STEP * STRIP;
        let [x, offsets, outputs, pixels, barriers] =
            std::array::from_fn(|i| staging + parts[..=i].iter().sum::<usize>());
        Some(Shared {
            stages,
            staging,
            x,
            plane,
            offsets,
            outputs,
            pixels,
            barriers,
            bytes: barriers + 8 * (2 * stages + chunks),
        })
    }

    /// What is compiled.
    pub(super) fn instance(self, fold: usize, unsigned: bool) -> Instance {
        let numbers = [("NT", self.slots), ("FOLD", fold), ("UNSIGNED", unsigned.into()), ("THREADS", THREADS)];
        let defines = numbers.iter().map(|(name, value)| format!("HB_{name}={value}"));
        Instance::new(&super::SOURCE, "int8_direct_sm90").with(defines)
    }
}
