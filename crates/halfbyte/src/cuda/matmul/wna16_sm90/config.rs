//! Which of its many forms the kernel takes for a shape, and who computes what: pure functions of the numbers.
//!
//! Every candidate has the time of one unit (a tile × 128 columns) on one multiprocessor, as measured on an H200 for 4 bits
//! and groups of 128; the least sum of units, and of what starting and joining take, is chosen. A unit of more bytes takes at
//! least what reading it takes.

use crate::cuda::sources::Instance;
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

/// What the kernel is compiled with, besides the format; `include/wna16_layout.cuh` says what each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Tokens a tile.
    pub tokens: usize,
    /// Warpgroups that convert and multiply.
    pub warpgroups: usize,
    /// Strips a warpgroup.
    pub strips: usize,
    /// Sets of warpgroups, which take the units of a tile in turn.
    pub sets: usize,
    /// wgmma instead of mma.sync.
    pub wgmma: bool,
    /// Scales apply to weights, and not to sums.
    pub early: bool,
    /// Units of W in flight.
    pub stages_w: usize,
    /// Stages of x in flight.
    pub stages_x: usize,
    /// Boxes of 64 columns in a stage of x.
    pub boxes: usize,
    /// Blocks that share the columns of one tile.
    pub split: usize,
    /// Blocks that a multiprocessor has room for.
    pub blocks: usize,
    /// Units left to copy when the next kernel may start; 0: at once.
    pub trigger: usize,
    /// Units fetched into L2 before x is there.
    pub prefetch: usize,
}

/// A configuration and the microseconds of its unit.
struct Candidate(f64, Config);

/// Two warpgroups of two strips with mma.sync, for few tokens.
const FEW: Config = Config {
    tokens: 8,
    warpgroups: 2,
    strips: 2,
    sets: 1,
    wgmma: false,
    early: false,
    stages_w: 5,
    stages_x: 5,
    boxes: 2,
    split: 1,
    blocks: 2,
    trigger: 8,
    prefetch: 4,
};

/// Two warpgroups of two strips with wgmma.
const SOME: Config =
    Config { tokens: 32, wgmma: true, stages_w: 8, stages_x: 8, blocks: 1, trigger: 0, prefetch: 0, ..FEW };

/// Two warpgroups of one strip with wgmma, scales applied early.
const MANY: Config = Config { tokens: 128, strips: 1, early: true, stages_x: 4, trigger: 1, ..SOME };

/// Blocks of a cluster that share the columns of a tile, where tiles are too few for all multiprocessors.
const SPLIT: Config = Config { stages_w: 4, split: 8, trigger: 0, prefetch: 0, ..FEW };

const CANDIDATES: &[Candidate] = &[
    Candidate(0.565, FEW),
    Candidate(0.565, SPLIT),
    Candidate(0.565, Config { split: 4, stages_w: 5, ..SPLIT }),
    Candidate(0.565, Config { split: 2, stages_w: 5, ..SPLIT }),
    Candidate(0.31, Config { strips: 1, stages_w: 8, ..SPLIT }),
    Candidate(0.31, Config { strips: 1, split: 4, stages_w: 8, ..SPLIT }),
    Candidate(
        0.63,
        Config { tokens: 16, warpgroups: 4, sets: 2, stages_w: 8, blocks: 1, trigger: 0, prefetch: 0, ..FEW },
    ),
    Candidate(0.37, Config { tokens: 16, strips: 1, wgmma: true, split: 4, stages_w: 6, ..SPLIT }),
    Candidate(0.37, Config { tokens: 16, strips: 1, wgmma: true, split: 2, stages_w: 6, ..SPLIT }),
    Candidate(0.66, Config { tokens: 24, ..SOME }),
    Candidate(0.70, SOME),
    Candidate(0.50, Config { tokens: 32, strips: 1, wgmma: true, split: 4, stages_w: 5, ..SPLIT }),
    Candidate(0.36, Config { tokens: 32, strips: 1, split: 2, ..SOME }),
    Candidate(0.85, Config { tokens: 48, stages_w: 6, ..SOME }),
    Candidate(0.99, Config { tokens: 64, stages_w: 5, stages_x: 7, ..SOME }),
    Candidate(0.40, Config { tokens: 64, strips: 1, ..SOME }),
    Candidate(0.52, Config { tokens: 64, strips: 1, split: 2, stages_x: 6, ..SOME }),
    Candidate(1.31, Config { tokens: 96, strips: 2, stages_w: 5, stages_x: 5, ..MANY }),
    Candidate(0.78, MANY),
    Candidate(0.78, Config { split: 2, stages_w: 6, stages_x: 3, trigger: 0, ..MANY }),
    Candidate(1.12, Config { tokens: 192, stages_w: 4, stages_x: 7, boxes: 1, ..MANY }),
    Candidate(1.46, Config { tokens: 256, stages_w: 4, stages_x: 5, boxes: 1, ..MANY }),
];

