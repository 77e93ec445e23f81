//! The Hessian as solvers take it: damped, its dead columns cut off from the others.

use super::cholesky::cholesky;
use super::stats::Hessian;
use crate::error::{Error, Result};
use crate::memory::{check_empty, zeroed};
use crate::tensor::Floats;
use rayon::prelude::*;

/// Damping tried after none at all.
const LEAST_DAMPING: f64 = 1e-6;
/// Damping beyond which nothing of H would be left.
const MOST_DAMPING: f64 = 10.0;

/// Checks what every quantiser with a Hessian is given: n·k finite weights, a Hessian of k, a damping.
pub(super) fn check(
    op: &'static str,
    w: Floats<'_>,
    [n, k]: [usize; 2],
    hessian: &Hessian,
    damping: f64,
) -> Result<()> {
    if n.checked_mul(k) != Some(w.len()) {
        return Err(Error::invalid(op, format!("{n} × {k} weights"), w.len().to_string()));
    }
    check_empty(op, [n, k])?;
    if hessian.k() != k {
        return Err(Error::invalid(op, format!("a Hessian of k {k}"), format!("k {}", hessian.k())));
    }
    if !(damping.is_finite() && damping >= 0.0) {
        return Err(Error::invalid(op, "a finite damping of at least 0", damping.to_string()));
    }
    let bad = (0..n * k).into_par_iter().find_first(|&i| !w.get(i).is_finite());
    if let Some(i) = bad {
        return Err(Error::NotFinite { op, value: w.get(i).to_string(), row: i / k, column: i % k });
    }
    Ok(())
}

/// H, the damping times its mean diagonal element added to the diagonal.
pub(super) struct Damped<'a> {
    op: &'static str,
    hessian: &'a Hessian,
    /// Input channels that were 0 in every input. Their diagonal element counts as the mean.
    pub dead: Vec<bool>,
    /// Mean of the diagonal over the columns that are not dead.
    mean: f64,
    /// As a fraction of the mean.
    pub damping: f64,
}

impl<'a> Damped<'a> {
    /// Errors: no inputs, or nothing but zeros.
    pub fn new(op: &'static str, hessian: &'a Hessian, damping: f64) -> Result<Self> {
        let dead: Vec<bool> = (0..hessian.k()).map(|j| hessian.get(j, j) == 0.0).collect();
        let live = (0..hessian.k()).filter(|&j| !dead[j]);
        let mean = live.clone().map(|j| hessian.get(j, j)).sum::<f64>() / live.count() as f64;
        if mean.is_nan() {
            let got = format!("{} inputs, all of them zero", hessian.rows());
            return Err(Error::invalid(op, "inputs that are not all zero", got));
        }
        Ok(Self { op, hessian, dead, mean, damping })
    }

    /// How many columns are dead.
    pub fn dead_count(&self) -> usize {
        self.dead.iter().filter(|&&dead| dead).count()
    }

    /// What is added to the diagonal in column j.
    fn added(&self, j: usize) -> f64 {
        self.mean * self.damping + if self.dead[j] { self.mean } else { 0.0 }
    }

    /// The whole matrix `[k, k]` with rows and columns in the given order, of all k columns. Error: memory is short.
    pub fn matrix(&self, order: &[usize]) -> Result<Vec<f64>> {
        let mut matrix = self.zeros()?;
        matrix.par_chunks_mut(order.len()).enumerate().for_each(|(a, row)| {
            row.iter_mut().zip(order).for_each(|(v, &j)| *v = self.hessian.get(order[a], j));
            row[a] += self.added(order[a]);
        });
        Ok(matrix)
    }

    /// The lower Cholesky factor `[k, k]` of the matrix with rows and columns in the given order, of all k columns. While the matrix is
    /// not positive definite, ten times the damping is tried (10⁻⁶ after 0), up to 10. Errors: none of them makes it so; memory is
    /// short.
    pub fn factor(&mut self, order: &[usize]) -> Result<Vec<f64>> {
        let k = order.len();
        let mut factor = self.zeros()?;
        loop {
            factor.par_chunks_mut(k).enumerate().for_each(|(a, row)| {
                row[..=a].iter_mut().zip(order).for_each(|(v, &j)| *v = self.hessian.get(order[a], j));
                row[a] += self.added(order[a]);
            });
            let Err(column) = cholesky(&mut factor, k) else { return Ok(factor) };
            let next = (10.0 * self.damping).max(LEAST_DAMPING);
            if next > MOST_DAMPING {
                return Err(Error::invalid(
                    self.op,
                    "a Hessian that damping makes positive definite",
                    format!("none with damping {}, by column {}", self.damping, order[column]),
                ));
            }
            self.damping = next;
        }
    }

    fn zeros(&self) -> Result<Vec<f64>> {
        let k = self.hessian.k();
        zeroed(self.op, k * k)
    }

    /// `e · H · eᵀ` for each row e of `[.., k]`.
    pub fn losses(&self, rows: &[f64]) -> Vec<f64> {
        let mut losses = self.hessian.squares(rows);
        for (loss, row) in losses.iter_mut().zip(rows.chunks(self.dead.len())) {
            *loss += row.iter().enumerate().map(|(j, e)| self.added(j) * e * e).sum::<f64>();
        }
        losses
    }
}
