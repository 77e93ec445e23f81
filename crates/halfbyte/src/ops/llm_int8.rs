//! LLM.int8(): bytes times bytes, and the few columns of large activations in floats.

use super::device::{Device, Tensor, layers::LlmInt8 as _};
use super::{check_bias, check_matrix, on_cpu};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::memory::check_empty;

const OP: &str = "llm.int8 linear";

/// `y = x · Wᵀ + bias` of a weight in signed bytes with a scale an output, as in Paddle's `llm_int8_linear`.
///
/// ```text
/// outlier column   one in which some |x| > threshold; the threshold is rounded to the type of x
/// range[r]         the largest |x[r, j]| that is not above the threshold
/// code[r, j]       round(x[r, j] · 127 · (1 / range[r])), halves away from zero; 0 in outlier columns
/// y[r, i]          Σⱼ code[r, j] · w[i, j] · scale[i] · range[r] / 127  +  Σ over outlier columns x[r, j] · T(w[i, j] · scale[i])
///                  + bias[i]                                             T rounds to the type of x
/// ```
///
/// Sums of codes are exact, those over outlier columns are f32, and y is rounded once, where Paddle rounds both sums to the type of y.
///
/// Source: Dettmers and others, "LLM.int8()", 2022; Paddle's `llm_int8_matmul_kernel_impl.h`, but for the weights of outlier
/// columns, which it takes from other places than they lie in.
#[derive(Debug)]
pub struct LlmInt8Linear<D: Device = Cpu> {
    layer: D::LlmInt8,
    n: usize,
    k: usize,
}

impl LlmInt8Linear<Cpu> {
    /// Packs a weight for a CPU. *Shapes:* codes `[n, k]`, scales `[n]`. *Errors:* those of [`LlmInt8Linear::on`].
    pub fn new(codes: &[i8], shape: [usize; 2], scales: &[f32]) -> Result<Self> {
        Self::of(codes, shape, scales, on_cpu::LlmInt8::new)
    }
}

impl Clone for LlmInt8Linear<Cpu> {
    fn clone(&self) -> Self {
        let Self { layer, n, k } = self;
        Self { layer: layer.clone(), n: *n, k: *k }
    }
}

impl<D: Device> LlmInt8Linear<D> {
    /// Packs a weight for a device. *Shapes:* codes `[n, k]`, scales `[n]`. *Errors:* a length that does not fit, a scale that is
    /// negative or not finite, k so large that sums of codes leave int32 (from 131,072 on they can); on a GPU no column or more than 65536, a
    /// processor before sm_75, memory that is short.
    pub fn on(device: &D, codes: &[i8], shape: [usize; 2], scales: &[f32]) -> Result<Self> {
        Self::of(codes, shape, scales, |codes, shape, scales| D::LlmInt8::pack(device, codes, shape, scales))
    }

    fn of(
        codes: &[i8],
        [n, k]: [usize; 2],
        scales: &[f32],
        pack: impl FnOnce(&[i8], [usize; 2], &[f32]) -> Result<D::LlmInt8>,
    ) -> Result<Self> {
        check_matrix(OP, "codes", [n, k], codes.len())?;
        check_empty(OP, [n, k])?;
        if scales.len() != n {
            return Err(Error::invalid(OP, format!("{n} scales"), scales.len().to_string()));
        }
        if let Some(scale) = scales.iter().find(|scale| !(scale.is_finite() && **scale >= 0.0)) {
            return Err(Error::invalid(OP, "scales that are finite and not negative", scale.to_string()));
        }
        Ok(Self { layer: pack(codes, [n, k], scales).map_err(|error| error.of(OP))?, n, k })
    }

    /// Adds a bias `[n]`. *Errors:* another length, memory that is short.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        check_bias(OP, self.n, bias.len())?;
        self.layer.set_bias(bias)?;
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

    /// Bytes that the weight takes: once for products, once for its columns as they are.
    pub fn bytes(&self) -> usize {
        self.layer.bytes()
    }

    /// Multiplies.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`. *Accuracy:* y lies within `(u + (outliers + 6) · 2⁻²⁴) · (|x̂|·|W|ᵀ + |bias|)` of the formula
    /// in exact numbers, x̂ being codes times their range / 127, or x itself in outlier columns, u that of y's type. On a GPU sums of
    /// codes beyond 2²⁴ are rounded where parts of k meet, at most k / 128 times more; where there are none, the bits are those of a
    /// CPU. There a row whose range is no 0, but below 2⁻¹¹⁹ or above 2¹²¹, lies within no bound. A row with NaN becomes NaN, one with infinity
    /// where that meets a weight of 0 or lies within the threshold, and no other.
    /// *Errors:* a length that does not fit, a threshold that is negative or NaN; on a
    /// GPU another one than the weight lies on, memory that is short, or that grows while work is recorded.
    pub fn forward<'x, 'y>(
        &self,
        device: &D,
        x: impl Into<D::X<'x>>,
        m: usize,
        threshold: f32,
        y: impl Into<D::Y<'y>>,
    ) -> Result<()> {
        let (x, y, [n, k]) = (x.into(), y.into(), [self.n, self.k]);
        check_matrix(OP, "x", [m, k], x.len())?;
        check_matrix(OP, "y", [m, n], y.len())?;
        if threshold.is_nan() || threshold < 0.0 {
            return Err(Error::invalid(OP, "a threshold of at least 0", threshold.to_string()));
        }
        let threshold = x.element().round(threshold);
        self.layer.forward(device, x, m, threshold, y).map_err(|error| error.of(OP))
    }
}
