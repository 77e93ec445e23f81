//! Tiles of int8 dot products with AVX2.
//!
//! ```text
//! for each run, for each tile of 4 columns:
//!     even, odd = words of the even and of the odd columns of w, sign-extended          16 outputs in two registers
//!     for each row r:  x = 4 bytes of row r, in every lane; its even and odd bytes as words
//!         c[r] += madd(even x, even w) + madd(odd x, odd w)                             vpmaddwd, exact in int32
//! ```
//!
//! `vpmaddubsw` would do with one multiplication instead of two, but its sums of two products saturate at 15 bits.

use super::{Tile, TileFn, Tiles};
use crate::layout::cpu_int8::{PANEL, QUAD};
use std::arch::x86_64::*;

pub(super) const TILES: &Tiles =
    &[(2, &[tile::<1, 2> as TileFn, tile::<2, 2>]), (1, &[tile::<1, 1>, tile::<2, 1>, tile::<3, 1>, tile::<4, 1>])];

#[target_feature(enable = "avx2")]
fn tile<const R: usize, const P: usize>(t: &Tile<'_>, c: &mut [i32]) {
    let run_len = t.quads * QUAD * PANEL;
    assert!((P - 1) * t.panel_len + t.runs.len() * run_len <= t.w.len() && c.len() == R * P * PANEL);
    assert_eq!(t.rows.len(), R);
    let low = _mm256_set1_epi16(0xff);
    let mut sums = [[[_mm256_setzero_si256(); 2]; P]; R];
    for (i, run) in t.runs.iter().enumerate() {
        let w = t.w.as_ptr().wrapping_add(i * run_len);
        let x: [_; R] = std::array::from_fn(|r| t.x[t.rows[r] + run..].as_ptr());
        for quad in 0..t.quads {
            let mut even = [[_mm256_setzero_si256(); 2]; P];
            let mut odd = even;
            for p in 0..P {
                for h in 0..2 {
                    let at = p * t.panel_len + quad * QUAD * PANEL + h * 32;
                    // SAFETY: half of the 64 bytes of panel p's tile, within `w` as asserted.
                    let codes = unsafe { _mm256_loadu_si256(w.add(at).cast()) };
                    even[p][h] = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(codes));
                    odd[p][h] = _mm256_srai_epi16::<8>(codes);
                }
            }
            for r in 0..R {
                // SAFETY: 4 bytes of a run of row r, within `x` as `Tile::new` has checked; any alignment.
                let four = unsafe { x[r].add(quad * QUAD).cast::<i32>().read_unaligned() };
                let four = _mm256_set1_epi32(four);
                let (x_even, x_odd) = (_mm256_and_si256(four, low), _mm256_srli_epi16::<8>(four));
                for p in 0..P {
                    for h in 0..2 {
                        let evens = _mm256_madd_epi16(x_even, even[p][h]);
                        let odds = _mm256_madd_epi16(x_odd, odd[p][h]);
                        sums[r][p][h] = _mm256_add_epi32(sums[r][p][h], _mm256_add_epi32(evens, odds));
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
