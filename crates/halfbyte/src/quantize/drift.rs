//! Weights that make up for what quantising the layers before them has done.
//!
//! The layers before are quantised already, so that a layer sees inputs x that are not those of the dense model, and its
//! own weights W are no longer the best: what is wanted is that `x · W'ᵀ` comes close to the dense model's outputs. With
//! `e` the outputs that are missing from `x · Wᵀ`, least squares with damping λ that holds W' near W gives
//!
//! ```text
//! W' = W + (Σ eᵀx) · (Σ xᵀx + λ)⁻¹
//! ```
//!
//! W' is then what a quantiser rounds. Source: Li and others, "GPTAQ: Efficient Finetuning-Free Quantization for
//! Asymmetric Calibration", 2025, which feeds the same difference column by column into GPTQ. What differs: it is solved
//! for beforehand, so that it serves any quantiser, and the outputs may be those of the residual stream that the layer's
//! outputs are added to, whose drift a layer can then make good too.

use super::cholesky::solve_rows;
use super::damped::{Damped, check};
use super::panel::{Panel, pieces, rows_at_a_time};
use super::stats::{CrossMoment, Hessian};
use crate::error::{Error, Result};
use crate::tensor::Floats;
use rayon::prelude::*;

/// How far a layer's inputs x, which come from quantised layers, have drifted from those of the dense model.
#[derive(Clone, Copy, Debug)]
pub enum Drift<'a> {
    /// `Σ (x' − x)ᵀx`, `[k, k]`, for the inputs x' of the dense model.
    Inputs(&'a CrossMoment),
    /// `Σ (y' − x · Wᵀ)ᵀx`, `[n, k]`, for the outputs y' that are wanted.
    Outputs(&'a CrossMoment),
}

/// The weights that bring a layer's outputs closest to those of the dense model.
///
/// *Shapes:* w `[n, k]`, and so is the result; the Hessian is that of the inputs x. *Damping* is a fraction of its mean
/// diagonal element, as in [`gptq`](super::gptq()), and is raised like there; 0.1 serves well. Weights of dead columns
/// stay as they are. *Cost:* `k³/3 + 2 · n·k²` floating-point operations (`4 · n·k²` from the drift of inputs). The
/// result is the same, bit for bit, whatever the number of threads.
///
/// *Errors:* those of [`gptq`](super::gptq()); a cross moment of another shape; weights beyond the range of f32.
pub fn correct(
    w: Floats<'_>,
    [n, k]: [usize; 2],
    hessian: &Hessian,
    drift: Drift<'_>,
    damping: f64,
) -> Result<Vec<f32>> {
    const OP: &str = "correct weights";
    check(OP, w, [n, k], hessian, damping)?;
    let (moment, m) = match drift {
        Drift::Inputs(moment) => (moment, k),
        Drift::Outputs(moment) => (moment, n),
    };
    if (moment.m(), moment.k()) != (m, k) {
        let got = format!("{} × {}", moment.m(), moment.k());
        return Err(Error::invalid(OP, format!("a cross moment of {m} × {k}"), got));
    }
    if n == 0 || k == 0 {
        return Ok(Vec::new());
    }
    let order: Vec<usize> = (0..k).collect();
    let factor = Damped::new(OP, hessian, damping)?.factor(&order)?;
    let at_a_time = rows_at_a_time(n);
    let mut corrected = vec![0.0f32; n * k];
    corrected.par_chunks_mut(at_a_time * k).enumerate().for_each(|(block, corrected)| {
        let first = block * at_a_time;
        let rows = corrected.len() / k;
        let weight = |i: usize| f64::from(w.get(first * k + i));
        // Rows of 2k: the weights, and minus what is added to them.
        let mut work = vec![0.0; 2 * k * rows];
        for (i, row) in work.chunks_mut(2 * k).enumerate() {
            row[..k].iter_mut().enumerate().for_each(|(j, v)| *v = weight(i * k + j));
            if let Drift::Outputs(moment) = drift {
                row[k..].iter_mut().zip(moment.row(first + i)).for_each(|(v, d)| *v = -d);
            }
        }
        if let Drift::Inputs(moment) = drift {
            for piece in pieces(0..k) {
                let panel = Panel::from_rows([k, piece.len()], |d| &moment.row(d)[piece.clone()]);
                panel.subtract_from(&mut work, 2 * k, 0, k + piece.start);
            }
        }
        solve_rows(&factor, k, &mut work, 2 * k, k);
        for (corrected, row) in corrected.chunks_mut(k).zip(work.chunks(2 * k)) {
            let (weights, less) = row.split_at(k);
            corrected.iter_mut().zip(weights).zip(less).for_each(|((to, w), l)| *to = (w - l) as f32);
        }
    });
    match corrected.par_iter().position_first(|v| !v.is_finite()) {
        Some(i) => {
            Err(Error::invalid(OP, "weights within the range of f32", format!("one beyond it in row {}", i / k)))
        }
        None => Ok(corrected),
    }
}
