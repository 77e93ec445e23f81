//! Round to nearest: each group's scale from its extremes, or from a search for the least squared error.

use super::too_large;
use crate::error::{Error, Result};
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::memory::{check_empty, collected, zeroed};
use crate::tensor::Floats;
use bytemuck::Zeroable;
use rayon::prelude::*;

/// How a symmetric group's scale follows from its largest magnitude.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SymmetricScale {
    /// `max|w| / (2^(bits−1) − 1)`: both extremes are met exactly, the lowest code stays unused.
    #[default]
    Narrow,
    /// `max|w| / ((2^bits − 1) / 2)`: every code is used; an extreme on the positive side is off by half a step.
    Full,
}

/// Options of [`rtn`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rtn {
    /// How a symmetric scale follows from the largest magnitude.
    pub symmetric: SymmetricScale,
    /// Search 40 shrunken ranges, down to 0.5 of the full one, for the least squared error of the group (under the scale of a
    /// channel, every factor from that half on, instead of those next to the full range).
    pub search: bool,
}

/// Quantises a matrix by rounding to nearest.
///
/// *Shapes:* w `[n, k]`. *Accuracy:* every element within half a step of its group, plus the rounding of the scale to
/// the format's scale type (where scales have two levels, elements that no code reaches may be further off if that lowers the
/// squared error of the group); codes are chosen for the rounded scale. Asymmetric ranges always include zero.
/// *Errors:* a length that is not n·k, a bad format, NaN or infinity (with its place), a scale beyond the scale type, with
/// zero points or offsets a range of weights beyond f32, no elements in more than
/// 2²⁴ rows or columns, memory that is short.
pub fn rtn(w: Floats<'_>, [n, k]: [usize; 2], format: WeightFormat, options: Rtn) -> Result<QTensor> {
    const OP: &str = "quantize (round to nearest)";
    format.validate()?;
    if n.checked_mul(k) != Some(w.len()) {
        return Err(Error::invalid(OP, format!("{n} × {k} weights"), w.len().to_string()));
    }
    check_empty(OP, [n, k])?;
    let groups = format.group.count(k);
    let len = format.group.len(k).max(1);
    let range = Range { format, options };
    let tensor_wide = match format.group {
        Group::Tensor => Some(match w {
            Floats::F32(w) => range.of(w, &[1.0], None),
            w => range.of(&collected(OP, w.len(), (0..w.len()).map(|i| w.get(i)))?, &[1.0], None),
        }),
        _ => None,
    };
    let mut codes = zeroed::<u8>(OP, n * k)?;
    let mut params = zeroed::<Params>(OP, n * groups)?;
    let bad = codes
        .par_chunks_mut(k.max(1))
        .zip(params.par_chunks_mut(groups))
        .enumerate()
        .map(|(i, (codes, params))| {
            let row = w.slice(i * k..(i + 1) * k).to_f32();
            if let Some(j) = row.iter().position(|v| !v.is_finite()) {
                return Some((i, j, row[j]));
            }
            let channel = range.channel(row.chunks(len));
            for (g, params) in params.iter_mut().enumerate() {
                let (from, to) = (g * len, ((g + 1) * len).min(k));
                *params = tensor_wide.unwrap_or_else(|| range.of(&row[from..to], &[1.0], channel));
                for (code, &value) in codes[from..to].iter_mut().zip(&row[from..to]) {
                    *code = params.code(value, format);
                }
            }
            None
        })
        .find_map_first(|bad| bad);
    if let Some((row, column, value)) = bad {
        return Err(Error::NotFinite { op: OP, value: value.to_string(), row, column });
    }
    let scales = collected(OP, n * groups, params.iter().map(|p| p.scale))?;
    if let Some(i) = scales.iter().position(|s| !s.is_finite()) {
        return Err(too_large(OP, format, &format!(" in row {}", i / groups)));
    }
    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => Zeros::Integer(collected(OP, n * groups, params.iter().map(|p| p.zero as u16))?),
        Zero::Float => Zeros::Float(collected(OP, n * groups, params.iter().map(|p| p.zero))?),
    };
    QTensor::new(format, [n, k], codes, scales, zeros, None)
}

/// Scale and zero (a zero point, or an offset where the format has one) of one group.
#[derive(Clone, Copy, Debug, Zeroable)]
pub(super) struct Params {
    pub scale: f32,
    pub zero: f32,
}

