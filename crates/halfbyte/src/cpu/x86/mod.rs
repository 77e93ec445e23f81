//! Loads from packed data that kernels of one instruction set share.

pub(super) mod avx2;
pub(super) mod avx512;
