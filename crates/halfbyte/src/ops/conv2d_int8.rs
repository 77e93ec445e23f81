//! A convolution of bytes: 8 bits in, 8 bits (or floats) out.

use super::conv2d::{check_images, check_shape};
use super::device::layers::{Conv2dInt8 as _, EpilogueInt8, ImagesInt8};
use super::device::{Device, Tensor};
use super::{Activation, check_bias, on_cpu};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cpu::Cpu;
use crate::error::Result;
use crate::format::int8::{Affine, Int8Weight};

const OP: &str = "conv2d int8";

/// `y = activation(x ∗ W + bias)` of bytes with scales and zero points, with W packed once for the kernels of a device.
///
/// Weights are `[co, k]` in the order of [`crate::conv`], as [`Geometry::weight_rows`] gives them. Images are
/// [`Layout2d::Nchw`] unless [`Conv2dInt8::with_layouts`] says otherwise. Padding has the zero point of x. Sums are exact in
/// int32; on the way to bytes they are multiplied and rounded once. [`crate::format::int8`] says how, to the bit.
#[derive(Debug)]
pub struct Conv2dInt8<D: Device = Cpu> {
    geometry: Geometry,
    layer: D::Conv2dInt8,
    epilogue: EpilogueInt8,
    layouts: [Layout2d; 2],
}

impl Conv2dInt8<Cpu> {
    /// Packs a weight `[co, k]` for a CPU, for inputs of a scale and zero point, and outputs of another. *Errors:* those of
    /// [`Conv2dInt8::on`].
    pub fn new(w: &Int8Weight<'_>, geometry: Geometry, x: Affine, y: Affine) -> Result<Self> {
        Self::of(w, geometry, EpilogueInt8::new(x, Some(y)), on_cpu::Conv2dInt8::new)
    }

    /// Packs a weight for a CPU, for outputs in floats: `sum · sI·sW`. *Errors:* those of [`Conv2dInt8::on`].
    pub fn with_float_outputs(w: &Int8Weight<'_>, geometry: Geometry, x: Affine) -> Result<Self> {
        Self::of(w, geometry, EpilogueInt8::new(x, None), on_cpu::Conv2dInt8::new)
    }

    /// Name of the kernel that computes it: `int8_depthwise`, or that of the dot products as [`crate::cpu::int8`] lists them.
    pub fn kernel(&self, cpu: &Cpu) -> &'static str {
        self.layer.kernel(cpu)
    }
}

impl Clone for Conv2dInt8<Cpu> {
    fn clone(&self) -> Self {
        let Self { geometry, layer, epilogue, layouts } = self;
        Self { geometry: *geometry, layer: layer.clone(), epilogue: epilogue.clone(), layouts: *layouts }
    }
}

