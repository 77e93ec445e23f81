//! Which of its many forms the kernel takes for a shape, and who computes what: pure functions of the numbers.
//!
//! The choice follows what was measured on an H200 (`docs/decisions/0006-products-on-hopper.md`), and what that says of a device
//! with other memory (`docs/decisions/0014-choices-and-devices.md`).

use crate::cuda::Caps;
use crate::cuda::matmul::wna16;
use crate::cuda::schedule::MOST_CUT;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

pub use super::candidates::{all, every};
pub use crate::cuda::schedule::Schedule;

/// What the kernel is compiled with, besides the format; `include/wna16_sm90.cuh` says what each is.
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

/// Two warpgroups of two strips, each tile cut wherever the work is divided.
pub(in crate::cuda) const TWO_BY_TWO: Config = Config {
    tokens: 8,
    warpgroups: 2,
    strips: 2,
    sets: 1,
    wgmma: true,
    early: false,
    stages_w: 0,
    stages_x: 0,
    boxes: 2,
    split: 1,
    blocks: 1,
    trigger: 1,
    prefetch: 0,
};

/// Four warpgroups in two sets, which take units in turn.
pub(super) const TWO_SETS: Config = Config { warpgroups: 4, sets: 2, wgmma: false, trigger: 0, ..TWO_BY_TWO };

/// Two blocks a multiprocessor: the next launch fills its rings while this one runs.
pub(super) const PAIRED: Config = Config { blocks: 2, trigger: 0, ..TWO_BY_TWO };

/// The next launch begins before this one ends, and what it will read first is fetched into L2. A block has a multiprocessor to
/// itself: if two fitted, the multiprocessors where a small kernel still runs would get none, and others two, which end late.
pub(super) const EARLY: Config = Config { wgmma: false, trigger: 8, prefetch: 4, ..TWO_BY_TWO };

/// Shared memory that a block may have alone on a multiprocessor, and as one of two.
const ALONE_BYTES: usize = 232_448;
const SHARED_BY_TWO_BYTES: usize = 115_712;

/// Units that a worker must have for cutting tiles among all to pay.
const FEW_UNITS: usize = 16;

/// Tokens from which on W and x have rings of their own.
pub(super) const LEAST_APART: usize = 48;

/// Tokens for which the registers hold sums of groups beside those of a tile.
pub(super) fn most_tokens_of_groups(atom: Atom) -> usize {
    if atom.offset && atom.bits > 4 && atom.group == 64 { 64 } else { 128 }
}

/// Where the choice is made: a shape in strips and steps, and the device.
pub(super) struct Shape {
    m: usize,
    strips: usize,
    steps: usize,
    multiprocessors: usize,
    /// Whether multiprocessors wait for each other's bytes.
    waits_for_memory: bool,
    atom: Atom,
    /// Whether scales may be applied to weights, which rounds them.
    pub rounds: bool,
}

/// Rows beyond which weights are scaled and rounded where y is a half float or the weight allows it: tiles of 256 tokens leave no registers for the sums
/// of a group, and with narrower ones 256 rows take 9 % longer, 1024 rows 8 %. Up to here the cost of exact weights is at most 3 %.
pub(super) const MOST_EXACT_ROWS: usize = 128;

/// Codes of 4 bits in a unit of four strips, and the clocks in which a multiprocessor converts and multiplies it for up to 8 rows, with
/// what it waits between. Where memory brings it sooner, blocks keep in step. The number lies between the 870 clocks of memory on
/// an H200, where they do, and the 1280 on an H100, where they do not.
const UNIT_BYTES: usize = 4 * STRIP * STEP / 2;
const UNIT_CLOCKS: f64 = 1100.0;

/// Whether scales may be applied to weights: where y is as coarse as what that rounds, or the weight allows it. Scales in f32 and
/// offsets apply to sums only.
pub(super) fn may_round(atom: Atom, out: Float, caps: &Caps) -> bool {
    !atom.is_wide() && (out != Float::F32 || caps.rounded_weights)
}

