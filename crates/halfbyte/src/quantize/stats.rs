//! What calibration tells about the inputs of a layer: second moments.

use super::panel::{Panel, pieces, rows_at_a_time};
use crate::error::{Error, Result};
use crate::memory::zeroed;
use rayon::prelude::*;
use std::cmp::Ordering;

/// Rows of x that are taken in at a time.
const BATCH: usize = 256;
/// Rows of the matrix that a thread takes at a time.
const ROWS: usize = 64;

/// `Σ xᵀx` over the inputs of a layer, `[k, k]`, in f64: the Hessian of the layer's squared output error, up to a
/// factor that no use of it depends on.
///
/// Products of f32 are exact in f64, and sums are in a fixed order: the same batches give the same bits, whatever the
/// number of threads. Takes `8 · k²` bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Hessian {
    k: usize,
    rows: u64,
    /// `[k, k]`; only the lower triangle counts.
    sums: Vec<f64>,
}

impl Hessian {
    /// Of no inputs yet, for a layer of k input channels. Errors: no memory for `k²` numbers.
    pub fn new(k: usize) -> Result<Self> {
        const OP: &str = "Hessian";
        Ok(Self { k, rows: 0, sums: zeros(OP, [k, k])? })
    }

    /// Adds inputs. Costs `rows · k²` floating-point operations.
    ///
    /// Shapes: x `[rows, k]`. Errors: a length that is not rows·k; NaN or infinity (with its place). On an error
    /// nothing has been added.
    pub fn add(&mut self, x: &[f32], rows: usize) -> Result<()> {
        const OP: &str = "Hessian: inputs";
        let k = self.k;
        check(OP, x, [rows, k])?;
        let sum = self.rows.checked_add(rows as u64);
        self.rows = sum.ok_or_else(|| Error::invalid(OP, "fewer than 2⁶⁴ rows", format!("{rows} more")))?;
        for x in x.chunks(BATCH * k.max(1)) {
            let rows = x.len() / k;
            let right = Panel::from_rows([rows, k], |r| &x[r * k..(r + 1) * k]);
            let left = transposed(x, [rows, k]);
            self.sums
                .par_chunks_mut(ROWS * k)
                .enumerate()
                .for_each(|(i, sums)| right.add_lower_to(sums, i * ROWS, &left));
        }
        Ok(())
    }

    /// Input channels of the layer.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How many inputs were added.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Element `[i, j]`, which is element `[j, i]` too. Panics if `i` or `j` is not below k.
    pub fn get(&self, i: usize, j: usize) -> f64 {
        assert!(i < self.k && j < self.k, "element [{i}, {j}] of a Hessian of k {}", self.k);
        self.sums[i.max(j) * self.k + i.min(j)]
    }
    /// `Σ (x · rᵀ)²` over all inputs x for each row r of `[.., k]`: what an error of the weights r means to the outputs.
    ///
    /// Costs `k²` floating-point operations a row. Panics if k does not divide the length of `rows`.
    pub fn squares(&self, rows: &[f64]) -> Vec<f64> {
        let k = self.k;
        assert_eq!(rows.len() % k.max(1), 0, "rows of a Hessian of k {k}");
        let at_a_time = rows_at_a_time(rows.len() / k.max(1));
        let mut squares = vec![0.0; rows.len() / k.max(1)];
        squares.par_chunks_mut(at_a_time).zip(rows.par_chunks((at_a_time * k).max(1))).for_each(|(squares, rows)| {
            let mut work = Vec::new();
            for piece in pieces(0..k) {
                // Rows of the columns from here on, and r · H of the piece as far as it comes from them: from the piece
                // itself, only half of it.
                let (len, rest) = (piece.len(), k - piece.start);
                work.clear();
                for row in rows.chunks(k) {
                    work.extend_from_slice(&row[piece.start..]);
                    work.resize(work.len() + len, 0.0);
                }
                let lower = |d: usize| &self.sums[(piece.start + d) * k + piece.start..][..len];
                let within = Panel::from_fn([len, len], |d, c| match d.cmp(&c) {
                    Ordering::Less => 0.0,
                    Ordering::Equal => 0.5 * lower(d)[c],
                    Ordering::Greater => lower(d)[c],
                });
                within.subtract_from(&mut work, rest + len, 0, rest);
                let below = Panel::from_rows([rest - len, len], |d| lower(len + d));
                below.subtract_from(&mut work, rest + len, len, rest);
                for (square, row) in squares.iter_mut().zip(work.chunks(rest + len)) {
                    let (row, product) = row.split_at(rest);
                    *square -= 2.0 * row.iter().zip(product).map(|(r, p)| r * p).sum::<f64>();
                }
            }
        });
        squares
    }

