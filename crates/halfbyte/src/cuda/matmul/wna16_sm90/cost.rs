//! What a product is expected to take in a configuration: a model of the machine, from which the choice follows.
//!
//! ```text
//! time  =  the slowest of { blocks at work, the second-level cache's port, memory }  +  joining sums  +  writing y  +  what is not hidden
//! ```
//!
//! A block's work is units of 128 columns of its tile: tensor cores, instructions that convert and scale, and what both wait for. Numbers
//! are those of Hopper's kernels, fitted to times of every candidate for products drawn at random on an H100
//! (`docs/decisions/0026-choice-by-cost.md`); bandwidth, multiprocessors, clock and cache are the device's.

use super::config::{Config, Schedule};
use crate::cuda::Caps;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};

/// Of a unit of a strip, in clocks of a multiprocessor: `wgmma` for each token; converting codes; scaling them, or the sums of a group: of
/// each group and of each token of it; zero points of a group.
const WGMMA: f64 = 4.29;
const CONVERT: f64 = 105.0;
const SCALE_WEIGHTS: f64 = 55.3;
const SCALE_SUMS: [f64; 2] = [2.06, 0.842];
const ZEROS: f64 = 13.5;
/// Tensor cores and other instructions run beside each other but for this: powers of both are added, and the root is taken.
const BESIDE: f64 = 1.18;
/// The same with `mma.sync`: converting, products of each token, scaling a group, multiples of halves of a group.
const SYNC: [f64; 4] = [54.0, 9.47, 4.6, 5.89];
/// Codes of 5 and 6 bits, and those of 3 with `mma.sync`, take so many times as long to convert; those of 3 with `wgmma`, and those of tables, by
/// their instructions; and bytes with `mma.sync`.
const PLANES: f64 = 1.87;
const TABLES: f64 = 2.2;
const PLANES_OF_3: f64 = 1.39;
const SYNC_BYTES: f64 = 1.11;
/// What a block waits for in each unit: where W and x share a ring; with `mma.sync`; in two sets of warps; tokens of a tile.
const JOINT_WAIT: f64 = 66.0;
const SYNC_WAIT: f64 = 140.0;
const SETS_WAIT: f64 = 0.655;
const TOKENS_WAIT: [(usize, f64); 7] =
    [(8, 67.5), (16, 64.6), (24, 55.1), (32, 26.6), (48, 84.0), (64, 85.7), (256, 31.0)];
/// Microseconds from asking for a unit of weights until it is there.
const LATENCY: f64 = 1.01;
/// Bytes a clock that a multiprocessor gets from the second-level cache, and the share of it that x may take to stay there.
const PORT: f64 = 45.3;
const KEPT: f64 = 0.8;
/// Of the bandwidth on the data sheet; how sharply the slowest of three decides.
const BANDWIDTH: f64 = 1.0;
const SLOWEST: f64 = 2.65;
/// Microseconds, of a tile and for each 16 × 64 sums of it: a cluster joins its sums; blocks that share a cut tile do, where few units hide
/// it, of all and of each further block; y is written.
const JOIN: [f64; 2] = [1.21, 0.096];
const CUT: [f64; 3] = [4.0, 0.0775, 0.0313];
const HIDES: f64 = 0.407;
const WRITE: f64 = 0.072;
/// Microseconds where the next kernel may start at once and takes room; where nothing is fetched for it; where its blocks find none
/// before this one's end, with one and with two a multiprocessor, and from which share of them on.
const STARTS: f64 = 0.161;
const NOT_FETCHED: f64 = 0.134;
const NO_ROOM: [f64; 2] = [0.66, 1.07];
const ROOM: f64 = 0.8;
/// Two blocks of clusters a multiprocessor, though all would find one of their own: so much more of its time.
const CROWDED: f64 = 1.935;
/// Kilohertz of the device that the numbers of clocks are of.
const CLOCK_KHZ: u32 = 1_980_000;

/// Clusters of a size that run at a time: processors have parts of 14 to 18 multiprocessors, which no cluster leaves.
fn clusters(split: usize, blocks: usize, multiprocessors: usize) -> usize {
    let share = match split {
        ..=2 => 1.0,
        3..=4 => 0.91,
        _ => 0.85,
    };
    ((multiprocessors * blocks) as f64 / split as f64 * share).max(1.0) as usize
}