impl Shape {
    pub fn new(atom: Atom, [m, n, k]: [usize; 3], out: Float, caps: &Caps) -> Self {
        Self {
            m: m.max(1),
            strips: n.div_ceil(STRIP).max(1),
            steps: k.div_ceil(STEP).max(1),
            multiprocessors: caps.multiprocessors.max(1) as usize,
            waits_for_memory: caps.clocks_of_memory(UNIT_BYTES) > UNIT_CLOCKS,
            atom,
            rounds: atom.group > 0 && m > MOST_EXACT_ROWS && may_round(atom, out, caps),
        }
    }

    /// Whether the sums of atoms can be scaled, or those of rows: an atom has one group at most.
    fn whole_atoms(&self) -> bool {
        matches!(self.atom.group, 0 | 128)
    }

    /// Units of four strips a multiprocessor.
    fn units(&self) -> f64 {
        self.strips.div_ceil(4) as f64 * self.steps as f64 / self.multiprocessors as f64
    }

    fn tiles(&self, config: Config) -> usize {
        self.m.div_ceil(config.tokens).saturating_mul(self.strips.div_ceil(config.tile_strips()))
    }

    /// A configuration whose tiles are each shared by a cluster, the largest that keeps the device busy: at most and at
    /// least so many blocks a multiprocessor; with little work, however few. None: no cluster does.
    fn shared(&self, config: Config, most: f64, least: f64) -> Option<Config> {
        let sizes: &[usize] = if config.blocks == 2 { &[8, 4, 2] } else { &[2] };
        let fits = |&&split: &&usize| {
            let blocks = self.tiles(config).saturating_mul(split) as f64 / self.multiprocessors as f64;
            blocks <= most && self.steps >= split && (blocks >= least || self.units() < 8.0)
        };
        sizes.iter().find(fits).map(|&split| Config { split, ..config })
    }

    fn choose(&self) -> Config {
        self.wide(self.small(self.choose_fast()))
    }

    /// Scales in f32 and offsets take registers, and offsets sums of x: up to 8 rows `mma.sync` makes them; for more they come with x,
    /// by a ring of its own.
    pub fn wide(&self, config: Config) -> Config {
        if !self.atom.is_wide() {
            return config;
        }
        match config {
            Config { tokens: ..=8, blocks: 2, split: 1, .. } if self.atom.offset => {
                Config { wgmma: false, strips: 1, ..config }
            }
            Config { tokens: ..=8, .. } => Config { wgmma: false, ..config },
            Config { tokens: ..=16, .. } if !self.atom.offset => Config { wgmma: false, strips: 1, ..config },
            // Sums of x multiplied by factors take few registers, and no kernel before it.
            Config { tokens: ..=16, strips: 1, split: 2.., .. } if self.atom.multiples && self.atom.bits == 4 => {
                Config { wgmma: false, ..config }
            }
            Config { tokens: ..=16, .. } if self.atom.multiples => Config { tokens: 16, ..EARLY },
            Config { tokens: ..=32, split, .. } => {
                Config { tokens: LEAST_APART, strips: 1, split: split.min(2), trigger: 0, ..TWO_BY_TWO }
            }
            Config { tokens, .. } => {
                Config { strips: 1, tokens: tokens.min(most_tokens_of_groups(self.atom)), ..config }
            }
        }
    }

    /// The sums of small groups take registers.
    pub fn small(&self, config: Config) -> Config {
        match !config.wgmma || config.early || self.whole_atoms() {
            true => config,
            false => Config { strips: 1, tokens: config.tokens.min(most_tokens_of_groups(self.atom)), ..config },
        }
    }