impl Params {
    pub fn code(self, value: f32, format: WeightFormat) -> u8 {
        let max = format.max_code() as f32;
        if self.scale == 0.0 {
            return if format.zero == Zero::Float { 0 } else { self.zero as u8 };
        }
        let code = match format.zero {
            Zero::Float => (value - self.zero) / self.scale,
            Zero::Symmetric | Zero::Integer => value / self.scale + self.zero,
        };
        code.round_ties_even().clamp(0.0, max) as u8
    }

    /// What a code stands for, exactly.
    pub fn exact(self, code: u8, format: WeightFormat) -> f64 {
        let (scale, zero) = (f64::from(self.scale), f64::from(self.zero));
        match format.zero {
            Zero::Float => scale * f64::from(code) + zero,
            Zero::Symmetric | Zero::Integer => scale * (f64::from(code) - zero),
        }
    }
}

/// The first of the candidates of least error.
pub(super) fn least(candidates: impl Iterator<Item = (f64, Params)>) -> Params {
    let best = candidates.reduce(|best, next| if next.0 < best.0 { next } else { best });
    best.expect("a search has candidates").1
}

/// Chooses a group's parameters.
pub(super) struct Range {
    pub format: WeightFormat,
    pub options: Rtn,
}

impl Range {
    /// Without a search, the full range; with it, the one of least squared error. `weights` are what the errors of the
    /// group's elements count, repeated as often as needed; `channel` is the scale of the channel, where there is one, under
    /// which the least squared error is always looked for.
    pub fn of(&self, group: &[f32], weights: &[f64], channel: Option<f32>) -> Params {
        if channel.is_none() && !self.options.search {
            return self.full(group);
        }
        least(self.candidates(group, channel).into_iter().map(|params| {
            let squares = group.iter().map(|&v| {
                let value = params.exact(params.code(v, self.format), self.format);
                (value - f64::from(v)).powi(2)
            });
            (squares.zip(weights.iter().cycle()).map(|(square, weight)| square * weight).sum(), params)
        }))
    }

    /// What a search tries: the full range, and 40 shrunken ones; what a group may have under the scale of its channel.
    pub fn candidates(&self, group: &[f32], channel: Option<f32>) -> Vec<Params> {
        match channel {
            None => (0..=40).map(|step| self.shrunk(group, 1.0 - 0.5 * step as f32 / 40.0)).collect(),
            Some(channel) => self.multiples(group, channel),
        }
    }

    /// Parameters for all of the group's range.
    pub(super) fn full(&self, group: &[f32]) -> Params {
        self.shrunk(group, 1.0)
    }

    /// Parameters for the group's range times `factor`.
    fn shrunk(&self, group: &[f32], factor: f32) -> Params {
        let format = self.format;
        let round = |s: f32| format.scale.round(s);
        let max_code = format.max_code() as f32;
        match format.zero {
            Zero::Symmetric => {
                let magnitude = group.iter().fold(0.0f32, |a, v| a.max(v.abs())) * factor;
                let levels = match self.options.symmetric {
                    SymmetricScale::Narrow => (format.middle() - 1) as f32,
                    SymmetricScale::Full => max_code / 2.0,
                };
                Params { scale: round(magnitude / levels), zero: format.middle() as f32 }
            }
            Zero::Integer => {
                let low = group.iter().fold(0.0f32, |a, &v| a.min(v)) * factor;
                let high = group.iter().fold(0.0f32, |a, &v| a.max(v)) * factor;
                let scale = round((high - low) / max_code);
                let zero = if scale == 0.0 { 0.0 } else { (-low / scale).round_ties_even().clamp(0.0, max_code) };
                Params { scale, zero }
            }
            Zero::Float => {
                let low = group.iter().fold(f32::INFINITY, |a, &v| a.min(v));
                let high = group.iter().fold(f32::NEG_INFINITY, |a, &v| a.max(v));
                let (low, high) = if group.is_empty() { (0.0, 0.0) } else { (low, high) };
                let sum = low + high;
                let middle = if sum.is_finite() { sum / 2.0 } else { low / 2.0 + high / 2.0 };
                let half = (high - low) / 2.0 * factor;
                let from = |zero: f32| Params { scale: round((middle + half - zero) / max_code), zero };
                let nearest = from(round(middle - half));
                // Rounded up by more than half a step, as that of weights that differ by less than it is exact to, it would lie above
                // them; the next one below has them all.
                if nearest.zero - (middle - half) > nearest.scale / 2.0 {
                    let below = nearest.zero.abs() * (1.5 * format.scale.unit_roundoff()) as f32;
                    return from(round(nearest.zero - below));
                }
                nearest
            }
        }
    }
}
