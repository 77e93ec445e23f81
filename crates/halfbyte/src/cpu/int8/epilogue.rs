//! What becomes of the sums of a product of bytes: codes of y, by one multiplication and one rounding, or floats.
//!
//! ```text
//! sum = c + constant − zW·Σx        constant = bias − zI·Σ(w − zW)          zero points through sums, exact
//! codes:   y = round(clamp(sum · M, low − zO, high − zO)) + zO              half to even
//! floats:  y = activation(sum · sI·sW + bias)
//! ```

use super::tile::Placed;
use super::{MAX_PANELS, Target};
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::{Isa, per_isa};
use crate::cpu::matmul::{self, Activation};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, BytesMut, multiplier};
use crate::layout::cpu_int8::{CpuInt8, PANEL, Totals};
use crate::tensor::FloatsMut;

const OP: &str = "int8 epilogue";

/// Sums to bytes.
#[derive(Clone, Debug)]
pub struct Requantize {
    /// What is added to the products of each output.
    constants: Vec<i32>,
    /// What the sums of each output are multiplied by.
    multipliers: Vec<f32>,
    y: Affine,
    /// Least and greatest code.
    range: [i32; 2],
}

impl Requantize {
    /// The epilogue of a weight for inputs and outputs of given scales and zero points. `bias` `[n]` is in steps of
    /// `sI·sW`.
    ///
    /// *Errors:* a length that does not fit; sums that leave int32 for some input; a multiplier `sI·sW/sO` that is not
    /// finite; an activation that is more than a clamp, or clamps to nothing.
    pub fn new(w: &CpuInt8, x: Affine, bias: Option<&[i32]>, y: Affine, activation: Activation) -> Result<Self> {
        let multipliers: Vec<f32> = w.scales().iter().map(|&scale| multiplier(x, scale, y)).collect();
        check_finite("multipliers", &multipliers)?;
        let range = activation.range_of_codes(OP, y)?;
        Ok(Self { constants: constants(w, x, bias)?, multipliers, y, range })
    }

    /// Finishes sums of products of unsigned codes with weights that are less their zero points already: those of all outputs
    /// of a row.
    pub(crate) fn finish(&self, isa: Isa, sums: &[i32], y: &mut [u8]) {
        let zero = self.y.zero();
        let bounds = self.range.map(|code| (code - zero) as f32);
        requantize(isa, sums, &self.constants, &self.multipliers, bounds, zero as u8, y);
    }

    /// What the codes of y stand for.
    pub fn y(&self) -> Affine {
        self.y
    }
}

/// Sums to floats.
#[derive(Clone, Debug)]
pub struct Dequantize {
    /// What is added to the products of each output.
    constants: Vec<i32>,
    /// What the sums of each output are multiplied by.
    scales: Vec<f32>,
    bias: Option<Vec<f32>>,
    activation: Activation,
}

impl Dequantize {
    /// The epilogue of a weight for inputs of a given scale and zero point. `bias` `[n]` is in steps of `sI·sW`, and is
    /// added to the sums; `float_bias` `[n]` is added to what they stand for.
    ///
    /// *Errors:* a length that does not fit; sums that leave int32 for some input; a scale `sI·sW` that is not finite.
    pub fn new(
        w: &CpuInt8,
        x: Affine,
        bias: Option<&[i32]>,
        float_bias: Option<&[f32]>,
        activation: Activation,
    ) -> Result<Self> {
        let scales: Vec<f32> = w.scales().iter().map(|&scale| x.scale() * scale).collect();
        check_finite("scales", &scales)?;
        if let Some(bias) = float_bias {
            check_bias(w, bias.len())?;
        }
        Ok(Self { constants: constants(w, x, bias)?, scales, bias: float_bias.map(<[f32]>::to_vec), activation })
    }

    /// Where finished sums go, `[m, stride]` row by row.
    pub(crate) fn output<'a>(&self, y: FloatsMut<'a>, size: [usize; 2]) -> matmul::Output<'a> {
        matmul::Output::new(y, size, matmul::Epilogue { bias: None, activation: self.activation })
    }

    /// The same image by image of so many pixels, which are rows, and in an image column by column.
    pub(crate) fn planes<'a>(&self, y: FloatsMut<'a>, size: [usize; 2], pixels: usize) -> matmul::Output<'a> {
        matmul::Output::planes(y, size, pixels, matmul::Epilogue { bias: None, activation: self.activation })
    }

    /// Finishes sums of products of unsigned codes with weights that are less their zero points already, those of all outputs
    /// of a row, but for the activation.
    pub(crate) fn finish(&self, isa: Isa, sums: &[i32], y: &mut [f32]) {
        dequantize(isa, sums, &self.constants, &self.scales, self.bias.as_deref(), y);
    }
}

fn check_finite(what: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|v| !v.is_finite()) {
        Some(i) => Err(Error::invalid(OP, format!("finite {what}"), format!("{} at output {i}", values[i]))),
        None => Ok(()),
    }
}

fn check_bias(w: &CpuInt8, len: usize) -> Result<()> {
    if len == w.n() {
        return Ok(());
    }
    Err(Error::invalid(OP, format!("a bias of {}", w.n()), len.to_string()))
}

