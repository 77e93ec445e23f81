//! A linear layer, quantised or dense inside.

use crate::cpu::Cpu;
use crate::cpu::isa::Caps;
use crate::cpu::matmul::{self, Call, Epilogue, Packed};
use crate::cpu::pack::pack;
use crate::error::{Error, Result};
use crate::format::{Act, Format, QTensor};
use crate::kernel::Problem;
use crate::layout::cpu_dense_n16::CpuDenseN16;
use crate::layout::stored::StoredTensor;
use crate::tensor::{Floats, FloatsMut};

pub use crate::cpu::matmul::Activation;

/// A weight as it is given to a [`Linear`].
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Codes with scales, and what becomes of the activations.
    Quantized(&'a QTensor, Act),
    /// The same as files hold it: tensors of one format, one below the other.
    Stored(&'a [&'a StoredTensor<'a>], Act),
    /// Floats `[n, k]`, multiplied exactly.
    Dense(Floats<'a>, [usize; 2]),
}

/// `y = activation(x · Wᵀ + bias)`, with W packed once for the kernels.
#[derive(Debug)]
pub struct Linear {
    packed: Packed,
    bias: Option<Vec<f32>>,
    activation: Activation,
}

impl Linear {
    /// Packs a weight. Errors: a length that does not fit, stored tensors that are not alike, an
    /// instruction set in `HALFBYTE_ISA` that the processor does not have.
    pub fn new(weight: Weight<'_>) -> Result<Self> {
        let caps = Caps::detect_within_environment()?;
        let packed = match weight {
            Weight::Quantized(w, act) => Packed::Quantized(pack(caps, &[&w.into()], act == Act::A8Asym)?, act),
            Weight::Stored(parts, act) => Packed::Quantized(pack(caps, parts, act == Act::A8Asym)?, act),
            Weight::Dense(w, shape) => Packed::Dense(CpuDenseN16::pack(w, shape)?),
        };
        Ok(Self { packed, bias: None, activation: Activation::None })
    }

    /// Adds a bias `[n]`. Error: another length.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        if bias.len() != self.n() {
            return Err(Error::invalid("linear", format!("a bias of {}", self.n()), bias.len().to_string()));
        }
        self.bias = Some(bias);
        Ok(self)
    }

    /// Applies an activation function to the result.
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.packed.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.packed.k()
    }

    /// Format of the weight; None if it is dense.
    pub fn format(&self) -> Option<Format> {
        self.packed.format()
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    /// The packed weight.
    pub fn packed(&self) -> &Packed {
        &self.packed
    }

    /// Multiplies.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`, of any float type each. *Accuracy:* see
    /// [`crate::format::reference::Bound`]; the same input gives the same bits, whatever the number of threads.
    /// NaN and infinity in x reach y. *Errors:* a length that does not fit, a problem that no kernel serves.
    pub fn forward(&self, cpu: &Cpu, x: Floats<'_>, m: usize, y: FloatsMut<'_>) -> Result<()> {
        let (n, k) = (self.n(), self.k());
        if m.checked_mul(k) != Some(x.len()) {
            return Err(Error::invalid("linear", format!("x of {m} × {k}"), format!("{} elements", x.len())));
        }
        if m.checked_mul(n) != Some(y.len()) {
            return Err(Error::invalid("linear", format!("y of {m} × {n}"), format!("{} elements", y.len())));
        }
        let problem = Problem { format: self.format(), x: x.dtype(), y: y.dtype(), m, n, k };
        let kernel = matmul::select(&cpu.caps(), &problem)?;
        if m > 0 && n > 0 {
            let epilogue = Epilogue { bias: self.bias.as_deref(), activation: self.activation };
            matmul::run(kernel, cpu, Call { x, m, w: &self.packed, epilogue, y });
        }
        Ok(())
    }
}
