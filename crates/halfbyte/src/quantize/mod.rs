//! From floats to codes: pure functions of a weight matrix, a format and options.

pub mod activations;
mod cholesky;
mod gptq;
mod panel;
mod rtn;
mod stats;

pub use gptq::{Calibrated, Gptq, gptq};
pub use rtn::{Rtn, SymmetricScale, rtn};
pub use stats::Hessian;
