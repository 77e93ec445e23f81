//! Versions of the interface and of the library.

use std::ffi::c_char;

/// The version of this interface, which changes only when something that was there breaks. What the library was built with is
/// `halfbyte_abi_version()`.
pub const HALFBYTE_ABI_VERSION: u32 = 1;

/// The version of the interface that the library has: a program compares it with HALFBYTE_ABI_VERSION of its header.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_abi_version() -> u32 {
    HALFBYTE_ABI_VERSION
}

/// The version of the library, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
