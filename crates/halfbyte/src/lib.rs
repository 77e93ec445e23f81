//! Numbers in, numbers out: weights of a neural network in 2, 3, 4 or 8 bits times float activations,
//! `y = activation(x · dequant(W)ᵀ + bias)`, on CPUs and GPUs.
//!
//! | | |
//! |---|---|
//! | [`Cpu`], [`Cuda`] | devices: a team of threads, a GPU with a queue of work ([`Device`]) |
//! | [`Linear`], [`Conv2d`] | layers of quantised or dense weights ([`Weight`]), with bias and [`Activation`] |
//! | [`LinearInt8`], [`Conv2dInt8`] | layers of bytes in and bytes, or floats, out |
//! | [`LlmInt8Linear`] | a layer of bytes with outlier columns in floats |
//! | [`Format`], [`Act`] | what codes mean, and what becomes of activations: `w4a16-g128` |
//! | [`QTensor`] | a quantised weight, as [`quantize`] makes it |
//! | [`Floats`], [`FloatsMut`], [`Float`] | tensors of f16, bf16 and f32, from slices and vectors |
//! | [`Error`], [`Result`] | what can go wrong, divided by what the caller can do |
//!
//! A layer on a GPU; on a CPU, `Cpu::all_threads()?` stands in the place of `Cuda::open(0)?`, and nothing else changes:
//!
//! ```no_run
//! use halfbyte::quantize::{Rtn, rtn};
//! use halfbyte::{Cuda, Floats, Format, Linear, Weight};
//!
//! fn main() -> halfbyte::Result<()> {
//!     let device = Cuda::open(0)?;
//!     let (n, k, m) = (256, 512, 3);
//!     let weights = vec![0.01f32; n * k];
//!     let format: Format = "w4a8-g128".parse()?;
//!     let quantised = rtn(Floats::from(&weights), [n, k], format.weight, Rtn::default())?;
//!     let linear = Linear::on(&device, Weight::Quantized(&quantised, format.act))?;
//!
//!     let (x, mut y) = (vec![1.0f32; m * k], vec![0.0f32; m * n]);
//!     linear.forward(&device, &x, m, &mut y)
//! }
//! ```
//!
//! The modules in the order in which data passes them:
//!
//! ```text
//! float W ──quantize──▶ QTensor ──layout──▶ packed ──kernel──▶ y
//!            (format)    canonical
//! ```
//!
//! Tables of kernels, their configurations, layouts, compiler and cache can be reached too, for the benchmarks and tests of this
//! repository. They are hidden from these pages, and may change at any time.
#![deny(missing_docs)]

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!(
    "halfbyte needs a little-endian target of 64 bits: sizes of tensors and addresses of GPUs are numbers of 64 bits, and words of files \
     are read in place"
);

mod checks;
pub mod conv;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod format;
pub mod kernel;
pub mod kv_pages;
pub mod layout;
mod memory;
pub mod ops;
pub mod quantize;
#[doc(hidden)]
pub mod random;
pub mod tensor;

pub use cpu::Cpu;
pub use cuda::Cuda;
pub use error::{Error, Result};
pub use format::{Act, Format, QTensor};
pub use ops::{Activation, Conv2d, Conv2dInt8, Device, Linear, LinearInt8, LlmInt8Linear, Weight};
pub use tensor::{Float, Floats, FloatsMut};

// Shorter ways to what quantises, reads and writes weights; the docs show them where they stand.
#[doc(hidden)]
pub use format::{Group, WeightFormat, Zero, Zeros};
#[doc(hidden)]
pub use layout::stored::StoredTensor;
#[doc(hidden)]
pub use tensor::FloatData;

/// The example of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
