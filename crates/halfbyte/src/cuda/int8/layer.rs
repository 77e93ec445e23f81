//! A layer of bytes on a device: the packed weight, and what its sums become.

use super::{Int8, OP, Place, Rounding, int8_direct_sm90};
use crate::conv::Geometry;
use crate::cuda::Gpu;
use crate::cuda::dispatch::Plans;
use crate::cuda::driver::{Buffer, Stream, View};
use crate::cuda::matmul::activation;
use crate::cuda::parameters::{Flat, float_type, parameters};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Int8Weight, multiplier};
use crate::kernel::Activation;
use crate::layout::cuda_int8::CudaInt8;
use bytemuck::Pod;

/// What is done to the sums of a layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// Added to the sums, `[co]`, in steps of `sI·sW`.
    pub bias: Option<&'a [i32]>,
    /// Added to outputs in floats, `[co]`.
    pub float_bias: Option<&'a [f32]>,
    /// Applied last; to codes only a clamp.
    pub activation: Activation,
}

/// `y = activation(x ∗ W + bias)` of bytes on a device, for inputs of one scale and zero point and outputs of another, or in
/// floats.
#[derive(Debug)]
pub struct Layer {
    geometry: Geometry,
    x: Affine,
    y: Option<Affine>,
    activation: Activation,
    /// Least and greatest code of y, less its zero point; of floats the limits of a clamp mean nothing.
    bounds: [f32; 2],
    /// Layout `cuda_int8`.
    pub(super) codes: Buffer<i8>,
    /// The same in squares of 2 × 2 pixels, of a layer of few channels and stride 2.
    pub(super) squares: Option<Buffer<i8>>,
    /// Zero points of the signed codes; none if all are 0.
    pub(super) zeros: Option<Buffer<i32>>,
    pub(super) bias: Option<Buffer<i32>>,
    pub(super) float_bias: Option<Buffer<f32>>,
    /// What sums are multiplied by.
    pub(super) scales: Buffer<f32>,
    /// What is added to products of the codes of x as they are: `bias − zI·Σw`.
    pub(super) constants: Buffer<i32>,
    /// Sums of signed codes, `[positions, co]`.
    pub(super) position_sums: Buffer<i32>,
    /// What the sums of each output come to without a bias.
    sums: Vec<Sums>,
    /// What was chosen for the problems that it has seen.
    pub(super) plans: Plans<Int8>,
}

impl Layer {
    /// A convolution with a weight `[co, k]` in the order of [`crate::conv`]; y in bytes, or in floats if it has no scale.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, a length that does not fit, sums that
    /// leave int32 for some input, scales so far apart that `sI·sW/sO` is not finite, for y in bytes a bias in floats or an
    /// activation that is more than a clamp, memory that is short.
    pub fn conv2d(
        gpu: &Gpu,
        stream: &Stream,
        w: &Int8Weight<'_>,
        geometry: Geometry,
        x: Affine,
        y: Option<Affine>,
        epilogue: Epilogue<'_>,
    ) -> Result<Self> {
        geometry.validate()?;
        let (n, k) = (w.n(), w.k());
        if [n, k] != [geometry.co, geometry.k()] {
            let expected = format!("a weight of {} × {}", geometry.co, geometry.k());
            return Err(Error::invalid(OP, expected, format!("{n} × {k}")));
        }
        let scale = |i: usize| match y {
            Some(y) => multiplier(x, w.scale(i), y),
            None => x.scale() * w.scale(i),
        };
        let scales: Vec<f32> = (0..n).map(scale).collect();
        if let Some(i) = scales.iter().position(|scale| !scale.is_finite()) {
            return Err(Error::invalid(OP, "finite multipliers", format!("{} at output {i}", scales[i])));
        }
        let packed = CudaInt8::pack(w, geometry.groups)?;
        let (sums, position_sums) = sums(&packed, &geometry);
        let zeros = packed.zeros().iter().any(|&zero| zero != 0).then_some(packed.zeros());
        let squares = int8_direct_sm90::fold(&geometry, &packed).transpose()?;
        let mut layer = Self {
            geometry,
            x,
            y,
            activation: Activation::None,
            bounds: [0.0; 2],
            codes: upload(gpu, stream, packed.codes())?,
            squares: squares.map(|squares| upload(gpu, stream, squares.codes())).transpose()?,
            zeros: zeros.map(|zeros| upload(gpu, stream, zeros)).transpose()?,
            bias: None,
            float_bias: None,
            scales: upload(gpu, stream, &scales)?,
            constants: gpu.context().allocate(n)?,
            position_sums: upload(gpu, stream, &position_sums)?,
            sums,
            plans: Plans::default(),
        };
        layer.set_epilogue(gpu, stream, epilogue)?;
        Ok(layer)
    }

