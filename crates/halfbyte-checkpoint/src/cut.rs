//! Some rows and columns of a linear layer: what a rank holds of it.

use crate::error::{Error, Result};
use crate::safetensors::FloatData;
use crate::scheme::{StoredLinear, StoredWeight};
use std::borrow::Cow;
use std::ops::Range;

/// What a rank holds of a linear layer's matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows, in the order in which the rank has them.
    pub rows: Vec<Range<usize>>,
    /// Columns, likewise.
    pub columns: Vec<Range<usize>>,
    /// Whether the rank adds the bias: of layers that are cut by columns only one does.
    pub bias: bool,
}

impl Cut {
    /// All of a matrix `[n, k]`.
    pub fn whole([n, k]: [usize; 2]) -> Self {
        Self { rows: std::iter::once(0..n).collect(), columns: std::iter::once(0..k).collect(), bias: true }
    }

    /// Whether it is all of a matrix `[n, k]`, as it lies there.
    pub fn is_whole(&self, shape: [usize; 2]) -> bool {
        *self == Self::whole(shape)
    }

    /// Rows and columns of the part.
    pub fn shape(&self) -> [usize; 2] {
        [&self.rows, &self.columns].map(|ranges| ranges.iter().map(Range::len).sum())
    }

    /// The part of a whole layer. Errors: rows or columns that are not there, those of [`halfbyte::StoredTensor::cut`].
    pub fn of<'a>(&self, layer: StoredLinear<'a>, prefix: &str) -> Result<StoredLinear<'a>> {
        let StoredLinear { weight, bias, findings } = layer;
        let weight = match weight {
            StoredWeight::Dense { floats, shape: [_, k] } => {
                StoredWeight::Dense { floats: self.of_floats(&floats, k), shape: self.shape() }
            }
            StoredWeight::Quantized(codes) => {
                StoredWeight::Quantized(codes.cut(&self.rows, &self.columns).map_err(Error::numbers(prefix))?)
            }
        };
        Ok(StoredLinear { weight, bias: bias.filter(|_| self.bias).map(|bias| self.of_rows(&bias)), findings })
    }

    /// That of a matrix of floats with rows of `k`.
    pub fn of_floats(&self, floats: &FloatData<'_>, k: usize) -> FloatData<'static> {
        fn part<T: Copy>(values: &[T], k: usize, cut: &Cut) -> Cow<'static, [T]> {
            let row = |i: usize| cut.columns.iter().flat_map(move |part| &values[i * k + part.start..i * k + part.end]);
            Cow::Owned(cut.rows.iter().cloned().flatten().flat_map(row).copied().collect())
        }
        match floats {
            FloatData::F16(v) => FloatData::F16(part(v, k, self)),
            FloatData::BF16(v) => FloatData::BF16(part(v, k, self)),
            FloatData::F32(v) => FloatData::F32(part(v, k, self)),
        }
    }

    /// That of a vector with an element a row.
    fn of_rows(&self, vector: &[f32]) -> Vec<f32> {
        self.rows.iter().flat_map(|rows| &vector[rows.clone()]).copied().collect()
    }
}
