//! What calibration tells about the inputs of a layer.

use super::panel::Panel;
use crate::error::{Error, Result};
use rayon::prelude::*;

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
        let len = k.checked_mul(k).ok_or_else(|| Error::invalid(OP, "k² that fits memory", format!("k {k}")))?;
        let mut sums = Vec::new();
        sums.try_reserve_exact(len).map_err(|e| Error::Device { op: OP, cause: format!("k {k}: {e}") })?;
        sums.resize(len, 0.0);
        Ok(Self { k, rows: 0, sums })
    }

    /// Adds inputs. Costs `rows · k²` floating-point operations.
    ///
    /// Shapes: x `[rows, k]`. Errors: a length that is not rows·k; NaN or infinity (with its place). On an error
    /// nothing has been added.
    pub fn add(&mut self, x: &[f32], rows: usize) -> Result<()> {
        const OP: &str = "Hessian: inputs";
        let k = self.k;
        if rows.checked_mul(k) != Some(x.len()) {
            return Err(Error::invalid(OP, format!("{rows} × {k} numbers"), x.len().to_string()));
        }
        if let Some(i) = x.par_iter().position_first(|v| !v.is_finite()) {
            return Err(Error::NotFinite { op: OP, value: x[i].to_string(), row: i / k, column: i % k });
        }
        self.rows += rows as u64;
        for x in x.chunks(BATCH * k.max(1)) {
            let rows = x.len() / k;
            let right = Panel::from_rows([rows, k], |r| &x[r * k..(r + 1) * k]);
            let mut left = vec![0.0; k * rows];
            left.par_chunks_mut(rows).enumerate().for_each(|(j, column)| {
                column.iter_mut().enumerate().for_each(|(r, v)| *v = f64::from(x[r * k + j]));
            });
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
}
