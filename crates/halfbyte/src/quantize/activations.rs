//! Activations to 8-bit codes, row by row and weight group by weight group (all of a row, where the weight's scales have two
//! levels): the rule that every device follows, bit
//! for bit.
//!
//! Symmetric, over the `|x|` of a row's group, in f32:
//!
//! ```text
//! scale = max / 127      code = round_half_even(x · (127 / max))          x ≈ scale · code
//! ```
//!
//! With an offset, over its least and greatest element:
//!
//! ```text
//! scale = (high − low) / 255      code = round_half_even((x − low) · (255 / (high − low))) − 128
//! offset = low + 128 · scale                                               x ≈ scale · code + offset
//! ```
//!
//! A range below 2⁻¹⁰⁰ counts as none: scale and codes are 0. A group that holds NaN or infinity has a scale of NaN,
//! so that whatever is computed from it is NaN; so has, with an offset, one whose greatest and least element differ by more than f32
//! holds.

use crate::format::{Act, QTensor};

/// Ranges below this count as none, so that the reciprocal stays finite.
pub(crate) const LEAST_RANGE: f32 = f32::from_bits(0x0d80_0000); // 2^-100

/// Codes of quantised activations, with the scale and offset of each row and group.
#[derive(Clone, Debug, PartialEq)]
pub struct ActCodes {
    /// `[m, k]`, from −127 (symmetric) or −128 (with offset) to 127.
    pub codes: Vec<i8>,
    /// `[m, groups]`.
    pub scales: Vec<f32>,
    /// `[m, groups]`; all zero if symmetric.
    pub offsets: Vec<f32>,
}

/// Scale, offset and the factor that takes `x − base` to codes, of one row's group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ActRange {
    pub scale: f32,
    pub offset: f32,
    /// Subtracted before multiplying by `inverse`.
    pub base: f32,
    pub inverse: f32,
    /// Subtracted after rounding.
    pub shift: f32,
}

impl ActRange {
    /// From the greatest magnitude (a NaN or infinity among the elements comes as one here).
    pub(crate) fn symmetric(magnitude: f32) -> Self {
        if !magnitude.is_finite() {
            return Self { scale: f32::NAN, offset: 0.0, base: 0.0, inverse: 0.0, shift: 0.0 };
        }
        if magnitude < LEAST_RANGE {
            return Self { scale: 0.0, offset: 0.0, base: 0.0, inverse: 0.0, shift: 0.0 };
        }
        Self { scale: magnitude / 127.0, offset: 0.0, base: 0.0, inverse: 127.0 / magnitude, shift: 0.0 }
    }

    /// From the least and the greatest element; `finite` tells whether every element is.
    pub(crate) fn asymmetric(low: f32, high: f32, finite: bool) -> Self {
        let range = high - low;
        if !finite || !range.is_finite() {
            return Self { scale: f32::NAN, offset: 0.0, base: 0.0, inverse: 0.0, shift: 0.0 };
        }
        if range < LEAST_RANGE {
            return Self { scale: 0.0, offset: low, base: 0.0, inverse: 0.0, shift: 0.0 };
        }
        let scale = range / 255.0;
        Self { scale, offset: low + 128.0 * scale, base: low, inverse: 255.0 / range, shift: 128.0 }
    }

    /// Code of an element. Elements of a group without range or with NaN get 0.
    pub(crate) fn code(self, x: f32) -> i8 {
        (((x - self.base) * self.inverse).round_ties_even() - self.shift) as i8
    }
}

/// Quantises activations for a weight: the groups are the weight's, along its group index if it has one; one group, where the
/// weight's scales have two levels.
///
/// Shapes: x `[m, k]`. Panics if x is shorter.
pub fn quantize_activations(x: &[f32], m: usize, w: &QTensor, act: Act) -> ActCodes {
    quantize_rows(x, [m, w.k(), w.activation_groups()], |j| w.activation_group_of(j), act)
}

/// Quantises rows whose columns are divided into groups in any way. Shapes: x `[m, k]`.
pub(crate) fn quantize_rows(
    x: &[f32],
    [m, k, groups]: [usize; 3],
    group_of: impl Fn(usize) -> usize,
    act: Act,
) -> ActCodes {
    let mut out = ActCodes { codes: vec![0; m * k], scales: vec![0.0; m * groups], offsets: vec![0.0; m * groups] };
    for r in 0..m {
        let row = &x[r * k..(r + 1) * k];
        let mut low = vec![f32::INFINITY; groups];
        let mut high = vec![f32::NEG_INFINITY; groups];
        let mut finite = vec![true; groups];
        for (j, &v) in row.iter().enumerate() {
            let g = group_of(j);
            low[g] = low[g].min(v);
            high[g] = high[g].max(v);
            finite[g] &= v.is_finite();
        }
        let ranges: Vec<ActRange> = (0..groups)
            .map(|g| match act {
                Act::A8Asym if low[g] > high[g] && finite[g] => ActRange::symmetric(0.0),
                Act::A8Asym => ActRange::asymmetric(low[g], high[g], finite[g]),
                _ if !finite[g] => ActRange::symmetric(f32::NAN),
                _ => ActRange::symmetric(high[g].max(-low[g]).max(0.0)),
            })
            .collect();
        for (j, &v) in row.iter().enumerate() {
            out.codes[r * k + j] = ranges[group_of(j)].code(v);
        }
        for (g, range) in ranges.iter().enumerate() {
            out.scales[r * groups + g] = range.scale;
            out.offsets[r * groups + g] = range.offset;
        }
    }
    out
}