/// Microseconds of starting, storing and joining: of tiles cut anywhere, and of tiles shared by a cluster.
const CUT_US: f64 = 2.0;
const CLUSTER_US: f64 = 2.6;

/// Units that a block must have at least for cutting tiles to pay.
const FEWEST_UNITS: usize = 16;

/// Bytes that a multiprocessor's share of the memory brings in a microsecond.
const BYTES_PER_US: f64 = 32_600.0;

/// Shared memory of a block, and of a multiprocessor less what the system takes of it for a block.
const BLOCK_BYTES: usize = 232_448;
const MULTIPROCESSOR_BYTES: usize = 233_472;
const SYSTEM_BYTES: usize = 1024;

/// The configuration for a shape, for y of a type on a device of so many multiprocessors.
pub fn config(atom: Atom, [m, n, k]: [usize; 3], out: Float, multiprocessors: usize) -> Config {
    let cost = |&Candidate(unit_us, config): &Candidate| {
        let (tiles, steps) = (config.tiles(m, n), k.div_ceil(STEP));
        let bytes = config.tile_strips() * atom.bytes();
        let unit_us = unit_us.max(bytes as f64 / BYTES_PER_US);
        if config.split == 1 {
            let units = tiles.saturating_mul(steps);
            return CUT_US + unit_us * units.div_ceil(multiprocessors).max(FEWEST_UNITS.min(units)) as f64;
        }
        match tiles.saturating_mul(config.split) <= multiprocessors && steps >= config.split {
            true => CLUSTER_US + unit_us * steps.div_ceil(config.split) as f64,
            false => f64::INFINITY,
        }
    };
    let mut best = (f64::INFINITY, FEW);
    for candidate in CANDIDATES {
        let us = cost(candidate);
        if us < best.0 {
            best = (us, candidate.1);
        }
    }
    best.1.fitted(atom, out)
}

/// Every configuration, for a form of atoms.
pub fn all(atom: Atom, out: Float) -> Vec<Config> {
    CANDIDATES.iter().map(|Candidate(_, config)| config.fitted(atom, out)).collect()
}

impl Config {
    /// With what the form of the atoms demands: when scales apply, and as many stages as there is room for.
    fn fitted(mut self, atom: Atom, out: Float) -> Self {
        self.early = match atom.group {
            0 => false,
            128 => self.early,
            _ => self.wgmma,
        };
        if self.joint() {
            self.stages_x = self.stages_w;
        }
        let most = BLOCK_BYTES.min(MULTIPROCESSOR_BYTES / self.blocks - SYSTEM_BYTES);
        while self.shared_bytes(atom, out) > most && self.stages_w > 2 * self.sets {
            self.stages_w -= self.sets;
            if self.joint() {
                self.stages_x = self.stages_w;
            }
        }
        self
    }

    /// Strips of a tile.
    pub fn tile_strips(self) -> usize {
        self.warpgroups / self.sets * self.strips
    }

    /// Whether W and x share a ring.
    fn joint(self) -> bool {
        self.tokens <= 32 || self.blocks == 2
    }

    /// Tiles of a product.
    fn tiles(self, m: usize, n: usize) -> usize {
        m.div_ceil(self.tokens).saturating_mul(n.div_ceil(STRIP).div_ceil(self.tile_strips()))
    }

    /// Threads of a block.
    pub fn threads(self) -> usize {
        self.warpgroups * 128 + if !self.joint() || self.warpgroups == 4 { 128 } else { 32 }
    }

