//! Rows of x by weights that were converted to f32: x packed, or read wherever its rows lie.

use super::x86::{Sums, add_to};
use super::{Block, RUN};
use crate::layout::cpu_n16::PANEL;
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma")]
pub(super) fn packed<const R: usize, const P: usize>(x: &[f32], w: &[f32], c: &mut [f32]) {
    for (x, w) in x.chunks(RUN * R).zip(w.chunks(RUN * P * PANEL)) {
        add_run::<R, P>(x, w, c);
    }
}

/// A function of its own, not inlined, so that the sums stay in registers all through the loop.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn add_run<const R: usize, const P: usize>(x: &[f32], w: &[f32], c: &mut [f32]) {
    let places = x.len() / R;
    assert!(x.len() == places * R && w.len() == places * P * PANEL && c.len() == R * P * PANEL);
    let mut y: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
    let (mut x, mut w) = (x.as_ptr(), w.as_ptr());
    for _ in 0..places {
        let mut weight = [[_mm256_setzero_ps(); 2]; P];
        for p in 0..P {
            for h in 0..2 {
                // SAFETY: within w, whose length was asserted.
                weight[p][h] = unsafe { _mm256_loadu_ps(w.add(p * PANEL + h * 8)) };
            }
        }
        for r in 0..R {
            // SAFETY: within x, whose length was asserted.
            let v = _mm256_set1_ps(unsafe { *x.add(r) });
            for p in 0..P {
                for h in 0..2 {
                    y[r][p][h] = _mm256_fmadd_ps(v, weight[p][h], y[r][p][h]);
                }
            }
        }
        x = x.wrapping_add(R);
        w = w.wrapping_add(P * PANEL);
    }
    add_to(&y, c);
}

#[target_feature(enable = "avx2,fma")]
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
        let mut y: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
        for part in run {
            let (weights, after) = w.split_at(part.len * P * PANEL);
            let ends = starts.map(|start| start.wrapping_add(part.from + part.len));
            // SAFETY: parts of the block of each row, which x has.
            unsafe { add_part(&ends, weights, &mut y) };
            w = after;
        }
        add_to(&y, c);
    }
}

/// Adds the product of places that lie together, up to `ends` of each row. A function of its own, not inlined, so that the sums stay
/// in registers all through the loop.
///
/// # Safety
/// As many floats as there are places lie before each of `ends`.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_part<const R: usize, const P: usize>(ends: &[*const f32; R], w: &[f32], sums: &mut Sums<R, P>) {
    let (mut y, ends, places) = (*sums, *ends, w.len() / (P * PANEL));
    let mut w = w.as_ptr();
    // Counted up to 0, so that one register tells where and when.
    for i in -(places as isize)..0 {
        let mut weight = [[_mm256_setzero_ps(); 2]; P];
        for p in 0..P {
            for h in 0..2 {
                // SAFETY: w has as many places.
                weight[p][h] = unsafe { _mm256_loadu_ps(w.add(p * PANEL + h * 8)) };
            }
        }
        w = w.wrapping_add(P * PANEL);
        for r in 0..R {
            // SAFETY: promised to this function.
            let v = _mm256_set1_ps(unsafe { *ends[r].offset(i) });
            for p in 0..P {
                for h in 0..2 {
                    y[r][p][h] = _mm256_fmadd_ps(v, weight[p][h], y[r][p][h]);
                }
            }
        }
    }
    *sums = y;
}
