//! Which form of `wna16_sm90.cu` an implicit product takes, and who computes what: pure functions of the numbers.
//!
//! Convolutions have many tokens (output pixels) and few outputs and columns, unlike the products of language models: tiles are
//! short, whole rounds of them decide, and each box of x is read from the second-level cache again for each position of the
//! kernel. So every width of a tile is tried with a model of its time, in clocks of a multiprocessor:
//!
//! ```text
//! unit (128 columns of a tile) = max(products at 2048 a clock, bytes of W and x at 45 a clock, conversion of W) + UNIT
//! tile  = its units + TILE + tokens · strips of a warpgroup · EPILOGUE (· 2 if two sets join their sums)
//! whole = rounds · tile                      every tile by one block
//! cut   = units / blocks + 2 tiles' ends + JOIN    the last round's tiles cut evenly among all blocks
//! parts = units / parts + 2 tiles' ends + JOIN_PARTS + parts · (PART + tokens · strips of a warpgroup)
//!                                                  few tiles, each in as many parts of its own, which one block adds up
//! ```
//!
//! Its constants were fitted to 120 times of the 3×3 layers of ResNet-50 at a batch of 32 on an H200, from which it is 10 % off on
//! average; what it takes there is the fastest form or within 4 % of it (`docs/decisions/0010`). On 132 multiprocessors it takes,
//! with codes of 4 bits and one scale a row, the widths that the tests of this file record: 7² × 512 outputs are 33 × 4 tiles of
//! 48 pixels, one for each multiprocessor; 14² × 256 are 66 × 2 of 96; 28² × 128 are 131 of 192.
//! 64 outputs are one strip: two warpgroups take its units in turn, where a tile of two strips would be half empty; or two
//! blocks share a multiprocessor, with a warpgroup each.

use crate::cuda::matmul::wna16_sm90::config::{Config, Schedule, TWO_BY_TWO};
use crate::cuda::tiled::{Form, Tile};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

/// Pixels a tile.
const TOKENS: [usize; 6] = [48, 64, 96, 128, 192, 256];

/// Clocks of a tile besides its units, and of the end of a tile for each of its pixels and strips of a warpgroup.
pub(in crate::cuda) const TILE: usize = 350;
pub(in crate::cuda) const EPILOGUE: usize = 7;

/// Clocks of adding up parts of a cut tile.
const JOIN: usize = 9700;

/// The same where every part is one tile's, besides each part; of each part besides its pixels. Fitted to eight layers of 1 to 8 tiles in 2 to
/// 64 parts on an H200.
const JOIN_PARTS: usize = 1000;
pub(in crate::cuda) const PART: usize = 340;

/// Parts of a tile at most: before that the block that adds them up takes longer than multiplying.
const MOST_PARTS: usize = 32;

/// Multiply-adds and bytes from the second-level cache that a multiprocessor has in a clock.
const PRODUCTS: usize = 2048;
const BYTES: usize = 45;

/// Clocks of converting a strip of a unit, and of a unit besides.
const CONVERSION: usize = 100;
pub(in crate::cuda) const UNIT: usize = 40;

/// Pixels below which an instruction takes no less time: its weights come from registers.
const LEAST_TOKENS: usize = 64;

/// A configuration, and who computes what with it.
pub type Tiling = (Config, Schedule);

/// One strip a block, two blocks on a multiprocessor: one stores while the other multiplies.
const IN_PAIRS: Config = Config { warpgroups: 1, strips: 1, blocks: 2, ..TWO_BY_TWO };

/// Pixels of a tile of those: their rings have room for two stages at least.
const TOKENS_IN_PAIRS: [usize; 4] = [64, 96, 128, 192];

/// Pixels of a tile at most where nothing is seen twice, and no pairs: there memory decides, and 1×1 over 256 channels of 56² at a
/// batch of 32 took 19.9 µs with 128 pixels in two sets, 21.0 with 256 and 20.7 in pairs of 192.
const TOKENS_SEEN_ONCE: usize = 128;