impl<D: Device> Conv2dInt8<D> {
    /// Packs a weight `[co, k]` for a device, for inputs of a scale and zero point and outputs of another; without one y is
    /// floats: `sum · sI·sW`.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another shape of the weight, sums that leave int32 for some
    /// input, scales so far apart that `sI·sW/sO` is not finite, memory that is short.
    pub fn on(device: &D, w: &Int8Weight<'_>, geometry: Geometry, x: Affine, y: Option<Affine>) -> Result<Self> {
        let pack = |w: &Int8Weight<'_>, geometry: Geometry, epilogue: &EpilogueInt8| {
            D::Conv2dInt8::pack(device, w, geometry, epilogue)
        };
        Self::of(w, geometry, EpilogueInt8::new(x, y), pack)
    }

    fn of(
        w: &Int8Weight<'_>,
        geometry: Geometry,
        epilogue: EpilogueInt8,
        pack: impl FnOnce(&Int8Weight<'_>, Geometry, &EpilogueInt8) -> Result<D::Conv2dInt8>,
    ) -> Result<Self> {
        geometry.validate().map_err(|error| error.of(OP))?;
        check_shape(OP, [w.n(), w.k()], &geometry)?;
        let layer = pack(w, geometry, &epilogue).map_err(|error| error.of(OP))?;
        Ok(Self { geometry, layer, epilogue, layouts: [Layout2d::Nchw; 2] })
    }

    /// Adds a bias `[co]` to the sums, in steps of `sI·sW`. *Errors:* another length, sums that leave int32.
    pub fn with_bias(mut self, bias: Vec<i32>) -> Result<Self> {
        check_bias(OP, self.geometry.co, bias.len())?;
        self.epilogue.bias = Some(bias);
        self.finished()
    }

    /// Adds a bias `[co]` to outputs in floats. *Errors:* another length, outputs in bytes.
    pub fn with_float_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        self.epilogue.set_float_bias(OP, self.geometry.co, bias)?;
        self.finished()
    }

    /// Applies an activation function. *Errors:* a clamp whose low is above its high or NaN; for outputs in bytes, one that is more
    /// than a clamp.
    pub fn with_activation(mut self, activation: Activation) -> Result<Self> {
        activation.check(OP)?;
        self.epilogue.activation = activation;
        self.finished()
    }

    /// The order of the elements of x and of y.
    pub fn with_layouts(mut self, x: Layout2d, y: Layout2d) -> Self {
        self.layouts = [x, y];
        self
    }

    fn finished(mut self) -> Result<Self> {
        self.layer.set_epilogue(&self.epilogue).map_err(|error| error.of(OP))?;
        Ok(self)
    }

    /// What the layer fixes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What the bytes of x stand for.
    pub fn x(&self) -> Affine {
        self.epilogue.x
    }

    /// What the bytes of y stand for; None if y is floats.
    pub fn y(&self) -> Option<Affine> {
        self.epilogue.y
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        self.layer.bytes()
    }

    /// Convolves `batch` images of `[h, w]` pixels, to bytes.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last, of the types that the layer was
    /// made for; see [`Conv2dShape::output`]. *Accuracy:* to the bit as [`crate::format::int8`] says, on every device,
    /// whatever the number of threads. *Errors:* those of [`Conv2dShape::new`], a length or a type that does not fit, a layer with
    /// float outputs; on a GPU another one than the weight lies on, memory that is short, or that grows while work is recorded.
    pub fn forward<'x, 'y>(
        &self,
        device: &D,
        x: impl Into<D::XBytes<'x>>,
        batch: usize,
        size: [usize; 2],
        y: impl Into<D::YBytes<'y>>,
    ) -> Result<()> {
        let (x, y) = (x.into(), y.into());
        self.epilogue.check_bytes(OP, x.element(), y.element())?;
        let shape = self.shape(batch, size, [x.len(), y.len()])?;
        self.layer.forward(device, self.images(&shape), x, y).map_err(|error| error.of(OP))
    }

    /// Convolves `batch` images of `[h, w]` pixels, to floats.
    ///
    /// *Shapes:* x `[batch, ci, h, w]` and y `[batch, co, oh, ow]`, or with channels last. *Accuracy:* the exact sum is rounded to
    /// f32, multiplied by `f32(sI·sW)`, the float bias added, each with one rounding in f32; then the activation, then the type of
    /// y. *Errors:* those of [`Conv2dInt8::forward`], with outputs in bytes for those in floats.
    pub fn forward_floats<'x, 'y>(
        &self,
        device: &D,
        x: impl Into<D::XBytes<'x>>,
        batch: usize,
        size: [usize; 2],
        y: impl Into<D::Y<'y>>,
    ) -> Result<()> {
        let (x, y) = (x.into(), y.into());
        self.epilogue.check_floats(OP, x.element(), y.element())?;
        let shape = self.shape(batch, size, [x.len(), y.len()])?;
        self.layer.forward_floats(device, self.images(&shape), x, y).map_err(|error| error.of(OP))
    }

    fn shape(&self, batch: usize, size: [usize; 2], lengths: [usize; 2]) -> Result<Conv2dShape> {
        let shape = Conv2dShape::new(self.geometry, batch, size).map_err(|error| error.of(OP))?;
        check_images(OP, &shape, lengths)?;
        Ok(shape)
    }

    fn images<'a>(&self, shape: &'a Conv2dShape) -> ImagesInt8<'a> {
        ImagesInt8 { shape, layouts: self.layouts }
    }
}
