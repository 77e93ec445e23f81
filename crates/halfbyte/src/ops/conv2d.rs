//! A convolution's layer, quantised or dense inside.

use super::device::layers::{Conv2d as _, Convolution};
use super::device::{Device, Tensor};
use super::{Activation, Weight, check_bias, check_matrix, on_cpu};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cpu::Cpu;
use crate::cpu::isa::Caps;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::reference::Bound;
use crate::tensor::Float;

const OP: &str = "conv2d";

/// `y = activation(x ∗ W + bias)`, with W packed once for the kernels of a device.
///
/// Weights are `[co, k]` in the order of [`crate::conv`], as [`crate::quantize::rtn_conv2d`] and
/// [`Geometry::weight_rows`] give them. Images are [`Layout2d::Nchw`] unless [`Conv2d::with_layouts`] says otherwise.
///
/// With quantised activations x is quantised once, pixel by pixel: one scale (and offset) for the channels of a pixel that
/// share a scale of the weight, or for all of a pixel in a group of the convolution where the weight has one scale a row. A
/// pixel so has the same codes in every window that sees it, and padding is exactly zero.
#[derive(Debug)]
pub struct Conv2d<D: Device = Cpu> {
    geometry: Geometry,
    layer: D::Conv2d,
    activation: Activation,
    layouts: [Layout2d; 2],
}

impl Conv2d<Cpu> {
    /// Packs a weight `[co, k]` for a CPU, whichever [`Cpu`] will convolve. *Errors:* those of [`Conv2d::on`], an instruction
    /// set in `HALFBYTE_ISA` that the processor does not have.
    pub fn new(weight: Weight<'_>, geometry: Geometry) -> Result<Self> {
        check_weight(&weight, &geometry)?;
        Self::of(geometry, on_cpu::Conv2d::new(Caps::detect_within_environment()?, weight, geometry))
    }
}

impl<D: Device> Conv2d<D> {
    /// Packs a weight `[co, k]` for a device, and for images of the type that [`Linear::on`](super::Linear::on) takes
    /// activations to have.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, more than one stored tensor, groups
    /// of a scale that do not divide `ci / groups`, columns in an order of their own (act-order), memory that is short.
    pub fn on(device: &D, weight: Weight<'_>, geometry: Geometry) -> Result<Self> {
        check_weight(&weight, &geometry)?;
        Self::of(geometry, D::Conv2d::pack(device, weight, geometry, None))
    }

    /// The same for images of a type: on a GPU it can decide on the kernels that a weight is packed for. *Errors:* as of
    /// [`Conv2d::on`].
    pub fn for_inputs(device: &D, weight: Weight<'_>, geometry: Geometry, x: Float) -> Result<Self> {
        check_weight(&weight, &geometry)?;
        Self::of(geometry, D::Conv2d::pack(device, weight, geometry, Some(x)))
    }

    fn of(geometry: Geometry, layer: Result<D::Conv2d>) -> Result<Self> {
        let (layer, layouts) = (layer.map_err(|error| error.of(OP))?, [Layout2d::Nchw; 2]);
        Ok(Self { geometry, layer, activation: Activation::None, layouts })
    }

    /// Adds a bias `[co]`. Errors: another length, memory that is short.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        check_bias(OP, self.geometry.co, bias.len())?;
        self.layer.set_bias(bias)?;
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
        self.layer.format()
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        self.layer.bytes()
    }

    /// Name of the kernel that computes images of this size and these types. *Errors:* those of [`Conv2d::forward`].
    pub fn kernel(&self, device: &D, batch: usize, size: [usize; 2], x: Float, y: Float) -> Result<&'static str> {
        let shape = Conv2dShape::new(self.geometry, batch, size)?;
        self.layer.kernel(device, &self.call(&shape), [x, y]).map_err(|error| error.of(OP))
    }

    /// How far results for images of this size and these types lie from [`crate::format::reference::conv2d_linear`] at most, before an
    /// activation function; with a bias, `|bias|` is a part of the magnitude. *Errors:* those of [`Conv2d::forward`].
    pub fn bound(&self, device: &D, batch: usize, size: [usize; 2], x: Float, y: Float) -> Result<Bound> {
        let shape = Conv2dShape::new(self.geometry, batch, size)?;
        self.layer.bound(device, &self.call(&shape), [x, y]).map_err(|error| error.of(OP))
    }

    fn call<'a>(&self, shape: &'a Conv2dShape) -> Convolution<'a> {
        Convolution { shape, layouts: self.layouts, activation: self.activation }
    }

    /// Convolves `batch` images of `[h, w]` pixels.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last, of any float type each; see
    /// [`Conv2dShape::output`]. *Accuracy:* [`Conv2d::bound`]; the same input gives the same bits, whatever the number of
    /// threads. NaN and infinity in x reach every y that sees them. *Errors:* those of [`Conv2dShape::new`], and as of
    /// [`Linear::forward`](super::Linear::forward).
    pub fn forward<'x, 'y>(
        &self,
        device: &D,
        x: impl Into<D::X<'x>>,
        batch: usize,
        size: [usize; 2],
        y: impl Into<D::Y<'y>>,
    ) -> Result<()> {
        let (x, y, shape) = (x.into(), y.into(), Conv2dShape::new(self.geometry, batch, size)?);
        check_images(OP, &shape, [x.len(), y.len()])?;
        self.activation.check(OP)?;
        self.layer.forward(device, &self.call(&shape), x, y).map_err(|error| error.of(OP))
    }
}

/// Errors: a geometry that is refused, a weight of another shape than the geometry's.
fn check_weight(weight: &Weight<'_>, geometry: &Geometry) -> Result<()> {
    geometry.validate()?;
    match weight {
        Weight::Quantized(w, _) => check_shape(OP, [w.n(), w.k()], geometry),
        Weight::Stored([w], _) => check_shape(OP, [w.n(), w.k()], geometry),
        Weight::Stored(parts, _) => Err(Error::invalid(OP, "one stored tensor", parts.len().to_string())),
        Weight::Dense(w, shape) => {
            check_shape(OP, *shape, geometry)?;
            check_matrix(OP, "a weight", *shape, w.len())
        }
    }
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