/// What is done at a time, and how often.
struct Work {
    /// Units of a block, one after the other.
    units: f64,
    /// Tiles of a block, cut ones by their parts.
    tiles: f64,
    /// Rounds of clusters.
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
            let launched = tiles.saturating_mul(config.split);
            let rounds = tiles.div_ceil(clusters(config.split, config.blocks, multiprocessors)) as f64;
            return Self {
                units: rounds * steps.div_ceil(config.split) as f64,
                tiles: rounds,
                rounds,
                launched: launched as f64,
                beside: launched.div_ceil(multiprocessors).min(config.blocks) as f64,
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
}

/// Clocks of a unit that keep a multiprocessor busy, and those that a block waits besides.
fn clocks(config: Config, atom: Atom) -> [f64; 2] {
    let (tokens, strips, groups) = (config.tokens as f64, config.tile_strips() as f64, atom.groups() as f64);
    let planes = match (atom.bits, config.wgmma) {
        _ if atom.table.is_some() => TABLES,
        (3, true) => PLANES_OF_3,
        (3 | 5 | 6, _) => PLANES,
        _ => 1.0,
    };
    let zeros = if atom.zero { groups * ZEROS } else { 0.0 };
    let sets = if config.sets > 1 { SETS_WAIT } else { 1.0 };
    if !config.wgmma {
        let [convert, product, scale, multiples] = SYNC;
        let convert = convert * if atom.bits == 8 { SYNC_BYTES } else { planes };
        let multiples = if atom.is_wide() { groups * multiples } else { 0.0 };
        let busy = strips * (convert + multiples + zeros + product * tokens + groups * scale);
        return [busy, SYNC_WAIT * sets];
    }
    let scale = match config.early {
        true => SCALE_WEIGHTS,
        false => groups * (SCALE_SUMS[0] + SCALE_SUMS[1] * tokens),
    };
    let others = strips * (CONVERT * planes + zeros + scale);
    let busy = ((WGMMA * tokens * strips).powf(BESIDE) + others.powf(BESIDE)).powf(BESIDE.recip());
    let of_tokens = TOKENS_WAIT.iter().find(|(of, _)| *of == config.tokens).map_or(0.0, |(_, wait)| *wait);
    [busy, (of_tokens + if config.joint() { JOINT_WAIT } else { 0.0 }) * sets]
}

/// A configuration, and what a unit of weights of a form takes in it.
#[derive(Debug)]
pub(super) struct Timed {
    pub config: Config,
    atom: Atom,
    clocks: [f64; 2],
}

impl Timed {
    pub fn new(config: Config, atom: Atom) -> Self {
        Self { config, atom, clocks: clocks(config, atom) }
    }

    /// Microseconds that a product is expected to take, of many after each other.
    pub fn microseconds(&self, [m, n, k]: [usize; 3], caps: &Caps) -> f64 {
        let Self { config, atom, clocks: [busy, waits] } = *self;
        let known = if caps.memory_mb_per_s == 0 || caps.clock_khz == 0 { &Caps::H200 } else { caps };
        let multiprocessors = caps.multiprocessors.max(1) as usize;
        let (clock, bandwidth) = (f64::from(known.clock_khz) * 1e-3, f64::from(known.memory_mb_per_s));
        let work = Work::of(config, [m, n, k], multiprocessors);
        let beside = match config.split > 1 && config.blocks == 2 {
            true => ((work.launched / multiprocessors as f64).max(1.0) * CROWDED).min(2.0),
            false => work.beside,
        };
        let unit = ((busy * beside).max(busy + waits) / clock).max(LATENCY / config.stages_w as f64);
        let (strips, tokens) = (config.tile_strips(), config.tokens);
        let bytes = (strips * atom.bytes() + tokens * 2 * STEP) as f64;
        let port = work.units * beside * bytes / (PORT * clock);
        let of_x = 2.0 * m as f64 * k as f64;
        let again = work.scattered && of_x > KEPT * f64::from(known.l2_bytes);
        let of_x = if again { of_x * n.div_ceil(strips * STRIP) as f64 } else { 0.0 };
        let of_w = n.div_ceil(STRIP) as f64 * k.div_ceil(STEP) as f64 * atom.bytes() as f64;
        let memory = (of_w + of_x) / (BANDWIDTH * bandwidth);
        let slowest = [work.units * unit, port, memory].map(|time| time.powf(SLOWEST)).iter().sum::<f64>();
        let size = (tokens * strips) as f64 / 16.0;
        let joining = if config.split > 1 { work.rounds * (JOIN[0] + JOIN[1] * size) } else { 0.0 };
        let cut = match work.sharers {
            0.0 => 0.0,
            sharers => CUT[0] * work.units / (work.units + HIDES) + size * (CUT[1] + CUT[2] * sharers),
        };
        let share = work.launched / (multiprocessors * config.blocks) as f64;
        let no_room = NO_ROOM[config.blocks.min(2) - 1] * ((share - ROOM) / (1.0 - ROOM)).clamp(0.0, 1.0);
        let next =
            if config.trigger == 0 { STARTS } else { 0.0 } + if config.prefetch == 0 { NOT_FETCHED } else { 0.0 };
        let scaled = f64::from(CLOCK_KHZ) / f64::from(known.clock_khz);
        slowest.powf(SLOWEST.recip()) + scaled * (joining + cut + no_room + next + work.tiles * WRITE * size)
    }
}
