//! The register-tiled product behind scores and sums of values.

use super::element::Element;
use crate::cpu::lanes::Simd;

/// The left side of a product: element `(row, k)` is `of[row·self.row + k·self.step]`.
#[derive(Clone, Copy)]
pub(super) struct Factor<'a> {
    pub(super) of: &'a [f32],
    pub(super) row: usize,
    pub(super) step: usize,
}

/// `result[row][c] = Σ a(row, k) · b[c][k·b_step ..]` over `k < n`, a vector each. Each sum runs in `U` parts.
///
/// This is where the time goes: `R·C·U` vectors stay in registers, an element of `a` is broadcast for `C` products,
/// a vector of `b` is loaded, and converted, for `R`.
#[inline(always)]
pub(super) fn product<S: Simd, E: Element, const R: usize, const C: usize, const U: usize>(
    s: S,
    a: Factor<'_>,
    b: [&[E]; C],
    b_step: usize,
    n: usize,
) -> [[S::V; C]; R] {
    let mut acc = [[[s.splat(0.0); C]; R]; U];
    if n > 0 {
        assert!(a.of.len() > (R - 1) * a.row + (n - 1) * a.step);
        assert!(b.iter().all(|b| b.len() >= (n - 1) * b_step + S::LANES));
    }
    let mut k = 0;
    while k + U <= n {
        for u in 0..U {
            // SAFETY: k + u < n; the lengths were checked above.
            unsafe { add_products(s, a, b, (b_step, k + u), &mut acc[u]) };
        }
        k += U;
    }
    while k < n {
        // SAFETY: k < n; the lengths were checked above.
        unsafe { add_products(s, a, b, (b_step, k), &mut acc[0]) };
        k += 1;
    }
    let mut result = acc[0];
    for part in &acc[1..] {
        for row in 0..R {
            for c in 0..C {
                result[row][c] = s.add(result[row][c], part[row][c]);
            }
        }
    }
    result
}

/// # Safety
/// `a` must have an element `(R − 1, k)`, and each of `b` a vector at `k·b_step`.
#[inline(always)]
unsafe fn add_products<S: Simd, E: Element, const R: usize, const C: usize>(
    s: S,
    a: Factor<'_>,
    b: [&[E]; C],
    (b_step, k): (usize, usize),
    acc: &mut [[S::V; C]; R],
) {
    let mut y = [s.splat(0.0); C];
    for c in 0..C {
        // SAFETY: the caller's promise.
        y[c] = unsafe { E::load(s, b[c].as_ptr().add(k * b_step)) };
    }
    for row in 0..R {
        // SAFETY: the caller's promise.
        let x = s.splat(unsafe { *a.of.as_ptr().add(row * a.row + k * a.step) });
        for c in 0..C {
            acc[row][c] = s.mul_add(x, y[c], acc[row][c]);
        }
    }
}
