//! The many forms of the kernel, and who computes what in each: pure functions of the numbers. `choice.rs` says which one a shape takes.

use crate::cuda::matmul::{folded_norm, wna16};
use crate::cuda::schedule::MOST_CUT;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

pub use super::candidates::all;
pub use super::choice::{batch_invariant, config, every, expected};
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
    /// Whether no tile is cut, though some blocks have none in the last round. Not compiled in.
    pub whole: bool,
    /// Blocks that a multiprocessor has room for.
    pub blocks: usize,
    /// Units left to copy when the next kernel may start; 0: at once.
    pub trigger: usize,
    /// Units fetched into L2 before x is there.
    pub prefetch: usize,
}

/// Two warpgroups of two strips, tiles that are left cut wherever the work is divided.
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
    whole: false,
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

/// Shared memory that a block may have as one of so many on a multiprocessor, which takes 1 KiB of each.
pub(super) const fn room(blocks: usize) -> usize {
    (228 << 10) / blocks - 1024
}

/// Units that a worker must have for cutting tiles among all to pay.
const FEW_UNITS: usize = 16;

/// Tokens from which on W and x have rings of their own.
pub(super) const LEAST_APART: usize = 48;

/// Tokens for which the registers hold sums of groups beside those of a tile.
pub(super) fn most_tokens_of_groups(atom: Atom) -> usize {
    if atom.offset && atom.bits > 4 && atom.group == 64 { 64 } else { 128 }
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
        if self.whole {
            write!(f, " whole")?;
        }
        write_unusual(f, &[("trigger", self.trigger, 0), ("prefetch", self.prefetch, 0)])
    }
}

impl Config {
    /// With as many stages as there is room for, up to what was found to help.
    pub(in crate::cuda) fn fitted(mut self, form: &Form) -> Self {
        let atom = form.atom;
        let room = room(self.blocks).saturating_sub(self.shared_bytes(form));
        let x = self.boxes * self.tokens * 128 + 16;
        let (w, x) = (self.tile_strips() * atom.bytes() + 16, x + self.bytes_of_sums_of_x(atom));
        if self.joint() {
            let summed = if self.has_summing_warp(atom) { 8 } else { 0 };
            // Clusters with little shared memory would lie more than two blocks a multiprocessor, and leave others idle.
            let fewer = if self.blocks > 1 && self.split > 1 { atom.bits.min(4) as usize } else { 4 };
            let stages = (room / (w + x + summed)).min(8 * 4 / fewer);
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

    /// Whether scales that are not of the type of x, or offsets, apply to weights: these are computed in f32.
    pub(super) fn computes_weights(self, form: &Form) -> bool {
        self.early && (form.x != form.atom.scale || form.atom.offset)
    }

    /// Whether a kernel before it makes sums of x.
    pub(super) fn takes_sums_of_x(self, atom: Atom) -> bool {
        atom.offset && self.wgmma && !self.early
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
        self.tokens <= 32 || self.blocks > 1
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
        let factors = if self.tokens <= folded_norm::ROWS { folded_norm::FACTORS_BYTES } else { 0 };
        ring + sums + barriers + 48 + self.stages_x * self.bytes_of_sums_of_x(atom) + factors
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
        let instance = wna16::instance((&super::SOURCE, "wna16_sm90"), form, activation, config);
        match form.atom.scale {
            Float::F32 => instance,
            of_x if of_x == form.x => instance,
            scale => instance.defining("SCALE_BF16", u8::from(scale == Float::BF16)),
        }
    }
}

impl Schedule {
    /// Of a shape on so many multiprocessors.
    pub fn new(config: Config, [m, n, k]: [usize; 3], multiprocessors: usize) -> Self {
        let steps = k.div_ceil(STEP);
        let (rows, columns) = (n.div_ceil(STRIP).div_ceil(config.tile_strips()), m.div_ceil(config.tokens));
        let tiles = rows * columns;
        let (mut waves, mut workers) = (0, tiles);
        if config.whole {
            workers = tiles.div_ceil(tiles.div_ceil(multiprocessors));
            waves = tiles / workers;
            let cut = tiles - waves * workers;
            return Self { steps, rows, columns, waves, workers, sharers: cut, cut };
        }
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
