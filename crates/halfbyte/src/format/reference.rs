//! The executable specification: every format's meaning, in f64, as plainly as it can be said.
//!
//! Kernels are tested against this file, element by element; see [`Bound`].

use super::int8::{Bytes, Int8Weight};
use super::{Act, QTensor, Zeros};
use crate::conv::{Conv2dShape, Geometry};
use crate::error::Result;
use crate::quantize::activations::{ActCodes, quantize_activations, quantize_rows};
use crate::tensor::Float;
use std::ops::RangeInclusive;

/// The float matrix that a quantised tensor stands for, `[n, k]`, exact (f64 holds every product of code and scale).
pub fn dequantize(w: &QTensor) -> Vec<f64> {
    let groups = w.groups();
    let mut out = Vec::with_capacity(w.n() * w.k());
    for i in 0..w.n() {
        for j in 0..w.k() {
            let g = w.group_of(j);
            let code = f64::from(w.codes()[i * w.k() + j]);
            let scale = f64::from(w.scales()[i * groups + g]);
            out.push(match w.zeros() {
                Zeros::Symmetric => scale * (code - f64::from(w.format().middle())),
                Zeros::Integer(z) => scale * (code - f64::from(z[i * groups + g])),
                Zeros::Float(o) => scale * code + f64::from(o[i * groups + g]),
            });
        }
    }
    out
}

/// `y = x · wᵀ` in f64 for x `[m, k]` and w `[n, k]`, with `magnitude = |x| · |w|ᵀ`, by which errors are measured. Panics
/// if x or w is shorter.
pub fn matmul(x: &[f64], w: &[f64], [m, n, k]: [usize; 3]) -> Product {
    let mut value = Vec::with_capacity(m * n);
    let mut magnitude = Vec::with_capacity(m * n);
    for r in 0..m {
        let row = &x[r * k..(r + 1) * k];
        for i in 0..n {
            let weight = &w[i * k..(i + 1) * k];
            value.push(row.iter().zip(weight).map(|(a, b)| a * b).sum());
            magnitude.push(row.iter().zip(weight).map(|(a, b)| (a * b).abs()).sum());
        }
    }
    Product { value, magnitude }
}

/// Result of [`matmul`], both `[m, n]`.
#[derive(Clone, Debug)]
pub struct Product {
    /// The product.
    pub value: Vec<f64>,
    /// The product of absolute values.
    pub magnitude: Vec<f64>,
}

/// `y = x · dequant(w)ᵀ` as the format defines it: with quantised activations, x is quantised first and what its codes
/// stand for is multiplied.
///
/// Shapes: x `[m, k]` f32. With quantised activations the product is the sum of four terms,
/// `Σ (sA·qA + oA)(sB·qB + oB)`, and its magnitude is that of the four: `(|sA·qA| + |oA|) · (|sB·qB| + |oB|)ᵀ`. Without
/// offsets that is `|x| · |W|ᵀ` again. Panics if x is shorter.
pub fn linear(x: &[f32], m: usize, w: &QTensor, act: Act) -> Product {
    let shape = [m, w.n(), w.k()];
    if !act.is_quantized() {
        let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        return matmul(&x, &dequantize(w), shape);
    }
    let codes = quantize_activations(x, m, w, act);
    let value = matmul(&dequantize_activations(&codes, w), &dequantize(w), shape).value;
    let magnitude = matmul(&activation_magnitudes(&codes, w), &weight_magnitudes(w), shape).value;
    Product { value, magnitude }
}

