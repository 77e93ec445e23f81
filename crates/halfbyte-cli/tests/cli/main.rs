//! The built program, as a shell sees it.

mod bench;
mod calibration;
mod files;
mod models;
mod support;
mod usage;
