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
