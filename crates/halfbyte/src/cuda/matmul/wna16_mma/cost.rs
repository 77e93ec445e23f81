//! What a product by `mma.sync` is expected to take in a configuration: a model of the machine, from which the choice follows for some
//! rows, of this kernel and of [`wna8_mma`](crate::cuda::matmul::wna8_mma).
//!
//! ```text
//! unit (128 columns of a tile) = max(LEAST, memory, blocks at work on a multiprocessor ·
//!                                    (strips · (STRIP + groups · GROUP + tokens · (PRODUCT + groups · PROMOTE)) + tokens · TOKEN))
//! whole tiles                  = rounds · (units · unit + BLOCK)
//! cut tiles                    = the same of their pieces + JOIN + pieces of a tile · strips · tokens · PART
//! ```
//!
//! Numbers are in clocks. They were fitted to times of every configuration of 387 products drawn at random on one H200, then so that what is
//! chosen is near the fastest of these (`docs/decisions/0026-choice-by-cost.md`). They order candidates, and are no measurements of their parts.

use super::config::Schedule;
use crate::cuda::Caps;
use std::ops::RangeInclusive;

/// Rows that the model is for: of fewer, rules follow what was measured in steps of models; more were not timed.
pub const ROWS: RangeInclusive<usize> = 17..=512;

/// What parts of a product take.
pub struct Numbers {
    /// A unit, at least.
    least: f64,
    /// Converting a strip's weights, and what each of its groups takes besides.
    strip: f64,
    group: f64,
    /// A token and strip, and what each group of it takes besides.
    product: f64,
    promote: f64,
    /// A token, whose columns are copied and read.
    token: f64,
    /// The beginning and end of a block's tile.
    block: f64,
    /// A tile that several blocks share, and a token and strip of the sums of each.
    join: f64,
    part: f64,
}

/// Of exact activations.
pub const EXACT: Numbers = Numbers {
    least: 931.0,
    strip: 130.0,
    group: 42.9,
    product: 6.03,
    promote: 0.446,
    token: 11.2,
    block: 5271.0,
    join: 3671.0,
    part: 4.73,
};

/// Of quantised ones.
pub const CODES: Numbers = Numbers {
    least: 0.0,
    strip: 14.9,
    group: 70.4,
    product: 1.9,
    promote: 1.73,
    token: 13.9,
    block: 3799.0,
    join: 6876.0,
    part: 3.15,
};

/// Clocks of a microsecond, where the clock may be 1980 at most, and the share of its bandwidth that memory gives.
const CLOCK: f64 = 1750.0 / 1980.0;
const SHARE: f64 = 0.854;

/// A tile: strips, tokens, groups of 128 columns that are scaled apart, and bytes of its weights in them.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Strips.
    pub strips: usize,
    /// Tokens.
    pub tokens: usize,
    /// Groups.
    pub groups: usize,
    /// Bytes.
    pub bytes: usize,
}

/// Clocks of a product on a device that has room for so many blocks at once.
pub fn clocks(numbers: &Numbers, work: Work, schedule: &Schedule, room: usize, caps: &Caps) -> f64 {
    let known = caps.or_known();
    let clock = f64::from(known.clock_khz) * 1e-3 * CLOCK;
    // Bytes that memory gives in a clock.
    let memory = f64::from(known.memory_mb_per_s) * SHARE / clock;
    let (room, multiprocessors) = (room.max(1), caps.multiprocessors.max(1) as usize);
    let [strips, tokens, groups] = [work.strips, work.tokens, work.groups].map(|count| count as f64);
    let of_strip = numbers.strip + groups * numbers.group + tokens * (numbers.product + groups * numbers.promote);
    let alone = strips * of_strip + tokens * numbers.token;
    let unit = |blocks: usize| {
        let beside = blocks.min(room).div_ceil(multiprocessors).max(1) as f64;
        let copied = (work.bytes * blocks.min(room)) as f64 / memory;
        numbers.least.max(copied).max(beside * alone)
    };
    let rounds = |blocks: usize, units: f64| {
        let round = |blocks: usize| units * unit(blocks) + numbers.block;
        let rest = if blocks.is_multiple_of(room) { 0.0 } else { round(blocks % room) };
        (blocks / room) as f64 * round(room) + rest
    };
    let whole = schedule.waves as f64 * rounds(schedule.workers, schedule.steps as f64);
    if schedule.cut == 0 {
        return whole;
    }
    let is_even = schedule.sharers.is_multiple_of(schedule.cut);
    let of_tile = schedule.sharers as f64 / schedule.cut as f64 + if is_even { 0.0 } else { 1.0 };
    let units = (schedule.cut * schedule.steps) as f64 / schedule.sharers.max(1) as f64;
    let units = if is_even { units.ceil() } else { units };
    whole + rounds(schedule.sharers, units) + numbers.join + of_tile * strips * tokens * numbers.part
}
