//! More than 32 rows: W and x have rings of their own, and a block has a multiprocessor to itself.

use super::super::config::Config;
use super::{Machine, Timed, Work, bytes, planes, slowest};
use crate::cuda::tiled::Form;
use crate::layout::cuda_wna16::STRIP;
use crate::tensor::Float;

/// Tokens of tiles that wait for something in each unit.
const WAITS: [usize; 3] = [48, 64, 256];

/// The share of the second-level cache that x may take to stay there.
const KEPT: f64 = 0.8;

/// The share of the bandwidth that blocks read weights at where they are in step from the first column on, as their tiles are whole.
const IN_STEP: f64 = 0.75;

/// What is fitted to times (`fit.rs`).
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    /// Of a unit of a strip, in clocks of a multiprocessor: `wgmma` for each token; converting codes; scaling them, or the sums of a group: of
    /// each group and of each token of it, and those for offsets beside half scales (beside f32 ones, as K types have, choices are near
    /// without); zero points of a group. Weights that are computed in f32 take the second two, of a unit and of each group.
    pub wgmma: f64,
    pub convert: f64,
    pub scale_weights: f64,
    pub compute_weights: [f64; 2],
    pub scale_sums: [f64; 2],
    pub offset_sums: [f64; 2],
    pub zeros: f64,
    /// Tensor cores and other instructions run beside each other but for this: powers of both are added, and the root is taken.
    pub beside: f64,
    /// What a block waits for in each unit, by tokens of a tile (`WAITS`).
    pub wait: [f64; 3],
    /// Microseconds from asking for a unit of weights until it is there.
    pub latency: f64,
    /// Bytes a clock that a multiprocessor gets from the second-level cache; how sharply the slowest of three decides.
    pub port: f64,
    pub slowest: f64,
    /// Microseconds, of a tile and for each 16 × 64 sums of it: a cluster joins its sums; blocks that share a cut tile do, where few units
    /// hide it, of all and of each further block; y is written.
    pub join: [f64; 2],
    pub cut: [f64; 3],
    pub hides: f64,
    pub write: f64,
    /// Microseconds where the next kernel may start at once and takes room; where its blocks find none before this one's end, and from which
    /// share of multiprocessors on.
    pub starts: f64,
    pub no_room: f64,
    pub room: f64,
}

pub(super) const HOPPER: Numbers = Numbers {
    wgmma: 4.29,
    convert: 105.0,
    scale_weights: 55.3,
    compute_weights: [248.0, 23.3],
    scale_sums: [2.06, 0.842],
    offset_sums: [6.52, 2.02],
    zeros: 13.5,
    beside: 1.18,
    wait: [84.0, 85.7, 31.0],
    latency: 1.01,
    port: 45.3,
    slowest: 2.65,
    join: [1.21, 0.096],
    cut: [4.0, 0.0775, 0.0313],
    hides: 0.407,
    write: 0.072,
    starts: 0.161,
    no_room: 0.66,
    room: 0.8,
};

/// Clocks of a unit that keep a multiprocessor busy, and those that a block waits besides.
pub(super) fn clocks(numbers: &Numbers, config: Config, form: &Form) -> [f64; 2] {
    let atom = form.atom;
    let (tokens, strips, groups) = (config.tokens as f64, config.tile_strips() as f64, atom.groups() as f64);
    let zeros = if atom.zero { groups * numbers.zeros } else { 0.0 };
    let scale = match config.early {
        true if config.computes_weights(form) => numbers.compute_weights[0] + groups * numbers.compute_weights[1],
        true => numbers.scale_weights,
        false => {
            let has_offsets = atom.offset && atom.scale != Float::F32;
            let offsets = if has_offsets { numbers.offset_sums } else { [0.0; 2] };
            groups * (numbers.scale_sums[0] + offsets[0] + (numbers.scale_sums[1] + offsets[1]) * tokens)
        }
    };
    let others = strips * (numbers.convert * planes(config, atom) + zeros + scale);
    let beside = numbers.beside;
    let busy = ((numbers.wgmma * tokens * strips).powf(beside) + others.powf(beside)).powf(beside.recip());
    let wait = WAITS.into_iter().zip(numbers.wait).find(|(of, _)| *of == config.tokens);
    [busy, wait.map_or(0.0, |(_, wait)| wait)]
}

pub(super) fn microseconds(
    numbers: &Numbers,
    timed: &Timed,
    work: &Work,
    shape @ [m, n, k]: [usize; 3],
    machine: &Machine,
) -> f64 {
    let Timed { config, atom, clocks: [busy, waits] } = *timed;
    let unit = ((busy + waits) / machine.clock).max(numbers.latency / config.stages_w as f64);
    let [of_unit, of_w] = bytes(config, atom, shape);
    let port = work.units * of_unit / (numbers.port * machine.clock);
    let of_x = 2.0 * m as f64 * k as f64;
    let again = work.scattered && of_x > KEPT * machine.cache;
    let of_x = if again { of_x * n.div_ceil(config.tile_strips() * STRIP) as f64 } else { 0.0 };
    let in_step = if config.whole { IN_STEP } else { 1.0 };
    let memory = (of_w + of_x) / (machine.bandwidth * in_step);
    let size = (config.tokens * config.tile_strips()) as f64 / 16.0;
    let join = work.rounds * (numbers.join[0] + numbers.join[1] * size);
    let cut = match work.sharers {
        0.0 => 0.0,
        sharers => {
            numbers.cut[0] * work.units / (work.units + numbers.hides)
                + size * (numbers.cut[1] + numbers.cut[2] * sharers)
        }
    };
    let no_room = numbers.no_room * work.without_room(config, machine, numbers.room);
    let next = if config.trigger == 0 { numbers.starts } else { 0.0 };
    let others = join + cut + no_room + next + work.tiles * numbers.write * size;
    slowest([work.units * unit, port, memory], numbers.slowest) + machine.slower * others
}
