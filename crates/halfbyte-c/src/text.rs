//! Strings of callers.

use crate::handle::null;
use crate::status::{Failure, Result};
use std::ffi::{CStr, c_char};

/// A string that ends with a zero, in UTF-8.
///
/// # Safety
/// `pointer` is null, or a string that ends with a zero and stays for `'a`.
pub(crate) unsafe fn text<'a>(what: &str, pointer: *const c_char) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(null(what));
    }
    // SAFETY: not null; the caller vouches for the zero at its end.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str()
        .map_err(|e| Failure::invalid(what, "text in UTF-8", format!("other bytes from byte {} on", e.valid_up_to())))
}
