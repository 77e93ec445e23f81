//! What a product is expected to take in a configuration: a model of the machine, from which the choice follows.
//!
//! ```text
//! unit (128 columns of a tile) = max(products, promoting + converting) + UNIT                     more than 16 tokens: wgmma
//!                              = SYNC_UNIT + strips · (SYNC_STRIP + groups · SYNC_GROUP)          up to 16: mma.sync
//! whole   = rounds · (units · unit + tile's end)                           every tile by one block
//! cut     = units / blocks · unit + ends of all pieces + JOIN              the last round's tiles cut evenly among all blocks
//! cluster = rounds · (units / blocks of it · unit + tile's end + its join)
//! time    = the slower of these clocks and memory
//! ```
//!
//! Numbers are in clocks. They were fitted so that what is chosen is near the fastest candidate of 327 products drawn at random, in eight formats on one
//! H200 (`docs/decisions/0026-choice-by-cost.md`), of more than 20 rows alone; joins of up to 16 tokens were halved by steps of models. They order
//! candidates, and are no measurements of their parts.

use super::config::{Config, Schedule};
use crate::cuda::Caps;
use crate::cuda::tiled::Form;
use crate::layout::cuda_wna16::{STEP, STRIP};

/// Multiply-adds of bytes that a multiprocessor has in a clock.
const PRODUCTS: f64 = 4096.0;

/// Tokens below which an instruction takes no less time.
const LEAST_TOKENS: usize = 64;

/// Promoting the sums of a group: each token's scale, then each strip's sum of it, and each further term of that. What turns the words of a strip
/// into bytes, and what a unit takes besides, and with a second strip.
const TOKEN: f64 = 2.7;
const PROMOTE: f64 = 2.5;
const TERM: f64 = 1.0;
const CONVERT: f64 = 395.0;
const UNIT: f64 = 247.0;
const SECOND_STRIP: f64 = 80.0;

/// A tile's end, and what it takes for each token and strip of a warpgroup; more where a cluster joins its sums.
const TILE: f64 = 2510.0;
const STORE: f64 = 38.7;
const CLUSTER: f64 = 45.9;

/// What cut tiles take to be joined, and for each token and strip of each block that shares one.
const JOIN: f64 = 9516.0;
const SHARER: f64 = 6.7;

/// The same with `mma.sync`: of a unit, a strip of up to 8 tokens, a group; twice the tokens take so many times as long, as two blocks at work
/// on a multiprocessor do.
const SYNC_UNIT: f64 = 864.0;
const SYNC_STRIP: f64 = 57.4;
const SYNC_GROUP: f64 = 123.0;
const SYNC_SIXTEEN: f64 = 3.3;
const SYNC_BESIDE: f64 = 1.4;
const SYNC_TILE: f64 = 2888.0;
const SYNC_CLUSTER: f64 = 995.0;
const SYNC_JOIN: f64 = JOIN / 4.0;
const SYNC_SHARER: f64 = 223.0;

/// Clocks of a microsecond, where the clock may be 1980 at most, and the share of its bandwidth that memory gives.
const CLOCK: f64 = 1755.0 / 1980.0;
const SHARE: f64 = 0.875;

/// What is done one after the other by the block that has most of it.
struct Work {
    units: f64,
    ends: f64,
    /// Blocks that share a cut tile; None: none is cut.
    sharers: Option<f64>,
}

impl Work {
    fn of(
        config: Config,
        &Schedule { steps, rows, columns, waves, workers, sharers, cut }: &Schedule,
        slots: f64,
    ) -> Self {
        if config.split > 1 {
            let rounds = rounds_of_clusters(config.split, rows.saturating_mul(columns), slots) as f64;
            return Self { units: rounds * steps.div_ceil(config.split) as f64, ends: rounds, sharers: None };
        }
        if cut == 0 || sharers == cut {
            let rounds = (waves + cut.div_ceil(workers.max(1))) as f64;
            return Self { units: rounds * steps as f64, ends: rounds, sharers: None };
        }
        let left = cut.saturating_mul(steps).div_ceil(sharers.max(1)) as f64;
        let ends = waves as f64 + left / steps as f64 + 1.0;
        Self { units: waves as f64 * steps as f64 + left, ends, sharers: Some(sharers as f64 / cut as f64) }
    }
}

