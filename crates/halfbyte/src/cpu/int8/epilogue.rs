//! What becomes of the sums of a product of bytes: codes of y, by one multiplication and one rounding, or floats.
//!
//! ```text
//! sum = c + constant − zW·Σx        constant = bias − zI·Σ(w − zW)          zero points through sums, exact
//! codes:   y = round(clamp(sum · M, low − zO, high − zO)) + zO              half to even
//! floats:  y = activation(sum · sI·sW + bias)
//! ```

use super::Target;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::{Isa, per_isa};
use crate::cpu::matmul::{self, Activation};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, BytesMut, multiplier};
use crate::layout::cpu_int8::{CpuInt8, PANEL};

const OP: &str = "int8 epilogue";

/// Sums to bytes.
#[derive(Clone, Debug)]
pub struct Requantize {
    /// Per output, whole panels.
    constants: Vec<[i32; PANEL]>,
    /// Per output, whole panels.
    multipliers: Vec<[f32; PANEL]>,
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
        let (least, greatest) = y.byte().codes().into_inner();
        let range = match activation {
            Activation::None => [least, greatest],
            Activation::Relu => [y.zero(), greatest],
            Activation::Relu6 => [y.zero(), y.code(6.0)],
            Activation::Clamp(low, high) if low <= high => [y.code(low), y.code(high)],
            other => {
                return Err(Error::invalid(
                    OP,
                    "none, relu, relu6 or a clamp for codes of 8 bits",
                    format!("{other:?}"),
                ));
            }
        };
        Ok(Self { constants: constants(w, x, bias)?, multipliers: in_panels(&multipliers), y, range })
    }

    /// Finishes sums of products of unsigned codes with weights that are less their zero points already: those of all outputs
    /// of a row.
    pub(crate) fn finish(&self, isa: Isa, sums: &[[i32; PANEL]], y: &mut [u8]) {
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
    /// Per output, whole panels.
    constants: Vec<[i32; PANEL]>,
    /// Per output, whole panels.
    scales: Vec<[f32; PANEL]>,
    bias: Option<Vec<[f32; PANEL]>>,
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
        let constants = constants(w, x, bias)?;
        Ok(Self { constants, scales: in_panels(&scales), bias: float_bias.map(in_panels), activation })
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
fn constants(w: &CpuInt8, x: Affine, bias: Option<&[i32]>) -> Result<Vec<[i32; PANEL]>> {
    if let Some(bias) = bias {
        check_bias(w, bias.len())?;
    }
    let least_code = x.byte().codes().start() - x.zero();
    let greatest_code = x.byte().codes().end() - x.zero();
    let (low, high) = (i64::from(least_code), i64::from(greatest_code));
    let constant = |(i, total): (usize, &crate::layout::cpu_int8::Totals)| {
        let bias = bias.map_or(0, |bias| i64::from(bias[i]));
        let least = bias + low * total.positive + high * total.negative;
        let greatest = bias + high * total.positive + low * total.negative;
        if i32::try_from(least).is_err() || i32::try_from(greatest).is_err() {
            let got = format!("sums of {least} to {greatest} at output {i}");
            return Err(Error::invalid(OP, "sums within int32 for every input", got));
        }
        // The zero point as the kernels see it: of unsigned codes. Only the lowest 32 bits of a sum count.
        Ok((bias + low * (total.positive + total.negative)) as i32)
    };
    let constants: Vec<i32> = w.totals().iter().enumerate().map(constant).collect::<Result<_>>()?;
    Ok(in_panels(&constants))
}

/// Whole panels, filled with 0.
fn in_panels<T: Copy + Default>(values: &[T]) -> Vec<[T; PANEL]> {
    let panel = |chunk: &[T]| {
        let mut panel = [T::default(); PANEL];
        panel[..chunk.len()].copy_from_slice(chunk);
        panel
    };
    values.chunks(PANEL).map(panel).collect()
}

/// The output, written by many tasks at once, each in a part of its own.
pub(super) struct Output<'a> {
    isa: Isa,
    n: usize,
    zeros: Option<Vec<[i32; PANEL]>>,
    kind: Kind<'a>,
    stride: usize,
    column: usize,
}

enum Kind<'a> {
    Bytes(&'a Requantize, DisjointMut<'a, u8>),
    Floats(&'a Dequantize, matmul::Output<'a>),
}

