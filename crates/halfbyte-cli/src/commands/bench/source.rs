//! Weights that are measured, before they are packed.

use super::check;
use crate::args::WeightKind;
use crate::failure::Result;
use crate::random;
use halfbyte::{Act, FloatData, Format, QTensor, Weight};

/// A random weight `[n, k]`.
pub enum Source {
    Quantized(QTensor, Act),
    Dense(FloatData<'static>),
}

impl Source {
    pub fn new(kind: WeightKind, [n, k]: [usize; 2]) -> Result<Self> {
        Ok(match kind {
            WeightKind::Quantized(format) => Self::Quantized(random::qtensor(format.weight, [n, k], 1)?, format.act),
            WeightKind::Dense(dtype) => Self::Dense(random::floats(n * k, 1, dtype)),
        })
    }

    /// What a layer is made of.
    pub fn weight(&self, shape: [usize; 2]) -> Weight<'_> {
        match self {
            Self::Quantized(w, act) => Weight::Quantized(w, *act),
            Self::Dense(w) => Weight::Dense(w.as_floats(), shape),
        }
    }

    /// Compares a product with the reference.
    pub fn check(&self, computed: check::Computed<'_>) -> Result<check::Check> {
        match self {
            Self::Quantized(w, act) => {
                check::check(check::Weight::Quantized(w, Format { weight: w.format(), act: *act }), computed)
            }
            Self::Dense(w) => check::check(check::Weight::Dense(&w.to_f32()), computed),
        }
    }
}
