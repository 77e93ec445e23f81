//! Which form the kernel takes for a shape, and who computes what: pure functions of the numbers.
//!
//! The choice follows what was measured on an H200: `docs/decisions/0007-products-from-sm80.md`.

use crate::cuda::Caps;
use crate::cuda::sources::Instance;
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

/// What the kernel is compiled with, besides the types; `include/wna16_sm80.cuh` says what each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Tokens a warpgroup.
    pub tokens: usize,
    /// Warpgroups, of 4 warps each.
    pub warpgroups: usize,
    /// Warpgroups side by side along the tokens.
    pub columns: usize,
    /// Strips a warpgroup.
    pub strips: usize,
    /// Columns of W a stage.
    pub step: usize,
    /// Stages in flight.
    pub stages: usize,
    /// Blocks that a multiprocessor has registers for.
    pub blocks: usize,
}

/// Up to 8 tokens, in tiles of 256 rows.
const FEW: Config = Config { tokens: 8, warpgroups: 2, columns: 1, strips: 2, step: 128, stages: 0, blocks: 2 };

/// Shared memory of a block that shares a multiprocessor with another, at least; where there is less, it is alone.
const LEAST_SHARED_BYTES: usize = 80_000;

/// Stages that were found to help.
const MOST_STAGES: usize = 6;

/// Units that a worker must have for tiles of 256 rows to pay.
const FEW_UNITS: usize = 8;

/// Pieces that the columns of a tile are cut into at most where the cuts must not depend on m, and units of each at least.
const MOST_PIECES: usize = 16;
const LEAST_UNITS: usize = 4;

/// Blocks that the pieces of one column of tiles should be at least, if there are as many: two for each multiprocessor of the
/// larger devices. A constant, so that the same product has the same bits on all of them.
const PIECES: usize = 264;

/// Units whose time a block needs beside its own.
const BLOCK_UNITS: usize = 3;

/// Rows of x that a product takes at once where the cuts must not depend on m, so that the parts stay few.
pub const ROWS_AT_ONCE: usize = 64;

/// The configuration for a shape on a device.
pub fn config(atom: Atom, [m, n, k]: [usize; 3], out: Float, caps: &Caps) -> Config {
    let (strips, steps) = (n.div_ceil(STRIP).max(1), k.div_ceil(STEP).max(1));
    let little = strips.div_ceil(4) * steps < FEW_UNITS * 2 * caps.multiprocessors as usize;
    let strips = if little { 1 } else { 2 };
    let config = match m {
        ..=8 => Config { strips, ..FEW },
        9..=16 => Config { tokens: 16, strips, ..FEW },
        17..=32 => Config { tokens: 32, strips, blocks: 3 - strips, ..FEW },
        33..=64 => Config { tokens: 64, strips, blocks: 1, ..FEW },
        _ => Config { tokens: 64, columns: 2, blocks: 1, ..FEW },
    };
    config.fitted(atom, out, caps)
}

/// Every configuration for a form of atoms on a device.
pub fn all(atom: Atom, out: Float, caps: &Caps) -> Vec<Config> {
    let forms = [
        (8, 1, 1, 2),
        (8, 1, 2, 2),
        (16, 1, 1, 2),
        (16, 1, 2, 2),
        (32, 1, 1, 2),
        (32, 1, 2, 1),
        (64, 1, 1, 1),
        (64, 1, 2, 1),
        (64, 2, 2, 1),
    ];
    let of =
        |(tokens, columns, strips, blocks)| Config { tokens, columns, strips, blocks, ..FEW }.fitted(atom, out, caps);
    forms.into_iter().map(of).collect()
}

impl Config {
    /// With stages of as many columns, and as many stages, as a device has room for.
    fn fitted(mut self, atom: Atom, out: Float, caps: &Caps) -> Self {
        // A multiprocessor has 1 KB more than a block may have, and takes 1 KB more than a block asks for.
        let of_two = ((caps.shared_bytes as usize + 1024) / 2).saturating_sub(1024);
        let most = if self.blocks == 2 && of_two >= LEAST_SHARED_BYTES { of_two } else { caps.shared_bytes as usize };
        let room = most.saturating_sub(self.staging(out) + 16);
        self.step = STEP;
        // A stage's codes are in registers: 32 words of two strips of 8 bits would be too many.
        let few_words = self.strips * atom.bits as usize <= 8;
        self.step = if few_words && 4 * self.stage_bytes(atom) <= room { STEP } else { STEP / 2 };
        self.stages = (room / self.stage_bytes(atom)).clamp(2, MOST_STAGES);
        self
    }

