//! Which form the kernel takes for a shape, and who computes what: pure functions of the numbers.
//!
//! The choice follows what was measured on an H200: for some numbers of rows a model of it (`cost.rs`), else `docs/decisions/0007-products-from-sm80.md`.

use super::cost::{self, Work};
use crate::cuda::Caps;
use crate::cuda::matmul::plans::FEW as STEP_OF_ROWS;
use crate::cuda::matmul::wna16;
use crate::cuda::matmul::wna16_sm90::config::write_unusual;
use crate::cuda::schedule::MOST_CUT;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

pub use crate::cuda::schedule::Schedule;

/// What the kernel is compiled with, besides the types; `include/wna16_mma.cuh` says what each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Tokens a tile.
    pub tokens: usize,
    /// Warpgroups, of 4 warps each, one behind the other along the rows.
    pub warpgroups: usize,
    /// Strips a warpgroup.
    pub strips: usize,
    /// Columns of W a stage.
    pub step: usize,
    /// Stages in flight.
    pub stages: usize,
    /// Blocks that a multiprocessor has registers for.
    pub blocks: usize,
}

/// `n64 2x1 step 128 w6`: tokens, warpgroups and strips, columns and number of stages; then blocks, if there are several.
impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "n{} {}x{} step {} w{}", self.tokens, self.warpgroups, self.strips, self.step, self.stages)?;
        write_unusual(f, &[("blocks", self.blocks, 1)])
    }
}

/// Up to 8 tokens, in tiles of 256 rows.
const FEW: Config = Config { tokens: 8, warpgroups: 2, strips: 2, step: 128, stages: 0, blocks: 2 };

/// Shared memory of a block that shares a multiprocessor with another, at least; where there is less, it is alone.
const LEAST_SHARED_BYTES: usize = 80_000;

/// Tokens of the tiles there are.
const TOKENS: [usize; 4] = [8, 16, 32, 64];

/// Stages that were found to help.
const MOST_STAGES: usize = 6;

/// Units of 256 rows that a block must have for up to 64 tokens, else tiles have 128 rows.
const FEW_UNITS: usize = 4;

/// Pieces that the columns of a tile are cut into at most where the cuts must not depend on m, and units of each at least.
const MOST_PIECES: usize = 16;
const LEAST_UNITS: usize = 4;

/// Blocks that the pieces of one column of tiles should be at least, if there are as many: two for each multiprocessor of the
/// larger devices. A constant, so that the same product has the same bits on all of them.
const PIECES: usize = 264;

/// Units whose time a block needs beside its own, and all blocks together where tiles are cut anywhere.
const BLOCK_UNITS: usize = 3;
const EVEN_UNITS: usize = 5;

/// Sums of cut tiles that are left in memory at most.
const MOST_PARTS_BYTES: usize = 64 << 20;

/// Rows of x that a product takes at once where the cuts must not depend on m, so that the parts stay few.
pub const ROWS_AT_ONCE: usize = 64;

/// The configuration for a shape on a device.
pub fn config(atom: Atom, [m, n, k]: [usize; 3], out: Float, caps: &Caps) -> Config {
    if !cost::ROWS.contains(&m) || copies_wait_in_registers(caps) {
        return by_rows(atom, [m, n, k], out, caps);
    }
    // Plans tell apart as many rows.
    let shape = [m.next_multiple_of(STEP_OF_ROWS), n, k];
    let clocks = |config: &Config| {
        let (work, room) = (config.work(atom, atom.groups()), config.workers(atom, out, caps));
        cost::clocks(&cost::EXACT, work, &schedule(*config, shape, room), room, caps)
    };
    let least = all(atom, out, caps).into_iter().min_by(|one, other| clocks(one).total_cmp(&clocks(other)));
    least.unwrap_or_else(|| by_rows(atom, shape, out, caps))
}

/// The configuration with tiles of as many tokens as there are rows, or of the most.
pub fn by_rows(atom: Atom, [m, n, k]: [usize; 3], out: Float, caps: &Caps) -> Config {
    let strips = if is_little([m, n, k], caps) || copies_wait_in_registers(caps) { 1 } else { 2 };
    let tokens = match m {
        ..=8 => 8,
        9..=16 => 16,
        17..=32 => 32,
        _ => 64,
    };
    // One strip, then fewer tokens, where shared memory is short.
    let smaller = TOKENS.into_iter().rev().filter(|&fewer| fewer <= tokens).map(|fewer| [fewer, 1]);
    let mut all = [[tokens, strips]].into_iter().chain(smaller).map(|form| Config::of(form).fitted(atom, out, caps));
    let first = all.find(|config| config.fits(atom, out, caps));
    first.unwrap_or_else(|| Config::of([TOKENS[0], 1]).fitted(atom, out, caps))
}

/// Whether a thread's copies of a stage wait in registers until the stage before has been read, as before sm_80. Then two stages are
/// enough, and one strip a warp.
pub fn copies_wait_in_registers(caps: &Caps) -> bool {
    caps.arch.number < 80
}

