//! GGUF, the single-file format of llama.cpp: metadata, a tokenizer and tensors of blocks.
//!
//! ```text
//! file = "GGUF" u32 version │ u64 tensors │ u64 pairs │ pairs │ tensor declarations │ padding │ data
//! pair = string key, u32 type, value          string = u64 length, bytes
//! declaration = string name, u32 dimensions, u64 each (innermost first), u32 type, u64 offset into the data
//! ```
//!
//! Everything here works on bytes that lie in memory: [`parse`] reads a header, [`load`] takes blocks for a
//! [`halfbyte::StoredTensor`] and [`pack`] makes them of a [`halfbyte::QTensor`], [`config_json`], [`tokenizer_json`],
//! [`hf_name`] and [`gguf_name`] translate a Llama, Mistral or Qwen model into Hugging Face's terms and [`metadata_from`] from them, and
//! [`create`] begins to write a file. [`Checkpoint::open`](crate::Checkpoint::open) reads more architectures in those terms, and models in
//! several files.
//!
//! Source: the specification at github.com/ggml-org/ggml (docs/gguf.md), and the gguf package for Python, by which
//! blocks, names and order of rows are tested.

mod architectures;
mod blocks;
pub(crate) mod files;
mod frequencies;
mod header;
mod metadata;
mod model;
mod names;
mod rope;
mod scaling;
mod tokenizer;
mod types;
mod value;
mod writer;

pub(crate) use architectures::{Family, Rows};
pub(crate) use blocks::scaled;
pub use blocks::{load, pack, unpack_rows};
pub(crate) use frequencies::{follow_from, is_frequencies};
pub(crate) use header::MAGIC;
pub use header::{Header, TensorEntry, parse};
pub(crate) use metadata::architecture_of;
pub use metadata::{head_dim, metadata_from};
pub use model::config_json;
pub(crate) use names::{RowOrder, reordered};
pub use names::{gguf_name, gguf_row, has_paired_rows, hf_name, hf_row};
pub(crate) use rope::is_read;
pub use rope::rope_factors;
pub(crate) use tokenizer::MOST_VALUES;
pub use tokenizer::tokenizer_json;
pub use types::GgmlType;
pub use value::{Array, Value};
pub use writer::{TensorSpec, create};
