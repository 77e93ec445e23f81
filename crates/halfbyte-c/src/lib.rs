//! The C interface of halfbyte. `include/halfbyte.h` is made from this crate by `cargo xtask c-header`.
//!
//! | file | what it has |
//! |---|---|
//! | `version.rs` | versions of the interface and of the library |
//! | `status.rs` | status codes, the message of each thread, the boundary that no panic crosses |
//! | `tensor.rs` | DLPack's `DLTensor`, looked at from all sides before anything is read |
//! | `text.rs` | strings of callers |
//! | `device.rs` | CPUs, GPUs, streams of callers |
//! | `weight.rs` | weights before they are packed: quantised, dense, out of a checkpoint |
//! | `linear.rs`, `conv2d.rs`, `int8.rs` | layers |
//! | `checkpoint.rs`, `model.rs` | files; language models |
//!
//! A handle is a box whose address the caller has; it may be used from many threads at once, and freed once, when no call uses it. A
//! layer keeps what it needs of its device, which may be freed before it. Functions are safe here and take references that may be
//! null: that a pointer which is not null points to what it says is the caller's promise, as everywhere in C, and the header says so.
#![deny(missing_docs)]
// The names that C sees.
#![allow(non_camel_case_types)]
// Lengths in brackets, as readers of the header know them, are no links.
#![allow(rustdoc::broken_intra_doc_links)]
// C calls these functions, where nothing is safe; Rust has the crates that they stand on.
#![allow(clippy::not_unsafe_ptr_arg_deref)]
// Each lies in the box that is its handle.
#![allow(clippy::large_enum_variant)]

mod checkpoint;
mod conv2d;
mod device;
mod handle;
mod int8;
mod linear;
mod model;
mod status;
mod tensor;
mod text;
mod version;
mod weight;

pub use checkpoint::*;
pub use conv2d::*;
pub use device::*;
pub use int8::*;
pub use linear::*;
pub use model::*;
pub use status::*;
pub use tensor::{DLDataType, DLDevice, DLTensor};
pub use version::*;
pub use weight::*;