/// Whether tiles of 256 rows would leave blocks with few units.
pub fn is_little([m, n, k]: [usize; 3], caps: &Caps) -> bool {
    let (strips, steps) = (n.div_ceil(STRIP).max(1), k.div_ceil(STEP).max(1));
    m <= 64 && strips.div_ceil(4) * steps < FEW_UNITS * 2 * caps.multiprocessors as usize
}

/// Shared memory for each of one or two blocks on a multiprocessor, or all for one where half of it is too little.
pub fn room(caps: &Caps, blocks: usize) -> usize {
    // A multiprocessor has 1 KB more than a block may have, and takes 1 KB more than a block asks for.
    let of_two = ((caps.shared_bytes as usize + 1024) / 2).saturating_sub(1024);
    if blocks == 2 && of_two >= LEAST_SHARED_BYTES { of_two } else { caps.shared_bytes as usize }
}

/// Every configuration for a form of atoms on a device.
pub fn all(atom: Atom, out: Float, caps: &Caps) -> Vec<Config> {
    let strips: &[usize] = if copies_wait_in_registers(caps) { &[1] } else { &[1, 2] };
    let of = |tokens| strips.iter().map(move |&strips| Config::of([tokens, strips]).fitted(atom, out, caps));
    let mut all: Vec<_> = TOKENS.into_iter().flat_map(of).filter(|c| c.fits(atom, out, caps)).collect();
    all.dedup();
    all
}

impl Config {
    /// Two blocks a multiprocessor where their registers are enough for that.
    fn of([tokens, strips]: [usize; 2]) -> Self {
        Self { tokens, strips, blocks: if tokens * strips <= 32 { 2 } else { 1 }, ..FEW }
    }

    /// For windows on images, by tokens, warpgroups and strips of each, with as many blocks as registers allow: of half the threads
    /// twice as many. None: a device runs another form in its place.
    pub fn for_images([tokens, warpgroups, strips]: [usize; 3], atom: Atom, out: Float, caps: &Caps) -> Option<Self> {
        let config = Self { warpgroups, ..Self::of([tokens, strips]) }.fitted(atom, out, caps);
        (config.strips == strips && (strips == 1 || !copies_wait_in_registers(caps))).then_some(config)
    }

    /// With stages of as many columns, and as many stages, as a device has room for.
    fn fitted(mut self, atom: Atom, out: Float, caps: &Caps) -> Self {
        // The loop for small groups keeps more in registers, 8 bits take twice the words, and f32 scales and offsets more.
        let more = atom.field_bits() == 8 || atom.is_wide();
        let most = if matches!(atom.bits, 5 | 6) { 8 } else { 16 };
        let small_groups = more && matches!(atom.group, 16 | 32 | 64) && self.tokens * self.strips > most;
        if small_groups || copies_wait_in_registers(caps) && self.tokens > 16 {
            self.blocks = 1;
        }
        // Two strips leave no registers for offsets beside 64 tokens, nor beside 16 where codes have 8 bits and there are two blocks.
        if atom.offset && (self.tokens == 64 || self.tokens == 16 && self.blocks == 2 && atom.field_bits() == 8) {
            self.strips = 1;
        }
        let room = match self.warpgroups {
            1 => {
                self.blocks *= 2;
                // Small groups keep their zero points beside 32 tokens.
                if self.tokens == 32 && self.blocks == 4 && matches!(atom.group, 16 | 32 | 64) {
                    self.blocks = 3;
                }
                // Beside 64 tokens a scale a row leaves registers for three, of 4 bits one for 128 columns, too.
                let few = atom.group == 0 || atom.group == 128 && atom.field_bits() == 4 && !atom.is_wide();
                if self.tokens == 64 && self.strips == 1 && few {
                    self.blocks = 3;
                }
                ((caps.shared_bytes as usize + 1024) / self.blocks).saturating_sub(1024)
            }
            _ => room(caps, self.blocks),
        };
        let room = room.saturating_sub(self.staging(out) + 16);
        // A stage's codes are in registers: 32 words of two strips of 8 bits would be too many.
        let few_words = self.strips * atom.bits as usize <= 8;
        // Multiples of an atom's halves lie together.
        let whole = atom.multiples || few_words && 4 * Self { step: STEP, ..self }.stage_bytes(atom) <= room;
        self.step = if whole { STEP } else { STEP / 2 };
        // Sums of x are made of the stage behind the one that is read.
        let least = if atom.offset { 3 } else { 2 };
        let most = if copies_wait_in_registers(caps) { least } else { MOST_STAGES };
        self.stages = (room / self.stage_bytes(atom)).clamp(least, most);
        self
    }

    fn fits(self, atom: Atom, out: Float, caps: &Caps) -> bool {
        self.shared_bytes(&Form::floats(atom, out)) <= caps.shared_bytes as usize
    }

    /// What a block does for 128 columns, of so many groups.
    pub(in crate::cuda::matmul) fn work(self, atom: Atom, groups: usize) -> Work {
        let strips = self.tile_strips();
        Work { strips, tokens: self.tokens, groups, bytes: strips * atom.bytes() }
    }

    /// Strips of a tile.
    pub fn tile_strips(self) -> usize {
        self.warpgroups * self.strips
    }

