//! Rows of x by weights that were converted to f32: x packed, or read wherever its rows lie.

use super::x86::add_to;
use super::{Block, RUN};
use crate::layout::cpu_n16::PANEL;
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f")]
pub(super) fn packed<const R: usize, const P: usize>(x: &[f32], w: &[f32], c: &mut [f32]) {
    let places = x.len() / R;
    assert!(x.len() == places * R && w.len() == places * P * PANEL && c.len() == R * P * PANEL);
    let (mut x, mut w) = (x.as_ptr(), w.as_ptr());
    for start in (0..places).step_by(RUN) {
        let mut y = [[_mm512_setzero_ps(); P]; R];
        for _ in start..(start + RUN).min(places) {
            let mut weight = [_mm512_setzero_ps(); P];
            for p in 0..P {
                // SAFETY: within w, whose length was asserted.
                weight[p] = unsafe { _mm512_loadu_ps(w.add(p * PANEL)) };
            }
            for r in 0..R {
                // SAFETY: within x, whose length was asserted.
                let v = _mm512_set1_ps(unsafe { *x.add(r) });
                for p in 0..P {
                    y[r][p] = _mm512_fmadd_ps(v, weight[p], y[r][p]);
                }
            }
            x = x.wrapping_add(R);
            w = w.wrapping_add(P * PANEL);
        }
        add_to(&y, c);
    }
}

#[target_feature(enable = "avx512f")]
pub(super) fn placed<const R: usize, const P: usize>(
    x: *const f32,
    starts: &[usize],
    block: Block<'_>,
    w: &[f32],
    c: &mut [f32],
) {
    assert!(starts.len() == R && c.len() == R * P * PANEL);
    let starts: [*const f32; R] = std::array::from_fn(|r| x.wrapping_add(starts[r]));
    let mut w = w;
    for run in block.runs() {
        let mut y = [[_mm512_setzero_ps(); P]; R];
        for part in run {
            let (weights, after) = w.split_at(part.len * P * PANEL);
            w = after;
            // Counted up to 0 from the end, so that one register tells where and when.
            let mut ends = starts;
            for r in 0..R {
                ends[r] = ends[r].wrapping_add(part.from + part.len);
            }
            let mut weights = weights.as_ptr();
            for i in -(part.len as isize)..0 {
                let mut weight = [_mm512_setzero_ps(); P];
                for p in 0..P {
                    // SAFETY: within the part's weights.
                    weight[p] = unsafe { _mm512_loadu_ps(weights.add(p * PANEL)) };
                }
                weights = weights.wrapping_add(P * PANEL);
                for r in 0..R {
                    // SAFETY: of the block of row r, which x has.
                    let v = _mm512_set1_ps(unsafe { *ends[r].offset(i) });
                    for p in 0..P {
                        y[r][p] = _mm512_fmadd_ps(v, weight[p], y[r][p]);
                    }
                }
            }
        }
        add_to(&y, c);
    }
}