    /// Replaces all that is done to the sums. Work that is in a stream already has what it was given then.
    ///
    /// *Errors:* a length that does not fit, sums that leave int32 for some input, for y in bytes a bias in floats or an activation
    /// that is more than a clamp, memory that is short.
    pub fn set_epilogue(&mut self, gpu: &Gpu, stream: &Stream, epilogue: Epilogue<'_>) -> Result<()> {
        let (n, y) = (self.geometry.co, self.y);
        let lengths = [epilogue.bias.map(<[i32]>::len), epilogue.float_bias.map(<[f32]>::len)];
        if let Some(len) = lengths.into_iter().flatten().find(|&len| len != n) {
            return Err(Error::invalid(OP, format!("a bias of {n}"), len.to_string()));
        }
        if y.is_some() && epilogue.float_bias.is_some() {
            return Err(Error::invalid(OP, "a bias in steps of the sums, for y in bytes", "one in floats"));
        }
        let bounds = match y {
            Some(y) => epilogue.activation.range_of_codes(OP, y)?.map(|code| (code - y.zero()) as f32),
            None => [0.0; 2],
        };
        let bias = |i: usize| epilogue.bias.map_or(0, |bias| i64::from(bias[i]));
        let constant = |(i, sums): (usize, &Sums)| sums.constant(i, self.x, bias(i));
        let constants: Vec<i32> = self.sums.iter().enumerate().map(constant).collect::<Result<_>>()?;
        // All of it or nothing, should memory be short.
        let bias = epilogue.bias.map(|bias| upload(gpu, stream, bias)).transpose()?;
        let float_bias = epilogue.float_bias.map(|bias| upload(gpu, stream, bias)).transpose()?;
        self.constants = upload(gpu, stream, &constants)?;
        (self.bias, self.float_bias) = (bias, float_bias);
        (self.activation, self.bounds) = (epilogue.activation, bounds);
        Ok(())
    }

    /// A product with a weight `[n, k]`: a convolution of one position, whose images are rows of one pixel in nhwc.
    ///
    /// *Errors:* as of [`Layer::conv2d`].
    pub fn linear(
        gpu: &Gpu,
        stream: &Stream,
        w: &Int8Weight<'_>,
        x: Affine,
        y: Option<Affine>,
        epilogue: Epilogue<'_>,
    ) -> Result<Self> {
        Self::conv2d(gpu, stream, w, Geometry::new(w.k(), w.n(), [1, 1]), x, y, epilogue)
    }

    /// What the layer fixes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What the bytes of x stand for.
    pub fn x(&self) -> Affine {
        self.x
    }

    /// What the bytes of y stand for; none if y is floats.
    pub fn y(&self) -> Option<Affine> {
        self.y
    }

    /// Applied last.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Whether the weights, as signed codes, have no zero points.
    pub fn is_symmetric(&self) -> bool {
        self.zeros.is_none()
    }

    /// What sums become, as kernels are told.
    pub(super) fn rounding(&self) -> Rounding {
        let [low, high] = self.bounds;
        Rounding { x_zero: self.x.zero(), y_zero: self.y.map_or(0, |y| y.zero()), low, high }
    }

    /// The activation as kernels are told, and what sums become: of floats the limits of a clamp.
    pub(super) fn function(&self, floats: bool) -> (u32, Rounding) {
        let (function, low, high) = activation(self.activation);
        (function, if floats { Rounding { low, high, ..self.rounding() } } else { self.rounding() })
    }