    fn stage_bytes(self, atom: Atom) -> usize {
        let codes = STRIP * self.step * atom.bits as usize / 8;
        let groups = self.step.checked_div(atom.group).map_or(0, |groups| groups.max(1));
        // Sums of x, which offsets multiply.
        let sums = if atom.offset { groups * self.tokens * 4 } else { 0 };
        let params = if atom.multiples { atom.multiples_bytes() } else { groups * atom.params_bytes() };
        self.tile_strips() * (codes + params) + self.tokens * self.step * 2 + sums
    }

    fn staging(self, out: Float) -> usize {
        if self.tokens < 64 || out == Float::F32 { 0 } else { self.warpgroups * 32 * 128 }
    }

    /// Blocks that a device has room for at once.
    pub fn workers(self, atom: Atom, out: Float, caps: &Caps) -> usize {
        let blocks = (caps.shared_bytes as usize + 1024) / (self.shared_bytes(&Form::floats(atom, out)) + 1024);
        caps.multiprocessors.max(1) as usize * blocks.clamp(1, self.blocks)
    }
}

impl Tile for Config {
    fn tokens(self) -> usize {
        self.tokens
    }

    fn threads(self, _: &Form) -> usize {
        self.warpgroups * 128
    }

    fn shared_bytes(self, &Form { atom, out, .. }: &Form) -> usize {
        self.stages * self.stage_bytes(atom) + self.staging(out) + 16
    }

    fn parts_bytes(self, schedule: &Schedule) -> usize {
        if schedule.cut > 0 { 2 * schedule.workers * self.tile_strips() * STRIP * self.tokens * 4 } else { 0 }
    }

    fn instance(self, form: &Form, activation: Activation) -> Instance {
        let config = [
            ("SCALE_BF16", (form.atom.scale == Float::BF16).into()),
            ("NT", self.tokens),
            ("WARPGROUPS", self.warpgroups),
            ("STRIPS", self.strips),
            ("STEP", self.step),
            ("STAGES", self.stages),
            ("BLOCKS", self.blocks),
            ("THREADS", self.threads(form)),
            ("SHARED_BYTES", self.shared_bytes(form)),
        ];
        wna16::instance((&super::SOURCE, "wna16_mma"), form, activation, config)
    }
}

/// Of a shape on as many blocks as a device has room for, each of which takes as much (stream-K): whole tiles in rounds, then runs
/// of units that begin and end anywhere in the tiles that are left.
pub fn even(config: Config, shape: [usize; 3], workers: usize) -> Schedule {
    let mut schedule = uncut(config, shape);
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

/// Of a shape whose tiles are each cut into so many pieces (split-K), a block for each: where the cuts are follows from k and
/// their number alone.
pub fn pieces(config: Config, shape: [usize; 3], pieces: usize) -> Schedule {
    let mut schedule = uncut(config, shape);
    if pieces <= 1 {
        (schedule.waves, schedule.cut) = (1, 0);
        return schedule;
    }
    schedule.workers = schedule.cut * pieces;
    schedule.sharers = schedule.workers;
    schedule
}

/// A block a tile, and all of them to be cut.
fn uncut(config: Config, [m, n, k]: [usize; 3]) -> Schedule {
    let (rows, columns) = (n.div_ceil(STRIP).div_ceil(config.tile_strips()), m.div_ceil(config.tokens));
    let tiles = rows * columns;
    Schedule { steps: k.div_ceil(STEP), rows, columns, waves: 0, workers: tiles, sharers: 0, cut: tiles }
}

/// Pieces of every tile that n and k alone tell: with them a row of y has the same bits whatever m is, whichever configuration
/// multiplies, and on every device.
pub fn invariant_pieces([_, n, k]: [usize; 3]) -> usize {
    let (tiles, steps) = (n.div_ceil(4 * STRIP).max(1), k.div_ceil(STEP));
    (PIECES / tiles).min(steps / LEAST_UNITS).clamp(1, MOST_PIECES)
}

/// Who computes what for a shape on so many blocks: every tile in pieces, or cut anywhere, whichever takes least.
///
/// Pieces come in rounds of as many blocks as there is room for. One column of tiles is always cut into pieces: the blocks of
/// the next product begin while its last ones end.
pub fn schedule(config: Config, shape: [usize; 3], workers: usize) -> Schedule {
    let Schedule { steps, rows, columns, .. } = uncut(config, shape);
    let (tiles, part) = (rows * columns, 2 * config.tile_strips() * STRIP * config.tokens * 4);
    let blocks = MOST_CUT.min(MOST_PARTS_BYTES / part);
    let most = (steps / LEAST_UNITS).min(blocks / tiles).clamp(1, MOST_PIECES);
    let time = |pieces: usize| (tiles * pieces).div_ceil(workers) * (steps.div_ceil(pieces) + BLOCK_UNITS);
    let pieces = (1..=most).min_by_key(|&pieces| time(pieces)).unwrap_or(1);
    match columns == 1 || time(pieces) <= tiles * steps / workers + EVEN_UNITS {
        true => self::pieces(config, shape, pieces),
        false => even(config, shape, workers),
    }
}
