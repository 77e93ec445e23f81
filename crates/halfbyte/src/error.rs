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
    #[error("{op}: expected a problem that some kernel serves, got {problem}{}", list(.rejections))]
    NoKernel {
        /// The operation that was called.
        op: &'static str,
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
    /// A cache of keys and values has no pages left: end other sequences, or make a larger cache.
    #[error("kv cache: expected room for {needed} more positions, got {free}")]
    CacheFull {
        /// Positions in the pages that were asked for.
        needed: usize,
        /// Positions in the pages that no sequence has.
        free: usize,
    },
    /// A library that is opened at run time is nowhere: install it, or say where it lies.
    #[error("{library}: expected it in one of these places, got none that can be opened{}", lines(.looked))]
    LibraryMissing {
        /// The library as its maker calls it.
        library: &'static str,
        /// Every place looked at, with what was wrong there.
        looked: Vec<String>,
    },
    /// The GPU's driver is older than what is asked of it: update it, or use older libraries.
    #[error("{op}: expected a driver for CUDA {needed} or later, got one for CUDA {found}")]
    DriverTooOld {
        /// The operation that needs more.
        op: &'static str,
        /// The oldest CUDA version that would do.
        needed: String,
        /// The CUDA version of the driver.
        found: String,
    },
    /// The system has less memory than is asked for.
    #[error("{op}: expected {requested_bytes} bytes of memory, got less")]
    Memory {
        /// The operation that needs memory.
        op: &'static str,
        /// Bytes asked for.
        requested_bytes: usize,
    },
    /// A GPU has less memory free than is asked for.
    #[error("{op}: expected {}, got {free_bytes} bytes free", device_memory(*requested_bytes))]
    DeviceMemory {
        /// The operation that needs memory.
        op: &'static str,
        /// Bytes asked for; 0 if the driver needed them for itself.
        requested_bytes: usize,
        /// Bytes free at that time.
        free_bytes: usize,
    },
    /// A GPU is gone, or a fault has ended all work of this process on it: only a new process can go on.
    #[error("{op}: expected a device that works, got {cause}; this process cannot use it any more")]
    DeviceLost {
        /// The operation that learned of it; the fault may lie in an earlier one.
        op: &'static str,
        /// What the driver said.
        cause: String,
    },
    /// The compiler refuses a kernel.
    #[error("compile {kernel} for {arch}: expected machine code, got\n{log}")]
    Compile {
        /// The kernel's file and instantiation.
        kernel: String,
        /// The processor it was compiled for.
        arch: String,
        /// What the compiler said.
        log: String,
    },
}

fn device_memory(bytes: usize) -> String {
    match bytes {
        0 => "the device memory that the driver itself needs".into(),
        _ => format!("{bytes} bytes of device memory"),
    }
}

fn lines(looked: &[String]) -> String {
    looked.iter().map(|place| format!("\n  {place}")).collect()
}

fn list(rejections: &[Rejection]) -> String {
    rejections.iter().map(|r| format!("\n  {}: {}", r.kernel, r.reason)).collect()
}

impl Error {
    pub(crate) fn invalid(op: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self::Invalid { op, expected: expected.into(), got: got.into() }
    }

    /// The same said of the operation that the caller called, not of the part of it that refused.
    pub(crate) fn of(self, op: &'static str) -> Self {
        match self {
            Self::Invalid { expected, got, .. } => Self::Invalid { op, expected, got },
            Self::Memory { requested_bytes, .. } => Self::Memory { op, requested_bytes },
            Self::NoKernel { problem, rejections, .. } => Self::NoKernel { op, problem, rejections },
            other => other,
        }
    }
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
