//! A linear layer of bytes: 8 bits in, 8 bits (or floats) out.

use super::device::layers::{EpilogueInt8, LinearInt8 as _};
use super::device::{Device, Tensor};
use super::{Activation, check_bias, check_matrix, on_cpu};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Byte, Int8Weight};
use crate::tensor::Float;

const OP: &str = "linear int8";

/// `y = activation(x · Wᵀ + bias)` of bytes with scales and zero points, with W packed once for the kernels of a device.
///
/// Sums are exact in int32; on the way to bytes they are multiplied and rounded once. [`crate::format::int8`] says how, to the
/// bit.
#[derive(Debug)]
pub struct LinearInt8<D: Device = Cpu> {
    layer: D::LinearInt8,
    n: usize,
    k: usize,
    epilogue: EpilogueInt8,
}

impl LinearInt8<Cpu> {
    /// Packs a weight for a CPU, for inputs of a scale and zero point, and outputs of another. *Errors:* those of
    /// [`LinearInt8::on`].
    pub fn new(weight: &Int8Weight<'_>, x: Affine, y: Affine) -> Result<Self> {
        Self::of(weight, EpilogueInt8::new(x, Some(y)), on_cpu::LinearInt8::new)
    }

    /// Packs a weight for a CPU, for outputs in floats: `sum · sI·sW`. *Errors:* those of [`LinearInt8::on`].
    pub fn with_float_outputs(weight: &Int8Weight<'_>, x: Affine) -> Result<Self> {
        Self::of(weight, EpilogueInt8::new(x, None), on_cpu::LinearInt8::new)
    }
}

impl Clone for LinearInt8<Cpu> {
    fn clone(&self) -> Self {
        let Self { layer, n, k, epilogue } = self;
        Self { layer: layer.clone(), n: *n, k: *k, epilogue: epilogue.clone() }
    }
}

impl<D: Device> LinearInt8<D> {
    /// Packs a weight for a device, for inputs of a scale and zero point and outputs of another; without one y is floats:
    /// `sum · sI·sW`.
    ///
    /// *Errors:* sums that leave int32 for some input (k beyond 33000 can do that, or a large bias); scales so far apart that
    /// `sI·sW/sO` is not finite; memory that is short.
    pub fn on(device: &D, weight: &Int8Weight<'_>, x: Affine, y: Option<Affine>) -> Result<Self> {
        let pack = |w: &Int8Weight<'_>, epilogue: &EpilogueInt8| D::LinearInt8::pack(device, w, epilogue);
        Self::of(weight, EpilogueInt8::new(x, y), pack)
    }

    fn of(
        weight: &Int8Weight<'_>,
        epilogue: EpilogueInt8,
        pack: impl FnOnce(&Int8Weight<'_>, &EpilogueInt8) -> Result<D::LinearInt8>,
    ) -> Result<Self> {
        let layer = pack(weight, &epilogue).map_err(|error| error.of(OP))?;
        Ok(Self { layer, n: weight.n(), k: weight.k(), epilogue })
    }

    /// Adds a bias `[n]` to the sums, in steps of `sI·sW`. *Errors:* another length, sums that leave int32.
    pub fn with_bias(mut self, bias: Vec<i32>) -> Result<Self> {
        check_bias(OP, self.n, bias.len())?;
        self.epilogue.bias = Some(bias);
        self.finished()
    }

    /// Adds a bias `[n]` to outputs in floats. *Errors:* another length, outputs in bytes.
    pub fn with_float_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        self.epilogue.set_float_bias(OP, self.n, bias)?;
        self.finished()
    }

    /// Applies an activation function. *Errors:* a clamp whose low is above its high or NaN; for outputs in bytes, one that is more
    /// than a clamp.
    pub fn with_activation(mut self, activation: Activation) -> Result<Self> {
        activation.check(OP)?;
        self.epilogue.activation = activation;
        self.finished()
    }

    fn finished(mut self) -> Result<Self> {
        self.layer.set_epilogue(&self.epilogue).map_err(|error| error.of(OP))?;
        Ok(self)
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
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

    /// Multiplies, to bytes.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`, of the types that the layer was made for. *Accuracy:* to the bit as
    /// [`crate::format::int8`] says, on every device, whatever the number of threads. *Errors:* a length or a type that
    /// does not fit, a layer with float outputs; on a GPU another one than the weight lies on, memory that is short, or that
    /// grows while work is recorded.
    pub fn forward<'x, 'y>(
        &self,
        device: &D,
        x: impl Into<D::XBytes<'x>>,
        m: usize,
        y: impl Into<D::YBytes<'y>>,
    ) -> Result<()> {
        let (x, y) = (x.into(), y.into());
        self.epilogue.check_bytes(OP, x.element(), y.element())?;
        check_matrix(OP, "x", [m, self.k], x.len())?;
        check_matrix(OP, "y", [m, self.n], y.len())?;
        self.layer.forward(device, x, m, y).map_err(|error| error.of(OP))
    }

    /// Multiplies, to floats.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`. *Accuracy:* the exact sum is rounded to f32, multiplied by `f32(sI·sW)`, the float
    /// bias added, each with one rounding in f32; then the activation, then the type of y. *Errors:* those of
    /// [`LinearInt8::forward`], with outputs in bytes for those in floats.
    pub fn forward_floats<'x, 'y>(
        &self,
        device: &D,
        x: impl Into<D::XBytes<'x>>,
        m: usize,
        y: impl Into<D::Y<'y>>,
    ) -> Result<()> {
        let (x, y) = (x.into(), y.into());
        self.epilogue.check_floats(OP, x.element(), y.element())?;
        check_matrix(OP, "x", [m, self.k], x.len())?;
        check_matrix(OP, "y", [m, self.n], y.len())?;
        self.layer.forward_floats(device, x, m, y).map_err(|error| error.of(OP))
    }
}

impl EpilogueInt8 {
    pub(super) fn new(x: Affine, y: Option<Affine>) -> Self {
        Self { x, y, bias: None, float_bias: None, activation: Activation::None }
    }

    /// Errors: another length, outputs in bytes.
    pub(super) fn set_float_bias(&mut self, op: &'static str, n: usize, bias: Vec<f32>) -> Result<()> {
        check_bias(op, n, bias.len())?;
        if self.y.is_some() {
            let expected = "an int32 bias in steps of sI·sW for outputs in bytes";
            return Err(Error::invalid(op, expected, "a bias in floats"));
        }
        self.float_bias = Some(bias);
        Ok(())
    }

    /// Errors: a layer with outputs in floats, x or y of another type.
    pub(super) fn check_bytes(&self, op: &'static str, x: Byte, y: Byte) -> Result<()> {
        let Some(affine) = self.y else {
            return Err(Error::invalid(op, "outputs in floats", y.name()));
        };
        if y != affine.byte() {
            return Err(Error::invalid(op, format!("outputs in {}", affine.byte().name()), y.name()));
        }
        self.check_inputs(op, x)
    }

    /// Errors: a layer with outputs in bytes, x of another type.
    pub(super) fn check_floats(&self, op: &'static str, x: Byte, y: Float) -> Result<()> {
        if self.y.is_some() {
            return Err(Error::invalid(op, "outputs in bytes", y.name()));
        }
        self.check_inputs(op, x)
    }

    fn check_inputs(&self, op: &'static str, x: Byte) -> Result<()> {
        if x == self.x.byte() {
            return Ok(());
        }
        Err(Error::invalid(op, format!("inputs in {}", self.x.byte().name()), x.name()))
    }
}