    fn choose_fast(&self) -> Config {
        let (bits, units) = (self.atom.bits, self.units());
        let (base, paired) = (TWO_BY_TWO, PAIRED);
        let sync = |config: Config| Config { wgmma: false, ..config };
        match self.m {
            ..=8 => self.shared(sync(paired), 1.75, 1.4).unwrap_or(match bits {
                // The next launch begins eight units before the end: if all blocks are near it by then.
                4 if units > 40.0 && !self.waits_for_memory && !self.atom.multiples => EARLY,
                4 if units != 40.0 => TWO_SETS,
                _ => sync(paired),
            }),
            9..=16 => {
                let narrow = Config { tokens: 16, strips: 1, ..paired };
                let narrow = if self.whole_atoms() { narrow } else { sync(narrow) };
                let wide = Config { strips: 2, ..sync(narrow) };
                let shared = self.shared(narrow, 1.75, 1.4);
                let shared = shared.or_else(|| self.shared(wide, 1.75, 1.4).filter(|_| bits == 4));
                shared.unwrap_or(Config { tokens: 16, ..TWO_SETS })
            }
            17..=32 => {
                let tokens = if self.m <= 24 { 24 } else { 32 };
                let shared = self.shared(Config { tokens, strips: 1, ..paired }, 1.75, 1.4);
                shared.unwrap_or(Config { tokens, trigger: 0, ..base })
            }
            33..=64 => {
                let narrow = Config { tokens: 32, strips: 1, trigger: 0, ..base };
                let tokens = if self.m <= 48 { 48 } else { 64 };
                let shared =
                    self.shared(narrow, 1.0, 0.9).or_else(|| self.shared(Config { tokens, ..narrow }, 1.0, 0.7));
                let strips = if units < 30.0 || bits > 4 { 1 } else { 2 };
                shared.filter(|_| units < 8.0).unwrap_or(Config { tokens, strips, ..base })
            }
            65..=128 => {
                let shared = self.shared(Config { tokens: 64, strips: 1, trigger: 0, ..base }, 1.0, 0.9);
                let tokens = if self.m <= 96 { 96 } else { 128 };
                shared.filter(|_| units < 8.0).unwrap_or(Config { tokens, strips: 1, ..base })
            }
            _ => self.many(Config { tokens: self.narrow_tokens(), strips: 1, early: self.rounds, ..base }),
        }
    }

    /// The same order of sums for every number of rows: exact, with tiles that are never cut, and shared by a cluster or not
    /// as n and k alone tell.
    fn choose_batch_invariant(&self) -> Config {
        let tokens = match self.m {
            ..=LEAST_APART if self.atom.is_wide() => LEAST_APART,
            ..=8 => 8,
            9..=16 => 16,
            17..=32 => 32,
            33..=64 => 64,
            _ => most_tokens_of_groups(self.atom),
        };
        let config = Config { tokens, strips: 1, trigger: 0, ..TWO_BY_TWO };
        let split = if self.strips.div_ceil(config.tile_strips()) * 2 <= self.multiprocessors { 2 } else { 1 };
        Config { split: split.min(self.steps), ..config }
    }

    /// Rows of narrow tiles: as few as those of 128 rows are, but no wider than it takes.
    fn narrow_tokens(&self) -> usize {
        if 96 * self.m.div_ceil(128) >= self.m { 96 } else { 128 }
    }

    /// For more than 128 rows.
    fn many(&self, narrow: Config) -> Config {
        if self.m <= 256
            && self.tiles(narrow) * 2 <= self.multiprocessors
            && let Some(shared) = self.shared(narrow, 1.0, 0.9)
        {
            return shared;
        }
        if self.m <= 256 && self.units() <= 50.0 {
            return narrow;
        }
        // Wider tiles leave no registers for the sums of a group.
        if self.atom.group > 0 && !self.rounds {
            return narrow;
        }
        let tokens = if self.m <= 192 || (257..=384).contains(&self.m) { 192 } else { 256 };
        // Whole rounds of tiles, of which nothing is cut.
        let even = |config: Config| {
            let tiles = self.tiles(config);
            let room = tiles.div_ceil(self.multiprocessors) * self.multiprocessors;
            tiles <= 2 * self.multiprocessors && tiles as f64 / room as f64 >= 0.93
        };
        let wide = Config { tokens, boxes: 1, ..narrow };
        if self.m > 256 && even(narrow) && !even(Config { tokens: 256, ..wide }) { narrow } else { wide }
    }
}

