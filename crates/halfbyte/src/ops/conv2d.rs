//! A convolution's layer, quantised or dense inside.

use super::Activation;
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cpu::Cpu;
use crate::cpu::conv::depthwise::Depthwise;
use crate::cpu::conv::{self, Call, Weights};
use crate::cpu::isa::Caps;
use crate::cpu::matmul::{Epilogue, Packed};
use crate::cpu::pack::pack;
use crate::error::{Error, Result};
use crate::format::{Act, Format, Group, QTensor, WeightFormat};
use crate::layout::cpu_dense_n16::CpuDenseN16;
use crate::tensor::{Float, Floats, FloatsMut};

const OP: &str = "conv2d";

/// Outputs a channel up to which a convolution of one channel a group is none of products: each product would have as few
/// outputs, and each channel of x is held as often.
const DEPTHWISE_OUTPUTS: usize = 8;

/// `y = activation(x ∗ W + bias)`, with W packed once for the kernels.
///
/// Weights are `[co, k]` in the order of [`crate::conv`], as [`crate::quantize::rtn_conv2d`] and
/// [`Geometry::weight_rows`] give them. Images are [`Layout2d::Nchw`] unless [`Conv2d::with_layouts`] says otherwise.
///
/// With quantised activations x is quantised once, pixel by pixel: one scale (and offset) for the channels of a pixel that
/// share a scale of the weight, or for all of a pixel in a group of the convolution where the weight has one scale a row. A
/// pixel so has the same codes in every window that sees it, and padding is exactly zero.
#[derive(Debug)]
pub struct Conv2d {
    geometry: Geometry,
    weights: Weights,
    format: Option<Format>,
    bias: Option<Vec<f32>>,
    activation: Activation,
    layouts: [Layout2d; 2],
}

impl Conv2d {
    /// Packs a quantised weight `[co, k]`.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, groups of a scale that do not
    /// divide `ci / groups`, columns in an order of their own (act-order), an instruction set in `HALFBYTE_ISA` that the
    /// processor does not have.
    pub fn new(w: &QTensor, act: Act, geometry: Geometry) -> Result<Self> {
        geometry.validate()?;
        check_shape(OP, [w.n(), w.k()], &geometry)?;
        let share = geometry.scale_channels(w.format().group)?;
        if w.group_index().is_some() {
            let got = "columns that are grouped in another order (act-order)";
            return Err(Error::invalid(OP, "groups of neighbouring channels", got));
        }
        let caps = Caps::detect_within_environment()?;
        let format = Some(Format { weight: w.format(), act });
        let weights = if is_depthwise(&geometry) {
            Weights::Depthwise(Depthwise::quantized(w, act))
        } else {
            // A scale for each position, so that each has the scale of x that its pixel has.
            let by_position = WeightFormat { group: Group::Size(share), ..w.format() };
            let by_pixel = act.is_quantized() && geometry.positions() > 1;
            let w = if by_pixel { w.express(by_position)? } else { std::borrow::Cow::Borrowed(w) };
            let packed = |group: usize| {
                let part = w.rows(group * geometry.outputs()..(group + 1) * geometry.outputs())?;
                Ok(Packed::Quantized(pack(caps, &[&(&part).into()], act == Act::A8Asym)?, act))
            };
            Weights::Products((0..geometry.groups).map(packed).collect::<Result<_>>()?)
        };
        Ok(Self::of(geometry, weights, format))
    }

    /// Packs floats `[co, k]`, which are multiplied exactly.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, a length that does not fit.
    pub fn dense(w: Floats<'_>, geometry: Geometry) -> Result<Self> {
        geometry.validate()?;
        let (outputs, k) = (geometry.outputs(), geometry.k());
        if w.len() != geometry.co * k {
            return Err(Error::invalid(OP, format!("{} × {k} weights", geometry.co), w.len().to_string()));
        }
        let weights = if is_depthwise(&geometry) {
            Weights::Depthwise(Depthwise::dense(w, geometry.co))
        } else {
            let packed = |group: usize| {
                let part = w.slice(group * outputs * k..(group + 1) * outputs * k);
                Ok(Packed::Dense(CpuDenseN16::pack(part, [outputs, k])?))
            };
            Weights::Products((0..geometry.groups).map(packed).collect::<Result<_>>()?)
        };
        Ok(Self::of(geometry, weights, None))
    }

