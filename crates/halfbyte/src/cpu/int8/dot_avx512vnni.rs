//! Tiles of int8 dot products with AVX-512 VNNI.
//!
//! ```text
//! for each run, for each tile of 4 columns:
//!     w[p] = 64 bytes of panel p                               16 outputs, 4 columns each
//!     for each row r:  x = 4 bytes of row r, in every lane
//!         for each panel p:  c[r][p] += dot4(x, w[p])          vpdpbusd, u8 × i8
//! ```
//!
//! Rows are read where they lie, whether in one run or in several: nothing is rearranged. 6 rows × 4 panels, or 12 × 2 where
//! fewer panels are left, are 24 sums in registers, and 24 dot products for 10 or 14 loads. With every line of a row the one is
//! asked for that a later tile will want: images come from memory. `vpdpbusd` wraps around, unlike `vpdpbusds`.

use super::{Tile, TileFn, Tiles};
use crate::layout::cpu_int8::{PANEL, QUAD};
use std::arch::x86_64::*;

/// Bytes of a cache line.
const LINE: usize = 64;

pub(super) const TILES: &Tiles = &[
    (4, &[tile::<1, 4> as TileFn, tile::<2, 4>, tile::<3, 4>, tile::<4, 4>, tile::<5, 4>, tile::<6, 4>]),
    (2, &of_panels::<2>()),
    (1, &of_panels::<1>()),
];

const fn of_panels<const P: usize>() -> [TileFn; 12] {
    [
        tile::<1, P>,
        tile::<2, P>,
        tile::<3, P>,
        tile::<4, P>,
        tile::<5, P>,
        tile::<6, P>,
        tile::<7, P>,
        tile::<8, P>,
        tile::<9, P>,
        tile::<10, P>,
        tile::<11, P>,
        tile::<12, P>,
    ]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn tile<const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [i32]) {
    let run_len = t.quads * QUAD * PANEL;
    assert!((P - 1) * t.panel_len + t.runs.len() * run_len <= t.w.len() && c.len() == R * P * PANEL);
    assert_eq!(t.rows.len(), R);
    let mut sums = [[_mm512_setzero_si512(); P]; R];
    for (i, run) in t.runs.iter().enumerate() {
        let w = t.w.as_ptr().wrapping_add(i * run_len);
        let x: [_; R] = std::array::from_fn(|r| t.x[t.rows[r] + run..].as_ptr());
        for quad in 0..t.quads {
            if quad % (LINE / QUAD) == 0 {
                for r in 0..R {
                    _mm_prefetch::<_MM_HINT_T0>(x[r].wrapping_add(t.ahead + quad * QUAD).cast());
                }
            }
            let mut codes = [_mm512_setzero_si512(); P];
            for p in 0..P {
                // SAFETY: 64 bytes of panel p, within `w` as asserted.
                codes[p] = unsafe { _mm512_loadu_si512(w.add(p * t.panel_len + quad * QUAD * PANEL).cast()) };
            }
            for r in 0..R {
                // SAFETY: 4 bytes of a run of row r, within `x` as `Tile::new` has checked; any alignment.
                let four = unsafe { x[r].add(quad * QUAD).cast::<i32>().read_unaligned() };
                let four = _mm512_set1_epi32(four);
                for p in 0..P {
                    sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], four, codes[p]);
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            // SAFETY: 16 sums within `c`, whose length was asserted.
            unsafe { _mm512_storeu_si512(c.as_mut_ptr().add((r * P + p) * PANEL).cast(), sums[r][p]) };
        }
    }
}
