//! Errors of the library as Python's exceptions: ValueError and TypeError for what the caller gave, MemoryError, OSError for files,
//! RuntimeError for what a device or its libraries refuse.

use halfbyte_checkpoint as checkpoint;
use halfbyte_llm as llm;
use pyo3::exceptions::{
    PyFileExistsError, PyFileNotFoundError, PyKeyboardInterrupt, PyMemoryError, PyRuntimeError, PyValueError,
};
use pyo3::{PyErr, PyResult};

/// Whatever can go wrong, as an exception.
#[derive(Debug)]
pub struct Failure(PyErr);

/// Results whose errors become exceptions.
pub type Result<T> = std::result::Result<T, Failure>;

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

impl From<halfbyte::Error> for Failure {
    fn from(error: halfbyte::Error) -> Self {
        let text = error.to_string();
        Self(of_numbers(&error, text))
    }
}

/// What the library refused, in other words.
fn of_numbers(error: &halfbyte::Error, text: String) -> PyErr {
    use halfbyte::Error::*;
    match error {
        Invalid { .. } | NotFinite { .. } | NoKernel { .. } => PyValueError::new_err(text),
        Memory { .. } | DeviceMemory { .. } => PyMemoryError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

impl From<checkpoint::Error> for Failure {
    fn from(error: checkpoint::Error) -> Self {
        use checkpoint::Error::*;
        let text = error.to_string();
        Self(match error {
            Io { source, .. } => std::io::Error::new(source.kind(), text).into(),
            Missing { path, .. } if !path.exists() => PyFileNotFoundError::new_err(text),
            Exists { .. } => PyFileExistsError::new_err(text),
            Numbers { source, .. } => of_numbers(&source, text),
            Cancelled => PyKeyboardInterrupt::new_err(text),
            Locked { .. } => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        })
    }
}

impl From<llm::Error> for Failure {
    fn from(error: llm::Error) -> Self {
        use llm::Error::*;
        let text = error.to_string();
        Self(match error {
            Io { source, .. } => std::io::Error::new(source.kind(), text).into(),
            Numbers(source) => return source.into(),
            Checkpoint(source) => return source.into(),
            Quantize { source, .. } => of_numbers(&source, text),
            Cancelled => PyKeyboardInterrupt::new_err(text),
            Stopped | Rank { .. } | NotFinite(_) | Locked { .. } => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        })
    }
}

/// An argument that does not fit: ValueError "operation: expected X, got Y".
pub fn invalid<T>(op: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> PyResult<T> {
    Err(PyValueError::new_err(format!("{op}: expected {expected}, got {got}")))
}
