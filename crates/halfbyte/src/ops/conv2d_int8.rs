//! A convolution of bytes: 8 bits in, 8 bits (or floats) out.

use super::Activation;
use super::conv2d::{check_images, check_shape, is_depthwise};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cpu::conv::int8::{self, Call, Depthwise, Epilogue, Weights, Y};
use crate::cpu::int8::{Dequantize, Requantize};
use crate::cpu::{self, Cpu};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Bytes, BytesMut, Int8Weight};
use crate::layout::cpu_int8::CpuInt8;
use crate::tensor::FloatsMut;
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
    y: Option<Affine>,
    bias: Option<Vec<i32>>,
    float_bias: Option<Vec<f32>>,
    activation: Activation,
    layouts: [Layout2d; 2],
}

impl Conv2dInt8 {
    /// Packs a weight `[co, k]` for inputs of a scale and zero point, and outputs of another.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, sums that leave int32 for some
    /// input, scales so far apart that `sI·sW/sO` is not finite.
    pub fn new(w: &Int8Weight<'_>, geometry: Geometry, x: Affine, y: Affine) -> Result<Self> {
        Self::of(w, geometry, x, Some(y))
    }

    /// Packs a weight for outputs in floats: `sum · sI·sW`. *Errors:* as of [`Conv2dInt8::new`].
    pub fn with_float_outputs(w: &Int8Weight<'_>, geometry: Geometry, x: Affine) -> Result<Self> {
        Self::of(w, geometry, x, None)
    }

    fn of(w: &Int8Weight<'_>, geometry: Geometry, x: Affine, y: Option<Affine>) -> Result<Self> {
        geometry.validate()?;
        check_shape(OP, [w.n(), w.k()], &geometry)?;
        let depthwise = is_depthwise(&geometry).then(|| Depthwise::new(w));
        let rows = if depthwise.is_some() { geometry.co } else { geometry.outputs() };
        let packed = (0..geometry.co / rows).map(|i| pack(w, i * rows..(i + 1) * rows)).collect::<Result<_>>()?;
        let weights = Weights { packed, epilogues: Vec::new(), depthwise };
        let (layouts, activation) = ([Layout2d::Nchw; 2], Activation::None);
        Self { geometry, weights, x, y, bias: None, float_bias: None, activation, layouts }.finished()
    }

    /// Adds a bias `[co]` to the sums, in steps of `sI·sW`. *Errors:* another length, sums that leave int32.
    pub fn with_bias(mut self, bias: Vec<i32>) -> Result<Self> {
        self.check_bias(bias.len())?;
        self.bias = Some(bias);
        self.finished()
    }

    /// Adds a bias `[co]` to outputs in floats. *Errors:* another length, outputs in bytes.
    pub fn with_float_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        self.check_bias(bias.len())?;
        if self.y.is_some() {
            let expected = "an int32 bias in steps of sI·sW for outputs in bytes";
            return Err(Error::invalid(OP, expected, "a bias in floats"));
        }
        self.float_bias = Some(bias);
        self.finished()
    }

    fn check_bias(&self, len: usize) -> Result<()> {
        if len == self.geometry.co {
            return Ok(());
        }
        Err(Error::invalid(OP, format!("a bias of {}", self.geometry.co), len.to_string()))
    }

    /// Applies an activation function. *Error:* for outputs in bytes, one that is more than a clamp.
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
            let rows = first..first + w.n();
            first = rows.end;
            let bias = self.bias.as_ref().map(|bias| &bias[rows.clone()]);
            let float_bias = self.float_bias.as_ref().map(|bias| &bias[rows]);
            Ok(match self.y {
                Some(y) => Epilogue::Bytes(Requantize::new(w, self.x, bias, y, self.activation)?),
                None => Epilogue::Floats(Dequantize::new(w, self.x, bias, float_bias, self.activation)?),
            })
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

    /// What the bytes of y stand for; None if y is floats.
    pub fn y(&self) -> Option<Affine> {
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

    /// Convolves `batch` images of `[h, w]` pixels, to bytes.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last, of the types that the layer was
    /// made for; see [`Conv2dShape::output`]. *Accuracy:* to the bit as [`crate::format::int8`] says, on every processor,
    /// whatever the number of threads. *Errors:* those of [`Conv2dShape::new`], a length or a type that does not fit, a layer with
    /// float outputs.
    pub fn forward(&self, cpu: &Cpu, x: Bytes<'_>, batch: usize, size: [usize; 2], y: BytesMut<'_>) -> Result<()> {
        let Some(affine) = self.y else {
            return Err(Error::invalid(OP, "outputs in floats", y.byte().name()));
        };
        if y.byte() != affine.byte() {
            return Err(Error::invalid(OP, format!("outputs in {}", affine.byte().name()), y.byte().name()));
        }
        let (len, y) = match y {
            BytesMut::U8(y) => (y.len(), y),
            BytesMut::I8(y) => (y.len(), bytemuck::cast_slice_mut(y)),
        };
        self.run(cpu, x, (batch, size), len, Y::Bytes(y))
    }

    /// Convolves `batch` images of `[h, w]` pixels, to floats.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last. *Accuracy:* the exact sum is rounded to
    /// f32, multiplied by `f32(sI·sW)`, the float bias added, each with one rounding in f32; then the activation, then the type of
    /// y. *Errors:* those of [`Conv2dShape::new`], a length or a type that does not fit, a layer with outputs in bytes.
    pub fn forward_floats(
        &self,
        cpu: &Cpu,
        x: Bytes<'_>,
        batch: usize,
        size: [usize; 2],
        y: FloatsMut<'_>,
    ) -> Result<()> {
        if self.y.is_some() {
            return Err(Error::invalid(OP, "outputs in bytes", y.dtype().name()));
        }
        self.run(cpu, x, (batch, size), y.len(), Y::Floats(y))
    }

    fn run(&self, cpu: &Cpu, x: Bytes<'_>, (batch, size): (usize, [usize; 2]), y_len: usize, y: Y<'_>) -> Result<()> {
        let shape = Conv2dShape::new(self.geometry, batch, size)?;
        if x.byte() != self.x.byte() {
            return Err(Error::invalid(OP, format!("inputs in {}", self.x.byte().name()), x.byte().name()));
        }
        check_images(OP, &shape, [x.len(), y_len])?;
        let x: &[u8] = match x {
            Bytes::U8(x) => x,
            Bytes::I8(x) => bytemuck::cast_slice(x),
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