/// The convolution of x with w in f64, with the magnitude of the sum as [`matmul`] has it.
///
/// Shapes: x `[batch, ci, h, w]`, w `[co, kh, kw, ci / groups]`, both results `[batch, co, oh, ow]`. Panics if x or w is
/// shorter.
pub fn conv2d(x: &[f64], w: &[f64], shape: &Conv2dShape) -> Product {
    let Geometry { ci, co, kernel, stride, padding, dilation, .. } = *shape.geometry();
    let (channels, outputs) = (shape.geometry().channels(), shape.geometry().outputs());
    let ([height, width], [rows, columns]) = (shape.input(), shape.output());
    // Where a position of the kernel lies in the input, if it does.
    let place = |axis: usize, output: usize, position: usize, size: usize| {
        let padded = output * stride[axis] + position * dilation[axis];
        padded.checked_sub(padding[axis]).filter(|&at| at < size)
    };
    let mut product =
        Product { value: Vec::with_capacity(shape.y_len()), magnitude: Vec::with_capacity(shape.y_len()) };
    for b in 0..shape.batch() {
        for o in 0..co {
            for (oy, ox) in (0..rows).flat_map(|oy| (0..columns).map(move |ox| (oy, ox))) {
                let (mut value, mut magnitude) = (0.0, 0.0);
                for ky in 0..kernel[0] {
                    let Some(y) = place(0, oy, ky, height) else { continue };
                    for kx in 0..kernel[1] {
                        let Some(x_at) = place(1, ox, kx, width) else { continue };
                        for c in 0..channels {
                            let plane = b * ci + o / outputs * channels + c;
                            let weight = w[((o * kernel[0] + ky) * kernel[1] + kx) * channels + c];
                            let term = x[(plane * height + y) * width + x_at] * weight;
                            value += term;
                            magnitude += term.abs();
                        }
                    }
                }
                product.value.push(value);
                product.magnitude.push(magnitude);
            }
        }
    }
    product
}

/// The convolution of x with dequant(w) as the format defines it.
///
/// With quantised activations x is quantised once, by the rule of [`crate::quantize::activations`]: one scale (and offset) for
/// each pixel and group of channels, the channels that share a scale of the weight; all channels of a pixel's group of
/// the convolution where the weight has one scale a row, or two levels of them. What those codes stand for is convolved, and padding is exactly
/// zero.
///
/// Shapes: x `[batch, ci, h, w]` f32, w `[co, k]` in the order of [`crate::conv`], both results `[batch, co, oh, ow]`; the
/// magnitude is that of [`linear`]. *Errors:* groups of a scale that do not divide the channels of a position. Panics if
/// x or w is smaller.
pub fn conv2d_linear(x: &[f32], w: &QTensor, act: Act, shape: &Conv2dShape) -> Result<Product> {
    let ci = shape.geometry().ci;
    shape.geometry().scale_channels(w.format().group)?;
    let share = shape.geometry().scale_channels(w.format().activation_group())?;
    if !act.is_quantized() {
        let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        return Ok(conv2d(&x, &dequantize(w), shape));
    }
    let (pixels, plane) = (shape.input_pixels(), shape.input().iter().product::<usize>());
    let channel_first = |pixel: usize, c: usize| (pixel / plane * ci + c) * plane + pixel % plane;
    let rows: Vec<f32> = (0..pixels * ci).map(|i| x[channel_first(i / ci, i % ci)]).collect();
    let groups = ci / share;
    let codes = quantize_rows(&rows, [pixels, ci, groups], |c| c / share, act);
    let (mut value, mut magnitude) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    for (i, &code) in codes.codes.iter().enumerate() {
        let (pixel, c) = (i / ci, i % ci);
        let scaled = f64::from(codes.scales[pixel * groups + c / share]) * f64::from(code);
        let offset = f64::from(codes.offsets[pixel * groups + c / share]);
        value[channel_first(pixel, c)] = scaled + offset;
        magnitude[channel_first(pixel, c)] = scaled.abs() + offset.abs();
    }
    let value = conv2d(&value, &dequantize(w), shape).value;
    let magnitude = conv2d(&magnitude, &weight_magnitudes(w), shape).magnitude;
    Ok(Product { value, magnitude })
}

fn activation_magnitudes(x: &ActCodes, w: &QTensor) -> Vec<f64> {
    let (k, groups) = (w.k(), w.activation_groups());
    let at = |i: usize| (i / k) * groups + w.activation_group_of(i % k);
    let term =
        |i: usize| (f64::from(x.scales[at(i)]) * f64::from(x.codes[i])).abs() + f64::from(x.offsets[at(i)]).abs();
    (0..x.codes.len()).map(term).collect()
}

