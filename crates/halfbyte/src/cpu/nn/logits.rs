//! What reads rows of logits: probabilities, their normaliser, the most probable.

use super::exp::{exp, exp_f64};
use super::{in_tasks, rows_of, same_length};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::lanes::{Kernel, Simd, dispatch};
use crate::error::{Error, Result};

/// Replaces each row `x` of `row` elements by `eˣ / Σ eˣ`.
///
/// *Shapes:* `x` `[m, row]`. *Accuracy:* relative error ≤ (row/8 + 16)·2⁻²⁴ plus 2⁻²⁴ of `max − x`; results below
/// about 2⁻¹²⁶ are 0. A row of only −∞, or with +∞ in it, becomes NaN where the quotient is not defined.
/// *Errors:* a length that is no multiple of `row`.
pub fn softmax_in_place(cpu: &Cpu, x: &mut [f32], row: usize) -> Result<()> {
    let rows = rows_of("softmax", x.len(), row)?;
    let x = DisjointMut::new(x);
    in_tasks(cpu, rows, row, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let x = unsafe { x.range(range.start * row..range.end * row) };
        dispatch(cpu, Softmax { x, row });
    });
    Ok(())
}

/// `out[i] = ln Σ eˣ` over row `i` of `logits`.
///
/// *Shapes:* `logits` `[m, v]`, `out` `[m]`. *Accuracy:* absolute error ≤ (v/8 + 16)·2⁻⁵² + 2⁻⁵² of the greatest
/// logit: terms and sum are computed in f64. A row of only −∞ gives −∞, one with +∞ gives +∞, one with NaN gives NaN.
/// *Errors:* `logits` is no multiple of `out`, or has empty rows.
pub fn log_sum_exp(cpu: &Cpu, logits: &[f32], out: &mut [f64]) -> Result<()> {
    let row = row_length("log_sum_exp", logits.len(), out.len())?;
    let (rows, out) = (out.len(), DisjointMut::new(out));
    in_tasks(cpu, rows, 4 * row, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.clone()) };
        dispatch(cpu, LogSumExp { logits: &logits[range.start * row..range.end * row], row, out });
    });
    Ok(())
}

/// `out[i] = Σ pᵢ·ln(pᵢ/qᵢ)` in nats, with `pᵢ` and `qᵢ` the probabilities that rows `i` of `p` and `q` give: how far
/// `q` is from `p`.
///
/// *Shapes:* `p` and `q` `[m, v]`; `p_norm` and `q_norm` `[m]`, what [`log_sum_exp`] gives for them; `out` `[m]`.
/// *Accuracy:* absolute error ≤ (v + 64)·2⁻⁵²·(1 + M)² with M the greatest magnitude of a logit: all is computed in f64;
/// equal rows give 0. Where `p` is 0 the term is 0; where only `q` is, the sum is +∞; NaN comes out where it went in. *Errors:* lengths that do not fit.
/// *Source:* Kullback and Leibler, "On Information and Sufficiency", 1951.
pub fn kl_divergence(cpu: &Cpu, p: &[f32], p_norm: &[f64], q: &[f32], q_norm: &[f64], out: &mut [f64]) -> Result<()> {
    const OP: &str = "kl_divergence";
    let row = row_length(OP, p.len(), out.len())?;
    same_length(OP, "q", p.len(), q.len())?;
    same_length(OP, "p_norm", out.len(), p_norm.len())?;
    same_length(OP, "q_norm", out.len(), q_norm.len())?;
    let (rows, out) = (out.len(), DisjointMut::new(out));
    in_tasks(cpu, rows, 4 * row, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.clone()) };
        let of = range.start * row..range.end * row;
        let norms = (&p_norm[range.clone()], &q_norm[range]);
        dispatch(cpu, KlDivergence { p: &p[of.clone()], q: &q[of], norms, row, out });
    });
    Ok(())
}

/// `out[i]` = the index of the greatest element of row `i` of `logits`, the first of equals. NaN counts as greater
/// than any number, as in NumPy and PyTorch.
///
/// *Shapes:* `logits` `[m, v]`, `out` `[m]`. *Errors:* `logits` is no multiple of `out`, or has empty rows.
pub fn argmax(cpu: &Cpu, logits: &[f32], out: &mut [usize]) -> Result<()> {
    let row = row_length("argmax", logits.len(), out.len())?;
    let (rows, out) = (out.len(), DisjointMut::new(out));
    in_tasks(cpu, rows, row, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.clone()) };
        dispatch(cpu, Argmax { logits: &logits[range.start * row..range.end * row], row, out });
    });
    Ok(())
}

fn row_length(op: &'static str, len: usize, rows: usize) -> Result<usize> {
    if rows == 0 && len == 0 {
        return Ok(1);
    }
    if rows == 0 || len == 0 || !len.is_multiple_of(rows) {
        return Err(Error::invalid(op, format!("{rows} rows of logits, none empty"), format!("{len} elements")));
    }
    Ok(len / rows)
}

/// The greatest element that is no NaN, −∞ if there is none, and whether one is NaN.
#[inline(always)]
fn greatest<S: Simd>(s: S, x: &[f32]) -> (f32, bool) {
    let mut best = [s.splat(f32::NEG_INFINITY); 4];
    let mut nan = [s.splat(0.0); 4];
    let mut quads = x.chunks_exact(4 * S::LANES);
    for quad in &mut quads {
        for (i, part) in quad.chunks_exact(S::LANES).enumerate() {
            compare(s, s.load(part), &mut best[i], &mut nan[i]);
        }
    }
    let mut singles = quads.remainder().chunks_exact(S::LANES);
    for single in &mut singles {
        compare(s, s.load(single), &mut best[0], &mut nan[0]);
    }
    compare(s, s.load_part(singles.remainder(), f32::NEG_INFINITY), &mut best[1], &mut nan[1]);
    let best = s.max(s.max(best[0], best[1]), s.max(best[2], best[3]));
    let nan = s.add(s.add(nan[0], nan[1]), s.add(nan[2], nan[3]));
    (s.greatest(best), s.sum(nan).is_nan())
}

