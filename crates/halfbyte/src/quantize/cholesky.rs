//! The Cholesky factorisation in f64, and what is solved with it: blocked, in parallel, the same bits whatever the number of threads.

use super::panel::{BLOCK, Panel, pieces};
use rayon::prelude::*;

/// Rows that a thread takes at a time.
const ROWS: usize = 32;

/// Factors a symmetric matrix `[k, k]` in place, `A = L · Lᵀ`: reads the lower triangle and leaves L there. What the
/// upper triangle holds afterwards means nothing. Costs `k³ / 3` floating-point operations.
///
/// Errors: the first column whose pivot is not above `k` roundoffs of its diagonal element: A is not positive definite,
/// as far as f64 can tell.
pub(super) fn cholesky(a: &mut [f64], k: usize) -> Result<(), usize> {
    let least: Vec<f64> = (0..k).map(|j| a[j * k + j] * k as f64 * f64::EPSILON).collect();
    for from in (0..k).step_by(BLOCK) {
        let to = (from + BLOCK).min(k);
        let done = Panel::from_columns([from, to - from], |c| &a[(from + c) * k..][..from]);
        a[from * k..].par_chunks_mut(ROWS * k).for_each(|rows| done.subtract_from(rows, k, 0, from));

        let (diagonal, below) = a[from * k..].split_at_mut((to - from) * k);
        // Row `j` of the transposed block: what column `j` of L means to the columns after it.
        let mut transposed = vec![0.0; BLOCK * BLOCK];
        for i in from..to {
            let row = &mut diagonal[(i - from) * k + from..(i - from) * k + to];
            solve(&mut row[..i - from], &transposed);
            let pivot = row[i - from] - row[..i - from].iter().map(|v| v * v).sum::<f64>();
            if pivot.is_nan() || pivot <= least[i] {
                return Err(i);
            }
            row[i - from] = pivot.sqrt();
            for (j, &v) in row[..=i - from].iter().enumerate() {
                transposed[j * BLOCK + i - from] = v;
            }
        }
        below.par_chunks_mut(k).for_each(|row| solve(&mut row[from..to], &transposed));
    }
    Ok(())
}

/// Solves `x · Lᵀ = row` in place for the first columns of a block, given Lᵀ in rows of `BLOCK`.
fn solve(row: &mut [f64], transposed: &[f64]) {
    for j in 0..row.len() {
        let (head, tail) = row.split_at_mut(j + 1);
        let factors = &transposed[j * BLOCK + j..];
        head[j] /= factors[0];
        tail.iter_mut().zip(&factors[1..]).for_each(|(x, f)| *x -= head[j] * f);
    }
}

/// Solves `x · L · Lᵀ = b` in place for rows of b, which start at column `at` of rows of `stride`; L `[k, k]` as
/// [`cholesky`] leaves it.
pub(super) fn solve_rows(l: &[f64], k: usize, rows: &mut [f64], stride: usize, at: usize) {
    let row_of = |j: usize| &l[j * k..];
    let mut transposed = vec![0.0; BLOCK * BLOCK];
    for piece in pieces(0..k) {
        let (from, len) = (piece.start, piece.len());
        Panel::from_columns([from, len], |c| row_of(from + c)).subtract_from(rows, stride, at, at + from);
        for i in 0..len {
            row_of(from + i)[from..=from + i].iter().enumerate().for_each(|(j, &v)| transposed[j * BLOCK + i] = v);
        }
        rows.chunks_mut(stride).for_each(|row| solve(&mut row[at + from..at + piece.end], &transposed));
    }
    for piece in pieces(0..k).rev() {
        let (from, to) = (piece.start, piece.end);
        Panel::from_rows([k - to, to - from], |d| &row_of(to + d)[from..]).subtract_from(
            rows,
            stride,
            at + to,
            at + from,
        );
        for row in rows.chunks_mut(stride) {
            let row = &mut row[at + from..at + to];
            for j in (0..row.len()).rev() {
                let (head, tail) = row.split_at_mut(j);
                let factors = &row_of(from + j)[from..];
                tail[0] /= factors[j];
                head.iter_mut().zip(factors).for_each(|(x, f)| *x -= tail[0] * f);
            }
        }
    }
}
