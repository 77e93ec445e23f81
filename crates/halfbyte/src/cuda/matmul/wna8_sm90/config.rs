//! Which form the kernel takes for a shape: pure functions of the numbers.

use super::cost;
use crate::cuda::Caps;
use crate::cuda::matmul::plans::alike;
use crate::cuda::matmul::wna16;
use crate::cuda::matmul::wna16_sm90::config as exact;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

pub use crate::cuda::matmul::wna8::Terms;
pub use exact::Schedule;

impl Terms {
    /// Numbers of a group in shared memory, for each token.
    fn numbers(self) -> usize {
        if self.pixels { 4 } else { 1 + usize::from(self.sums) + usize::from(self.offsets) }
    }
}

/// What the kernel is compiled with, besides the format; `include/wna8_sm90.cuh` says what each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Tokens a tile.
    pub tokens: usize,
    /// Warpgroups that convert and multiply.
    pub warpgroups: usize,
    /// Strips a warpgroup.
    pub strips: usize,
    /// Units in flight.
    pub stages: usize,
    /// Blocks that share the columns of one tile.
    pub split: usize,
    /// Whether tiles stay whole, where blocks would share those of the last round: a matter of the schedule alone.
    pub whole: bool,
    /// Blocks that a multiprocessor has room for.
    pub blocks: usize,
    /// Units left to copy when the next kernel may start; 0: at once.
    pub trigger: usize,
    /// Units that are fetched into L2 behind those in flight, while x is quantised.
    pub prefetch: usize,
}

/// Rows up to which one tile has all of them, as narrower ones read weights more often, and clusters are taken only where all of them run at
/// once: between a model's kernels a second round is slow, as its rings begin empty.
const FEW_ROWS: usize = 32;

/// Warpgroups of products.
const WARPGROUPS: usize = 2;

/// One block on a multiprocessor, in no cluster; it has no stages yet.
pub(in crate::cuda) const ALONE: Config = Config {
    tokens: 128,
    warpgroups: WARPGROUPS,
    strips: 1,
    stages: 0,
    split: 1,
    whole: false,
    blocks: 1,
    trigger: 1,
    prefetch: 0,
};

/// Shared memory that a block may have alone on a multiprocessor, and as one of two.
const ALONE_BYTES: usize = 232_448;
const SHARED_BY_TWO_BYTES: usize = 115_712;

/// Units that were found to be enough in flight, up to so many tokens a tile.
const MOST_STAGES: [(usize, usize); 3] = [(16, 8), (64, 6), (256, 5)];

/// Units fetched ahead where the kernel waits for memory: 18 MB on 132 multiprocessors, a third of L2.
const PREFETCHED: usize = 8;

/// Units of a block below which few tiles are shared by clusters, and below which its ring holds most of them.
const FEW_UNITS: usize = 8;
const SOME_UNITS: usize = 32;

/// `n64 2x1 w6`: tokens, warpgroups and strips, stages; then what is not 1 or 0.
impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "n{} {}x{} w{}", self.tokens, self.warpgroups, self.strips, self.stages)?;
        let rest = [("trigger", self.trigger, 0), ("prefetch", self.prefetch, 0)];
        exact::write_unusual(f, &[("split", self.split, 1), ("blocks", self.blocks, 1)])?;
        if self.whole {
            write!(f, " whole")?;
        }
        exact::write_unusual(f, &rest)
    }
}

/// Tokens of a tile at most, where groups have scales: those in f32, offsets, and what becomes codes of 4 bits beside zero points, take registers.
fn most_tokens(atom: Atom, terms: Terms) -> usize {
    let small_sums = atom.group == 32 && terms.sums && (atom.is_wide() || atom.bits == 3);
    let wide = atom.is_wide() && (atom.bits > 4 || atom.multiples || terms.offsets);
    if wide || small_sums { 64 } else { 128 }
}

/// Whether blocks of one warpgroup, two on a multiprocessor, have registers for 128 tokens.
fn pairs(atom: Atom, terms: Terms) -> bool {
    atom.group != 32 && !atom.is_wide() && !terms.sums && !terms.offsets
}

/// The configuration for a shape on a device: what the model of the machine expects to be the fastest; of a single strip by a rule.
pub fn config(form: &Form, [m, n, k]: [usize; 3], caps: &Caps) -> Config {
    let &Form { atom, terms, out, .. } = form;
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    if n <= STRIP {
        return by_rule(atom, terms, [m, n, k], out, multiprocessors);
    }
    let ([first, last], steps) = (alike(m, n, caps), k.div_ceil(STEP));
    let microseconds = |config: Config| {
        let of = |m: usize| cost::microseconds(config, form, [m, n, k], caps);
        if first == last { of(last) } else { (of(first) + of(last)) / 2.0 }
    };
    let all = candidates(atom, terms, last, out).into_iter();
    let all = all.filter(|config| config.warpgroups == WARPGROUPS && config.prefetch == 0 && config.split <= steps);
    let at_once = |config: Config| config.split == 1 || cost::rounds(config, [last, n, k], caps) == 1;
    let all = all.filter(|&config| m > FEW_ROWS || config.tokens >= m && at_once(config));
    let all = all.map(|config| (microseconds(config), config));
    let least = all.min_by(|(one, _), (other, _)| one.total_cmp(other));
    match least {
        Some((_, config)) => config.with_prefetch(n, k, multiprocessors),
        None => by_rule(atom, terms, [m, n, k], out, multiprocessors),
    }
}