/// `best` becomes the greater of itself and `v`; `nan`, which is 0, becomes NaN if `v` is.
#[inline(always)]
fn compare<S: Simd>(s: S, v: S::V, best: &mut S::V, nan: &mut S::V) {
    *best = s.max(v, *best);
    let (low, high) = (s.splat(f32::MIN), s.splat(f32::MAX));
    let finite = s.if_less(v, low, low, s.if_less(high, v, high, v));
    *nan = s.mul_add(finite, s.splat(0.0), *nan);
}

struct Softmax<'a> {
    x: &'a mut [f32],
    row: usize,
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for x in self.x.chunks_exact_mut(self.row) {
            let max = s.splat(greatest(s, x).0);
            let mut sum = s.splat(0.0);
            let mut parts = x.chunks_exact_mut(S::LANES);
            for part in &mut parts {
                let e = exp(s, s.sub(s.load(part), max));
                sum = s.add(sum, e);
                s.store(part, e);
            }
            let rest = parts.into_remainder();
            if !rest.is_empty() {
                let e = exp(s, s.sub(s.load_part(rest, f32::NEG_INFINITY), max));
                sum = s.add(sum, e);
                s.store_part(rest, e);
            }
            let factor = 1.0 / s.sum(sum);
            x.iter_mut().for_each(|x| *x *= factor);
        }
    }
}

struct LogSumExp<'a> {
    logits: &'a [f32],
    row: usize,
    out: &'a mut [f64],
}

impl Kernel for LogSumExp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.logits.chunks_exact(self.row).zip(self.out) {
            let (max, nan) = greatest(s, x);
            *out = if nan {
                f64::NAN
            } else if max.is_infinite() {
                f64::from(max)
            } else {
                let max = f64::from(max);
                max + sum_of_exp(x, max).ln()
            };
        }
    }
}

#[inline(always)]
fn sum_of_exp(x: &[f32], max: f64) -> f64 {
    let mut sums = [0.0; 16];
    let mut last = [f32::NEG_INFINITY; 16];
    let rest = x.chunks_exact(16).remainder();
    last[..rest.len()].copy_from_slice(rest);
    for part in x.chunks_exact(16).chain([&last[..]]) {
        let mut below_max = [0.0; 16];
        for i in 0..16 {
            below_max[i] = f64::from(part[i]) - max;
        }
        let e = exp_f64(below_max);
        for i in 0..16 {
            sums[i] += e[i];
        }
    }
    sums.iter().sum()
}

struct Argmax<'a> {
    logits: &'a [f32],
    row: usize,
    out: &'a mut [usize],
}

impl Kernel for Argmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (x, out) in self.logits.chunks_exact(self.row).zip(self.out) {
            let (max, nan) = greatest(s, x);
            // Chunks first: whether one holds it takes no branch for each element.
            let is_it = |x: &f32| if nan { x.is_nan() } else { *x == max };
            let held = x.chunks(64).position(|chunk| chunk.iter().fold(false, |found, x| found | is_it(x)));
            let found = held.and_then(|i| Some(i * 64 + x[i * 64..].iter().position(is_it)?));
            *out = found.unwrap_or(0);
        }
    }
}

struct KlDivergence<'a> {
    p: &'a [f32],
    q: &'a [f32],
    norms: (&'a [f64], &'a [f64]),
    row: usize,
    out: &'a mut [f64],
}

impl Kernel for KlDivergence<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let rows = self.p.chunks_exact(self.row).zip(self.q.chunks_exact(self.row));
        let norms = self.norms.0.iter().zip(self.norms.1);
        for (((p, q), (&p_norm, &q_norm)), out) in rows.zip(norms).zip(self.out) {
            // Rounding can leave a sum of near-equals a hair below 0, which no divergence is; NaN passes.
            let sum = divergence(p, p_norm, q, q_norm);
            *out = if sum < 0.0 { 0.0 } else { sum };
        }
    }
}

#[inline(always)]
fn divergence(p: &[f32], p_norm: f64, q: &[f32], q_norm: f64) -> f64 {
    let mut sums = [0.0; 16];
    let (mut last_p, mut last_q) = ([f32::NEG_INFINITY; 16], [0.0; 16]);
    let rest = p.len() / 16 * 16;
    last_p[..p.len() - rest].copy_from_slice(&p[rest..]);
    last_q[..q.len() - rest].copy_from_slice(&q[rest..]);
    let ps = p.chunks_exact(16).chain([&last_p[..]]);
    let qs = q.chunks_exact(16).chain([&last_q[..]]);
    for (p, q) in ps.zip(qs) {
        let (mut ln_p, mut ratio) = ([0.0; 16], [0.0; 16]);
        for i in 0..16 {
            ln_p[i] = f64::from(p[i]) - p_norm;
            ratio[i] = ln_p[i] - (f64::from(q[i]) - q_norm);
        }
        let e = exp_f64(ln_p);
        for i in 0..16 {
            sums[i] += if e[i] == 0.0 { 0.0 } else { e[i] * ratio[i] };
        }
    }
    sums.iter().sum()
}
