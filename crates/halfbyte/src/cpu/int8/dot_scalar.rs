//! Tiles of int8 dot products in plain Rust, for every processor.
//!
//! ```text
//! for each tile of 4 columns, for each row:  c[r][16] += Σ₄ x[r][4] · w[16][4]
//! ```

use super::{Tile, TileFn, Tiles};
use crate::layout::cpu_int8::{PANEL, QUAD};

pub(super) const TILES: &Tiles = &[(1, &[tile::<1> as TileFn, tile::<2>, tile::<3>, tile::<4>])];

fn tile<const R: usize>(t: &Tile<'_>, c: &mut [i32]) {
    let mut sums = [[0i32; PANEL]; R];
    let tiles = t.w.chunks_exact(PANEL * QUAD).take(t.quads);
    for (quad, tile) in tiles.enumerate() {
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = &t.x[r * t.stride + quad * QUAD..][..QUAD];
            for (sum, w) in sums.iter_mut().zip(tile.chunks_exact(QUAD)) {
                for b in 0..QUAD {
                    *sum = sum.wrapping_add(i32::from(x[b]) * i32::from(w[b]));
                }
            }
        }
    }
    c.copy_from_slice(sums.as_flattened());
}