/// The configuration for a shape, for y of a type on a device.
pub fn config(atom: Atom, shape: [usize; 3], out: Float, caps: &Caps) -> Config {
    Shape::new(atom, shape, out, caps).choose().fitted(atom, out)
}

/// Rows of tiles where there are several weights.
pub fn grouped_tiles(atom: Atom, out: Float) -> Vec<usize> {
    let of = Shape::new(atom, [MOST_EXACT_ROWS + 1, 1, 1], out, &Caps::H200);
    let most = if of.rounds || atom.group == 0 { 256 } else { most_tokens_of_groups(atom) };
    [8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256].into_iter().filter(|&tokens| tokens <= most).collect()
}

/// The configuration for such a tile: tiles are cut among all blocks, two on each multiprocessor for few rows.
pub fn grouped(atom: Atom, [tokens, n, k]: [usize; 3], out: Float) -> Config {
    let of = Shape::new(atom, [tokens, n, k], out, &Caps::H200);
    let config = match tokens {
        ..=16 => Config { tokens, wgmma: false, ..PAIRED },
        17..=24 => Config { tokens, strips: 1, ..PAIRED },
        25..=32 => Config { tokens, trigger: 0, ..TWO_BY_TWO },
        33..=64 => Config { tokens, strips: if atom.bits > 4 { 1 } else { 2 }, ..TWO_BY_TWO },
        65..=128 => Config { tokens, strips: 1, ..TWO_BY_TWO },
        _ => Config { tokens, strips: 1, early: of.rounds, boxes: 1, ..TWO_BY_TWO },
    };
    of.small(config).fitted(atom, out)
}

/// The configuration for a shape with which a row of y has the same bits whatever the number of rows is.
pub fn batch_invariant(atom: Atom, shape: [usize; 3], out: Float, caps: &Caps) -> Config {
    Shape::new(atom, shape, out, caps).choose_batch_invariant().fitted(atom, out)
}

/// Names and values of what is not as usual.
pub(in crate::cuda::matmul) fn write_unusual(
    f: &mut std::fmt::Formatter<'_>,
    numbers: &[(&str, usize, usize)],
) -> std::fmt::Result {
    let unusual = numbers.iter().filter(|(_, value, usual)| value != usual);
    unusual.into_iter().try_for_each(|(name, value, _)| write!(f, " {name} {value}"))
}

/// `n64 2x1 wgmma early w5 x7/2`: tokens, warpgroups and strips, instruction, where scales apply, stages of W and of x and
/// boxes; then what is not 1 or 0.
impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let instruction = if self.wgmma { "wgmma" } else { "mma" };
        let scales = if self.early { "early" } else { "late" };
        write!(f, "n{} {}x{} {instruction} {scales}", self.tokens, self.warpgroups / self.sets, self.strips)?;
        write!(f, " w{} x{}/{}", self.stages_w, self.stages_x, self.boxes)?;
        let rest = [("sets", self.sets, 1), ("split", self.split, 1), ("blocks", self.blocks, 1)];
        write_unusual(f, &rest)?;
        write_unusual(f, &[("trigger", self.trigger, 0), ("prefetch", self.prefetch, 0)])
    }
}

impl Config {
    /// With as many stages as there is room for, up to what was found to help.
    pub(in crate::cuda) fn fitted(mut self, atom: Atom, out: Float) -> Self {
        let most = if self.blocks == 2 { SHARED_BY_TWO_BYTES } else { ALONE_BYTES };
        let room = most.saturating_sub(self.shared_bytes(&Form::floats(atom, out)));
        let x = self.boxes * self.tokens * 128 + 16;
        let (w, x) = (self.tile_strips() * atom.bytes() + 16, x + self.bytes_of_sums_of_x(atom));
        if self.joint() {
            let summed = if self.has_summing_warp(atom) { 8 } else { 0 };
            let stages = (room / (w + x + summed)).min(8);
            self.stages_w = stages - stages % self.sets;
            self.stages_x = self.stages_w;
            return self;
        }
        let wanted = match self.tokens {
            192.. => 4,
            ..=64 if self.tile_strips() == 4 => 5,
            _ => 8,
        };
        let wanted_x = match self.tokens {
            48 => 8,
            64 => 7,
            _ => 10,
        };
        let least_x = if self.boxes == 2 { 4 } else { 5 };
        self.stages_w = if atom.bits > 4 { wanted * 5 / 8 } else { wanted }.max(3);
        while self.stages_w > 3 && room.saturating_sub(self.stages_w * w) / x < least_x {
            self.stages_w -= 1;
        }
        self.stages_x = (room.saturating_sub(self.stages_w * w) / x).min(wanted_x);
        self
    }