/// Rounds in which clusters of so many blocks compute tiles, where there is room for so many blocks.
fn rounds_of_clusters(split: usize, tiles: usize, slots: f64) -> usize {
    // Clusters stay within a part of the processor.
    let share = match split {
        ..=2 => 1.0,
        4 => 0.91,
        _ => 0.88,
    };
    tiles.div_ceil((slots / split as f64 * share).max(1.0) as usize)
}

/// Rounds of a product's clusters.
pub(super) fn rounds(config: Config, shape: [usize; 3], caps: &Caps) -> usize {
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let Schedule { rows, columns, .. } = config.schedule(shape, multiprocessors);
    rounds_of_clusters(config.split, rows.saturating_mul(columns), (multiprocessors * config.blocks) as f64)
}

/// Microseconds that a product is expected to take, but for what all take.
pub(super) fn microseconds(config: Config, form: &Form, shape @ [m, n, k]: [usize; 3], caps: &Caps) -> f64 {
    let known = caps.or_known();
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let schedule = config.schedule(shape, multiprocessors);
    let work = Work::of(config, &schedule, (multiprocessors * config.blocks) as f64);
    let (atom, terms) = (form.atom, form.terms);
    let (tokens, strips, groups) = (config.tokens as f64, config.strips as f64, atom.sums() as f64);
    let tile_strips = (config.warpgroups * config.strips) as f64;
    let mut clocks = if config.tokens <= 16 {
        let sixteen = if config.tokens > 8 { SYNC_SIXTEEN } else { 1.0 };
        let unit = SYNC_UNIT + strips * (SYNC_STRIP * sixteen + SYNC_GROUP * groups);
        let blocks = schedule.rows.saturating_mul(schedule.columns).saturating_mul(config.split);
        let beside = if config.blocks == 2 && blocks > multiprocessors { SYNC_BESIDE } else { 1.0 };
        let end = SYNC_TILE + if config.split > 1 { SYNC_CLUSTER } else { 0.0 };
        work.units * unit * beside + work.ends * end
    } else {
        let products = tile_strips * (STRIP * config.tokens.max(LEAST_TOKENS) * STEP) as f64 / PRODUCTS;
        let further = f64::from(u8::from(terms.sums)) + f64::from(u8::from(terms.offsets));
        let promoting = groups * tokens * (TOKEN + strips * (PROMOTE + TERM * further));
        let converting = if atom.bits < 8 { strips * CONVERT } else { 0.0 };
        let unit = products.max(promoting + converting) + UNIT + SECOND_STRIP * (strips - 1.0);
        let end = TILE + tokens * strips * (STORE + if config.split > 1 { CLUSTER } else { 0.0 });
        work.units * unit + work.ends * end
    };
    if let Some(sharers) = work.sharers {
        clocks += match config.tokens {
            ..=16 => SYNC_JOIN + SYNC_SHARER * sharers,
            _ => JOIN + SHARER * tokens * strips * sharers,
        };
    }
    let computing = clocks / (f64::from(known.clock_khz) * 1e-3 * CLOCK);
    let weights = n.div_ceil(STRIP) as f64 * schedule.steps as f64 * atom.bytes() as f64;
    // Codes of x are written and read.
    let bytes = weights + 2.0 * m as f64 * k as f64 + m as f64 * n as f64 * form.out.size_bytes() as f64;
    let memory = bytes / (f64::from(known.memory_mb_per_s) * SHARE);
    (computing.powi(4) + memory.powi(4)).sqrt().sqrt()
}