    /// The Hessian of the same inputs, each channel times its factor.
    ///
    /// Shapes: factors `[k]`. Errors: another length; NaN or infinity (row 0, with its column).
    pub fn scaled(mut self, factors: &[f32]) -> Result<Self> {
        check("Hessian: factors of channels", factors, [1, self.k])?;
        let k = self.k.max(1);
        self.sums.par_chunks_mut(k).zip(factors).for_each(|(row, &by)| {
            row.iter_mut().zip(factors).for_each(|(v, &f)| *v *= f64::from(by) * f64::from(f));
        });
        Ok(self)
    }
}

/// `Σ eᵀx` over the inputs of a layer, `[m, k]`, in f64, for m numbers e that go with each input x.
///
/// Sums are exact and ordered as those of [`Hessian`]. Takes `8 · m · k` bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossMoment {
    m: usize,
    k: usize,
    /// `[m, k]`.
    sums: Vec<f64>,
}

impl CrossMoment {
    /// Of no inputs yet. Errors: no memory for `m · k` numbers.
    pub fn new(m: usize, k: usize) -> Result<Self> {
        Ok(Self { m, k, sums: zeros("cross moment", [m, k])? })
    }

    /// Adds inputs and what goes with them. Costs `2 · rows · m · k` floating-point operations.
    ///
    /// Shapes: e `[rows, m]`; x `[rows, k]`. Errors: a length that does not fit; NaN or infinity (with its place). On an
    /// error nothing has been added.
    pub fn add(&mut self, e: &[f32], x: &[f32], rows: usize) -> Result<()> {
        let (m, k) = (self.m, self.k);
        check("cross moment: what goes with the inputs", e, [rows, m])?;
        check("cross moment: inputs", x, [rows, k])?;
        if m == 0 || k == 0 {
            return Ok(());
        }
        for (e, x) in e.chunks(BATCH * m).zip(x.chunks(BATCH * k)) {
            let rows = x.len() / k;
            let right = Panel::from_rows([rows, k], |r| &x[r * k..(r + 1) * k]);
            let left = transposed(e, [rows, m]);
            self.sums.par_chunks_mut(ROWS * k).enumerate().for_each(|(i, sums)| right.add_to(sums, i * ROWS, &left));
        }
        Ok(())
    }

    /// Numbers that go with each input.
    pub fn m(&self) -> usize {
        self.m
    }

    /// Input channels of the layer.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Row `i`, of k elements. Panics if `i` is not below m.
    pub fn row(&self, i: usize) -> &[f64] {
        assert!(i < self.m, "row {i} of a cross moment of m {}", self.m);
        &self.sums[i * self.k..(i + 1) * self.k]
    }
}

fn zeros(op: &'static str, [m, k]: [usize; 2]) -> Result<Vec<f64>> {
    let len = m.checked_mul(k).ok_or_else(|| Error::invalid(op, "a size that fits memory", format!("{m} × {k}")))?;
    zeroed(op, len)
}

fn check(op: &'static str, x: &[f32], [rows, k]: [usize; 2]) -> Result<()> {
    if rows.checked_mul(k) != Some(x.len()) {
        return Err(Error::invalid(op, format!("{rows} × {k} numbers"), x.len().to_string()));
    }
    match x.par_iter().position_first(|v| !v.is_finite()) {
        Some(i) => Err(Error::NotFinite { op, value: x[i].to_string(), row: i / k, column: i % k }),
        None => Ok(()),
    }
}

/// The columns of `[rows, k]`, one after the other.
fn transposed(x: &[f32], [rows, k]: [usize; 2]) -> Vec<f64> {
    let mut columns = vec![0.0; rows * k];
    columns.par_chunks_mut(rows).enumerate().for_each(|(j, column)| {
        column.iter_mut().enumerate().for_each(|(r, v)| *v = f64::from(x[r * k + j]));
    });
    columns
}