    /// What kernels are told of it, with x and y where they are.
    pub(super) fn arguments(&self, x: View<'_, u8>, y: Place) -> LayerArguments {
        let (activation, rounding) = self.function(y.floats.is_some());
        LayerArguments {
            x: x.pointer(),
            w: self.codes.pointer(),
            constants: self.constants.pointer(),
            zeros: self.zeros.as_ref().map_or(0, Buffer::pointer),
            multipliers: self.scales.pointer(),
            float_bias: self.float_bias.as_ref().map_or(0, Buffer::pointer),
            y: y.address,
            rounding: Flat(rounding),
            y_type: y.floats.map_or(0, float_type),
            activation,
        }
    }

    /// Bytes that the packed weight takes, without what stands beside it for each output.
    pub fn bytes(&self) -> usize {
        self.codes.bytes()
    }

    /// Another one with the same content in memory of its own, for measurements on cold weights. Error: memory is short.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self> {
        let copy = |buffer: &Buffer<i32>| buffer.duplicate(stream);
        Ok(Self {
            codes: self.codes.duplicate(stream)?,
            squares: self.squares.as_ref().map(|squares| squares.duplicate(stream)).transpose()?,
            zeros: self.zeros.as_ref().map(copy).transpose()?,
            bias: self.bias.as_ref().map(copy).transpose()?,
            float_bias: self.float_bias.as_ref().map(|bias| bias.duplicate(stream)).transpose()?,
            scales: self.scales.duplicate(stream)?,
            constants: copy(&self.constants)?,
            position_sums: copy(&self.position_sums)?,
            sums: self.sums.clone(),
            plans: Plans::default(),
            ..*self
        })
    }
}

parameters! {
    /// As in `include/int8_layer.cuh`.
    pub(super) struct LayerArguments {
        x: u64,
        w: u64,
        constants: u64,
        zeros: u64,
        multipliers: u64,
        float_bias: u64,
        y: u64,
        rounding: Flat<Rounding>,
        y_type: u32,
        activation: u32,
    }
}

fn upload<T: Pod>(gpu: &Gpu, stream: &Stream, values: &[T]) -> Result<Buffer<T>> {
    let mut buffer = gpu.context().allocate(values.len())?;
    stream.upload(values, buffer.view_mut())?;
    Ok(buffer)
}

/// What the sums of one output come to: the sum of its signed codes, and of what they are worth with their zero point, those
/// above 0 and those below.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    codes: i64,
    positive: i64,
    negative: i64,
}

impl Sums {
    /// What is added to products of the codes of x as they are, wrapped round as the sums of the kernels are. Error: sums that
    /// leave int32 for some input.
    fn constant(&self, output: usize, x: Affine, bias: i64) -> Result<i32> {
        let [low, high] = [x.byte().codes().start(), x.byte().codes().end()].map(|code| i64::from(code - x.zero()));
        let least = bias + low * self.positive + high * self.negative;
        let greatest = bias + high * self.positive + low * self.negative;
        if i32::try_from(least).is_err() || i32::try_from(greatest).is_err() {
            let got = format!("sums of {least} to {greatest} at output {output}");
            return Err(Error::invalid(OP, "sums within int32 for every input", got));
        }
        Ok((bias - i64::from(x.zero()) * self.codes) as i32)
    }
}

/// Sums of each output, and of its codes at each position `[positions, co]`, wrapped round as the sums of the kernels are.
fn sums(w: &CudaInt8, geometry: &Geometry) -> (Vec<Sums>, Vec<i32>) {
    let (n, channels) = (w.n(), geometry.channels());
    let mut position_sums = vec![0; geometry.positions() * n];
    let of_output = |(i, &zero): (usize, &i32)| {
        let mut all = Sums::default();
        for position in 0..geometry.positions() {
            let mut sum = 0;
            for c in 0..channels {
                let code = i64::from(w.code(i, position * channels + c));
                sum += code;
                all.positive += (code - i64::from(zero)).max(0);
                all.negative += (code - i64::from(zero)).min(0);
            }
            position_sums[position * n + i] = sum as i32;
            all.codes += sum;
        }
        all
    };
    let sums = w.zeros().iter().enumerate().map(of_output).collect();
    (sums, position_sums)
}
