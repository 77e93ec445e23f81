//! LLM.int8() on a CPU.

use crate::cpu::Cpu;
use crate::error::Result;
use crate::format::int8::{Affine, Byte, Bytes, Int8Weight};
use crate::memory::collected;
use crate::ops::LinearInt8;
use crate::ops::device::layers;
use crate::tensor::{Floats, FloatsMut};
use half::{bf16, f16};
use std::ops::RangeInclusive;

/// Ranges of rows that f32 holds with all its bits when they are divided by 127, and times 127: 2⁻¹¹⁹ to 2¹²¹.
const ORDINARY: RangeInclusive<f32> = f32::from_bits(0x0400_0000)..=f32::from_bits(0x7c00_0000);

/// A weight with its bias.
#[derive(Clone, Debug)]
pub struct LlmInt8 {
    layer: LinearInt8<Cpu>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl LlmInt8 {
    pub(in crate::ops) fn new(codes: &[i8], shape: [usize; 2], scales: &[f32]) -> Result<Self> {
        let weight = Int8Weight::new(Bytes::I8(codes), shape, scales, &[])?;
        let layer = LinearInt8::with_float_outputs(&weight, Affine::new(Byte::I8, 1.0, 0)?)?;
        let codes = collected("llm.int8 linear", codes.len(), codes.iter().copied())?;
        Ok(Self { layer, codes, scales: scales.to_vec(), bias: None })
    }
}

impl layers::LlmInt8<Cpu> for LlmInt8 {
    fn pack(_: &Cpu, codes: &[i8], shape: [usize; 2], scales: &[f32]) -> Result<Self> {
        Self::new(codes, shape, scales)
    }

    fn bytes(&self) -> usize {
        self.layer.bytes() + self.codes.len()
    }

    fn set_bias(&mut self, bias: Vec<f32>) -> Result<()> {
        self.bias = Some(bias);
        Ok(())
    }

    fn forward(&self, cpu: &Cpu, x: Floats<'_>, m: usize, threshold: f32, y: FloatsMut<'_>) -> Result<()> {
        let [n, k] = [self.layer.n(), self.layer.k()];
        if m == 0 || n == 0 {
            return Ok(());
        }
        let rows = Rows::of(cpu, x, [m, k], threshold);
        let mut sums = vec![0f32; m * n];
        self.layer.forward_floats(cpu, rows.codes.as_slice(), m, sums.as_mut_slice())?;
        let outliers = &rows.outliers;
        // Weights of outlier columns, one column after the other.
        let own: Vec<f32> = outliers
            .iter()
            .flat_map(|&j| (0..n).map(move |i| x.dtype().round(f32::from(self.codes[i * k + j]) * self.scales[i])))
            .collect();
        cpu.threads().run_rows(&mut sums, n, &|r, sums| {
            match rows.ranges[r] {
                range if ORDINARY.contains(&range) => sums.iter_mut().for_each(|sum| *sum *= range / 127.0),
                range => sums.iter_mut().for_each(|sum| *sum = (f64::from(*sum) * f64::from(range) / 127.0) as f32),
            }
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
    fn of(cpu: &Cpu, x: Floats<'_>, [m, k]: [usize; 2], threshold: f32) -> Self {
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
        cpu.threads().run_rows(&mut codes, k, &|r, codes| {
            let (range, columns) = (ranges[r], codes.iter_mut().enumerate().filter(|&(j, _)| !is_outlier[j]));
            if ORDINARY.contains(&range) {
                let inverse = 1.0 / range;
                columns.for_each(|(j, code)| *code = byte(x.get(r * k + j) * 127.0 * inverse));
            } else if range > 0.0 {
                let factor = 127.0 / f64::from(range);
                columns.for_each(|(j, code)| *code = byte((f64::from(x.get(r * k + j)) * factor) as f32));
            }
            // Of a row of zeros, and of one with NaN, codes stay 0.
        });
        let outliers = (0..k).filter(|&j| is_outlier[j]).collect();
        Self { codes, ranges, outliers }
    }
}

/// The nearest code, halves away from zero.
fn byte(steps: f32) -> i8 {
    steps.round().clamp(-127.0, 127.0) as i8
}
