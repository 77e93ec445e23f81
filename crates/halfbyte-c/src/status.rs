//! What calls answer: a code, and a message for each thread; and the boundary that no panic crosses.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a call answers. `halfbyte_last_error()` has the words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum halfbyte_status {
    /// It is done.
    Ok = 0,
    /// An argument does not fit: a null pointer, a shape, a type, a device, a name. Change the call.
    InvalidArgument = 1,
    /// A file or numbers are not what they must be: malformed, missing, NaN. Change the data.
    BadInput = 2,
    /// The system refuses an operation on a file.
    Io = 3,
    /// It is well-formed, but no kernel serves it, or this version does not read it.
    Unsupported = 4,
    /// A device, its driver, a library that it needs or a thread is not to be had.
    Device = 5,
    /// Memory is short.
    OutOfMemory = 6,
    /// A fault has ended all work of this process on a GPU.
    DeviceLost = 7,
    /// A fault of this library. Please tell its authors.
    Internal = 8,
}

use halfbyte_status as Status;

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    pub status: Status,
    pub message: String,
}

/// The result of what is behind the boundary.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// An argument that does not fit.
    pub fn invalid(what: &str, expected: impl AsRef<str>, got: impl AsRef<str>) -> Self {
        let message = format!("{what}: expected {}, got {}", expected.as_ref(), got.as_ref());
        Self { status: Status::InvalidArgument, message }
    }

    fn of(status: Status, error: &dyn std::error::Error) -> Self {
        Self { status, message: error.to_string() }
    }
}

fn of_numbers(error: &halfbyte::Error) -> Status {
    use halfbyte::Error::*;
    match error {
        Invalid { .. } => Status::InvalidArgument,
        NotFinite { .. } => Status::BadInput,
        NoKernel { .. } => Status::Unsupported,
        Device { .. } | LibraryMissing { .. } | DriverTooOld { .. } | Compile { .. } => Status::Device,
        CacheFull { .. } | Memory { .. } | DeviceMemory { .. } => Status::OutOfMemory,
        DeviceLost { .. } => Status::DeviceLost,
        _ => Status::Internal,
    }
}

/// Numbers that a file holds: what would be a bad argument is a bad file.
fn of_stored_numbers(error: &halfbyte::Error) -> Status {
    match of_numbers(error) {
        Status::InvalidArgument => Status::BadInput,
        other => other,
    }
}

fn of_checkpoint(error: &halfbyte_checkpoint::Error) -> Status {
    use halfbyte_checkpoint::Error::*;
    match error {
        Io { .. } | Exists { .. } | Locked { .. } => Status::Io,
        Malformed { .. } | Missing { .. } | Unrepresentable { .. } => Status::BadInput,
        Unsupported { .. } => Status::Unsupported,
        Invalid { .. } => Status::InvalidArgument,
        Numbers { source, .. } => of_stored_numbers(source),
        _ => Status::Internal,
    }
}

fn of_model(error: &halfbyte_llm::Error) -> Status {
    use halfbyte_llm::Error::*;
    match error {
        Io { .. } | Locked { .. } => Status::Io,
        Config { .. } | Tokenizer(_) | Chat { .. } | Weight { .. } | Text { .. } | Input { .. } | NotFinite(_) => {
            Status::BadInput
        }
        Quantize { source, .. } => of_stored_numbers(source),
        EmptyPrompt | ContextFull { .. } | TextTooLong { .. } | UnknownToken { .. } | Invalid { .. } => {
            Status::InvalidArgument
        }
        Numbers(source) => of_numbers(source),
        Checkpoint(source) => of_checkpoint(source),
        // What ranks, schedulers and unfinished work say: none of them is reached from here.
        _ => Status::Internal,
    }
}

impl From<halfbyte::Error> for Failure {
    fn from(error: halfbyte::Error) -> Self {
        Self::of(of_numbers(&error), &error)
    }
}

impl From<halfbyte_checkpoint::Error> for Failure {
    fn from(error: halfbyte_checkpoint::Error) -> Self {
        Self::of(of_checkpoint(&error), &error)
    }
}

impl From<halfbyte_llm::Error> for Failure {
    fn from(error: halfbyte_llm::Error) -> Self {
        Self::of(of_model(&error), &error)
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What the last call of this thread that failed said, in UTF-8; "" if none has. It stays until another call of this thread fails, or
/// the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_last_error() -> *const c_char {
    // After the thread's end there is no message any more.
    LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |text| text.as_ptr())).unwrap_or(c"".as_ptr())
}

/// The name of a status, as "invalid argument"; of a number that is none, "unknown status".
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_status_name(status: i32) -> *const c_char {
    const NAMES: [&std::ffi::CStr; 9] = [
        c"ok",
        c"invalid argument",
        c"bad input",
        c"file system",
        c"unsupported",
        c"device",
        c"out of memory",
        c"device lost",
        c"internal error",
    ];
    let name = usize::try_from(status).ok().and_then(|status| NAMES.get(status));
    name.unwrap_or(&c"unknown status").as_ptr()
}

fn remember(message: &str) {
    // A zero byte would end the text before its end.
    let text = CString::new(message.replace('\0', "\u{fffd}")).unwrap_or_default();
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| *last = text));
}

/// Runs what a function does; errors and panics become a status and a message.
pub(crate) fn guard(work: impl FnOnce() -> Result<()>) -> Status {
    // What a panic leaves behind is a handle whose locks are poisoned, which every user of them passes over, or nothing at all.
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure { status: Status::Internal, message: said(panic) },
    };
    remember(&failure.message);
    failure.status
}

/// Runs what cannot fail but could panic, as freeing does.
pub(crate) fn guard_quietly<T>(default: T, work: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(value) => value,
        Err(panic) => {
            remember(&said(panic));
            default
        }
    }
}

fn said(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    // Dropping what was thrown may throw again.
    std::mem::forget(panic);
    format!("internal error: {}", text.as_deref().unwrap_or("a panic without words"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the text ends with a zero and stays until the next failure of this thread.
        unsafe { CStr::from_ptr(halfbyte_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn panics_and_errors_become_codes_and_messages_of_the_thread() {
        assert_eq!(last(), "");
        assert_eq!(guard(|| panic!("at {}", 7)), Status::Internal);
        assert_eq!(last(), "internal error: at 7");
        assert_eq!(guard(|| std::panic::panic_any(1u8)), Status::Internal);
        assert_eq!(last(), "internal error: a panic without words");
        assert_eq!(guard(|| Err(Failure::invalid("a", "b\0", "c"))), Status::InvalidArgument);
        assert_eq!(last(), "a: expected b\u{fffd}, got c");
        // A call that succeeds leaves the message, another thread has its own.
        assert_eq!(guard(|| Ok(())), Status::Ok);
        assert_eq!(last(), "a: expected b\u{fffd}, got c");
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(guard_quietly(3, || panic!("gone")), 3);
        assert_eq!(last(), "internal error: gone");
    }

    #[test]
    fn what_a_file_holds_is_never_a_bad_argument() {
        let invalid = || "x".parse::<halfbyte::Format>().unwrap_err();
        assert_eq!(Failure::from(invalid()).status, Status::InvalidArgument);
        let numbers = halfbyte_checkpoint::Error::Numbers { tensor: "t".into(), source: invalid() };
        assert_eq!(Failure::from(numbers).status, Status::BadInput);
        let quantize = halfbyte_llm::Error::Quantize { name: "t".into(), source: invalid() };
        assert_eq!(Failure::from(quantize).status, Status::BadInput);
    }
}
