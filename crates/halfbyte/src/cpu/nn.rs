//! What stands between the products of a language model: norms, activations, rotations, and what reads logits.
//!
//! All matrices are f32 and row-major. An output element is computed in one order whatever the number of threads, so
//! the same input gives the same bits. NaN goes in and comes out.

mod exp;
mod logits;
mod rope;
#[cfg(test)]
mod tests;

pub use logits::{argmax, kl_divergence, log_sum_exp, softmax_in_place};
pub use rope::Rope;

pub(crate) use exp::exp2;

use super::Cpu;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, Simd, dispatch};
use crate::error::{Error, Result};
use std::ops::Range;

/// Elements that a task has at least. Less is faster done than handed out.
const ELEMENTS_PER_TASK: usize = 16 * 1024;

/// `out = x / √(mean(x²) + eps) · weight`, row by row.
///
/// *Shapes:* `weight` `[d]`, `x` and `out` `[m, d]`. *Accuracy:* relative error ≤ (d/8 + 16)·2⁻²⁴, as long as the
/// squares stay in the range of f32. *Errors:* lengths that do not fit. *Source:* Zhang and Sennrich, "Root Mean
/// Square Layer Normalization", 2019.
pub fn rms_norm(cpu: &Cpu, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<()> {
    let d = weight.len();
    let rows = rows_of("rms_norm", x.len(), d)?;
    same_length("rms_norm", "out", x.len(), out.len())?;
    let out = DisjointMut::new(out);
    in_tasks(cpu, rows, d, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.start * d..range.end * d) };
        dispatch(cpu, Norm { x: &x[range.start * d..range.end * d], weight, eps, out });
    });
    Ok(())
}

/// `residual += delta`, then `out =` [`rms_norm`] of `residual`.
///
/// *Shapes:* `weight` `[d]`, the others `[m, d]`. *Errors:* lengths that do not fit.
pub fn add_rms_norm(
    cpu: &Cpu,
    residual: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<()> {
    let d = weight.len();
    let rows = rows_of("add_rms_norm", residual.len(), d)?;
    same_length("add_rms_norm", "delta", residual.len(), delta.len())?;
    same_length("add_rms_norm", "out", residual.len(), out.len())?;
    let (residual, out) = (DisjointMut::new(residual), DisjointMut::new(out));
    in_tasks(cpu, rows, 2 * d, &|range| {
        let range = range.start * d..range.end * d;
        // SAFETY: ranges of rows are disjoint.
        let (residual, out) = unsafe { (residual.range(range.clone()), out.range(range.clone())) };
        dispatch(cpu, Add { sum: residual, delta: &delta[range] });
        dispatch(cpu, Norm { x: residual, weight, eps, out });
    });
    Ok(())
}

/// `residual += delta`, element by element. *Errors:* different lengths.
pub fn add(cpu: &Cpu, residual: &mut [f32], delta: &[f32]) -> Result<()> {
    same_length("add", "delta", residual.len(), delta.len())?;
    let residual = DisjointMut::new(residual);
    in_tasks(cpu, delta.len(), 1, &|range| {
        // SAFETY: the ranges are disjoint.
        let sum = unsafe { residual.range(range.clone()) };
        dispatch(cpu, Add { sum, delta: &delta[range] });
    });
    Ok(())
}

/// `out = silu(gate) · up` with `silu(x) = x / (1 + e⁻ˣ)`.
///
/// *Shapes:* `gate_up` `[m, 2·inner]`, each row the gate first, then up; `out` `[m, inner]`.
/// *Accuracy:* relative error ≤ 2⁻²¹, where the result's and the gate's magnitudes are above 10⁻³⁰ and the gate is
/// above −87; below, silu goes to −0 with an absolute error under 10⁻³⁵. *Errors:* lengths that do not fit.
pub fn swiglu(cpu: &Cpu, gate_up: &[f32], inner: usize, out: &mut [f32]) -> Result<()> {
    let rows = rows_of("swiglu", out.len(), inner)?;
    same_length("swiglu", "gate_up", 2 * out.len(), gate_up.len())?;
    let out = DisjointMut::new(out);
    in_tasks(cpu, rows, 4 * inner, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.start * inner..range.end * inner) };
        dispatch(cpu, SwiGlu { gate_up: &gate_up[range.start * 2 * inner..range.end * 2 * inner], inner, out });
    });
    Ok(())
}