/// The configuration for a shape, for y of a type on a device of so many multiprocessors, by thresholds.
///
/// Up to 16 rows the kernel waits for memory: `mma.sync`, and a block fills its ring, and L2 behind it, while x is quantised. Blocks
/// start then, one on each multiprocessor, since two have no room there. Weights of 4 bits take two strips a warpgroup up to 64
/// rows, which share what is read of x. With many rows what goes from L2 to the multiprocessors counts (they take 42 bytes a
/// clock): 256 tokens a tile where the registers hold their sums and tiles are enough for most multiprocessors.
fn by_rule(atom: Atom, terms: Terms, [m, n, k]: [usize; 3], out: Float, multiprocessors: usize) -> Config {
    let exact = !terms.sums && !terms.offsets;
    let wide = atom.has_rows() && exact;
    let (rows, steps) = (n.div_ceil(STRIP), k.div_ceil(STEP));
    let widest = rows.div_ceil(WARPGROUPS) * m.div_ceil(256);
    let most = if wide && m > 128 && widest * 4 >= multiprocessors * 3 { 256 } else { most_tokens(atom, terms) };
    let tokens = [8, 16, 32, 64].into_iter().find(|&tokens| m <= tokens).unwrap_or(most);
    // One strip would be half of a tile: a block has one, and a multiprocessor two blocks.
    if n <= STRIP && m > 128 && pairs(atom, terms) {
        let pair = Config { tokens: 128, warpgroups: 1, blocks: 2, ..ALONE };
        return pair.fitted(atom, terms, out);
    }
    let units = rows.div_ceil(4) * steps / multiprocessors;
    let sync = tokens <= 16;
    let two = atom.bits <= 4 && units >= FEW_UNITS && (tokens <= 64 || wide && tokens == 128);
    let strips = if sync { 8 / atom.field_bits() as usize } else { 1 + usize::from(two) };
    let alone = Config { tokens, strips, ..ALONE }.with_prefetch(n, k, multiprocessors);
    let tiles = m.div_ceil(tokens) * rows.div_ceil(alone.tile_strips());
    // Few tiles are each shared by a cluster, the largest that fits the device at once.
    let sizes: &[usize] = if sync { &[8, 4, 2] } else { &[2] };
    let fits = |&&split: &&usize| tiles * split <= multiprocessors * 7 / 8 && split <= steps;
    let split = if units < FEW_UNITS { sizes.iter().find(fits).copied().unwrap_or(1) } else { 1 };
    let blocks = 1 + usize::from(split > 1 && sync);
    let config = if split > 1 { Config { split, blocks, trigger: 0, ..alone } } else { alone };
    config.fitted(atom, terms, out)
}

/// The configuration for a tile where there are several weights.
pub fn grouped(atom: Atom, terms: Terms, [tokens, n, k]: [usize; 3], out: Float, multiprocessors: usize) -> Config {
    let config = by_rule(atom, terms, [tokens, n, k], out, multiprocessors);
    Config { stages: 0, split: 1, blocks: 1, trigger: 1, prefetch: 0, ..config }.fitted(atom, terms, out)
}

/// Every configuration that is compiled for a form of atoms, whatever shape and device are.
pub fn every(atom: Atom, terms: Terms, out: Float) -> Vec<Config> {
    let pair = pairs(atom, terms).then_some(Config { tokens: 128, warpgroups: 1, blocks: 2, ..ALONE });
    let mut all = Vec::from_iter(pair);
    let wide = atom.has_rows() && !terms.sums && !terms.offsets;
    let most = if wide { 256 } else { most_tokens(atom, terms) };
    for tokens in [8, 16, 32, 64, 128, 256].into_iter().filter(|&tokens| tokens <= most) {
        let sync = tokens <= 16;
        let two = atom.bits <= 4 && (tokens <= 64 || wide && tokens == 128);
        let strips = match sync {
            true => vec![8 / atom.field_bits() as usize],
            false => (1..=1 + usize::from(two)).collect(),
        };
        for strips in strips {
            let sizes: &[usize] = match (sync, strips) {
                (true, _) => &[2, 4, 8],
                (false, 1) => &[2],
                _ => &[],
            };
            let alone = Config { tokens, strips, ..ALONE };
            let shared = |&split| Config { split, blocks: 1 + usize::from(sync), trigger: 0, ..alone };
            all.push(alone);
            all.extend(sizes.iter().map(shared));
            all.extend(sync.then_some(Config { prefetch: PREFETCHED, ..alone }));
        }
    }
    all.into_iter().map(|config| config.fitted(atom, terms, out)).collect()
}

