//! Tiles of int8 dot products in plain Rust, for every processor.
//!
//! ```text
//! for each run, for each tile of 4 columns, for each column:
//!     w = that column of 16 outputs, as words
//!     for each row r:  c[r][16] += x[r] · w[16]                       products in words, exact; sums in int32
//! ```

use super::{Tile, TileFn, Tiles};
use crate::layout::cpu_int8::{PANEL, QUAD};

pub(super) const TILES: &Tiles = &[(1, &[tile::<1> as TileFn, tile::<2>, tile::<3>, tile::<4>])];

fn tile<const R: usize>(t: &Tile<'_>, c: &mut [i32]) {
    let mut sums = [[0i32; PANEL]; R];
    let tiles = t.w.as_chunks::<{ PANEL * QUAD }>().0;
    for (tiles, run) in tiles.chunks(t.quads).zip(t.runs) {
        for (quad, tile) in tiles.iter().enumerate() {
            for b in 0..QUAD {
                let mut w = [0i16; PANEL];
                for lane in 0..PANEL {
                    w[lane] = tile[lane * QUAD + b].into();
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    // A product of two bytes fits 16 bits: 255 · −128 and 255 · 127.
                    let x = i16::from(t.x[t.rows[r] + run + quad * QUAD + b]);
                    for lane in 0..PANEL {
                        sums[lane] = sums[lane].wrapping_add(i32::from(x * w[lane]));
                    }
                }
            }
        }
    }
    c.copy_from_slice(sums.as_flattened());
}
