//! Numbers in, numbers out: weights of a neural network in 2, 3, 4 or 8 bits times float activations,
//! `y = x · dequant(W)ᵀ`.
//!
//! The modules in the order in which data passes them:
//!
//! ```text
//! float W ──quantize──▶ QTensor ──layout──▶ packed ──kernel──▶ y
//!            (format)    canonical
//! ```
#![deny(missing_docs)]

pub mod conv;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod format;
pub mod kernel;
pub mod layout;
pub mod ops;
pub mod quantize;
pub mod tensor;

pub use cpu::Cpu;
pub use cuda::Cuda;
pub use error::{Error, Result};
pub use format::{Act, Format, Group, QTensor, WeightFormat, Zero, Zeros};
pub use layout::stored::StoredTensor;
pub use ops::{Activation, Conv2d, Conv2dInt8, Device, Linear, LinearInt8, Weight};
pub use tensor::{Float, FloatData, Floats, FloatsMut};

/// The example of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
