//! What a product is expected to take in a configuration: a model of the machine, from which the choice follows.
//!
//! ```text
//! time  =  the slowest of { blocks at work, the second-level cache's port, memory }  +  joining sums  +  writing y  +  what is not hidden
//! ```
//!
//! A block's work is units of 128 columns of its tile: tensor cores, instructions that convert and scale, and what both wait for. Numbers
//! are those of Hopper's kernels, fitted to times of every candidate for products drawn at random: of up to 32 rows, where blocks share a
//! multiprocessor and wait for weights (`few_rows`), on an H100 and an H200, of more on an H100 (`many_rows`;
//! `docs/decisions/0026-choice-by-cost.md`). Bandwidth, multiprocessors, clock and cache are the device's.

mod few_rows;
#[cfg(test)]
mod fit;
mod many_rows;

use super::config::{Config, LEAST_APART, Schedule};
use crate::cuda::Caps;
use crate::cuda::tiled::Form;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};

/// Codes of 5 and 6 bits, and those of 3 with `mma.sync`, take so many times as long to convert; those of 3 with `wgmma`, and those of tables, by
/// their instructions.
const PLANES: f64 = 1.87;
const TABLES: f64 = 2.2;
const PLANES_OF_3: f64 = 1.39;

/// Clusters of a size that run at a time, with so many blocks a multiprocessor: of those that there are slots for a part, as processors have
/// parts of 14 to 18 multiprocessors, which no cluster leaves. Seen from where times jump.
fn clusters(split: usize, blocks: usize, multiprocessors: usize) -> usize {
    let share = match split {
        ..=2 => 1.0,
        4 => 0.91,
        _ => 0.88,
    };
    ((multiprocessors * blocks) as f64 / split as f64 * share).max(1.0) as usize
}

/// What is done at a time, and how often.
struct Work {
    /// Units of a block, one after the other.
    units: f64,
    /// Tiles of a block, cut ones by their parts.
    tiles: f64,
    /// Rounds of clusters; 0: blocks work for themselves.
    rounds: f64,
    /// Blocks that were launched, and those at work on a multiprocessor.
    launched: f64,
    beside: f64,
    /// Blocks that share a cut tile; 0: none is cut.
    sharers: f64,
    /// Whether x is read by all rows of tiles at places that lie apart.
    scattered: bool,
}

impl Work {
    fn of(config: Config, shape: [usize; 3], multiprocessors: usize) -> Self {
        let Schedule { steps, rows, columns, waves, workers, sharers, cut } =
            Schedule::new(config, shape, multiprocessors);
        let tiles = rows.saturating_mul(columns);
        if config.split > 1 {
            let room = |blocks| clusters(config.split, blocks, multiprocessors);
            let rounds = tiles.div_ceil(room(config.blocks)) as f64;
            return Self {
                units: rounds * steps.div_ceil(config.split) as f64,
                tiles: rounds,
                rounds,
                launched: tiles.saturating_mul(config.split) as f64,
                beside: (1..config.blocks).find(|&blocks| tiles <= room(blocks)).unwrap_or(config.blocks) as f64,
                sharers: 0.0,
                scattered: false,
            };
        }
        let left = if cut > 0 { cut.saturating_mul(steps).div_ceil(sharers.max(1)) } else { 0 };
        let is_cut = cut > 0 && sharers != cut;
        let parts = (left as f64 / steps as f64 + f64::from(u8::from(is_cut))).max(1.0);
        Self {
            units: waves as f64 * steps as f64 + left as f64,
            tiles: waves as f64 + if left > 0 { parts } else { 0.0 },
            rounds: 0.0,
            launched: workers as f64,
            beside: 1.0,
            sharers: if is_cut { sharers as f64 / cut as f64 } else { 0.0 },
            scattered: is_cut && waves == 0,
        }
    }

    /// How far this kernel takes the slots of the next one's blocks: from 0, where it takes the share `room` of all of them, to 1.
    fn without_room(&self, config: Config, machine: &Machine, room: f64) -> f64 {
        let taken = self.launched / (machine.multiprocessors * config.blocks as f64);
        ((taken - room) / (1.0 - room)).clamp(0.0, 1.0)
    }
}

/// How many times as long codes take to convert as whole ones of 4 bits.
fn planes(config: Config, atom: Atom) -> f64 {
    match (atom.bits, config.wgmma) {
        _ if atom.table.is_some() => TABLES,
        (3, true) => PLANES_OF_3,
        (3 | 5 | 6, _) => PLANES,
        _ => 1.0,
    }
}

/// Bytes of a unit, and of all weights.
fn bytes(config: Config, atom: Atom, [_, n, k]: [usize; 3]) -> [f64; 2] {
    let unit = config.tile_strips() * atom.bytes() + config.tokens * 2 * STEP;
    [unit as f64, n.div_ceil(STRIP) as f64 * k.div_ceil(STEP) as f64 * atom.bytes() as f64]
}

/// The slowest of some times, of which none hides the others wholly.
fn slowest(times: [f64; 3], sharply: f64) -> f64 {
    times.map(|time| time.powf(sharply)).iter().sum::<f64>().powf(sharply.recip())
}

/// A configuration, and what a unit of weights of a form takes in it.
#[derive(Debug)]
pub(super) struct Timed {
    pub config: Config,
    atom: Atom,
    /// Clocks of a unit that keep a multiprocessor busy, and those that a block waits besides.
    clocks: [f64; 2],
}

impl Timed {
    pub fn new(config: Config, form: &Form) -> Self {
        let (atom, few) = (form.atom, config.tokens < LEAST_APART);
        let clocks = if few {
            few_rows::clocks(&few_rows::HOPPER, config, atom)
        } else {
            many_rows::clocks(&many_rows::HOPPER, config, form)
        };
        Self { config, atom, clocks }
    }

    /// Microseconds that a product is expected to take, of many after each other.
    pub fn microseconds(&self, shape: [usize; 3], caps: &Caps) -> f64 {
        let work = Work::of(self.config, shape, caps.multiprocessors.max(1) as usize);
        let machine = Machine::of(caps);
        match self.config.tokens < LEAST_APART {
            true => few_rows::microseconds(&few_rows::HOPPER, self, &work, shape, &machine),
            false => many_rows::microseconds(&many_rows::HOPPER, self, &work, shape, &machine),
        }
    }
}

/// Kilohertz of the devices that were timed.
const CLOCK_KHZ: u32 = 1_980_000;

/// A device: clocks and bytes a microsecond, bytes of the second-level cache.
struct Machine {
    multiprocessors: f64,
    clock: f64,
    /// How many times as long as on the devices that were timed joins and launches take, by its clock.
    slower: f64,
    bandwidth: f64,
    cache: f64,
}

impl Machine {
    /// That of a device; of one that does not say so much an H200's.
    fn of(caps: &Caps) -> Self {
        let known = caps.or_known();
        Self {
            multiprocessors: f64::from(caps.multiprocessors.max(1)),
            clock: f64::from(known.clock_khz) * 1e-3,
            slower: f64::from(CLOCK_KHZ) / f64::from(known.clock_khz),
            bandwidth: f64::from(known.memory_mb_per_s),
            cache: f64::from(known.l2_bytes),
        }
    }
}
