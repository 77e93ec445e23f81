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

/// `out = (x − mean(x)) / √(var(x) + eps) · weight + bias`, row by row; without a bias it is 0.
///
/// *Shapes:* `weight` and `bias` `[d]`, `x` and `out` `[m, d]`. *Accuracy:* absolute error
/// ≤ (d/8 + 16)·2⁻²⁴ · (|weight|·(|z| + 1) + |bias|) with `z = (x − mean(x)) / √(var(x) + eps)`, as long as the squares stay
/// in the range of f32 and the standard deviation is above 2⁻¹²·mean(|x|). *Errors:* lengths that do not fit. *Source:* Ba,
/// Kiros and Hinton, "Layer Normalization", 2016.
pub fn layer_norm(cpu: &Cpu, x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, out: &mut [f32]) -> Result<()> {
    const OP: &str = "layer_norm";
    let d = weight.len();
    let rows = rows_of(OP, x.len(), d)?;
    same_length(OP, "bias", d, bias.map_or(d, <[f32]>::len))?;
    same_length(OP, "out", x.len(), out.len())?;
    let out = DisjointMut::new(out);
    in_tasks(cpu, rows, d, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.start * d..range.end * d) };
        dispatch(cpu, LayerNorm { x: &x[range.start * d..range.end * d], weight, bias, eps, out });
    });
    Ok(())
}

/// `residual += delta`, then `out =` [`layer_norm`] of `residual`.
///
/// *Shapes:* `weight` and `bias` `[d]`, the others `[m, d]`. *Errors:* lengths that do not fit.
pub fn add_layer_norm(
    cpu: &Cpu,
    residual: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    eps: f32,
    out: &mut [f32],
) -> Result<()> {
    const OP: &str = "add_layer_norm";
    let d = weight.len();
    let rows = rows_of(OP, residual.len(), d)?;
    same_length(OP, "delta", residual.len(), delta.len())?;
    same_length(OP, "bias", d, bias.map_or(d, <[f32]>::len))?;
    same_length(OP, "out", residual.len(), out.len())?;
    let (residual, out) = (DisjointMut::new(residual), DisjointMut::new(out));
    in_tasks(cpu, rows, 2 * d, &|range| {
        let range = range.start * d..range.end * d;
        // SAFETY: ranges of rows are disjoint.
        let (residual, out) = unsafe { (residual.range(range.clone()), out.range(range.clone())) };
        dispatch(cpu, Add { sum: residual, delta: &delta[range] });
        dispatch(cpu, LayerNorm { x: residual, weight, bias, eps, out });
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

struct LayerNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for LayerNorm<'_> {
    type Output = ();

    /// The sum of a row gives a value close to its mean; deviations from that are exact enough to correct it, and to square.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let d = self.weight.len();
        for (x, out) in self.x.chunks_exact(d).zip(self.out.chunks_exact_mut(d)) {
            let center = deviations(s, x, 0.0).0 / d as f32;
            let (sum, squares) = deviations(s, x, center);
            let rest = sum / d as f32;
            let variance = f64::from(squares / d as f32) - f64::from(rest).powi(2);
            let factor = s.splat((1.0 / (variance.max(0.0) + f64::from(self.eps)).sqrt()) as f32);
            let (center, rest) = (s.splat(center), s.splat(rest));
            for start in (0..d).step_by(S::LANES) {
                let deviation = s.sub(s.sub(load_from(s, x, start), center), rest);
                let scaled = s.mul(s.mul(deviation, factor), load_from(s, self.weight, start));
                let shifted = match self.bias {
                    Some(bias) => s.add(scaled, load_from(s, bias, start)),
                    None => scaled,
                };
                match out.get_mut(start..start + S::LANES) {
                    Some(out) => s.store(out, shifted),
                    None => s.store_part(&mut out[start..], shifted),
                }
            }
        }
    }
}

/// A vector from `start` on, zeros behind the end.
#[inline(always)]
fn load_from<S: Simd>(s: S, x: &[f32], start: usize) -> S::V {
    match x.get(start..start + S::LANES) {
        Some(part) => s.load(part),
        None => s.load_part(&x[start..], 0.0),
    }
}

/// `Σ (x − center)` and `Σ (x − center)²`.
#[inline(always)]
fn deviations<S: Simd>(s: S, x: &[f32], center: f32) -> (f32, f32) {
    let (mut sums, mut squares) = ([s.splat(0.0); 4], [s.splat(0.0); 4]);
    let mut parts = x.chunks_exact(S::LANES);
    for (i, part) in (&mut parts).enumerate() {
        let deviation = s.sub(s.load(part), s.splat(center));
        sums[i % 4] = s.add(sums[i % 4], deviation);
        squares[i % 4] = s.mul_add(deviation, deviation, squares[i % 4]);
    }
    let deviation = s.sub(s.load_part(parts.remainder(), center), s.splat(center));
    sums[0] = s.add(sums[0], deviation);
    squares[0] = s.mul_add(deviation, deviation, squares[0]);
    let all = [sums, squares].map(|[a, b, c, d]| s.sum(s.add(s.add(a, b), s.add(c, d))));
    (all[0], all[1])
}
