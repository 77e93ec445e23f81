//! Weights `[k, n]` to symmetric codes of 4 or 8 bits as the makers of fpA_intB kernels round them: a scale for each output, or for
//! each group of inputs of an output; halves away from zero.
//!
//! | rule | scale | codes | divided by | range |
//! |---|---|---|---|---|
//! | [`WeightOnlyRule::Paddle`] | `T(largest / (2^(b−1) − 1))` | `round(w / scale)` | the scale as it is stored | ±7, ±127 |
//! | [`WeightOnlyRule::FasterTransformer`] | `T(largest / 2^(b−1))` | the same | the scale in f32 | −8 … 7, −128 … 127 |
//!
//! Where a scale is 0 every weight of it stands for 0. The codes are then those that the rule's maker has, 0/0 and all: with Paddle
//! 127 in 8 bits (−127 for a negative weight whose scale rounds to 0) and −7 in 4 bits, with FasterTransformer 0.
//!
//! Source: Paddle's CPU kernel (`weight_quantize_kernel_impl.h`, with whose results of 3.3.1 the tests compare bit by bit);
//! `symmetric_quantize` of TensorRT-LLM, which is FasterTransformer's but for outputs of zeros, where the older one divides 0 by 0.

use crate::error::{Error, Result};
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::memory::{check_empty, zeroed};
use crate::tensor::{Float, Floats};
use rayon::prelude::*;

const OP: &str = "weight-only quantisation";

/// Outputs that are computed together: their weights share cache lines.
const TOGETHER: usize = 32;

/// Whose rule codes and scales follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightOnlyRule {
    /// Paddle's on a CPU. On a GPU it divides by the scale before it is rounded to its type, so that single codes differ by one.
    #[default]
    Paddle,
    /// That of FasterTransformer and TensorRT-LLM.
    FasterTransformer,
}

/// Quantises a weight `[k, n]`, the transpose of what other quantisers take, to a tensor `[n, k]`.
///
/// The format is symmetric, of 4 or 8 bits, with one scale an output or groups along k, of which the last may be shorter.
/// *Accuracy:* bit-equal to the rule's source. *Errors:* another format, a length that does not fit, NaN and infinity, scales
/// beyond their type.
pub fn weight_only(w: Floats<'_>, [k, n]: [usize; 2], format: WeightFormat, rule: WeightOnlyRule) -> Result<QTensor> {
    let WeightFormat { bits, group, zero, channel_scale, scale } = format;
    let is_one = matches!(bits, 4 | 8) && zero == Zero::Symmetric && channel_scale.is_none() && group != Group::Tensor;
    if !is_one || group == Group::Size(0) {
        let expected = "a symmetric format of 4 or 8 bits with scales of one level, an output or a group each";
        return Err(Error::invalid(OP, expected, format!("{bits} bits, {group}, {zero}")));
    }
    if n.checked_mul(k) != Some(w.len()) {
        return Err(Error::invalid(OP, format!("{k} × {n} weights"), w.len().to_string()));
    }
    check_empty(OP, [n, k])?;
    let (groups, size) = (group.count(k), group.len(k).max(1));
    if n.checked_mul(groups).is_none_or(|scales| scales > isize::MAX as usize / size_of::<f32>()) {
        return Err(Error::invalid(OP, "scales that fit memory", format!("{n} × {groups}")));
    }
    let mut codes = zeroed::<u8>(OP, n * k)?;
    let mut scales = zeroed::<f32>(OP, n * groups)?;
    let outputs = codes
        .par_chunks_mut(TOGETHER.saturating_mul(k).max(1))
        .zip(scales.par_chunks_mut(TOGETHER.saturating_mul(groups)));
    let bad = outputs
        .enumerate()
        .map(|(block, (codes, scales))| {
            let first = block * TOGETHER;
            let width = scales.len() / groups;
            let mut ranges = vec![Range::default(); width * groups];
            for j in 0..k {
                for i in 0..width {
                    let value = w.get(j * n + first + i);
                    if !value.is_finite() {
                        return Some((j, first + i, value));
                    }
                    ranges[i * groups + j / size].take(value);
                }
            }
            let steps: Vec<Step> = ranges.iter().map(|range| range.step(rule, bits, group, scale)).collect();
            scales.iter_mut().zip(&steps).for_each(|(scale, step)| *scale = step.scale);
            for j in 0..k {
                for i in 0..width {
                    codes[i * k + j] = steps[i * groups + j / size].code(w.get(j * n + first + i), rule, bits);
                }
            }
            None
        })
        .find_map_first(|bad| bad);
    if let Some((row, column, value)) = bad {
        return Err(Error::NotFinite { op: OP, value: value.to_string(), row, column });
    }
    if let Some(at) = scales.iter().position(|s| !s.is_finite()) {
        let got = format!("weights too large for that in output {}", at / groups);
        return Err(Error::invalid(OP, format!("scales within the range of {scale}"), got));
    }
    QTensor::new(format, [n, k], codes, scales, Zeros::Symmetric, None)
}

/// The largest magnitude of some weights.
#[derive(Clone, Copy, Default)]
struct Range {
    largest: f32,
    /// Whether the first of them is −0, and no other is more: Paddle's scale of a whole output is −0 then.
    negative: bool,
    begun: bool,
}

impl Range {
    fn take(&mut self, value: f32) {
        self.negative |= !self.begun && value == 0.0 && value.is_sign_negative();
        self.begun = true;
        self.largest = self.largest.max(value.abs());
    }

    fn step(&self, rule: WeightOnlyRule, bits: u32, group: Group, dtype: Float) -> Step {
        let middle = (1u32 << (bits - 1)) as f32;
        match rule {
            WeightOnlyRule::Paddle => {
                let negative = self.negative && self.largest == 0.0 && group == Group::Channel;
                let largest = if negative { -0.0 } else { self.largest };
                let scale = dtype.round(largest / (middle - 1.0));
                Step { scale, divisor: scale }
            }
            WeightOnlyRule::FasterTransformer => {
                let divisor = self.largest / middle;
                Step { scale: dtype.round(divisor), divisor }
            }
        }
    }
}

/// A scale as it is stored, and what weights are divided by.
#[derive(Clone, Copy)]
struct Step {
    scale: f32,
    divisor: f32,
}

impl Step {
    /// The unsigned code: with the middle one for zero.
    fn code(self, value: f32, rule: WeightOnlyRule, bits: u32) -> u8 {
        let middle = 1i32 << (bits - 1);
        let steps = (value / self.divisor).round();
        let code = match rule {
            WeightOnlyRule::FasterTransformer if self.divisor == 0.0 => 0,
            WeightOnlyRule::FasterTransformer => (steps as i32).clamp(-middle, middle - 1),
            // What is no number passes min and max as the largest code; as an integer it is the least one there is.
            WeightOnlyRule::Paddle if bits == 8 && steps.is_nan() => middle - 1,
            WeightOnlyRule::Paddle if bits == 4 && !steps.is_finite() => 1 - middle,
            WeightOnlyRule::Paddle => steps.clamp(1.0 - middle as f32, middle as f32 - 1.0) as i32,
        };
        (code + middle) as u8
    }
}
