//! Up to 32 rows: W and x share a ring, two blocks share a multiprocessor, and the next launch fills its rings while this one runs.

use super::super::config::Config;
use super::{Machine, Timed, Work, bytes, planes, slowest};
use crate::layout::cuda_wna16::Atom;

/// What is fitted to times (`fit.rs`).
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    /// Of a unit of a strip, in clocks of a multiprocessor: converting codes; each token; each group, and each token of it.
    pub wgmma: [f64; 4],
    /// The same with `mma.sync`; bytes take so many times as long to convert.
    pub sync: [f64; 3],
    pub sync_bytes: f64,
    /// Zero points of a group; scales and offsets of one that are f32 or multiples of halves.
    pub zeros: f64,
    pub wide: f64,
    /// What a block waits for in each unit, with `wgmma` and with `mma.sync`; two sets of warps wait so many times as long.
    pub wait: [f64; 2],
    pub sets_wait: f64,
    /// Microseconds that `mma.sync` takes longer to begin, and from asking for a unit of weights until it is there.
    pub sync_begins: f64,
    pub latency: f64,
    /// Bytes a clock that a multiprocessor gets from the second-level cache; of the bandwidth on the data sheet; how sharply the slowest of
    /// three decides.
    pub port: f64,
    pub bandwidth: f64,
    pub slowest: f64,
    /// Microseconds, of a tile and for each 16 × 64 sums of it: a cluster joins its sums; blocks that share a cut tile do, where few units
    /// hide it, of all and of each block; y is written.
    pub join: [f64; 2],
    pub cut: [f64; 2],
    pub hides: f64,
    pub write: f64,
    /// Microseconds where the next kernel's blocks find no room before this one's end, and from which share of all slots on they find less.
    pub no_room: f64,
    pub room: f64,
    /// Clusters of several launches lie more densely than they must: of all slots so many times the share that was launched.
    pub crowded: f64,
}

pub(super) const HOPPER: Numbers = Numbers {
    wgmma: [180.0, 1.37, 2.07, 0.751],
    sync: [99.2, 5.45, 9.63],
    sync_bytes: 1.25,
    zeros: 5.76,
    wide: 5.89,
    wait: [99.5, 165.0],
    sets_wait: 1.76,
    sync_begins: 0.149,
    latency: 1.33,
    port: 64.4,
    bandwidth: 0.988,
    slowest: 3.29,
    join: [1.25, 0.0214],
    cut: [2.92, 0.0513],
    hides: 0.45,
    write: 0.181,
    no_room: 1.33,
    room: 0.398,
    crowded: 2.9,
};

/// Clocks of a unit that keep a multiprocessor busy, and those that a block waits besides.
pub(super) fn clocks(numbers: &Numbers, config: Config, atom: Atom) -> [f64; 2] {
    let (tokens, strips, groups) = (config.tokens as f64, config.tile_strips() as f64, atom.groups() as f64);
    let zeros = if atom.zero { numbers.zeros } else { 0.0 };
    let wide = if atom.is_wide() { numbers.wide } else { 0.0 };
    if config.wgmma {
        let [convert, token, group, token_of_group] = numbers.wgmma;
        let of_groups = groups * (group + token_of_group * tokens + zeros);
        return [strips * (convert * planes(config, atom) + token * tokens + of_groups), numbers.wait[0]];
    }
    let [convert, token, group] = numbers.sync;
    let convert = convert * if atom.bits == 8 { numbers.sync_bytes } else { planes(config, atom) };
    [
        strips * (convert + token * tokens + groups * (group + zeros + wide)),
        numbers.wait[1] * if config.sets > 1 { numbers.sets_wait } else { 1.0 },
    ]
}

pub(super) fn microseconds(numbers: &Numbers, timed: &Timed, work: &Work, shape: [usize; 3], machine: &Machine) -> f64 {
    let Timed { config, atom, clocks: [busy, waits] } = *timed;
    let slots = config.blocks as f64;
    let beside = match config.split > 1 {
        true => work.beside.max((slots * work.launched / machine.multiprocessors * numbers.crowded).min(slots)),
        false => 1.0,
    };
    let unit = ((busy * beside).max(busy + waits) / machine.clock).max(numbers.latency / config.stages_w as f64);
    let [of_unit, of_w] = bytes(config, atom, shape);
    let port = work.units * beside * of_unit / (numbers.port * machine.clock);
    let memory = of_w / (numbers.bandwidth * machine.bandwidth);
    let size = (config.tokens * config.tile_strips()) as f64 / 16.0;
    let join = work.rounds * (numbers.join[0] + numbers.join[1] * size);
    let cut = match work.sharers {
        0.0 => 0.0,
        sharers => numbers.cut[0] * work.units / (work.units + numbers.hides) + size * numbers.cut[1] * sharers,
    };
    let no_room = numbers.no_room * work.without_room(config, machine, numbers.room);
    let begins = if config.wgmma { 0.0 } else { numbers.sync_begins };
    let others = join + cut + no_room + begins + work.tiles * numbers.write * size;
    slowest([work.units * unit, port, memory], numbers.slowest) + machine.slower * others
}