    /// Strips of a tile.
    pub fn tile_strips(self) -> usize {
        self.warpgroups / self.columns * self.strips
    }

    /// Tokens of a tile.
    pub fn tile_tokens(self) -> usize {
        self.columns * self.tokens
    }

    /// Threads of a block.
    pub fn threads(self) -> usize {
        self.warpgroups * 128
    }

    fn stage_bytes(self, atom: Atom) -> usize {
        let codes = STRIP * self.step * atom.bits as usize / 8;
        let groups = if atom.group == 0 { 0 } else { (self.step / atom.group).max(1) };
        let params = groups * if atom.zero { 3 * STRIP } else { 2 * STRIP };
        self.tile_strips() * (codes + params) + self.tile_tokens() * self.step * 2
    }

    fn staging(self, out: Float) -> usize {
        if self.tokens < 64 || out == Float::F32 { 0 } else { self.warpgroups * 32 * 128 }
    }

    /// Shared memory of a block.
    pub fn shared_bytes(self, atom: Atom, out: Float) -> usize {
        self.stages * self.stage_bytes(atom) + self.staging(out) + 16
    }

    /// Blocks that a device has room for at once.
    pub fn workers(self, atom: Atom, out: Float, caps: &Caps) -> usize {
        let blocks = (caps.shared_bytes as usize + 1024) / (self.shared_bytes(atom, out) + 1024);
        caps.multiprocessors.max(1) as usize * blocks.clamp(1, self.blocks)
    }

    /// What is compiled.
    pub fn instance(self, atom: Atom, [x, out]: [Float; 2], activation: Activation) -> Instance {
        let (function, low, high) = match activation {
            Activation::None => (0, 0.0, 0.0),
            Activation::Relu => (1, 0.0, f32::INFINITY),
            Activation::Relu6 => (1, 0.0, 6.0),
            Activation::Clamp(low, high) => (1, low, high),
            Activation::Gelu => (2, 0.0, 0.0),
            Activation::GeluTanh => (3, 0.0, 0.0),
            Activation::Silu => (4, 0.0, 0.0),
        };
        let numbers = [
            ("BITS", atom.bits as usize),
            ("BF16", (x == Float::BF16).into()),
            ("SCALE_BF16", (atom.scale == Float::BF16).into()),
            ("GROUP", atom.group),
            ("ZERO", atom.zero.into()),
            ("OUT", super::number(out)),
            ("ACTIVATION", function),
            ("NT", self.tokens),
            ("WARPGROUPS", self.warpgroups),
            ("COLUMNS", self.columns),
            ("STRIPS", self.strips),
            ("STEP", self.step),
            ("STAGES", self.stages),
            ("BLOCKS", self.blocks),
            ("THREADS", self.threads()),
            ("SHARED_BYTES", self.shared_bytes(atom, out)),
        ];
        let floats =
            [("LOW", low), ("HIGH", high)].map(|(name, v)| format!("HB_{name}=__uint_as_float({:#x}u)", v.to_bits()));
        let defines = numbers.iter().map(|(name, value)| format!("HB_{name}={value}")).chain(floats);
        Instance::new(&super::SOURCE, "wna16_sm80").with(defines)
    }
}

/// Who computes what: tiles in whole rounds, then those that are left, cut evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Atoms along k.
    pub steps: usize,
    /// Tiles along n.
    pub rows: usize,
    /// Tiles along m.
    pub columns: usize,
    /// Rounds of whole tiles.
    pub waves: usize,
    /// Blocks.
    pub workers: usize,
    /// Blocks that share the cut tiles.
    pub sharers: usize,
    /// Cut tiles, each of `steps` units.
    pub cut: usize,
}