/// The tiling for a shape (pixels, outputs, columns), with y of a type, on a device of so many multiprocessors: that of the
/// least time. `once`: whether each number of x is seen by one pixel only.
pub fn tiling(atom: Atom, shape: [usize; 3], out: Float, multiprocessors: usize, once: bool) -> Tiling {
    let mut all = tilings(atom, shape, out, multiprocessors);
    if once {
        all.retain(|(config, _)| config.blocks == 1 && (config.sets == 1 || config.tokens <= TOKENS_SEEN_ONCE));
    }
    all.into_iter().min_by_key(|(config, schedule)| clocks(*config, schedule, atom)).unwrap_or_else(|| {
        // A shape that no schedule counts, as its own says.
        let shape = shape.map(|size| size.max(1));
        let config = base(256, 1, shape[1]).fitted_to_sets(atom, out);
        (config, whole(config, shape, multiprocessors.max(1)))
    })
}

/// All tilings for a shape.
pub fn tilings(atom: Atom, shape: [usize; 3], out: Float, multiprocessors: usize) -> Vec<Tiling> {
    let shape = shape.map(|size| size.max(1));
    let multiprocessors = multiprocessors.max(1);
    let all = configs(atom, shape[1], out).into_iter().flat_map(|config| {
        let workers = multiprocessors * config.blocks;
        let (whole, cut) = (whole(config, shape, workers), Schedule::new(config, shape, workers));
        schedules(whole, cut, [multiprocessors, config.blocks]).map(move |schedule| (config, schedule))
    });
    all.filter(|(_, schedule)| schedule.fits()).collect()
}

/// Every configuration that is chosen from, for so many outputs.
pub fn configs(atom: Atom, n: usize, out: Float) -> Vec<Config> {
    let mut all = Vec::new();
    let alone = [1, 2].into_iter().flat_map(|strips| TOKENS.map(|tokens| base(tokens, strips, n)));
    // With 8 bits they were slower on an H200: 27.8 instead of 26.1 µs for 3×3 over 64 channels of 56² at a batch of 32.
    let pairs = n <= STRIP && atom.bits <= 4;
    let in_pairs = TOKENS_IN_PAIRS.map(|tokens| Config { tokens, ..IN_PAIRS }).into_iter().filter(|_| pairs);
    for config in alone.chain(in_pairs) {
        let Config { tokens, strips, blocks, .. } = config;
        let sums = strips * tokens;
        // Sums of a group lie beside those of the tile; weights that are scaled and rounded need none.
        let exact = match atom.group {
            0 if atom.bits == 8 && strips == 2 => sums <= 192,
            0 => sums <= 256,
            128 => sums <= if blocks == 2 { 96 } else { 128 },
            _ => strips == 1 && tokens <= if blocks == 2 { 64 } else { 96 },
        };
        let rounds = atom.group > 0 && out != Float::F32 && strips == 1;
        // Two boxes in flight, and two units of each set.
        let config = Config { early: !exact, ..config }.fitted_to_sets(atom, out);
        let room = if blocks == 2 { SHARED_BY_TWO_BYTES } else { SHARED_BYTES };
        let fits =
            config.stages_x >= 2 && config.stages_w >= 2 && config.shared_bytes(&Form::floats(atom, out)) <= room;
        let high = strips == 1 || n > 2 * STRIP;
        if high && fits && (exact || rounds) {
            all.push(config);
        }
    }
    all
}

/// Shared memory of a block alone on a multiprocessor, and of one of two.
const SHARED_BYTES: usize = 232_448;
const SHARED_BY_TWO_BYTES: usize = 115_712;

fn base(tokens: usize, strips: usize, n: usize) -> Config {
    let boxes = if tokens >= 192 { 1 } else { 2 };
    let sets = if n <= STRIP { 2 } else { 1 };
    Config { tokens, strips, boxes, sets, ..TWO_BY_TWO }
}

