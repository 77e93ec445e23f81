//! Files in, tensors out: checkpoints of language models in Hugging Face's form, dense or quantised.
//!
//! * [`safetensors`] reads and writes the container: strict about every header, memory-mapped, sharded.
//! * [`config`] reads what a checkpoint says of its quantisation.
//! * [`scheme`] turns the tensors of a module into a [`halfbyte::QTensor`] and back; [`Weights`] is the view of a whole
//!   model in those terms.
//! * State dicts as PyTorch saves them (`pytorch_model.bin`, `*.pt`) are read like safetensors; nothing in them is run.
//! * [`onnx`] reads and writes ONNX models with quantised products.
//! * [`files`] is every change of the file system.
//! * [`folder`] writes a whole model folder: quantised by [`write_model`], dense by [`write_dense`].
//! * [`gguf`] reads and writes GGUF files: blocks, and models in Hugging Face's terms.
//! * [`json`] parses the texts beside the tensors; [`regular`] opens files, and nothing that only looks like one.
//! * [`inspect()`] describes a checkpoint, with everything in it that looks wrong.
//!
//! Every file is taken as hostile: a header's numbers are checked against the size of the file before anything is
//! allocated for them, and every error names the file and the tensor.
#![deny(missing_docs)]
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod config;
mod contents;
mod cut;
pub mod error;
mod exact;
mod experts;
pub mod files;
mod finding;
pub mod folder;
pub mod gguf;
pub mod inspect;
pub mod json;
mod mapping;
pub mod onnx;
mod pytorch;
pub mod regular;
pub mod safetensors;
pub mod scheme;
mod small_floats;
mod target;
pub mod verify;
mod writer;

pub use checkpoint::{Checkpoint, TensorInfo};
pub use config::{
    AwqConfig, AwqVersion, BitsAndBytesConfig, BitsAndBytesKind, CompressedTensorsConfig, FpaIntBConfig, GptqConfig,
    GptqVersion, HalfbyteConfig, ModelOptConfig, Mxfp4Config, QuantizationConfig,
};
pub use cut::Cut;
pub use error::{Error, Result};
pub use files::{sync_dir, write_synced};
pub use finding::Finding;
pub use folder::{
    Conversion, Converted, Job, Linear, Part, Progress, Quantization, Replacement, Sizes, Untied, Written, convert,
    linears, sizes, write_dense, write_model, write_part,
};
pub use inspect::{Inspection, inspect};
pub use safetensors::{DType, FloatData};
pub use scheme::{
    Hint, LinearWeight, LoadedLinear, MemoryTensor, ModuleKind, StoredFormat, StoredLinear, StoredModule, StoredWeight,
    Weights,
};
pub use target::Target;
pub use verify::{Verification, verify, verify_parts};
pub use writer::{Writer, WrittenFiles};
