//! Which form the kernel takes for a shape: pure functions of the numbers. Who computes what is decided as in
//! [`wna16_mma`](exact).

use crate::cuda::Caps;
use crate::cuda::matmul::plans::FEW as STEP_OF_ROWS;
use crate::cuda::matmul::wna8_sm90::config::Terms;
use crate::cuda::matmul::wna16;
use crate::cuda::matmul::wna16_mma::{config as exact, cost};
use crate::cuda::matmul::wna16_sm90::config::write_unusual;
use crate::cuda::sources::Instance;
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::Activation;
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

pub use exact::{ROWS_AT_ONCE, Schedule};

/// What the kernel is compiled with, besides the format; `include/wna8_mma.cuh` says what each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Config {
    /// Tokens a tile.
    pub tokens: usize,
    /// Warpgroups, of 4 warps each, one behind the other along the rows.
    pub warpgroups: usize,
    /// Strips a warpgroup.
    pub strips: usize,
    /// Units in flight.
    pub stages: usize,
    /// Blocks that a multiprocessor has registers for.
    pub blocks: usize,
}

/// `n64 2x1 w6`: tokens, warpgroups and strips, stages; then blocks, if there are several.
impl std::fmt::Display for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "n{} {}x{} w{}", self.tokens, self.warpgroups, self.strips, self.stages)?;
        write_unusual(f, &[("blocks", self.blocks, 1)])
    }
}

const WARPGROUPS: usize = 2;

/// Stages that were found to help, and those that a ring needs: one is read, one is filled, one is on its way.
const MOST_STAGES: usize = 6;
const LEAST_STAGES: usize = 3;

/// Tokens of the tiles there are: as many as registers hold the sums of, beside what promoting takes.
pub fn tokens(atom: Atom, terms: Terms) -> impl Iterator<Item = usize> + Clone {
    let wide = atom.group == 0 && !terms.sums && !terms.offsets;
    [8, 16, 32, 64].into_iter().chain(wide.then_some(128))
}

/// The configuration for a shape on a device.
pub fn config(atom: Atom, terms: Terms, [m, n, k]: [usize; 3], out: Float, caps: &Caps) -> Config {
    if !cost::ROWS.contains(&m) || exact::copies_wait_in_registers(caps) {
        return by_rows(atom, terms, [m, n, k], out, caps);
    }
    // Plans tell apart as many rows.
    let shape = [m.next_multiple_of(STEP_OF_ROWS), n, k];
    let clocks = |config: &Config| {
        let (work, room) = (config.tiles().work(atom, atom.sums()), config.workers(atom, terms, out, caps));
        cost::clocks(&cost::CODES, work, &config.schedule(shape, room), room, caps)
    };
    let all = all(atom, terms, out, caps).into_iter();
    let least = all.min_by(|one, other| clocks(one).total_cmp(&clocks(other)));
    least.unwrap_or_else(|| by_rows(atom, terms, shape, out, caps))
}

/// The configuration with tiles of as many tokens as there are rows, or of the most.
pub fn by_rows(atom: Atom, terms: Terms, [m, n, k]: [usize; 3], out: Float, caps: &Caps) -> Config {
    let all = tokens(atom, terms);
    let tokens = all.clone().find(|&tokens| m <= tokens).or(all.last()).unwrap_or(8);
    let strips = if exact::is_little([m, n, k], caps) || exact::copies_wait_in_registers(caps) { 1 } else { 2 };
    Config::of(tokens, strips, atom, terms, out, caps)
}

/// Every configuration for a form of atoms on a device.
pub fn all(atom: Atom, terms: Terms, out: Float, caps: &Caps) -> Vec<Config> {
    let strips: &[usize] = if exact::copies_wait_in_registers(caps) { &[1] } else { &[1, 2] };
    let of = |tokens| strips.iter().map(move |&strips| Config::of(tokens, strips, atom, terms, out, caps));
    let mut all: Vec<_> = tokens(atom, terms).flat_map(of).collect();
    all.dedup();
    all
}

impl Config {
    /// With as many stages as a device has room for, and one strip, or fewer tokens, where there is none for enough of them.
    fn of(tokens: usize, strips: usize, atom: Atom, terms: Terms, out: Float, caps: &Caps) -> Self {
        // Two blocks a multiprocessor where their registers are enough for that.
        let many_terms = (atom.bits > 4 || atom.is_wide()) && terms.sums && terms.offsets;
        let waits = exact::copies_wait_in_registers(caps);
        let most = if many_terms { 16 } else { 32 } / if waits { 2 } else { 1 };
        let blocks = if tokens * strips <= most { 2 } else { 1 };
        let config = Self { tokens, warpgroups: WARPGROUPS, strips, stages: 0, blocks };
        let room = exact::room(caps, blocks).saturating_sub(config.shared_bytes(&Form::codes(atom, terms, out)));
        let stages = room / config.stage_bytes(atom, terms);
        let [least, most] = if waits { [2; 2] } else { [LEAST_STAGES, MOST_STAGES] };
        match strips {
            2 if stages < least => Self::of(tokens, 1, atom, terms, out, caps),
            _ if stages < least && tokens > 8 => {
                Self::of(tokens / 2, if waits { 1 } else { 2 }, atom, terms, out, caps)
            }
            _ => Self { stages: stages.clamp(2, most), ..config },
        }
    }

    /// The tiles as the kernel for exact activations has them.
    fn tiles(self) -> exact::Config {
        let Self { tokens, warpgroups, strips, stages, blocks } = self;
        exact::Config { tokens, warpgroups, strips, step: STEP, stages, blocks }
    }

    /// Strips of a tile.
    pub fn tile_strips(self) -> usize {
        self.tiles().tile_strips()
    }

    fn stage_bytes(self, atom: Atom, terms: Terms) -> usize {
        let terms = 1 + usize::from(terms.sums) + usize::from(terms.offsets);
        self.tokens * (STEP + atom.sums() * terms * 4) + self.tile_strips() * atom.bytes()
    }

    /// Blocks that a device has room for at once.
    pub fn workers(self, atom: Atom, terms: Terms, out: Float, caps: &Caps) -> usize {
        let blocks = (caps.shared_bytes as usize + 1024) / (self.shared_bytes(&Form::codes(atom, terms, out)) + 1024);
        caps.multiprocessors.max(1) as usize * blocks.clamp(1, self.blocks)
    }

    /// Who computes what, on so many blocks at once.
    pub fn schedule(self, shape: [usize; 3], workers: usize) -> Schedule {
        exact::schedule(self.tiles(), shape, workers)
    }

    /// Who computes what where the cuts must not depend on m.
    pub fn invariant_schedule(self, shape: [usize; 3]) -> Schedule {
        exact::pieces(self.tiles(), shape, exact::invariant_pieces(shape))
    }
}

impl Tile for Config {
    fn tokens(self) -> usize {
        self.tokens
    }

    fn threads(self, form: &Form) -> usize {
        self.tiles().threads(form)
    }

    fn shared_bytes(self, &Form { atom, terms, out, .. }: &Form) -> usize {
        let staged = if self.tokens < 64 || out == Float::F32 { 0 } else { 32 };
        self.stages * self.stage_bytes(atom, terms) + self.warpgroups * staged * 2 * STRIP + 16
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
            ("BLOCKS", self.blocks),
            ("THREADS", self.threads(form)),
            ("SHARED_BYTES", self.shared_bytes(form)),
        ];
        wna16::instance((&super::SOURCE, "wna8_mma"), form, activation, config)
    }
}
