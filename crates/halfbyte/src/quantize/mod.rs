//! From floats to codes: pure functions of a weight matrix, a format and options.

pub mod activations;
mod rtn;

pub use rtn::{Rtn, SymmetricScale, rtn};
