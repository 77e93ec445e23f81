//! A convolution of bytes: 8 bits in, 8 bits out.

use super::Activation;
use super::conv2d::{check_images, check_shape, is_depthwise};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cpu::conv::int8::{self, Call, Depthwise, Weights};
use crate::cpu::int8::Requantize;
use crate::cpu::{self, Cpu};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Bytes, BytesMut, Int8Weight};
use crate::layout::cpu_int8::CpuInt8;
use std::ops::Range;

const OP: &str = "conv2d int8";

/// `y = activation(x ∗ W + bias)` of bytes with scales and zero points, with W packed once for the kernels.
///
/// Weights are `[co, k]` in the order of [`crate::conv`], as [`Geometry::weight_rows`] gives them. Images are
/// [`Layout2d::Nchw`] unless [`Conv2dInt8::with_layouts`] says otherwise. Padding has the zero point of x. Sums are exact in
/// int32; on the way to bytes they are multiplied and rounded once. [`crate::format::int8`] says how, to the bit.
#[derive(Clone, Debug)]
pub struct Conv2dInt8 {
    geometry: Geometry,
    weights: Weights,
    x: Affine,
    y: Affine,
    bias: Option<Vec<i32>>,
    activation: Activation,
    layouts: [Layout2d; 2],
}

impl Conv2dInt8 {
    /// Packs a weight `[co, k]` for inputs of a scale and zero point, and outputs of another.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, sums that leave int32 for some
    /// input, scales so far apart that `sI·sW/sO` is not finite.
    pub fn new(w: &Int8Weight<'_>, geometry: Geometry, x: Affine, y: Affine) -> Result<Self> {
        geometry.validate()?;
        check_shape(OP, [w.n(), w.k()], &geometry)?;
        let depthwise = is_depthwise(&geometry).then(|| Depthwise::new(w));
        let rows = if depthwise.is_some() { geometry.co } else { geometry.outputs() };
        let packed = (0..geometry.co / rows).map(|i| pack(w, i * rows..(i + 1) * rows)).collect::<Result<_>>()?;
        let weights = Weights { packed, epilogues: Vec::new(), depthwise };
        let layouts = [Layout2d::Nchw; 2];
        Self { geometry, weights, x, y, bias: None, activation: Activation::None, layouts }.finished()
    }

    /// Adds a bias `[co]` to the sums, in steps of `sI·sW`. *Errors:* another length, sums that leave int32.
    pub fn with_bias(mut self, bias: Vec<i32>) -> Result<Self> {
        if bias.len() != self.geometry.co {
            return Err(Error::invalid(OP, format!("a bias of {}", self.geometry.co), bias.len().to_string()));
        }
        self.bias = Some(bias);
        self.finished()
    }

    /// Applies an activation function. *Error:* one that is more than a clamp.
    pub fn with_activation(mut self, activation: Activation) -> Result<Self> {
        self.activation = activation;
        self.finished()
    }

    /// The order of the elements of x and of y.
    pub fn with_layouts(mut self, x: Layout2d, y: Layout2d) -> Self {
        self.layouts = [x, y];
        self
    }

    fn finished(mut self) -> Result<Self> {
        let mut first = 0;
        let epilogue = |w: &CpuInt8| {
            let bias = self.bias.as_ref().map(|bias| &bias[first..first + w.n()]);
            first += w.n();
            Requantize::new(w, self.x, bias, self.y, self.activation)
        };
        self.weights.epilogues = self.weights.packed.iter().map(epilogue).collect::<Result<_>>()?;
        Ok(self)
    }

    /// What the layer fixes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What the bytes of x stand for.
    pub fn x(&self) -> Affine {
        self.x
    }

    /// What the bytes of y stand for.
    pub fn y(&self) -> Affine {
        self.y
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        let depthwise = self.weights.depthwise.as_ref().map_or(0, Depthwise::bytes);
        self.weights.packed.iter().map(CpuInt8::bytes).sum::<usize>() + depthwise
    }

    /// Name of the kernel that computes it: `int8_depthwise`, or that of the dot products as [`crate::cpu::int8`] lists them.
    pub fn kernel(&self, cpu: &Cpu) -> &'static str {
        if self.weights.depthwise.is_some() { "int8_depthwise" } else { cpu::int8::kernel(cpu) }
    }

    /// Convolves `batch` images of `[h, w]` pixels.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last, of the types that the layer was
    /// made for; see [`Conv2dShape::output`]. *Accuracy:* to the bit as [`crate::format::int8`] says, on every processor,
    /// whatever the number of threads. *Errors:* those of [`Conv2dShape::new`], a length or a type that does not fit.
    pub fn forward(&self, cpu: &Cpu, x: Bytes<'_>, batch: usize, size: [usize; 2], y: BytesMut<'_>) -> Result<()> {
        let shape = Conv2dShape::new(self.geometry, batch, size)?;
        if x.byte() != self.x.byte() {
            return Err(Error::invalid(OP, format!("inputs in {}", self.x.byte().name()), x.byte().name()));
        }
        if y.byte() != self.y.byte() {
            return Err(Error::invalid(OP, format!("outputs in {}", self.y.byte().name()), y.byte().name()));
        }
        check_images(OP, &shape, [x.len(), y.len()])?;
        let x: &[u8] = match x {
            Bytes::U8(x) => x,
            Bytes::I8(x) => bytemuck::cast_slice(x),
        };
        let y: &mut [u8] = match y {
            BytesMut::U8(y) => y,
            BytesMut::I8(y) => bytemuck::cast_slice_mut(y),
        };
        let [x_layout, y_layout] = self.layouts;
        int8::run(cpu, Call { shape: &shape, x, affine: self.x, x_layout, weights: &self.weights, y, y_layout });
        Ok(())
    }
}

/// Packs some rows of a weight.
fn pack(w: &Int8Weight<'_>, rows: Range<usize>) -> Result<CpuInt8> {
    let k = w.k();
    let codes = match w.codes() {
        Bytes::U8(codes) => Bytes::U8(&codes[rows.start * k..rows.end * k]),
        Bytes::I8(codes) => Bytes::I8(&codes[rows.start * k..rows.end * k]),
    };
    let scales: Vec<f32> = rows.clone().map(|i| w.scale(i)).collect();
    let zeros: Vec<i32> = rows.clone().map(|i| w.zero(i)).collect();
    CpuInt8::pack(&Int8Weight::new(codes, [rows.len(), k], &scales, &zeros)?)
}
