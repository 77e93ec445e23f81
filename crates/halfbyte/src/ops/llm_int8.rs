//! LLM.int8(): bytes times bytes, and the few columns of large activations in floats.

use super::{LinearInt8, check_bias, check_matrix};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Byte, Bytes, Int8Weight};
use crate::tensor::{Floats, FloatsMut};
use half::{bf16, f16};
use rayon::prelude::*;

const OP: &str = "llm.int8 linear";

/// `y = x · Wᵀ + bias` of a weight in signed bytes with a scale an output, as in Paddle's `llm_int8_linear`, on a CPU.
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
#[derive(Clone, Debug)]
pub struct LlmInt8Linear {
    layer: LinearInt8<Cpu>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Option<Vec<f32>>,
    n: usize,
    k: usize,
}

impl LlmInt8Linear {
    /// Packs a weight. *Shapes:* codes `[n, k]`, scales `[n]`. *Errors:* a length that does not fit, a scale that is negative or not
    /// finite, k so large (beyond 66000) that sums of codes leave int32.
    pub fn new(codes: &[i8], [n, k]: [usize; 2], scales: &[f32]) -> Result<Self> {
        if scales.len() != n {
            return Err(Error::invalid(OP, format!("{n} scales"), scales.len().to_string()));
        }
        let weight = Int8Weight::new(Bytes::I8(codes), [n, k], scales, &[]).map_err(|error| error.of(OP))?;
        let layer = LinearInt8::with_float_outputs(&weight, Affine::new(Byte::I8, 1.0, 0)?).map_err(|e| e.of(OP))?;
        Ok(Self { layer, codes: codes.to_vec(), scales: scales.to_vec(), bias: None, n, k })
    }

    /// Adds a bias `[n]`. *Error:* another length.
    pub fn with_bias(mut self, bias: Vec<f32>) -> Result<Self> {
        check_bias(OP, self.n, bias.len())?;
        self.bias = Some(bias);
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

    /// Multiplies.
    ///
    /// *Shapes:* x `[m, k]`, y `[m, n]`. *Accuracy:* y lies within `(u + (outliers + 6) · 2⁻²⁴) · (|x̂|·|W|ᵀ + |bias|)` of the formula
    /// in exact numbers, x̂ being codes times their range / 127, or x itself in outlier columns, u that of y's type. A row with NaN
    /// becomes NaN, and no other. *Errors:* a length that does not fit, a threshold that is negative or NaN.
    pub fn forward<'x, 'y>(
        &self,
        cpu: &Cpu,
        x: impl Into<Floats<'x>>,
        m: usize,
        threshold: f32,
        y: impl Into<FloatsMut<'y>>,
    ) -> Result<()> {
        let (x, y, [n, k]) = (x.into(), y.into(), [self.n, self.k]);
        check_matrix(OP, "x", [m, k], x.len())?;
        check_matrix(OP, "y", [m, n], y.len())?;
        if threshold.is_nan() || threshold < 0.0 {
            return Err(Error::invalid(OP, "a threshold of at least 0", threshold.to_string()));
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        let rows = Rows::of(x, [m, k], x.dtype().round(threshold));
        let mut sums = vec![0f32; m * n];
        self.layer.forward_floats(cpu, rows.codes.as_slice(), m, sums.as_mut_slice())?;
        let outliers = &rows.outliers;
        // Weights of outlier columns, one column after the other.
        let own: Vec<f32> = outliers
            .iter()
            .flat_map(|&j| (0..n).map(move |i| x.dtype().round(f32::from(self.codes[i * k + j]) * self.scales[i])))
            .collect();
        sums.par_chunks_exact_mut(n).zip(&rows.ranges).enumerate().for_each(|(r, (sums, &range))| {
            sums.iter_mut().for_each(|sum| *sum *= range / 127.0);
            for (&j, weights) in outliers.iter().zip(own.chunks_exact(n)) {
                let x = x.get(r * k + j);
                sums.iter_mut().zip(weights).for_each(|(sum, w)| *sum += x * w);
            }
            if let Some(bias) = &self.bias {
                sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
            }
        });
        match y {
            FloatsMut::F16(y) => y.iter_mut().zip(&sums).for_each(|(y, &sum)| *y = f16::from_f32(sum)),
            FloatsMut::BF16(y) => y.iter_mut().zip(&sums).for_each(|(y, &sum)| *y = bf16::from_f32(sum)),
            FloatsMut::F32(y) => y.copy_from_slice(&sums),
        }
        Ok(())
    }
}

/// Rows of x as codes.
struct Rows {
    /// `[m, k]`.
    codes: Vec<i8>,
    /// `[m]`.
    ranges: Vec<f32>,
    outliers: Vec<usize>,
}

impl Rows {
    fn of(x: Floats<'_>, [m, k]: [usize; 2], threshold: f32) -> Self {
        let mut is_outlier = vec![false; k];
        let ranges: Vec<f32> = (0..m)
            .map(|r| {
                let (mut range, mut nan) = (0f32, false);
                for (j, outlier) in is_outlier.iter_mut().enumerate() {
                    let value = x.get(r * k + j).abs();
                    nan |= value.is_nan();
                    if value > threshold {
                        *outlier = true;
                    } else {
                        range = range.max(value);
                    }
                }
                if nan { f32::NAN } else { range }
            })
            .collect();
        let mut codes = vec![0i8; m * k];
        codes.par_chunks_exact_mut(k.max(1)).zip(&ranges).enumerate().for_each(|(r, (codes, &range))| {
            // Of a row of zeros, and of one with NaN, codes stay 0.
            if range > 0.0 {
                let inverse = 1.0 / range;
                for (j, code) in codes.iter_mut().enumerate().filter(|&(j, _)| !is_outlier[j]) {
                    *code = (x.get(r * k + j) * 127.0 * inverse).round().clamp(-127.0, 127.0) as i8;
                }
            }
        });
        let outliers = (0..k).filter(|&j| is_outlier[j]).collect();
        Self { codes, ranges, outliers }
    }
}
