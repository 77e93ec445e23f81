//! ONNX models with quantised products: `com.microsoft.MatMulNBits`, read and written.
//!
//! ```text
//! weight       u8  [N, blocks, block_size·bits/8]   codes in order along K from the lowest bit up, the last block padded
//! scales       f   [N, blocks]                      f32, f16 or bf16
//! zero_points  u8  [N, ceil(blocks·bits/8)]         packed as the codes are, each row from a byte on; or floats
//!                                                   [N, blocks]; or none, then 2^(bits−1)
//! g_idx        i32 [K]                              block of each column; or none
//! w[n, k] = scales[n, b] · (code[n, k] − zero_points[n, b]),   b = k / block_size or g_idx[k]
//! ```
//!
//! [`Model`] parses a file into initialisers, which are ranges of it or of files beside it, and products; [`load`]
//! takes a product's initialisers for a [`halfbyte::StoredTensor`] and [`pack`] makes them of a [`halfbyte::QTensor`];
//! [`create`] begins to write a model.
//!
//! Source: the message definitions of onnx 1.23 and the operator as onnxruntime 1.31 defines it, whose files the tests
//! read to their exact values.

pub(crate) mod codes;
mod element;
pub(crate) mod files;
mod model;
mod nbits;
mod pack;
mod proto;
mod tensor;
mod writer;

pub use element::{ELEMENT_TYPES, ElementType};
pub use model::{MatMulNBits, Model};
pub use nbits::{Blocks, TensorBytes, describe, load};
pub use pack::{BlockLayout, PackedBlocks, pack};
pub use tensor::{Initializer, Place};
pub use writer::{Product, create};
