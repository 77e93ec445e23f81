//! Where the bits lie: bijections between the canonical tensor and what kernels read.
//!
//! | layout | holds | read by |
//! |---|---|---|
//! | `row_major` | [`crate::QTensor`] itself: one code a byte | the reference |
//! | [`codes`] | codes as files hold them | whatever packs them, from a [`stored::StoredTensor`] |
//! | [`cpu_n16`] | codes in tiles of 16 outputs × 32 bits | every CPU kernel of a quantised format |
//! | [`cpu_dense_n16`] | floats in columns of 16 outputs | every CPU kernel of dense weights |
//! | [`cpu_int8`] | bytes in tiles of 16 outputs × 4 columns | the CPU kernels of 8 bits in, 8 bits out |
//! | [`cuda_plain`] | codes in words, outputs side by side | the plain GPU kernel |
//! | [`cuda_wna16`] | codes in fragments of tensor cores, scales beside them | the GPU kernels for half floats |

pub mod codes;
#[doc(hidden)]
pub mod cpu_dense_n16;
#[doc(hidden)]
pub mod cpu_int8;
#[doc(hidden)]
pub mod cpu_n16;
#[doc(hidden)]
pub mod cuda_int8;
#[doc(hidden)]
pub mod cuda_plain;
#[doc(hidden)]
pub mod cuda_wna16;
mod lines;
pub mod multiples;
pub(crate) mod places;
mod random;
pub mod stored;

pub use lines::Lines;
