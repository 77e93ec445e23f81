//! Tiles of int8 dot products with AVX-512 VNNI.
//!
//! ```text
//! for each tile of 4 columns:
//!     w[p] = 64 bytes of panel p                               16 outputs, 4 columns each
//!     for each row r:  x = 4 bytes of row r, in every lane
//!         for each panel p:  c[r][p] += dot4(x, w[p])          vpdpbusd, u8 × i8
//! ```
//!
//! Rows are read where they lie: nothing is rearranged. 6 rows × 4 panels, or 12 × 2 where fewer panels are left, are 24
//! sums in registers, and 24 dot products for 10 or 14 loads. `vpdpbusd` wraps around, unlike `vpdpbusds`.

use super::{Tile, TileFn, Tiles};
use crate::layout::cpu_int8::{PANEL, QUAD};
use std::arch::x86_64::*;

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
    assert!((P - 1) * t.panel_len + t.quads * QUAD * PANEL <= t.w.len() && c.len() == R * P * PANEL);
    assert!((R - 1) * t.stride + t.quads * QUAD <= t.x.len());
    let mut sums = [[_mm512_setzero_si512(); P]; R];
    let (w, x) = (t.w.as_ptr(), t.x.as_ptr());
    for quad in 0..t.quads {
        let mut codes = [_mm512_setzero_si512(); P];
        for p in 0..P {
            // SAFETY: 64 bytes of panel p, within `w` as asserted.
            codes[p] = unsafe { _mm512_loadu_si512(w.add(p * t.panel_len + quad * QUAD * PANEL).cast()) };
        }
        for r in 0..R {
            // SAFETY: 4 bytes of row r, within `x` as asserted; any alignment.
            let four = unsafe { x.add(r * t.stride + quad * QUAD).cast::<i32>().read_unaligned() };
            let four = _mm512_set1_epi32(four);
            for p in 0..P {
                sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], four, codes[p]);
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
