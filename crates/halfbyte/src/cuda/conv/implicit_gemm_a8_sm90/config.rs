//! Which form of `wna8_sm90.cu` an implicit product takes, and who computes what: pure functions of the numbers.
//!
//! As for exact activations every width of a tile is tried with a model of its time. What decides here is promoting: a scale of x
//! holds for one position and some channels, so that sums in integers end every 32 to 128 columns.
//!
//! ```text
//! unit (128 columns of a tile) = max(products at 4096 a clock, bytes of W and x at 40 a clock, promoting)
//! promoting = groups · tokens · PROMOTE, and TERM for each further term
//! ```

use crate::cuda::conv::implicit_gemm_sm90::config::{EPILOGUE, PART, TILE, UNIT, schedules, total_of_blocks, whole};
use crate::cuda::matmul::wna8_sm90::config::{ALONE, Config, Schedule, Terms};
use crate::layout::cuda_wna16::{Atom, STEP, STRIP};
use crate::tensor::Float;

/// Pixels a tile.
const TOKENS: [usize; 2] = [64, 128];

/// Multiply-adds and bytes from the second-level cache that a multiprocessor has in a clock.
const PRODUCTS: usize = 4096;
const BYTES: usize = 40;

/// Clocks of promoting the sums of a group and pixel of both warpgroups, and of each further term.
const PROMOTE: usize = 7;
const TERM: usize = 2;

/// A configuration, and who computes what with it.
pub type Tiling = (Config, Schedule);

/// The tiling for a shape (pixels, outputs, columns), with y of a type, on a device of so many multiprocessors: that of the
/// least time.
pub fn tiling(atom: Atom, terms: Terms, shape: [usize; 3], out: Float, multiprocessors: usize) -> Tiling {
    let best = tilings(atom, terms, shape, out, multiprocessors);
    best.into_iter().min_by_key(|(config, schedule)| clocks(*config, schedule, atom, terms)).unwrap_or_else(|| {
        // A shape that no schedule counts, as its own says.
        let config = alone(TOKENS[0]).fitted(atom, terms, out);
        (config, whole(config.tiles(), shape.map(|size| size.max(1)), multiprocessors.max(1)))
    })
}

/// All tilings for a shape.
pub fn tilings(atom: Atom, terms: Terms, shape: [usize; 3], out: Float, multiprocessors: usize) -> Vec<Tiling> {
    let (shape, multiprocessors) = (shape.map(|size| size.max(1)), multiprocessors.max(1));
    let all = configs(atom, terms, shape[1], out).into_iter().flat_map(|config| {
        let workers = multiprocessors * config.blocks;
        let (whole, cut) = (whole(config.tiles(), shape, workers), config.schedule(shape, multiprocessors));
        schedules(whole, cut, [multiprocessors, config.blocks]).map(move |schedule| (config, schedule))
    });
    all.filter(|(_, schedule)| schedule.fits()).collect()
}

/// Every configuration that is chosen from, for so many outputs.
pub fn configs(atom: Atom, terms: Terms, n: usize, out: Float) -> Vec<Config> {
    // With further terms the sums of 128 pixels leave no registers for small groups, and none where two blocks share them.
    let plain = !terms.sums && !terms.offsets;
    let most = if atom.group == STEP || plain { 128 } else { 64 };
    let most_of_pairs = if atom.group > 32 && plain { 128 } else { 64 };
    let tokens = TOKENS.into_iter().filter(|&tokens| tokens <= most);
    let all = tokens.flat_map(|tokens| {
        let pair = Config { warpgroups: 1, blocks: 2, ..alone(tokens) };
        // One strip would be half of a tile. Its atoms alone must be whole lines, for what lies behind them.
        let paired = n <= STRIP && atom.bytes().is_multiple_of(128) && tokens <= most_of_pairs;
        [alone(tokens)].into_iter().chain(paired.then_some(pair))
    });
    let all = all.map(|config| config.fitted(atom, terms, out));
    all.filter(|config| config.stages >= 2).collect()
}

fn alone(tokens: usize) -> Config {
    Config { tokens, ..ALONE }
}

/// The time of a tiling by the model above.
fn clocks(config: Config, schedule: &Schedule, atom: Atom, terms: Terms) -> usize {
    let (tokens, strips) = (config.tokens, config.tiles().tile_strips());
    let products = strips * STRIP * tokens * STEP / PRODUCTS;
    let bytes = (tokens * (STEP + 16 * atom.groups()) + strips * atom.bytes()) / BYTES;
    let further = usize::from(terms.sums) + usize::from(terms.offsets);
    let promoting = atom.groups() * tokens * config.warpgroups * (PROMOTE + TERM * further) / 2;
    let (unit, end) = (products.max(bytes).max(promoting) + UNIT, TILE + tokens * EPILOGUE);
    total_of_blocks(schedule, config.blocks, unit, [end, PART + tokens])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::tiled::{Form, Tile};

    const TERMS: Terms = Terms { sums: false, offsets: false, pixels: true };

    #[test]
    fn every_tiling_computes_every_tile_once_in_memory_that_a_block_has() {
        for (bits, group, zero) in [(4, 128, false), (8, 64, false), (4, 32, true), (8, 128, true)] {
            let atom = Atom { bits, group, zero, scale: Float::F16, ..Atom::W4_G128 };
            for terms in [TERMS, Terms { sums: zero, offsets: true, ..TERMS }] {
                for (m, n, k) in [(1, 1, 64), (49, 512, 4608), (1000, 64, 576), (100352, 64, 576)] {
                    for out in [Float::F16, Float::F32] {
                        let all = tilings(atom, terms, [m, n, k], out, 132);
                        assert!(all.contains(&tiling(atom, terms, [m, n, k], out, 132)));
                        for (config, s) in all {
                            let bytes = config.shared_bytes(&Form::codes(atom, terms, out));
                            assert!(config.stages >= 2 && bytes <= 232_448, "{config:?} takes {bytes} bytes");
                            assert_eq!(s.waves * s.workers + s.cut, s.rows * s.columns, "{config:?} {s:?}");
                            let strips = config.tiles().tile_strips();
                            assert!(s.rows * strips * STRIP >= n && s.columns * config.tokens >= m, "{config:?} {s:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn few_tiles_of_many_columns_are_cut() {
        let atom = Atom { bits: 8, group: 128, zero: false, scale: Float::F16, ..Atom::W4_G128 };
        let (config, schedule) = tiling(atom, TERMS, [49, 512, 4608], Float::F16, 132);
        assert!(schedule.sharers > schedule.cut && config.parts_bytes(&schedule) > 0, "{config:?} {schedule:?}");
    }
}
