//! One error type for the library, divided by what the caller can do about it.

use crate::kernel::Rejection;

/// Everything that can go wrong in this crate.
///
/// Every text reads "operation: expected X, got Y".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument does not fit the operation: change the call.
    #[error("{op}: expected {expected}, got {got}")]
    Invalid {
        /// The operation that refused.
        op: &'static str,
        /// What it would have taken.
        expected: String,
        /// What it was given.
        got: String,
    },
    /// The data holds NaN or infinity where a finite number is needed.
    #[error("{op}: expected finite numbers, got {value} at row {row}, column {column}")]
    NotFinite {
        /// The operation that refused.
        op: &'static str,
        /// The offending value as text (NaN, inf, -inf).
        value: String,
        /// Row of the first offending element.
        row: usize,
        /// Column of the first offending element.
        column: usize,
    },
    /// No kernel serves the problem; each one's reason is listed.
    #[error("matmul: expected a problem that some kernel serves, got {problem}{}", list(.rejections))]
    NoKernel {
        /// The problem as text.
        problem: String,
        /// Every kernel with its reason.
        rejections: Vec<Rejection>,
    },
    /// A device, or its memory, is not to be had.
    #[error("{op}: {cause}")]
    Device {
        /// The operation that failed.
        op: &'static str,
        /// What the system said.
        cause: String,
    },
}

fn list(rejections: &[Rejection]) -> String {
    rejections.iter().map(|r| format!("\n  {}: {}", r.kernel, r.reason)).collect()
}

impl Error {
    pub(crate) fn invalid(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Invalid { op, expected: expected.into(), got: got.into() }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
