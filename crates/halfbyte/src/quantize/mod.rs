//! From floats to codes: pure functions of a weight matrix, a format and options.

pub mod activations;
mod awq;
mod cholesky;
mod conv2d;
mod damped;
mod drift;
mod gptq;
mod panel;
mod refine;
mod rtn;
mod stats;
mod two_levels;
mod weight_only;

pub use awq::{AwqScales, awq_scales, rtn_clipped};
pub use conv2d::rtn_conv2d;
pub use drift::{Drift, correct};
pub use gptq::{Calibrated, Gptq, gptq};
pub use refine::{Refine, refine};
pub use rtn::{Rtn, SymmetricScale, rtn};
pub use stats::{CrossMoment, Hessian};
pub use weight_only::{WeightOnlyRule, weight_only};

use crate::error::Error;
use crate::format::WeightFormat;
use crate::tensor::Float;

/// The error where weights are too large for a format; `place` says which, as ` in row 3`.
fn too_large(op: &'static str, format: WeightFormat, place: &str) -> Error {
    let expected = match format.channel_scale.unwrap_or(format.scale) {
        Float::F16 => "scales within the range of f16",
        // Their scales reach as far as weights do, but ranges may be twice as wide.
        Float::BF16 | Float::F32 => "groups whose greatest and least weight differ by no more than f32 holds",
    };
    Error::invalid(op, expected, format!("weights too large for that{place}"))
}