impl<'a> Output<'a> {
    pub(super) fn new(isa: Isa, w: &CpuInt8, y: Target<'a>, m: usize, stride: usize, column: usize) -> Self {
        let kind = match y {
            Target::Bytes(requantize, y) => {
                assert_eq!((y.byte(), y.len()), (requantize.y.byte(), m * stride));
                assert_eq!(requantize.constants.len(), w.panels());
                let y: &mut [u8] = match y {
                    BytesMut::U8(y) => y,
                    BytesMut::I8(y) => bytemuck::cast_slice_mut(y),
                };
                Kind::Bytes(requantize, DisjointMut::new(y))
            }
            Target::Floats(dequantize, y) => {
                assert_eq!(dequantize.constants.len(), w.panels());
                let epilogue = matmul::Epilogue { bias: None, activation: dequantize.activation };
                Kind::Floats(dequantize, matmul::Output::new(y, [m, stride], epilogue))
            }
        };
        Self { isa, n: w.n(), zeros: w.zeros().map(in_panels), kind, stride, column }
    }

    /// Finishes and stores the sums `c` of some panels of a row, whose inputs are `x`.
    ///
    /// # Safety
    /// No other thread may store these elements during this product.
    pub(super) unsafe fn store(&self, row: usize, panel: usize, x: &[u8], c: &mut [i32]) {
        let c = c.as_chunks_mut::<PANEL>().0;
        let panels = panel..panel + c.len();
        if let Some(zeros) = &self.zeros {
            subtract_zeros(self.isa, c, &zeros[panels.clone()], x);
        }
        let first = panel * PANEL;
        let len = (c.len() * PANEL).min(self.n - first);
        match &self.kind {
            Kind::Bytes(f, y) => {
                let at = row * self.stride + self.column + first;
                // SAFETY: elements of this task alone (caller).
                let y = unsafe { y.range(at..at + len) };
                let zero = f.y.zero();
                let bounds = f.range.map(|code| (code - zero) as f32);
                let (constants, multipliers) = (&f.constants[panels.clone()], &f.multipliers[panels]);
                requantize(self.isa, c, constants, multipliers, bounds, zero as u8, y);
            }
            Kind::Floats(f, y) => {
                let mut values = [[0.0f32; PANEL]; super::MAX_SUMS / PANEL];
                let values = &mut values[..c.len()];
                let bias = f.bias.as_ref().map(|bias| &bias[panels.clone()]);
                dequantize(self.isa, c, &f.constants[panels.clone()], &f.scales[panels], bias, values);
                // SAFETY: elements of this task alone (caller).
                unsafe { y.store(row, self.column + first, &values.as_flattened()[..len]) };
            }
        }
    }
}

per_isa! {
    /// `c −= zero · Σx`.
    fn subtract_zeros(c: &mut [[i32; PANEL]], zeros: &[[i32; PANEL]], x: &[u8]) {
        let sum = x.iter().fold(0i32, |sum, &code| sum.wrapping_add(code.into()));
        for (c, zeros) in c.iter_mut().zip(zeros) {
            for lane in 0..PANEL {
                c[lane] = c[lane].wrapping_sub(zeros[lane].wrapping_mul(sum));
            }
        }
    }
}

per_isa! {
    fn requantize(
        c: &[[i32; PANEL]],
        constants: &[[i32; PANEL]],
        multipliers: &[[f32; PANEL]],
        bounds: [f32; 2],
        zero: u8,
        y: &mut [u8],
    ) {
        // Adding 1.5·2²³ rounds to an integer, half to even, and leaves it in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let [low, high] = bounds;
        for (((c, constants), multipliers), y) in c.iter().zip(constants).zip(multipliers).zip(y.chunks_mut(PANEL)) {
            let mut codes = [0u8; PANEL];
            for lane in 0..PANEL {
                let steps = c[lane].wrapping_add(constants[lane]) as f32 * multipliers[lane];
                let steps = if steps > low { steps } else { low };
                let steps = if steps < high { steps } else { high };
                codes[lane] = ((steps + ROUND).to_bits() as u8).wrapping_add(zero);
            }
            y.copy_from_slice(&codes[..y.len()]);
        }
    }
}

per_isa! {
    fn dequantize(
        c: &[[i32; PANEL]],
        constants: &[[i32; PANEL]],
        scales: &[[f32; PANEL]],
        bias: Option<&[[f32; PANEL]]>,
        y: &mut [[f32; PANEL]],
    ) {
        for (((c, constants), scales), y) in c.iter().zip(constants).zip(scales).zip(y.iter_mut()) {
            for lane in 0..PANEL {
                y[lane] = c[lane].wrapping_add(constants[lane]) as f32 * scales[lane];
            }
        }
        for (bias, y) in bias.into_iter().flatten().zip(y) {
            for lane in 0..PANEL {
                y[lane] += bias[lane];
            }
        }
    }
}