impl Schedule {
    /// Of a shape on as many blocks as a device has room for, each of which takes as much: whole tiles in rounds, then runs of
    /// units that begin and end anywhere in the tiles that are left.
    pub fn even(config: Config, shape: [usize; 3], workers: usize) -> Self {
        let mut schedule = Self::whole(config, shape);
        let tiles = schedule.cut;
        schedule.workers = workers.max(1);
        schedule.waves = tiles / schedule.workers;
        // Nearly as many whole rounds for all: nothing is cut.
        let rounds = tiles.div_ceil(schedule.workers);
        let even = tiles.div_ceil(rounds);
        if tiles == even * rounds && even * 100 >= schedule.workers * 93 {
            (schedule.workers, schedule.waves) = (even, rounds);
        }
        schedule.cut = tiles - schedule.waves * schedule.workers;
        schedule.sharers = schedule.workers.min(schedule.cut.saturating_mul(schedule.steps));
        if schedule.waves == 0 {
            schedule.workers = schedule.sharers;
        }
        schedule
    }

    /// Of a shape whose tiles are each cut into so many pieces, a block for each: where the cuts are follows from k and their
    /// number alone.
    pub fn pieces(config: Config, shape: [usize; 3], pieces: usize) -> Self {
        let mut schedule = Self::whole(config, shape);
        if pieces <= 1 {
            (schedule.waves, schedule.cut) = (1, 0);
            return schedule;
        }
        schedule.workers = schedule.cut * pieces;
        schedule.sharers = schedule.workers;
        schedule
    }

    /// A block a tile, and all of them to be cut.
    fn whole(config: Config, [m, n, k]: [usize; 3]) -> Self {
        let (rows, columns) = (n.div_ceil(STRIP).div_ceil(config.tile_strips()), m.div_ceil(config.tile_tokens()));
        let tiles = rows * columns;
        Self { steps: k.div_ceil(STEP), rows, columns, waves: 0, workers: tiles, sharers: 0, cut: tiles }
    }

    /// Whether the kernel's numbers of 32 bits hold this.
    pub fn fits(&self) -> bool {
        let units = |tiles: u128| tiles * self.steps as u128;
        let all = units(self.rows as u128 * self.columns as u128);
        all < 1 << 31 && units(self.cut as u128) * (self.sharers as u128) < 1 << 32 && self.cut <= super::MOST_CUT
    }

    /// Sums of cut tiles that are left in memory, in bytes.
    pub fn parts_bytes(&self, config: Config) -> usize {
        let cut = self.cut > 0;
        if cut { 2 * self.workers * config.tile_strips() * STRIP * config.tile_tokens() * 4 } else { 0 }
    }
}

/// Pieces of every tile that n and k alone tell: with them a row of y has the same bits whatever m is, whichever configuration
/// multiplies, and on every device.
pub fn invariant_pieces([_, n, k]: [usize; 3]) -> usize {
    let (tiles, steps) = (n.div_ceil(4 * STRIP).max(1), k.div_ceil(STEP));
    (PIECES / tiles).min(steps / LEAST_UNITS).clamp(1, MOST_PIECES)
}

/// Pieces of every tile that take least: blocks come in rounds of as many as there is room for, and each needs some units'
/// time to begin and to end.
fn pieces(config: Config, [m, n, k]: [usize; 3], workers: usize) -> usize {
    let tiles = n.div_ceil(STRIP).div_ceil(config.tile_strips()) * m.div_ceil(config.tile_tokens());
    let steps = k.div_ceil(STEP);
    let most = (steps / LEAST_UNITS).min(super::MOST_CUT / tiles.max(1)).clamp(1, MOST_PIECES);
    let time = |pieces: usize| (tiles * pieces).div_ceil(workers) * (steps.div_ceil(pieces) + BLOCK_UNITS);
    (1..=most).min_by_key(|&pieces| time(pieces)).unwrap_or(1)
}

/// Who computes what for a shape on a device with a configuration.
pub fn schedule(config: Config, shape: [usize; 3], workers: usize) -> Schedule {
    let pieces = pieces(config, shape, workers);
    if config.tokens < 64 { Schedule::pieces(config, shape, pieces) } else { Schedule::even(config, shape, workers) }
}
