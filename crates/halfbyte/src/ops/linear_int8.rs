//! A linear layer of bytes: 8 bits in, 8 bits (or floats) out.

use crate::cpu::Cpu;
use crate::cpu::int8::{self, Call, Dequantize, Requantize, Rows, Target};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Bytes, BytesMut, Int8Weight};
use crate::kernel::Activation;
use crate::layout::cpu_int8::CpuInt8;
use crate::tensor::FloatsMut;

const OP: &str = "linear int8";

/// `y = activation(x · Wᵀ + bias)` of bytes with scales and zero points, with W packed once for the kernels.
///
/// Sums are exact in int32; on the way to bytes they are multiplied and rounded once. [`crate::format::int8`] says how, to the
/// bit.
#[derive(Clone, Debug)]
pub struct LinearInt8 {
    packed: CpuInt8,
    x: Affine,
    y: Option<Affine>,
    bias: Option<Vec<i32>>,
    float_bias: Option<Vec<f32>>,
    activation: Activation,
    epilogue: Epilogue,
}

#[derive(Clone, Debug)]
enum Epilogue {
    Bytes(Requantize),
    Floats(Dequantize),
}

impl LinearInt8 {
    /// Packs a weight for inputs of a scale and zero point, and outputs of another.
    ///
    /// *Errors:* sums that leave int32 for some input (k beyond 33000 can do that, or a large bias); scales so far apart that
    /// `sI·sW/sO` is not finite.
    pub fn new(weight: &Int8Weight<'_>, x: Affine, y: Affine) -> Result<Self> {
        Self::of(weight, x, Some(y))
    }

    /// Packs a weight for outputs in floats: `sum · sI·sW`. *Errors:* as of [`LinearInt8::new`].
    pub fn with_float_outputs(weight: &Int8Weight<'_>, x: Affine) -> Result<Self> {
        Self::of(weight, x, None)
    }

    fn of(weight: &Int8Weight<'_>, x: Affine, y: Option<Affine>) -> Result<Self> {
        let packed = CpuInt8::pack(weight)?;
        let activation = Activation::None;
        let epilogue = epilogue(&packed, x, y, (None, None), activation)?;
        Ok(Self { packed, x, y, bias: None, float_bias: None, activation, epilogue })
    }

    /// Adds a bias `[n]` to the sums, in steps of `sI·sW`. *Errors:* another length, sums that leave int32.
    pub fn with_bias(mut self, bias: Vec<i32>) -> Result<Self> {
        self.bias = Some(bias);
        self.finished()
    }

    /// Adds a bias `[n]` to outputs in floats. *Errors:* another length, outputs in bytes.
    pub fn with_float_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        self.float_bias = Some(bias);
        self.finished()
    }

    /// Applies an activation function. *Errors:* for outputs in bytes, one that is more than a clamp.
    pub fn with_activation(mut self, activation: Activation) -> Result<Self> {
        self.activation = activation;
        self.finished()
    }

    fn finished(mut self) -> Result<Self> {
        let biases = (self.bias.as_deref(), self.float_bias.as_deref());
        self.epilogue = epilogue(&self.packed, self.x, self.y, biases, self.activation)?;
        Ok(self)
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.packed.n()
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.packed.k()
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
        self.packed.bytes()
    }

    /// Multiplies, to bytes.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`, of the types that the layer was made for. *Accuracy:* to the bit as
    /// [`crate::format::int8`] says, on every processor, whatever the number of threads. *Errors:* a length or a type that
    /// does not fit, a layer with float outputs.
    pub fn forward(&self, cpu: &Cpu, x: Bytes<'_>, m: usize, y: BytesMut<'_>) -> Result<()> {
        let Epilogue::Bytes(requantize) = &self.epilogue else {
            return Err(Error::invalid(OP, "outputs in floats", y.byte().name()));
        };
        if y.byte() != requantize.y().byte() {
            return Err(Error::invalid(OP, format!("outputs in {}", requantize.y().byte().name()), y.byte().name()));
        }
        self.check_lengths(x, m, y.len())?;
        self.run(cpu, x, m, Target::Bytes(requantize, y));
        Ok(())
    }

    /// Multiplies, to floats.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`. *Accuracy:* the exact sum is rounded to f32, multiplied by `f32(sI·sW)`, the float
    /// bias added, each with one rounding in f32; then the activation, then the type of y. *Errors:* a length or a type that
    /// does not fit, a layer with outputs in bytes.
    pub fn forward_floats(&self, cpu: &Cpu, x: Bytes<'_>, m: usize, y: FloatsMut<'_>) -> Result<()> {
        let Epilogue::Floats(dequantize) = &self.epilogue else {
            return Err(Error::invalid(OP, "outputs in bytes", y.dtype().name()));
        };
        self.check_lengths(x, m, y.len())?;
        self.run(cpu, x, m, Target::Floats(dequantize, dequantize.output(y, [m, self.n()])));
        Ok(())
    }

    fn check_lengths(&self, x: Bytes<'_>, m: usize, y_len: usize) -> Result<()> {
        let (n, k) = (self.n(), self.k());
        if x.byte() != self.x.byte() {
            return Err(Error::invalid(OP, format!("inputs in {}", self.x.byte().name()), x.byte().name()));
        }
        if m.checked_mul(k) != Some(x.len()) {
            return Err(Error::invalid(OP, format!("x of {m} × {k}"), format!("{} elements", x.len())));
        }
        if m.checked_mul(n) != Some(y_len) {
            return Err(Error::invalid(OP, format!("y of {m} × {n}"), format!("{y_len} elements")));
        }
        Ok(())
    }

    fn run(&self, cpu: &Cpu, x: Bytes<'_>, m: usize, y: Target<'_>) {
        let byte = x.byte();
        let x: &[u8] = match x {
            Bytes::U8(x) => x,
            Bytes::I8(x) => bytemuck::cast_slice(x),
        };
        let x = Rows::Strided(x, self.k());
        int8::multiply(cpu, Call { x, byte, m, w: &self.packed, y, stride: self.n(), column: 0 });
    }
}

fn epilogue(
    w: &CpuInt8,
    x: Affine,
    y: Option<Affine>,
    (bias, float_bias): (Option<&[i32]>, Option<&[f32]>),
    activation: Activation,
) -> Result<Epilogue> {
    match y {
        Some(_) if float_bias.is_some() => {
            Err(Error::invalid(OP, "an int32 bias in steps of sI·sW for outputs in bytes", "a bias in floats"))
        }
        Some(y) => Ok(Epilogue::Bytes(Requantize::new(w, x, bias, y, activation)?)),
        None => Ok(Epilogue::Floats(Dequantize::new(w, x, bias, float_bias, activation)?)),
    }
}
