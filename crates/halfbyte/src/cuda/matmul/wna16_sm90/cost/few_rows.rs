//! Up to 32 rows: W and x share a ring, two blocks share a multiprocessor, and the next launch fills its rings while this one runs.

use super::super::config::Config;
use super::{Machine, Timed, Work, bytes, planes, slowest};
use crate::layout::cuda_wna16::Atom;

/// Of a unit of a strip, in clocks of a multiprocessor: converting codes; each token; each group, and each token of it.
const WGMMA: [f64; 4] = [180.0, 1.37, 2.07, 0.751];
/// The same with `mma.sync`; bytes take so many times as long to convert.
const SYNC: [f64; 3] = [99.2, 5.45, 9.63];
const SYNC_BYTES: f64 = 1.25;
/// Zero points of a group; scales and offsets of one that are f32 or multiples of halves.
const ZEROS: f64 = 5.76;
const WIDE: f64 = 5.89;
/// What a block waits for in each unit, with `wgmma` and with `mma.sync`, which takes longer to begin as well, in microseconds; two sets of
/// warps wait so many times as long.
const WAIT: [f64; 2] = [99.5, 165.0];
const SYNC_BEGINS: f64 = 0.149;
const SETS_WAIT: f64 = 1.76;
/// Microseconds from asking for a unit of weights until it is there.
const LATENCY: f64 = 1.33;
/// Bytes a clock that a multiprocessor gets from the second-level cache; of the bandwidth on the data sheet; how sharply the slowest of three
/// decides.
const PORT: f64 = 64.4;
const BANDWIDTH: f64 = 0.988;
const SLOWEST: f64 = 3.29;
/// Microseconds, of a tile and for each 16 × 64 sums of it: a cluster joins its sums; blocks that share a cut tile do, where few units hide
/// it, of all and of each block; y is written.
const JOIN: [f64; 2] = [1.25, 0.0214];
const CUT: [f64; 2] = [2.92, 0.0513];
const HIDES: f64 = 0.45;
const WRITE: f64 = 0.181;
/// Microseconds where the next kernel's blocks find no room before this one's end, and from which share of all slots on they find less.
const NO_ROOM: f64 = 1.33;
const ROOM: f64 = 0.398;
/// Clusters of several launches lie more densely than they must: of all slots so many times the share that was launched.
const CROWDED: f64 = 2.9;

/// Clocks of a unit that keep a multiprocessor busy, and those that a block waits besides.
pub(super) fn clocks(config: Config, atom: Atom) -> [f64; 2] {
    let (tokens, strips, groups) = (config.tokens as f64, config.tile_strips() as f64, atom.groups() as f64);
    let (zeros, wide) = (if atom.zero { ZEROS } else { 0.0 }, if atom.is_wide() { WIDE } else { 0.0 });
    if config.wgmma {
        let [convert, token, group, token_of_group] = WGMMA;
        let of_groups = groups * (group + token_of_group * tokens + zeros);
        return [strips * (convert * planes(config, atom) + token * tokens + of_groups), WAIT[0]];
    }
    let [convert, token, group] = SYNC;
    let convert = convert * if atom.bits == 8 { SYNC_BYTES } else { planes(config, atom) };
    [
        strips * (convert + token * tokens + groups * (group + zeros + wide)),
        WAIT[1] * if config.sets > 1 { SETS_WAIT } else { 1.0 },
    ]
}

pub(super) fn microseconds(timed: &Timed, work: &Work, shape: [usize; 3], machine: &Machine) -> f64 {
    let Timed { config, atom, clocks: [busy, waits] } = *timed;
    let slots = config.blocks as f64;
    let beside = match config.split > 1 {
        true => work.beside.max((slots * work.launched / machine.multiprocessors * CROWDED).min(slots)),
        false => 1.0,
    };
    let unit = ((busy * beside).max(busy + waits) / machine.clock).max(LATENCY / config.stages_w as f64);
    let [of_unit, of_w] = bytes(config, atom, shape);
    let port = work.units * beside * of_unit / (PORT * machine.clock);
    let memory = of_w / (BANDWIDTH * machine.bandwidth);
    let size = (config.tokens * config.tile_strips()) as f64 / 16.0;
    let join = work.rounds * (JOIN[0] + JOIN[1] * size);
    let cut = match work.sharers {
        0.0 => 0.0,
        sharers => CUT[0] * work.units / (work.units + HIDES) + size * CUT[1] * sharers,
    };
    let no_room = NO_ROOM * ((work.taken(config, machine.multiprocessors) - ROOM) / (1.0 - ROOM)).clamp(0.0, 1.0);
    let begins = if config.wgmma { 0.0 } else { SYNC_BEGINS };
    slowest([work.units * unit, port, memory], SLOWEST) + join + cut + no_room + begins + work.tiles * WRITE * size
}
