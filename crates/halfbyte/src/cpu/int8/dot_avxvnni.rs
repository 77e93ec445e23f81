//! Tiles of int8 dot products with AVX-VNNI.
//!
//! As [`dot_avx512vnni`](super::dot_avx512vnni), 16 outputs in two registers of 8: 6 rows of one panel are 12 sums in registers, and 12 dot
//! products for 8 loads.

use super::{Tile, TileFn, Tiles};
use crate::layout::cpu_int8::{PANEL, QUAD};
use std::arch::x86_64::*;

pub(super) const TILES: &Tiles = &[
    (2, &[tile::<1, 2> as TileFn, tile::<2, 2>]),
    (1, &[tile::<1, 1>, tile::<2, 1>, tile::<3, 1>, tile::<4, 1>, tile::<5, 1>, tile::<6, 1>]),
];

#[target_feature(enable = "avx2,avxvnni")]
fn tile<const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [i32]) {
    let run_len = t.quads * QUAD * PANEL;
    assert!((P - 1) * t.panel_len + t.runs.len() * run_len <= t.w.len() && c.len() == R * P * PANEL);
    assert_eq!(t.rows.len(), R);
    let mut sums = [[[_mm256_setzero_si256(); 2]; P]; R];
    for (i, run) in t.runs.iter().enumerate() {
        let w = t.w.as_ptr().wrapping_add(i * run_len);
        let x: [_; R] = std::array::from_fn(|r| t.x[t.rows[r] + run..].as_ptr());
        for quad in 0..t.quads {
            let mut codes = [[_mm256_setzero_si256(); 2]; P];
            for p in 0..P {
                for h in 0..2 {
                    let at = p * t.panel_len + quad * QUAD * PANEL + h * 32;
                    // SAFETY: half of the 64 bytes of panel p's tile, within `w` as asserted.
                    codes[p][h] = unsafe { _mm256_loadu_si256(w.add(at).cast()) };
                }
            }
            for r in 0..R {
                // SAFETY: 4 bytes of a run of row r, within `x` as `Tile::new` has checked; any alignment.
                let four = unsafe { x[r].add(quad * QUAD).cast::<i32>().read_unaligned() };
                let four = _mm256_set1_epi32(four);
                for p in 0..P {
                    for h in 0..2 {
                        sums[r][p][h] = _mm256_dpbusd_avx_epi32(sums[r][p][h], four, codes[p][h]);
                    }
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            for h in 0..2 {
                // SAFETY: 8 sums within `c`, whose length was asserted.
                unsafe {
                    _mm256_storeu_si256(c.as_mut_ptr().add((r * P + p) * PANEL + h * 8).cast(), sums[r][p][h]);
                }
            }
        }
    }
}
