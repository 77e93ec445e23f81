//! The safetensors container: named tensors in one file, or in several with an index.
//!
//! ```text
//! file = u64 header length │ JSON header │ data
//! header = { "name": {"dtype": "F16", "shape": [n, k], "data_offsets": [from, to]}, …, "__metadata__": {…} }
//! ```
//!
//! Headers are parsed here and not by the reference implementation, which takes duplicate names and does not say which
//! tensor of which file is wrong. Source: the format's specification at github.com/huggingface/safetensors.

mod data;
mod dtype;
pub(crate) mod files;
mod header;
mod writer;

pub use dtype::DType;
pub use halfbyte::FloatData;
pub use writer::{TensorSpec, create};

pub(crate) use data::{cast, cast_floats};
pub(crate) use header::MAX_HEADER_BYTES;
pub(crate) use writer::pretty;
