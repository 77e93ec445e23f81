//! Linear layers of weights in 2 to 8 bits as a custom op of candle, on its tensors, without copies.
#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod layer;
#[cfg(feature = "cuda")]
mod on_cuda;

pub use layer::QLinear;
