//! The built program, as a shell sees it.

mod bench;
mod calibration;
mod files;
mod models;
#[cfg(unix)]
mod outputs;
mod support;
mod usage;
