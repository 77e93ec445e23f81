//! Codes in words of 32 bits, the words of all outputs side by side: what the plain GPU kernel reads.
//!
//! ```text
//! codes [words along k][n]:   word t of output i = columns t·c … t·c + c − 1, the first in the lowest bits
//!                              c = 16, 8, 4 columns for codes of 2, 4, 8 bits; codes of 3 bits lie in fields of 4
//! scales, zeros [groups][n]
//! group of column [k], if columns were quantised in another order
//! ```
//!
//! Neighbouring threads take neighbouring outputs, and read neighbouring words. Nothing is padded but the last word along k,
//! with code 0.

use super::codes::field_bits;
use crate::error::{Error, Result};
use crate::format::{QTensor, WeightFormat, Zeros};
use crate::tensor::{Float, FloatData};
use half::{bf16, f16};
use rayon::prelude::*;

/// A quantised tensor packed for the plain GPU kernel.
#[derive(Clone, Debug)]
pub struct CudaPlain {
    n: usize,
    k: usize,
    groups: usize,
    format: WeightFormat,
    codes: Vec<u32>,
    scales: FloatData<'static>,
    zeros: PlainZeros,
    group_of: Option<Vec<u32>>,
}

/// Zeros as they lie on the device, `[groups][n]`.
#[derive(Clone, Debug)]
pub enum PlainZeros {
    /// The middle code.
    Symmetric,
    /// Zero points from 0 to 256.
    Integer(Vec<u16>),
    /// Offsets, in the type of the scales.
    Float(FloatData<'static>),
}

impl CudaPlain {
    /// Packs a tensor, on the CPU: what the GPU's packing is tested against. Error: more columns than 31 bits count.
    pub fn pack(w: &QTensor) -> Result<Self> {
        let (n, k, format) = (w.n(), w.k(), w.format());
        if k > i32::MAX as usize {
            return Err(Error::invalid("pack for the GPU", "fewer than 2³¹ columns", k.to_string()));
        }
        let field = field_bits(format.bits);
        let per_word = 32 / field as usize;
        let mut codes = vec![0u32; k.div_ceil(per_word) * n];
        if n > 0 {
            codes.par_chunks_mut(n).enumerate().for_each(|(t, words)| {
                let columns = t * per_word..k.min((t + 1) * per_word);
                for (word, row) in words.iter_mut().zip(w.codes().chunks_exact(k)) {
                    let fields = row[columns.clone()].iter().zip(0u32..);
                    *word = fields.fold(0, |word, (&code, f)| word | u32::from(code) << (f * field));
                }
            });
        }
        let groups = w.groups();
        let zeros = match w.zeros() {
            Zeros::Symmetric => PlainZeros::Symmetric,
            Zeros::Integer(z) => PlainZeros::Integer(transposed(z, [n, groups])),
            Zeros::Float(o) => PlainZeros::Float(narrowed(transposed(o, [n, groups]), format.scale)),
        };
        let scales = narrowed(transposed(w.scales(), [n, groups]), format.scale);
        Ok(Self { n, k, groups, format, codes, scales, zeros, group_of: w.group_index().map(<[u32]>::to_vec) })
    }

    /// The canonical tensor again.
    pub fn unpack(&self) -> Result<QTensor> {
        let (n, k) = (self.n, self.k);
        let field = field_bits(self.format.bits);
        let per_word = 32 / field as usize;
        let code = |i: usize, j: usize| {
            let word = self.codes[j / per_word * n + i];
            (word >> ((j % per_word) as u32 * field) & ((1 << field) - 1)) as u8
        };
        let codes = (0..n).flat_map(|i| (0..k).map(move |j| (i, j))).map(|(i, j)| code(i, j)).collect();
        let back = [self.groups, n];
        let zeros = match &self.zeros {
            PlainZeros::Symmetric => Zeros::Symmetric,
            PlainZeros::Integer(z) => Zeros::Integer(transposed(z, back)),
            PlainZeros::Float(o) => Zeros::Float(transposed(&o.to_f32(), back)),
        };
        let scales = transposed(&self.scales.to_f32(), back);
        QTensor::new(self.format, [n, k], codes, scales, zeros, self.group_of.clone())
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// What the codes mean.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Words of codes, `[words along k][n]`.
    pub fn codes(&self) -> &[u32] {
        &self.codes
    }

    /// Scales, `[groups][n]`, in the format's type.
    pub fn scales(&self) -> &FloatData<'static> {
        &self.scales
    }

    /// Zeros.
    pub fn zeros(&self) -> &PlainZeros {
        &self.zeros
    }

    /// Group of each column, if it is not simply `j / group size`.
    pub fn group_of(&self) -> Option<&[u32]> {
        self.group_of.as_deref()
    }
}

/// `[rows, columns]` as `[columns, rows]`.
fn transposed<T: Copy>(values: &[T], [rows, columns]: [usize; 2]) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| values[r * columns + c])).collect()
}

/// Values that are exact in `dtype`, in it.
fn narrowed(values: Vec<f32>, dtype: Float) -> FloatData<'static> {
    match dtype {
        Float::F16 => FloatData::F16(values.into_iter().map(f16::from_f32).collect()),
        Float::BF16 => FloatData::BF16(values.into_iter().map(bf16::from_f32).collect()),
        Float::F32 => FloatData::F32(values.into()),
    }
}