    /// Whether a kernel before it makes sums of x.
    pub(super) fn takes_sums_of_x(self, atom: Atom) -> bool {
        atom.offset && self.wgmma
    }

    /// Whether a warp of its own does, as `mma.sync` multiplies them by whole factors.
    fn has_summing_warp(self, atom: Atom) -> bool {
        atom.multiples && atom.offset && atom.bits == 4 && !self.wgmma
    }

    /// Of a stage of x.
    fn bytes_of_sums_of_x(self, atom: Atom) -> usize {
        if self.takes_sums_of_x(atom) || self.has_summing_warp(atom) { 2 * self.tokens * 16 } else { 0 }
    }

    /// Strips of a tile.
    pub fn tile_strips(self) -> usize {
        self.warpgroups / self.sets * self.strips
    }

    /// Whether W and x share a ring.
    pub(super) fn joint(self) -> bool {
        self.tokens <= 32 || self.blocks == 2
    }
}

impl Tile for Config {
    fn tokens(self) -> usize {
        self.tokens
    }

    fn threads(self, form: &Form) -> usize {
        let others = match !self.joint() || self.warpgroups == 4 {
            true => 128,
            false => 32 * (1 + usize::from(self.has_summing_warp(form.atom))),
        };
        self.warpgroups * 128 + others
    }

    fn split(self) -> usize {
        self.split
    }

    fn shared_bytes(self, &Form { atom, out, .. }: &Form) -> usize {
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
        let barriers =
            16 * (self.stages_w + self.stages_x) + if self.has_summing_warp(atom) { 8 * self.stages_w } else { 0 };
        ring + sums + barriers + 48 + self.stages_x * self.bytes_of_sums_of_x(atom)
    }

    fn parts_bytes(self, schedule: &Schedule) -> usize {
        // As many workers as tiles that are left have one each, whole.
        let cut = self.split == 1 && schedule.cut > 0 && schedule.sharers != schedule.cut;
        if cut { 2 * schedule.workers * self.tile_strips() * STRIP * self.tokens * 4 } else { 0 }
    }

    fn rounds_weights(self) -> bool {
        self.early
    }

    fn instance(self, form: &Form, activation: Activation) -> Instance {
        let config = [
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
            ("THREADS", self.threads(form)),
            ("SHARED_BYTES", self.shared_bytes(form)),
        ];
        wna16::instance((&super::SOURCE, "wna16_sm90"), form, activation, config)
    }
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
            // Cut tiles each have counters; few tokens are cheap to join, so that all their tiles may be cut.
            if config.tokens >= 64 || tiles > MOST_CUT {
                waves = tiles / workers;
            }
            let units = tiles.saturating_mul(steps);
            let each = units.div_ceil(workers);
            if waves == 0 && each < FEW_UNITS && config.blocks == 1 {
                workers = units.div_ceil(each);
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

    /// Every tile whole, by a worker of its own.
    pub fn whole(config: Config, [m, n, k]: [usize; 3]) -> Self {
        let (rows, columns) = (n.div_ceil(STRIP).div_ceil(config.tile_strips()), m.div_ceil(config.tokens));
        let workers = rows.saturating_mul(columns);
        let waves = usize::from(config.split == 1);
        Self { steps: k.div_ceil(STEP), rows, columns, waves, workers, sharers: 0, cut: 0 }
    }
}