    fn of(geometry: Geometry, weights: Weights, format: Option<Format>) -> Self {
        let layouts = [Layout2d::Nchw; 2];
        Self { geometry, weights, format, bias: None, activation: Activation::None, layouts }
    }

    /// Adds a bias `[co]`. Error: another length.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        if bias.len() != self.geometry.co {
            return Err(Error::invalid(OP, format!("a bias of {}", self.geometry.co), bias.len().to_string()));
        }
        self.bias = Some(bias);
        Ok(self)
    }

    /// Applies an activation function to the result.
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// The order of the elements of x and of y.
    pub fn with_layouts(mut self, x: Layout2d, y: Layout2d) -> Self {
        self.layouts = [x, y];
        self
    }

    /// What the layer fixes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Format of the weight; None if it is dense.
    pub fn format(&self) -> Option<Format> {
        self.format
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        match &self.weights {
            Weights::Products(packed) => packed.iter().map(Packed::bytes).sum(),
            Weights::Depthwise(w) => w.bytes(),
        }
    }

    /// Name of the kernel that computes images of this size and these types: `depthwise`, or one of
    /// [`crate::cpu::matmul::KERNELS`]. *Errors:* those of [`Conv2d::forward`].
    pub fn kernel(&self, cpu: &Cpu, batch: usize, size: [usize; 2], x: Float, y: Float) -> Result<&'static str> {
        let shape = Conv2dShape::new(self.geometry, batch, size)?;
        match &self.weights {
            Weights::Products(w) => Ok(conv::kernel(cpu, &shape, &w[0], [x, y])?.name),
            Weights::Depthwise(_) => Ok("depthwise"),
        }
    }

    /// Convolves `batch` images of `[h, w]` pixels.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last, of any float type each; see
    /// [`Conv2dShape::output`]. *Accuracy:* that of [`super::Linear::forward`], against
    /// [`crate::format::reference::conv2d_linear`]. NaN and infinity in x reach every y that sees them. *Errors:* those of
    /// [`Conv2dShape::new`], a length that does not fit, a product that no kernel serves.
    pub fn forward(&self, cpu: &Cpu, x: Floats<'_>, batch: usize, size: [usize; 2], y: FloatsMut<'_>) -> Result<()> {
        let shape = Conv2dShape::new(self.geometry, batch, size)?;
        check_images(OP, &shape, [x.len(), y.len()])?;
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation: self.activation };
        let [x_layout, y_layout] = self.layouts;
        conv::run(cpu, Call { shape: &shape, x, x_layout, weights: &self.weights, epilogue, y, y_layout })
    }
}

/// Whether each channel of x is seen by few outputs, and by no output together with another.
pub(super) fn is_depthwise(geometry: &Geometry) -> bool {
    geometry.channels() == 1 && geometry.groups > 1 && geometry.outputs() <= DEPTHWISE_OUTPUTS
}

/// Error: a weight that is not `[co, k]`.
pub(super) fn check_shape(op: &'static str, got: [usize; 2], geometry: &Geometry) -> Result<()> {
    if got == [geometry.co, geometry.k()] {
        return Ok(());
    }
    let expected = format!("a weight of {} × {}", geometry.co, geometry.k());
    Err(Error::invalid(op, expected, format!("{} × {}", got[0], got[1])))
}

/// Error: an x or a y of another length than the shape's.
pub(super) fn check_images(op: &'static str, shape: &Conv2dShape, [x, y]: [usize; 2]) -> Result<()> {
    let check = |what: &str, len: usize, [h, w]: [usize; 2], channels: usize| {
        if len == shape.batch() * h * w * channels {
            return Ok(());
        }
        let expected = format!("{what} of {} × {channels} × {h} × {w}", shape.batch());
        Err(Error::invalid(op, expected, format!("{len} elements")))
    };
    check("x", x, shape.input(), shape.geometry().ci)?;
    check("y", y, shape.output(), shape.geometry().co)
}
