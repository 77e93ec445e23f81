//! More than 32 rows: W and x have rings of their own, and a block has a multiprocessor to itself.

use super::super::config::Config;
use super::{Machine, Timed, Work, bytes, planes, slowest};
use crate::layout::cuda_wna16::{Atom, STRIP};

/// Of a unit of a strip, in clocks of a multiprocessor: `wgmma` for each token; converting codes; scaling them, or the sums of a group: of
/// each group and of each token of it; zero points of a group.
const WGMMA: f64 = 4.29;
const CONVERT: f64 = 105.0;
const SCALE_WEIGHTS: f64 = 55.3;
const SCALE_SUMS: [f64; 2] = [2.06, 0.842];
const ZEROS: f64 = 13.5;
/// Tensor cores and other instructions run beside each other but for this: powers of both are added, and the root is taken.
const BESIDE: f64 = 1.18;
/// What a block waits for in each unit, by tokens of a tile.
const WAIT: [(usize, f64); 3] = [(48, 84.0), (64, 85.7), (256, 31.0)];
/// Microseconds from asking for a unit of weights until it is there.
const LATENCY: f64 = 1.01;
/// Bytes a clock that a multiprocessor gets from the second-level cache, and the share of it that x may take to stay there.
const PORT: f64 = 45.3;
const KEPT: f64 = 0.8;
/// How sharply the slowest of three decides.
const SLOWEST: f64 = 2.65;
/// Microseconds, of a tile and for each 16 × 64 sums of it: a cluster joins its sums; blocks that share a cut tile do, where few units hide
/// it, of all and of each further block; y is written.
const JOIN: [f64; 2] = [1.21, 0.096];
const CUT: [f64; 3] = [4.0, 0.0775, 0.0313];
const HIDES: f64 = 0.407;
const WRITE: f64 = 0.072;
/// Microseconds where the next kernel may start at once and takes room; where its blocks find none before this one's end, and from which
/// share of multiprocessors on.
const STARTS: f64 = 0.161;
const NO_ROOM: f64 = 0.66;
const ROOM: f64 = 0.8;

/// Clocks of a unit that keep a multiprocessor busy, and those that a block waits besides.
pub(super) fn clocks(config: Config, atom: Atom) -> [f64; 2] {
    let (tokens, strips, groups) = (config.tokens as f64, config.tile_strips() as f64, atom.groups() as f64);
    let zeros = if atom.zero { groups * ZEROS } else { 0.0 };
    let scale = match config.early {
        true => SCALE_WEIGHTS,
        false => groups * (SCALE_SUMS[0] + SCALE_SUMS[1] * tokens),
    };
    let others = strips * (CONVERT * planes(config, atom) + zeros + scale);
    let busy = ((WGMMA * tokens * strips).powf(BESIDE) + others.powf(BESIDE)).powf(BESIDE.recip());
    [busy, WAIT.iter().find(|(of, _)| *of == config.tokens).map_or(0.0, |(_, wait)| *wait)]
}

pub(super) fn microseconds(timed: &Timed, work: &Work, shape @ [m, n, k]: [usize; 3], machine: &Machine) -> f64 {
    let Timed { config, atom, clocks: [busy, waits] } = *timed;
    let unit = ((busy + waits) / machine.clock).max(LATENCY / config.stages_w as f64);
    let [of_unit, of_w] = bytes(config, atom, shape);
    let port = work.units * of_unit / (PORT * machine.clock);
    let of_x = 2.0 * m as f64 * k as f64;
    let again = work.scattered && of_x > KEPT * machine.cache;
    let of_x = if again { of_x * n.div_ceil(config.tile_strips() * STRIP) as f64 } else { 0.0 };
    let memory = (of_w + of_x) / machine.bandwidth;
    let size = (config.tokens * config.tile_strips()) as f64 / 16.0;
    let join = work.rounds * (JOIN[0] + JOIN[1] * size);
    let cut = match work.sharers {
        0.0 => 0.0,
        sharers => CUT[0] * work.units / (work.units + HIDES) + size * (CUT[1] + CUT[2] * sharers),
    };
    let no_room = NO_ROOM * ((work.taken(config, machine.multiprocessors) - ROOM) / (1.0 - ROOM)).clamp(0.0, 1.0);
    let next = if config.trigger == 0 { STARTS } else { 0.0 };
    slowest([work.units * unit, port, memory], SLOWEST) + join + cut + no_room + next + work.tiles * WRITE * size
}