/// Cuts `items` of `cost` each (in elements) into tasks for the team; a small job stays on this thread.
fn in_tasks(cpu: &Cpu, items: usize, cost: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
    let team = cpu.threads();
    let tasks = (items.saturating_mul(cost) / ELEMENTS_PER_TASK).min(items).min(4 * team.count());
    if tasks < 2 || team.count() == 1 {
        return task(0..items);
    }
    team.run(tasks, &|i| task(items * i / tasks..items * (i + 1) / tasks));
}

/// Rows of `row` elements in `len` elements.
fn rows_of(op: &'static str, len: usize, row: usize) -> Result<usize> {
    match (len, row) {
        (0, _) => Ok(0),
        (_, 0) => Err(Error::invalid(op, "rows of at least one element", "rows of none")),
        _ if len.is_multiple_of(row) => Ok(len / row),
        _ => Err(Error::invalid(op, format!("whole rows of {row} elements"), format!("{len} elements"))),
    }
}

fn same_length(op: &'static str, name: &str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{expected} elements in {name}"), got.to_string()))
}

struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.weight.len();
        for (x, out) in self.x.chunks_exact(d).zip(self.out.chunks_exact_mut(d)) {
            let mean = sum_of_squares(s, x) / d as f32;
            let factor = s.splat((1.0 / (f64::from(mean) + f64::from(self.eps)).sqrt()) as f32);
            let mut to = out.chunks_exact_mut(S::LANES);
            let (mut from, mut by) = (x.chunks_exact(S::LANES), self.weight.chunks_exact(S::LANES));
            for ((to, from), by) in (&mut to).zip(&mut from).zip(&mut by) {
                s.store(to, s.mul(s.mul(s.load(from), factor), s.load(by)));
            }
            let (from, by) = (s.load_part(from.remainder(), 0.0), s.load_part(by.remainder(), 0.0));
            s.store_part(to.into_remainder(), s.mul(s.mul(from, factor), by));
        }
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sums = [s.splat(0.0); 4];
    let mut quads = x.chunks_exact(4 * S::LANES);
    for quad in &mut quads {
        for (sum, part) in sums.iter_mut().zip(quad.chunks_exact(S::LANES)) {
            let v = s.load(part);
            *sum = s.mul_add(v, v, *sum);
        }
    }
    let mut singles = quads.remainder().chunks_exact(S::LANES);
    for single in &mut singles {
        let v = s.load(single);
        sums[0] = s.mul_add(v, v, sums[0]);
    }
    let v = s.load_part(singles.remainder(), 0.0);
    sums[1] = s.mul_add(v, v, sums[1]);
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

struct Add<'a> {
    sum: &'a mut [f32],
    delta: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (sum, &delta) in self.sum.iter_mut().zip(self.delta) {
            *sum += delta;
        }
    }
}

struct SwiGlu<'a> {
    gate_up: &'a [f32],
    inner: usize,
    out: &'a mut [f32],
}

impl Kernel for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, out) in self.gate_up.chunks_exact(2 * self.inner).zip(self.out.chunks_exact_mut(self.inner)) {
            let (gate, up) = from.split_at(self.inner);
            let mut to = out.chunks_exact_mut(S::LANES);
            let (mut gate, mut up) = (gate.chunks_exact(S::LANES), up.chunks_exact(S::LANES));
            for ((to, gate), up) in (&mut to).zip(&mut gate).zip(&mut up) {
                s.store(to, s.mul(exp::silu(s, s.load(gate)), s.load(up)));
            }
            let (gate, up) = (s.load_part(gate.remainder(), 0.0), s.load_part(up.remainder(), 0.0));
            s.store_part(to.into_remainder(), s.mul(exp::silu(s, gate), up));
        }
    }
}
