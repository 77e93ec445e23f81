//! A byte buffer whose every line of 64 bytes is aligned, so that a vector load never crosses a cache line.

use bytemuck::{Pod, Zeroable};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Zero-initialised bytes, aligned to 64, in whole lines of 64.
#[derive(Clone, Default)]
pub struct Lines(Vec<Line>);

impl Lines {
    /// Zeroed lines that hold at least `bytes`.
    pub fn zeroed(bytes: usize) -> Self {
        Self(bytemuck::zeroed_vec(bytes.div_ceil(64)))
    }

    /// Grows to hold at least `bytes`; what was there may be lost.
    pub fn ensure(&mut self, bytes: usize) {
        if self.0.len() * 64 < bytes {
            *self = Self::zeroed(bytes);
        }
    }

    /// The buffer as elements of a plain type whose size divides 64.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }

    /// The buffer as writable elements of a plain type whose size divides 64.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} lines of 64 bytes", self.0.len())
    }
}
