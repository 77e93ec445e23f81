//! Which form the kernel takes for a shape: a pure function of the numbers.
//!
//! Of all forms the one of the least time is taken, by a model whose constants were fitted to measurements on an H200:
//!
//! ```text
//! product = atoms of a block · products of an atom at 4096 a clock
//! output  = outputs of a block at OUTPUTS a clock
//! busy    = max(product, bytes of W and x at BYTES a clock) + output             a block's share of its multiprocessor
//! latency = bytes of x at X_BYTES a clock + max(product, atoms · LATENCY / atoms in flight) + output
//! time    = rounds · (START + max(busy of the blocks side by side, latency))
//! ```
//!
//! Where two blocks fit on a multiprocessor and there are fewer than multiprocessors, some get two all the same.

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

/// Clocks of a round beside its products and outputs.
const START: usize = 1500;

/// Clocks from the request of an atom to its arrival.
const LATENCY: usize = 800;

/// The part of a time by which it is longer where some multiprocessors get two blocks and others none.
const UNEVEN: usize = 6;

/// Multiply-adds, bytes from the second-level cache, bytes of x before the first product, and outputs, of a multiprocessor in a clock.
const PRODUCTS: usize = 4096;
const BYTES: usize = 24;
const X_BYTES: usize = 20;
const OUTPUTS: usize = 8;

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
    let forms = forms.flat_map(|(slots, strips)| [false, true].map(|alone| Config { slots, strips, alone }));
    let fits = |config: &Config| config.shared(grid).is_some_and(|shared| !config.alone || shared.bytes > SHARED);
    forms.filter(fits).collect()
}

/// The configuration for a grid and a number of outputs, with its time in clocks; none if no block holds what it sees.
pub(super) fn config(grid: &Grid, n: usize, multiprocessors: usize) -> Option<(Config, usize)> {
    let time = |config: Config| {
        let Some(shared) = config.shared(grid) else { return usize::MAX };
        let [tiles, rows] = config.blocks(grid, n);
        let (blocks, side_by_side) = (tiles.saturating_mul(rows), if shared.bytes > SHARED { 1 } else { 2 });
        let x = (config.tile() + grid.reach()) * grid.channels;
        let atoms = config.strips * grid.k().div_ceil(STEP);
        let in_flight = if shared.stages < atoms { shared.stages.saturating_sub(1).max(1) } else { atoms };
        let product = atoms * STEP * STRIP * config.tile() / PRODUCTS;
        let output = config.strips * STRIP * config.tile() / OUTPUTS;
        let busy = product.max((atoms * STEP * STRIP + x) / BYTES) + output;
        let latency = x / X_BYTES + product.max(atoms * LATENCY / in_flight.max(1)) + output;
        let together = blocks.div_ceil(multiprocessors.max(1)).min(side_by_side);
        let rounds = blocks.div_ceil(multiprocessors.max(1) * side_by_side);
        let time = rounds.saturating_mul(START + (together * busy).max(latency));
        if side_by_side > 1 && blocks < multiprocessors { time.saturating_add(time / UNEVEN) } else { time }
    };
    configs(grid, n).into_iter().map(|config| (config, time(config))).min_by_key(|(_, time)| *time)
}

impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { slots, strips, alone } = self;
        write!(f, "2 × {slots} slots, {strips} strips, {}", if *alone { "alone" } else { "one of two" })
    }
}

impl Config {
    /// Slots of a block's outputs.
    pub fn tile(self) -> usize {
        WARPGROUPS * self.slots
    }

    /// Blocks along the slots and along the outputs.
    pub(super) fn blocks(self, grid: &Grid, n: usize) -> [usize; 2] {
        [grid.slots().unwrap_or(usize::MAX).div_ceil(self.tile()), n.div_ceil(STRIP).div_ceil(self.strips)]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::{Conv2dShape, Geometry};

    fn grid(ci: usize, kernel: usize, stride: usize, size: usize) -> Grid {
        let geometry = Geometry { stride: [stride; 2], padding: [kernel / 2; 4], ..Geometry::new(ci, 64, [kernel; 2]) };
        Grid::new(&Conv2dShape::new(geometry, 32, [size; 2]).unwrap()).unwrap()
    }

    #[test]
    fn the_layers_of_resnet_50() {
        let of = |grid: Grid, n| {
            let (config, _) = config(&grid, n, 132).unwrap();
            let [tiles, rows] = config.blocks(&grid, n);
            (config.slots, config.strips, config.alone, tiles * rows)
        };
        assert_eq!(of(grid(3, 7, 2, 224), 64), (128, 1, false, 1625));
        assert_eq!(of(grid(64, 1, 1, 56), 256), (96, 4, false, 523));
        assert_eq!(of(grid(64, 3, 1, 56), 64), (112, 1, false, 465));
        assert_eq!(of(grid(128, 3, 1, 28), 128), (112, 1, false, 242));
        assert_eq!(of(grid(256, 3, 1, 14), 256), (112, 1, false, 132));
        assert_eq!(of(grid(512, 3, 1, 7), 512), (64, 1, true, 128));
    }

    #[test]
    fn what_lies_in_shared_memory_follows_each_other_and_fits() {
        for grid in [grid(32, 5, 1, 9), grid(64, 1, 1, 56), grid(96, 3, 1, 30), grid(512, 3, 1, 7), grid(4, 7, 2, 224)]
        {
            let configs = configs(&grid, 512);
            assert!(!configs.is_empty(), "{grid:?}");
            for config in configs {
                let shared = config.shared(&grid).unwrap();
                let seen = config.tile() + grid.reach();
                let parts = [
                    (0, shared.stages * STEP * STRIP),
                    (shared.staging, config.tile() * STRIP),
                    (shared.x, grid.channels / 16 * shared.plane),
                    (shared.offsets, grid.k().div_ceil(STEP) * 16),
                    (shared.outputs, config.tile() * 4),
                    (shared.pixels, if grid.fold == 0 { seen * 4 } else { 0 }),
                    (shared.barriers, 16 * shared.stages + 8),
                    (shared.bytes, 0),
                ];
                for pair in parts.windows(2) {
                    assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{config}: {parts:?}");
                }
                assert!(shared.plane >= seen * 16 && shared.plane % 32 == 16, "{config}");
                assert!([shared.staging, shared.x, shared.offsets].iter().all(|at| at % 16 == 0), "{config}");
                assert!(
                    shared.barriers % 8 == 0 && shared.bytes <= if config.alone { ALONE } else { SHARED },
                    "{config}"
                );
            }
        }
    }
}
