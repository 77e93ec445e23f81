//! A linear layer, quantised or dense inside.

use super::device::{Device, Tensor, layers::Linear as _};
use super::{check_bias, check_matrix, on_cpu, on_cuda};
use crate::cpu::Cpu;
use crate::cpu::isa::Caps;
use crate::cpu::matmul::{Packed, rows_of_choices};
use crate::cuda::Cuda;
use crate::cuda::driver::{FloatView, FloatViewMut, View};
use crate::cuda::matmul::{self as cuda, Fold, FoldedNorm, Plans, QuantizedForm, QuantizedView, rows_form};
use crate::cuda::nn::Dense;
use crate::cuda::sources::Instance;
use crate::error::Result;
use crate::format::reference::Bound;
use crate::format::{Act, Format, QTensor};
use crate::kernel::Problem;
use crate::layout::stored::StoredTensor;
use crate::memory::check_empty;
use crate::tensor::{Float, Floats};
use std::sync::Arc;

pub use crate::kernel::Activation;

const OP: &str = "linear";

/// A weight as it is given to a [`Linear`] or a [`Conv2d`](super::Conv2d).
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Codes with scales, and what becomes of the activations.
    Quantized(&'a QTensor, Act),
    /// The same as files hold it: tensors of one format, one below the other.
    Stored(&'a [&'a StoredTensor<'a>], Act),
    /// Floats `[n, k]`, multiplied exactly.
    Dense(Floats<'a>, [usize; 2]),
}

/// `y = activation(x · Wᵀ + bias)`, with W packed once for the kernels of a device.
#[derive(Debug)]
pub struct Linear<D: Device = Cpu> {
    layer: D::Linear,
    activation: Activation,
}

impl Linear<Cpu> {
    /// Packs a weight for a CPU, whichever [`Cpu`] will multiply. Errors: those of [`Linear::on`], an instruction set in
    /// `HALFBYTE_ISA` that the processor does not have.
    pub fn new(weight: Weight<'_>) -> Result<Self> {
        let layer = on_cpu::Linear::new(Caps::detect_within_environment()?, weight).map_err(|error| error.of(OP))?;
        Ok(Self { layer, activation: Activation::None })
    }

    /// The packed weight.
    pub fn packed(&self) -> &Packed {
        self.layer.packed()
    }

    /// Names of the kernels that multiply any number of rows of these types, each with the number from which on it does, in order.
    /// *Error:* none does.
    pub fn kernels(&self, cpu: &Cpu, x: Float, y: Float) -> Result<Vec<(usize, &'static str)>> {
        let mut kernels: Vec<(usize, &'static str)> = Vec::new();
        for first in rows_of_choices(&self.problem(1, x, y)) {
            let kernel = self.kernel(cpu, first, x, y)?;
            if kernels.last().is_none_or(|(_, before)| *before != kernel) {
                kernels.push((first, kernel));
            }
        }
        Ok(kernels)
    }
}

impl Linear<Cuda> {
    /// With a weight that is packed already, as by a [`Packer`](crate::cuda::matmul::Packer) that packs many.
    pub fn of_packed(device: &Cuda, packed: cuda::Packed) -> Self {
        Self { layer: on_cuda::Linear::of(device, packed), activation: Activation::None }
    }

    /// With floats that lie on the device already.
    pub fn of_dense(device: &Cuda, weight: Dense) -> Self {
        Self { layer: on_cuda::Linear::of_dense(device, weight), activation: Activation::None }
    }

    /// Lets products with y finer than x round weights to the type of x, which makes those of many rows faster, if all lie within the
    /// range of f16; says whether they do ([`allow_rounded_weights`](cuda::Packed::allow_rounded_weights)). A dense weight stays as it is.
    /// *Errors:* memory that is short, a kernel that cannot be compiled.
    pub fn allow_rounded_weights(&mut self) -> Result<bool> {
        self.layer.allow_rounded_weights().map_err(|error| error.of(OP))
    }

    /// The floats; None if it is quantised.
    pub fn dense(&self) -> Option<&Dense> {
        self.layer.dense()
    }

    /// The packed codes; None if it is dense.
    pub fn packed(&self) -> Option<&cuda::Packed> {
        self.layer.packed()
    }

    /// What is added to every row, `[n]`.
    pub fn bias(&self) -> Option<View<'_, f32>> {
        self.layer.bias()
    }

    /// How m rows of x must lie as codes for [`Linear::forward_rows`]; None where it reads floats.
    pub fn rows_form(&self, device: &Cuda, m: usize) -> Option<QuantizedForm> {
        rows_form(&device.gpu().caps(), self.layer.packed()?, m)
    }

    /// Multiplies rows that another kernel has quantised.
    ///
    /// *Shapes:* x as [`Linear::rows_form`] says, y `[m, n]`. *Accuracy:* the bits of [`Linear::forward`] with the numbers that
    /// were quantised. *Errors:* rows of another form, a length that does not fit, a clamp to nothing, memory that is short.
    pub fn forward_rows(&self, device: &Cuda, x: QuantizedView<'_>, y: FloatViewMut<'_>) -> Result<()> {
        self.activation.check(OP)?;
        self.layer.forward_rows(device, x, y, self.activation).map_err(|error| error.of(OP))
    }

    /// Whether products of m rows of x to y of these types do their part of a norm. *Error:* no kernel computes them.
    pub fn folds(&self, device: &Cuda, [x, y]: [Float; 2], m: usize, fold: Fold) -> Result<bool> {
        let Some(w) = self.layer.packed() else { return Ok(false) };
        let problem = self.problem(m, x, y);
        w.folds(device.gpu(), &problem, self.activation, fold).map_err(|error| error.of(OP))
    }

    /// What such products are computed by; None where they do not. *Error:* as of [`Linear::folds`].
    pub fn folding(&self, device: &Cuda, [x, y]: [Float; 2], m: usize, fold: Fold) -> Result<Option<Instance>> {
        let Some(w) = self.layer.packed() else { return Ok(None) };
        let problem = self.problem(m, x, y);
        w.folding(device.gpu(), &problem, self.activation, fold).map_err(|error| error.of(OP))
    }

    /// Multiplies and does its part of a norm, where [`Linear::folds`] says so.
    ///
    /// *Shapes:* those of [`Linear::forward`] and of the norm. *Accuracy:* as of [`run_folded`](cuda::run_folded). *Errors:* a length that
    /// does not fit, a product that no kernel computes so, memory that is short.
    pub fn forward_folded(
        &self,
        device: &Cuda,
        x: FloatView<'_>,
        m: usize,
        y: FloatViewMut<'_>,
        norm: &FoldedNorm<'_>,
    ) -> Result<()> {
        self.activation.check(OP)?;
        self.layer.forward_folded(device, x, m, y, self.activation, norm).map_err(|error| error.of(OP))
    }

    /// What it computes products of x to y of these types by, for every number of rows; None if it is dense. *Error:* no kernel
    /// serves them.
    pub fn plans(&self, device: &Cuda, x: Float, y: Float) -> Result<Option<Arc<Plans>>> {
        self.layer.packed().map(|packed| packed.plans(device.gpu(), x, y)).transpose().map_err(|error| error.of(OP))
    }
}

impl<D: Device> Linear<D> {
    /// Packs a weight for a device, and for activations as its format has them: f32 for a32, else of the half type of the
    /// scales.
    ///
    /// *Errors:* a length that does not fit, stored tensors that are not alike, a format that no kernel of the device serves,
    /// memory that is short.
    pub fn on(device: &D, weight: Weight<'_>) -> Result<Self> {
        Self::packed_for(device, weight, None)
    }

    /// The same for activations of a type: on a GPU it can decide on the kernels that a weight is packed for. *Errors:* as of
    /// [`Linear::on`].
    pub fn for_inputs(device: &D, weight: Weight<'_>, x: Float) -> Result<Self> {
        Self::packed_for(device, weight, Some(x))
    }

    fn packed_for(device: &D, weight: Weight<'_>, x: Option<Float>) -> Result<Self> {
        if let Weight::Dense(w, shape) = weight {
            check_matrix(OP, "a weight", shape, w.len())?;
            check_empty(OP, shape)?;
        }
        let layer = D::Linear::pack(device, weight, x).map_err(|error| error.of(OP))?;
        Ok(Self { layer, activation: Activation::None })
    }

    /// Adds a bias `[n]`. Errors: another length, memory that is short.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        check_bias(OP, self.n(), bias.len())?;
        self.layer.set_bias(bias)?;
        Ok(self)
    }

    /// Applies an activation function to the result.
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// That function.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Rows of the weight: outputs, or of a GPU's weight with a gate twice as many.
    pub fn n(&self) -> usize {
        self.layer.shape()[0]
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.layer.shape()[1]
    }

    /// Format of the weight; None if it is dense.
    pub fn format(&self) -> Option<Format> {
        self.layer.format()
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        self.layer.bytes()
    }

    /// Name of the kernel that multiplies m rows of these types. *Error:* none does.
    pub fn kernel(&self, device: &D, m: usize, x: Float, y: Float) -> Result<&'static str> {
        self.layer.kernel(device, &self.problem(m, x, y)).map_err(|error| error.of(OP))
    }

    /// How far its results lie from [`crate::format::reference`] at most, before an activation function; with a bias, `|bias|` is a part
    /// of the magnitude. *Error:* no kernel multiplies m rows of these types.
    pub fn bound(&self, device: &D, m: usize, x: Float, y: Float) -> Result<Bound> {
        self.layer.bound(device, &self.problem(m, x, y)).map_err(|error| error.of(OP))
    }

    fn problem(&self, m: usize, x: Float, y: Float) -> Problem {
        Problem { format: self.format(), x, y, m, n: self.n(), k: self.k() }
    }

    /// Multiplies.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`, of any float type each; on a GPU `[m, n / 2]` where rows are gates and what they let through.
    /// *Accuracy:* [`Linear::bound`], of the sums that gates multiply; the same input gives the same bits, whatever the number of threads. NaN and infinity in x reach y. *Errors:* a length that does not fit, a clamp
    /// whose low is above its high or NaN, a problem that no kernel serves; on a GPU another one than the weight lies on, memory that is short, or that grows while work is recorded.
    pub fn forward<'x, 'y>(&self, device: &D, x: impl Into<D::X<'x>>, m: usize, y: impl Into<D::Y<'y>>) -> Result<()> {
        let (x, y) = (x.into(), y.into());
        check_matrix(OP, "x", [m, self.k()], x.len())?;
        check_matrix(OP, "y", [m, self.layer.outputs()], y.len())?;
        self.activation.check(OP)?;
        self.layer.forward(device, x, m, y, self.activation).map_err(|error| error.of(OP))
    }
}