/// What is added to an output's products, whatever x is; wrapped around, as the sums are.
fn constants(w: &CpuInt8, x: Affine, bias: Option<&[i32]>) -> Result<Vec<i32>> {
    if let Some(bias) = bias {
        check_bias(w, bias.len())?;
    }
    let [low, high] = [x.byte().codes().start(), x.byte().codes().end()].map(|code| i64::from(code - x.zero()));
    let constant = |(i, total): (usize, &Totals)| {
        let bias = bias.map_or(0, |bias| i64::from(bias[i]));
        let least = bias + low * total.positive + high * total.negative;
        let greatest = bias + high * total.positive + low * total.negative;
        if i32::try_from(least).is_err() || i32::try_from(greatest).is_err() {
            let got = format!("sums of {least} to {greatest} at output {i}");
            return Err(Error::invalid(OP, "sums within int32 for every input", got));
        }
        // `low` is less the zero point as the kernels see it, of unsigned codes. Only the lowest 32 bits of a sum count.
        Ok((bias + low * (total.positive + total.negative)) as i32)
    };
    w.totals().iter().enumerate().map(constant).collect()
}

/// The output, written by many tasks at once, each in a part of its own.
pub(super) struct Output<'a> {
    isa: Isa,
    w: &'a CpuInt8,
    kind: Kind<'a>,
    stride: usize,
    column: usize,
}

enum Kind<'a> {
    Bytes(&'a Requantize, DisjointMut<'a, u8>),
    Floats(&'a Dequantize, matmul::Output<'a>),
}

impl<'a> Output<'a> {
    pub(super) fn new(isa: Isa, w: &'a CpuInt8, y: Target<'a>, m: usize, stride: usize, column: usize) -> Self {
        let kind = match y {
            Target::Bytes(requantize, y) => {
                assert_eq!((y.byte(), y.len()), (requantize.y.byte(), m * stride));
                assert_eq!(requantize.constants.len(), w.n());
                let y: &mut [u8] = match y {
                    BytesMut::U8(y) => y,
                    BytesMut::I8(y) => bytemuck::cast_slice_mut(y),
                };
                Kind::Bytes(requantize, DisjointMut::new(y))
            }
            Target::Floats(dequantize, y) => {
                assert_eq!(dequantize.constants.len(), w.n());
                Kind::Floats(dequantize, y)
            }
        };
        Self { isa, w, kind, stride, column }
    }

    /// Finishes and stores a tile of sums, `c` `[height][width]`: `height` rows from `row` on, outputs from `first` on;
    /// those past the last are dropped. `x` are the inputs, and where their rows lie.
    ///
    /// # Safety
    /// No other thread may store these elements during this product.
    pub(super) unsafe fn store(
        &self,
        [row, first]: [usize; 2],
        [height, width]: [usize; 2],
        (x, rows): (&Placed<'_>, &[usize]),
        c: &mut [i32],
    ) {
        let outputs = first..(first + width).min(self.w.n());
        let at = |r: usize| (row + r) * self.stride + self.column + first;
        if let Some(zeros) = self.w.zeros() {
            for (&row, c) in rows.iter().zip(c.chunks_exact_mut(width)) {
                subtract_zeros(self.isa, c, &zeros[outputs.clone()], x, row, self.w.k());
            }
        }
        match &self.kind {
            Kind::Bytes(f, y) => {
                let zero = f.y.zero();
                let bounds = f.range.map(|code| (code - zero) as f32);
                let (constants, multipliers) = (&f.constants[outputs.clone()], &f.multipliers[outputs.clone()]);
                for r in 0..height {
                    // SAFETY: elements of this task alone (caller).
                    let y = unsafe { y.range(at(r)..at(r) + outputs.len()) };
                    requantize(self.isa, &c[r * width..], constants, multipliers, bounds, zero as u8, y);
                }
            }
            Kind::Floats(f, y) => {
                let (constants, scales) = (&f.constants[outputs.clone()], &f.scales[outputs.clone()]);
                let bias = f.bias.as_ref().map(|bias| &bias[outputs.clone()]);
                let mut values = [0.0; MAX_PANELS * PANEL];
                let values = &mut values[..outputs.len()];
                for r in 0..height {
                    dequantize(self.isa, &c[r * width..], constants, scales, bias, values);
                    // SAFETY: elements of this task alone (caller).
                    unsafe { y.store(row + r, self.column + first, values) };
                }
            }
        }
    }
}

per_isa! {
    /// `c −= zero · Σx`, of the row that begins there.
    fn subtract_zeros(c: &mut [i32], zeros: &[i32], x: &Placed<'_>, row: usize, k: usize) {
        let sum = x.runs.sum(x.x, row, k);
        for (c, zero) in c.iter_mut().zip(zeros) {
            *c = c.wrapping_sub(zero.wrapping_mul(sum));
        }
    }
}

per_isa! {
    /// Sums to bytes, as many as `y` has.
    fn requantize(c: &[i32], constants: &[i32], multipliers: &[f32], bounds: [f32; 2], zero: u8, y: &mut [u8]) {
        // Adding 1.5·2²³ rounds to an integer, half to even, and leaves it in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let [low, high] = bounds;
        for (((y, &c), &constant), &multiplier) in y.iter_mut().zip(c).zip(constants).zip(multipliers) {
            let steps = c.wrapping_add(constant) as f32 * multiplier;
            let steps = if steps > low { steps } else { low };
            let steps = if steps < high { steps } else { high };
            *y = ((steps + ROUND).to_bits() as u8).wrapping_add(zero);
        }
    }
}

per_isa! {
    /// Sums to floats, as many as `y` has.
    fn dequantize(c: &[i32], constants: &[i32], scales: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
        for (((y, &c), &constant), &scale) in y.iter_mut().zip(c).zip(constants).zip(scales) {
            *y = c.wrapping_add(constant) as f32 * scale;
        }
        if let Some(bias) = bias {
            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
        }
    }
}
