//! Norms of rows, and of the heads in them.

use super::{Add, in_tasks, rows_of, same_length};
use crate::cpu::Cpu;
use crate::cpu::attention::Heads;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::lanes::{Kernel, Simd, dispatch};
use crate::error::Result;

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

/// [`rms_norm`] in place of each query head and each key head in the rows of `qkv`; the value heads stay as they are.
///
/// *Shapes:* `qkv` `[m, heads.row()]`, `query_weight` and `key_weight` `[head_size]`. *Accuracy:* as [`rms_norm`] of rows of
/// `head_size` elements. *Errors:* lengths that do not fit. *Source:* Henry et al., "Query-Key Normalization for
/// Transformers", 2020; with RMS norms as in Qwen3.
pub fn head_rms_norm(
    cpu: &Cpu,
    qkv: &mut [f32],
    heads: Heads,
    query_weight: &[f32],
    key_weight: &[f32],
    eps: f32,
) -> Result<()> {
    const OP: &str = "head_rms_norm";
    let row = heads.checked(OP)?.row();
    let rows = rows_of(OP, qkv.len(), row)?;
    same_length(OP, "query_weight", heads.head_size, query_weight.len())?;
    same_length(OP, "key_weight", heads.head_size, key_weight.len())?;
    let qkv = DisjointMut::new(qkv);
    in_tasks(cpu, rows, row, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let qkv = unsafe { qkv.range(range.start * row..range.end * row) };
        for qkv in qkv.chunks_exact_mut(row) {
            let (queries, rest) = qkv.split_at_mut(heads.heads * heads.head_size);
            let keys = &mut rest[..heads.kv_heads * heads.head_size];
            dispatch(cpu, NormInPlace { x: queries, weight: query_weight, eps });
            dispatch(cpu, NormInPlace { x: keys, weight: key_weight, eps });
        }
    });
    Ok(())
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
            let factor = s.splat(rms_factor(s, x, self.eps));
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

struct NormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for NormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for x in self.x.chunks_exact_mut(self.weight.len()) {
            let factor = s.splat(rms_factor(s, x, self.eps));
            let (mut x, mut by) = (x.chunks_exact_mut(S::LANES), self.weight.chunks_exact(S::LANES));
            for (x, by) in (&mut x).zip(&mut by) {
                s.store(x, s.mul(s.mul(s.load(x), factor), s.load(by)));
            }
            let (x, by) = (x.into_remainder(), s.load_part(by.remainder(), 0.0));
            s.store_part(x, s.mul(s.mul(s.load_part(x, 0.0), factor), by));
        }
    }
}

/// `1 / √(mean(x²) + eps)`.
#[inline(always)]
fn rms_factor<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    let mean = sum_of_squares(s, x) / x.len() as f32;
    (1.0 / (f64::from(mean) + f64::from(eps)).sqrt()) as f32
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