    /// Shared memory of a block.
    pub fn shared_bytes(self, atom: Atom, out: Float) -> usize {
        let ring = self.stages_x * self.boxes * self.tokens * 128 + self.stages_w * self.tile_strips() * atom.bytes();
        let parts = self.tile_strips() * 4 * (self.tokens / 8);
        let staged = match self.tokens {
            tokens if tokens < 64 || self.split > 1 || out == Float::F32 => 0,
            tokens if tokens.is_multiple_of(64) => 64,
            tokens if tokens.is_multiple_of(32) => 32,
            _ => 16,
        };
        let exchange = if self.split > 1 { parts.next_multiple_of(self.split) * 512 } else { 0 };
        let sums = (self.sets - 1) * parts * 512 + exchange + self.warpgroups / self.sets * staged * 128;
        ring + sums + 16 * (self.stages_w + self.stages_x) + 48
    }

    /// What is compiled.
    pub fn instance(self, atom: Atom, out: Float, activation: Activation) -> Instance {
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
            ("BF16", (atom.scale == Float::BF16).into()),
            ("GROUP", atom.group),
            ("ZERO", atom.zero.into()),
            ("OUT", super::number(out)),
            ("ACTIVATION", function),
            ("NT", self.tokens),
            ("WARPGROUPS", self.warpgroups),
            ("STRIPS", self.strips),
            ("SETS", self.sets),
            ("WGMMA", self.wgmma.into()),
            ("EARLY", self.early.into()),
            ("STAGES_W", self.stages_w),
            ("STAGES_X", self.stages_x),
            ("BOXES", self.boxes),
            ("SPLIT", self.split),
            ("BLOCKS", self.blocks),
            ("TRIGGER", self.trigger),
            ("PREFETCH", self.prefetch),
            ("THREADS", self.threads()),
            ("SHARED_BYTES", self.shared_bytes(atom, out)),
        ];
        let floats = [("LOW", low), ("HIGH", high)].map(|(name, v)| format!("HB_{name}=__uint_as_float({:#x}u)", v.to_bits()));
        let defines = numbers.iter().map(|(name, value)| format!("HB_{name}={value}")).chain(floats);
        Instance::new(&super::SOURCE, "wna16_sm90").with(defines)
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
    /// Blocks, or clusters of them.
    pub workers: usize,
    /// Workers that share the cut tiles.
    pub sharers: usize,
    /// Cut tiles, each of `steps` units.
    pub cut: usize,
}

impl Schedule {
    /// Of a shape on so many multiprocessors.
    pub fn new(config: Config, [m, n, k]: [usize; 3], multiprocessors: usize) -> Self {
        let steps = k.div_ceil(STEP);
        let (rows, columns) = (n.div_ceil(STRIP).div_ceil(config.tile_strips()), m.div_ceil(config.tokens));
        let tiles = rows * columns;
        let (mut waves, mut workers) = (0, tiles);
        if config.split == 1 {
            workers = multiprocessors;
            // Cut tiles each have a counter; few tokens are cheap to join, so that all their tiles may be cut.
            if config.tokens >= 64 || tiles > super::MOST_CUT {
                waves = tiles / workers;
            }
            let units = tiles.saturating_mul(steps);
            if waves == 0 && units.div_ceil(workers) < FEWEST_UNITS {
                workers = units.div_ceil(FEWEST_UNITS);
            }
            // Nearly as many whole rounds for all: nothing is cut.
            let rounds = tiles.div_ceil(workers);
            let even = tiles.div_ceil(rounds);
            if config.tokens >= 64 && tiles == even * rounds && even * 100 >= workers * 93 {
                (workers, waves) = (even, rounds);
            }
        }
        let cut = tiles - waves * workers * usize::from(config.split == 1);
        Self { steps, rows, columns, waves, workers, sharers: workers.min(cut.saturating_mul(steps)), cut }
    }

    /// Whether the kernel's numbers of 32 bits hold this.
    pub fn fits(&self) -> bool {
        let units = (self.rows as u128) * (self.columns as u128) * (self.steps as u128);
        units * (self.workers as u128) < 1 << 32 && self.cut <= super::MOST_CUT
    }

    /// Sums of cut tiles that are left in memory, in bytes.
    pub fn parts_bytes(&self, config: Config) -> usize {
        let cut = config.split == 1 && self.cut > 0;
        if cut { 2 * self.workers * config.tile_strips() * STRIP * config.tokens * 4 } else { 0 }
    }
}
