//! Problems, kernels, and the reasons for which a kernel is not taken: the vocabulary of dispatch.

use crate::format::Format;
use crate::tensor::Float;

/// One product to be computed: what, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Weights and what becomes of the activations; none for dense weights.
    pub format: Option<Format>,
    /// Type of the activations as handed in.
    pub x: Float,
    /// Rows of x.
    pub m: usize,
    /// Outputs.
    pub n: usize,
    /// Length of the reduction.
    pub k: usize,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.format {
            Some(format) => write!(f, "{format}")?,
            None => f.write_str("dense")?,
        }
        write!(f, " with x {} at m={} n={} k={}", self.x, self.m, self.n, self.k)
    }
}

/// Why a kernel does not serve a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(pub String);

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A kernel and why it was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Why not.
    pub reason: Reason,
}
