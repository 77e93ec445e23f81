//! What kernels of one instruction set share: loads from packed data, and tiles.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;
mod in_order;