fn weight_magnitudes(w: &QTensor) -> Vec<f64> {
    let Zeros::Float(offsets) = w.zeros() else { return dequantize(w).into_iter().map(f64::abs).collect() };
    let (k, groups) = (w.k(), w.groups());
    let at = |i: usize| (i / k) * groups + w.group_of(i % k);
    let term =
        |i: usize| (f64::from(w.scales()[at(i)]) * f64::from(w.codes()[i])).abs() + f64::from(offsets[at(i)]).abs();
    (0..w.codes().len()).map(term).collect()
}

/// What quantised activations stand for, `[m, k]`: `scale · code + offset` of the row and the column's group. Panics if
/// they are not those of such a weight.
pub fn dequantize_activations(x: &ActCodes, w: &QTensor) -> Vec<f64> {
    let (k, groups) = (w.k(), w.activation_groups());
    let m = x.codes.len() / k.max(1);
    let mut out = Vec::with_capacity(m * k);
    for r in 0..m {
        for j in 0..k {
            let g = r * groups + w.activation_group_of(j);
            out.push(f64::from(x.scales[g]) * f64::from(x.codes[r * k + j]) + f64::from(x.offsets[g]));
        }
    }
    out
}

/// How far a kernel's result may lie from the reference: `|y − ref| ≤ (u_out + c·u_acc) · (|x|·|W|ᵀ)`, plus the least
/// magnitude that the output type holds.
///
/// `u_acc = 2⁻²⁴`: every kernel accumulates in f32. `c` counts roundings on the way of one term into its sum; kernels
/// sum in several partial accumulators, so that `c` grows far slower than k.
///
/// A kernel that says so multiplies by weights that it scaled and rounded to a half type, once: `u` of that type is added.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Type of the output.
    pub out: Float,
    /// Length of the reduction.
    pub k: usize,
    /// The type that weights are rounded to before they are multiplied, if they are.
    pub rounded_weights: Option<Float>,
}

impl Bound {
    /// The bound of a kernel whose weights are exact.
    pub fn new(out: Float, k: usize) -> Self {
        Self { out, k, rounded_weights: None }
    }

    /// The allowed distance for an element whose magnitude `|x|·|W|ᵀ` is given.
    pub fn allowed(&self, magnitude: f64) -> f64 {
        let c = 16.0 + (self.k as f64).sqrt();
        let least = match self.out {
            Float::F16 => 2f64.powi(-25),
            Float::BF16 | Float::F32 => 2f64.powi(-126),
        };
        let weights = self.rounded_weights.map_or(0.0, Float::unit_roundoff);
        (self.out.unit_roundoff() + weights + c * 2f64.powi(-24)) * magnitude + least
    }
}

/// Sums of a product of bytes, `[m, n]`: `Σ (qI − zI)(qW − zW) + bias`, exact; see [`super::int8`].
///
/// Shapes: x `[m, k]`, bias `[n]`. Panics if one is shorter.
pub fn int8_sums(x: Bytes<'_>, m: usize, x_zero: i32, w: &Int8Weight<'_>, bias: Option<&[i32]>) -> Vec<i64> {
    let (n, k) = (w.n(), w.k());
    let mut sums = Vec::with_capacity(m * n);
    for r in 0..m {
        for i in 0..n {
            let product = |j| i64::from(x.get(r * k + j) - x_zero) * i64::from(w.codes().get(i * k + j) - w.zero(i));
            let bias = bias.map_or(0, |bias| i64::from(bias[i]));
            sums.push((0..k).map(product).sum::<i64>() + bias);
        }
    }
    sums
}

/// The code of y for a sum: `clamp(round_half_even(f32(sum) · M) + zO)`, with M in f32; see [`super::int8`]. Panics if the range is
/// empty.
pub fn requantize(sum: i64, multiplier: f32, y_zero: i32, range: RangeInclusive<i32>) -> i32 {
    let steps = f64::from((sum as f32 * multiplier).round_ties_even());
    (steps + f64::from(y_zero)).clamp((*range.start()).into(), (*range.end()).into()) as i32
}
