//! One error type for the crate; every text says where, what was expected, and what was found.

use std::path::{Path, PathBuf};

/// Everything that can go wrong between files and tensors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused an operation on a file.
    #[error("{}: cannot {op}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb: "open", "rename".
        op: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what its format demands.
    #[error("{}: {what}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Where in it, what was expected and what was found.
        what: String,
    },
    /// A file or tensor that must be there is not.
    #[error("{}: {what}", path.display())]
    Missing {
        /// The file or folder that was searched.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// Something that is well-formed but that this version does not read.
    #[error("{}: {what}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// What is not read.
        what: String,
    },
    /// A format cannot hold the values that it was given.
    #[error("tensor `{tensor}`: {scheme} cannot hold it: {reason}")]
    Unrepresentable {
        /// Name of the tensor or module.
        tensor: String,
        /// The format that refused.
        scheme: &'static str,
        /// Why.
        reason: String,
    },
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
    /// The target of a write is already there.
    #[error("{}: already exists{why}", path.display())]
    Exists {
        /// The file or folder.
        path: PathBuf,
        /// Why it is not replaced, with a leading separator; may be empty.
        why: String,
    },
    /// Another process writes to the same target.
    #[error("{}: another process is writing there", path.display())]
    Locked {
        /// The folder in which it works.
        path: PathBuf,
    },
    /// The caller asked to stop; nothing was left under a final name.
    #[error("cancelled; nothing was written")]
    Cancelled,
    /// The numbers of a tensor were refused.
    #[error("tensor `{tensor}`: {source}")]
    Numbers {
        /// Name of the tensor or module.
        tensor: String,
        /// The refusal.
        source: halfbyte::Error,
    },
}

impl Error {
    pub(crate) fn io(op: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { op, path, source }
    }

    pub(crate) fn malformed(file: &Path, what: impl Into<String>) -> Self {
        Self::Malformed { file: file.to_owned(), what: what.into() }
    }

    pub(crate) fn missing(path: &Path, what: impl Into<String>) -> Self {
        Self::Missing { path: path.to_owned(), what: what.into() }
    }

    pub(crate) fn unsupported(file: &Path, what: impl Into<String>) -> Self {
        Self::Unsupported { file: file.to_owned(), what: what.into() }
    }

    pub(crate) fn invalid(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Invalid { op, expected: expected.into(), got: got.into() }
    }

    pub(crate) fn numbers(tensor: &str) -> impl FnOnce(halfbyte::Error) -> Self {
        let tensor = tensor.to_owned();
        move |source| Self::Numbers { tensor, source }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