/// Configurations that may be worth measuring for a number of rows: tiles whole and cut.
pub fn candidates(atom: Atom, terms: Terms, m: usize, out: Float) -> Vec<Config> {
    let most = [8, 16, 32, 64, 128].into_iter().find(|&tokens| m <= tokens).unwrap_or(256);
    let mut all = every(atom, terms, out);
    all.retain(|config| config.tokens <= most && config.tokens * 4 >= most.min(128));
    let whole: Vec<Config> =
        all.iter().filter(|config| config.split == 1).map(|&config| Config { whole: true, ..config }).collect();
    all.extend(whole);
    all
}

impl Config {
    /// With units fetched into L2 where the kernel waits for memory.
    fn with_prefetch(self, n: usize, k: usize, multiprocessors: usize) -> Self {
        let units = n.div_ceil(STRIP).div_ceil(4) * k.div_ceil(STEP) / multiprocessors;
        let waits = self.tokens <= 16 && self.split == 1 && !self.whole && units >= SOME_UNITS;
        Self { prefetch: if waits { PREFETCHED } else { 0 }, ..self }
    }

    pub(in crate::cuda) fn fitted(self, atom: Atom, terms: Terms, out: Float) -> Self {
        let most = if self.blocks == 2 { SHARED_BY_TWO_BYTES } else { ALONE_BYTES };
        let others = Self { stages: 0, ..self }.shared_bytes(&Form::codes(atom, terms, out));
        let room = most.saturating_sub(others);
        let enough = MOST_STAGES.iter().find(|&&(tokens, _)| self.tokens <= tokens).map_or(2, |&(_, stages)| stages);
        Self { stages: (room / (self.stage_bytes(atom, terms) + 16)).min(enough), ..self }
    }

    /// Strips of a block's tile.
    fn tile_strips(self) -> usize {
        self.warpgroups * self.strips
    }

    fn stage_bytes(self, atom: Atom, terms: Terms) -> usize {
        self.tokens * 128 + atom.sums() * terms.numbers() * self.tokens * 4 + self.tile_strips() * atom.bytes()
    }

    /// The tiles as the kernel for exact activations has them.
    pub(in crate::cuda) fn tiles(self) -> exact::Config {
        let Self { tokens, warpgroups, strips, split, whole, blocks, .. } = self;
        exact::Config { tokens, warpgroups, strips, split, whole, blocks, ..exact::TWO_BY_TWO }
    }

    /// Who computes what.
    pub fn schedule(self, shape: [usize; 3], multiprocessors: usize) -> Schedule {
        // Of two blocks with a warpgroup each both compute; of others one fills its ring for the next launch.
        let workers = if self.warpgroups == 1 { multiprocessors * self.blocks } else { multiprocessors };
        Schedule::new(self.tiles(), shape, workers)
    }
}

impl Tile for Config {
    fn tokens(self) -> usize {
        self.tokens
    }

    fn threads(self, _: &Form) -> usize {
        self.warpgroups * 128 + if self.tokens > 32 { 128 } else { 32 }
    }

    fn split(self) -> usize {
        self.split
    }

    fn shared_bytes(self, &Form { atom, terms, out, .. }: &Form) -> usize {
        let parts = self.tile_strips() * 4 * (self.tokens / 8);
        let staged = if self.tokens < 64 || self.split > 1 || out == Float::F32 { 0 } else { 64 };
        let exchange = if self.split > 1 { parts.next_multiple_of(self.split) * 512 } else { 0 };
        self.stages * (self.stage_bytes(atom, terms) + 16) + self.warpgroups * staged * 128 + exchange + 32
    }

    fn parts_bytes(self, schedule: &Schedule) -> usize {
        self.tiles().parts_bytes(schedule)
    }

    fn instance(self, form: &Form, activation: Activation) -> Instance {
        let config = [
            ("OFFSET", form.terms.offsets.into()),
            ("NT", self.tokens),
            ("WARPGROUPS", self.warpgroups),
            ("STRIPS", self.strips),
            ("STAGES", self.stages),
            ("SPLIT", self.split),
            ("BLOCKS", self.blocks),
            ("TRIGGER", self.trigger),
            ("PREFETCH", self.prefetch),
            ("THREADS", self.threads(form)),
            ("SHARED_BYTES", self.shared_bytes(form)),
        ];
        wna16::instance((&super::SOURCE, "wna8_sm90"), form, activation, config)
    }
}