impl Config {
    /// With as many stages as there is room for; those of two sets belong to one of them each.
    fn fitted_to_sets(self, atom: Atom, out: Float) -> Self {
        let fitted = self.fitted(&Form::floats(atom, out));
        if self.sets == 1 {
            return fitted;
        }
        let (w, x) = (self.tile_strips() * atom.bytes() + 16, self.boxes * self.tokens * 128 + 16);
        let of_x = self.sets * 2 / self.boxes;
        let none = Config { stages_w: 0, stages_x: 0, ..self };
        let room = SHARED_BYTES.saturating_sub(none.shared_bytes(&Form::floats(atom, out)));
        let stages_x = (room.saturating_sub(self.sets * w) / x).min(8) / of_x * of_x;
        let stages_w = (room.saturating_sub(stages_x * x) / w).min(8) / self.sets * self.sets;
        Config { stages_w, stages_x, ..self }
    }
}

/// Whole rounds of tiles, and a last one of those that are left, each whole by one block.
pub(in crate::cuda) fn whole(config: Config, [m, n, k]: [usize; 3], multiprocessors: usize) -> Schedule {
    let (rows, columns) = (n.div_ceil(STRIP).div_ceil(config.tile_strips()), m.div_ceil(config.tokens));
    let tiles = rows.saturating_mul(columns);
    let workers = multiprocessors.min(tiles);
    let cut = tiles % workers;
    Schedule { steps: k.div_ceil(STEP), rows, columns, waves: tiles / workers, workers, sharers: cut, cut }
}

/// All ways in which blocks, so many on each of so many multiprocessors, share tiles: whole, cut evenly among all, and, of blocks that are alone,
/// where tiles are few, each in as many parts.
pub(in crate::cuda) fn schedules(
    whole: Schedule,
    cut: Schedule,
    [multiprocessors, blocks]: [usize; 2],
) -> impl Iterator<Item = Schedule> {
    let tiles = whole.rows.saturating_mul(whole.columns).max(1);
    let most = if blocks == 1 { multiprocessors / tiles } else { 1 };
    let parts = 2..=most.min(whole.steps).min(MOST_PARTS);
    let in_parts = parts.map(move |parts| {
        let workers = tiles * parts;
        Schedule { waves: 0, workers, sharers: workers, cut: tiles, ..whole }
    });
    [Some(whole), (cut != whole).then_some(cut)].into_iter().flatten().chain(in_parts)
}

/// The time of a tiling by the model above.
fn clocks(config: Config, schedule: &Schedule, atom: Atom) -> usize {
    let (tokens, strips) = (config.tokens, config.tile_strips());
    let products = strips * STRIP * tokens.max(LEAST_TOKENS) * STEP / PRODUCTS;
    let bytes = (tokens * STEP * 2 + strips * atom.bytes()) / BYTES;
    // Sums that are scaled group by group wait for the tensor cores.
    let late = if config.early { 0 } else { atom.groups() * (tokens / 2 + 64) };
    let unit = products.max(bytes).max(strips * (CONVERSION + late)) + UNIT;
    let end = TILE + tokens * config.strips * EPILOGUE * config.sets;
    total_of_blocks(schedule, config.blocks, unit, [end, PART + tokens * config.strips])
}

/// The same of one or two blocks a multiprocessor, for each of which a unit, a tile's end and joining a part take so long alone.
pub(in crate::cuda) fn total_of_blocks(
    schedule: &Schedule,
    blocks: usize,
    unit: usize,
    [end, part]: [usize; 2],
) -> usize {
    match blocks {
        1 => total(schedule, unit, [end, part]),
        // What a block stores, another one multiplies meanwhile, at half the speed of one alone.
        _ => total(schedule, blocks * unit, [end.saturating_sub(schedule.steps * unit), part]),
    }
}

/// The time of a schedule with so many clocks a unit, a tile's end, and a part that is joined.
fn total(schedule: &Schedule, unit: usize, [end, part]: [usize; 2]) -> usize {
    if schedule.cut == 0 || schedule.sharers == schedule.cut {
        let rounds = schedule.waves + schedule.cut.div_ceil(schedule.workers);
        return rounds.saturating_mul(schedule.steps * unit + end);
    }
    let left = (schedule.cut * schedule.steps).div_ceil(schedule.sharers.max(1));
    let parts = schedule.sharers.div_ceil(schedule.cut);
    if schedule.waves == 0 && schedule.sharers == parts * schedule.cut {
        return left * unit + 2 * end + JOIN_PARTS + parts * part;
    }
    (schedule.waves * schedule.steps + left).saturating_mul(unit) + (schedule.waves + 2) * end + JOIN.max(parts * part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: Atom = Atom { bits: 4, group: 0, zero: false, scale: Float::F16, ..Atom::W4_G128 };

    #[test]
    fn the_layers_of_resnet_50_fill_whole_rounds() {
        let of = |m, n, k| {
            let (config, schedule) = tiling(ROWS, [m, n, k], Float::F16, 132, false);
            (config.tokens, config.tile_strips(), config.sets, schedule.rows * schedule.columns, schedule.workers)
        };
        assert_eq!(of(32 * 28 * 28, 128, 1152), (192, 2, 1, 131, 131));
        assert_eq!(of(32 * 14 * 14, 256, 2304), (96, 2, 1, 132, 132));
        assert_eq!(of(32 * 7 * 7, 512, 4608), (48, 2, 1, 132, 132));
        let (tokens, strips, _, _, _) = of(32 * 56 * 56, 64, 576);
        assert_eq!(strips, 1, "{tokens} pixels");
        for bits in [4, 8] {
            let (config, _) = tiling(Atom { bits, ..ROWS }, [32 * 56 * 56, 64, 256], Float::F16, 132, true);
            assert_eq!((config.tokens, config.sets, config.blocks), (128, 2, 1), "{bits} bits");
        }
    }

    #[test]
    fn few_tiles_of_many_columns_are_cut() {
        let (config, schedule) = tiling(ROWS, [49, 512, 4608], Float::F16, 132, false);
        assert!(schedule.cut > 0 && schedule.sharers > schedule.cut, "{config} {schedule:?}");
        assert!(config.parts_bytes(&schedule) > 0);
    }

    #[test]
    fn one_block_does_not_add_up_too_many_parts() {
        for (shape, atom) in
            [([64, 32, 12800], ROWS), ([160, 24, 11760], ROWS), ([49, 120, 5376], Atom { bits: 8, ..ROWS })]
        {
            let (config, schedule) = tiling(atom, shape, Float::F16, 132, false);
            let parts = schedule.sharers / schedule.cut.max(1);
            assert!((4..=16).contains(&parts) && schedule.sharers == parts * schedule.cut, "{config} {schedule:?}");
        }
    }

    #[test]
    fn every_tiling_computes_every_tile_once() {
        for bits in [4, 8] {
            for group in [0, 32, 64, 128] {
                let atom = Atom { bits, group, ..ROWS };
                for (m, n, k) in [(1, 1, 64), (49, 512, 4608), (1000, 64, 576), (100352, 64, 576), (6272, 2048, 1024)] {
                    for out in [Float::F16, Float::F32] {
                        let all = tilings(atom, [m, n, k], out, 132);
                        assert!(all.contains(&tiling(atom, [m, n, k], out, 132, k == 1024)));
                        for (config, s) in all {
                            assert!(s.fits() && s.workers <= 132 * config.blocks, "{config} {s:?}");
                            assert!(config.shared_bytes(&Form::floats(atom, out)) <= SHARED_BYTES, "{config}");
                            assert_eq!(s.waves * s.workers + s.cut, s.rows * s.columns, "{config} {s:?}");
                            assert!(s.sharers <= s.workers && s.sharers <= s.cut * s.steps, "{config} {s:?}");
                            assert!(s.rows * config.tile_strips() * STRIP >= n && s.columns * config.tokens >= m);
                            assert!(out == Float::F16 || !config.early, "{config} rounds weights");
                            assert!(config.stages_w % config.sets == 0 && config.stages_x >= 2, "{config}");
                        }
                    }
                }
            }
        }
    }
}
